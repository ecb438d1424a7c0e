//! The common case: a change inside one leaf that has bits, and what follows from it above.

use super::Bitmap;
use super::fit::Fit;
use super::leaf::LEAF_PAGES;
use super::node::{LAZY_LEVEL, MAX_LEVEL, slot};

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
    pub(super) fn locate(&self, page: u64) -> Option<(u32, Path)> {
        if page >= self.end() {
            return None;
        }
        let mut path = Path::new();
        let mut number = self.root;
        let mut level = self.top;
        loop {
            path.set(level, number);
            number = self.nodes.get(number).links[slot(page, level)].number()?;
            level -= 1;
            if level == 0 {
                return Some((number, path));
            }
        }
    }

    /// Takes `[page, page + pages)`, which is free and lies in `leaf`.
    #[inline]
    pub(super) fn take_in_leaf(&mut self, page: u64, pages: u64, leaf: u32, path: &Path) {
        let (start, end) = (in_leaf(page), in_leaf(page) + pages as u32);
        let bits = self.leaves.get_mut(leaf);
        let run = bits.run_around(start, end);
        bits.set(start, end, false);
        let old = self.nodes.get(path.node(1)).fits[slot(page, 1)];
        let before = Fit::of_run(run.0, run.1);
        let after = Fit::of_run(run.0, start).max(Fit::of_run(end, run.1));
        self.free_pages -= pages;
        self.idle -= usize::from(old.is_whole());
        if old.depends_on(&before, &after) {
            let new = self.leaves.get(leaf).fit(old);
            self.update(page, path, 1, old, new, old.ends() != new.ends());
        }
    }

    /// Frees `[first, end)` if it lies in one leaf that has bits. Says whether it was used, and if not, has
    /// changed nothing.
    #[inline]
    pub(super) fn free_in_leaf(&mut self, first: u64, end: u64) -> Option<bool> {
        if (first ^ (end - 1)) >= LEAF_PAGES.into() {
            return None;
        }
        let (leaf, path) = self.locate(first)?;
        let pages = end - first;
        let (start, end) = (in_leaf(first), in_leaf(first) + pages as u32);
        let bits = self.leaves.get_mut(leaf);
        if !bits.is_used(start, end) {
            return Some(false);
        }
        bits.set(start, end, true);
        let run = bits.run_around(start, end);
        let old = self.nodes.get(path.node(1)).fits[slot(first, 1)];
        let new = old.max(Fit::of_run(run.0, run.1));
        self.free_pages += pages;
        self.idle += usize::from(new.is_whole());
        self.update(first, &path, 1, old, new, old.ends() != new.ends());
        Some(true)
    }

    /// Brings the nodes of `level` and above on the way to `page` up to date with a block that was worth
    /// `old` and is now worth `new`, and whose runs have changed if `edges` is set. Stops where nothing
    /// changes any more.
    pub(super) fn update(
        &mut self,
        page: u64,
        path: &Path,
        mut level: u32,
        mut old: Fit,
        mut new: Fit,
        mut edges: bool,
    ) {
        let mut changed = !new.is(&old);
        while changed || edges {
            let number = path.node(level);
            if changed {
                self.nodes.get_mut(number).fits[slot(page, level)] = new;
            }
            if edges && level < LAZY_LEVEL {
                edges = self.update_runs(number, page, level);
            } else if edges {
                edges = !self.nodes.get(number).stale;
                self.nodes.get_mut(number).stale = true;
            }
            if changed {
                let above = *if level == self.top {
                    &self.fit
                } else {
                    &self.nodes.get(path.node(level + 1)).fits[slot(page, level + 1)]
                };
                // A maximum rises with a part; it falls only where that part was the maximum.
                let best =
                    if above.depends_on(&old, &new) { self.nodes.get(number).fit() } else { above.max(new) };
                changed = !best.is(&above);
                (old, new) = (above, best);
            }
            if level == self.top {
                self.fit = if changed { new } else { self.fit };
                return;
            }
            level += 1;
        }
    }

    /// Computes the runs of a node on the way to `page` anew; returns whether they differ.
    fn update_runs(&mut self, number: u32, page: u64, level: u32) -> bool {
        let node = self.nodes.get(number);
        let runs = node.compute_runs(super::node::base(page, level), level, &self.nodes);
        let node = self.nodes.get_mut(number);
        let changed = node.runs != runs;
        node.runs = runs;
        changed
    }
}
