//! What the space notes about each range, in one word kept beside its first page.
//!
//! ```text
//!            63    62    61..50   49..0
//!  handed out 1     0    owner    pages
//!            63    62    61..56   55    54..0
//!  in a list  0     1    order     0    link to the next range in the list, or 0
//!
//!             54        53..0
//!  link     coarse   page + 1
//! ```
//!
//! A link says beside which page to look for the word, and in which array. 0 means neither: the range is not the space's, or back in the backing structure.

/// The owner of a range that no CPU's cache is to take back.
pub(super) const NO_OWNER: u64 = 0xfff;
/// The same for a range of a size that is usually rounded up, and was not.
pub(super) const EXACT: u64 = 0xffe;
/// The most pages that a note has room for, and the first page that it has none for.
pub(super) const MOST_PAGES: u64 = 1 << OWNER_SHIFT;
pub(super) const END_PAGE: u64 = 1 << 53;

const HANDED_OUT: u64 = 1 << 63;
const LISTED: u64 = 1 << 62;
const OWNER_SHIFT: u32 = 50;
const ORDER_SHIFT: u32 = 56;
const PAGES: u64 = (1 << OWNER_SHIFT) - 1;
const LINK: u64 = (1 << 55) - 1;
const COARSE: u64 = 1 << 54;

/// Ranges of this order and above begin at a multiple of 64 pages: one word for 64 pages is enough for them.
pub(super) const COARSE_ORDER: u32 = 6;

/// The word of a range of `pages` pages that `owner` has handed out: what the fast path compares with.
#[inline]
pub(super) const fn handed_out(owner: u64, pages: u64) -> u64 {
    HANDED_OUT | (owner << OWNER_SHIFT) | pages
}

/// What is known about a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    /// Nothing: it is not handed out.
    None,
    /// Somebody asked for `pages` pages and has them; CPU `owner` wants them back.
    HandedOut { owner: u64, pages: u64 },
    /// It waits in a list; its size is 2^`order` pages.
    Listed { order: u32, next: Link },
}

/// The range that a list goes on with, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link(u64);

impl Link {
    pub(super) const END: Self = Self(0);

    /// The range at `page`, which is below 2^53, of 2^`order` pages.
    pub(super) const fn to(page: u64, order: u32) -> Self {
        Self((page + 1) | if order >= COARSE_ORDER { COARSE } else { 0 })
    }

    pub(super) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(super) const fn bits(self) -> u64 {
        self.0
    }

    /// The page, and whether its word is in the coarse array; `None` at the end.
    pub(super) const fn target(self) -> Option<(u64, bool)> {
        match (self.0 & !COARSE).checked_sub(1) {
            Some(page) => Some((page, self.0 & COARSE != 0)),
            None => None,
        }
    }
}

impl Note {
    /// The word that says so. `pages` is below 2^50.
    #[inline]
    pub(super) const fn encode(self) -> u64 {
        match self {
            Self::None => 0,
            Self::HandedOut { owner, pages } => handed_out(owner, pages),
            Self::Listed { order, next } => LISTED | ((order as u64) << ORDER_SHIFT) | next.0,
        }
    }

    /// The link in `word`, if that is a listed range's.
    #[inline]
    pub(super) const fn next(word: u64) -> Option<Link> {
        if word & LISTED != 0 { Some(Link(word & LINK)) } else { None }
    }

    /// What `word` says.
    #[inline]
    pub(super) const fn decode(word: u64) -> Self {
        if word & HANDED_OUT != 0 {
            Self::HandedOut { owner: (word >> OWNER_SHIFT) & NO_OWNER, pages: word & PAGES }
        } else if word & LISTED != 0 {
            Self::Listed { order: ((word >> ORDER_SHIFT) & 0x3f) as u32, next: Link(word & LINK) }
        } else {
            Self::None
        }
    }
}
