//! A walk over the tree in the order of addresses, without recursion, for which a kernel's stack is too small.

use super::node::{base, child_index, pages};
use super::path::Path;

pub(super) struct Walk {
    path: Path,
    level: u32,
    top: u32,
    page: u64,
}

impl Walk {
    pub(super) fn new(root: u32, top: u32, page: u64) -> Self {
        let mut path = Path::new();
        path.set(top, root);
        Self { path, level: top, top, page }
    }

    pub(super) fn node(&self) -> u32 {
        self.path.node(self.level)
    }

    pub(super) fn level(&self) -> u32 {
        self.level
    }

    /// The page that the walk has come to.
    pub(super) fn page(&self) -> u64 {
        self.page
    }

    pub(super) fn block(&self) -> usize {
        child_index(self.page, self.level)
    }

    pub(super) fn bounds(&self) -> (u64, u64) {
        let first = base(self.page, self.level - 1);
        (first, first + pages(self.level - 1))
    }

    pub(super) fn enter(&mut self, child: u32) {
        self.level -= 1;
        self.path.set(self.level, child);
    }

    /// Passes all pages before `to`, which is in the node, or just after it.
    pub(super) fn pass(&mut self, to: u64) {
        self.page = to;
    }

    /// Passes the rest of the block, and leaves each node that ends with it.
    pub(super) fn pass_block(&mut self) {
        self.pass(self.bounds().1);
        while self.level < self.top && self.is_at_end() {
            self.leave();
        }
    }

    pub(super) fn pass_node(&mut self) {
        self.pass(base(self.page, self.level) + pages(self.level));
    }

    /// Whether all of the node is passed, if anything of it is.
    pub(super) fn is_at_end(&self) -> bool {
        self.page & (pages(self.level) - 1) == 0
    }

    /// Goes up to the node above, unless this is the top. Returns the block there that the walk was in.
    pub(super) fn leave(&mut self) -> Option<usize> {
        if self.level == self.top {
            return None;
        }
        self.level += 1;
        Some(child_index(self.page - 1, self.level))
    }
}
