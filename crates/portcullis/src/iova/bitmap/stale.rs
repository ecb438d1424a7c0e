//! Stale runs: changes outdate a node's runs, and a request that needs them recomputes them. A node that is not stale
//! knows its runs exactly.

use super::Bitmap;
use super::node::{Child, FAN, Node, pages};
use super::path::Path;
use super::runs::{Part, Runs};
use super::store::Store;
use super::walk::Walk;

impl Bitmap {
    /// Recomputes the runs of all stale nodes. One step for each: O(h) for each change since the last call, and the
    /// stale nodes in its range; at most one for each node of the tree. Does not allocate.
    pub(super) fn refresh_runs(&mut self) {
        if self.top > 0 && self.store.node(self.root).is_runs_stale {
            self.store.refresh_runs(self.root, self.top);
        }
    }

    pub(super) fn outdate(&mut self, path: &Path, level: u32) {
        for level in level..=self.top {
            let node = self.store.node_mut(path.node(level));
            // If it is stale already, all nodes above are, too.
            if core::mem::replace(&mut node.is_runs_stale, true) {
                return;
            }
        }
    }
}

impl Store {
    #[inline(never)]
    fn refresh_runs(&mut self, root: u32, top: u32) {
        let mut walk = Walk::new(root, top, 0);
        loop {
            if walk.level() > 1
                && let Some(child) = self.node(walk.node()).children[walk.block()].number()
                && self.node(child).is_runs_stale
            {
                walk.enter(child);
                continue;
            }
            if walk.level() > 1 {
                walk.pass(walk.bounds().1)
            } else {
                walk.pass_node()
            }
            while walk.is_at_end() {
                let (number, level) = (walk.node(), walk.level());
                let runs = self.compute_runs(self.node(number), level, walk.page() - pages(level));
                let node = self.node_mut(number);
                (node.runs, node.is_runs_stale) = (runs, false);
                if walk.leave().is_none() {
                    return;
                }
            }
        }
    }

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

    #[inline(never)]
    pub(super) fn compute_runs(&self, node: &Node, level: u32, base: u64) -> Runs {
        let mut parts = [Part::NONE; FAN];
        for (block, part) in parts.iter_mut().enumerate() {
            *part = self.part(node, level, block);
        }
        Runs::of_parts(base, pages(level - 1), &parts)
    }
}
