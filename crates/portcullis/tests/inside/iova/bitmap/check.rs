//! The invariants, checked the slow way, and the holes.

use super::Bitmap;
use super::fit::{Fit, FitBits, LEAF_ORDER, LEAF_PAGES};
use super::leaf::Leaf;
use super::node::{Child, FAN, pages};
use super::runs::MAX_ORDER;
use super::store::Room;

/// What the nodes and leaves add up to, and the runs that the walk has seen.
struct Walk {
    used: Room,
    idle: usize,
    free_pages: u64,
}

impl Leaf {
    pub(super) fn is_free(&self, page: u32) -> bool {
        !self.is_used(page, page + 1)
    }
}

impl Bitmap {
    /// Returns the holes in address order, each as its first page and its number of pages. Each step costs O(h), and
    /// the nodes and bits that exist in the hole. Does not allocate.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut from = 0;
        core::iter::from_fn(move || {
            let start = self.first_in(from, self.end(), true)?;
            from = self.first_in(start, self.end(), false).unwrap_or(self.end());
            Some((start, from - start))
        })
    }

    /// Verifies every summary against a computation that shares nothing with it, and the accounts. O(size x
    /// height); does not allocate. For tests.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), &'static str> {
        let mut walk = Walk { used: Room::NONE, idle: 0, free_pages: 0 };
        if self.top > 0 {
            walk.used.nodes += 1;
            if self.check_node(self.root, self.top, 0, &mut walk)? != self.fit {
                return Err("what fits in the leaves of the space is wrong");
            }
        }
        if walk.used != self.store.used() {
            return Err("a node or leaf is lost");
        }
        if walk.idle != self.idle {
            return Err("the number of idle leaves is wrong");
        }
        if walk.free_pages != self.free_pages {
            return Err("the number of free pages is wrong");
        }
        Ok(())
    }

    /// Checks what is below a node at page `base`; returns what it has room for inside leaves.
    fn check_node(&self, number: u32, level: u32, base: u64, walk: &mut Walk) -> Result<Fit, &'static str> {
        let node = self.store.node(number);
        let size = pages(level - 1);
        let mut best = Fit::NONE;
        for block in 0..FAN {
            let start = base + block as u64 * size;
            let below = node.children[block];
            let fit = match below.number() {
                None => {
                    walk.free_pages += if below == Child::FREE { size } else { 0 };
                    below.fit()
                }
                Some(child) if level > 1 => {
                    walk.used.nodes += 1;
                    self.check_node(child, level - 1, start, walk)?
                }
                Some(child) => {
                    walk.used.leaves += 1;
                    let leaf = self.store.leaf(child);
                    let free: u32 = (0..LEAF_PAGES).map(|page| u32::from(leaf.is_free(page))).sum();
                    walk.idle += usize::from(free == LEAF_PAGES);
                    walk.free_pages += u64::from(free);
                    slow_fit(leaf)
                }
            };
            if node.fits[block] != fit {
                return Err("what fits in a block's leaves is wrong");
            }
            best = best.max(&fit);
        }
        self.check_runs(number, level, base)?;
        Ok(best)
    }

    /// Checks the runs of a node against a walk over its free runs, page by page where there are bits.
    fn check_runs(&self, number: u32, level: u32, base: u64) -> Result<(), &'static str> {
        let end = base + pages(level);
        let mut longest = [0; MAX_ORDER as usize + 1];
        let (mut prefix, mut suffix) = (0, 0);
        let mut from = base;
        while let Some(start) = self.first_in(from, end, true) {
            from = self.first_in(start, end, false).unwrap_or(end);
            prefix = if start == base { from - start } else { prefix };
            suffix = if from == end { from - start } else { suffix };
            let leaf = u64::from(LEAF_PAGES);
            if start.is_multiple_of(leaf) || start.next_multiple_of(leaf) <= from {
                for (order, longest) in (0..).zip(longest.iter_mut()) {
                    *longest = from.saturating_sub(start.next_multiple_of(1 << order)).max(*longest);
                }
            }
        }
        let node = self.store.node(number);
        let mut children = node.children.iter().filter_map(|below| below.number());
        let is_newer = |child: u32| self.store.node(child).is_runs_stale && !node.is_runs_stale;
        if level > 1 && children.any(is_newer) {
            return Err("a node is stale but the one above is not");
        }
        if node.is_runs_stale {
            return Ok(());
        }
        let runs = &node.runs;
        if (runs.prefix, runs.suffix) != (prefix, suffix) {
            return Err("the ends of a node are wrong");
        }
        let is_known = |order| order == 0 || order >= LEAF_ORDER;
        if (0..).zip(longest).any(|(order, longest)| is_known(order) && runs.longest(order) != longest) {
            return Err("the runs of a node are wrong");
        }
        Ok(())
    }
}

/// What a leaf has room for, page by page and block by block.
pub(super) fn slow_fit(leaf: &Leaf) -> Fit {
    let mut counts = [0; LEAF_ORDER as usize + 1];
    for (order, most) in counts.iter_mut().enumerate() {
        for block in (0..LEAF_PAGES).step_by(1 << order) {
            let free = (block..block + (1 << order)).take_while(|page| leaf.is_free(*page)).count();
            *most = free.max(*most);
        }
    }
    let [zero, one, two, three, four, five, six, seven, eight, nine] = counts;
    let low = [zero + one, two, three, four, five, six];
    let low = low.iter().rev().fold(0, |low, count| low << 8 | *count as u64);
    FitBits::new(low, seven as u32, eight as u32, nine as u32).into()
}
