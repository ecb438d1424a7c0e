//! All nodes and leaves.

use super::BitmapError;
use super::leaf::Leaf;
use super::node::Node;
use super::slab::Slab;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) nodes: usize,
    pub(super) leaves: usize,
}

impl Room {
    pub(super) const NONE: Self = Self { nodes: 0, leaves: 0 };

    /// The one leaf or node of a block of `level`, without those below it.
    pub(super) const fn head(level: u32) -> Self {
        if level == 0 { Self { nodes: 0, leaves: 1 } } else { Self { nodes: 1, leaves: 0 } }
    }

    pub(super) const fn plus(self, other: Self) -> Self {
        Self { nodes: self.nodes + other.nodes, leaves: self.leaves + other.leaves }
    }
}

pub(super) struct Store {
    nodes: Slab<Node>,
    leaves: Slab<Leaf>,
}

impl Store {
    pub(super) const fn new() -> Self {
        Self { nodes: Slab::new(), leaves: Slab::new() }
    }

    #[inline]
    pub(super) fn node(&self, number: u32) -> &Node {
        self.nodes.get(number)
    }

    #[inline]
    pub(super) fn node_mut(&mut self, number: u32) -> &mut Node {
        self.nodes.get_mut(number)
    }

    #[inline]
    pub(super) fn leaf(&self, number: u32) -> &Leaf {
        self.leaves.get(number)
    }

    #[inline]
    pub(super) fn leaf_mut(&mut self, number: u32) -> &mut Leaf {
        self.leaves.get_mut(number)
    }

    pub(super) fn take_node(&mut self, node: &Node) -> u32 {
        self.nodes.take(node)
    }

    pub(super) fn take_leaf(&mut self, leaf: &Leaf) -> u32 {
        self.leaves.take(leaf)
    }

    pub(super) fn release_node(&mut self, number: u32) {
        self.nodes.release(number);
    }

    pub(super) fn release_leaf(&mut self, number: u32) {
        self.leaves.release(number);
    }

    #[inline]
    pub(super) fn has(&self, more: Room) -> bool {
        self.nodes.has(more.nodes) && self.leaves.has(more.leaves)
    }

    pub(super) fn ensure(&mut self, more: Room) -> Result<(), BitmapError> {
        self.nodes.ensure(more.nodes)?;
        self.leaves.ensure(more.leaves)
    }

    pub(super) const fn used(&self) -> Room {
        Room { nodes: self.nodes.used(), leaves: self.leaves.used() }
    }

    pub(super) const fn bytes(&self) -> usize {
        self.nodes.bytes().saturating_add(self.leaves.bytes())
    }
}
