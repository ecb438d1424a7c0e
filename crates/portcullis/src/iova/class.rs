//! Size classes: powers of two. A range in a CPU's list has the size of its class, and is aligned to it.

/// The number of cached size classes: 1, 2, 4, .. 512 granules (4 KiB to 2 MiB with granules of 4 KiB).
pub const CACHED_ORDERS: u32 = 10;

const CACHED_PAGES: u64 = 1 << (CACHED_ORDERS - 1);

/// The size of a range as a power of two, its *order*.
#[derive(Debug, Clone, Copy)]
pub(super) struct Class(u32);

impl Class {
    /// Returns the class of 2^`order` pages. Orders above 15 share class 15: no list caches them, and their words are
    /// in the same array.
    pub(super) const fn of(order: u32) -> Self {
        Self(if order < 16 { order } else { 15 })
    }

    /// Returns the class of `index` + 1 pages, if that size is cached. Reads no table, as loads limit the fast path.
    #[inline]
    pub(super) const fn of_pages(index: u64) -> Option<Self> {
        if index < CACHED_PAGES { Some(Self((2 * index + 1).ilog2())) } else { None }
    }

    #[inline]
    pub(super) const fn order(self) -> u32 {
        self.0
    }

    pub(super) const fn array(self) -> usize {
        match self.0 {
            ..3 => 0,
            3..6 => 1,
            6.. => 2,
        }
    }
}

/// Returns the order of `pages`, not 0, rounded up to a power of two; 63 for more than 2^63 pages, which no space has.
pub(super) const fn order_of(pages: u64) -> u32 {
    match pages.checked_next_power_of_two() {
        Some(power) => power.trailing_zeros(),
        None => u64::BITS - 1,
    }
}

/// A request for `pages` pages below `end_page`; rounded up to a power of two, they are 2^`order`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub pages: u64,
    pub order: u32,
    pub end_page: u64,
}

impl Request {
    /// Returns how many pages to allocate: rounded up to a power of two if a list caches that size, else exactly
    /// `pages`.
    pub(super) fn pages_rounded(self) -> u64 {
        if self.order < CACHED_ORDERS { 1 << self.order } else { self.pages }
    }
}
