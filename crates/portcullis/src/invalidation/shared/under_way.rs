//! Whether a submission is under way: what callers without company, and leaders, tell each other by plain stores.
//!
//! It is a hint, and orders nothing: submissions may always go beside each other. Of two that begin at the same time, one hides the other.

use crate::percpu::CachePadded;
use crate::sync::{AtomicU64, Ordering, prefetch};

/// Odd while a submission is under way; the half is how many have ended.
#[derive(Debug)]
pub(super) struct UnderWay(CachePadded<AtomicU64>);

impl UnderWay {
    pub fn new() -> Self {
        Self(CachePadded(AtomicU64::new(0)))
    }

    /// Ended submissions. Two at the same time may count as one.
    pub fn ended(&self) -> u64 {
        self.0.0.load(Ordering::Relaxed) / 2
    }

    /// Fetches the word's line in the background.
    pub fn fetch(&self) {
        prefetch(&raw const self.0.0);
    }

    /// The submission that is under way, a number that no later one has.
    pub fn now(&self) -> Option<u64> {
        Some(self.0.0.load(Ordering::Relaxed)).filter(|number| number & 1 != 0)
    }

    /// A submission is under way until the guard is dropped.
    pub fn begin(&self) -> Submission<'_> {
        let number = self.0.0.load(Ordering::Relaxed) | 1;
        self.0.0.store(number, Ordering::Relaxed);
        Submission { word: &self.0.0, number }
    }
}

/// A submission under way.
pub(super) struct Submission<'a> {
    word: &'a AtomicU64,
    number: u64,
}

impl Drop for Submission<'_> {
    fn drop(&mut self) {
        // Another one may have begun or ended meanwhile: then its number stays. The word's last store is an end: the caller that was the last to
        // store a beginning finds it here.
        if self.word.load(Ordering::Relaxed) == self.number {
            self.word.store(self.number.wrapping_add(1), Ordering::Relaxed);
        }
    }
}
