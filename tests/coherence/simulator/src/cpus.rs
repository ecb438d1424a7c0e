//! CPUs with a clock each. One of them runs at a time, and it is the one that is furthest behind that does something
//! which depends on the order.
//!
//! Accesses to lines that are nobody else's may run ahead, by [`AHEAD`] at the most: others cannot tell. So there are few
//! changes of turns where little is shared, and where much is, everything happens in the order of the clocks, but for
//! [`GRASP`]: a CPU that has a line does with it what it has at hand before others get it.

use std::collections::{HashMap, VecDeque};

use crate::interface::{FRAMES, Figures, Machine, Site};
use crate::lines::{Lines, MOST_CPUS, Source};

/// Picoseconds that a CPU may be ahead of the others with what they cannot tell.
const AHEAD: u64 = 1_000_000;

/// Picoseconds that a CPU may be ahead of the others with what they can tell.
const GRASP: u64 = 20_000;

/// Loads of atomics in a loop that waits for another CPU, at the most.
const LOADS: usize = 4;

/// Picoseconds after which there is no hope: a CPU waits for another in vain, which is still running.
const END: u64 = 1_000_000_000_000;

/// Lines that a CPU fetches at once, at the most, of those that it was told to fetch before it needs them, and of those to which its
/// stores go. Cores have 10 (Intel's Skylake) to 16 buffers for lines on their way (Golden Cove), and AMD's Zen 3 has 24.
const FETCHES: usize = 10;

/// Deadlines that never come.
pub const NEVER: u64 = u64::MAX;

/// What a CPU does with a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    /// A plain store: the CPU goes on while its line comes.
    Write,
    /// An atomic read-modify-write, or a store that is followed by a fence: all stores before it are done first.
    Update,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not there yet, or gone.
    Away,
    /// May run.
    Ready,
    /// Sleeps until this address is woken, or the time has come.
    Asleep { address: usize, until: u64 },
    /// Looks at this line until somebody writes it.
    Watching(u64),
}

struct Cpu {
    state: State,
    clock: u64,
    figures: Figures,
    before: Figures,
    counts: bool,
    /// Nothing that it does is seen.
    hidden: bool,
    /// Lines on their way that it was told to fetch, and when they are there.
    fetches: Vec<(u64, u64)>,
    /// When its stores whose lines are on their way are done. They become visible in their order.
    stores: VecDeque<u64>,
    /// The last loads of atomics since it wrote anything: address and instruction.
    loads: [(usize, u64); LOADS],
    /// Return addresses of the functions that it is in.
    callers: Vec<u64>,
}

/// The machine while a program runs on it.
pub struct Cpus {
    pub machine: Machine,
    lines: Lines,
    cpus: Vec<Cpu>,
    /// The clock of the CPU that is furthest behind, but for the one that runs.
    others: u64,
    servers: HashMap<u32, u64>,
    /// CPUs that watch a line.
    watching: usize,
    sites: HashMap<[u64; FRAMES], u64>,
    /// When the timer is due.
    timer: u64,
    /// The last number of a series that looks random, and is the same in each run.
    random: u64,
    pub arrived: usize,
    pub left: usize,
    pub ended: usize,
}

/// Somebody else's turn has come: the number of that CPU.
pub type Turn = Option<usize>;

impl Cpus {
    pub fn new(machine: Machine) -> Self {
        let cpus = (machine.cpus as usize).clamp(1, MOST_CPUS);
        let cpu = |index| Cpu {
            state: State::Away,
            // They do not begin in step.
            clock: index as u64 * 37_000,
            figures: Figures::default(),
            before: Figures::default(),
            counts: false,
            hidden: false,
            fetches: Vec::with_capacity(FETCHES),
            stores: VecDeque::with_capacity(FETCHES),
            loads: [(0, 0); LOADS],
            callers: Vec::new(),
        };
        Self {
            machine,
            lines: Lines::new(machine.per_socket as usize, machine.answer),
            cpus: (0..cpus).map(cpu).collect(),
            others: 0,
            servers: HashMap::new(),
            watching: 0,
            sites: HashMap::new(),
            timer: NEVER,
            random: 1,
            arrived: 0,
            left: 0,
            ended: 0,
        }
    }

    /// Half of `time` to one and a half: without, CPUs that wait for each other would stay in step, and one might never get
    /// what others take in turns.
    fn about(&mut self, time: u64) -> u64 {
        // Marsaglia, "Xorshift RNGs" (2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        time / 2 + self.random % (time + 1)
    }

    pub fn count(&self) -> usize {
        self.cpus.len()
    }

    /// Whose turn it is: the CPU that is furthest behind, of those that are there. It is awake from now on.
    pub fn next(&mut self) -> Turn {
        let mut first: Option<(u64, usize)> = None;
        let mut second = NEVER;
        for (index, cpu) in self.cpus.iter().enumerate() {
            let at = match cpu.state {
                State::Away => NEVER,
                State::Ready => cpu.clock,
                State::Asleep { until, .. } => until,
                State::Watching(_) => NEVER,
            };
            match first {
                _ if at == NEVER => {}
                Some((least, _)) if at >= least => second = second.min(at),
                _ => {
                    second = first.map_or(second, |(least, _)| least);
                    first = Some((at, index));
                }
            }
        }
        self.others = second;
        let (at, index) = first?;
        assert!(at < END, "the program comes to no end");
        let cpu = &mut self.cpus[index];
        (cpu.state, cpu.clock) = (State::Ready, at);
        Some(index)
    }

    /// Whose turn it is where `cpu` may be `ahead` of the others and no more. It must be given then.
    fn after(&mut self, cpu: usize, ahead: u64) -> Turn {
        if self.cpus[cpu].clock <= self.others.saturating_add(ahead) {
            return None;
        }
        self.next().filter(|next| *next != cpu)
    }

    /// `cpu` is there.
    pub fn arrive(&mut self, cpu: usize) -> bool {
        self.cpus[cpu].state = State::Ready;
        self.arrived += 1;
        self.arrived == self.cpus.len()
    }

    /// `cpu` is gone.
    pub fn leave(&mut self, cpu: usize) -> Turn {
        self.cpus[cpu].state = State::Away;
        self.left += 1;
        self.next()
    }

    /// One access to line `number`, unless somebody else's turn has come: then it is tried again afterwards.
    #[inline]
    pub fn access(&mut self, cpu: usize, number: u64, kind: Access, pc: u64) -> Turn {
        let writes = kind != Access::Read;
        if self.cpus[cpu].hidden {
            // But for those who wait for it, or are about to.
            if writes {
                self.lines.forget(number);
                if self.watching > 0 {
                    self.written(number, self.cpus[cpu].clock);
                }
            }
            return None;
        }
        if kind == Access::Update {
            self.drain(cpu);
        }
        let look = self.lines.look(number, cpu, writes);
        if let Some(next) = self.after(cpu, if look.ordered { GRASP } else { AHEAD }) {
            return Some(next);
        }
        if !self.cpus[cpu].fetches.is_empty() {
            self.arrives(cpu, number, look.source);
        }
        let latency = self.latency(look.source);
        // What memory costs is its bandwidth, which nobody hides.
        if kind == Access::Write && look.source != Source::Memory {
            self.store(cpu, number, look.source, latency);
        } else {
            let this = &mut self.cpus[cpu];
            this.clock = self.lines.access(number, cpu, writes, this.clock, latency);
        }
        let access = self.machine.access;
        let this = &mut self.cpus[cpu];
        this.clock += access;
        this.figures.accesses += 1;
        let now = this.clock;
        if writes {
            this.loads = [(0, 0); LOADS];
            if self.watching > 0 {
                self.written(number, now);
            }
        }
        self.transferred(cpu, look.source, pc);
        None
    }

    /// `cpu` stores to line `number`, and goes on meanwhile. The store is done when the line is there and the stores before it are
    /// done; nobody else has the line before that. Where [`FETCHES`] lines are on their way, it first waits for one of them.
    fn store(&mut self, cpu: usize, number: u64, source: Source, latency: u64) {
        let this = &mut self.cpus[cpu];
        let now = this.clock;
        while this.stores.front().is_some_and(|at| *at <= now) {
            this.stores.pop_front();
        }
        let is_own = source == Source::Own;
        if !is_own && this.stores.len() == FETCHES {
            this.clock = this.stores.pop_front().unwrap_or(now);
        }
        let before = this.stores.back().copied().unwrap_or_default();
        let done = self.lines.access(number, cpu, true, this.clock, latency).max(before);
        if done > this.clock {
            self.lines.keep(number, done);
            if !is_own {
                this.stores.push_back(done);
            }
        }
    }

    /// `cpu` waits until all its stores are done.
    fn drain(&mut self, cpu: usize) {
        let this = &mut self.cpus[cpu];
        this.clock = this.clock.max(this.stores.back().copied().unwrap_or_default());
        this.stores.clear();
    }

    /// `cpu` is told to fetch line `number`, and goes on meanwhile: an access waits for what is left of the transfer then. Where
    /// [`FETCHES`] lines are on their way, it first waits for one of them.
    pub fn fetch(&mut self, cpu: usize, number: u64, pc: u64) -> Turn {
        if self.cpus[cpu].hidden {
            return None;
        }
        let look = self.lines.look(number, cpu, false);
        if let Some(next) = self.after(cpu, if look.ordered { GRASP } else { AHEAD }) {
            return Some(next);
        }
        self.cpus[cpu].clock += self.machine.access;
        if look.source == Source::Own {
            return None;
        }
        let latency = self.latency(look.source);
        let this = &mut self.cpus[cpu];
        let now = this.clock;
        this.fetches.retain(|fetch| fetch.1 > now);
        if this.fetches.len() == FETCHES {
            let first = this.fetches.iter().enumerate().min_by_key(|(_, fetch)| fetch.1);
            if let Some((index, (_, at))) = first.map(|(index, fetch)| (index, *fetch)) {
                this.clock = at;
                this.fetches.swap_remove(index);
            }
        }
        let at = self.lines.access(number, cpu, false, this.clock, latency);
        this.fetches.retain(|fetch| fetch.0 != number);
        this.fetches.push((number, at));
        self.transferred(cpu, look.source, pc);
        None
    }

    /// `cpu` accesses line `number`, which may be on its way, unless others have taken it again.
    #[cold]
    fn arrives(&mut self, cpu: usize, number: u64, source: Source) {
        let this = &mut self.cpus[cpu];
        if let Some(index) = this.fetches.iter().position(|fetch| fetch.0 == number) {
            let (_, at) = this.fetches.swap_remove(index);
            // A write of a line of which others have copies waits for the copy, too, and then for them.
            if source == Source::Own {
                this.clock = this.clock.max(at);
            }
        }
    }

    fn latency(&self, source: Source) -> u64 {
        let Machine { memory, near, far, .. } = self.machine;
        match source {
            Source::Own => 0,
            Source::Memory => memory,
            Source::Near => near,
            Source::Far => far,
        }
    }

    /// A line came from `source`.
    #[inline]
    fn transferred(&mut self, cpu: usize, source: Source, pc: u64) {
        let this = &mut self.cpus[cpu];
        if matches!(source, Source::Near | Source::Far) {
            this.figures.transfers += 1;
            this.figures.far += u64::from(source == Source::Far);
            if this.counts && self.machine.sites > 0 {
                let mut frames = [0; FRAMES];
                frames[0] = pc;
                for (frame, caller) in frames[1..].iter_mut().zip(this.callers.iter().rev()) {
                    *frame = *caller;
                }
                *self.sites.entry(frames).or_default() += 1;
            }
        }
    }

    /// The access that follows is an atomic read-modify-write, or a fence passes.
    #[inline]
    pub fn atomic(&mut self, cpu: usize) {
        if !self.cpus[cpu].hidden {
            self.drain(cpu);
            let this = &mut self.cpus[cpu];
            this.clock += self.machine.atomic;
            this.figures.atomics += 1;
        }
    }

    /// The access was the load of an atomic. One that is repeated by the same instruction, when nothing was written in
    /// between, is a turn of a loop that waits for another CPU.
    #[inline]
    pub fn load(&mut self, cpu: usize, address: usize, pc: u64) {
        let (turn, this) = (self.cpus[cpu].loads.contains(&(address, pc)), &self.cpus[cpu]);
        if turn && !this.hidden {
            self.spin(cpu);
        }
        let this = &mut self.cpus[cpu];
        this.loads.rotate_right(1);
        this.loads[0] = (address, pc);
    }

    /// A turn of a loop that waits for another CPU: the code says so, or [`load`](Self::load) has seen it.
    pub fn spin(&mut self, cpu: usize) {
        let time = self.about(self.machine.spin);
        self.cpus[cpu].clock += time;
        self.cpus[cpu].loads = [(0, 0); LOADS];
    }

    /// A function is entered by the call before `caller`.
    #[inline]
    pub fn call(&mut self, cpu: usize, caller: u64) {
        if self.machine.sites > 0 {
            self.cpus[cpu].callers.push(caller);
        }
    }

    #[inline]
    pub fn returns(&mut self, cpu: usize) {
        if self.machine.sites > 0 {
            self.cpus[cpu].callers.pop();
        }
    }

    /// `time` passes, and the next access sees to it that others catch up.
    pub fn spend(&mut self, cpu: usize, time: u64) {
        self.cpus[cpu].clock += time;
    }

    /// Others run meanwhile, if the scheduler has any.
    pub fn reschedule(&mut self, cpu: usize) -> Turn {
        let time = self.about(self.machine.reschedule);
        self.pass(cpu, time)
    }

    /// `time` passes.
    pub fn pass(&mut self, cpu: usize, time: u64) -> Turn {
        self.drain(cpu);
        self.cpus[cpu].clock += time;
        self.after(cpu, 0)
    }

    /// Work of `time` for `server`, which does one after the other: `Ok` when it is done, `Err` with whose turn it is
    /// before that.
    pub fn serve(&mut self, cpu: usize, server: u32, time: u64) -> Result<(), usize> {
        self.drain(cpu);
        if let Some(next) = self.after(cpu, 0) {
            return Err(next);
        }
        let free_at = self.servers.entry(server).or_default();
        let this = &mut self.cpus[cpu];
        this.clock = this.clock.max(*free_at) + time;
        *free_at = this.clock;
        Ok(())
    }

    /// All other CPUs are interrupted.
    pub fn interrupt(&mut self, cpu: usize) {
        let Machine { barrier, interrupt, .. } = self.machine;
        for (index, other) in self.cpus.iter_mut().enumerate() {
            other.clock += if index == cpu { barrier } else { interrupt };
        }
        // Nobody else can be earlier than before.
        self.others = self.others.saturating_add(interrupt);
    }

    /// Sleeps.
    pub fn sleep(&mut self, cpu: usize, address: usize, until: u64) -> Turn {
        self.cpus[cpu].state = State::Asleep { address, until };
        self.next()
    }

    /// Looks at `line` until somebody writes it: not at all, where that has happened since `cpu` read it.
    pub fn watch(&mut self, cpu: usize, line: u64) -> Turn {
        if !self.cpus[cpu].hidden && !self.lines.holds(line, cpu) {
            return Some(cpu);
        }
        self.cpus[cpu].state = State::Watching(line);
        self.watching += 1;
        self.next()
    }

    /// Those that watch `line` see that it was written at `now`: their next look fetches it.
    fn written(&mut self, line: u64, now: u64) {
        for other in &mut self.cpus {
            if other.state == State::Watching(line) {
                other.state = State::Ready;
                other.clock = other.clock.max(now);
                self.others = self.others.min(other.clock);
                self.watching -= 1;
            }
        }
    }

    /// Wakes up to `count` of those that sleep on `address`; how many those were.
    pub fn wake(&mut self, cpu: usize, address: usize, count: usize) -> usize {
        let mut woken = 0;
        while woken < count {
            let sleeps =
                |other: &Cpu| matches!(other.state, State::Asleep { address: at, .. } if at == address);
            let sleepers = self.cpus.iter().enumerate().filter(|(_, other)| sleeps(other));
            let Some(first) = sleepers.min_by_key(|(_, other)| other.clock).map(|(index, _)| index) else {
                break;
            };
            if woken == 0 {
                self.cpus[cpu].clock += self.machine.wake;
            }
            let (now, time) = (self.cpus[cpu].clock, self.about(self.machine.awake));
            let other = &mut self.cpus[first];
            other.state = State::Ready;
            other.clock = other.clock.max(now) + time;
            self.others = self.others.min(other.clock);
            woken += 1;
        }
        woken
    }

    /// The time of `cpu`.
    pub fn clock(&self, cpu: usize) -> u64 {
        self.cpus[cpu].clock
    }

    pub fn hide(&mut self, cpu: usize, hidden: bool) {
        self.cpus[cpu].hidden = hidden;
    }

    /// What `cpu` does from now on counts.
    pub fn begin(&mut self, cpu: usize) {
        let this = &mut self.cpus[cpu];
        this.before = Figures { time: this.clock, ..this.figures };
        this.counts = true;
    }

    /// What it did since then.
    pub fn end(&mut self, cpu: usize) -> Figures {
        self.ended += 1;
        let this = &mut self.cpus[cpu];
        this.counts = false;
        let (now, before) = (this.figures, this.before);
        Figures {
            time: this.clock - before.time,
            accesses: now.accesses - before.accesses,
            transfers: now.transfers - before.transfers,
            far: now.far - before.far,
            atomics: now.atomics - before.atomics,
        }
    }

    /// Asks for the timer, if it is not asked for earlier.
    pub fn wake_at(&mut self, at: u64) {
        self.timer = self.timer.min(at);
    }

    /// Whether the timer is due. It is asked for no more then.
    pub fn timer_is_due(&mut self, cpu: usize) -> bool {
        let due = self.cpus[cpu].clock >= self.timer;
        if due {
            self.timer = NEVER;
        }
        due
    }

    /// The instructions that transferred the most lines, the worst first.
    pub fn sites(&self) -> Vec<Site> {
        let site = |(frames, count): (&[u64; FRAMES], &u64)| Site { count: *count, frames: *frames };
        let mut sites: Vec<Site> = self.sites.iter().map(site).collect();
        // By address where the count is the same, so that it is the same in each run.
        sites.sort_unstable_by(|a, b| b.count.cmp(&a.count).then(a.frames.cmp(&b.frames)));
        sites
    }
}

#[cfg(test)]
mod tests;
