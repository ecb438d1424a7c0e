//! The common case: a change inside one leaf that has bits, and what follows from it above.

use super::Bitmap;
use super::fit::FitBits;
use super::leaf::LEAF_PAGES;
use super::node::{MAX_LEVEL, bits, slot};

/// The nodes on the way from the top to a page, by level.
#[derive(Clone, Copy)]
pub(super) struct Path(pub(super) [u32; MAX_LEVEL as usize + 1]);

impl Path {
    pub(super) const fn new() -> Self {
        Self([0; MAX_LEVEL as usize + 1])
    }

    #[inline]
    pub(super) fn node(&self, level: u32) -> u32 {
        self.0[level as usize % (MAX_LEVEL as usize + 1)]
    }

    #[inline]
    pub(super) fn set(&mut self, level: u32, node: u32) {
        self.0[level as usize % (MAX_LEVEL as usize + 1)] = node;
    }
}

/// A page's number inside its leaf.
#[inline]
pub(super) const fn in_leaf(page: u64) -> u32 {
    page as u32 % LEAF_PAGES
}

impl Bitmap {
    /// The leaf that holds `page`, and the way there; nothing where the page has no bit.
    #[inline]
    pub(super) fn locate(&self, page: u64, path: &mut Path) -> Option<u32> {
        if page >= self.end() {
            return None;
        }
        let mut number = self.root;
        let mut level = self.top;
        let spine = &self.spine;
        if page >> bits(spine.level) == spine.base >> bits(spine.level) {
            (number, level, *path) = (spine.path.node(spine.level), spine.level, spine.path);
        }
        loop {
            path.set(level, number);
            number = self.nodes.get(number).links[slot(page, level)].number()?;
            level -= 1;
            if level == 0 {
                return Some(number);
            }
        }
    }

    /// Takes `[page, page + pages)`, which is free and lies in `leaf`.
    #[inline]
    pub(super) fn take_in_leaf(&mut self, page: u64, pages: u64, leaf: u32, path: &Path) {
        self.free_pages -= pages;
        let old = self.nodes.get(path.node(1)).fits[slot(page, 1)].bits();
        self.toggle(page, pages as u32, leaf, old, path);
    }

    /// Frees `[first, end)` if it lies in one leaf that has bits. Says whether it was used, and if not, has
    /// changed nothing.
    #[inline]
    pub(super) fn free_in_leaf(&mut self, first: u64, end: u64) -> Option<bool> {
        if (first ^ (end - 1)) >= LEAF_PAGES.into() {
            return None;
        }
        let mut path = Path::new();
        let leaf = self.locate(first, &mut path)?;
        let pages = end - first;
        // Read now and not when it is needed, so that it is waited for together with the leaf.
        let old = self.nodes.get(path.node(1)).fits[slot(first, 1)].bits();
        if !self.leaves.get(leaf).is_used(in_leaf(first), in_leaf(first) + pages as u32) {
            return Some(false);
        }
        self.free_pages += pages;
        self.toggle(first, pages as u32, leaf, old, &path);
        Some(true)
    }

    /// Makes what is free used in a range of a leaf, or the other way round.
    /// The leaf was worth `old`.
    fn toggle(&mut self, page: u64, pages: u32, leaf: u32, old: FitBits, path: &Path) {
        let (start, end) = (in_leaf(page), in_leaf(page) + pages);
        let bits = self.leaves.get(leaf).toggled(start, end);
        *self.leaves.get_mut(leaf) = bits;
        let new = bits.fit();
        self.idle = self.idle + usize::from(new.is_whole()) - usize::from(old.is_whole());
        let node = self.nodes.get(path.node(1));
        if !(node.stale & node.is_loose_stale) {
            self.outdate_leaf(leaf, start, end, path);
        }
        if old != new {
            self.update(page, path, 1, new);
        }
    }

    /// Notes that the runs of a leaf are no longer as they were, those that touch the range.
    #[cold]
    fn outdate_leaf(&mut self, leaf: u32, start: u32, end: u32, path: &Path) {
        let mut bits = *self.leaves.get(leaf);
        bits.set(start, end, true);
        self.outdate(path, 1, bits.is_edge(start, end));
    }

    /// Notes in the nodes of `level` and above that runs have changed: those inside leaves, and those that
    /// touch the boundary of one if `edges` is set.
    pub(super) fn outdate(&mut self, path: &Path, level: u32, mut edges: bool) {
        let mut inside = true;
        for level in level..=self.top {
            let node = self.nodes.get_mut(path.node(level));
            // Where it is noted already, so it is above.
            edges &= !node.stale;
            inside &= !node.is_loose_stale;
            if !(edges | inside) {
                return;
            }
            node.stale |= edges;
            node.is_loose_stale |= inside;
        }
    }

    /// Brings the nodes of `level` and above on the way to `page` up to date with a block that is now worth
    /// `new`, which was not so before.
    #[inline]
    pub(super) fn update(&mut self, page: u64, path: &Path, level: u32, new: FitBits) {
        self.nodes.get_mut(path.node(level)).fits[slot(page, level)] = new.into();
        self.update_above(page, path, level);
    }

    /// The same for the nodes above `level`. Stops where nothing changes any more.
    fn update_above(&mut self, page: u64, path: &Path, mut level: u32) {
        loop {
            let new = self.nodes.get(path.node(level)).fit();
            if level == self.top {
                self.fit = new;
                return;
            }
            level += 1;
            let fit = &mut self.nodes.get_mut(path.node(level)).fits[slot(page, level)];
            if *fit == new {
                return;
            }
            *fit = new;
        }
    }
}
