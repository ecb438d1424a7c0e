//! Finds the highest place for a request, whenever there is one.

use super::Bitmap;
use super::fit::{LEAF_ORDER, Need};
use super::node::{Child, FAN, base, child_index, pages as pages_of};
use super::path::{Path, in_leaf};
use super::runs::highest_in;

pub(super) struct Found {
    pub(super) page: u64,
    /// Set if the search ended in a leaf that has bits.
    pub(super) leaf: Option<u32>,
}

/// Whether a request has natural alignment, and so lies inside a leaf wherever it is placed.
#[inline]
pub(super) const fn is_natural(pages: u64, order: u32) -> bool {
    order <= LEAF_ORDER && pages <= 1 << order
}

struct Natural {
    pages: u64,
    order: u32,
    need: Need,
}

#[derive(Clone, Copy)]
struct Span {
    pages: u64,
    order: u32,
    limit: u64,
}

impl Bitmap {
    /// Returns the highest place for `pages` pages at `order` before page `limit`. If it was found in a leaf that has
    /// bits, `path` leads there. If it was found in a block without bits, or may cross leaves, no leaf is returned.
    #[inline]
    pub(super) fn find(&mut self, pages: u64, order: u32, limit: u64, path: &mut Path) -> Option<Found> {
        if !is_natural(pages, order) {
            self.refresh_runs();
            let page = self.find_across(pages, order, limit.min(self.end()))?;
            return Some(Found { page, leaf: None });
        }
        let request = Natural { pages, order, need: Need::of(pages, order) };
        if !self.fit.has(request.need) {
            None
        } else if limit >= self.end() {
            self.descend(&request, path)
        } else {
            self.find_below(&request, limit.checked_sub(1)?, path)
        }
    }

    /// The highest place whose last page is `last` or lies before it.
    #[inline(never)]
    fn find_below(&self, request: &Natural, last: u64, path: &mut Path) -> Option<Found> {
        let (level, found) = self.find_at_limit(request, last, path);
        if found.is_some() {
            return found;
        }
        // The blocks before the one with the limit all lie below it.
        for level in level..=self.top {
            let number = path.node(level);
            let before = (1 << child_index(last, level)) - 1;
            let blocks = self.store.node(number).fitting(request.need) & before;
            if blocks != 0 {
                return self.descend_into(request, blocks, number, level, base(last, level), path);
            }
        }
        None
    }

    /// Descends toward `last`, the last page allowed, to a leaf, a uniform block, or a block in which nothing fits.
    /// Returns the highest place in that block, and the level of the node that has it.
    fn find_at_limit(&self, request: &Natural, last: u64, path: &mut Path) -> (u32, Option<Found>) {
        let Natural { pages, order, .. } = *request;
        let (mut number, mut level) = (self.root, self.top);
        loop {
            path.set(level, number);
            let node = self.store.node(number);
            let block = child_index(last, level);
            if !node.fits[block].has(request.need) {
                return (level, None);
            }
            let Some(child) = node.children[block].number() else {
                let start = base(last, level - 1);
                let page = highest_in(start, last + 1, pages, order);
                return (level, page.map(|page| Found { page, leaf: None }));
            };
            if level == 1 {
                let leaf = self.store.leaf(child).only(0, in_leaf(last) + 1);
                let page = leaf.place(pages, order);
                let page = page.map(|page| base(last, 0) + u64::from(page));
                return (level, page.map(|page| Found { page, leaf: Some(child) }));
            }
            (number, level) = (child, level - 1);
        }
    }

    /// The highest place of all; there is one.
    #[inline]
    fn descend(&mut self, request: &Natural, path: &mut Path) -> Option<Found> {
        self.extend_spine();
        let mut level = self.spine.level;
        let mut number = self.spine.path.node(level);
        let mut blocks = self.store.node(number).fitting(request.need);
        while blocks == 0 {
            level += 1;
            if level > self.top {
                return None;
            }
            self.shorten_spine(level);
            number = self.spine.path.node(level);
            blocks = self.store.node(number).fitting(request.need);
        }
        *path = self.spine.path;
        self.descend_into(request, blocks, number, level, self.spine.base, path)
    }

    /// The highest place in `blocks`, the blocks (as bits) of a node at page `base` in which the request fits.
    #[inline]
    fn descend_into(
        &self,
        request: &Natural,
        mut blocks: u32,
        mut number: u32,
        mut level: u32,
        mut base: u64,
        path: &mut Path,
    ) -> Option<Found> {
        let Natural { pages, order, .. } = *request;
        loop {
            path.set(level, number);
            let block = blocks.checked_ilog2()?;
            let below = *self.store.node(number).children.get(block as usize)?;
            level -= 1;
            base += u64::from(block) * pages_of(level);
            let Some(child) = below.number() else {
                debug_assert!(below == Child::FREE, "nothing fits in a block that is used");
                let page = highest_in(base, base + pages_of(level), pages, order)?;
                return Some(Found { page, leaf: None });
            };
            if level == 0 {
                let page = self.store.leaf(child).place(pages, order)?;
                return Some(Found { page: base + u64::from(page), leaf: Some(child) });
            }
            number = child;
            blocks = self.store.node(number).fitting(request.need);
        }
    }

    /// The highest place in a run that touches the boundary of a leaf. The runs of all nodes must be up to date. O(h).
    pub(super) fn find_across(&self, pages: u64, order: u32, limit: u64) -> Option<u64> {
        if self.top == 0 || self.store.node(self.root).runs.longest(order) < pages {
            return None;
        }
        self.highest(&Span { pages, order, limit })
    }

    #[inline(never)]
    fn highest(&self, span: &Span) -> Option<u64> {
        let Span { pages, order, limit } = *span;
        let last = limit.checked_sub(1)?;
        // Descend to the smallest node that the limit cuts and in which the request may fit.
        let mut path = Path::new();
        let (mut number, mut level) = (self.root, self.top);
        loop {
            path.set(level, number);
            let is_cut = limit & (pages_of(level - 1) - 1) != 0;
            let child = self.store.node(number).children[child_index(last, level)].number();
            match child.filter(|_| is_cut && level > 1) {
                Some(child) if self.store.node(child).runs.longest(order) >= pages => {
                    (number, level) = (child, level - 1);
                }
                _ => break,
            }
        }
        (level..=self.top).find_map(|level| self.highest_in(path.node(level), level, base(last, level), span))
    }

    /// The highest place below a node at page `base`, except in a block that the limit cuts and that is a node itself.
    fn highest_in(&self, mut number: u32, mut level: u32, mut base: u64, span: &Span) -> Option<u64> {
        let Span { pages, order, limit } = *span;
        let place = |start, end| highest_in(start, end, pages, order);
        let (mut block, mut free_after) = (FAN, 0);
        // `free_after` is the number of free pages from the end of the block on.
        while let Some(next) = block.checked_sub(1) {
            block = next;
            let node = self.store.node(number);
            let size = pages_of(level - 1);
            let start = base + block as u64 * size;
            if start >= limit {
                continue;
            }
            let part = self.store.part(node, level, block);
            let whole = start + size <= limit;
            if whole {
                // The run around the end of the block begins above all other runs of the block.
                let end = start + size;
                if let Some(page) = place(end - part.suffix, end + free_after) {
                    return Some(page);
                }
            } else if node.children[block] == Child::FREE
                && let Some(page) = place(start, limit)
            {
                return Some(page);
            }
            let prefix = part.prefix.min(limit - start);
            if let Some(inner) = part.inner {
                let child = node.children[block].number();
                if let Some(child) = child.filter(|_| whole && inner.longest(order) >= pages) {
                    (number, level, base) = (child, level - 1, start);
                    (block, free_after) = (FAN, 0);
                    continue;
                }
            } else if let Some(page) = place(start, start + prefix) {
                return Some(page);
            }
            free_after = if prefix == size { free_after + size } else { prefix };
        }
        None
    }
}
