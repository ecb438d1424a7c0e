//! What nodes know of runs: changes outdate it, and it is brought up to date when a request needs
//! it. A node that is not noted as stale knows its runs exactly.

use super::Bitmap;
use super::fit::Fit;
use super::node::{Child, FAN, Node, pages};
use super::path::Path;
use super::runs::{Part, Runs};
use super::store::Store;

impl Bitmap {
    /// Brings what all nodes know of runs up to date. One step for each stale node: O(h) for each
    /// change since the last call, and the stale nodes in its range; one for each node of the tree
    /// at most. Does not allocate.
    pub(super) fn refresh_runs(&mut self) {
        if self.top > 0 {
            self.store.refresh_runs(self.root, self.top, 0);
        }
    }

    /// Notes in the nodes of `level` and above on the way `path` that runs that touch the boundary
    /// of a leaf have changed.
    pub(super) fn outdate(&mut self, path: &Path, level: u32) {
        for level in level..=self.top {
            let node = self.store.node_mut(path.node(level));
            // If it is noted here already, it is noted in all nodes above, too.
            if core::mem::replace(&mut node.is_runs_stale, true) {
                return;
            }
        }
    }
}

impl Store {
    #[inline(never)]
    fn refresh_runs(&mut self, number: u32, level: u32, base: u64) {
        if !self.node(number).is_runs_stale {
            return;
        }
        for block in 0..if level > 1 { FAN } else { 0 } {
            if let Some(child) = self.node(number).children[block].number() {
                self.refresh_runs(child, level - 1, base + block as u64 * pages(level - 1));
            }
        }
        let runs = self.compute_runs(self.node(number), level, base);
        let node = self.node_mut(number);
        (node.runs, node.is_runs_stale) = (runs, false);
    }

    /// Returns the length of the longest run inside a leaf with bits below a node of `level`, or
    /// `best` if that is more. Looks only at leaves that may have a longer run than those before.
    #[inline(never)]
    pub(super) fn longest_inside(&self, number: u32, level: u32, best: u64) -> u64 {
        let node = self.node(number);
        let longer = |best: u64, (below, fit): (&Child, &Fit)| match below.number() {
            Some(_) if fit.longest_at_most() <= best => best,
            Some(leaf) if level == 1 => best.max(self.leaf(leaf).longest()),
            Some(child) => self.longest_inside(child, level - 1, best),
            None => best,
        };
        node.children.iter().zip(&node.fits).fold(best, longer)
    }

    /// Returns what `block` contributes to the runs of a node of `level`.
    #[inline]
    pub(super) fn part(&self, node: &Node, level: u32, block: usize) -> Part<'_> {
        match node.children[block].number() {
            Some(number) if level == 1 => {
                let (prefix, suffix) = self.leaf(number).ends();
                Part { prefix, suffix, inner: None }
            }
            Some(number) => {
                let runs = &self.node(number).runs;
                Part { prefix: runs.prefix, suffix: runs.suffix, inner: Some(runs) }
            }
            None if node.children[block] == Child::FREE => Part::whole(pages(level - 1)),
            None => Part::NONE,
        }
    }

    /// Computes the runs of a node of `level` at page `base` from its blocks.
    pub(super) fn compute_runs(&self, node: &Node, level: u32, base: u64) -> Runs {
        let mut parts = [Part::NONE; FAN];
        for (block, part) in parts.iter_mut().enumerate() {
            *part = self.part(node, level, block);
        }
        Runs::of_parts(base, pages(level - 1), &parts)
    }
}
