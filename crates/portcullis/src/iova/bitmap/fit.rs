//! What fits inside a leaf with natural alignment, for every order at once, exactly.

/// The highest order whose aligned blocks lie inside a leaf.
pub(super) const LEAF_ORDER: u32 = 9;
pub(super) const LEAF_PAGES: u32 = 1 << LEAF_ORDER;

/// For every order `k` up to [`LEAF_ORDER`], the longest free run that starts an aligned block of `2^k` pages and stays
/// in it: in one leaf, or in all leaves below a node. A request with natural alignment fits if it is no longer.
///
/// The maximum of two is taken lane by lane, in one vector register. A count above 255 continues in the next lane,
/// which counts on where the full one saturates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(16))]
pub(super) struct Fit([u8; 16]);

/// Where a [`Fit`] shows whether a request fits: the lane, and the least count there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Need {
    lane: usize,
    least: u8,
}

impl Need {
    /// The need of a request for `pages` pages at `order`, which has natural alignment: an order of at most
    /// [`LEAF_ORDER`], and 1 to `2^order` pages.
    #[inline]
    pub(super) fn of(pages: u64, order: u32) -> Self {
        // The first lane has the sum of the counts of orders 0 and 1. A block of order 1 that begins with n > 0 free
        // pages has a place of order 0, too, so then the sum is n + 1.
        let pages = pages as u32;
        let (lane, least) = match order {
            9 if pages > 510 => (11, pages - 510),
            9 if pages > 255 => (10, pages - 255),
            9 => (9, pages),
            8 if pages > 255 => (8, pages - 255),
            8 => (7, pages),
            _ => (order.saturating_sub(1), pages + u32::from(order == 1)),
        };
        Self { lane: lane as usize % 16, least: least as u8 }
    }
}

/// A [`Fit`] in general registers. A processor stalls if it loads as a vector what it has just stored from such
/// registers, so both forms exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FitBits(u128);

impl FitBits {
    /// Makes it from the counts of all orders. `low` has six bytes: the sum of those of orders 0 and 1, and those of
    /// orders 2 to 6.
    #[inline]
    pub(super) fn new(low: u64, seven: u32, eight: u32, nine: u32) -> Self {
        let eight = u64::from(eight.min(255)) | u64::from(eight.saturating_sub(255)) << 8;
        let nine = u64::from(nine.min(255))
            | u64::from(nine.saturating_sub(255).min(255)) << 8
            | u64::from(nine.saturating_sub(510)) << 16;
        Self(u128::from(low | u64::from(seven) << 48) | u128::from(eight | nine << 16) << 56)
    }

    #[inline]
    pub(super) fn is_whole(self) -> bool {
        self.0 == Fit::ALL.bits().0
    }
}

impl From<FitBits> for Fit {
    #[inline]
    fn from(bits: FitBits) -> Self {
        Self(bits.0.to_le_bytes())
    }
}

impl Fit {
    #[inline]
    pub(super) const fn bits(&self) -> FitBits {
        FitBits(u128::from_le_bytes(self.0))
    }

    pub(super) const NONE: Self = Self([0; 16]);
    pub(super) const ALL: Self = Self([3, 4, 8, 16, 32, 64, 128, 255, 1, 255, 255, 2, 0, 0, 0, 0]);

    #[inline]
    pub(super) fn max(mut self, other: &Self) -> Self {
        for (lane, other) in self.0.iter_mut().zip(other.0) {
            *lane = (*lane).max(other);
        }
        self
    }

    #[inline]
    pub(super) fn has(&self, need: Need) -> bool {
        self.0[need.lane] >= need.least
    }

    #[inline]
    pub(super) fn is_none(&self) -> bool {
        self.0[0] == 0
    }

    /// Whether all of the leaf is free, if this is the fit of one leaf.
    #[inline]
    pub(super) fn is_whole(&self) -> bool {
        self.0[11] == 2
    }
}
