//! The way from the top along one end, on which nearly all searches begin.
//!
//! Allocations go to one end of the space, so that the first steps of a search are to the last block each time
//! (or the first). Where a node on this way has room, those above have it too and prefer this block: the search
//! may begin there.

use super::Bitmap;
use super::node::{FAN, pages};
use super::path::Path;
use crate::iova::placement::Placement;

/// A part of the way that begins at the top.
pub(super) struct Spine {
    /// Its nodes, from `level` to the top.
    pub(super) path: Path,
    pub(super) level: u32,
    /// The first page of the node at `level`.
    pub(super) base: u64,
    /// Whether it has not yet been extended since it was reset.
    is_new: bool,
}

impl Spine {
    /// That of an empty tree.
    pub(super) const EMPTY: Self = Self { path: Path::new(), level: 0, base: 0, is_new: true };
}

impl Bitmap {
    /// Forgets all nodes but the one at the top: when others have gone, or it has changed.
    pub(super) fn reset_spine(&mut self) {
        self.spine = Spine { level: self.top, ..Spine::EMPTY };
        self.spine.path.set(self.top, self.root);
    }

    /// Gives up the lower end, up to `level`.
    #[cold]
    pub(super) fn shorten_spine(&mut self, level: u32) {
        self.spine.level = level;
        self.spine.base = match self.placement {
            Placement::TopDown => self.end() - pages(level),
            Placement::BottomUp => 0,
        };
    }

    /// Extends the way as far as there are nodes, if that has not happened before. O(h).
    #[inline]
    pub(super) fn extend_spine(&mut self) {
        if self.spine.is_new {
            self.extend_new_spine();
        }
    }

    #[cold]
    fn extend_new_spine(&mut self) {
        let end = match self.placement {
            Placement::TopDown => FAN - 1,
            Placement::BottomUp => 0,
        };
        let mut level = self.spine.level;
        while level > 1 {
            let node = self.nodes.get(self.spine.path.node(level));
            let Some(child) = node.links[end].number() else {
                break;
            };
            level -= 1;
            self.spine.path.set(level, child);
        }
        self.shorten_spine(level);
        // As long as there are no leaves, there may be more nodes later.
        self.spine.is_new = level > 1;
    }
}
