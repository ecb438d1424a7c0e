//! An area's bits, one for each slot, set while the slot is taken.
//!
//! Runs of a power of two are aligned to their size. Up to 64 slots lie in one word, and are found with shifts; longer runs are whole words. Odd runs
//! are searched for from the lowest place at which they may begin. Worst cases: O(slots of the area) for that search, and O(slots / 64) for any other
//! operation.

use alloc::boxed::Box;

use crate::heap::{OutOfMemory, slice};

pub(super) const WORD_SLOTS: usize = u64::BITS as usize;

/// The order of the longest run that shifts find: it fills a word.
pub(super) const WORD_ORDER: u32 = u64::BITS.trailing_zeros();

/// For each order *n*, one bit for each place where a run of 2^*n* slots may begin.
const STARTS: [u64; WORD_ORDER as usize + 1] = [
    u64::MAX,
    0x5555_5555_5555_5555,
    0x1111_1111_1111_1111,
    0x0101_0101_0101_0101,
    0x0001_0001_0001_0001,
    0x0000_0001_0000_0001,
    1,
];

/// The bits of one area. All slots of an absent area are taken.
#[derive(Debug)]
pub(super) struct Bits {
    words: Box<[u64]>,
    pub free: usize,
}

fn mask(first: usize, count: usize) -> u64 {
    (u64::MAX >> (WORD_SLOTS - count)) << first
}

impl Bits {
    /// The bits of `slots` slots, a multiple of 64, all taken.
    pub fn all_taken(slots: usize) -> Result<Self, OutOfMemory> {
        Ok(Self { words: slice(slots / WORD_SLOTS, |_| Ok(u64::MAX))?, free: 0 })
    }

    fn slots(&self) -> usize {
        self.words.len() * WORD_SLOTS
    }

    pub fn open(&mut self) {
        self.words.fill(0);
        self.free = self.slots();
    }

    /// Takes all slots, if all are free. Returns whether it did.
    pub fn close(&mut self) -> bool {
        let empty = self.free == self.slots();
        if empty {
            self.words.fill(u64::MAX);
            self.free = 0;
        }
        empty
    }

    /// Takes runs of 2^`order` slots, each aligned to its size, lowest first, and calls `out` with the first slot of each, at most `most`
    /// times. Returns the number of runs.
    pub fn take_runs(&mut self, order: u32, most: usize, mut out: impl FnMut(usize)) -> usize {
        let mut count = 0;
        if order > WORD_ORDER {
            let words = 1 << (order - WORD_ORDER);
            let runs = self.words.chunks_exact_mut(words).enumerate();
            for (index, run) in runs.filter(|(_, run)| run.iter().all(|word| *word == 0)).take(most) {
                run.fill(u64::MAX);
                out(index * words * WORD_SLOTS);
                count += 1;
            }
            self.free -= count << order;
            return count;
        }
        for (index, word) in self.words.iter_mut().enumerate() {
            let mut free = !*word;
            (0..order).for_each(|shift| free &= free >> (1 << shift));
            free &= STARTS[order as usize];
            while free != 0 && count < most {
                let first = free.trailing_zeros() as usize;
                free &= free - 1;
                *word |= mask(first, 1 << order);
                out(index * WORD_SLOTS + first);
                count += 1;
            }
            if count == most {
                break;
            }
        }
        self.free -= count << order;
        count
    }

    /// Takes `count` consecutive slots, at `first` or a multiple of `step` above. Returns the first of them.
    pub fn take_odd(&mut self, count: usize, first: usize, step: usize) -> Option<usize> {
        let mut at = first;
        while at.checked_add(count)? <= self.slots() {
            match self.taken_in(at, count) {
                None => {
                    self.each_word(at, count, |word, mask| *word |= mask);
                    self.free -= count;
                    return Some(at);
                }
                Some(taken) => at += (taken + 1 - at).next_multiple_of(step),
            }
        }
        None
    }

    /// Frees `count` slots from `first` on, which are taken.
    pub fn give(&mut self, first: usize, count: usize) {
        self.each_word(first, count, |word, mask| {
            debug_assert_eq!(*word & mask, mask);
            *word &= !mask;
        });
        self.free += count;
    }

    fn taken_in(&self, at: usize, count: usize) -> Option<usize> {
        let end = at + count;
        let mut from = at;
        while from < end {
            let word = self.words[from / WORD_SLOTS] >> (from % WORD_SLOTS);
            if word != 0 {
                let taken = from + word.trailing_zeros() as usize;
                return (taken < end).then_some(taken);
            }
            from = (from / WORD_SLOTS + 1) * WORD_SLOTS;
        }
        None
    }

    fn each_word(&mut self, first: usize, count: usize, mut change: impl FnMut(&mut u64, u64)) {
        let (mut at, end) = (first, first + count);
        while at < end {
            let here = (WORD_SLOTS - at % WORD_SLOTS).min(end - at);
            change(&mut self.words[at / WORD_SLOTS], mask(at % WORD_SLOTS, here));
            at += here;
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/bounce/swiotlb/bits.rs"]
mod tests;
