//! The model's invalidation queue with a clock around it, and the modelled waits of hardware.
#![allow(unsafe_code, reason = "the trait is unsafe to implement: it makes a promise")]

use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::DomainId;
use portcullis::invalidation::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis_model::Queue;

use super::profile::Waits;
use super::requests::RequestWaits;
use super::timing::Timer;

/// The waits of a profile, in picoseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prices {
    submission: u64,
    descriptor: u64,
    map_request: u64,
    map_page: u64,
    unmap_page: u64,
}

impl Prices {
    fn of(waits: &Waits) -> Self {
        // Each is at most a second in a profile.
        let ps = |ns: f64| (ns * 1000.0).round() as u64;
        Self {
            submission: ps(waits.doorbell.ns + waits.completion.ns),
            descriptor: ps(waits.descriptor.ns),
            map_request: ps(waits.map_request.ns),
            map_page: ps(waits.map_page.ns),
            unmap_page: ps(waits.unmap_page.ns),
        }
    }
}

/// Passes invalidations on and sums up the *model's* time: the price of software instead of hardware, which no figure includes. Also sums
/// up the *hardware's* time, by a profile.
#[derive(Debug)]
pub(super) struct ClockedQueue {
    queue: Queue,
    timer: Timer,
    ticks: AtomicU64,
    costs: Costs,
    prices: Prices,
    /// Picoseconds that the CPU would have waited.
    waited: AtomicU64,
}

impl ClockedQueue {
    pub(super) fn new(queue: Queue, timer: Timer, waits: &Waits) -> Self {
        let (costs, prices) = (waits.costs(), Prices::of(waits));
        Self { queue, timer, ticks: AtomicU64::new(0), costs, prices, waited: AtomicU64::new(0) }
    }

    /// Nanoseconds that hardware would have made the CPU wait so far, for invalidations and for requests.
    pub(super) fn waited_ns(&self) -> f64 {
        self.waited.load(Ordering::Relaxed) as f64 / 1000.0
    }

    fn wait(&self, ps: u64) {
        // One thread replays, so nothing is lost between the load and the store.
        self.waited.store(self.waited.load(Ordering::Relaxed).saturating_add(ps), Ordering::Relaxed);
    }

    /// Ticks in the model so far, including the cost of measuring them.
    pub(super) fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }
}

impl RequestWaits for ClockedQueue {
    fn by_request(&self) -> bool {
        self.prices.map_request + self.prices.map_page + self.prices.unmap_page > 0
    }

    fn mapped(&self, granules: u64) {
        self.wait(self.prices.map_request.saturating_add(granules.saturating_mul(self.prices.map_page)));
    }

    fn unmapped(&self, granules: u64) {
        self.wait(granules.saturating_mul(self.prices.unmap_page));
    }
}

// SAFETY: clauses 1 to 4 are the model's: each method passes its call on.
unsafe impl InvalidationQueue for ClockedQueue {
    fn costs(&self) -> Costs {
        self.costs
    }

    fn caches_absent(&self) -> bool {
        self.queue.caches_absent()
    }

    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.wait(self.prices.submission + requests.len() as u64 * self.prices.descriptor);
        let start = self.timer.ticks();
        let result = InvalidationQueue::submit(&self.queue, requests);
        // Both readings of the counter are inside the caller's measurement: they count as the model's, too.
        let spent = self.timer.ticks().saturating_sub(start).saturating_add(self.timer.overhead_ticks());
        // One thread replays, so nothing is lost between the load and the store.
        self.ticks.store(self.ticks().saturating_add(spent), Ordering::Relaxed);
        result
    }
}

#[cfg(test)]
mod tests {
    use portcullis::addr::{Iova, IovaRange};
    use portcullis_model::{Iommu, IommuConfig, Memory};

    use super::*;
    use crate::replay::Profile;

    /// The cost of a submission and of each of its requests, by every method; and the hardware gets them.
    #[test]
    fn one_invalidation_waits_as_a_submission_of_one() {
        let waits = &Profile::load("vtd").unwrap().waits;
        let queue =
            |iommu: &std::sync::Arc<Iommu>| ClockedQueue::new(iommu.queue(), Timer::calibrated(), waits);
        let range = IovaRange::new(Iova::new(0x1000), 0x1000).unwrap();
        let invalidation = Invalidation::Range { range, leaf_only: true };
        let request = Request { domain: DomainId(1), invalidation };
        let made = |requests: usize| {
            let iommu = Iommu::new(IommuConfig::new(Memory::new(1 << 20)));
            let queue = queue(&iommu);
            match requests {
                0 => queue.invalidate(DomainId(1), invalidation).unwrap(),
                _ => queue.submit(&vec![request; requests]).unwrap(),
            }
            (queue.waited_ns(), queue.ticks() > 0, iommu.stats().range_invalidations)
        };
        let submission = waits.doorbell.ns + waits.completion.ns;
        let all = |requests: u64| (submission + requests as f64 * waits.descriptor.ns, true, requests);
        assert_eq!([made(0), made(1), made(3)], [all(1), all(1), all(3)]);
    }
}
