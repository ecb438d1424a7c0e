//! Whether a submission is under way: what callers without company, and leaders, tell each other by plain stores.
//!
//! It is a hint, and orders nothing: submissions may always go beside each other. Of two that overlap, the first end may hide the other.

use crate::percpu::CachePadded;
use crate::sync::{AtomicU64, Ordering, prefetch};

/// Odd while a submission is under way.
#[derive(Debug)]
pub(super) struct UnderWay(CachePadded<AtomicU64>);

impl UnderWay {
    pub fn new() -> Self {
        Self(CachePadded(AtomicU64::new(0)))
    }

    /// Fetches the word's line in the background.
    pub fn fetch(&self) {
        prefetch(&raw const self.0.0);
    }

    /// The submission that is under way. One that begins beside it may have the same number, and after a race a later one, too.
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
mod tests {
    use super::*;

    #[test]
    fn the_first_end_of_two_that_overlap_hides_the_other_and_no_end_hides_a_later_one() {
        let word = UnderWay::new();
        assert_eq!(word.now(), None);
        let (first, second) = (word.begin(), word.begin());
        assert!(!first.had_company(), "they cannot tell each other apart");
        drop(first);
        assert!(second.had_company() && word.now().is_none());
        let third = word.begin();
        drop(second);
        assert!(word.now().is_some() && !third.had_company());
        drop(third);
        assert_eq!(word.now(), None);
    }

    #[test]
    fn when_all_have_ended_nothing_is_under_way() {
        let word = UnderWay::new();
        for _ in 0..if cfg!(miri) { 3 } else { 50 } {
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| (0..20).for_each(|_| drop(word.begin())));
                }
            });
            assert_eq!(word.now(), None);
        }
    }
}
