//! A clock for single operations: the processor's cycle counter, its own cost taken off.
//!
//! What it tells of one operation of a few nanoseconds is blurred: the processor reads the counter while
//! earlier instructions still run. It is meant for the slowest operations, not for typical ones.

use std::hint::black_box;

use quanta::Clock;
use serde::Serialize;

use crate::stats;

/// Operations of which one in 10,000 can be told.
pub(crate) const ENOUGH: usize = 10_000;

/// The clock, calibrated.
#[derive(Debug, Clone)]
pub struct OpTimer {
    clock: Clock,
    ns_per_tick: f64,
    figures: TimerFigures,
}

/// How well single operations can be timed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TimerFigures {
    /// Nanoseconds that reading the clock takes; they are taken off each operation.
    pub overhead_ns: f64,
    /// How far apart the times are that the clock can tell, in nanoseconds.
    pub resolution_ns: f64,
}

impl OpTimer {
    /// Calibrates the clock: up to a quarter of a second.
    pub fn calibrated() -> Self {
        const READINGS: usize = 20_000;
        let clock = Clock::new();
        let ns_per_tick = clock.delta_as_nanos(0, 1 << 30) as f64 / f64::from(1 << 30);
        // Ticks that `work` steps of next to nothing take, for each reading.
        let readings = |work: fn(usize) -> usize| {
            let mut ticks: Vec<u64> = (0..READINGS)
                .map(|reading| {
                    let start = clock.raw();
                    (0..work(reading)).for_each(|step| {
                        black_box(step);
                    });
                    black_box(clock.raw()) - start
                })
                .collect();
            ticks.sort_unstable();
            ticks
        };
        let empty = readings(|_| 0);
        // Over many different times, the values that never occur show how coarse the clock is. The ends, where
        // values are rare, do not count.
        let varied = readings(|reading| reading % 256);
        let common = &varied[READINGS / 10..READINGS / 2];
        let gap = common.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
        let figures = TimerFigures {
            overhead_ns: empty[READINGS / 2] as f64 * ns_per_tick,
            resolution_ns: gap.max(1) as f64 * ns_per_tick,
        };
        Self { clock, ns_per_tick, figures }
    }

    /// How well this clock measures.
    pub fn figures(&self) -> TimerFigures {
        self.figures
    }

    /// The clock as it stands, in its own ticks.
    #[inline(always)]
    pub fn now(&self) -> u64 {
        self.clock.raw()
    }

    /// How many ticks `ns` nanoseconds are.
    pub fn in_ticks(&self, ns: f64) -> u64 {
        (ns / self.ns_per_tick).round() as u64
    }

    /// Times one operation, in the clock's own ticks.
    #[inline(always)]
    pub fn ticks<T>(&self, operation: impl FnOnce() -> T) -> (u64, T) {
        let start = self.clock.raw();
        let result = operation();
        (self.clock.raw().saturating_sub(start), result)
    }

    /// Nanoseconds that `ticks` are, without the clock's own.
    pub fn ns(&self, ticks: u64) -> f64 {
        self.sum_ns(ticks, 1)
    }

    /// Nanoseconds of `ticks` that `intervals` intervals add up to, without the clock's own.
    pub fn sum_ns(&self, ticks: u64, intervals: u64) -> f64 {
        (ticks as f64 * self.ns_per_tick - intervals as f64 * self.figures.overhead_ns).max(0.0)
    }

    /// The time that 99.99 % of the operations timed did not exceed; `None` for fewer than 10,000, of which
    /// it could not say anything.
    pub fn p99_99(&self, ticks: &[u64]) -> Option<f64> {
        if ticks.len() < ENOUGH {
            return None;
        }
        let mut ns: Vec<f64> = ticks.iter().map(|ticks| self.ns(*ticks)).collect();
        stats::quantile(&mut ns, 0.9999)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_nanoseconds_without_the_clock_s_own() {
        let timer = OpTimer::calibrated();
        let (bare, own) = (|ticks| timer.sum_ns(ticks, 0), timer.figures().overhead_ns);
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs().max(1.0);
        let ticks = timer.in_ticks(1e9);
        assert!((bare(ticks) / 1e9 - 1.0).abs() < 1e-6, "there and back: {ticks} ticks");
        assert!(near(timer.ns(ticks), bare(ticks) - own), "one reading is taken off");
        assert!(near(timer.sum_ns(ticks, 1000), bare(ticks) - 1000.0 * own));
        assert_eq!(timer.sum_ns(0, 1), 0.0, "never less than none");
        // What was measured is in ticks.
        for ns in [own, timer.figures().resolution_ns] {
            let ticks = ns / bare(1);
            assert!((ticks - ticks.round()).abs() < 1e-3, "{ns} ns are {ticks} ticks");
        }
        assert!(timer.figures().resolution_ns > 0.0);
    }

    #[test]
    fn one_in_ten_thousand_took_longer() {
        let timer = OpTimer::calibrated();
        let ticks: Vec<u64> = (1..=10_000).map(|number| number * 1_000_000).rev().collect();
        assert_eq!(timer.p99_99(&ticks), Some(timer.ns(9_999_000_000)));
        assert_eq!(timer.p99_99(&ticks[1..]), None);
    }
}
