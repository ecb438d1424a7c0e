//! Taking: one range, or several equal ones with one search.

use super::Bitmap;
use super::PAID_PAGES;
use super::error::BitmapError;
use super::leaf::LEAF_PAGES;
use super::node::{Link, base, slot};
use super::path::{Path, in_leaf};
use super::runs::MAX_ORDER;
use super::search::is_natural;

impl Bitmap {
    /// Takes a range of `pages` pages for each place in `out`, as so many calls of [`Bitmap::alloc`] would, and
    /// writes their first pages there. Returns how many it took: fewer only where nothing fits any more, or
    /// memory is short.
    ///
    /// The places are those of so many single calls, in that order. Ranges with natural alignment that lie in
    /// the same leaf of 512 pages are found and entered together.
    ///
    /// Costs at most as much as the single calls; may allocate as they may.
    ///
    /// # Errors
    /// As [`Bitmap::alloc`] where there is not even one.
    pub fn alloc_run(
        &mut self,
        pages: u64,
        align_order: u32,
        max_page: u64,
        out: &mut [u64],
    ) -> Result<usize, BitmapError> {
        let mut done = 0;
        while let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.take_run(pages, align_order, max_page, rest) {
                Ok(taken) => done += taken,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Takes at least one range, and more if that is cheap, at most one for each place in `out`; returns how
    /// many.
    #[inline]
    pub(super) fn take_run(
        &mut self,
        pages: u64,
        align_order: u32,
        max_page: u64,
        out: &mut [u64],
    ) -> Result<usize, BitmapError> {
        if pages == 0 {
            return Err(BitmapError::Empty);
        }
        if align_order > MAX_ORDER {
            return Err(BitmapError::Alignment { align_order, max: MAX_ORDER });
        }
        let limit = max_page.saturating_add(1);
        let mut path = Path::new();
        let Some(found) = self.find(pages, align_order, limit, &mut path) else {
            return Err(self.no_fit(pages, align_order, max_page));
        };
        let page = found.page;
        if let Some(first) = out.first_mut() {
            *first = page;
        }
        let Some(leaf) = found.leaf else {
            return self.take_anywhere(page, pages).map(|()| 1);
        };
        // Where the limit lies in this leaf, the next place may be behind it.
        if out.len() <= 1 || limit.saturating_sub(page) < LEAF_PAGES.into() || !is_natural(pages, align_order)
        {
            self.take_in_leaf(page, pages, leaf, &path);
            return Ok(1);
        }
        Ok(self.take_several(pages, align_order, page, leaf, &path, out.iter_mut()))
    }

    /// Takes ranges in one leaf, one for each of `out`, or as many as fit. `page` is one of the leaf's.
    fn take_several<'a>(
        &mut self,
        pages: u64,
        align_order: u32,
        page: u64,
        leaf: u32,
        path: &Path,
        out: impl Iterator<Item = &'a mut u64>,
    ) -> usize {
        let mut bits = *self.leaves.get(leaf);
        let mut taken = 0;
        for out in out {
            let Some(start) = bits.place(pages, align_order, self.placement) else {
                break;
            };
            bits.set(start, start + pages as u32, false);
            *out = base(page, 0) + u64::from(start);
            taken += 1;
        }
        self.free_pages -= taken as u64 * pages;
        *self.leaves.get_mut(leaf) = bits;
        let old = self.nodes.get(path.node(1)).fits[slot(page, 1)];
        self.idle -= usize::from(old.is_whole());
        // That may be more than has changed, which costs time at most.
        self.outdate(path, 1, true);
        self.update(page, path, 1, bits.fit());
        taken
    }

    /// Takes a range that is free, wherever it lies. May allocate.
    fn take_anywhere(&mut self, page: u64, pages: u64) -> Result<(), BitmapError> {
        if u64::from(in_leaf(page)) + pages <= LEAF_PAGES.into() {
            let mut path = Path::new();
            if let Some(leaf) = self.locate(page, &mut path) {
                self.take_in_leaf(page, pages, leaf, &path);
                return Ok(());
            }
        }
        let state = if pages <= PAID_PAGES { Link::PAID } else { Link::TAKEN };
        let end = page.saturating_add(pages);
        if self.set_blocks(page, end, state) { Ok(()) } else { self.paint(page, end, state) }
    }
}
