//! The general case: a change of any range, and the memory for it. A change fails for want of
//! memory only, and then before any page has changed.

use super::Bitmap;
use super::BitmapError;
use super::fit::Fit;
use super::leaf::Leaf;
use super::node::{Child, FAN, MAX_LEVEL, Node, pages};
use super::path::in_leaf;
use super::store::Room;

/// A block, and the part of a range that lies in it.
#[derive(Clone, Copy)]
struct Piece {
    /// The level of the block and its first page.
    level: u32,
    base: u64,
    /// The part of the range.
    first: u64,
    end: u64,
}

impl Piece {
    /// Returns whether the range covers all of the block.
    fn is_whole(&self) -> bool {
        self.end - self.first == pages(self.level)
    }

    /// Returns the blocks below that the range touches, each with its part of the range.
    fn parts(self) -> impl Iterator<Item = (usize, Self)> {
        let level = self.level - 1;
        (0..FAN).filter_map(move |block| {
            let base = self.base + block as u64 * pages(level);
            let (first, end) = (self.first.max(base), self.end.min(base + pages(level)));
            (first < end).then_some((block, Self { level, base, first, end }))
        })
    }
}

impl Bitmap {
    /// Makes all of `[first, end)`, which lies in the tree, free, or used. Pages that are in that
    /// state already stay so. May allocate; fails only for want of memory, with nothing changed.
    pub(super) fn paint(&mut self, first: u64, end: u64, state: Child) -> Result<(), BitmapError> {
        let all = Piece { level: self.top, base: 0, first, end };
        self.prepare(all, state)?;
        (self.fit, _) = self.paint_node(self.root, all, state);
        Ok(())
    }

    /// Makes sure that there are the nodes and leaves for painting. May allocate.
    #[inline]
    fn prepare(&mut self, all: Piece, state: Child) -> Result<(), BitmapError> {
        let room = self.room_for(self.root, all, state);
        if self.store.has(room) { Ok(()) } else { self.prepare_by_growing(all, state, room) }
    }

    /// As [`prepare`](Self::prepare), where the slabs lack room. If more than half of the leaves
    /// are idle, they are collected first, at a constant cost for each. They are also collected if
    /// there is no memory. The range may have lain in what is collected, so the room that painting
    /// needs is counted again.
    #[cold]
    fn prepare_by_growing(&mut self, all: Piece, state: Child, mut room: Room) -> Result<(), BitmapError> {
        if self.idle > self.store.used().leaves / 2 {
            self.collect();
            room = self.room_for(self.root, all, state);
        }
        let attempt = self.store.ensure(room);
        if attempt.is_ok() || self.idle == 0 {
            return attempt;
        }
        self.collect();
        self.store.ensure(self.room_for(self.root, all, state))
    }

    /// Adds levels on top until the tree covers the pages before `end`. May allocate.
    #[inline(never)]
    pub(super) fn cover(&mut self, end: u64) -> Result<(), BitmapError> {
        while self.end() < end {
            // The first node is made at the level that covers the end; later ones go on top of the
            // tree.
            let level = if self.top == 0 {
                (1..MAX_LEVEL).find(|level| pages(*level) >= end).unwrap_or(MAX_LEVEL)
            } else {
                self.top + 1
            };
            self.store.ensure(Room::head(level))?;
            let mut node = Node::uniform(Child::TAKEN);
            if self.top > 0 {
                node.children[0] = Child::to(self.root);
                node.fits[0] = self.fit;
                node.is_runs_stale = true;
            }
            self.root = self.store.take_node(node);
            self.top = level;
            self.reset_spine();
        }
        Ok(())
    }

    /// Gives the leaves and nodes of blocks that are all free back to the slabs. No page changes.
    /// O(nodes); does not allocate.
    pub(super) fn collect(&mut self) {
        if self.top > 0 {
            self.collect_below(self.root, self.top);
            self.reset_spine();
        }
        self.idle = 0;
    }

    /// Does the same below a node. Returns whether all pages below it are free.
    #[inline(never)]
    fn collect_below(&mut self, number: u32, level: u32) -> bool {
        let mut whole = true;
        for block in 0..FAN {
            let node = self.store.node(number);
            let (below, fit) = (node.children[block], node.fits[block]);
            if let Some(child) = below.number() {
                if level == 1 {
                    if !fit.is_whole() {
                        whole = false;
                        continue;
                    }
                    self.store.release_leaf(child);
                } else if self.collect_below(child, level - 1) {
                    self.store.release_node(child);
                } else {
                    whole = false;
                    continue;
                }
                self.store.node_mut(number).children[block] = Child::FREE;
            } else {
                whole &= below == Child::FREE;
            }
        }
        whole
    }

    /// Returns what painting in the node would take from the slabs.
    #[inline(never)]
    fn room_for(&self, number: u32, all: Piece, state: Child) -> Room {
        let node = self.store.node(number);
        all.parts().fold(Room::NONE, |room, (block, piece)| {
            let below = node.children[block];
            room.plus(match below.number() {
                Some(_) if piece.level == 0 => Room::NONE,
                Some(child) => self.room_for(child, piece, state),
                None if below == state => Room::NONE,
                None => room_in_block(piece),
            })
        })
    }

    /// Paints below a node, with all nodes and leaves that this takes at hand. Returns what fits in
    /// it now, and whether runs that touch the boundary of a leaf may have changed.
    #[inline(never)]
    fn paint_node(&mut self, number: u32, all: Piece, state: Child) -> (Fit, bool) {
        let mut edges = false;
        for (block, piece) in all.parts() {
            let node = self.store.node(number);
            let (below, old) = (node.children[block], node.fits[block]);
            let new = match below.number() {
                None if below == state => continue,
                None if piece.is_whole() => {
                    self.store.node_mut(number).children[block] = state;
                    self.count(piece.end - piece.first, state);
                    edges = true;
                    state.fit()
                }
                child => {
                    let child = child.unwrap_or_else(|| self.break_up(number, block, piece, below));
                    if piece.level == 0 {
                        let (new, at_edge) = self.paint_leaf(child, piece, state, old);
                        edges |= at_edge;
                        new
                    } else {
                        let (new, below) = self.paint_node(child, piece, state);
                        edges |= below;
                        new
                    }
                }
            };
            self.store.node_mut(number).fits[block] = new;
        }
        let node = self.store.node_mut(number);
        node.is_runs_stale |= edges;
        (node.fit(), edges)
    }

    /// Paints in a leaf whose fit is `old`. Returns its fit now, and whether the runs at its ends
    /// have changed.
    #[inline(never)]
    fn paint_leaf(&mut self, number: u32, piece: Piece, state: Child, old: Fit) -> (Fit, bool) {
        let leaf = self.store.leaf_mut(number);
        let start = in_leaf(piece.first);
        let end = start + (piece.end - piece.first) as u32;
        let ends = leaf.ends();
        let changed = leaf.set(start, end, state == Child::FREE);
        let (new, at_edge) = (Fit::from(leaf.fit()), leaf.ends() != ends);
        self.count(changed.into(), state);
        self.idle -= usize::from(old.is_whole());
        self.idle += usize::from(new.is_whole());
        (new, at_edge)
    }

    /// Makes the leaf or node of a block that is in the state `state` as a whole. Returns its
    /// number.
    ///
    /// By itself, so that the calls of [`paint_node`](Self::paint_node) inside each other have no room for what it makes.
    #[cold]
    #[inline(never)]
    fn break_up(&mut self, number: u32, block: usize, piece: Piece, state: Child) -> u32 {
        let child = if piece.level == 0 {
            self.idle += usize::from(state == Child::FREE);
            self.store.take_leaf(if state == Child::FREE { Leaf::FREE } else { Leaf::USED })
        } else {
            let mut node = Node::uniform(state);
            node.runs = self.store.compute_runs(&node, piece.level, piece.base);
            self.store.take_node(node)
        };
        self.store.node_mut(number).children[block] = Child::to(child);
        child
    }

    /// Counts pages that have become free, or used.
    fn count(&mut self, pages: u64, state: Child) {
        if state == Child::FREE {
            self.free_pages += pages;
        } else {
            self.free_pages -= pages;
        }
    }
}

/// Returns what it takes to paint a part of a block that is in one state as a whole: the nodes and
/// leaves along each end of the part. Blocks that the part covers as a whole need none.
#[inline(never)]
fn room_in_block(piece: Piece) -> Room {
    if piece.is_whole() {
        return Room::NONE;
    }
    let head = Room::head(piece.level);
    if piece.level == 0 {
        return head;
    }
    piece.parts().fold(head, |room, (_, part)| room.plus(room_in_block(part)))
}
