//! Nodes, the summaries they carry, and the way to a node.

use ::portcullis::iova::MAX_ORDER;

/// No node. As an index it is out of bounds for any slab, so a bounds check is also the test for it.
pub(super) const NIL: u32 = u32::MAX;

/// More than the height of any tree with indices of 32 bits: an AVL tree of height 46 has 4.8e9 nodes.
pub(super) const MAX_DEPTH: usize = 48;

/// A hole and the subtree below it, in one cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Node {
    /// The first free page.
    pub(super) start: u64,
    /// The number of free pages; `start + pages` does not overflow.
    pub(super) pages: u64,
    /// Holes below this one; in an unused node, the next unused node.
    pub(super) left: u32,
    /// Holes above this one.
    pub(super) right: u32,
    /// What this node and everything below it in the tree can hold.
    pub(super) summary: Summary,
}

const _: () = assert!(size_of::<Node>() == 64, "a node is meant to be one cache line");

impl Node {
    /// A leaf.
    pub(super) fn new(start: u64, pages: u64) -> Self {
        let summary = Summary::leaf(start, pages);
        Self { start, pages, left: NIL, right: NIL, summary }
    }

    /// The page behind the hole.
    pub(super) fn end(&self) -> u64 {
        self.start.saturating_add(self.pages)
    }
}

/// For every order `k`, the longest remainder of a hole in a subtree behind the hole's first page that is a
/// multiple of `2^k` (0 where there is none); and the height of the subtree.
///
/// Call it `M(k)`. `M(0)` is the length of the longest hole. In that hole fewer than `2^k` pages precede the
/// first multiple of `2^k`, so `M(k)` is at least `M(0) - (2^k - 1)`: the *loss* `M(0) - M(k)` has `k` bits,
/// whatever the size of the holes. Losses of orders up to 8 are therefore stored in a byte each and up to 16
/// in two, which is exact, not rounded. It also makes them cheap to combine: with `M(0)` of the union known,
/// a part's losses grow by what the part's own `M(0)` is short of it, and the union's are the lowest. The
/// sums may saturate, since the lowest one fits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Summary {
    longest: u64,
    /// Losses of orders 1 to 8.
    near: [u8; 8],
    /// Losses of orders 9 to 16.
    middle: [u16; 8],
    /// Loss of order 17 in bits 0 to 23, loss of order 18 in bits 24 to 47, height in bits 48 to 63.
    far: u64,
}

const _: () = assert!(MAX_ORDER == 18, "a summary knows of so many orders");

const NEAR_MASKS: [u8; 8] = [0x01, 0x03, 0x07, 0x0f, 0x1f, 0x3f, 0x7f, 0xff];
const MIDDLE_MASKS: [u16; 8] = [0x01ff, 0x03ff, 0x07ff, 0x0fff, 0x1fff, 0x3fff, 0x7fff, 0xffff];
const FAR_BITS: u32 = 24;
const FAR_MASK: u64 = (1 << FAR_BITS) - 1;
const HEIGHT_SHIFT: u32 = 2 * FAR_BITS;

impl Summary {
    /// The summary of no holes.
    pub(super) const EMPTY: Self = Self { longest: 0, near: [0; 8], middle: [0; 8], far: 0 };

    /// The summary of one hole.
    fn leaf(start: u64, pages: u64) -> Self {
        Self::of(start, pages, &Self::EMPTY, &Self::EMPTY)
    }

    /// The summary of a hole and the two subtrees below it.
    #[inline]
    pub(super) fn of(start: u64, pages: u64, left: &Self, right: &Self) -> Self {
        let longest = pages.max(left.longest).max(right.longest);
        // The pages before the first multiple of 2^k are the low bits of the negated start. They may be more
        // than the hole has; `longest` takes that for nothing left, as it should.
        let before = start.wrapping_neg();
        let short = [longest - pages, longest - left.longest, longest - right.longest];

        let [own, l, r] = short.map(|pages| pages.min(0xff) as u8);
        let mut near = [0; 8];
        for (k, loss) in near.iter_mut().enumerate() {
            let hole = (before as u8 & NEAR_MASKS[k]).saturating_add(own);
            *loss = hole.min(left.near[k].saturating_add(l)).min(right.near[k].saturating_add(r));
        }

        let [own, l, r] = short.map(|pages| pages.min(0xffff) as u16);
        let mut middle = [0; 8];
        for (k, loss) in middle.iter_mut().enumerate() {
            let hole = (before as u16 & MIDDLE_MASKS[k]).saturating_add(own);
            *loss = hole.min(left.middle[k].saturating_add(l)).min(right.middle[k].saturating_add(r));
        }

        let [own, l, r] = short.map(|pages| pages.min(FAR_MASK));
        let far = |order: u32| {
            let hole = (before & ((1 << order) - 1)) + own;
            hole.min(left.far_loss(order) + l).min(right.far_loss(order) + r)
        };
        let height = left.height().max(right.height()) + 1;
        let far = far(17) | far(18) << FAR_BITS | u64::from(height) << HEIGHT_SHIFT;
        Self { longest, near, middle, far }
    }

    /// The longest run behind a multiple of `2^order` in the subtree. Nothing is that long behind a multiple
    /// of more than [`MAX_ORDER`] as far as a summary knows.
    #[inline]
    pub(super) fn longest(&self, order: u32) -> u64 {
        let loss = match order {
            0 => 0,
            1..=8 => u64::from(self.near[order as usize - 1]),
            9..=16 => u64::from(self.middle[order as usize - 9]),
            17 | 18 => self.far_loss(order),
            _ => self.longest,
        };
        self.longest.saturating_sub(loss)
    }

    /// The height of the subtree: 0 if empty, 1 for a leaf.
    #[inline]
    pub(super) fn height(&self) -> u32 {
        (self.far >> HEIGHT_SHIFT) as u32
    }

    /// The loss of order 17 or 18.
    #[inline]
    fn far_loss(&self, order: u32) -> u64 {
        if order == 17 { self.far & FAR_MASK } else { (self.far >> FAR_BITS) & FAR_MASK }
    }
}

/// The way from the root down to a node, root first.
pub(super) struct Path {
    nodes: [u32; MAX_DEPTH],
    len: usize,
}

impl Path {
    /// The way to nowhere.
    pub(super) fn new() -> Self {
        Self { nodes: [NIL; MAX_DEPTH], len: 0 }
    }

    /// How many nodes are on the way.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The node `depth` steps below the root; [`NIL`] if the way does not lead that far.
    pub(super) fn get(&self, depth: usize) -> u32 {
        if depth < self.len { self.nodes.get(depth).copied().unwrap_or(NIL) } else { NIL }
    }

    /// Goes one step down.
    pub(super) fn push(&mut self, index: u32) {
        if let Some(slot) = self.nodes.get_mut(self.len) {
            *slot = index;
            self.len += 1;
        }
    }

    /// Goes one step up, returning the node that was left.
    pub(super) fn pop(&mut self) -> Option<u32> {
        self.len = self.len.checked_sub(1)?;
        self.nodes.get(self.len).copied()
    }

    /// Goes back up to where `len` nodes are on the way.
    pub(super) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}
