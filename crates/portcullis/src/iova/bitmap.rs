//! The free pages of one I/O virtual address space: a hierarchical bitmap. A search finds the highest place for a
//! request whenever there is one, and freeing an allocation needs no memory.
//!
//! Everything is counted in pages. Leaves of 512 bits, one per page and one cache line each, exist only where pages
//! were ever partly in use; above them is an eight-ary tree. A block of which all pages are free, or none, needs
//! neither bits nor nodes: its parent has a word for that state. In a fragmented space most updates leave a leaf's
//! maxima as they were, and so write only the leaf's cache line.
//!
//! *Growth.* The bitmap starts with a few nodes, on the way to each end of the pages that were added, and grows with
//! allocations, which stay close together, as they are placed at one end. When new leaves or nodes need memory, fully
//! free leaves are collected if they are more than half of all, or if memory is short. Their memory serves other leaves
//! and nodes, and is freed with the bitmap.
//!
//! *Exact search.* Nodes know two things about the blocks below them, exactly:
//!
//! - What fits *inside a leaf with natural alignment*: for each order up to 9, the longest free run that starts at a
//!   multiple of `2^order` and stays in its block of that order, in 16 bytes per child (`Fit`). Requests with natural
//!   alignment up to 512 pages never cross leaves, so a search for them walks straight down to a leaf that has room.
//!   After each change of a leaf this is computed from all of its bits at once (`leaf.rs`), and above it as far as it
//!   changes.
//! - The runs that *touch a boundary* of leaves, for each order from 9 to [`MAX_ORDER`] (`Runs`). Everything that is
//!   longer than a leaf, or begins at a multiple of its size, is among these. Stale runs are recomputed when a request
//!   needs them.
//!
//! *Memory.* Allocating a part of a block without bits makes the bits, and they stay while the allocation lives: a
//! partly used block is never collected. Allocating the whole of such a block makes none. So a free finds the same
//! blocks, and needs no memory; a free of only a part may break a block up, which does.

use core::fmt;

mod change;
#[cfg(any(test, feature = "parts"))]
#[path = "../../tests/inside/iova/bitmap/check.rs"]
mod check;
mod fit;
mod leaf;
mod node;
mod paint;
mod path;
mod runs;
mod search;
mod seek;
mod slab;
mod stale;
mod store;
mod survey;
mod walk;

use fit::{Fit, LEAF_ORDER};
use node::{Child, MAX_LEVEL};
use path::{Path, Spine};
pub use runs::MAX_ORDER;
use search::is_natural;
use store::Store;
pub use survey::Survey;

/// Why the free space could not be changed. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BitmapError {
    /// No hole can take the request.
    #[error("no hole takes the request")]
    NoFit,
    /// There is no memory for the nodes that the change may need.
    #[error("no memory for the bitmap's nodes")]
    OutOfMemory,
    /// The range has no pages, or pages from `2^54` on; a page to be freed or added is free already; or
    /// [`Bitmap::alloc`] does not allow the alignment.
    #[error("no such range can be taken, added or given back")]
    Invalid,
}

/// The free pages of an I/O virtual address space, below page `2^54`. See the module's text.
///
/// No function panics, whatever its arguments, and none waits. In the stated worst-case bounds `h` is the height of the
/// tree, at most 15; it is 9 for an aperture of 2^36 pages, which is 48 bits of addresses with pages of 4 KiB. A range
/// of `p` pages takes `p / 64` more steps if it has bits. A function that may allocate may also move all nodes or
/// leaves to larger memory, or collect unused ones; either is constant per call on average.
pub struct Bitmap {
    store: Store,
    /// The node `top` levels above the leaves; none while `top` is 0.
    root: u32,
    top: u32,
    fit: Fit,
    free_pages: u64,
    /// The fewest free pages since pages were last added.
    least_free: u64,
    /// Fully free leaves, which could be collected.
    idle: usize,
    spine: Spine,
}

impl Bitmap {
    /// Makes a space without a free page. O(1); does not allocate.
    pub const fn new() -> Self {
        Self {
            store: Store::new(),
            root: 0,
            top: 0,
            fit: Fit::NONE,
            free_pages: 0,
            least_free: 0,
            idle: 0,
            spine: Spine::EMPTY,
        }
    }

    /// Makes `[first, first + pages)` free: pages that belong neither to a hole nor to an allocation, such as the
    /// aperture of a device.
    ///
    /// O(h), and the nodes and bits that exist in the range; may allocate, at most `3 * h` nodes and two leaves.
    ///
    /// # Errors
    /// [`BitmapError::Invalid`] for a range without pages, with pages from `2^54` on, or with a page that is free
    /// already; [`BitmapError::OutOfMemory`]. No page has changed then.
    pub fn add(&mut self, first: u64, pages: u64) -> Result<(), BitmapError> {
        let end = end_of(first, pages)?;
        if self.is_any_free(first, end) {
            return Err(BitmapError::Invalid);
        }
        self.declare_free(first, end)?;
        self.least_free = self.free_pages;
        Ok(())
    }

    /// Takes the free pages of `[first, first + pages)` out of the free space for good, and returns their number.
    /// Allocated pages there stay allocated, and become free when they are freed.
    ///
    /// O(h), and the nodes and bits that exist in the range; may allocate, at most `2 * h` nodes and two leaves.
    ///
    /// # Errors
    /// [`BitmapError::Invalid`] for a range that is empty or wraps, [`BitmapError::OutOfMemory`]. Nothing has changed
    /// then.
    pub fn reserve(&mut self, first: u64, pages: u64) -> Result<u64, BitmapError> {
        let end =
            first.checked_add(pages).filter(|end| *end > first).ok_or(BitmapError::Invalid)?.min(self.end());
        if first >= end {
            return Ok(0);
        }
        let before = self.free_pages;
        self.paint(first, end, Child::TAKEN)?;
        self.least_free = self.least_free.min(self.free_pages);
        Ok(before - self.free_pages)
    }

    /// Allocates `pages` pages and returns the first: the highest multiple of `1 << align_order` at which a run of
    /// `pages` free pages begins that ends at or before `end`.
    ///
    /// The order is at most [`MAX_ORDER`]. It is at least 9, or the request has *natural alignment*: it is for at most
    /// `1 << align_order` pages.
    ///
    /// O(h) with natural alignment up to 512 pages. Other requests first catch up with the deferred work of earlier
    /// calls: O(h), and a step for each node that the range of such a call had, but at most one step for each node of
    /// the tree.
    ///
    /// May allocate the bits that the range lacks: at most a leaf of 64 bytes and `h` nodes of 256 bytes at either end.
    ///
    /// # Errors
    /// [`BitmapError::NoFit`]; [`BitmapError::Invalid`] for no pages, or an order that is not allowed;
    /// [`BitmapError::OutOfMemory`]. Nothing has changed then.
    #[inline]
    pub fn alloc(&mut self, pages: u64, align_order: u32, end: u64) -> Result<u64, BitmapError> {
        let mut page = 0;
        let taken = self.take_run(pages, align_order, (0, end), 1, |taken| page = taken)?;
        self.least_free = self.least_free.min(self.free_pages);
        if taken == 0 { Err(BitmapError::NoFit) } else { Ok(page) }
    }

    /// Allocates up to `most` ranges of 2^`order` pages, each at its natural alignment, and calls `put` with the first
    /// page of each, as that many calls of [`Bitmap::alloc`] would return them. Returns the number of ranges: fewer
    /// than `most` only if no more fits below `end`, the highest that fits begins below `first`, or memory is short.
    /// Ranges of up to 512 pages in the same leaf are found and entered together.
    ///
    /// Costs at most as much as the single calls, and may allocate as they may. If no range fits, it costs one search.
    ///
    /// # Errors
    /// [`BitmapError::Invalid`] for an order above [`MAX_ORDER`]; [`BitmapError::OutOfMemory`] if there is no memory
    /// for the first range. Nothing has changed then.
    pub fn alloc_run(
        &mut self,
        order: u32,
        (first, end): (u64, u64),
        most: usize,
        mut put: impl FnMut(u64),
    ) -> Result<usize, BitmapError> {
        let mut done = 0;
        while done < most {
            match self.take_run(1 << order.min(MAX_ORDER + 1), order, (first, end), most - done, &mut put) {
                Ok(0) => break,
                Ok(taken) => done += taken,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        self.least_free = self.least_free.min(self.free_pages);
        Ok(done)
    }

    /// Makes `[first, first + pages)` free again.
    ///
    /// O(h), and the nodes and bits that exist in the range. Never allocates and never fails for an allocation that is
    /// freed whole and once, in any order. A free of a part may need memory; so may one of pages that were reserved or
    /// never added, which the bitmap does not notice.
    ///
    /// # Errors
    /// [`BitmapError::Invalid`] for a range without pages, with pages from `2^54` on, or with a page that is free;
    /// [`BitmapError::OutOfMemory`] only as described above. No page has changed then.
    #[inline]
    pub fn free(&mut self, first: u64, pages: u64) -> Result<(), BitmapError> {
        let end = end_of(first, pages)?;
        if let Some(freed) = self.free_in_leaf(first, end) {
            if freed {
                return Ok(());
            }
        } else if self.set_blocks(first, end, Child::FREE) {
            return Ok(());
        } else if !self.is_any_free(first, end) {
            return self.declare_free(first, end);
        }
        Err(BitmapError::Invalid)
    }

    /// Frees allocations of `pages` pages each, for which [`Bitmap::free`] cannot fail.
    pub(super) fn free_all(&mut self, firsts: impl IntoIterator<Item = u64>, pages: u64) {
        for first in firsts {
            let freed = self.free(first, pages);
            debug_assert!(freed.is_ok(), "{freed:?}");
        }
    }

    /// Returns the number of free pages. O(1); does not allocate.
    pub const fn free_pages(&self) -> u64 {
        self.free_pages
    }

    /// Returns the fewest pages that were free since the last [`Bitmap::add`]. O(1); does not allocate.
    pub const fn least_free(&self) -> u64 {
        self.least_free
    }

    /// Returns the bytes of heap memory: 64 for every leaf and 256 for every node, used or not. O(1); does not
    /// allocate.
    pub const fn memory_bytes(&self) -> usize {
        self.store.bytes()
    }

    #[inline]
    const fn end(&self) -> u64 {
        if self.top == 0 { 0 } else { node::pages(self.top) }
    }

    /// Allocates at least one range, and up to `most` in one leaf. Returns the number: 0 if nothing fits, or the
    /// highest place begins before page `from`.
    #[inline]
    fn take_run(
        &mut self,
        pages: u64,
        align_order: u32,
        (from, limit): (u64, u64),
        most: usize,
        mut put: impl FnMut(u64),
    ) -> Result<usize, BitmapError> {
        let is_possible = is_natural(pages, align_order) || (LEAF_ORDER..=MAX_ORDER).contains(&align_order);
        if pages == 0 || !is_possible {
            return Err(BitmapError::Invalid);
        }
        let mut path = Path::new();
        let Some(found) = self.find(pages, align_order, limit, &mut path).filter(|found| found.page >= from)
        else {
            return Ok(0);
        };
        let page = found.page;
        let Some(leaf) = found.leaf else {
            self.take_anywhere(page, pages)?;
            put(page);
            return Ok(1);
        };
        if most <= 1 {
            self.take_in_leaf(page, pages, leaf, &path);
            put(page);
            return Ok(1);
        }
        Ok(self.take_several((pages, align_order), page, (from, limit), leaf, &path, (most, put)))
    }

    fn declare_free(&mut self, first: u64, end: u64) -> Result<(), BitmapError> {
        self.cover(end)?;
        self.paint(first, end, Child::FREE)
    }
}

impl Default for Bitmap {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Bitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bitmap")
            .field("free_pages", &self.free_pages)
            .field("nodes", &self.store.used().nodes)
            .field("leaves", &self.store.used().leaves)
            .finish_non_exhaustive()
    }
}

#[inline]
fn end_of(first: u64, pages: u64) -> Result<u64, BitmapError> {
    let end = first.checked_add(pages).filter(|end| *end > first && *end <= node::pages(MAX_LEVEL));
    end.ok_or(BitmapError::Invalid)
}
