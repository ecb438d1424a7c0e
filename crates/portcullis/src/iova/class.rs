//! The sizes that are cached, and what is known of each.

/// Size classes that are cached: 1, 2, 4, .. 512 granules (4 KiB to 2 MiB with the usual granule).
pub const CACHED_ORDERS: u32 = 10;

/// The granules of the largest of them.
const CACHED_PAGES: u64 = 1 << (CACHED_ORDERS - 1);

/// The size of a range as a power of two, its *order*.
#[derive(Debug, Clone, Copy)]
pub(super) struct Class(u32);

impl Class {
    /// The class of 2^`order` pages, up to 2^15.
    pub(super) const fn of(order: u32) -> Self {
        Self(if order < 16 { order } else { 15 })
    }

    /// The class for `index` + 1 pages, if that size is cached. Reads no table: the fast path takes as long as its loads.
    #[inline]
    pub(super) const fn of_pages(index: u64) -> Option<Self> {
        if index < CACHED_PAGES { Some(Self((2 * index + 1).ilog2())) } else { None }
    }

    /// The binary logarithm of the pages.
    #[inline]
    pub(super) const fn order(self) -> u32 {
        self.0
    }

    /// The array of range metadata where the word of a range of this size is.
    pub(super) const fn array(self) -> usize {
        match self.0 {
            ..3 => 0,
            3..6 => 1,
            6.. => 2,
        }
    }
}

/// The order of the smallest power of two that is no less than `pages`, which is not 0. Past 2^63 none is
/// left; no space holds so many, whatever the alignment.
pub(super) const fn order_of(pages: u64) -> u32 {
    match pages.checked_next_power_of_two() {
        Some(power) => power.trailing_zeros(),
        None => u64::BITS - 1,
    }
}

/// What is asked for: *n* pages, 2^`order` rounded up, all below `end_page`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub pages: u64,
    pub order: u32,
    pub end_page: u64,
}

impl Request {
    /// Pages that are handed out for it: a power of two where that is cached.
    pub(super) fn pages_rounded(self) -> u64 {
        if self.order < CACHED_ORDERS { 1 << self.order } else { self.pages }
    }
}
