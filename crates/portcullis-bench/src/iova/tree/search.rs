//! Finding holes: a fit for a request, what is free of a range, the neighbours of a range. All O(log n), none
//! allocates.

use super::HoleTree;
use super::node::{Node, Path};

/// A place between holes.
pub(super) struct Gap {
    /// The way from the root to the place where a new node goes.
    pub(super) path: Path,
    /// How deep on that way the hole is that ends where the range begins.
    pub(super) before: Option<usize>,
    /// How deep on that way the hole is that begins where the range ends.
    pub(super) after: Option<usize>,
}

impl HoleTree {
    /// Finds the highest placement and the way to the hole it lies in.
    pub(super) fn find(&self, pages: u64, order: u32, max_page: u64, path: &mut Path) -> Option<u64> {
        if self.summary(self.root).longest(order) < pages {
            return None;
        }
        // The highest hole that begins within the limit is the only one that may reach past it: holes are
        // in order and do not overlap. It is tried as far as the limit; every other hole counts whole.
        let straddling = self.node(self.locate(max_page, path)?);
        let end = straddling.end().min(max_page.saturating_add(1));
        if let Some(first) = placement(straddling.start, end, pages, order) {
            return Some(first);
        }
        // What lies below it, in descending order: its left subtree, and going up, each node that the way
        // here left to the right, followed by the left subtree of that node.
        for depth in (0..path.len()).rev() {
            let index = path.get(depth);
            let node = self.node(index);
            if node.start > max_page {
                continue;
            }
            if depth + 1 < path.len()
                && let Some(first) = placement(node.start, node.end(), pages, order)
            {
                path.truncate(depth + 1);
                return Some(first);
            }
            if self.summary(node.left).longest(order) >= pages {
                path.truncate(depth + 1);
                return self.highest_fit(node.left, pages, order, path);
            }
        }
        None
    }

    /// The highest placement below `top`, a subtree that has one. Appends the way to its hole to `path`.
    fn highest_fit(&self, top: u32, pages: u64, order: u32, path: &mut Path) -> Option<u64> {
        let mut index = top;
        while let Some(node) = self.nodes.get(index as usize) {
            path.push(index);
            if self.summary(node.right).longest(order) >= pages {
                index = node.right;
            } else if let Some(first) = placement(node.start, node.end(), pages, order) {
                return Some(first);
            } else {
                index = node.left;
            }
        }
        None
    }

    /// The last free piece of `[first, end)`, with the way to its hole in `path`.
    pub(super) fn last_in(&self, first: u64, end: u64, path: &mut Path) -> Option<(u64, u64)> {
        let node = self.node(self.locate(end.checked_sub(1)?, path)?);
        let (start, end) = (node.start.max(first), node.end().min(end));
        (start < end).then(|| (start, end - start))
    }

    /// Where `[first, end)` belongs among the holes, or the lowest hole it overlaps.
    pub(super) fn gap(&self, first: u64, end: u64) -> Option<Gap> {
        // The neighbours of a key that is absent both lie on the way to the place it would have.
        let mut path = Path::new();
        let (mut before, mut after) = (None, None);
        let mut index = self.root;
        while let Some(node) = self.nodes.get(index as usize) {
            let neighbour = Some((path.len(), node));
            path.push(index);
            if node.start <= first {
                before = neighbour;
                index = node.right;
            } else {
                after = neighbour;
                index = node.left;
            }
        }
        let overlap = |(_, node): &(usize, &Node)| node.start < end && first < node.end();
        if before.filter(overlap).or(after.filter(overlap)).is_some() {
            return None;
        }
        let before_touches = before.filter(|(_, node)| node.end() == first).map(|(depth, _)| depth);
        let after_touches = after.filter(|(_, node)| node.start == end).map(|(depth, _)| depth);
        Some(Gap { path, before: before_touches, after: after_touches })
    }
}

/// The highest multiple of `2^order` in `[start, end)` with `pages` pages from there to `end`.
fn placement(start: u64, end: u64, pages: u64, order: u32) -> Option<u64> {
    let highest = end.checked_sub(pages)? >> order << order;
    (highest >= start).then_some(highest)
}
