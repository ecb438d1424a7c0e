//! One hardware wait for all callers that wait at the same time. A [`SharedQueue`] returns `Ok` to a caller only when the hardware has
//! confirmed a submission that covers all of the caller's requests and began after the caller's.
//!
//! This is group commit, as databases do it for their logs, by flat combining (Hendler and others, SPAA 2010), in two levels. CPUs 0 to 15
//! are a group, then 16 to 31, and so on. A CPU that needs an invalidation publishes its requests on a cache line of its own, and waits.
//! One of the waiting CPUs of a group is its *leader*, and collects the group's requests. Leaders of groups meet in the same way
//! (`shared/meeting.rs`), and one of them submits for all, with one wait. A leader answers each caller on the caller's own line, so that no
//! two of them wait for one line. A CPU that finds no other caller submits without a slot, and so does the leader of a group that finds no
//! other group. Every CPU gets the result of the submission with its own requests.
//!
//! **Linger.** CPUs that were just answered have their next requests ready a moment later. A leader that submits at once misses them, and
//! they wait twice as long. So a leader with company looks again, until all callers of the last two rounds are there, or none came for up
//! to [`LINGER`] looks. After rounds in which few came, it looks less often.
//!
//! **Bound.** As a rule, a request is in the submission after the one under way, so it waits for two. A group's leader may close its list
//! just before a submission begins, and miss it; the leader after it may miss another one. So if leaders are prompt, a request waits for at
//! most five submissions, whatever the number of CPUs. A leader that lingers or is preempted adds the submissions that end meanwhile.
//! Callers that begin at the same moment do not see each other, and each of them submits. If the requests exceed one submission
//! ([`BATCH`]), several follow one another, and serve all callers in turn: if callers have more than 64 requests for different domains, a
//! request waits for at most twice as many submissions as all of them need. If all together have more than 32, several ranges of one domain
//! in one call become the whole domain.
//!
//! **Device TLBs.** A submission with an [`Invalidation::DeviceTlb`], or longer than a batch, goes as a whole to the hardware's queue at
//! once, even beside a batch. A device may take long to answer, or never do so; this way it delays and fails its own domain only.
//!
//! **More threads than cores.** A leader without a core costs everybody a time slice. So if there are more waiting callers than cores or
//! slots, the first caller that runs takes the lead, and waiting callers yield their cores. A caller that finds no free slot in its group
//! submits alone.

mod batch;
mod held;
mod lead;
mod meeting;
mod slot;
mod state;
mod under_way;
mod waits;

use super::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use crate::addr::DomainId;
use crate::sync::{cores, thread_number};

pub use waits::{Shareable, SharedWaits};

/// A submission cheaper than this, in nanoseconds, costs less than sharing it.
const SHARED_FROM_NS: u32 = 100;

/// A queue whose concurrent callers share waits: [`SharedWaits`] says what that guarantees and costs. All domains of an IOMMU use one, in
/// an `Arc`. The drivers of `portcullis-hw` need none: they share waits by themselves.
#[derive(Debug)]
pub struct SharedQueue<Q> {
    queue: Q,
    waits: SharedWaits,
    /// The number of the calling CPU; `None` in an interrupt handler.
    cpu: fn() -> Option<usize>,
}

impl<Q: InvalidationQueue> SharedQueue<Q> {
    /// Shares the waits of `queue`, if it states that a submission costs 100 ns or more; otherwise each caller submits alone. Callers also
    /// submit alone if there is no memory for the sharing: 5 KiB for each 16 CPUs, and 5 KiB more; without `std`, which knows the number of
    /// CPUs, 85 KiB.
    ///
    /// Each thread has a number; without `std`, each stack. Not for interrupt handlers: they, and CPUs that are near each other, use
    /// [`with_cpus`](Self::with_cpus).
    pub fn new(queue: Q) -> Self {
        Self::with_cpus(queue, || Some(thread_number()))
    }

    /// As [`new`](Self::new), where `cpu` returns the calling CPU. CPUs of one [group](SharedWaits::new) should be near each other. The number
    /// is a hint: it may be out of date at once.
    ///
    /// `None` is for a caller that must not wait for other callers: an interrupt handler or a softirq, which may have interrupted such a
    /// caller; and any other code that may have preempted a caller on its CPU and keeps it from running, as a thread with a spinlock held
    /// may. It submits alone, and waits for hardware only.
    pub fn with_cpus(queue: Q, cpu: fn() -> Option<usize>) -> Self {
        Self::made(queue, cpu, cores())
    }

    fn made(queue: Q, cpu: fn() -> Option<usize>, cores: u64) -> Self {
        let shares = queue.costs().submission_ns >= SHARED_FROM_NS;
        // No truncation: there are fewer CPUs than addresses.
        Self { queue, waits: SharedWaits::new(if shares { cores as usize } else { 0 }), cpu }
    }

    /// The queue itself.
    pub fn queue(&self) -> &Q {
        &self.queue
    }
}

// SAFETY: clause 1: a caller gets `Ok` from `Q`, for its own submission or for a batch that covers all its requests (`Batch`) and was
// submitted after they were published (`Meeting`). Clause 2: the leader's acquire of the requests puts the caller's stores before its call
// of `Q`. Clause 3: the calls of `Q` are in one order; a caller's stores come before its leader's call, and its return after it, and
// callers of one batch see each other's stores. Clause 4: a batch has no requests for device TLBs; all other submissions are passed on.
unsafe impl<Q: InvalidationQueue> InvalidationQueue for SharedQueue<Q> {
    fn costs(&self) -> Costs {
        self.queue.costs()
    }

    fn caches_absent(&self) -> bool {
        self.queue.caches_absent()
    }

    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    /// Waits for the batch with the requests; requests for device TLBs, and more than a batch holds, go alone.
    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        match self.waits.share(requests) {
            Some(shareable) => shareable.submit(self.cpu, |requests| self.queue.submit(requests)),
            None => self.queue.submit(requests),
        }
    }
}
