//! CPUs with a clock each. One of them runs at a time, and it is the one that is furthest behind that does something
//! which depends on the order.
//!
//! Accesses to lines that are nobody else's may run ahead, by [`AHEAD`] at the most: others cannot tell. So there are few
//! changes of turns where little is shared, and where much is, everything happens in the order of the clocks, but for
//! [`GRASP`]: a CPU that has a line does with it what it has at hand before others get it.

use std::collections::HashMap;

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

/// Deadlines that never come.
pub const NEVER: u64 = u64::MAX;

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
    pub fn access(&mut self, cpu: usize, number: u64, writes: bool, pc: u64) -> Turn {
        if self.cpus[cpu].hidden {
            // But for those who wait for it.
            if writes && self.watching > 0 {
                self.written(number, self.cpus[cpu].clock);
            }
            return None;
        }
        let look = self.lines.look(number, cpu, writes);
        if let Some(next) = self.after(cpu, if look.ordered { GRASP } else { AHEAD }) {
            return Some(next);
        }
        let Machine { access, memory, near, far, .. } = self.machine;
        let latency = match look.source {
            Source::Own => 0,
            Source::Memory => memory,
            Source::Near => near,
            Source::Far => far,
        };
        let this = &mut self.cpus[cpu];
        this.clock = self.lines.access(number, cpu, writes, this.clock, latency) + access;
        this.figures.accesses += 1;
        let now = this.clock;
        if writes {
            this.loads = [(0, 0); LOADS];
            if self.watching > 0 {
                self.written(number, now);
            }
        }
        let this = &mut self.cpus[cpu];
        if matches!(look.source, Source::Near | Source::Far) {
            this.figures.transfers += 1;
            this.figures.far += u64::from(look.source == Source::Far);
            if this.counts && self.machine.sites > 0 {
                let mut frames = [0; FRAMES];
                frames[0] = pc;
                for (frame, caller) in frames[1..].iter_mut().zip(this.callers.iter().rev()) {
                    *frame = *caller;
                }
                *self.sites.entry(frames).or_default() += 1;
            }
        }
        None
    }

    /// The access that follows is an atomic read-modify-write, or a fence passes.
    #[inline]
    pub fn atomic(&mut self, cpu: usize) {
        let this = &mut self.cpus[cpu];
        if !this.hidden {
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
            let time = self.about(self.machine.spin);
            self.cpus[cpu].clock += time;
            self.cpus[cpu].loads = [(0, 0); LOADS];
        }
        let this = &mut self.cpus[cpu];
        this.loads.rotate_right(1);
        this.loads[0] = (address, pc);
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
        self.cpus[cpu].clock += time;
        self.after(cpu, 0)
    }

    /// Work of `time` for `server`, which does one after the other: `Ok` when it is done, `Err` with whose turn it is
    /// before that.
    pub fn serve(&mut self, cpu: usize, server: u32, time: u64) -> Result<(), usize> {
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
mod tests {
    use super::*;

    fn two() -> Cpus {
        let mut cpus = Cpus::new(Machine::server(2, 64));
        assert!(!cpus.arrive(0) && cpus.arrive(1));
        assert_eq!(cpus.next(), Some(0));
        cpus
    }

    #[test]
    fn the_one_that_is_furthest_behind_runs() {
        let mut cpus = two();
        // The second begins 37 ns later.
        assert_eq!(cpus.pass(0, 37_000), None);
        assert_eq!(cpus.pass(0, 1), Some(1));
        assert_eq!(cpus.next(), Some(1));
        assert_eq!(cpus.pass(1, 2), Some(0));
    }

    #[test]
    fn ones_own_lines_may_be_touched_ahead_of_the_others_and_shared_ones_may_not() {
        let mut cpus = two();
        cpus.cpus[0].clock = 500_000;
        assert_eq!(cpus.access(0, 7, true, 0), None);
        cpus.lines.access(7, 1, true, 0, 0);
        assert_eq!(cpus.access(0, 7, true, 0), Some(1));
        // The other one looks, and lets it go on.
        assert_eq!(cpus.pass(1, 0), None);
        assert_eq!(cpus.pass(1, 600_000), Some(0));
        cpus.cpus[0].clock += AHEAD + 200_000;
        assert_eq!(cpus.access(0, 8, true, 0), Some(1));
    }

    #[test]
    fn transfers_are_counted_where_they_happen() {
        let mut cpus = two();
        cpus.machine.sites = 1;
        cpus.begin(0);
        cpus.begin(1);
        assert_eq!(cpus.access(0, 7, true, 1), None);
        cpus.call(1, 99);
        cpus.others = NEVER;
        assert_eq!((cpus.access(1, 7, true, 2), cpus.access(1, 7, false, 3)), (None, None));
        cpus.atomic(1);
        assert_eq!(cpus.end(0), Figures { time: 5_200, accesses: 1, ..Figures::default() });
        let expected = Figures { time: 66_400, accesses: 2, transfers: 1, far: 0, atomics: 1 };
        assert_eq!(cpus.end(1), expected);
        assert_eq!(cpus.sites(), [Site { count: 1, frames: [2, 99, 0, 0, 0, 0, 0, 0] }]);
    }

    #[test]
    fn a_server_does_one_after_the_other() {
        let mut cpus = two();
        assert_eq!(cpus.serve(0, 0, 1_000_000), Ok(()));
        assert_eq!(cpus.serve(0, 0, 1), Err(1));
        assert_eq!(cpus.serve(1, 0, 1_000_000), Ok(()));
        assert_eq!(cpus.clock(1), 2_000_000);
    }

    #[test]
    fn sleepers_are_woken_or_their_time_comes() {
        let mut cpus = two();
        assert_eq!(cpus.sleep(0, 16, NEVER), Some(1));
        assert_eq!((cpus.wake(1, 8, 1), cpus.wake(1, 16, 9)), (0, 1));
        assert_eq!(cpus.clock(1), 537_000);
        assert!((1_537_000..=3_537_000).contains(&cpus.clock(0)), "{}", cpus.clock(0));
        assert_eq!(cpus.sleep(1, 16, 4_000_000), Some(0));
        assert_eq!(cpus.sleep(0, 16, NEVER), Some(1));
        assert_eq!(cpus.clock(1), 4_000_000);
        // Nobody would ever run again.
        assert_eq!(cpus.sleep(1, 16, NEVER), None);
    }

    #[test]
    fn who_watches_a_line_goes_on_when_it_is_written() {
        let mut cpus = two();
        // It has no copy of the line: somebody has written it.
        assert_eq!(cpus.watch(0, 7), Some(0));
        assert_eq!(cpus.access(0, 7, false, 0), None);
        assert_eq!(cpus.watch(0, 7), Some(1));
        assert_eq!(cpus.pass(1, 500_000), None);
        assert_eq!(cpus.access(1, 8, true, 0), None);
        assert_eq!(cpus.next(), Some(1));
        assert_eq!(cpus.access(1, 7, true, 0), None);
        assert_eq!((cpus.clock(0), cpus.watching), (cpus.clock(1), 0));
        // Nobody is left to write it.
        cpus.watch(1, 7);
        assert_eq!(cpus.access(0, 7, false, 0), None);
        assert_eq!(cpus.watch(0, 7), None);
    }

    #[test]
    fn loads_that_repeat_are_turns_of_a_loop_unless_something_was_written() {
        let mut cpus = two();
        cpus.others = NEVER;
        let mut load = |pc, writes| {
            cpus.access(0, 7, writes, pc);
            let before = cpus.clock(0);
            cpus.load(0, 7 * 64, pc);
            cpus.clock(0) - before
        };
        let turns = |loads: [u64; 3]| loads.map(|time| (20_000..=60_000).contains(&time));
        assert_eq!(turns([load(1, false), load(1, false), load(2, false)]), [false, true, false]);
        assert_eq!(turns([load(1, false), load(2, false), load(2, true)]), [true, false, false]);
    }
}
