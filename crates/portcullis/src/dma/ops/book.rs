//! What a handle knows of the memory that it has mapped: one word for each mapping, at its first granule. So a mapping ends
//! once, as a whole, and by its owner: a caller that names anything else changes nothing.
//!
//! A word is written by the caller that has just been given the addresses, and cleared by the one that is to unmap them, which
//! exchanges it: of several callers that end one mapping, one has it. (The words need no order: their addresses go from one
//! caller to the next through the domain's lists, which order what was stored before.)

use crate::addr::{Iova, IovaRange, PageSize};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::heap::OutOfMemory;
use crate::iova::Links;
use crate::sync::{AtomicU64, Ordering};

/// The words of all granules of a domain's addresses.
#[derive(Debug)]
pub(super) struct Book {
    words: Links,
    granule: PageSize,
}

/// A mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its first byte.
    pub iova: Iova,
    /// Bytes from the first to the last.
    pub len: u64,
    /// Bytes of its granules that are not the buffer's.
    pub neighbours: u64,
    /// Whether it ends strictly whatever the policy.
    pub lasting: bool,
}

/// A mapping begins at the granule.
const LIVE: u64 = 1;
/// A mapping is lasting.
const LASTING: u64 = 1 << 1;
/// A mapping has gaps between its pieces: the next granule's word says of how many bytes.
const GAPS: u64 = 1 << 2;
/// What follows in a word: the offset of the first byte in its granule, and above that the length.
const FLAG_BITS: u32 = 3;

impl Entry {
    /// Bytes of the buffer: those of a list with gaps are fewer than from its first to its last.
    pub(super) fn used(&self, granule: PageSize) -> u64 {
        self.range(granule).map_or(0, |range| range.len().saturating_sub(self.neighbours))
    }

    /// The granules of the mapping.
    pub(super) fn range(&self, granule: PageSize) -> Option<IovaRange> {
        IovaRange::of_pages(self.iova, self.len, granule)
    }
}

impl Book {
    /// Makes the book of a domain with addresses up to `last`, in these granules. Allocates nothing yet.
    pub(super) fn new(last: Iova, granule: PageSize) -> Self {
        Self { words: Links::new((last.get() >> granule.shift()).saturating_add(1)), granule }
    }

    /// The most bytes of a mapping that a word has room for.
    pub(super) fn most(&self) -> u64 {
        u64::MAX.checked_shr(FLAG_BITS + self.granule.shift()).unwrap_or(0)
    }

    /// Bytes of memory that the book takes, itself apart.
    pub(super) fn bytes(&self) -> usize {
        self.words.bytes()
    }

    /// Notes a mapping, whose addresses are the caller's. Allocates where no mapping was ever near.
    pub(super) fn note(&self, entry: Entry) -> Result<(), DmaMapError> {
        let Entry { iova, len, neighbours, lasting } = entry;
        let most = self.most();
        let page = iova.get() >> self.granule.shift();
        let range =
            entry.range(self.granule).filter(|_| len <= most).ok_or(DmaMapError::TooLong { len, most })?;
        let gaps = neighbours.saturating_sub(range.len().saturating_sub(len));
        if gaps > 0 {
            self.word_or_make(page + 1)?.store(gaps, Ordering::Relaxed);
        }
        let flag = |set, flag| if set { flag } else { 0 };
        let flags = LIVE | flag(lasting, LASTING) | flag(gaps > 0, GAPS);
        let offset = iova.get() & self.granule.offset_mask();
        let word = (len << self.granule.shift() | offset) << FLAG_BITS | flags;
        self.word_or_make(page)?.store(word, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the mapping of `len` bytes at `iova` out of the book: it is the caller's to unmap. Cannot fail for want of memory.
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing changed.
    #[inline]
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

    /// Finds the mapping that has the address `at`, anywhere in it. Looks at a word for each size that an aligned range can have.
    pub(super) fn find(&self, at: Iova) -> Option<Entry> {
        let page = at.get() >> self.granule.shift();
        // Addresses of a mapping begin at a multiple of their number, rounded up to a power of two.
        (0..u64::BITS - self.granule.shift()).find_map(|order| {
            let first = page >> order << order;
            // Each beginning is looked at once.
            if order > 0 && first == page >> (order - 1) << (order - 1) {
                return None;
            }
            let entry = self.entry(first, self.word(first)?.load(Ordering::Relaxed))?;
            let last = entry.range(self.granule)?.last();
            (at <= last).then_some(entry)
        })
    }

    fn word(&self, page: u64) -> Option<&AtomicU64> {
        Some(self.words.leaf(page)?.word(page))
    }

    fn word_or_make(&self, page: u64) -> Result<&AtomicU64, DmaMapError> {
        match self.words.leaf_or_make(page) {
            Ok(Some(leaf)) => Ok(leaf.word(page)),
            Ok(None) | Err(OutOfMemory) => Err(DmaMapError::OutOfMemory),
        }
    }

    /// The mapping that begins in the granule number `page`, if `word`, which is its word, says that one does.
    #[inline]
    fn entry(&self, page: u64, word: u64) -> Option<Entry> {
        if word & LIVE == 0 {
            return None;
        }
        let (shift, rest) = (self.granule.shift(), word >> FLAG_BITS);
        let iova = Iova::new(page << shift | rest & self.granule.offset_mask());
        let len = rest >> shift;
        let range = IovaRange::of_pages(iova, len, self.granule)?;
        let gaps = if word & GAPS == 0 { 0 } else { self.word(page + 1)?.load(Ordering::Relaxed) };
        let neighbours = (range.len() - len).saturating_add(gaps);
        Some(Entry { iova, len, neighbours, lasting: word & LASTING != 0 })
    }
}
