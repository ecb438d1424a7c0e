//! A handle's record of mapped memory: one word for each mapping, at its first granule. So a mapping ends once, as a whole, and by its owner: a call
//! with any other address or length changes nothing.
//!
//! The caller that gets the addresses writes the word, and the one that unmaps them exchanges it for 0: of several callers that end a mapping, one
//! succeeds. (The words need no order: their addresses go from one caller to the next through the domain's caches and lists, which order earlier
//! stores.)

use super::words::{Near, Words};
use crate::addr::{Iova, IovaRange, PageSize};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::heap::OutOfMemory;
use crate::iova::WordLeaf;
use crate::sync::{AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct Book {
    words: Words,
    granule: PageSize,
    /// The longest mapping for which a word has room.
    most: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// The first byte.
    pub iova: Iova,
    /// Bytes from the first to the last, with gaps.
    pub len: u64,
    pub range: IovaRange,
    /// Bytes of the granules that are not the buffer's.
    pub neighbours: u64,
    /// Whether it ends strictly under every policy.
    pub lasting: bool,
}

/// Why the book does not record a mapping. It fits in a register, as a map's frame has no room for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotNoted {
    OutOfMemory,
    /// The word has no room for the length.
    TooLong,
}

/// A mapping begins at the granule.
const LIVE: u64 = 1;
const LASTING: u64 = 1 << 1;
/// The pieces have gaps: the next granule's word has their bytes.
const GAPS: u64 = 1 << 2;
/// No mapping begins at this granule, but a mapping that began before it may extend over it, and `find` reads this word on the way to the beginning. A
/// naturally aligned mapping needs no such word. The word stays when the mapping ends.
const CONTINUES: u64 = 1 << 3;
/// Above the flags: the offset of the first byte in its granule, and above that the length. With `CONTINUES` the number of granules back to the
/// beginning; in the word of gaps their bytes.
const FLAG_BITS: u32 = 4;

impl Entry {
    /// Without the gaps of a list.
    #[inline]
    pub(super) fn used(&self) -> u64 {
        self.range.len().saturating_sub(self.neighbours)
    }
}

impl Book {
    /// An empty book for addresses up to `last`. Allocates nothing yet.
    pub(super) fn new(last: Iova, granule: PageSize, near: Near) -> Self {
        let most = u64::MAX.checked_shr(FLAG_BITS + granule.shift()).unwrap_or(0);
        Self { words: Words::new((last.get() >> granule.shift()).saturating_add(1), near), granule, most }
    }

    pub(super) fn bytes(&self) -> usize {
        self.words.bytes()
    }

    /// Records a mapping, whose addresses are the caller's. Allocates if no mapping was ever near.
    #[inline(always)]
    pub(super) fn note(&self, entry: Entry) -> Result<(), NotNoted> {
        let beside = entry.range.len().saturating_sub(entry.len);
        self.note_with(entry, entry.neighbours.saturating_sub(beside))
    }

    /// As [`note`](Self::note), for a caller that knows the gaps.
    #[inline(always)]
    pub(super) fn note_with(&self, entry: Entry, gaps: u64) -> Result<(), NotNoted> {
        let Entry { iova, len, range, lasting, .. } = entry;
        let shift = self.granule.shift();
        if len > self.most {
            return Err(NotNoted::TooLong);
        }
        let (page, last) = (range.start().get() >> shift, range.last().get() >> shift);
        if last > page {
            self.note_inside(page, last, gaps)?;
        }
        let flag = |set, flag| if set { flag } else { 0 };
        let flags = LIVE | flag(lasting, LASTING) | flag(gaps > 0, GAPS);
        let offset = iova.get() & self.granule.offset_mask();
        self.word_or_make(page)?.store((len << shift | offset) << FLAG_BITS | flags, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn error(&self, why: NotNoted, len: u64) -> DmaMapError {
        match why {
            NotNoted::OutOfMemory => DmaMapError::OutOfMemory,
            NotNoted::TooLong => DmaMapError::TooLong { len, most: self.most },
        }
    }

    #[inline(never)]
    fn note_inside(&self, page: u64, last: u64, gaps: u64) -> Result<(), NotNoted> {
        if gaps > 0 {
            self.word_or_make(page + 1)?.store(gaps << FLAG_BITS, Ordering::Relaxed);
        }
        // The granules that `find`, starting inside the mapping, reads before the first one.
        let after =
            |page: u64| page.checked_add(page & page.wrapping_neg()).filter(|next| *next <= last && page > 0);
        let mut next = after(page);
        while let Some(inside) = next {
            self.word_or_make(inside)?.store((inside - page) << FLAG_BITS | CONTINUES, Ordering::Relaxed);
            next = after(inside);
        }
        Ok(())
    }

    /// Takes the mapping of `len` bytes at `iova` out of the book: the caller unmaps it. Allocates nothing; changes nothing after an error.
    #[inline(always)]
    pub(super) fn take(&self, iova: Iova, len: u64) -> Result<Entry, DmaUnmapError> {
        let nothing = DmaUnmapError::NotMapped { iova };
        let page = iova.get() >> self.granule.shift();
        let word = self.word(page).ok_or(nothing)?;
        let found = word.load(Ordering::Relaxed);
        let entry = self.entry(page, found).filter(|entry| entry.iova == iova).ok_or(nothing)?;
        if entry.len != len {
            return Err(DmaUnmapError::OutOfRange { iova, offset: 0, len, mapped: entry.len });
        }
        let taken = word.compare_exchange(found, 0, Ordering::Relaxed, Ordering::Relaxed);
        if taken.is_ok() { Ok(entry) } else { Err(nothing) }
    }

    /// Takes every mapping out of the book, and calls `f` with it. O(granules that ever had a mapping near).
    pub(super) fn take_all(&self, mut f: impl FnMut(Entry)) {
        self.words.each_leaf(|first, leaf| {
            for page in first..first.saturating_add(WordLeaf::WORDS) {
                let word = leaf.word(page);
                let found = word.load(Ordering::Relaxed);
                if let Some(entry) = self.entry(page, found)
                    && word.compare_exchange(found, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
                {
                    f(entry);
                }
            }
        });
    }

    /// Finds the mapping that contains the address `at`. Reads at most one word for each order.
    pub(super) fn find(&self, at: Iova) -> Option<Entry> {
        let page = at.get() >> self.granule.shift();
        // Clears the lowest set bit of the granule's number each time: the mapping begins at one of these, or one of them says where.
        (0..u64::BITS - self.granule.shift()).find_map(|order| {
            let first = page >> order << order;
            if order > 0 && first == page >> (order - 1) << (order - 1) {
                return None;
            }
            let word = self.word(first)?.load(Ordering::Relaxed);
            let entry = if word & (LIVE | CONTINUES) == CONTINUES {
                let begins = first.checked_sub(word >> FLAG_BITS)?;
                self.entry(begins, self.word(begins)?.load(Ordering::Relaxed))?
            } else {
                self.entry(first, word)?
            };
            (at <= entry.range.last()).then_some(entry)
        })
    }

    #[inline]
    fn word(&self, page: u64) -> Option<&AtomicU64> {
        Some(self.words.leaf(page)?.word(page))
    }

    #[inline]
    fn word_or_make(&self, page: u64) -> Result<&AtomicU64, NotNoted> {
        self.word(page).map_or_else(|| self.make_word(page), Ok)
    }

    #[cold]
    #[inline(never)]
    fn make_word(&self, page: u64) -> Result<&AtomicU64, NotNoted> {
        match self.words.leaf_or_make(page) {
            Ok(Some(leaf)) => Ok(leaf.word(page)),
            Ok(None) | Err(OutOfMemory) => Err(NotNoted::OutOfMemory),
        }
    }

    #[inline(always)]
    fn entry(&self, page: u64, word: u64) -> Option<Entry> {
        if word & LIVE == 0 {
            return None;
        }
        let (shift, rest) = (self.granule.shift(), word >> FLAG_BITS);
        let iova = Iova::new(page << shift | rest & self.granule.offset_mask());
        let len = rest >> shift;
        let range = IovaRange::of_pages(iova, len, self.granule)?;
        let gaps =
            if word & GAPS == 0 { 0 } else { self.word(page + 1)?.load(Ordering::Relaxed) >> FLAG_BITS };
        let neighbours = (range.len() - len).saturating_add(gaps);
        Some(Entry { iova, len, range, neighbours, lasting: word & LASTING != 0 })
    }
}

#[cfg(all(test, loom))]
#[path = "../../../tests/inside/dma/ops/book_model.rs"]
mod model;

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/dma/ops/book.rs"]
mod tests;
