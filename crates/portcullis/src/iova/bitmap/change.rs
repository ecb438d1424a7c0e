//! The common changes, and their updates of the nodes above. After each change the fits of all nodes above are exact,
//! and nodes whose runs may have changed are stale.
//!
//! A common change lies inside one leaf that has bits, or covers whole adjoining blocks without bits, which is what
//! most aligned ranges of a leaf or more are.

use super::Bitmap;
use super::BitmapError;
use super::fit::{FitBits, LEAF_PAGES};
use super::node::{Child, FAN, base, bits, child_index, pages as pages_of};
use super::path::{Path, in_leaf};

impl Bitmap {
    /// Allocates up to `most` ranges in the leaf `leaf`, in pages `[from, limit)`, and calls `put` with the first page
    /// of each. Returns their number. `page` is one of the leaf's, and `path` leads there.
    #[inline(never)]
    pub(super) fn take_several(
        &mut self,
        (pages, align_order): (u64, u32),
        page: u64,
        (from, limit): (u64, u64),
        leaf: u32,
        path: &Path,
        (most, put): (usize, impl FnMut(u64)),
    ) -> usize {
        let first = base(page, 0);
        let in_leaf = |page: u64| page.saturating_sub(first).min(LEAF_PAGES.into()) as u32;
        let all = *self.store.leaf(leaf);
        let allowed = all.only(in_leaf(from), in_leaf(limit));
        let mut left = allowed;
        let taken = left.take(pages, align_order, first, most, put);
        let bits = all.less(allowed, left);
        self.free_pages -= taken as u64 * pages;
        *self.store.leaf_mut(leaf) = bits;
        let old = self.store.node(path.node(1)).fits[child_index(page, 1)];
        self.idle -= usize::from(old.is_whole());
        // Runs may not have changed in all of these nodes: that costs only time.
        self.outdate(path, 1);
        self.update(page, path, 1, bits.fit());
        taken
    }

    pub(super) fn take_anywhere(&mut self, page: u64, pages: u64) -> Result<(), BitmapError> {
        let end = page.saturating_add(pages);
        if self.set_blocks(page, end, Child::TAKEN) { Ok(()) } else { self.paint(page, end, Child::TAKEN) }
    }

    /// Puts `[first, end)` into `state`, free or used, if it consists of blocks of one node, all without bits and in
    /// the opposite state. Otherwise changes nothing. Returns whether it did.
    pub(super) fn set_blocks(&mut self, first: u64, end: u64, state: Child) -> bool {
        // The highest level at which the range consists of whole blocks.
        let Some(level) = (first | end).trailing_zeros().checked_sub(bits(0)) else {
            return false;
        };
        let level = level / FAN.ilog2();
        if level >= self.top || end > self.end() || (first ^ (end - 1)) >= pages_of(level + 1) {
            return false;
        }
        let mut path = Path::new();
        let mut number = self.root;
        for above in (level + 2..=self.top).rev() {
            path.set(above, number);
            match self.store.node(number).children[child_index(first, above)].number() {
                Some(child) => number = child,
                None => return false,
            }
        }
        path.set(level + 1, number);
        let blocks = child_index(first, level + 1)..=child_index(end - 1, level + 1);
        let node = self.store.node_mut(number);
        let is_free = state == Child::FREE;
        let opposite = if is_free { Child::TAKEN } else { Child::FREE };
        if node.children[blocks.clone()].iter().any(|below| *below != opposite) {
            return false;
        }
        node.children[blocks.clone()].fill(state);
        // `update` sets the last one, with the nodes above.
        node.fits[*blocks.start()..*blocks.end()].fill(state.fit());
        self.free_pages =
            if is_free { self.free_pages + (end - first) } else { self.free_pages - (end - first) };
        self.outdate(&path, level + 1);
        self.update(end - 1, &path, level + 1, state.fit().bits());
        true
    }

    #[inline]
    pub(super) fn take_in_leaf(&mut self, page: u64, pages: u64, leaf: u32, path: &Path) {
        self.free_pages -= pages;
        let old = self.store.node(path.node(1)).fits[child_index(page, 1)].bits();
        self.toggle(page, pages as u32, leaf, old, path);
    }

    /// Frees `[first, end)` if it lies in one leaf that has bits, and all of it is used. Returns whether it was used,
    /// or `None` if it does not lie in such a leaf. Unless that is `Some(true)`, nothing has changed.
    #[inline]
    pub(super) fn free_in_leaf(&mut self, first: u64, end: u64) -> Option<bool> {
        if (first ^ (end - 1)) >= LEAF_PAGES.into() {
            return None;
        }
        let mut path = Path::new();
        let leaf = self.locate(first, &mut path)?;
        let pages = end - first;
        // Loaded early, so that the CPU waits for it and for the leaf at the same time.
        let old = self.store.node(path.node(1)).fits[child_index(first, 1)].bits();
        if !self.store.leaf(leaf).is_used(in_leaf(first), in_leaf(first) + pages as u32) {
            return Some(false);
        }
        self.free_pages += pages;
        self.toggle(first, pages as u32, leaf, old, &path);
        Some(true)
    }

    /// Makes a free range of a leaf used, or a used one free. `old` is the leaf's fit before.
    fn toggle(&mut self, page: u64, pages: u32, leaf: u32, old: FitBits, path: &Path) {
        let (start, end) = (in_leaf(page), in_leaf(page) + pages);
        let bits = self.store.leaf(leaf).toggled(start, end);
        *self.store.leaf_mut(leaf) = bits;
        let new = bits.fit();
        self.idle = self.idle + usize::from(new.is_whole()) - usize::from(old.is_whole());
        let node = self.store.node(path.node(1));
        if !node.is_runs_stale {
            self.outdate_leaf(leaf, start, end, path);
        }
        if old != new {
            self.update(page, path, 1, new);
        }
    }

    /// Makes the runs at a leaf's boundaries stale, if the range, with the free pages around it, touches one.
    #[cold]
    #[inline(never)]
    fn outdate_leaf(&mut self, leaf: u32, start: u32, end: u32, path: &Path) {
        let mut bits = *self.store.leaf(leaf);
        bits.set(start, end, true);
        if bits.is_edge(start, end) {
            self.outdate(path, 1);
        }
    }

    /// Updates the fits in the nodes of `level` and above on the way to `page`; `new` is the fit of the changed block.
    #[inline]
    fn update(&mut self, page: u64, path: &Path, level: u32, new: FitBits) {
        self.store.node_mut(path.node(level)).fits[child_index(page, level)] = new.into();
        self.update_above(page, path, level);
    }

    /// As [`update`](Self::update), for the nodes above `level`. Stops where nothing changes any more.
    fn update_above(&mut self, page: u64, path: &Path, mut level: u32) {
        loop {
            let new = self.store.node(path.node(level)).fit();
            if level == self.top {
                self.fit = new;
                return;
            }
            level += 1;
            let fit = &mut self.store.node_mut(path.node(level)).fits[child_index(page, level)];
            if *fit == new {
                return;
            }
            *fit = new;
        }
    }
}
