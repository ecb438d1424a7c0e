//! Paths from the top to a page, and the spine: a cached path to the last block, where nearly all searches begin. A
//! search from the spine finds the same place as one from the top.

use super::Bitmap;
use super::fit::LEAF_PAGES;
use super::node::{FAN, MAX_LEVEL, bits, child_index, pages};

/// The nodes on the way from the top to a page, by level.
#[derive(Clone, Copy)]
pub(super) struct Path([u32; MAX_LEVEL as usize + 1]);

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

#[inline]
pub(super) const fn in_leaf(page: u64) -> u32 {
    page as u32 % LEAF_PAGES
}

/// Cached path to the last block, or the upper part of that path. Searches are top-down in address, so most descend
/// into the last child at each level. If a request fits in the lowest cached node, a search from the root would reach
/// that node, too: so it starts there.
pub(super) struct Spine {
    pub(super) path: Path,
    pub(super) level: u32,
    pub(super) base: u64,
    /// Whether the path may still be extended: it was reset, and has not reached level 1 since.
    is_new: bool,
}

impl Spine {
    pub(super) const EMPTY: Self = Self { path: Path::new(), level: 0, base: 0, is_new: true };
}

impl Bitmap {
    /// Returns the leaf that holds `page`, and stores the way there to `path`; `None` if the page has no bit.
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
            number = self.store.node(number).children[child_index(page, level)].number()?;
            level -= 1;
            if level == 0 {
                return Some(number);
            }
        }
    }

    /// Resets the spine to the top node, after nodes were released or a level was added.
    pub(super) fn reset_spine(&mut self) {
        self.spine = Spine { level: self.top, ..Spine::EMPTY };
        self.spine.path.set(self.top, self.root);
    }

    #[cold]
    pub(super) fn shorten_spine(&mut self, level: u32) {
        self.spine.level = level;
        self.spine.base = self.end() - pages(level);
    }

    /// Extends a new spine as far down as there are nodes. O(h).
    #[inline]
    pub(super) fn extend_spine(&mut self) {
        if self.spine.is_new {
            self.extend_new_spine();
        }
    }

    #[cold]
    fn extend_new_spine(&mut self) {
        let mut level = self.spine.level;
        while level > 1 {
            let node = self.store.node(self.spine.path.node(level));
            let Some(child) = node.children[FAN - 1].number() else {
                break;
            };
            level -= 1;
            self.spine.path.set(level, child);
        }
        self.shorten_spine(level);
        // Above level 1, nodes may come later to extend it to.
        self.spine.is_new = level > 1;
    }
}
