//! Whether a submission is under way, by plain stores of callers without company, and of leaders. A hint that orders nothing: submissions
//! may always go beside each other. Of two that overlap, the first end may hide the other.

use crate::percpu::CachePadded;
use crate::sync::{AtomicU64, Ordering, prefetch};

/// Odd while a submission is under way.
#[derive(Debug)]
pub(super) struct UnderWay(CachePadded<AtomicU64>);

impl UnderWay {
    pub fn new() -> Self {
        Self(CachePadded(AtomicU64::new(0)))
    }

    pub fn fetch(&self) {
        prefetch(&raw const self.0.0);
    }

    /// The submission that is under way. One that begins beside it may have the same number, and after a race a later one, too.
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
    pub fn had_company(&self) -> bool {
        self.word.load(Ordering::Relaxed) != self.number
    }
}

impl Drop for Submission<'_> {
    fn drop(&mut self) {
        // The word's last store is an end: the caller that was the last to store a beginning finds it here. Others leave the word as it is.
        if !self.had_company() {
            self.word.store(self.number.wrapping_add(1), Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/invalidation/shared/under_way.rs"]
mod tests;
