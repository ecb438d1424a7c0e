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

/// The owner of a range that goes back to the bitmap, not to a CPU's lists.
pub(super) const NO_OWNER: u64 = 0xfff;
/// As [`NO_OWNER`], for a range that has its exact size although the size is one that is usually rounded up.
pub(super) const EXACT: u64 = 0xffe;
/// The smallest number of pages for which a word has no room, and the page at which spaces end at the latest.
pub(super) const MOST_PAGES: u64 = 1 << OWNER_SHIFT;
pub(super) const END_PAGE: u64 = 1 << 52;

pub(super) const NO_WORD: u64 = 0;

const HANDED_OUT: u64 = 1 << 63;
pub(super) const DIVIDED: u64 = 1 << 62;
const OWNER_SHIFT: u32 = 50;
const PAGES: u64 = (1 << OWNER_SHIFT) - 1;
const ORDER_SHIFT: u32 = 53;
const PAGE: u64 = (1 << ORDER_SHIFT) - 1;

/// Returns the word of a range of `pages` pages, fewer than 2^50, that `owner` has handed out.
#[inline]
pub(super) const fn handed_out(owner: u64, pages: u64) -> u64 {
    HANDED_OUT | (owner << OWNER_SHIFT) | pages
}

/// Returns the owner of the range whose word is `word`; any number if the range is not handed out.
#[inline]
pub(super) const fn owner(word: u64) -> u64 {
    (word >> OWNER_SHIFT) & NO_OWNER
}

/// Returns the owner of the range and the pages for which it was handed out; `None` if it is not handed out.
pub(super) const fn owner_and_pages(word: u64) -> Option<(u64, u64)> {
    if word & HANDED_OUT != 0 { Some((owner(word), word & PAGES)) } else { None }
}

/// A link in a list: to the first range, or to the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link(u64);

impl Link {
    pub(super) const END: Self = Self(0);

    /// Makes the link to the range of 2^`order` pages at `page`, which is below 2^52. `order` is below 16.
    #[inline]
    pub(super) const fn to(page: u64, order: u32) -> Self {
        Self((page + 1) | ((order as u64) << ORDER_SHIFT))
    }

    #[inline]
    pub(super) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the word of the preceding range in the list.
    #[inline]
    pub(super) const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the page; `None` at the list's end.
    #[inline]
    pub(super) const fn page(self) -> Option<u64> {
        (self.0 & PAGE).checked_sub(1)
    }

    /// Returns the page, if this is a link to a range of `order`.
    #[inline]
    pub(super) const fn page_of(self, order: u32) -> Option<u64> {
        let page = self.0.wrapping_sub(Self::to(0, order).0);
        if page < PAGE { Some(page) } else { None }
    }

    pub(super) const fn order(self) -> u32 {
        (self.0 >> ORDER_SHIFT) as u32 & 0xf
    }

    /// Returns whether these bits are a link, and not the word of a range that is handed out.
    #[inline]
    pub(super) const fn is_link(self) -> bool {
        self.0 & HANDED_OUT == 0
    }
}
