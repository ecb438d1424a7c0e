//! What can go wrong.

/// Why the free space could not be changed. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BitmapError {
    /// No hole can take the request.
    #[error(
        "no hole takes {pages} pages aligned to order {align_order} up to page {max_page:#x}: \
         {free} pages are free, {largest} in the largest hole"
    )]
    NoFit {
        /// How many pages were asked for.
        pages: u64,
        /// The alignment that was asked for: a multiple of `1 << align_order`.
        align_order: u32,
        /// The highest page that was acceptable.
        max_page: u64,
        /// How many pages are free, below and above `max_page`.
        free: u64,
        /// How many pages the largest hole has, below or above `max_page`.
        largest: u64,
    },
    /// A range of no pages.
    #[error("a range of 0 pages: a range holds at least one page")]
    Empty,
    /// The range goes past the last page that a bitmap can hold, `2^54 - 1`.
    #[error("{pages:#x} pages at page {first:#x} run past the last page")]
    Wraps {
        /// The first page.
        first: u64,
        /// The number of pages.
        pages: u64,
    },
    /// The range to give back is not allocated, at least in part: a page of it is free already.
    #[error(
        "{pages} pages at page {first:#x} are not allocated: {hole_pages} pages at {hole_start:#x} are free"
    )]
    NotAllocated {
        /// The first page.
        first: u64,
        /// The number of pages.
        pages: u64,
        /// The first page of the lowest hole that the range overlaps.
        hole_start: u64,
        /// The number of pages of that hole.
        hole_pages: u64,
    },
    /// The range to add is free already, at least in part.
    #[error(
        "{pages} pages at page {first:#x} are not new: {hole_pages} pages at {hole_start:#x} are free already"
    )]
    AlreadyFree {
        /// The first page.
        first: u64,
        /// The number of pages.
        pages: u64,
        /// The first page of the lowest hole that the range overlaps.
        hole_start: u64,
        /// The number of pages of that hole.
        hole_pages: u64,
    },
    /// The alignment is not supported.
    #[error("alignment to order {align_order} is not supported: the highest order is {max}")]
    Alignment {
        /// The order that was asked for.
        align_order: u32,
        /// The highest one supported.
        max: u32,
    },
    /// There is no memory for as many nodes as the change may come to need.
    #[error("no memory for {nodes} nodes of {node_bytes} bytes")]
    OutOfMemory {
        /// How many nodes there would have to be, those that exist included.
        nodes: usize,
        /// The size of each.
        node_bytes: usize,
    },
}
