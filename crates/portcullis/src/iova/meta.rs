//! The metadata of a whole space: a word for each range, found by its first page and its size.

use super::class::Class;
use super::links::{Leaf, Links, OutOfMemory};
use super::word::Link;
use crate::sync::{AtomicU64, Ordering};

/// How many arrays there are.
pub(super) const ARRAYS: usize = 3;

/// Sparse arrays: a word for each page, for ranges of up to 4 pages; for each 8 pages, for ranges of up to 32;
/// and for each 64 pages, for larger ones. 9.1 bytes a page if all are in use everywhere.
#[derive(Debug)]
pub(super) struct RangeMeta([Links; ARRAYS]);

/// Where a word is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub array: usize,
    pub index: u64,
}

impl Place {
    /// The place of the word of the range of `class` at `page`. No two ranges share one, since each begins at
    /// a multiple of its size.
    #[inline]
    pub(super) const fn of(page: u64, class: Class) -> Self {
        Self { array: class.array(), index: page >> Self::shift(class) }
    }

    /// The binary logarithm of the pages that one word is for in the array of `class`.
    pub(super) const fn shift(class: Class) -> u32 {
        3 * class.array() as u32
    }
}

impl RangeMeta {
    /// For the pages below `end`.
    pub(super) fn new(end: u64) -> Self {
        Self([0, 3, 6].map(|shift| Links::new(end.div_ceil(1 << shift))))
    }

    /// The word of the range of order `order` at `page`, if there ever was one there.
    pub(super) fn word(&self, page: u64, order: u32) -> Option<&AtomicU64> {
        let place = Place::of(page, Class::of(order));
        Some(self.leaf(place)?.word(place.index))
    }

    /// The leaf with the word at `place`.
    pub(super) fn leaf(&self, place: Place) -> Option<&Leaf> {
        self.0.get(place.array)?.leaf(place.index)
    }

    /// Writes `word` for the range of order `order` at `page`; makes room for it where there is none.
    pub(super) fn make(&self, page: u64, order: u32, word: u64) -> Result<(), OutOfMemory> {
        let place = Place::of(page, Class::of(order));
        if let Some(leaf) = self.0[place.array].leaf_or_make(place.index)? {
            leaf.word(place.index).store(word, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Where `link` leads: page, order, and what comes after it. `None` at a list's end.
    pub(super) fn follow(&self, link: Link) -> Option<(u64, u32, Link)> {
        let (page, order) = (link.page()?, link.order());
        let next = Link::from_bits(self.word(page, order)?.load(Ordering::Relaxed));
        next.is_link().then_some((page, order, next))
    }

    /// Writes `word` for the range of order `order` at `page`, if it has a word.
    pub(super) fn write(&self, page: u64, order: u32, word: u64) {
        if let Some(place) = self.word(page, order) {
            place.store(word, Ordering::Relaxed);
        }
    }

    /// Bytes of memory that the range metadata takes, itself among them.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.0.iter().map(Links::bytes).sum::<usize>()
    }
}
