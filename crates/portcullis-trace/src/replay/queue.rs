//! The model's invalidation queue with a clock around it.

use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::invalidation::{
    Costs, DomainId, Invalidation, InvalidationError, InvalidationQueue, Request,
};
use portcullis_model::Queue;

use super::timing::Timer;

/// Passes invalidations on and remembers how long the *model* took over them: that is the price of software
/// standing in for hardware, and no figure of ours.
#[derive(Debug)]
pub(super) struct ClockedQueue {
    queue: Queue,
    timer: Timer,
    ticks: AtomicU64,
    costs: Costs,
}

impl ClockedQueue {
    pub(super) fn new(queue: Queue, timer: Timer, costs: Costs) -> Self {
        Self { queue, timer, ticks: AtomicU64::new(0), costs }
    }

    /// Ticks spent in the model so far, the cost of measuring them included.
    pub(super) fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }
}

impl InvalidationQueue for ClockedQueue {
    fn costs(&self) -> Costs {
        self.costs
    }

    fn invalidate(&self, domain: DomainId, request: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation: request }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let start = self.timer.ticks();
        let result = InvalidationQueue::submit(&self.queue, requests);
        // Both readings of the counter happen inside the caller's measurement: they are the model's too.
        let spent = self.timer.ticks().saturating_sub(start).saturating_add(self.timer.overhead_ticks());
        // One thread replays, so nothing is lost between the load and the store.
        self.ticks.store(self.ticks().saturating_add(spent), Ordering::Relaxed);
        result
    }
}
