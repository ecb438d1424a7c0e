//! Addresses as Linux kept them until 2016: the live ranges in order, searched one by one.

use std::collections::BTreeMap;

use portcullis::iova::BitmapError;

use crate::iova::allocator::Pages;
use crate::iova::portcullis::Structure;

/// The live ranges, and where the search for a gap begins: below the range that was taken last, or above one that was freed
/// higher up. From there it goes down, one range after the other, until there is room.
#[derive(Debug)]
pub(super) struct Ranges {
    /// First page and number of pages.
    live: BTreeMap<u64, u64>,
    /// All from here on is taken, or was not freed since it was searched.
    top: u64,
    pages: u64,
}

impl Ranges {
    /// The highest place below `top` for `pages` pages.
    fn below(&self, top: u64, pages: u64, align: u64) -> Option<u64> {
        let place = |end: u64| Some(end.checked_sub(pages)? / align * align);
        let mut end = top;
        for (first, len) in self.live.range(..top).rev() {
            if let Some(place) = place(end).filter(|place| *place >= first + len) {
                return Some(place);
            }
            end = *first;
        }
        place(end)
    }

    /// Pages of the range that begins at `first`.
    pub(super) fn find(&self, first: u64) -> Option<u64> {
        self.live.get(&first).copied()
    }
}

impl Structure for Ranges {
    fn with_pages(pages: u64) -> Result<Self, BitmapError> {
        Ok(Self { live: BTreeMap::new(), top: pages, pages })
    }

    fn alloc(&mut self, pages: u64, order: u32, last_page: u64) -> Option<u64> {
        let (all, align) = (self.pages.min(last_page + 1), 1 << order);
        let found = self.below(self.top.min(all), pages, align).or_else(|| self.below(all, pages, align))?;
        self.live.insert(found, pages);
        self.top = found;
        Some(found)
    }

    fn free(&mut self, range: Pages) -> bool {
        let freed = self.live.remove(&range.first) == Some(range.pages);
        if freed && range.first >= self.top {
            self.top = self.live.range(range.first..).next().map_or(self.pages, |above| *above.0);
        }
        freed
    }

    fn free_pages(&self) -> u64 {
        self.pages - self.live.values().sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_goes_down_from_what_was_taken_last_or_freed_above_it() {
        let mut ranges = Ranges::with_pages(16).unwrap();
        let mut take = |pages: u64, order| ranges.alloc(pages, order, 15);
        assert_eq!([take(1, 0), take(4, 2), take(1, 0), take(2, 1)], [Some(15), Some(8), Some(7), Some(4)]);
        assert!(ranges.free(Pages { first: 15, pages: 1 }) && !ranges.free(Pages { first: 15, pages: 1 }));
        // Also the gap below the first, which alignment left.
        assert_eq!([1, 2, 1].map(|pages| ranges.alloc(pages, 0, 15)), [Some(15), Some(13), Some(12)]);
        assert_eq!((ranges.alloc(4, 0, 15), ranges.alloc(4, 0, 15)), (Some(0), None));
        assert!(ranges.free(Pages { first: 4, pages: 2 }));
        assert_eq!((ranges.alloc(2, 0, 15), ranges.free_pages()), (Some(5), 1));
        assert_eq!((ranges.find(5), ranges.find(6)), (Some(2), None));
    }
}
