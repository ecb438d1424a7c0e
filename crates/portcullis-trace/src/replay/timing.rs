//! Times calls of some nanoseconds: the processor's time stamp counter, minus the cost of reading it, in a histogram.

use hdrhistogram::Histogram;
use quanta::Clock;

/// A clock with known cost.
///
/// Its resolution is that of the processor's counter: on some machines that advances in steps of 10 ns, so that single calls are multiples
/// of that. Means are finer.
#[derive(Debug, Clone)]
pub struct Timer {
    clock: Clock,
    overhead_ticks: f64,
    ns_per_tick: f64,
}

impl Timer {
    /// Calibrates the cost of measuring: the mean of the middle half of many empty measurements. Takes a few milliseconds.
    pub fn calibrated() -> Self {
        const SAMPLES: usize = 20_000;
        let clock = Clock::new();
        let mut empty: Vec<u64> = (0..SAMPLES)
            .map(|_| {
                let start = clock.raw();
                clock.raw().saturating_sub(start)
            })
            .collect();
        empty.sort_unstable();
        let middle = &empty[SAMPLES / 4..SAMPLES * 3 / 4];
        let overhead_ticks = middle.iter().sum::<u64>() as f64 / middle.len() as f64;
        let many = 1 << 30;
        let ns_per_tick = clock.delta_as_nanos(0, many) as f64 / many as f64;
        Self { clock, overhead_ticks, ns_per_tick }
    }

    /// The same clock, with the cost of the measurements in `empty`: their mean without the slowest hundredth. Calls are measured between
    /// other work, where reading the counter may take longer than in a tight loop. A few measurements change nothing.
    pub fn less(&self, empty: &Samples) -> Self {
        const ENOUGH: u64 = 100;
        let overhead_ticks = if empty.count() < ENOUGH { self.overhead_ticks } else { empty.usual_ticks() };
        Self { overhead_ticks, ..self.clone() }
    }

    /// The counter now.
    pub fn ticks(&self) -> u64 {
        self.clock.raw()
    }

    /// Ticks since `start`, including the cost of reading.
    pub fn since(&self, start: u64) -> u64 {
        self.clock.raw().saturating_sub(start)
    }

    /// The cost of one measurement, in whole ticks.
    pub fn overhead_ticks(&self) -> u64 {
        self.overhead_ticks.round() as u64
    }

    /// What one measurement costs, in nanoseconds.
    pub fn overhead_ns(&self) -> f64 {
        self.overhead_ticks * self.ns_per_tick
    }

    /// `ticks` in nanoseconds.
    pub(super) fn ns_of(&self, ticks: u64) -> f64 {
        ticks as f64 * self.ns_per_tick
    }

    /// `ticks` with the cost of `measurements`, in nanoseconds without it.
    fn net_ns(&self, ticks: f64, measurements: u64) -> f64 {
        (ticks - self.overhead_ticks * measurements as f64).max(0.0) * self.ns_per_tick
    }
}

/// A call that seems to take longer was interrupted: the library's worst case is some microseconds, while a shared machine preempts a
/// thread for milliseconds, which would dominate the mean.
pub const INTERRUPTED_NS: f64 = 100_000.0;

/// The times of calls of one kind.
#[derive(Debug, Clone)]
pub struct Samples {
    histogram: Histogram<u64>,
    /// The same with the profile's waits of each call, to two significant digits.
    latency: Histogram<u64>,
    ns_per_tick: f64,
    total_ticks: u64,
    most_ticks: u64,
    interrupted: u64,
}

/// The figures of a [`Samples`], in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Figures {
    /// The mean.
    pub mean: f64,
    /// Half of the calls took no longer.
    pub p50: f64,
    /// 99 in 100 took no longer.
    pub p99: f64,
    /// 9,999 in 10,000 took no longer.
    pub p99_99: f64,
}

impl Samples {
    /// Without calls. Values have three significant digits.
    pub fn new(timer: &Timer) -> Self {
        let histogram = Histogram::new_with_max(1 << 40, 3).expect("the bounds are constants that fit");
        let latency = Histogram::new_with_max(1 << 40, 2).expect("the bounds are constants that fit");
        let ns_per_tick = timer.ns_per_tick;
        let most_ticks = (INTERRUPTED_NS / ns_per_tick) as u64;
        Self { histogram, latency, ns_per_tick, total_ticks: 0, most_ticks, interrupted: 0 }
    }

    /// Adds a call of `ticks`, including the cost of measuring it. One of [`INTERRUPTED_NS`] or more is only counted.
    pub fn record(&mut self, ticks: u64) {
        self.record_with_wait(ticks, 0.0);
    }

    /// The same for a call that hardware would have prolonged by `wait_ns` nanoseconds. Only [`Self::latency`] includes them.
    pub fn record_with_wait(&mut self, ticks: u64, wait_ns: f64) {
        if ticks >= self.most_ticks {
            self.interrupted += 1;
            return;
        }
        self.histogram.saturating_record(ticks);
        self.latency.saturating_record(ticks.saturating_add((wait_ns / self.ns_per_tick) as u64));
        self.total_ticks = self.total_ticks.saturating_add(ticks);
    }

    /// Adds `ticks`, without the cost of measuring them, to the calls as a whole: only to the mean.
    pub fn add_to_all(&mut self, ticks: u64) {
        if ticks < self.most_ticks {
            self.total_ticks = self.total_ticks.saturating_add(ticks);
        } else {
            self.interrupted += 1;
        }
    }

    /// The mean ticks, including the cost of measuring, without the slowest hundredth.
    fn usual_ticks(&self) -> f64 {
        let longest = self.histogram.value_at_quantile(0.99);
        let usual = || self.histogram.iter_recorded().filter(|step| step.value_iterated_to() <= longest);
        let count: u64 = usual().map(|step| step.count_at_value()).sum();
        let ticks: f64 =
            usual().map(|step| step.value_iterated_to() as f64 * step.count_at_value() as f64).sum();
        ticks / count.max(1) as f64
    }

    /// Calls in the figures.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Interrupted calls, which are left out.
    pub fn interrupted(&self) -> u64 {
        self.interrupted
    }

    /// Their total, in nanoseconds, without the timer's cost.
    pub fn total_ns(&self, timer: &Timer) -> f64 {
        timer.net_ns(self.total_ticks as f64, self.count())
    }

    /// The figures, without the timer's cost; all 0 without calls.
    pub fn figures(&self, timer: &Timer) -> Figures {
        let quantile = |quantile| timer.net_ns(self.histogram.value_at_quantile(quantile) as f64, 1);
        let mean = self.total_ns(timer) / self.count().max(1) as f64;
        Figures { mean, p50: quantile(0.5), p99: quantile(0.99), p99_99: quantile(0.9999) }
    }

    /// A histogram with waits, without the timer's cost: nanoseconds, to two significant digits, and calls, shortest first.
    pub fn latency(&self, timer: &Timer) -> Vec<(f64, u64)> {
        let mut steps: Vec<(f64, u64)> = Vec::new();
        for step in self.latency.iter_recorded() {
            let ns = (timer.net_ns(step.value_iterated_to() as f64, 1) * 10.0).round() / 10.0;
            match steps.last_mut() {
                Some((last, calls)) if *last == ns => *calls += step.count_at_value(),
                _ => steps.push((ns, step.count_at_value())),
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a timer of half a nanosecond a tick, whose measurements cost 20 ticks.
    #[test]
    fn figures_are_of_the_ticks_without_what_measuring_cost() {
        let timer = Timer { clock: Clock::new(), overhead_ticks: 20.0, ns_per_tick: 0.5 };
        assert_eq!((timer.overhead_ticks(), timer.overhead_ns(), timer.ns_of(84)), (20, 10.0, 42.0));
        assert_eq!([timer.net_ns(120.0, 2), timer.net_ns(30.0, 2)], [40.0, 0.0]);
        let mut samples = Samples::new(&timer);
        for ticks in [40, 60, 120, 199_999, 200_000] {
            samples.record(ticks);
        }
        samples.record_with_wait(70, 15.0);
        // The common part counts only for the mean, and interrupted calls for nothing.
        samples.add_to_all(11);
        samples.add_to_all(199_999);
        samples.add_to_all(200_000);
        assert_eq!((samples.count(), samples.interrupted()), (5, 2));
        let total = (40 + 60 + 120 + 199_999 + 70 + 11 + 199_999 - 5 * 20) as f64 / 2.0;
        assert_eq!(samples.total_ns(&timer), total);
        let figures = samples.figures(&timer);
        assert_eq!((figures.mean, figures.p50), (total / 5.0, 25.0));
        assert!((figures.p99 / 99_990.0 - 1.0).abs() < 0.001 && figures.p99 == figures.p99_99);
        let latency = samples.latency(&timer);
        assert_eq!(latency[..3], [(10.0, 1), (20.0, 1), (40.0, 1)]);
        assert_eq!(
            (latency[3].0, latency[3].1, latency.len()),
            (50.0, 1, 5 - usize::from(latency[2].1 == 2))
        );
        assert_eq!(
            Samples::new(&timer).figures(&timer),
            Figures { mean: 0.0, p50: 0.0, p99: 0.0, p99_99: 0.0 }
        );
    }

    /// A timer agrees with the system's clock, at any tick length.
    #[test]
    fn a_timer_counts_as_long_as_it_takes() {
        let timer = Timer::calibrated();
        let (outer, start) = (std::time::Instant::now(), timer.ticks());
        let inner = std::time::Instant::now();
        std::thread::sleep(std::time::Duration::from_millis(30));
        let least = inner.elapsed().as_nanos() as f64;
        let ns = timer.ns_of(timer.since(start));
        let most = outer.elapsed().as_nanos() as f64;
        // Even a busy machine does not double or halve only one of the clocks.
        assert!(least / 2.0 <= ns && ns <= most * 2.0, "{least} {ns} {most}");
    }

    #[test]
    fn enough_empty_measurements_say_what_measuring_costs() {
        let timer = Timer { clock: Clock::new(), overhead_ticks: 20.0, ns_per_tick: 0.25 };
        let mut empty = Samples::new(&timer);
        (0..50).for_each(|_| empty.record(30));
        (0..49).for_each(|_| empty.record(50));
        assert_eq!(timer.less(&empty).overhead_ns(), 5.0, "99 are few");
        empty.record(1_000);
        // Without the slowest hundredth.
        let mean = (50.0 * 30.0 + 49.0 * 50.0) / 99.0;
        let less = timer.less(&empty);
        assert!((less.overhead_ticks - mean).abs() < 1e-9 && less.ns_per_tick == 0.25, "{less:?}");
    }
}
