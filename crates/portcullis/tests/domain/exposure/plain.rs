//! The model: levels of bytes, integrated at every step, and how far off a sampled clock may be.

/// Byte-nanoseconds of both kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    pub used: u128,
    pub neighbour: u128,
}

/// The clock is read for each 64th change of a CPU or a queue at the latest. When else is nobody's business: at any
/// time, the last reading is so many changes ago at the most, and the next no further ahead.
const MOST_CHANGES: usize = 64;

/// Over a pause that is longer, all that came since the clock was last read counts: what is read is no less than what was.
const EVEN_NS: u64 = 1 << 17;

/// A number of bytes, and all that it ever was.
#[derive(Debug, Clone, Default)]
struct Level {
    now: i128,
    /// From when on it was how much. It began with nothing.
    points: Vec<(u64, i128)>,
    /// The same of the time before the clock was last read for sure, each with its end.
    before: Vec<(Vec<(u64, i128)>, u64)>,
}

impl Level {
    fn change(&mut self, now_ns: u64, by: i128) {
        if self.points.is_empty() {
            self.points.push((now_ns, 0));
        }
        self.now += by;
        self.points.push((now_ns, self.now));
    }

    /// The clock is read, and nothing is left.
    fn end(&mut self, now_ns: u64) {
        self.now = 0;
        self.before.push((std::mem::take(&mut self.points), now_ns));
    }

    /// By how much what is read may be less than what was, and by how much more.
    fn error(&self, now_ns: u64) -> (u128, u128) {
        let now = std::iter::once((&self.points, now_ns));
        let all = self.before.iter().map(|(points, end_ns)| (points, *end_ns)).chain(now);
        let each = all.map(|(points, end_ns)| error(points, end_ns));
        each.fold((0, 0), |(less, more), (below, above)| (less + below, more + above))
    }
}

/// The most less the fewest bytes between two readings, times time, where that is short; and the same with all that came
/// in between.
fn error(points: &[(u64, i128)], end_ns: u64) -> (u128, u128) {
    let window =
        |at: usize| &points[at.saturating_sub(MOST_CHANGES)..points.len().min(at + MOST_CHANGES + 1)];
    let spread = |at: usize| {
        let levels = || window(at).iter().map(|(_, level)| *level);
        levels().max().unwrap_or(0).abs_diff(levels().min().unwrap_or(0))
    };
    let came = |at: usize| -> u128 {
        let rises = window(at).windows(2).map(|pair| u128::try_from(pair[1].1 - pair[0].1).unwrap_or(0));
        rises.sum()
    };
    let until = |at: usize| points.get(at + 1).map_or(end_ns, |(next_ns, _)| *next_ns);
    let times = points.iter().enumerate().map(|(at, (from_ns, _))| (at, until(at) - from_ns));
    times.filter(|(_, ns)| *ns > 0).fold((0, 0), |(less, more), (at, ns)| {
        let below = if ns <= EVEN_NS { spread(at) * u128::from(ns) } else { 0 };
        (less + below, more + (spread(at) + came(at)) * u128::from(ns))
    })
}

/// One flush queue.
#[derive(Debug, Clone, Default)]
struct Queue {
    used: Level,
    neighbour: Level,
    /// Since when each waits.
    since_ns: Vec<u64>,
    /// A flush covers all of it, of which the queue has not heard.
    is_covered: bool,
}

pub struct Plain {
    now_ns: u64,
    queues: Vec<Queue>,
    /// The neighbours of each CPU's live mappings.
    cpus: Vec<Level>,
    exact: Tally,
    longest_ns: u64,
    /// When the last flush was confirmed.
    confirmed_ns: u64,
    /// How often the clock may have been read: a byte-nanosecond is lost each time at the most.
    readings: u128,
}

impl Plain {
    pub fn new(queues: usize, cpus: usize) -> Self {
        Self {
            now_ns: 0,
            queues: vec![Queue::default(); queues],
            cpus: vec![Level::default(); cpus],
            exact: Tally::default(),
            longest_ns: 0,
            confirmed_ns: 0,
            readings: 0,
        }
    }

    pub fn advance(&mut self, ns: u64) {
        self.now_ns += ns;
        let sum = |levels: &mut dyn Iterator<Item = i128>| -> u128 {
            // One CPU's share may be below zero, the sum is not.
            u128::try_from(levels.sum::<i128>()).expect("not below zero") * u128::from(ns)
        };
        self.exact.used += sum(&mut self.queues.iter().map(|queue| queue.used.now));
        self.exact.neighbour += sum(&mut self.queues.iter().map(|queue| queue.neighbour.now));
        self.exact.neighbour += sum(&mut self.cpus.iter().map(|cpu| cpu.now));
    }

    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    pub fn mapped(&mut self, cpu: usize, neighbours: u64) {
        self.readings += 1;
        self.cpus[cpu].change(self.now_ns, neighbours.into());
    }

    /// The mapping is over: nothing of it is reached, or it waits in a queue.
    pub fn unmapped(&mut self, cpu: usize, neighbours: u64) {
        self.readings += 1;
        self.cpus[cpu].change(self.now_ns, -i128::from(neighbours));
    }

    /// A queue takes an entry, before which it hears of flushes.
    pub fn queued(&mut self, queue: usize, used: u64, neighbour: u64) {
        self.hear(queue);
        self.readings += 1;
        let queue = &mut self.queues[queue];
        queue.used.change(self.now_ns, used.into());
        queue.neighbour.change(self.now_ns, neighbour.into());
        queue.since_ns.push(self.now_ns);
    }

    /// A flush was confirmed, during which nothing else happened, and queues heard of it at once.
    pub fn flushed(&mut self) {
        self.covered();
        self.visited();
    }

    /// A flush was confirmed that covers all that waits, which counts until its queue hears of it.
    pub fn covered(&mut self) {
        self.confirmed();
        self.queues.iter_mut().for_each(|queue| queue.is_covered = true);
    }

    /// A flush was confirmed that covers nothing for sure.
    pub fn confirmed(&mut self) {
        self.confirmed_ns = self.now_ns;
    }

    /// All queues hear of flushes.
    pub fn visited(&mut self) {
        (0..self.queues.len()).for_each(|queue| self.hear(queue));
    }

    /// What a flush covers has waited up to the last one that was confirmed.
    fn hear(&mut self, queue: usize) {
        let queue = &mut self.queues[queue];
        if !std::mem::take(&mut queue.is_covered) {
            return;
        }
        self.readings += 1;
        let end_ns = self.confirmed_ns;
        // Nothing has come since, so that it is what was added too much.
        let late = |level: &Level| u128::try_from(level.now).unwrap() * u128::from(self.now_ns - end_ns);
        self.exact.used -= late(&queue.used);
        self.exact.neighbour -= late(&queue.neighbour);
        queue.used.end(end_ns);
        queue.neighbour.end(end_ns);
        let longest = queue.since_ns.drain(..).map(|since_ns| end_ns - since_ns).max();
        self.longest_ns = self.longest_ns.max(longest.unwrap_or(0));
    }

    pub fn exact(&self) -> Tally {
        self.exact
    }

    /// By how much the account may be too small, and too large. O(changes).
    pub fn error(&self) -> (Tally, Tally) {
        let rounding = self.readings + (self.queues.len() + self.cpus.len()) as u128;
        let sum = |errors: &mut dyn Iterator<Item = (u128, u128)>| {
            errors.fold((rounding, rounding), |(less, more), (below, above)| (less + below, more + above))
        };
        // A queue only grows between two readings: a straight line is at most half as far off.
        let of = |(below, above): (u128, u128)| (below.div_ceil(2), above);
        let used = sum(&mut self.queues.iter().map(|queue| of(queue.used.error(self.now_ns))));
        let live = self.cpus.iter().map(|cpu| cpu.error(self.now_ns));
        let neighbour =
            sum(&mut self.queues.iter().map(|queue| of(queue.neighbour.error(self.now_ns))).chain(live));
        (Tally { used: used.0, neighbour: neighbour.0 }, Tally { used: used.1, neighbour: neighbour.1 })
    }

    /// The longest that anything waited, or waits.
    pub fn longest_ns(&self) -> u64 {
        let waiting = self.queues.iter().flat_map(|queue| &queue.since_ns);
        waiting.map(|since_ns| self.now_ns - since_ns).fold(self.longest_ns, u64::max)
    }
}
