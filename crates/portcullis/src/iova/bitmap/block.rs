//! A change of whole blocks side by side that have no bits: most ranges with natural alignment from the size
//! of a leaf up.

use super::Bitmap;
use super::node::{FAN, Link, bits, pages, slot};
use super::path::Path;
use super::room::Room;

impl Bitmap {
    /// Makes `[first, end)` free, or used in one of two ways, if it consists of blocks of one node that are
    /// each uniformly the opposite, and no memory is needed. Otherwise changes nothing. Says which.
    pub(super) fn set_blocks(&mut self, first: u64, end: u64, state: Link) -> bool {
        // The highest level at which the range consists of whole blocks.
        let Some(level) = (first | end).trailing_zeros().checked_sub(bits(0)) else {
            return false;
        };
        let level = level / FAN.ilog2();
        if level >= self.top || end > self.end() || (first ^ (end - 1)) >= pages(level + 1) {
            return false;
        }
        let mut path = Path::new();
        let mut number = self.root;
        for above in (level + 2..=self.top).rev() {
            path.set(above, number);
            match self.nodes.get(number).links[slot(first, above)].number() {
                Some(child) => number = child,
                None => return false,
            }
        }
        path.set(level + 1, number);
        let blocks = slot(first, level + 1)..=slot(end - 1, level + 1);
        let node = self.nodes.get_mut(number);
        let is_free = state == Link::FREE;
        let opposite = |link: &Link| link.number().is_none() && (*link == Link::FREE) != is_free;
        if !node.links[blocks.clone()].iter().all(opposite) {
            return false;
        }
        let mut freed = Room::NONE;
        for link in &node.links[blocks.clone()] {
            if *link == Link::PAID {
                freed = freed.plus(Room::of_block(level));
            }
        }
        let mut owed = Room::NONE;
        if state == Link::PAID {
            let count = blocks.clone().count();
            owed = (0..count).fold(owed, |owed, _| owed.plus(Room::of_block(level)));
            if !self.has(owed) {
                return false;
            }
        }
        self.paid = self.paid.minus(freed).plus(owed);
        let node = self.nodes.get_mut(number);
        node.links[blocks.clone()].fill(state);
        // All but the last one, which brings what is above up to date.
        node.fits[*blocks.start()..*blocks.end()].fill(state.fit());
        self.free_pages =
            if is_free { self.free_pages + (end - first) } else { self.free_pages - (end - first) };
        self.outdate(&path, level + 1, true);
        self.update(end - 1, &path, level + 1, state.fit().bits());
        true
    }
}
