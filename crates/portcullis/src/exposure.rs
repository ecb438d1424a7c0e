//! The account of what devices can reach although no mapping covers it: bytes times time, in byte-nanoseconds. *Stale*
//! bytes belong to buffers that were unmapped and that no invalidation has covered yet. *Neighbour* bytes share a page
//! with a buffer, or are of a mapping that a cache keeps while no driver uses it
//! ([`Domain::count_neighbours`](crate::domain::Domain::count_neighbours)).

use core::ops::{AddAssign, Sub};

/// A domain's exposure since it was made. It is an upper bound, with one exception: a change between two clock readings
/// at most 131 us apart counts for half of that time (see [`Domain::exposure`](crate::domain::Domain::exposure)). An
/// IOTLB that drops a translation by itself ends the exposure earlier, and a page that several buffers share counts for
/// each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Exposure {
    /// Bytes of buffers that were unmapped and not yet covered by an invalidation, times nanoseconds.
    pub stale_byte_ns: u128,
    /// Bytes beside a buffer in its pages, and of cached mappings that no driver uses, times the nanoseconds that
    /// devices could reach them.
    pub neighbour_byte_ns: u128,
    /// The longest time from an unmap's return until an invalidation covered it.
    pub longest_stale_ns: u64,
}

/// Stale (`used`) and neighbour bytes. Sums wrap; only differences of them mean anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Bytes {
    pub used: u64,
    pub neighbour: u64,
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.used = self.used.wrapping_add(other.used);
        self.neighbour = self.neighbour.wrapping_add(other.neighbour);
    }
}

impl Sub for Bytes {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            used: self.used.wrapping_sub(other.used),
            neighbour: self.neighbour.wrapping_sub(other.neighbour),
        }
    }
}

/// Byte-nanoseconds of both kinds. One CPU's part can be negative; the sum over CPUs is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ByteTime {
    pub used: i128,
    pub neighbour: i128,
}

impl AddAssign for ByteTime {
    fn add_assign(&mut self, other: Self) {
        self.used = self.used.saturating_add(other.used);
        self.neighbour = self.neighbour.saturating_add(other.neighbour);
    }
}

/// While numbers change, the clock is read about once in this many nanoseconds.
const READ_EVERY_NS: u64 = 1 << 16;

/// The most changes between two readings: one reading then costs little beside the changes.
const MOST_CHANGES: u64 = 64;

/// Between two readings no further apart than this, numbers are taken to change evenly. Further apart, traffic has
/// paused, and nobody knows how long new bytes stayed.
const EVEN_NS: u64 = 2 * READ_EVERY_NS;

/// The byte-nanoseconds of `bytes` that came during the last `ns`: `bytes * ns`, or half of it if `ns` is short enough
/// to assume an even change.
pub(crate) fn came_during(bytes: u64, ns: u64) -> i128 {
    let most = i128::from(bytes) * i128::from(ns);
    if ns <= EVEN_NS { most / 2 } else { most }
}

/// A number of bytes integrated over time, from one reading of the clock to the next. Callers pass the bytes that there
/// are now, and all that ever came.
#[derive(Debug, Default)]
pub(crate) struct Level {
    at_ns: u64,
    every: u64,
    bytes: Bytes,
    came: Bytes,
    integral: ByteTime,
}

impl Level {
    pub(crate) fn sample(&mut self, now_ns: u64, bytes: Bytes, came: Bytes) {
        self.integral = self.total(now_ns, bytes, came);
        // Aims at one reading in `READ_EVERY_NS`, and at most doubles the number of changes between readings.
        let elapsed_ns = now_ns.saturating_sub(self.at_ns).max(1);
        let every = self.every.max(1);
        self.every = (every * READ_EVERY_NS / elapsed_ns).clamp(1, (2 * every).min(MOST_CHANGES));
        self.at_ns = self.at_ns.max(now_ns);
        (self.bytes, self.came) = (bytes, came);
    }

    pub(crate) fn next_sample(&self) -> u64 {
        self.every.max(1)
    }

    /// Sets the bytes as of the last reading, without moving the clock.
    pub(crate) fn jump(&mut self, bytes: Bytes, came: Bytes) {
        (self.bytes, self.came) = (bytes, came);
    }

    /// Records that `gone` of the current `bytes` went away at `at_ns`, which may be before the last reading.
    pub(crate) fn fell(&mut self, at_ns: u64, bytes: Bytes, came: Bytes, gone: Bytes) {
        if at_ns > self.at_ns {
            self.sample(at_ns, bytes, came);
        } else {
            let late_ns = i128::from(self.at_ns - at_ns);
            let counted = |bytes: u64| -i128::from(bytes) * late_ns;
            self.add(ByteTime { used: counted(gone.used), neighbour: counted(gone.neighbour) });
        }
        self.bytes = self.bytes - gone;
    }

    pub(crate) fn add(&mut self, time: ByteTime) {
        self.integral += time;
    }

    /// Returns the integral with `bytes` at `now_ns`. A change since a recent reading counts as even. After a longer
    /// time, all that came counts from the last reading on, and nothing went before now: an upper bound.
    pub(crate) fn total(&self, now_ns: u64, bytes: Bytes, came: Bytes) -> ByteTime {
        let elapsed_ns = now_ns.saturating_sub(self.at_ns);
        let ns = i128::from(elapsed_ns);
        // One CPU's count may be below zero: it unmapped what another CPU mapped.
        let grown = |before: u64, after: u64, came: u64| {
            let (before, after) = (i128::from(before as i64), i128::from(after as i64));
            if elapsed_ns <= EVEN_NS { (before + after) * ns / 2 } else { (before + i128::from(came)) * ns }
        };
        let came = came - self.came;
        let mut total = self.integral;
        total += ByteTime {
            used: grown(self.bytes.used, bytes.used, came.used),
            neighbour: grown(self.bytes.neighbour, bytes.neighbour, came.neighbour),
        };
        total
    }
}

#[cfg(test)]
#[path = "../tests/inside/exposure.rs"]
mod tests;
