//! The metadata of a space: a word for each range, found by the range's first page and size. No two live ranges share a
//! word, as each begins at a multiple of its size.

use super::class::Class;
use super::links::{Links, WordLeaf};
use super::word::Link;
use crate::heap::OutOfMemory;
use crate::sync::{AtomicU64, Ordering};

pub(super) const ARRAYS: usize = 3;

/// Three sparse arrays. One word per page serves ranges of 1 to 4 pages, one per 8 pages ranges of 8 to 32, one per 64
/// pages larger ones. Fully populated they take 9.1 bytes per page.
#[derive(Debug)]
pub(super) struct RangeMeta([Links; ARRAYS]);

#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub array: usize,
    pub index: u64,
}

impl Place {
    #[inline]
    pub(super) const fn of(page: u64, class: Class) -> Self {
        Self { array: class.array(), index: page >> Self::shift(class) }
    }

    pub(super) const fn shift(class: Class) -> u32 {
        3 * class.array() as u32
    }
}

impl RangeMeta {
    pub(super) fn new(end: u64) -> Self {
        Self([0, 3, 6].map(|shift| Links::new(end.div_ceil(1 << shift))))
    }

    /// Returns the word of the range of `order` at `page`, if its leaf exists, as it does if there ever was such a
    /// range.
    pub(super) fn word(&self, page: u64, order: u32) -> Option<&AtomicU64> {
        let place = Place::of(page, Class::of(order));
        Some(self.leaf(place)?.word(place.index))
    }

    pub(super) fn leaf(&self, place: Place) -> Option<&WordLeaf> {
        self.0.get(place.array)?.leaf(place.index)
    }

    pub(super) fn make(&self, page: u64, order: u32, word: u64) -> Result<(), OutOfMemory> {
        let place = Place::of(page, Class::of(order));
        if let Some(leaf) = self.0[place.array].leaf_or_make(place.index)? {
            leaf.word(place.index).store(word, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the page and the order of the range that `link` leads to, and the link to the next. Returns `None` at a
    /// list's end, and if the word is not that of a range in a list.
    pub(super) fn follow(&self, link: Link) -> Option<(u64, u32, Link)> {
        let (page, order) = (link.page()?, link.order());
        let next = Link::from_bits(self.word(page, order)?.load(Ordering::Relaxed));
        next.is_link().then_some((page, order, next))
    }

    pub(super) fn write(&self, page: u64, order: u32, word: u64) {
        if let Some(place) = self.word(page, order) {
            place.store(word, Ordering::Relaxed);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.0.iter().map(Links::bytes).sum::<usize>()
    }
}
