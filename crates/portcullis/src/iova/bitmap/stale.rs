//! What nodes know of runs: outdated by each change, and brought up to date when a request needs it.

use super::Bitmap;
use super::fit::Loose;
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

    /// Brings the longest runs inside leaves up to date, in all nodes. Costs as [`Bitmap::refresh_runs`], and the
    /// bits of the leaves that have changed.
    pub(super) fn refresh_loose(&mut self) {
        if self.top > 0 {
            self.store.refresh_loose(self.root, self.top);
        }
    }

    /// Notes in the nodes of `level` and above that runs have changed: those inside leaves, and those that
    /// touch the boundary of one if `edges` is set.
    pub(super) fn outdate(&mut self, path: &Path, level: u32, mut edges: bool) {
        let mut inside = true;
        for level in level..=self.top {
            let node = self.store.node_mut(path.node(level));
            // Where it is noted already, so it is above.
            edges &= !node.is_runs_stale;
            inside &= !node.is_loose_stale;
            if !(edges | inside) {
                return;
            }
            node.is_runs_stale |= edges;
            node.is_loose_stale |= inside;
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

    fn refresh_loose(&mut self, number: u32, level: u32) {
        if !self.node(number).is_loose_stale {
            return;
        }
        for block in 0..if level > 1 { FAN } else { 0 } {
            if let Some(child) = self.node(number).links[block].number() {
                self.refresh_loose(child, level - 1);
            }
        }
        let loose = self.compute_loose(self.node(number), level);
        let node = self.node_mut(number);
        (node.loose, node.is_loose_stale) = (loose, false);
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

    /// Computes the longest runs inside leaves of a node of `level` from its blocks.
    fn compute_loose(&self, node: &Node, level: u32) -> Loose {
        node.links.iter().fold(Loose::NONE, |best, link| match link.number() {
            Some(number) if level == 1 => best.max(self.leaf(number).loose()),
            Some(number) => best.max(self.node(number).loose),
            None if *link == Link::FREE => Loose::ALL,
            None => best,
        })
    }
}
