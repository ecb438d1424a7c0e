//! The *homes* of CPUs: each CPU searches for fresh ranges below its home first. All homes lie in one naturally aligned
//! block at the end of the zone, of a 64th of it at most, and as far apart as the block has room. So ranges of two CPUs
//! are mostly not neighbours.
//!
//! If blocks of two CPUs' ranges alternate, each CPU's prefetches take cache lines from the other: of the ranges'
//! metadata, and of page tables. Homes lie apart by as much as one CPU caches, if there is room; so a CPU fetches
//! ranges next to those that it fetched before.
//!
//! The first range in use breaks the homes' block up in any case. So for ranges as large as the block there is as much
//! room as without homes. A request with a limit below the block has no home.
//!
//! Each CPU pays with a leaf of metadata for each array that it uses, and with lowest page tables of its own.

/// The homes' block is at most one part in this many of the zone.
const SHARE: u64 = 64;

/// The pages of a large page. Homes lie apart by a multiple of it plus [`COLOUR_PAGES`].
const LARGE: u64 = 512;

/// Added to the distance between homes: a large page and 5 pages, as for rings' colours. Without it the first ranges of
/// all CPUs would share one set of the IOTLB.
const COLOUR_PAGES: u64 = LARGE + 5;

#[derive(Debug)]
pub(super) struct Homes {
    /// The page behind the zone's last one: the first home.
    end: u64,
    /// Pages from each home down to the next.
    apart: u64,
    /// The number of homes, at least 1.
    count: u64,
}

impl Homes {
    /// Makes the homes of `cpus` CPUs, each of which caches at most `budget` pages, in the pages from `first` to below
    /// `end`.
    pub(super) fn new((first, end): (u64, u64), cpus: usize, budget: u64) -> Self {
        let block = 1 << (end.saturating_sub(first) / SHARE).max(1).ilog2();
        let room = end - (end.saturating_sub(1) & !(block - 1));
        let each = (room / cpus.max(1) as u64).saturating_sub(COLOUR_PAGES).min(budget);
        let apart = each / LARGE * LARGE + COLOUR_PAGES;
        Self { end, apart, count: (room / apart).max(1) }
    }

    /// Returns the home of CPU `cpu`, if it lies below `end` and is not the end of the zone. With more CPUs than homes,
    /// some share one.
    pub(super) fn below(&self, cpu: u64, end: u64) -> Option<u64> {
        let home = self.end - cpu % self.count * self.apart;
        (home < end.min(self.end)).then_some(home)
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/iova/homes.rs"]
mod tests;
