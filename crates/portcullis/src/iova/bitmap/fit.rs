//! What fits inside a leaf, for every order at once.

use super::leaf::LEAF_PAGES;

/// The highest order whose aligned blocks lie inside a leaf.
pub(super) const LEAF_ORDER: u32 = LEAF_PAGES.ilog2();

/// For orders 0 to 7, the low bits of a page's number that the alignment wants to be 0.
const MASKS: [u16; 8] = [0, 1, 3, 7, 15, 31, 63, 127];
/// The same for orders 8 and 9; the rest is no order.
const MORE_MASKS: [u16; 4] = [255, 511, 0, 0];
/// What a run that does not end the leaf loses as a suffix: everything.
const SUFFIX_MASKS: [u16; 4] = [0, 0, !0, !0];

/// For every order up to [`LEAF_ORDER`], the longest run that begins at a multiple of `2^order` and ends in
/// the same leaf: of one leaf, or the longest among all leaves below a node. For one leaf also its suffix.
///
/// Everything is done to all lanes alike and without branches, in vector registers: hence the masks, and two
/// arrays that are as long as such registers.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Fit {
    /// Orders 0 to 7.
    lanes: [u16; 8],
    /// Order 8, order 9, which is the prefix, and twice the suffix.
    more: [u16; 4],
}

impl Fit {
    /// Nothing is free.
    pub(super) const NONE: Self = Self { lanes: [0; 8], more: [0; 4] };
    /// Everything is free.
    pub(super) const ALL: Self = Self { lanes: [LEAF_PAGES as u16; 8], more: [LEAF_PAGES as u16; 4] };

    /// What a leaf with the free run `[start, end)` and no other has room for. The run may be empty.
    #[inline]
    pub(super) fn of_run(start: u32, end: u32) -> Self {
        let (before, len) = ((start as u16).wrapping_neg(), end.saturating_sub(start) as u16);
        let lost = if end == LEAF_PAGES { 0 } else { !0 };
        let mut fit = Self { lanes: [len; 8], more: [len; 4] };
        for (lane, mask) in fit.lanes.iter_mut().zip(MASKS) {
            *lane = lane.saturating_sub(before & mask);
        }
        for ((lane, mask), suffix) in fit.more.iter_mut().zip(MORE_MASKS).zip(SUFFIX_MASKS) {
            *lane = lane.saturating_sub(before & mask | lost & suffix);
        }
        fit
    }

    /// The better of both, order by order.
    #[inline]
    pub(super) fn max(mut self, other: Self) -> Self {
        for (lane, other) in self.lanes.iter_mut().zip(other.lanes) {
            *lane = (*lane).max(other);
        }
        for (lane, other) in self.more.iter_mut().zip(other.more) {
            *lane = (*lane).max(other);
        }
        self
    }

    /// Whether both are the same in every lane.
    #[inline]
    pub(super) fn is(&self, other: &Self) -> bool {
        let (mut differ, mut more) = (0, 0);
        for (lane, other) in self.lanes.iter().zip(other.lanes) {
            differ |= lane ^ other;
        }
        for (lane, other) in self.more.iter().zip(other.more) {
            more |= lane ^ other;
        }
        differ | more == 0
    }

    /// Whether replacing a part that was worth `before` by one that is worth `after` may make the whole,
    /// which is worth `self`, worth less: the part was among the best for some order and is so no longer.
    #[inline]
    pub(super) fn depends_on(&self, before: &Self, after: &Self) -> bool {
        let (mut lost, mut more) = (0, 0);
        for ((lane, before), after) in self.lanes.iter().zip(before.lanes).zip(after.lanes) {
            lost |= if before == *lane { before.saturating_sub(after) } else { 0 };
        }
        for ((lane, before), after) in self.more.iter().zip(before.more).zip(after.more) {
            more |= if before == *lane { before.saturating_sub(after) } else { 0 };
        }
        lost | more != 0
    }

    /// The longest run for `order`, which is at most [`LEAF_ORDER`].
    #[inline]
    pub(super) fn longest(&self, order: u32) -> u64 {
        let order = order as usize;
        u64::from(if order < 8 { self.lanes[order] } else { self.more[(order - 8) % 4] })
    }

    /// Whether nothing at all is free.
    #[inline]
    pub(super) fn is_none(&self) -> bool {
        self.lanes[0] == 0
    }

    /// Of one leaf: the free pages that it begins with.
    #[inline]
    pub(super) fn prefix(&self) -> u64 {
        u64::from(self.more[1])
    }

    /// Of one leaf: the free pages that it ends with.
    #[inline]
    pub(super) fn suffix(&self) -> u64 {
        u64::from(self.more[2])
    }

    /// Of one leaf: the free pages at either end.
    #[inline]
    pub(super) fn ends(&self) -> (u64, u64) {
        (self.prefix(), self.suffix())
    }

    /// Of one leaf: whether all of it is free.
    #[inline]
    pub(super) fn is_whole(&self) -> bool {
        self.more[1] == LEAF_PAGES as u16
    }
}
