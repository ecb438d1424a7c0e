//! The word of metadata of a range: whether it is handed out, by which CPU, and for how many pages; or its link in a
//! free list.
//!
//! ```text
//!            63    62    61..50   49..0
//!  handed out 1  divided owner    pages
//!            63..57    56..53    52..0
//!  in a list  0        order     page + 1   of the next range in the list, or all 0
//! ```
//!
//! 0 also stands for a range that never was handed out, or is in the bitmap. A *divided* range stays its caller's while
//! parts of it are mapped and unmapped.

/// The owner field of a range that no CPU owns: its free returns it to the bitmap.
pub(super) const NO_OWNER: u64 = 0xfff;
/// As [`NO_OWNER`], for a range whose size was not rounded up, as the space was exhausted.
pub(super) const EXACT: u64 = 0xffe;
/// The page count no longer fits a word from this on.
pub(super) const PAGES_END: u64 = 1 << OWNER_SHIFT;
/// No space reaches this page.
pub(super) const END_PAGE: u64 = 1 << 52;

pub(super) const NO_WORD: u64 = 0;

const HANDED_OUT: u64 = 1 << 63;
pub(super) const DIVIDED: u64 = 1 << 62;
const OWNER_SHIFT: u32 = 50;
const PAGES: u64 = (1 << OWNER_SHIFT) - 1;
const ORDER_SHIFT: u32 = 53;
const PAGE: u64 = (1 << ORDER_SHIFT) - 1;

/// The word of a range of `pages` pages, fewer than 2^50, that `owner` has handed out.
#[inline]
pub(super) const fn handed_out(owner: u64, pages: u64) -> u64 {
    HANDED_OUT | (owner << OWNER_SHIFT) | pages
}

/// The owner of the range whose word is `word`; any number if the range is not handed out.
#[inline]
pub(super) const fn owner(word: u64) -> u64 {
    (word >> OWNER_SHIFT) & NO_OWNER
}

/// The owner of the range and the pages for which it was handed out; `None` if it is not handed out.
pub(super) const fn owner_and_pages(word: u64) -> Option<(u64, u64)> {
    if word & HANDED_OUT != 0 { Some((owner(word), word & PAGES)) } else { None }
}

/// A link in a list: to the first range, or to the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link(u64);

impl Link {
    pub(super) const END: Self = Self(0);

    /// The link to the range of 2^`order` pages at `page`, which is below 2^52. `order` is below 16.
    #[inline]
    pub(super) const fn to(page: u64, order: u32) -> Self {
        Self((page + 1) | ((order as u64) << ORDER_SHIFT))
    }

    #[inline]
    pub(super) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    #[inline]
    pub(super) const fn bits(self) -> u64 {
        self.0
    }

    #[inline]
    pub(super) const fn page(self) -> Option<u64> {
        (self.0 & PAGE).checked_sub(1)
    }

    #[inline]
    pub(super) const fn page_of(self, order: u32) -> Option<u64> {
        let page = self.0.wrapping_sub(Self::to(0, order).0);
        if page < PAGE { Some(page) } else { None }
    }

    pub(super) const fn order(self) -> u32 {
        (self.0 >> ORDER_SHIFT) as u32 & 0xf
    }

    #[inline]
    pub(super) const fn is_link(self) -> bool {
        self.0 & HANDED_OUT == 0
    }
}
