//! Numbers of nodes and leaves: what a change needs, and what is set aside.

use super::Bitmap;
use super::error::BitmapError;
use super::node::{FAN, Link};

/// So many nodes and so many leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) nodes: usize,
    pub(super) leaves: usize,
}

impl Room {
    /// Nothing.
    pub(super) const NONE: Self = Self { nodes: 0, leaves: 0 };

    /// What heads a block of `level`: one leaf or one node.
    pub(super) const fn head(level: u32) -> Self {
        if level == 0 { Self { nodes: 0, leaves: 1 } } else { Self { nodes: 1, leaves: 0 } }
    }

    /// What a block of `level` consists of if all of it exists.
    pub(super) const fn of_block(level: u32) -> Self {
        let leaves = 1 << (FAN.ilog2() * level);
        Self { nodes: (leaves - 1) / (FAN - 1), leaves }
    }

    pub(super) const fn plus(self, other: Self) -> Self {
        Self { nodes: self.nodes + other.nodes, leaves: self.leaves + other.leaves }
    }

    pub(super) const fn minus(self, other: Self) -> Self {
        Self { nodes: self.nodes - other.nodes, leaves: self.leaves - other.leaves }
    }
}

impl Bitmap {
    /// Whether `more` can be taken without allocating, besides what is set aside.
    #[inline]
    pub(super) fn has(&self, more: Room) -> bool {
        let all = self.paid.plus(more);
        self.nodes.has(all.nodes) && self.leaves.has(all.leaves)
    }

    /// Makes sure that `more` can be taken without allocating, besides what is set aside. May allocate.
    pub(super) fn ensure(&mut self, more: Room) -> Result<(), BitmapError> {
        let all = self.paid.plus(more);
        self.nodes.ensure(all.nodes)?;
        self.leaves.ensure(all.leaves)
    }

    /// Returns the leaves and nodes of all that is free to the slabs. Nothing that is known about the space
    /// changes. O(nodes); does not allocate.
    pub(super) fn collect(&mut self) {
        if self.top > 0 {
            self.collect_below(self.root, self.top);
            self.reset_spine();
        }
        self.idle = 0;
    }

    /// The same below a node; returns whether all of that turned out free.
    fn collect_below(&mut self, number: u32, level: u32) -> bool {
        let mut whole = true;
        for block in 0..FAN {
            let node = self.nodes.get(number);
            let (link, fit) = (node.links[block], node.fits[block]);
            if let Some(child) = link.number() {
                if level == 1 {
                    if !fit.is_whole() {
                        whole = false;
                        continue;
                    }
                    self.leaves.release(child);
                } else if self.collect_below(child, level - 1) {
                    self.nodes.release(child);
                } else {
                    whole = false;
                    continue;
                }
                self.nodes.get_mut(number).links[block] = Link::FREE;
            } else {
                whole &= link == Link::FREE;
            }
        }
        whole
    }
}
