//! What nodes know of runs: outdated by changes, and brought up to date when a request needs it.

use super::Bitmap;
use super::fit::Fit;
use super::node::{FAN, Link, Node, pages};
use super::path::Path;
use super::runs::{Part, Runs};
use super::store::Store;

impl Bitmap {
    /// Brings the runs of all nodes up to date that touch the boundary of a leaf. O(h) for each change since
    /// the last time, but no more than one step for every 2^12 pages in use; does not allocate.
    pub(super) fn refresh_runs(&mut self) {
        if self.top > 0 {
            self.store.refresh_runs(self.root, self.top, 0);
        }
    }

    /// Notes in the nodes of `level` and above that runs have changed that touch the boundary of a
    /// leaf.
    pub(super) fn outdate(&mut self, path: &Path, level: u32) {
        for level in level..=self.top {
            let node = self.store.node_mut(path.node(level));
            // Where it is noted already, so it is above.
            if core::mem::replace(&mut node.is_runs_stale, true) {
                return;
            }
        }
    }
}

impl Store {
    fn refresh_runs(&mut self, number: u32, level: u32, base: u64) {
        if !self.node(number).is_runs_stale {
            return;
        }
        for block in 0..if level > 1 { FAN } else { 0 } {
            if let Some(child) = self.node(number).links[block].number() {
                self.refresh_runs(child, level - 1, base + block as u64 * pages(level - 1));
            }
        }
        let runs = self.compute_runs(self.node(number), level, base);
        let node = self.node_mut(number);
        (node.runs, node.is_runs_stale) = (runs, false);
    }

    /// The longest run inside a leaf with bits below a node of `level`, or `best` where that is
    /// longer. Looks at the leaves that may have a longer one than those before.
    pub(super) fn longest_inside(&self, number: u32, level: u32, best: u64) -> u64 {
        let node = self.node(number);
        let longer = |best: u64, (link, fit): (&Link, &Fit)| match link.number() {
            Some(_) if fit.longest_at_most() <= best => best,
            Some(leaf) if level == 1 => best.max(self.leaf(leaf).longest()),
            Some(child) => self.longest_inside(child, level - 1, best),
            None => best,
        };
        node.links.iter().zip(&node.fits).fold(best, longer)
    }

    /// What `block` contributes to the runs of a node of `level`.
    #[inline]
    pub(super) fn part(&self, node: &Node, level: u32, block: usize) -> Part<'_> {
        match node.links[block].number() {
            Some(number) if level == 1 => {
                let (prefix, suffix) = self.leaf(number).ends();
                Part { prefix, suffix, inner: None }
            }
            Some(number) => {
                let runs = &self.node(number).runs;
                Part { prefix: runs.prefix, suffix: runs.suffix, inner: Some(runs) }
            }
            None if node.links[block] == Link::FREE => Part::whole(pages(level - 1)),
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
