//! Whether a submission is in flight: a word that callers without a slot, and leaders, store without a read-modify-write. It is a hint that
//! orders nothing: submissions may overlap. If two do, the word may say that none is in flight as soon as one of them ends.

use crate::percpu::CachePadded;
use crate::sync::{AtomicU64, Ordering, prefetch};

/// Odd while a submission is in flight.
#[derive(Debug)]
pub(super) struct InFlight(CachePadded<AtomicU64>);

impl InFlight {
    pub fn new() -> Self {
        Self(CachePadded(AtomicU64::new(0)))
    }

    pub fn fetch(&self) {
        prefetch(&raw const self.0.0);
    }

    /// The number of the submission in flight, if any. One that overlaps with it may have the same number; so may a later one, after a
    /// race.
    pub fn now(&self) -> Option<u64> {
        Some(self.0.0.load(Ordering::Relaxed)).filter(|number| number & 1 != 0)
    }

    pub fn begin(&self) -> Submission<'_> {
        let number = self.0.0.load(Ordering::Relaxed) | 1;
        self.0.0.store(number, Ordering::Relaxed);
        Submission { word: &self.0.0, number }
    }
}

pub(super) struct Submission<'a> {
    word: &'a AtomicU64,
    number: u64,
}

impl Submission<'_> {
    /// Whether another one has begun or ended since, as far as the word tells.
    pub fn overlapped(&self) -> bool {
        self.word.load(Ordering::Relaxed) != self.number
    }
}

impl Drop for Submission<'_> {
    fn drop(&mut self) {
        // When all have ended, the word is even: the submission that stored the last odd number finds it here, and ends it.
        if !self.overlapped() {
            self.word.store(self.number.wrapping_add(1), Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/invalidation/shared/in_flight.rs"]
mod tests;
