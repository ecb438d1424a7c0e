//! The general case: a change of any range, and the memory for it. A change fails only for want of memory, and then
//! before any page has changed.

use super::Bitmap;
use super::BitmapError;
use super::fit::Fit;
use super::leaf::Leaf;
use super::node::{Child, MAX_LEVEL, Node, base, pages};
use super::path::in_leaf;
use super::runs::{Part, Runs};
use super::store::Room;
use super::walk::Walk;

impl Bitmap {
    /// Makes all of `[first, end)`, which lies in the tree, free, or used. May allocate.
    pub(super) fn paint(&mut self, first: u64, end: u64, state: Child) -> Result<(), BitmapError> {
        self.prepare((first, end), state)?;
        self.paint_prepared((first, end), state);
        Ok(())
    }

    #[inline]
    fn prepare(&mut self, range: (u64, u64), state: Child) -> Result<(), BitmapError> {
        let room = self.room_for(range, state);
        if self.store.has(room) { Ok(()) } else { self.prepare_by_growing(range, state, room) }
    }

    /// As [`prepare`](Self::prepare), if the slabs lack room. If more than half of the leaves are idle, or there is no
    /// memory, they are collected, at a constant cost for each. The range may have lain in collected ones, so the room
    /// is counted again.
    #[cold]
    fn prepare_by_growing(
        &mut self,
        range: (u64, u64),
        state: Child,
        mut room: Room,
    ) -> Result<(), BitmapError> {
        if self.idle > self.store.used().leaves / 2 {
            self.collect();
            room = self.room_for(range, state);
        }
        let attempt = self.store.ensure(room);
        if attempt.is_ok() || self.idle == 0 {
            return attempt;
        }
        self.collect();
        self.store.ensure(self.room_for(range, state))
    }

    /// Adds levels on top until the tree covers the pages before `end`. May allocate.
    #[inline(never)]
    pub(super) fn cover(&mut self, end: u64) -> Result<(), BitmapError> {
        while self.end() < end {
            // The first node is made at the level that covers the end; later ones go on top of the tree.
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
            self.root = self.store.take_node(&node);
            self.top = level;
            self.reset_spine();
        }
        Ok(())
    }

    /// Releases the leaves and nodes of blocks that are all free. No page changes. O(nodes); does not allocate.
    #[inline(never)]
    pub(super) fn collect(&mut self) {
        self.idle = 0;
        if self.top == 0 {
            return;
        }
        let mut walk = Walk::new(self.root, self.top, 0);
        // By level, whether the node there is partly used.
        let mut used = 0_u32;
        loop {
            let (number, block) = (walk.node(), walk.block());
            let node = self.store.node(number);
            let (below, fit) = (node.children[block], node.fits[block]);
            match below.number() {
                Some(child) if walk.level() > 1 => {
                    walk.enter(child);
                    continue;
                }
                Some(leaf) if fit.is_whole() => {
                    self.store.release_leaf(leaf);
                    self.store.node_mut(number).children[block] = Child::FREE;
                }
                None if below == Child::FREE => {}
                _ => used |= 1 << walk.level(),
            }
            walk.pass(walk.bounds().1);
            while walk.is_at_end() {
                let (child, is_used) = (walk.node(), used >> walk.level() & 1);
                used &= !(1 << walk.level());
                let Some(block) = walk.leave() else {
                    self.reset_spine();
                    return;
                };
                if is_used == 0 {
                    self.store.release_node(child);
                    self.store.node_mut(walk.node()).children[block] = Child::FREE;
                }
                used |= is_used << walk.level();
            }
        }
    }

    #[inline(never)]
    fn room_for(&self, (first, end): (u64, u64), state: Child) -> Room {
        let (mut walk, mut room) = (Walk::new(self.root, self.top, first), Room::NONE);
        while walk.page() < end {
            let below = self.store.node(walk.node()).children[walk.block()];
            match below.number() {
                Some(child) if walk.level() > 1 => {
                    walk.enter(child);
                    continue;
                }
                None if below != state => {
                    let part = (walk.page(), walk.bounds().1.min(end));
                    room = room.plus(room_in_block(walk.level() - 1, part));
                }
                _ => {}
            }
            walk.pass_block();
        }
        room
    }

    /// Paints the range; all nodes and leaves for that are ensured. When the walk leaves a node, it stores the node's
    /// fit, and whether its runs are stale.
    #[inline(never)]
    fn paint_prepared(&mut self, (first, end): (u64, u64), state: Child) {
        let mut walk = Walk::new(self.root, self.top, first);
        // By level, whether runs may have changed in the node there.
        let mut edges = 0_u32;
        loop {
            let (number, block, level) = (walk.node(), walk.block(), walk.level());
            let ((base, behind), from) = (walk.bounds(), walk.page());
            let to = behind.min(end);
            let node = self.store.node(number);
            let (below, old) = (node.children[block], node.fits[block]);
            let new = match below.number() {
                None if below == state => old,
                None if to - from == behind - base => {
                    self.store.node_mut(number).children[block] = state;
                    self.count(to - from, state);
                    edges |= 1 << level;
                    state.fit()
                }
                child => {
                    let child =
                        child.unwrap_or_else(|| self.break_up(number, block, (level - 1, base), below));
                    if level > 1 {
                        walk.enter(child);
                        continue;
                    }
                    let (new, at_edge) = self.paint_leaf(child, (from, to), state, old);
                    edges |= u32::from(at_edge) << level;
                    new
                }
            };
            self.store.node_mut(number).fits[block] = new;
            walk.pass(to);
            while to == end || walk.is_at_end() {
                let has_changed = edges >> walk.level() & 1;
                edges &= !(1 << walk.level());
                let node = self.store.node_mut(walk.node());
                node.is_runs_stale |= has_changed != 0;
                let fit = node.fit();
                let Some(block) = walk.leave() else {
                    self.fit = fit;
                    return;
                };
                edges |= has_changed << walk.level();
                self.store.node_mut(walk.node()).fits[block] = fit;
            }
        }
    }

    /// Paints in a leaf whose fit is `old`. Returns its new fit, and whether the runs at its ends have changed.
    #[inline(never)]
    fn paint_leaf(&mut self, number: u32, (first, end): (u64, u64), state: Child, old: Fit) -> (Fit, bool) {
        let leaf = self.store.leaf_mut(number);
        let start = in_leaf(first);
        let end = start + (end - first) as u32;
        let ends = leaf.ends();
        let changed = leaf.set(start, end, state == Child::FREE);
        let (new, at_edge) = (Fit::from(leaf.fit()), leaf.ends() != ends);
        self.count(changed.into(), state);
        self.idle -= usize::from(old.is_whole());
        self.idle += usize::from(new.is_whole());
        (new, at_edge)
    }

    /// Makes the leaf or node of the uniform block at page `base`, of `level` and `state`. Returns its number.
    #[cold]
    #[inline(never)]
    fn break_up(&mut self, number: u32, block: usize, (level, base): (u32, u64), state: Child) -> u32 {
        let child = if level == 0 {
            self.idle += usize::from(state == Child::FREE);
            self.store.take_leaf(if state == Child::FREE { &Leaf::FREE } else { &Leaf::USED })
        } else {
            let runs = match state {
                Child::FREE => Runs::of_parts(base, pages(level), &[Part::whole(pages(level))]),
                _ => Runs::NONE,
            };
            self.store.take_node(&Node { runs, ..Node::uniform(state) })
        };
        self.store.node_mut(number).children[block] = Child::to(child);
        child
    }

    fn count(&mut self, pages: u64, state: Child) {
        if state == Child::FREE {
            self.free_pages += pages;
        } else {
            self.free_pages -= pages;
        }
    }
}

/// The nodes and leaves that it takes to paint a part of a uniform block of `level`: those along each end of the part.
/// Blocks that the part covers as a whole need none.
fn room_in_block(level: u32, (first, end): (u64, u64)) -> Room {
    (0..=level).fold(Room::NONE, |room, level| {
        let is_cut = |page: u64| page & (pages(level) - 1) != 0;
        let cut = match (is_cut(first), is_cut(end)) {
            (false, false) => return room,
            (true, true) if base(first, level) != base(end, level) => 2,
            _ => 1,
        };
        (0..cut).fold(room, |room, _| room.plus(Room::head(level)))
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_no_higher_than_what_it_covers() {
        for level in 1..MAX_LEVEL {
            for (end, top) in [(pages(level), level), (pages(level) + 1, level + 1)] {
                let mut bitmap = Bitmap::new();
                bitmap.cover(end).unwrap();
                assert_eq!(bitmap.top, top, "{end} pages");
            }
        }
    }
}
