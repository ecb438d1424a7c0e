//! The *homes* of CPUs: each CPU's refills search below its home first, so ranges of two CPUs are rarely neighbours.
//! All homes lie in one naturally aligned block at the end of the zone, at most 1/64 of it. They are as far apart as
//! one CPU's budget and 517 pages, or as the block allows: so a CPU fetches ranges next to its earlier ones.
//!
//! If blocks of two CPUs' ranges alternated, each CPU's prefetches would take cache lines of metadata and of page
//! tables from the other.
//!
//! The first allocation splits the block anyway, so homes cost no space for ranges as large as the block. A request
//! with a limit below the block has no home. Each CPU pays with a leaf of metadata for each array that it uses, and
//! with lowest page tables of its own.

/// The homes' block is at most 1/`SHARE` of the zone.
const SHARE: u64 = 64;

const LARGE: u64 = 512;

/// Added to the distance between homes: a large page and 5 pages, as for rings' colours. Without it the first ranges of
/// all CPUs would share one set of the IOTLB.
const COLOUR_PAGES: u64 = LARGE + 5;

#[derive(Debug)]
pub(super) struct Homes {
    /// The page after the zone's last one: the first home.
    end: u64,
    apart: u64,
    count: u64,
}

impl Homes {
    /// The homes of `cpus` CPUs, each of which caches at most `budget` pages, in `[first, end)`.
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
