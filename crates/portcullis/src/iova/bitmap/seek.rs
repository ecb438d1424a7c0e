//! Finds the next page that is free, or used, and never a later one. A search steps over a block
//! whose pages are all in the other state, where the block's parent shows that.

use super::Bitmap;
use super::node::{FAN, pages};
use super::path::in_leaf;

impl Bitmap {
    /// Returns whether any page of `[first, end)` is free. O(h), and the bits that the range has.
    pub(super) fn is_any_free(&self, first: u64, end: u64) -> bool {
        self.first_in(first, end, true).is_some()
    }

    /// Returns the first page of `[from, to)` that is free, or that is used. Costs O(h) for free
    /// pages, and for used ones O(h) and the nodes that exist before the page. Pages behind the
    /// tree are used, but the search does not look at them.
    pub(super) fn first_in(&self, from: u64, to: u64, free: bool) -> Option<u64> {
        let to = to.min(self.end());
        if from >= to { None } else { self.first_below(self.root, self.top, 0, from, to, free) }
    }

    #[inline(never)]
    fn first_below(&self, number: u32, level: u32, base: u64, from: u64, to: u64, free: bool) -> Option<u64> {
        (0..FAN).find_map(|block| {
            let start = base + block as u64 * pages(level - 1);
            let (from, to) = (from.max(start), to.min(start + pages(level - 1)));
            match self.uniform(number, level, block) {
                _ if from >= to => None,
                Ok(state) => (state == free).then_some(from),
                Err(child) if level > 1 => self.first_below(child, level - 1, start, from, to, free),
                Err(child) => {
                    let page = start + u64::from(self.store.leaf(child).first(in_leaf(from), free)?);
                    (page < to).then_some(page)
                }
            }
        })
    }

    /// Returns whether a block is free, if its node shows that all of it is or none; else the
    /// number of the node or leaf to look at.
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
