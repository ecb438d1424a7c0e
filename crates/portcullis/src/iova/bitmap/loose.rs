//! The longest runs inside a leaf, for every order at once: what requests need that have no natural alignment.

use super::leaf::LEAF_PAGES;

/// For orders 0 to 7, the low bits of a page's number that the alignment wants to be 0.
const MASKS: [u16; 8] = [0, 1, 3, 7, 15, 31, 63, 127];
/// The same for orders 8 and 9; the rest is no order.
const MORE_MASKS: [u16; 4] = [255, 511, 0, 0];

/// For every order up to 9, the longest run that begins at a multiple of `2^order` and ends in the same leaf:
/// of one leaf, or the longest among all leaves below a node.
///
/// Everything is done to all lanes alike and without branches, in vector registers: hence the masks, and two
/// arrays that are as long as such registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Loose {
    /// Orders 0 to 7.
    lanes: [u16; 8],
    /// Order 8 and order 9.
    more: [u16; 4],
}

impl Loose {
    /// Nothing is free.
    pub(super) const NONE: Self = Self { lanes: [0; 8], more: [0; 4] };
    /// Everything is free.
    pub(super) const ALL: Self = Self { lanes: [LEAF_PAGES as u16; 8], more: [LEAF_PAGES as u16; 4] };

    /// What a leaf with the free run `[start, end)` and no other has room for. The run may be empty.
    #[inline]
    pub(super) fn of_run(start: u32, end: u32) -> Self {
        let (before, len) = ((start as u16).wrapping_neg(), end.saturating_sub(start) as u16);
        let mut loose = Self { lanes: [len; 8], more: [len; 4] };
        for (lane, mask) in loose.lanes.iter_mut().zip(MASKS) {
            *lane = lane.saturating_sub(before & mask);
        }
        for (lane, mask) in loose.more.iter_mut().zip(MORE_MASKS) {
            *lane = lane.saturating_sub(before & mask);
        }
        loose
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

    /// The longest run for `order`, which is at most 9.
    #[inline]
    pub(super) fn longest(&self, order: u32) -> u64 {
        let order = order as usize;
        u64::from(if order < 8 { self.lanes[order] } else { self.more[order - 8] })
    }
}
