//! The sizes that are cached, and what is known of each.

/// Size classes that are cached: 1, 2, 4, .. 512 granules (4 KiB to 2 MiB with the usual granule).
pub const CACHED_ORDERS: u32 = 10;

/// The granules of the largest of them.
const CACHED_PAGES: usize = 1 << (CACHED_ORDERS - 1);

/// The size of a range as a power of two, its *order*, and the array of notes where its word is.
///
/// Small, because it is looked up in a table: not every processor that the library is built for finds a
/// logarithm as fast as it reads a byte.
#[derive(Debug, Clone, Copy)]
pub(super) struct Class {
    order: u8,
    array: Array,
}

/// The arrays of notes.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
enum Array {
    Pages,
    Eights,
    SixtyFours,
}

static CLASSES: [Class; CACHED_PAGES] = {
    let mut classes = [Class::of(0); CACHED_PAGES];
    let mut index = 0;
    while index < CACHED_PAGES {
        classes[index] = Class::of(order_of(index as u64 + 1));
        index += 1;
    }
    classes
};

impl Class {
    /// The class of 2^`order` pages, up to 2^15.
    pub(super) const fn of(order: u32) -> Self {
        let array = if order < 3 {
            Array::Pages
        } else if order < 6 {
            Array::Eights
        } else {
            Array::SixtyFours
        };
        Self { order: if order < 16 { order as u8 } else { 15 }, array }
    }

    /// The class for `index` + 1 pages, if that size is cached.
    #[inline]
    pub(super) fn of_pages(index: u64) -> Option<Self> {
        CLASSES.get(usize::try_from(index).ok()?).copied()
    }

    /// The binary logarithm of the pages.
    #[inline]
    pub(super) const fn order(self) -> u32 {
        self.order as u32
    }

    /// The array of notes.
    #[inline]
    pub(super) const fn array(self) -> usize {
        self.array as usize
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
