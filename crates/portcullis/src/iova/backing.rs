//! What is behind the CPUs' lists: the bitmap of free pages, and how few there ever were.

use super::bitmap::{Bitmap, BitmapError, MAX_ORDER};
use super::placement::Placement;

/// The free pages of a space. Used under the space's lock.
#[derive(Debug)]
pub(super) struct Backing {
    bitmap: Bitmap,
    least_free: u64,
}

impl Backing {
    /// Nothing free yet.
    pub(super) const fn new(placement: Placement) -> Self {
        Self { bitmap: Bitmap::new(placement), least_free: 0 }
    }

    /// Declares the `pages` pages from `first` on free, before anything is handed out.
    pub(super) fn add(&mut self, first: u64, pages: u64) -> Result<(), BitmapError> {
        self.bitmap.add(first, pages)?;
        self.least_free = self.free_pages();
        Ok(())
    }

    /// Takes the `pages` pages from `first` on out for good, before anything is handed out.
    pub(super) fn reserve(&mut self, first: u64, pages: u64) -> Result<(), BitmapError> {
        self.bitmap.reserve(first, pages)?;
        self.least_free = self.free_pages();
        Ok(())
    }

    /// `pages` free pages that begin at a multiple of 2^`order`, or as large a one as there is, and end below
    /// `end_page`.
    pub(super) fn alloc(&mut self, pages: u64, order: u32, end_page: u64) -> Result<u64, BitmapError> {
        let order = order.min(MAX_ORDER);
        let page = self.bitmap.alloc(pages, order, last_below(end_page)?)?;
        self.least_free = self.least_free.min(self.free_pages());
        Ok(page)
    }

    /// Up to `out.len()` ranges of 2^`order` pages at their natural alignment, from page `first` to below
    /// `end`: the places of as many single calls, in that order. Returns how many there were; 0 says no
    /// more than that, and costs a search alone.
    ///
    /// # Errors
    /// [`BitmapError::OutOfMemory`] where there is not even one.
    pub(super) fn alloc_run(
        &mut self,
        order: u32,
        (first, end): (u64, u64),
        out: &mut [u64],
    ) -> Result<usize, BitmapError> {
        let Some(last) = end.checked_sub(1) else { return Ok(0) };
        let taken = self.bitmap.take_runs(1 << order, order, (first, last), out)?;
        self.least_free = self.least_free.min(self.free_pages());
        Ok(taken)
    }

    /// Takes back the range of `pages` pages at `page`. Cannot fail for what was handed out.
    pub(super) fn free(&mut self, page: u64, pages: u64) {
        let freed = self.bitmap.free(page, pages);
        debug_assert!(freed.is_ok(), "{freed:?}");
    }

    /// Takes back ranges of `pages` pages each.
    pub(super) fn free_all(&mut self, firsts: &[u64], pages: u64) {
        firsts.iter().for_each(|page| self.free(*page, pages));
    }

    /// Pages that are free.
    pub(super) const fn free_pages(&self) -> u64 {
        self.bitmap.free_pages()
    }

    /// The fewest pages that ever were free.
    pub(super) const fn least_free(&self) -> u64 {
        self.least_free
    }

    /// Pages of the largest hole.
    pub(super) fn largest_hole(&mut self) -> u64 {
        self.bitmap.largest_hole()
    }

    /// Bytes of memory that the bitmap takes.
    pub(super) const fn memory_bytes(&self) -> usize {
        self.bitmap.memory_bytes()
    }
}

/// The last page below `end_page`, for a request that there is none for below page 0.
fn last_below(end_page: u64) -> Result<u64, BitmapError> {
    end_page.checked_sub(1).ok_or(BitmapError::NoFit)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::dice::Dice;
    use alloc::vec;

    /// A run is what so many single calls give, and both keep one account.
    #[test]
    fn a_run_is_so_many_single_calls() {
        for placement in [Placement::TopDown, Placement::BottomUp] {
            let mut both = [(); 2].map(|()| {
                let mut backing = Backing::new(placement);
                backing.add(3, 2000).unwrap();
                backing.reserve(700, 90).unwrap();
                backing
            });
            let (mut dice, mut live) = (Dice(1), vec![]);
            for _ in 0..2000 {
                let (order, end, count) = (dice.below(5) as u32, dice.below(2100), dice.below(20) as usize);
                // A search from the bottom up finds a place below the first page before one above it.
                let first = if placement == Placement::TopDown { dice.below(1500) } else { 0 };
                let mut run = vec![0; count];
                let [several, single] = &mut both;
                let taken = several.alloc_run(order, (first, end), &mut run).unwrap();
                for page in &run[..taken] {
                    assert!(*page >= first && page + (1 << order) <= end);
                    assert_eq!(single.alloc(1 << order, order, end), Ok(*page));
                    live.push((*page, order));
                }
                if taken < count
                    && let Ok(next) = single.alloc(1 << order, order, end)
                {
                    assert!(next < first);
                    single.free(next, 1 << order);
                    several.alloc(1 << order, order, end).unwrap();
                    several.free(next, 1 << order);
                }
                while live.len() as u64 > dice.below(200) {
                    let (page, order) = live.swap_remove(dice.below(live.len() as u64) as usize);
                    both.iter_mut().for_each(|backing| backing.free_all(&[page], 1 << order));
                }
                let free = 2000 - 90 - live.iter().map(|(_, order)| 1 << order).sum::<u64>();
                for backing in &both {
                    assert_eq!((backing.free_pages(), backing.least_free()), (free, both[1].least_free()));
                }
            }
        }
    }
}
