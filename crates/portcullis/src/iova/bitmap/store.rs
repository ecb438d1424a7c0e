//! All nodes and leaves, and what is set aside of them: taking what was paid for never allocates.

use super::BitmapError;
use super::leaf::Leaf;
use super::node::{FAN, Node};
use super::slab::Slab;

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

/// All nodes and leaves. Whatever is set aside of them is there.
pub(super) struct Store {
    nodes: Slab<Node>,
    leaves: Slab<Leaf>,
    /// What giving back in parts may need for blocks that are [paid for](super::node::Link::PAID).
    paid: Room,
}

impl Store {
    /// Nothing, which takes no memory.
    pub(super) const fn new() -> Self {
        Self { nodes: Slab::new(), leaves: Slab::new(), paid: Room::NONE }
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

    /// Takes a node. Does not allocate after [`Store::ensure`], or out of what was set aside.
    pub(super) fn take_node(&mut self, node: Node) -> u32 {
        self.nodes.take(node)
    }

    /// Takes a leaf, as [`Store::take_node`].
    pub(super) fn take_leaf(&mut self, leaf: Leaf) -> u32 {
        self.leaves.take(leaf)
    }

    pub(super) fn release_node(&mut self, number: u32) {
        self.nodes.release(number);
    }

    pub(super) fn release_leaf(&mut self, number: u32) {
        self.leaves.release(number);
    }

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

    /// Sets aside what there [is](Store::has).
    pub(super) fn set_aside(&mut self, room: Room) {
        self.paid = self.paid.plus(room);
    }

    /// Sets no longer aside what was.
    pub(super) fn let_go(&mut self, room: Room) {
        self.paid = self.paid.minus(room);
    }

    /// What is in use.
    pub(super) const fn used(&self) -> Room {
        Room { nodes: self.nodes.used(), leaves: self.leaves.used() }
    }

    /// What is set aside.
    pub(super) const fn paid(&self) -> Room {
        self.paid
    }

    /// Heap memory held.
    pub(super) const fn bytes(&self) -> usize {
        self.nodes.bytes().saturating_add(self.leaves.bytes())
    }
}
