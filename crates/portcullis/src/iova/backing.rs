//! The structure behind the CPUs' lists: one of two, behind one interface.

use super::bitmap::{Bitmap, BitmapError, MAX_ORDER};
use super::config::Structure;
use super::placement::Placement;
use super::tree::HoleTree;

/// The free pages of a space, and how few there ever were. Used under the space's lock.
#[derive(Debug)]
pub(super) struct Backing {
    free: Free,
    total: u64,
    least_free: u64,
}

#[derive(Debug)]
enum Free {
    Tree(HoleTree),
    Bitmap(Bitmap),
}

impl Backing {
    /// Nothing free yet.
    pub(super) fn new(structure: Structure, placement: Placement) -> Self {
        let free = match structure {
            Structure::HoleTree => Free::Tree(HoleTree::with_placement(placement)),
            Structure::Bitmap => Free::Bitmap(Bitmap::new(placement)),
        };
        Self { free, total: 0, least_free: 0 }
    }

    /// Declares the `pages` pages from `first` on free.
    pub(super) fn add(&mut self, first: u64, pages: u64) -> Result<(), BitmapError> {
        match &mut self.free {
            Free::Tree(tree) => tree.add(first, pages)?,
            Free::Bitmap(bitmap) => bitmap.add(first, pages)?,
        }
        self.count_all();
        Ok(())
    }

    /// Takes the `pages` pages from `first` on out for good.
    pub(super) fn reserve(&mut self, first: u64, pages: u64) -> Result<(), BitmapError> {
        match &mut self.free {
            Free::Tree(tree) => tree.reserve(first, pages)?,
            Free::Bitmap(bitmap) => bitmap.reserve(first, pages)?,
        };
        self.count_all();
        Ok(())
    }

    fn count_all(&mut self) {
        self.total = self.free_pages();
        self.least_free = self.total;
    }

    /// `pages` free pages that begin at a multiple of 2^`order` and end below `end_page`.
    pub(super) fn alloc(&mut self, pages: u64, order: u32, end_page: u64) -> Result<u64, BitmapError> {
        let order = order.min(MAX_ORDER);
        let max_page = last_below(end_page, pages, order)?;
        let page = match &mut self.free {
            Free::Tree(tree) => tree.alloc(pages, order, max_page)?,
            Free::Bitmap(bitmap) => bitmap.alloc(pages, order, max_page)?,
        };
        self.least_free = self.least_free.min(self.free_pages());
        Ok(page)
    }

    /// Up to `out.len()` ranges of 2^`order` pages at their natural alignment, below `end_page`: the places
    /// of so many single calls, in that order. How many there were.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc) where there is not even one.
    pub(super) fn alloc_run(
        &mut self,
        order: u32,
        end_page: u64,
        out: &mut [u64],
    ) -> Result<usize, BitmapError> {
        let Some(first) = out.first_mut() else {
            return Ok(0);
        };
        let taken = match &mut self.free {
            Free::Bitmap(bitmap) => {
                let max_page = last_below(end_page, 1 << order, order)?;
                bitmap.alloc_run(out.len(), 1 << order, order, max_page, out)?
            }
            Free::Tree(_) => {
                *first = self.alloc(1 << order, order, end_page)?;
                let more = out[1..].iter_mut().map_while(|place| {
                    *place = self.alloc(1 << order, order, end_page).ok()?;
                    Some(())
                });
                1 + more.count()
            }
        };
        self.least_free = self.least_free.min(self.free_pages());
        Ok(taken)
    }

    /// Takes back the range of `pages` pages at `page`. Cannot fail for what was handed out.
    pub(super) fn free(&mut self, page: u64, pages: u64) {
        let freed = match &mut self.free {
            Free::Tree(tree) => tree.free(page, pages),
            Free::Bitmap(bitmap) => bitmap.free(page, pages),
        };
        debug_assert!(freed.is_ok(), "{freed:?}");
    }

    /// Takes back ranges of `pages` pages each.
    pub(super) fn free_all(&mut self, firsts: &[u64], pages: u64) {
        firsts.iter().for_each(|page| self.free(*page, pages));
    }

    /// Pages that could be handed out when all were free.
    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    /// Pages that are free.
    pub(super) const fn free_pages(&self) -> u64 {
        match &self.free {
            Free::Tree(tree) => tree.free_pages(),
            Free::Bitmap(bitmap) => bitmap.free_pages(),
        }
    }

    /// The fewest pages that ever were free.
    pub(super) const fn least_free(&self) -> u64 {
        self.least_free
    }

    /// Pages of the largest hole.
    pub(super) fn largest_hole(&self) -> u64 {
        match &self.free {
            Free::Tree(tree) => tree.largest_hole(),
            Free::Bitmap(bitmap) => bitmap.largest_hole(),
        }
    }

    /// Bytes of memory that the structure takes.
    pub(super) const fn memory_bytes(&self) -> usize {
        match &self.free {
            Free::Tree(tree) => tree.memory_bytes(),
            Free::Bitmap(bitmap) => bitmap.memory_bytes(),
        }
    }
}

/// The last page below `end_page`, for a request that there is none for below page 0.
fn last_below(end_page: u64, pages: u64, align_order: u32) -> Result<u64, BitmapError> {
    let none = BitmapError::NoFit { pages, align_order, max_page: 0, free: 0, largest: 0 };
    end_page.checked_sub(1).ok_or(none)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::dice::Dice;
    use alloc::vec;

    /// Both structures give one answer, which is that of so many single calls, and keep one account.
    #[test]
    fn a_run_is_so_many_single_calls() {
        for placement in [Placement::TopDown, Placement::BottomUp] {
            let mut all = [Structure::Bitmap, Structure::HoleTree, Structure::HoleTree].map(|structure| {
                let mut backing = Backing::new(structure, placement);
                backing.add(3, 2000).unwrap();
                backing.reserve(700, 90).unwrap();
                backing
            });
            let (mut dice, mut live) = (Dice(1), vec![]);
            for _ in 0..2000 {
                let (order, end, count) = (dice.below(5) as u32, dice.below(2100), dice.below(20) as usize);
                let [mut run, mut runs] = [vec![0; count], vec![0; count]];
                let [bitmap, tree, single] = &mut all;
                let taken = bitmap.alloc_run(order, end, &mut run).unwrap_or(0);
                assert_eq!(tree.alloc_run(order, end, &mut runs).unwrap_or(0), taken);
                for page in &run[..taken] {
                    assert!(page + (1 << order) <= end);
                    assert_eq!(single.alloc(1 << order, order, end), Ok(*page));
                    live.push((*page, order));
                }
                assert_eq!(run[..taken], runs[..taken]);
                assert!(taken == count || single.alloc(1 << order, order, end).is_err());
                while live.len() as u64 > dice.below(200) {
                    let (page, order) = live.swap_remove(dice.below(live.len() as u64) as usize);
                    all.iter_mut().for_each(|backing| backing.free_all(&[page], 1 << order));
                }
                let free = 2000 - 90 - live.iter().map(|(_, order)| 1 << order).sum::<u64>();
                for backing in &all {
                    assert_eq!((backing.total(), backing.free_pages()), (2000 - 90, free));
                    assert_eq!(backing.least_free(), all[2].least_free());
                }
            }
        }
    }
}
