//! Finds the next free, or used, page. A search skips a uniform block that its parent shows to be in the other state.

use super::Bitmap;
use super::path::in_leaf;
use super::walk::Walk;

impl Bitmap {
    /// O(h), and the bits that the range has.
    pub(super) fn is_any_free(&self, first: u64, end: u64) -> bool {
        self.first_in(first, end, true).is_some()
    }

    /// Returns the first page of `[from, to)` that is free, or that is used. Costs O(h) for free pages, and for used
    /// ones O(h) and the nodes that exist before the page. Does not look at pages beyond the tree, which are used.
    pub(super) fn first_in(&self, from: u64, to: u64, free: bool) -> Option<u64> {
        let to = to.min(self.end());
        let mut walk = Walk::new(self.root, self.top, from);
        while walk.page() < to {
            match self.uniform(walk.node(), walk.level(), walk.block()) {
                Ok(state) if state == free => return Some(walk.page()),
                Ok(_) => {}
                Err(child) if walk.level() > 1 => {
                    walk.enter(child);
                    continue;
                }
                Err(leaf) => {
                    if let Some(page) = self.store.leaf(leaf).first(in_leaf(walk.page()), free) {
                        return Some(walk.bounds().0 + u64::from(page)).filter(|page| *page < to);
                    }
                }
            }
            walk.pass_block();
        }
        None
    }

    /// Whether a block is free, if its node shows that all of it is or none; else the number of the node or leaf to
    /// look at.
    pub(super) fn uniform(&self, number: u32, level: u32, block: usize) -> Result<bool, u32> {
        let node = self.store.node(number);
        if node.fits[block].is_none() {
            return Ok(false);
        }
        match node.children[block].number() {
            Some(child) if level > 1 || !node.fits[block].is_whole() => Err(child),
            _ => Ok(true),
        }
    }
}
