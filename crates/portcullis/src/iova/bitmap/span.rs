//! Where a request fits that may cross leaves: in the runs that touch a boundary.

use super::Bitmap;
use super::node::{FAN, Link, pages as pages_of};
use crate::iova::placement::Placement;

/// What is looked for.
#[derive(Clone, Copy)]
struct Request {
    pages: u64,
    order: u32,
    /// The page behind the last one allowed.
    limit: u64,
}

impl Bitmap {
    /// Brings the runs of all nodes up to date that touch the boundary of a leaf. O(h) for each change since
    /// the last time, but no more than one step for every 2^12 pages in use; does not allocate.
    pub(super) fn refresh(&mut self) {
        if self.top > 0 {
            self.refresh_below(self.root, self.top, 0);
        }
    }

    fn refresh_below(&mut self, number: u32, level: u32, base: u64) {
        if !self.nodes.get(number).stale {
            return;
        }
        for block in 0..if level > 1 { FAN } else { 0 } {
            if let Some(child) = self.nodes.get(number).links[block].number() {
                self.refresh_below(child, level - 1, base + block as u64 * pages_of(level - 1));
            }
        }
        let runs = self.nodes.get(number).compute_runs(base, level, &self.nodes, &self.leaves);
        let node = self.nodes.get_mut(number);
        (node.runs, node.stale) = (runs, false);
    }

    /// Brings the longest runs inside leaves up to date, in all nodes. Costs as [`Bitmap::refresh`], and the
    /// bits of the leaves that have changed.
    pub(super) fn refresh_loose(&mut self) {
        if self.top > 0 {
            self.refresh_loose_below(self.root, self.top);
        }
    }

    fn refresh_loose_below(&mut self, number: u32, level: u32) {
        if !self.nodes.get(number).is_loose_stale {
            return;
        }
        for block in 0..if level > 1 { FAN } else { 0 } {
            if let Some(child) = self.nodes.get(number).links[block].number() {
                self.refresh_loose_below(child, level - 1);
            }
        }
        let loose = self.nodes.get(number).compute_loose(level, &self.nodes, &self.leaves);
        let node = self.nodes.get_mut(number);
        (node.loose, node.is_loose_stale) = (loose, false);
    }

    /// The preferred place in a run that touches the boundary of a leaf, which must be up to date. O(h), does not
    /// allocate.
    pub(super) fn find_across(&self, pages: u64, order: u32, limit: u64) -> Option<u64> {
        if self.top == 0 || self.nodes.get(self.root).runs.longest(order) < pages {
            return None;
        }
        let request = Request { pages, order, limit };
        match self.placement {
            Placement::TopDown => self.highest(self.root, self.top, 0, &request),
            Placement::BottomUp => {
                let page = self.lowest(self.root, self.top, 0, &request)?;
                (page.checked_add(pages)? <= limit).then_some(page)
            }
        }
    }

    /// The highest place below a node at page `base`. There is one, unless the limit cuts the node off.
    fn highest(&self, number: u32, level: u32, base: u64, request: &Request) -> Option<u64> {
        let Request { pages, order, limit } = *request;
        let place = |start, end| Placement::TopDown.within(start, end, pages, order);
        let node = self.nodes.get(number);
        let size = pages_of(level - 1);
        // How many pages from the end of the block on are free.
        let mut behind = 0;
        for block in (0..FAN).rev() {
            let start = base + block as u64 * size;
            if start >= limit {
                continue;
            }
            let part = node.part(block, level, &self.nodes, &self.leaves);
            let whole = start + size <= limit;
            if whole {
                // The run around the end of the block: it begins above everything else in the block.
                let end = start + size;
                if let Some(page) = place(end - part.suffix, end + behind) {
                    return Some(page);
                }
            } else if node.links[block] == Link::FREE
                && let Some(page) = place(start, limit)
            {
                return Some(page);
            }
            let prefix = part.prefix.min(limit - start);
            if let Some(inner) = part.inner {
                let child = node.links[block].number();
                if let Some(child) = child.filter(|_| inner.longest(order) >= pages) {
                    let page = self.highest(child, level - 1, start, request);
                    if whole || page.is_some() {
                        return page;
                    }
                }
            } else if let Some(page) = place(start, start + prefix) {
                return Some(page);
            }
            behind = if prefix == size { behind + size } else { prefix };
        }
        None
    }

    /// The lowest place below a node at page `base` that has one. The limit does not matter: if this one is
    /// not within it, none is.
    fn lowest(&self, number: u32, level: u32, base: u64, request: &Request) -> Option<u64> {
        let Request { pages, order, .. } = *request;
        let place = |start, end| Placement::BottomUp.within(start, end, pages, order);
        let node = self.nodes.get(number);
        let size = pages_of(level - 1);
        // How many pages before the start of the block are free.
        let mut before = 0;
        let mut start = base;
        for block in 0..FAN {
            let part = node.part(block, level, &self.nodes, &self.leaves);
            // The run around the start of the block: it begins below everything else in the block.
            if let Some(page) = place(start - before, start + part.prefix) {
                return Some(page);
            }
            if let Some(inner) = part.inner
                && let Some(child) = node.links[block].number()
                && inner.longest(order) >= pages
            {
                return self.lowest(child, level - 1, start, request);
            }
            before = if part.prefix == size { before + size } else { part.suffix };
            start += size;
        }
        place(start - before, start)
    }
}
