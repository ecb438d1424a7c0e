//! The costs of copying and of mapping, and the choice between them. Plain arithmetic, without locks or clocks.

#[cfg(feature = "parts")]
mod explain;

#[cfg(feature = "parts")]
pub use explain::Explained;

use crate::dma::mapping::Choice;

/// The smallest class has sizes up to `1 << LEAST_SHIFT`.
const LEAST_SHIFT: u32 = 9;

/// After `4 * TIMED` mappings of a size, one in `TIMED` is timed. A prime, so that no driver's pattern has this period.
const TIMED: u64 = 61;

/// The first timed mapping of a size: earlier ones warm up tables and buffers.
pub(super) const FIRST_TIMED: u64 = 8;

/// The sampling interval after `made` mappings. Four samples, enough to change a choice, are taken before the number of mappings has grown to two and a
/// half times `made`.
pub(crate) fn pause_after(made: u64) -> u64 {
    (made / 4).clamp(1, TIMED)
}

/// The number of classes for mappings of up to `threshold` bytes. At most 42: two shapes and three directions make 6 * 42 = 252 numbers, which fit 8
/// bits.
pub(crate) fn classes(threshold: u64) -> usize {
    (class_of(threshold.max(1), usize::MAX).unwrap_or(0) + 1).min(42)
}

/// The class of mappings of `len` bytes; `None` above the last of `classes`, and for 0 bytes, which count as 2^64.
#[inline]
pub(crate) fn class_of(len: u64, classes: usize) -> Option<usize> {
    let shift = u64::BITS - len.wrapping_sub(1).leading_zeros();
    let class = shift.saturating_sub(LEAST_SHIFT) as usize;
    (class < classes).then_some(class)
}

pub(super) const fn most_bytes(class: usize) -> u64 {
    1 << (LEAST_SHIFT as usize + class)
}

/// The weight of a running mean, in samples.
const WEIGHT: u64 = 8;

/// A way's cost is unknown until map and unmap have this many samples each.
const ENOUGH: u64 = 4;

/// At most one timed mapping in `PROBE` is a probe, which goes the other way; in `EAGER_PROBE` while the other way's cost is unknown.
const PROBE: u64 = 64;

const EAGER_PROBE: u64 = 4;

/// Probes cost at most 1/`PROBES_SHARE` of the mappings' time on top, besides one probe.
const PROBES_SHARE: u64 = 128;

const PATIENCE: u32 = 4;

#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    sixteenths: u64,
    samples: u64,
}

impl Mean {
    /// Adds a sample. Returns the part that counts, in sixteenths of a nanosecond.
    fn add(&mut self, ns: u64) -> u64 {
        let mut sample = ns.min(u64::from(u32::MAX)) * 16;
        // An interrupt or the scheduler may interrupt a call. So a sample counts for at most four times the mean and 64 ns.
        let most = |usual: u64| 4 * usual + 16 * 64;
        if self.samples > 0 {
            sample = sample.min(most(self.sixteenths));
        }
        if self.samples < ENOUGH && self.samples > 0 {
            // An early mean may contain such an outlier, so the new sample limits it likewise.
            self.sixteenths = self.sixteenths.min(most(sample));
        }
        self.samples += 1;
        let weight = self.samples.min(WEIGHT);
        self.sixteenths = (self.sixteenths * (weight - 1) + sample) / weight;
        sample
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    Map,
    Unmap,
}

#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    map: Mean,
    unmap: Mean,
}

impl Cost {
    fn half(&mut self, half: Half) -> &mut Mean {
        match half {
            Half::Map => &mut self.map,
            Half::Unmap => &mut self.unmap,
        }
    }

    fn total(&self) -> Option<u64> {
        let enough = self.map.samples.min(self.unmap.samples) >= ENOUGH;
        enough.then_some(self.map.sixteenths + self.unmap.sixteenths)
    }
}

/// The costs of copying and of mapping for mappings of one size, and the choice. In an adaptive ring each direction and each shape (with shared ends or
/// without) has its own.
#[derive(Debug)]
pub(crate) struct Cell {
    choice: Choice,
    copy: Cost,
    map: Cost,
    /// How often in a row the other way was clearly cheaper.
    against: u32,
    switches: u64,
    /// Timed mappings since the last probe.
    turns: u64,
    /// The probes' budget: extra time that they may still cost, in sixteenths of a nanosecond.
    left: i64,
    /// A probe has not ended yet.
    probing: bool,
}

impl Default for Cell {
    /// Copying protects to the byte, so an unknown machine begins with it.
    fn default() -> Self {
        let (copy, map) = (Cost::default(), Cost::default());
        Self { choice: Choice::Copy, copy, map, against: 0, switches: 0, turns: 0, left: 0, probing: false }
    }
}

impl Cell {
    fn cost(&mut self, choice: Choice) -> &mut Cost {
        match choice {
            Choice::Copy => &mut self.copy,
            Choice::Map => &mut self.map,
        }
    }

    /// Returns how to make the next timed mapping: as chosen, or, for a probe, the other way. Also adds to the probes' budget
    /// its share of the time of the `mappings` mappings until the next timed one.
    pub(crate) fn turn(&mut self, mappings: u64) -> Choice {
        let (ours, other) = (self.cost(self.choice).total(), self.cost(self.choice.other()).total());
        let ours = ours.unwrap_or(0);
        self.left = self.left.saturating_add_unsigned(mappings.saturating_mul(ours) / PROBES_SHARE);
        self.turns += 1;
        let due = self.turns >= if other.is_some() { PROBE } else { EAGER_PROBE };
        if !due || self.left < other.unwrap_or(0).saturating_sub(ours).cast_signed() {
            return self.choice;
        }
        (self.turns, self.probing) = (0, true);
        self.choice.other()
    }

    /// Whether to copy a buffer rather than map it with a wait of its own of `wait_ns`: yes if the cost of copying is unknown or lower.
    pub(super) fn copies_rather_than_wait(&self, wait_ns: u64) -> bool {
        let waiting = self.map.map.sixteenths.saturating_add(wait_ns.saturating_mul(16));
        self.copy.total().is_none_or(|copying| copying < waiting)
    }

    pub(crate) fn note(&mut self, way: Choice, half: Half, ns: u64) -> Choice {
        let usual = self.cost(self.choice).half(half).sixteenths;
        let took = self.cost(way).half(half).add(ns);
        if self.probing && way != self.choice {
            self.left = self.left.saturating_sub_unsigned(took.saturating_sub(usual));
            self.probing = half == Half::Map;
        }
        if half == Half::Unmap {
            self.judge();
        }
        self.choice
    }

    /// Changes the choice if the other way was cheaper by an eighth [`PATIENCE`] times in a row.
    fn judge(&mut self) {
        let (ours, other) = (self.cost(self.choice).total(), self.cost(self.choice.other()).total());
        let better = matches!((ours, other), (Some(ours), Some(other)) if 8 * other < 7 * ours);
        self.against = if better { self.against + 1 } else { 0 };
        if self.against >= PATIENCE {
            self.settle();
        }
    }

    /// After the first measurement: chooses by the present means, without hysteresis.
    pub(super) fn begin(&mut self) -> Choice {
        let (copy, map) = (self.copy.total(), self.map.total());
        self.choice = if matches!((copy, map), (Some(copy), Some(map)) if map < copy) {
            Choice::Map
        } else {
            Choice::Copy
        };
        (self.against, self.turns, self.left, self.probing) = (0, 0, 0, false);
        self.choice
    }

    /// Changes the choice.
    fn settle(&mut self) {
        self.choice = self.choice.other();
        (self.against, self.turns) = (0, 0);
        self.switches += 1;
    }

    #[inline]
    pub(super) fn choice(&self) -> Choice {
        self.choice
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/dma/adaptive/book.rs"]
mod tests;
