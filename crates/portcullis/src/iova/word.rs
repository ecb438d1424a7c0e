//! What the space records about each range, in one word kept beside its first page.
//!
//! ```text
//!            63    62    61..50   49..0
//!  handed out 1     0    owner    pages
//!            63..57    56..53    52..0
//!  in a list  0        order     page + 1   of the next range in the list, or all 0
//! ```
//!
//! 0 is also the word of a range that is not the space's, or back in the bitmap.

/// The owner of a range that no CPU's cache is to take back.
pub(super) const NO_OWNER: u64 = 0xfff;
/// The same for a range of a size that is usually rounded up, and was not.
pub(super) const EXACT: u64 = 0xffe;
/// The most pages that a word has room for, and the first page that it has none for.
pub(super) const MOST_PAGES: u64 = 1 << OWNER_SHIFT;
pub(super) const END_PAGE: u64 = 1 << 52;

/// The word of a range that no CPU has: of none, or of one that is back in the bitmap.
pub(super) const NO_WORD: u64 = 0;

const HANDED_OUT: u64 = 1 << 63;
const OWNER_SHIFT: u32 = 50;
const PAGES: u64 = (1 << OWNER_SHIFT) - 1;
const ORDER_SHIFT: u32 = 53;
const PAGE: u64 = (1 << ORDER_SHIFT) - 1;

/// The word of a range of `pages` pages, fewer than 2^50, that `owner` has handed out.
#[inline]
pub(super) const fn handed_out(owner: u64, pages: u64) -> u64 {
    HANDED_OUT | (owner << OWNER_SHIFT) | pages
}

/// The CPU that has handed out the range whose word is `word`; any number if the range is not handed out.
#[inline]
pub(super) const fn owner(word: u64) -> u64 {
    (word >> OWNER_SHIFT) & NO_OWNER
}

/// Who has handed out the range whose word is `word`, and for how many pages, if it is handed out.
pub(super) const fn owner_and_pages(word: u64) -> Option<(u64, u64)> {
    if word & HANDED_OUT != 0 { Some((owner(word), word & PAGES)) } else { None }
}

/// A range in a list: the next one there, or the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link(u64);

impl Link {
    pub(super) const END: Self = Self(0);

    /// The range at `page`, which is below 2^52, of 2^`order` pages, below 2^16.
    #[inline]
    pub(super) const fn to(page: u64, order: u32) -> Self {
        Self((page + 1) | ((order as u64) << ORDER_SHIFT))
    }

    /// The link in the word of a range that is in a list.
    #[inline]
    pub(super) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The word of a range that this follows in a list.
    #[inline]
    pub(super) const fn bits(self) -> u64 {
        self.0
    }

    /// The page; `None` at the end.
    #[inline]
    pub(super) const fn page(self) -> Option<u64> {
        (self.0 & PAGE).checked_sub(1)
    }

    /// The page, if this is a link to a range of `order`.
    #[inline]
    pub(super) const fn page_of(self, order: u32) -> Option<u64> {
        let page = self.0.wrapping_sub(Self::to(0, order).0);
        if page < PAGE { Some(page) } else { None }
    }

    /// The order.
    pub(super) const fn order(self) -> u32 {
        (self.0 >> ORDER_SHIFT) as u32 & 0xf
    }

    /// Whether these bits are a link: a word that says "handed out" is none.
    #[inline]
    pub(super) const fn is_link(self) -> bool {
        self.0 & HANDED_OUT == 0
    }
}
