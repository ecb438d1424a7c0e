//! A set of disjoint spans of granules: two bits for each granule say whether a span begins there, and whether one ends
//! there.

use alloc::boxed::Box;

use crate::heap::slice;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub first: u32,
    pub last: u32,
}

/// The two words of 64 granules, on one cache line.
#[derive(Debug, Clone, Copy, Default)]
struct Word {
    first: u64,
    last: u64,
}

#[derive(Debug)]
pub(super) struct Edges {
    words: Box<[Word]>,
}

impl Edges {
    /// The empty set for positions below `granules`; `None` if there is no memory.
    pub fn new(granules: u64) -> Option<Self> {
        let count = usize::try_from(granules.div_ceil(64)).ok()?;
        Some(Self { words: slice(count, |_| Ok(Word::default())).ok()? })
    }

    /// Adds a span that overlaps no other.
    #[inline]
    pub fn insert(&mut self, span: Span) {
        self.words[index(span.first)].first |= bit(span.first);
        self.words[index(span.last)].last |= bit(span.last);
    }

    /// Removes the spans that cover `span` side by side, without a gap, and returns their number. Returns `None`, with
    /// nothing changed, if there are none. Reads and writes the words of each 64 positions once.
    #[inline]
    pub fn remove_run(&mut self, span: Span) -> Option<u32> {
        let (from, to) = (index(span.first), index(span.last));
        let words = self.words.get_mut(from..=to)?;
        let mask = |at: usize| {
            let low = if at == 0 { u64::MAX << (span.first % 64) } else { u64::MAX };
            let high = if at == to - from { u64::MAX >> (63 - span.last % 64) } else { u64::MAX };
            low & high
        };
        // A span begins at the run's first position, and after the end of each span but the last.
        let (mut begin, mut last, mut count) = (bit(span.first), 0, 0);
        for (at, word) in words.iter().enumerate() {
            last = word.last & mask(at);
            let first = word.first & mask(at);
            if first != (last << 1 | begin) & mask(at) {
                return None;
            }
            begin = last >> 63;
            count += first.count_ones();
        }
        if last & bit(span.last) == 0 {
            return None;
        }
        for (at, word) in words.iter_mut().enumerate() {
            word.first &= !mask(at);
            word.last &= !mask(at);
        }
        Some(count)
    }

    #[inline]
    pub fn next_first(&self, from: u32) -> Option<u32> {
        let mut mask = u64::MAX << (from % 64);
        for (at, word) in self.words.iter().enumerate().skip(index(from)) {
            let first = word.first & mask;
            if first != 0 {
                return Some(at as u32 * 64 + first.trailing_zeros());
            }
            mask = u64::MAX;
        }
        None
    }
}

fn index(position: u32) -> usize {
    position as usize / 64
}

fn bit(position: u32) -> u64 {
    1 << (position % 64)
}

#[cfg(test)]
#[path = "../../../tests/inside/iova/arena/bits.rs"]
mod tests;
