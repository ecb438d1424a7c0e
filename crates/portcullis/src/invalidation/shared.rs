//! One hardware wait for all callers that wait at the same time. A [`SharedQueue`] returns `Ok` to
//! a caller only when the hardware has confirmed a submission that covers all of the caller's
//! requests and began after these were made.
//!
//! This is group commit, as databases do it for their logs, by flat combining (Hendler and others, SPAA 2010), in two levels. CPUs 0 to 15 are
//! a group, then 16 to 31, and so on. A CPU that needs an invalidation says so on a cache line of its own, and waits. One of the CPUs of a
//! group that wait is its *leader*: it takes what all of them ask for. Leaders of groups meet in the same way (`shared/meeting.rs`), and one of them
//! submits for all, with one wait. A leader answers its callers by one store, to a word that all of them poll. If only one group is active, its
//! leader submits at once. A CPU that finds no other caller submits without taking a slot.
//!
//! **Linger.** A leader that submits at once leaves out the CPUs that were just answered and have the
//! next request ready a moment later: they would all wait twice as long. So a leader that has company looks again until all are there that were there
//! in the last two rounds, or none came for some looks, up to [`LINGER`]. Where that was in vain lately, it looks less.
//!
//! **Bound.** As a rule, a request is in the submission after the one under way, so it waits for two. A group's leader may close its list just before a
//! submission begins, and miss that. The leader after it may miss another one. So a request waits for five submissions at the most, however many CPUs there are. What does
//! not fit into one submission ([`BATCH`]) goes in several, one after the other, and all have their turn: where callers ask for more than 64 requests of different
//! domains, each waits for two times as many submissions as these requests need. Where all together ask for more than 32, a caller's several ranges of one domain become
//! the whole domain.
//!
//! **Failure.** Every CPU is told what the hardware reports for the submission with its requests, and for no other.
//!
//! **Devices' own TLBs.** A submission that asks a device to forget ([`Invalidation::DeviceTlb`])
//! is in no batch: it goes as a whole to the hardware's queue at once, beside a batch that may be
//! under way. A device may take long to answer, or never do so; this way it delays, and fails, its
//! own domain and not every CPU in its batch. So does what is longer than a batch.
//!
//! **More threads than cores.** A leader without a core costs everybody a time slice. So if more callers wait than there are cores
//! or slots, the first caller that runs takes the lead, and waiting callers yield their cores. A caller that finds no free slot in its group submits alone.

mod batch;
mod meeting;
mod waits;

use super::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use crate::addr::DomainId;
use crate::sync::{cores, thread_number};

pub use waits::SharedWaits;

/// A submission that costs less than this, in nanoseconds, costs less than to share it.
const SHARED_FROM_NS: u32 = 100;

/// A queue that shares its waits among all callers that use it at the same time: [`SharedWaits`] says what that guarantees, and what it costs.
///
/// Every domain of the IOMMU uses it, in an `Arc`. The drivers of `portcullis-hw` need none: they share waits by themselves.
#[derive(Debug)]
pub struct SharedQueue<Q> {
    queue: Q,
    waits: SharedWaits,
    /// The number of the CPU that calls; none in an interrupt handler.
    cpu: fn() -> Option<usize>,
}

impl<Q: InvalidationQueue> SharedQueue<Q> {
    /// Shares the waits of `queue`, if it states that a submission costs 100 ns or more; otherwise
    /// each caller submits alone. So it does where the heap has no memory for the sharing: 5 KiB for each 16 CPUs, and 5 KiB more;
    /// without `std`, which knows how many CPUs there are, 85 KiB.
    ///
    /// Each thread has a number of its own; without `std`, each stack. In interrupt handlers it may not be used:
    /// for that, and for CPUs that are near each other, there is [`with_cpus`](Self::with_cpus).
    pub fn new(queue: Q) -> Self {
        Self::with_cpus(queue, || Some(thread_number()))
    }

    /// As [`new`](Self::new), where `cpu` says which CPU calls: CPUs 0 to 15 share waits among themselves before they share
    /// them with others, then 16 to 31, and so on, so these should be near each other. The number is a hint: it may be out of date at once.
    ///
    /// `None` stands for a caller that must not wait for other callers: an interrupt handler or a softirq, which may have interrupted the one that
    /// it would wait for; and any other code that may have taken the place of a caller on its CPU and keeps it from running, as a thread
    /// with a spinlock held may where callers can be preempted. It submits alone, and waits for hardware only.
    pub fn with_cpus(queue: Q, cpu: fn() -> Option<usize>) -> Self {
        Self::made(queue, cpu, cores())
    }

    /// For so many CPUs.
    fn made(queue: Q, cpu: fn() -> Option<usize>, cores: u64) -> Self {
        let shares = queue.costs().submission_ns >= SHARED_FROM_NS;
        // No truncation: no more than there are addresses.
        Self { queue, waits: SharedWaits::new(if shares { cores as usize } else { 0 }), cpu }
    }

    /// The queue itself.
    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// Gives the queue back.
    pub fn into_inner(self) -> Q {
        self.queue
    }

    /// How many batches were submitted, and submissions beside them: the number of hardware waits,
    /// however many callers waited for each. 0 where none are shared.
    pub fn submissions(&self) -> u64 {
        self.waits.submissions()
    }
}

// SAFETY: `Ok` is returned to a caller whose own submission `Q` has confirmed, or who was answered after `Q` has confirmed a batch
// that covers all its requests (`Batch`), and was submitted after it had asked (`Meeting`). Of two calls that return `Ok`, the batches, or
// submissions, are calls of `Q`, which are in one order; what callers stored before they asked is before the call of `Q` by
// the leader, and they are answered after it. Two callers of one batch see what both had stored.
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

    /// Asks among the others, and waits for the batch that the requests are in; those for devices' own TLBs, and those that are
    /// more than a batch holds, are in none.
    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.waits.submit(self.cpu, requests, |requests| self.queue.submit(requests))
    }
}
