//! One hardware wait for all callers that wait at the same time. A [`SharedQueue`] returns `Ok` to a caller only after the hardware has
//! confirmed a submission that began after the call, and covers all of the caller's requests.
//!
//! **Protocol.** This is group commit, as databases do it for their logs, by flat combining (Hendler and others, SPAA 2010), in two levels.
//! CPUs 0 to 15 form a *group*, CPUs 16 to 31 the next one, and so on (`shared/group.rs`).
//!
//! 1. A caller takes a *slot* of its CPU's group, publishes its requests there, and polls the slot for the answer. A slot is a cache line,
//!    so no two callers wait for one line.
//! 2. One of the waiting callers is the group's *leader*: it collects the published requests in one batch.
//! 3. The leader publishes the batch in a slot of the leaders' own group. The leader of that group submits the requests of all.
//! 4. Each leader stores the result in the slots that it collected, and lets another caller lead: its *round* is over.
//!
//! Every caller gets the result of the submission with its own requests. A caller that finds no other caller submits without a slot, and so
//! does the leader of a group that finds no other group.
//!
//! **Linger.** Callers that were just answered have their next requests ready a moment later. A leader that submits at once misses them,
//! and they wait twice as long. So a leader polls for the callers of the last two rounds, until all are there, or none came for up to
//! [`LINGER`] polls. After a round that fewer than three quarters of them joined, it polls half as often.
//!
//! **Bound.** As a rule, a request is in the submission after the one in flight, so it waits for two. A group's leader may close its batch
//! just before a submission begins, and miss it; the next leader may miss another one. So if leaders are prompt, a request waits for at
//! most five submissions, whatever the number of CPUs. A leader that lingers or is preempted adds the submissions that end meanwhile.
//! Callers that begin at the same moment do not see each other, and each of them submits. If the requests exceed one submission
//! ([`BATCH`]), several follow one another, and serve all callers in turn: if callers have more than 64 requests for different domains, a
//! request waits for at most twice as many submissions as all of them need. If all together have more than 32, several ranges of one domain
//! in one call become the whole domain.
//!
//! **Device TLBs.** A submission with an [`Invalidation::DeviceTlb`], or longer than a batch, is not shared: it goes to the hardware's
//! queue at once, even while a batch is in flight. A device may take long to answer, or never answer; so it delays and fails its own domain
//! only.
//!
//! **Oversubscription.** A leader that has no core costs every caller a time slice. So if there are more waiting callers than cores or
//! slots, the first caller that runs leads, and waiting callers yield their cores. A caller that finds no free slot in its group submits
//! alone.

mod batch;
mod group;
mod in_flight;
mod leader;
mod slot;
mod state;
mod waiter;
mod waits;

use super::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use crate::addr::DomainId;
use crate::sync::{cores, thread_number};

pub use waits::SharedWaits;

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
    /// submit alone if there is no memory for the sharing: 5 KiB for each 16 CPUs, and 5 KiB more; without `std` the number of CPUs is not
    /// known, and it takes 85 KiB.
    ///
    /// Each thread counts as a CPU; without `std`, each stack. Not for interrupt handlers: they need [`with_cpus`](Self::with_cpus), which
    /// also lets neighbouring CPUs share a group.
    pub fn new(queue: Q) -> Self {
        Self::with_cpus(queue, || Some(thread_number()))
    }

    /// As [`new`](Self::new), where `cpu` returns the calling CPU. CPUs of one [group](SharedWaits::new) should be near each other. The number
    /// is a hint: it may be out of date at once.
    ///
    /// `cpu` returns `None` for a caller that must not wait for other callers: an interrupt handler or a softirq, which may have
    /// interrupted one of them; and any other code that may have preempted one on its CPU and keeps it from running, such as a thread that
    /// holds a spinlock. Such a caller submits alone, and waits for hardware only.
    pub fn with_cpus(queue: Q, cpu: fn() -> Option<usize>) -> Self {
        Self::with_cores(queue, cpu, cores())
    }

    fn with_cores(queue: Q, cpu: fn() -> Option<usize>, cores: u64) -> Self {
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
// submitted after they were published (`Group`). Clause 2: the leader's acquire of the requests puts the caller's stores before its call
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

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.waits.submit(requests, self.cpu, |requests| self.queue.submit(requests))
    }
}
