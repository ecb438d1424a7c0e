//! Where a request fits.

use super::Bitmap;
use super::fit::LEAF_ORDER;
use super::leaf::{LEAF_PAGES, Leaf};
use super::node::{FAN, Link, base, pages as pages_of, slot};
use super::path::{Path, in_leaf};
use crate::iova::placement::Placement;

/// A place for a request.
pub(super) struct Found {
    pub(super) page: u64,
    /// The leaf that it lies in and the way there, if it was found in a leaf that has bits.
    pub(super) leaf: Option<u32>,
    pub(super) path: Path,
}

/// Whether a request lies inside a leaf wherever it is placed.
#[inline]
pub(super) const fn is_natural(pages: u64, order: u32) -> bool {
    order <= LEAF_ORDER && pages <= 1 << order
}

impl Bitmap {
    /// The preferred place for `pages` pages at `order` before page `limit`.
    #[inline]
    pub(super) fn find(&self, pages: u64, order: u32, limit: u64) -> Option<Found> {
        if is_natural(pages, order) {
            self.find_in_leaves(pages, order, limit)
        } else {
            self.find_anywhere(pages, order, limit)
        }
    }

    /// The same for requests that may cross leaves: the better of what lies in one and what crosses.
    fn find_anywhere(&self, pages: u64, order: u32, limit: u64) -> Option<Found> {
        let limit = limit.min(self.end());
        let inside = if order <= LEAF_ORDER && pages <= LEAF_PAGES.into() {
            self.find_in_leaves(pages, order, limit)
        } else {
            None
        };
        let Some(across) = self.find_across(pages, order, limit) else {
            return inside;
        };
        let inside = inside.filter(|inside| match self.placement {
            Placement::TopDown => inside.page >= across,
            Placement::BottomUp => inside.page <= across,
        });
        inside.or(Some(Found { page: across, leaf: None, path: Path::new() }))
    }

    /// The preferred place inside any one leaf. A block without bits counts as one piece, of which the place
    /// may be at a boundary.
    #[inline]
    fn find_in_leaves(&self, pages: u64, order: u32, limit: u64) -> Option<Found> {
        if self.fit.longest(order) < pages {
            return None;
        }
        let mut path = Path::new();
        match self.placement {
            Placement::BottomUp => {
                // The lowest of all ends lowest; if it is not within the limit, none is.
                let found = self.descend(self.root, self.top, 0, pages, order, path);
                found.filter(|found| found.page.checked_add(pages).is_some_and(|end| end <= limit))
            }
            Placement::TopDown if limit >= self.end() => {
                self.descend(self.root, self.top, 0, pages, order, path)
            }
            Placement::TopDown => {
                let last = limit.checked_sub(1)?;
                let (level, found) = self.find_at_limit(last, pages, order, &mut path);
                if found.is_some() {
                    return found;
                }
                // Going up, the blocks before the one with the limit; all of these lie within it.
                for level in level..=self.top {
                    let number = path.node(level);
                    let before = (1 << slot(last, level)) - 1;
                    let blocks = self.nodes.get(number).fitting(pages, order) & before;
                    if blocks != 0 {
                        let base = base(last, level);
                        return self.descend_into(blocks, number, level, base, pages, order, path);
                    }
                }
                None
            }
        }
    }

    /// The place in the block that `last`, the last page allowed, lies in: a leaf, or a block that is in one
    /// state or has no fit. Also returns the level of the node that the block is in.
    fn find_at_limit(&self, last: u64, pages: u64, order: u32, path: &mut Path) -> (u32, Option<Found>) {
        let (mut number, mut level) = (self.root, self.top);
        loop {
            path.set(level, number);
            let node = self.nodes.get(number);
            let block = slot(last, level);
            if node.fits[block].longest(order) < pages {
                return (level, None);
            }
            let Some(child) = node.links[block].number() else {
                let start = base(last, level - 1);
                let page = self.placement.within(start, last + 1, pages, order);
                return (level, page.map(|page| Found { page, leaf: None, path: *path }));
            };
            if level == 1 {
                // A copy without the pages behind the limit.
                let mut leaf: Leaf = *self.leaves.get(child);
                if in_leaf(last) + 1 < LEAF_PAGES {
                    leaf.set(in_leaf(last) + 1, LEAF_PAGES, false);
                }
                let found = leaf.place(pages, order, self.placement).map(|page| Found {
                    page: base(last, 0) + u64::from(page),
                    leaf: Some(child),
                    path: *path,
                });
                return (level, found);
            }
            (number, level) = (child, level - 1);
        }
    }

    /// The preferred place below a node that has one.
    #[inline]
    fn descend(
        &self,
        number: u32,
        level: u32,
        base: u64,
        pages: u64,
        order: u32,
        path: Path,
    ) -> Option<Found> {
        let blocks = self.nodes.get(number).fitting(pages, order);
        self.descend_into(blocks, number, level, base, pages, order, path)
    }

    /// The same in those of the node's blocks, given as bits, that have one.
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "a loop with its start in the middle")]
    fn descend_into(
        &self,
        mut blocks: u32,
        mut number: u32,
        mut level: u32,
        mut base: u64,
        pages: u64,
        order: u32,
        mut path: Path,
    ) -> Option<Found> {
        let end = match self.placement {
            Placement::TopDown => FAN - 1,
            Placement::BottomUp => 0,
        };
        loop {
            path.set(level, number);
            let block = match self.placement {
                Placement::TopDown => blocks.checked_ilog2()?,
                Placement::BottomUp => blocks.trailing_zeros(),
            };
            let link = *self.nodes.get(number).links.get(block as usize)?;
            level -= 1;
            base += u64::from(block) * pages_of(level);
            let Some(child) = link.number() else {
                debug_assert!(link == Link::FREE, "nothing fits in a block that is used");
                let page = self.placement.within(base, base + pages_of(level), pages, order)?;
                return Some(Found { page, leaf: None, path });
            };
            if level == 0 {
                let page = self.leaves.get(child).place(pages, order, self.placement)?;
                return Some(Found { page: base + u64::from(page), leaf: Some(child), path });
            }
            number = child;
            let node = self.nodes.get(number);
            // High above the leaves it is nearly always the block at the end.
            blocks = if level > 3 && node.fits_in(end, pages, order) {
                1 << end
            } else {
                node.fitting(pages, order)
            };
        }
    }
}
