//! Whether a subject keeps what it promises: no overlap, alignment, limits.
//!
//! Before a subject is timed, a small copy of the workload runs with every call watched ([`Watched`]). After
//! it was timed, the ranges that are live then are checked ([`check_live`]): at full size, and in the state
//! that all that was measured has led to.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::allocator::{Allocator, Make, Pages};
use super::workload::Space;
use crate::runner::Failure;

/// An allocator with every call watched. One type for all subjects, so that the workloads are not compiled
/// twice for each.
pub(crate) struct Watched {
    inner: Box<dyn ByPage>,
    space: Space,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// Pages of each live range, by first page.
    live: BTreeMap<u64, u64>,
    fault: Option<String>,
}

/// An allocator whose ranges are known by their first page.
trait ByPage: Send + Sync {
    fn alloc(&self, pages: u64) -> Option<Pages>;
    fn free(&self, first: u64) -> bool;
    fn aligned(&self) -> bool;
}

struct Keeper<A: Allocator> {
    allocator: A,
    /// What the allocator wants back, by first page.
    ranges: Mutex<BTreeMap<u64, A::Range>>,
}

impl<A: Allocator> ByPage for Keeper<A> {
    fn alloc(&self, pages: u64) -> Option<Pages> {
        let range = self.allocator.alloc(pages)?;
        let pages = self.allocator.pages(range);
        lock(&self.ranges).insert(pages.first, range);
        Some(pages)
    }

    fn free(&self, first: u64) -> bool {
        let range = lock(&self.ranges).remove(&first);
        range.is_some_and(|range| self.allocator.free(range))
    }

    fn aligned(&self) -> bool {
        self.allocator.aligned()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watched {
    fn new<A: Allocator>(allocator: A, space: Space) -> Self {
        let inner = Box::new(Keeper { allocator, ranges: Mutex::default() });
        Self { inner, space, seen: Mutex::default() }
    }

    /// Makes watched allocators instead of bare ones.
    pub(crate) fn make<A: Allocator>(make: &Make<A>) -> Make<Self> {
        let make = Arc::clone(make);
        Arc::new(move |space| Ok(Self::new(make(space)?, *space)))
    }
}

impl Allocator for Watched {
    type Range = Pages;

    fn aligned(&self) -> bool {
        self.inner.aligned()
    }

    fn alloc(&self, pages: u64) -> Option<Pages> {
        let got = self.inner.alloc(pages)?;
        let seen = &mut *lock(&self.seen);
        let fault = if got.pages < pages {
            Some(format!("{pages} pages were asked for, {} handed out", got.pages))
        } else {
            let before = seen.live.range(..got.first.saturating_add(got.pages)).next_back();
            overlap(before.map(|(first, pages)| Pages { first: *first, pages: *pages }), got)
                .or_else(|| misplaced(got, self.aligned(), &self.space))
        };
        if fault.is_some() {
            seen.fault = fault;
            return None;
        }
        seen.live.insert(got.first, got.pages);
        Some(got)
    }

    fn free(&self, range: Pages) -> bool {
        // Forgotten first: as soon as it is free, another thread may be given it.
        lock(&self.seen).live.remove(&range.first);
        self.inner.free(range.first)
    }

    fn pages(&self, range: Pages) -> Pages {
        range
    }

    fn fault(&self) -> Option<String> {
        lock(&self.seen).fault.clone()
    }
}

/// Checks ranges that are all live at once. O(n log n).
pub(crate) fn check_live(mut live: Vec<Pages>, aligned: bool, space: &Space) -> Result<(), Failure> {
    live.sort_unstable();
    let mut before = None;
    for range in live {
        if let Some(fault) = overlap(before, range).or_else(|| misplaced(range, aligned, space)) {
            return Err(Failure::Broken(fault));
        }
        before = Some(range);
    }
    Ok(())
}

/// What is wrong with `range` if `before` is the live range that begins last at or below its end.
fn overlap(before: Option<Pages>, range: Pages) -> Option<String> {
    let before = before.filter(|before| before.first.saturating_add(before.pages) > range.first)?;
    Some(format!(
        "{} pages at {:#x} were handed out while {} pages at {:#x} were live",
        range.pages, range.first, before.pages, before.first
    ))
}

fn misplaced(range: Pages, aligned: bool, space: &Space) -> Option<String> {
    let Pages { first, pages } = range;
    if first.checked_add(pages).is_none_or(|end| end > space.pages) {
        return Some(format!(
            "{pages} pages at {first:#x} reach beyond the space of {:#x} pages",
            space.pages
        ));
    }
    let misaligned = aligned && first & (pages.next_power_of_two() - 1) != 0;
    misaligned.then(|| format!("{pages} pages at {first:#x} are not aligned to their size"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: Space = Space { pages: 100, live: 10 };

    fn fault(ranges: &[(u64, u64)], aligned: bool) -> Option<String> {
        let live = ranges.iter().map(|&(first, pages)| Pages { first, pages }).collect();
        check_live(live, aligned, &SPACE).err().map(|failure| failure.to_string())
    }

    /// Hands out what it is told to.
    struct Script(Mutex<Vec<Pages>>);

    impl Allocator for Script {
        type Range = Pages;

        fn alloc(&self, _: u64) -> Option<Pages> {
            self.0.lock().unwrap().pop()
        }

        fn free(&self, _: Pages) -> bool {
            true
        }

        fn pages(&self, range: Pages) -> Pages {
            range
        }
    }

    #[test]
    fn what_is_wrong_is_found() {
        assert_eq!(fault(&[(8, 4), (4, 4), (99, 1)], true), None);
        assert!(fault(&[(8, 4), (10, 1)], true).unwrap().contains("were live"));
        assert!(fault(&[(8, 4), (8, 4)], true).unwrap().contains("were live"));
        assert!(fault(&[(2, 4)], true).unwrap().contains("not aligned"));
        assert_eq!(fault(&[(2, 4)], false), None);
        assert!(fault(&[(96, 8)], true).unwrap().contains("beyond"));
        assert!(fault(&[(u64::MAX, 2)], false).unwrap().contains("beyond"));
    }

    #[test]
    fn a_watched_allocator_is_caught() {
        let watched = |ranges: &[(u64, u64)]| {
            let ranges = ranges.iter().rev().map(|&(first, pages)| Pages { first, pages }).collect();
            Watched::new(Script(Mutex::new(ranges)), SPACE)
        };
        let good = watched(&[(4, 2), (6, 2), (4, 2)]);
        let first = good.alloc(2).unwrap();
        assert!(good.alloc(2).is_some());
        assert!(good.free(first));
        assert!(good.alloc(2).is_some(), "freed, so it may be handed out again");
        for bad in [&[(4, 2), (5, 1)][..], &[(5, 1), (4, 2)], &[(4, 2), (4, 2)]] {
            let bad = watched(bad);
            assert!(bad.alloc(1).is_some() && bad.alloc(1).is_none());
            assert!(bad.fault().unwrap().contains("were live"));
        }
        let small = watched(&[(4, 2)]);
        assert!(small.alloc(3).is_none() && small.fault().unwrap().contains("3 pages were asked for"));
        let beside = watched(&[(5, 2)]);
        assert!(beside.alloc(2).is_none(), "ranges are aligned where an allocator says nothing else");
        assert!(beside.fault().unwrap().contains("not aligned"));
    }
}
