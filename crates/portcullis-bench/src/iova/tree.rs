//! The free pages of one I/O virtual address space: an address-ordered, balanced tree of *holes*.
//!
//! It could stand behind the CPUs' lists of Portcullis, where the bitmap does now. Its contract and its errors are
//! the bitmap's, so that both are compared on equal terms.
//!
//! Everything is counted in pages. A hole is a maximal run of free pages `[start, start + pages)`; two holes
//! never overlap or touch. The holes are the nodes of an AVL tree ordered by start page, so that every
//! operation has a logarithmic bound in the worst case, not just on average.
//!
//! # Exact search
//!
//! Whether a hole can take `n` pages aligned to `2^k` depends on what is left of it behind its first aligned
//! page, not on its length. Every node therefore summarises its subtree by the longest such remainder *for
//! every order* `k` up to [`MAX_ORDER`]; a search descends only into subtrees that certainly hold a fit. It
//! finds a fit whenever there is one and never pads the request. `node.rs` says how the nineteen maxima fit
//! in 40 bytes without rounding; a node is one 64-byte cache line.
//!
//! # Memory
//!
//! Giving pages back may create a hole and thus need a node, at a moment when failing is not an option. Let
//! `live` be the number of allocations handed out and `runs` the number of holes there would be if all of
//! them were given back. Two holes are separated by a live allocation or by pages that were never free, so
//! there are at most `live + runs` holes. [`HoleTree::alloc`] raises the number of nodes to that bound for
//! the state *after* it, before it takes anything: the memory for the free is paid for by the allocation.

use std::fmt;

use ::portcullis::iova::{BitmapError, MAX_ORDER};

mod balance;
mod check;
mod node;
mod search;

use node::{NIL, Node, Path};
use search::Gap;

/// The free pages of an I/O virtual address space, as an address-ordered, balanced tree of *holes*: maximal
/// runs of free pages.
///
/// Pages up to `u64::MAX - 1` can be held. Taking pages is exact: it fails for want of space only where no
/// placement exists. Giving back what was taken needs no memory. Bounds are for the worst case, with `n` the
/// number of holes; where it says so, the cost of growing the slab of nodes comes on top, which is constant
/// per call on average. No function panics, whatever its arguments.
pub struct HoleTree {
    /// Holes and unused nodes.
    nodes: Vec<Node>,
    root: u32,
    /// The first unused node; they are linked through `left`.
    unused: u32,
    holes: usize,
    free_pages: u64,
    /// Allocations not yet given back. A caller that gives back in other pieces than it took makes this an
    /// estimate, see [`HoleTree::free`].
    live: usize,
    /// Pages in those allocations. Bounds `live`, so that frees of several allocations at once, which are
    /// counted as one, cannot make it drift upwards forever.
    used: u64,
    /// At least the number of holes there would be if nothing were live.
    runs: usize,
}

impl HoleTree {
    /// A space without a free page, filled from the top down. Constant time; does not allocate.
    pub const fn new() -> Self {
        Self { nodes: Vec::new(), root: NIL, unused: NIL, holes: 0, free_pages: 0, live: 0, used: 0, runs: 0 }
    }

    /// Declares `[first, first + pages)` free: pages that so far belonged neither to a hole nor to an
    /// allocation, for instance the aperture of a device.
    ///
    /// O(log n); may allocate, which then copies all nodes.
    ///
    /// # Errors
    /// [`BitmapError::Invalid`], [`BitmapError::OutOfMemory`]. Nothing has changed then.
    pub fn add(&mut self, first: u64, pages: u64) -> Result<(), BitmapError> {
        let end = end_of(first, pages)?;
        let gap = self.gap(first, end).ok_or(BitmapError::Invalid)?;
        // New pages between two holes join what would otherwise stay two runs forever; next to one hole
        // they make its run longer; elsewhere they may be a run of their own.
        let runs = match (gap.before, gap.after) {
            (Some(_), Some(_)) => self.runs.saturating_sub(1),
            (None, None) => self.runs.saturating_add(1),
            _ => self.runs,
        };
        self.ensure(self.live.saturating_add(runs))?;
        self.fill(gap, first, pages)?;
        self.runs = runs;
        self.settle_runs();
        Ok(())
    }

    /// Takes whatever is free of `[first, first + pages)` out of the free space for good, and returns how
    /// many pages that was. What is allocated there stays so, and becomes free when it is given back.
    ///
    /// O((1 + m) log n) with `m` holes in the range; may allocate, which then copies all nodes.
    ///
    /// # Errors
    /// [`BitmapError::Invalid`], [`BitmapError::OutOfMemory`]. Nothing has changed then.
    pub fn reserve(&mut self, first: u64, pages: u64) -> Result<u64, BitmapError> {
        let end = end_of(first, pages)?;
        let mut path = Path::new();
        let mut pieces = 0_usize;
        let mut cursor = end;
        while let Some((start, _)) = self.last_in(first, cursor, &mut path) {
            pieces = pieces.saturating_add(1);
            cursor = start;
        }
        // Each piece may have been what connected the allocations on either side of it.
        let runs = self.runs.saturating_add(pieces);
        self.ensure(self.live.saturating_add(runs))?;
        let mut taken = 0;
        let mut cursor = end;
        while let Some((start, len)) = self.last_in(first, cursor, &mut path) {
            // Only a piece with free pages on both sides needs a node, and then it is the only piece: the
            // error leaves nothing half done.
            self.carve(&mut path, start, len)?;
            taken += len;
            cursor = start;
        }
        self.runs = runs;
        self.settle_runs();
        Ok(taken)
    }

    /// Takes `pages` pages out of the free space and returns the first of them: of all multiples of
    /// `1 << align_order` for which the last page is at most `max_page`, the highest.
    ///
    /// O(log n) in the worst case, and exact: it fails for want of space only where no placement exists.
    /// May allocate the node that giving the pages back may need, which then copies all nodes.
    ///
    /// # Errors
    /// [`BitmapError::NoFit`], [`BitmapError::Invalid`], [`BitmapError::OutOfMemory`]. Nothing has changed then.
    pub fn alloc(&mut self, pages: u64, align_order: u32, max_page: u64) -> Result<u64, BitmapError> {
        if pages == 0 || align_order > MAX_ORDER {
            return Err(BitmapError::Invalid);
        }
        let mut path = Path::new();
        let Some(first) = self.find(pages, align_order, max_page, &mut path) else {
            return Err(BitmapError::NoFit);
        };
        self.ensure(self.live.saturating_add(1).saturating_add(self.runs))?;
        self.carve(&mut path, first, pages)?;
        self.live = self.live.saturating_add(1);
        self.used = self.used.saturating_add(pages);
        Ok(first)
    }

    /// Makes `[first, first + pages)` free again, joined with the holes on either side.
    ///
    /// O(log n) in the worst case. Never allocates and never fails for a range that [`HoleTree::alloc`]
    /// returned, given back whole and once, as long as every earlier free was of that kind too.
    ///
    /// Giving an allocation back in several pieces is possible, but only one node was paid for: a piece that
    /// becomes a hole of its own may then need to allocate, in that call or a later one. The tree knows only
    /// what is free: giving back pages that were reserved or never added is not noticed.
    ///
    /// # Errors
    /// [`BitmapError::Invalid`]; [`BitmapError::OutOfMemory`] only after frees in pieces, as described above.
    /// Nothing has changed then.
    pub fn free(&mut self, first: u64, pages: u64) -> Result<(), BitmapError> {
        let end = end_of(first, pages)?;
        let gap = self.gap(first, end).ok_or(BitmapError::Invalid)?;
        self.fill(gap, first, pages)?;
        self.used = self.used.saturating_sub(pages);
        let most = usize::try_from(self.used).unwrap_or(usize::MAX);
        self.live = self.live.saturating_sub(1).min(most);
        self.settle_runs();
        Ok(())
    }

    /// The number of free pages. Constant time; does not allocate.
    pub const fn free_pages(&self) -> u64 {
        self.free_pages
    }

    /// The number of pages in the largest hole; 0 if nothing is free. Constant time; does not allocate.
    pub fn largest_hole(&self) -> u64 {
        self.summary(self.root).longest(0)
    }

    /// The number of holes. Constant time; does not allocate.
    pub const fn holes(&self) -> usize {
        self.holes
    }

    /// Bytes of heap memory held: 64 for every node, used or not. Constant time; does not allocate.
    pub const fn memory_bytes(&self) -> usize {
        self.nodes.capacity().saturating_mul(size_of::<Node>())
    }

    /// The holes in address order, each as its first page and its number of pages.
    ///
    /// Constant time to create; each step O(log n) in the worst case and O(1) on average. Does not allocate.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        // The path holds the nodes that are still to be visited: each with its right subtree to follow.
        let mut path = Path::new();
        self.descend(&mut path, self.root, |node| node.left);
        std::iter::from_fn(move || {
            let node = self.nodes.get(path.pop()? as usize)?;
            self.descend(&mut path, node.right, |node| node.left);
            Some((node.start, node.pages))
        })
    }

    /// With nothing live, the holes are the runs: forgets what the estimate had gathered on top.
    fn settle_runs(&mut self) {
        if self.live == 0 {
            self.runs = self.holes;
        }
    }

    /// Takes `[first, first + pages)` out of the hole at the end of `path`, which contains it.
    fn carve(&mut self, path: &mut Path, first: u64, pages: u64) -> Result<(), BitmapError> {
        let at = path.len().saturating_sub(1);
        let index = path.get(at);
        let (start, hole_end) = (self.node(index).start, self.node(index).end());
        let end = first.saturating_add(pages);
        let (below, above) = (first.saturating_sub(start), hole_end.saturating_sub(end));
        if below == 0 && above == 0 {
            self.remove(path);
        } else if below == 0 {
            self.set(index, end, above);
            self.restore(path, at);
        } else if above == 0 {
            self.set(index, start, below);
            self.restore(path, at);
        } else {
            let upper = self.slot(end, above)?;
            self.set(index, start, below);
            // The upper part becomes the successor of the lower one.
            let right = self.node(index).right;
            if right == NIL {
                self.node_mut(index).right = upper;
            } else {
                self.descend(path, right, |node| node.left);
                let parent = path.get(path.len().saturating_sub(1));
                self.node_mut(parent).left = upper;
            }
            self.restore(path, at);
        }
        self.free_pages -= pages;
        Ok(())
    }

    /// Makes `[first, first + pages)`, which lies in `gap`, free. Fails only for want of a node.
    fn fill(&mut self, mut gap: Gap, first: u64, pages: u64) -> Result<(), BitmapError> {
        let path = &mut gap.path;
        match (gap.before, gap.after) {
            (None, None) => {
                let index = self.slot(first, pages)?;
                self.attach(path, index);
            }
            (Some(depth), None) => {
                let (start, len) = self.hole(path.get(depth));
                self.set(path.get(depth), start, len + pages);
                path.truncate(depth + 1);
                self.restore(path, depth);
            }
            (None, Some(depth)) => {
                let (_, len) = self.hole(path.get(depth));
                self.set(path.get(depth), first, len + pages);
                path.truncate(depth + 1);
                self.restore(path, depth);
            }
            (Some(before), Some(after)) => {
                // One is an ancestor of the other. The lower one ends the path, so it has at most one child:
                // that one goes, and the upper one becomes the joint hole.
                let (start, below) = self.hole(path.get(before));
                let (_, above) = self.hole(path.get(after));
                let kept = before.min(after);
                self.set(path.get(kept), start, below + pages + above);
                self.unlink(path, kept);
            }
        }
        self.free_pages += pages;
        Ok(())
    }

    /// Makes sure that there can be `needed` nodes without allocating.
    fn ensure(&mut self, needed: usize) -> Result<(), BitmapError> {
        if needed <= self.nodes.capacity() {
            return Ok(());
        }
        if needed >= NIL as usize {
            return Err(BitmapError::OutOfMemory);
        }
        let additional = needed.saturating_sub(self.nodes.len());
        // Doubling keeps the cost per allocation constant. Under pressure just enough is better than nothing.
        self.nodes
            .try_reserve(additional)
            .or_else(|_| self.nodes.try_reserve_exact(additional))
            .map_err(|_| BitmapError::OutOfMemory)
    }

    /// A new node for a hole, not linked anywhere. Allocates only if there is none that was paid for.
    fn slot(&mut self, start: u64, pages: u64) -> Result<u32, BitmapError> {
        let node = Node::new(start, pages);
        let index = self.unused;
        if let Some(slot) = self.nodes.get_mut(index as usize) {
            self.unused = slot.left;
            *slot = node;
            self.holes += 1;
            return Ok(index);
        }
        let needed = self.nodes.len().saturating_add(1);
        self.ensure(needed)?;
        // `ensure` has refused any number that is not a valid index.
        let index = u32::try_from(self.nodes.len()).unwrap_or(NIL);
        self.nodes.push(node);
        self.holes += 1;
        Ok(index)
    }
}

impl Default for HoleTree {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for HoleTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoleTree")
            .field("holes", &self.holes)
            .field("free_pages", &self.free_pages)
            .field("largest_hole", &self.largest_hole())
            .field("live", &self.live)
            .finish_non_exhaustive()
    }
}

/// The page behind a range.
fn end_of(first: u64, pages: u64) -> Result<u64, BitmapError> {
    first.checked_add(pages).filter(|end| *end > first).ok_or(BitmapError::Invalid)
}
