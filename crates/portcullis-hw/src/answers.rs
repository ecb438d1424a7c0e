//! Status words: a unit stores a number there when a submission is complete.
//!
//! A submission owns a word until its CPU has seen the number or gives up, however often the ring wraps meanwhile: words are claimed and
//! released separately from ring entries. Each owner of a word gets another number, so a late store confirms nothing for the next owner. A
//! late store may overwrite the number that confirms the next owner's submission; then that owner reports a time-out, which is safe.
//! (Numbers have 32 bits, so one repeats after 2^32 owners of a word.)
//!
//! Memory ordering. A load with `Acquire` sees the number: what the unit did before the store happens before what the caller does next. A
//! claim acquires what the last owner released, so numbers of a word never repeat.

use alloc::vec::Vec;

use portcullis::addr::PhysAddr;
use portcullis::platform::{Frames, TABLE_ENTRIES};

use crate::frames::Words;
use crate::heap::filled;
use crate::host::UnitError;
use crate::sync::{AtomicU64, Ordering};

/// A frame of status words.
#[derive(Debug)]
pub(crate) struct Answers {
    words: Words,
    claims: Claims,
}

/// Which words have an owner, and the owner's number.
#[derive(Debug)]
struct Claims {
    /// A bit for each word.
    taken: Vec<AtomicU64>,
    /// For each word, the number of its last owner. Only the CPU that has claimed the word uses it.
    numbers: Vec<AtomicU64>,
}

/// A claimed word, released by drop.
#[derive(Debug)]
pub(crate) struct Answer<'a> {
    claims: &'a Claims,
    index: usize,
    number: u32,
}

impl Answer<'_> {
    /// The number that the unit stores, in the lower half of the word.
    pub fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        self.claims.taken[self.index / 64].fetch_and(!(1 << (self.index % 64)), Ordering::Release);
    }
}

impl Answers {
    pub fn new<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        Ok(Self { claims: Claims::new(TABLE_ENTRIES)?, words: Words::new(frames, 1)? })
    }

    /// Frees the frame.
    ///
    /// # Safety
    /// 1. `frames` allocated it.
    /// 2. The unit stores nothing there any more.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: clauses 1 and 2.
        unsafe { self.words.free(frames) };
    }

    /// Claims a word, beginning the search at `hint`. `None` if all 512 are claimed.
    pub fn claim(&self, hint: u64) -> Option<Answer<'_>> {
        self.claims.claim(hint)
    }

    pub fn address(&self, answer: &Answer<'_>) -> PhysAddr {
        PhysAddr::new(self.words.phys().get() + answer.index as u64 * 8)
    }

    /// Whether the unit has stored the number. If so, what it did before happens before what the caller does next.
    pub fn is_there<F: Frames>(&self, frames: &F, answer: &Answer<'_>) -> bool {
        self.words.load_from_unit(frames, answer.index) as u32 == answer.number
    }
}

impl Claims {
    /// For `count` words, a multiple of 64.
    fn new(count: usize) -> Result<Self, UnitError> {
        let words = |count| filled(count, || AtomicU64::new(0));
        Ok(Self { taken: words(count / 64)?, numbers: words(count)? })
    }

    fn claim(&self, hint: u64) -> Option<Answer<'_>> {
        let groups = self.taken.len();
        for step in 0..groups {
            let group = (hint as usize).wrapping_add(step) % groups;
            let mut taken = self.taken[group].load(Ordering::Relaxed);
            while taken != u64::MAX {
                let bit = (!taken).trailing_zeros();
                taken = self.taken[group].fetch_or(1 << bit, Ordering::Acquire);
                if taken >> bit & 1 == 0 {
                    let index = group * 64 + bit as usize;
                    let number = self.numbers[index].load(Ordering::Relaxed).wrapping_add(1);
                    self.numbers[index].store(number, Ordering::Relaxed);
                    return Some(Answer { claims: self, index, number: number as u32 });
                }
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_word_is_claimed_once_and_each_owner_has_another_number() {
        let (claims, mut seen) = (Claims::new(128).unwrap(), BTreeSet::new());
        for hint in 0..5 {
            let all: Vec<_> = core::iter::from_fn(|| claims.claim(hint)).collect();
            assert_eq!(all.len(), 128);
            for answer in all {
                assert!(seen.insert((answer.index, answer.number)) && answer.number != 0);
            }
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use alloc::sync::Arc;

    use loom::thread;

    use super::*;

    /// Two CPUs claim two words each in turn: no two of the four are the same word with the same number.
    #[test]
    fn no_two_owners_of_a_word_have_the_same_number() {
        loom::model(|| {
            let claims = Arc::new(Claims::new(64).unwrap());
            let two = |claims: &Claims| -> Vec<(usize, u32)> {
                (0..2)
                    .map(|_| {
                        let answer = claims.claim(0).unwrap();
                        (answer.index, answer.number)
                    })
                    .collect()
            };
            let other = Arc::clone(&claims);
            let thread = thread::spawn(move || two(&other));
            let mut all = two(&claims);
            all.extend(thread.join().unwrap());
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), 4);
        });
    }
}
