//! The model: levels of bytes, integrated at every step, and how far off a sampled clock may be.

/// Byte-nanoseconds of both kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    pub used: u128,
    pub neighbour: u128,
}

/// The clock is read about so often while numbers change, in nanoseconds, and for each 64th change at the latest.
const READ_EVERY_NS: u64 = 65_536;
const MOST_CHANGES: u64 = 64;

/// When the clock is read next: the rule as it is documented.
#[derive(Debug, Clone, Default)]
struct Readings {
    last_ns: u64,
    /// Changes from one reading to the next.
    every: u64,
    /// Changes until the next.
    left: u64,
}

impl Readings {
    /// The clock is read, which says how fast changes come: at most twice as many may pass as before.
    fn read(&mut self, now_ns: u64) {
        let every = self.every.max(1);
        let took_ns = (now_ns - self.last_ns).max(1);
        self.every = (every * READ_EVERY_NS / took_ns).clamp(1, MOST_CHANGES.min(2 * every));
        self.last_ns = now_ns;
    }

    /// There is a change. Whether the clock is read for it.
    fn change(&mut self, now_ns: u64) -> bool {
        if self.left > 0 {
            self.left -= 1;
            return false;
        }
        self.read(now_ns);
        self.left = self.every - 1;
        true
    }
}

/// A number of bytes since the clock was last read for it.
#[derive(Debug, Clone, Default)]
struct Span {
    now: i128,
    least: i128,
    most: i128,
    /// Time since the last reading.
    ns: u128,
    /// The sum of all spans before: most less least, times time.
    error: u128,
}

impl Span {
    fn change(&mut self, by: i128) {
        self.now += by;
        self.least = self.least.min(self.now);
        self.most = self.most.max(self.now);
    }

    fn open_error(&self) -> u128 {
        self.most.abs_diff(self.least) * self.ns
    }

    /// The clock is read, before a change or after it.
    fn read(&mut self) {
        self.error += self.open_error();
        (self.least, self.most, self.ns) = (self.now, self.now, 0);
    }

    /// All that may be wrong by now.
    fn error(&self) -> u128 {
        self.error + self.open_error()
    }
}

/// One deferred queue.
#[derive(Debug, Clone, Default)]
struct Queue {
    /// Bytes of buffers and beside them, and since when they wait.
    waiting: Vec<(u64, u64, u64)>,
    used: Span,
    neighbour: Span,
    readings: Readings,
    /// Something has been queued since a flush last began.
    has_new: bool,
}

/// One CPU's mappings.
#[derive(Debug, Clone, Default)]
struct Cpu {
    neighbour: Span,
    readings: Readings,
}

pub struct Plain {
    now_ns: u64,
    queues: Vec<Queue>,
    cpus: Vec<Cpu>,
    exact: Tally,
    longest_ns: u64,
    readings: u128,
}

impl Plain {
    pub fn new(queues: usize, cpus: usize) -> Self {
        Self {
            now_ns: 0,
            queues: vec![Queue::default(); queues],
            cpus: vec![Cpu::default(); cpus],
            exact: Tally::default(),
            longest_ns: 0,
            readings: 0,
        }
    }

    pub fn advance(&mut self, ns: u64) {
        self.now_ns += ns;
        let ns = u128::from(ns);
        for queue in &mut self.queues {
            self.exact.used += queue.used.now.unsigned_abs() * ns;
            self.exact.neighbour += queue.neighbour.now.unsigned_abs() * ns;
            queue.used.ns += ns;
            queue.neighbour.ns += ns;
        }
        // One CPU's share may be below zero, the sum is not.
        let live: i128 = self.cpus.iter().map(|cpu| cpu.neighbour.now).sum();
        self.exact.neighbour += u128::try_from(live).expect("not below zero") * ns;
        self.cpus.iter_mut().for_each(|cpu| cpu.neighbour.ns += ns);
    }

    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    fn neighbours(&mut self, cpu: usize, by: i128) {
        if by == 0 {
            return;
        }
        let cpu = &mut self.cpus[cpu];
        let reads = cpu.readings.change(self.now_ns);
        if reads {
            self.readings += 1;
            cpu.neighbour.read();
        }
        cpu.neighbour.change(by);
        if reads {
            cpu.neighbour.read();
        }
    }

    pub fn mapped(&mut self, cpu: usize, neighbours: u64) {
        self.neighbours(cpu, neighbours.into());
    }

    /// The mapping is over: nothing of it is reached, or it waits in a queue.
    pub fn unmapped(&mut self, cpu: usize, neighbours: u64) {
        self.neighbours(cpu, -i128::from(neighbours));
    }

    pub fn queued(&mut self, queue: usize, used: u64, neighbour: u64) {
        let queue = &mut self.queues[queue];
        let reads = queue.readings.change(self.now_ns);
        if reads {
            self.readings += 2;
            queue.used.read();
            queue.neighbour.read();
        }
        queue.has_new = true;
        queue.waiting.push((used, neighbour, self.now_ns));
        queue.used.change(used.into());
        queue.neighbour.change(neighbour.into());
        if reads {
            queue.used.read();
            queue.neighbour.read();
        }
    }

    pub fn flush_begins(&mut self) {
        for queue in &mut self.queues {
            // The next one's time is wanted.
            if std::mem::take(&mut queue.has_new) {
                queue.readings.left = 0;
            }
        }
    }

    /// It was confirmed.
    pub fn flush_ends(&mut self) {
        for queue in &mut self.queues {
            self.readings += 2;
            queue.readings.read(self.now_ns);
            queue.used.read();
            queue.neighbour.read();
            for (used, neighbour, since_ns) in queue.waiting.drain(..) {
                queue.used.change(-i128::from(used));
                queue.neighbour.change(-i128::from(neighbour));
                self.longest_ns = self.longest_ns.max(self.now_ns - since_ns);
            }
            queue.used.read();
            queue.neighbour.read();
        }
    }

    pub fn exact(&self) -> Tally {
        self.exact
    }

    /// How wrong the account may be: a nanosecond's rounding for each reading, besides.
    pub fn error(&self) -> Tally {
        let rounding = self.readings + (self.queues.len() + self.cpus.len()) as u128 * 2;
        // A queue only grows between two readings: a straight line is at most half as far off.
        let of = |span: fn(&Queue) -> &Span| -> u128 {
            self.queues.iter().map(|queue| span(queue).error().div_ceil(2)).sum()
        };
        let live: u128 = self.cpus.iter().map(|cpu| cpu.neighbour.error()).sum();
        Tally {
            used: of(|queue| &queue.used) + rounding,
            neighbour: of(|queue| &queue.neighbour) + live + rounding,
        }
    }

    /// The longest that anything waited, or waits.
    pub fn longest_ns(&self) -> u64 {
        let waiting = self.queues.iter().flat_map(|queue| &queue.waiting);
        waiting.map(|(.., since_ns)| self.now_ns - since_ns).fold(self.longest_ns, u64::max)
    }
}
