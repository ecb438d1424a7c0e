//! One hardware wait for all callers that wait at the same time. A [`SharedQueue`] returns `Ok` to
//! a caller only when the hardware has confirmed a submission that covers all of the caller's
//! requests and began after these were made.
//!
//! This is group commit, as databases do it for their logs, by flat combining (Hendler and others, SPAA 2010). A CPU that needs an
//! invalidation *stages* it (`shared/staged.rs`), and waits for its answer on a cache line of its own. One of the waiting CPUs is the
//! *leader*: it takes all that is staged, submits it with one wait, hands the lead to a CPU that was staged meanwhile, and answers those that
//! it took. It costs each CPU one exchange of a word that all share, and the leader two transfers of a line for each CPU. No lock is taken.
//!
//! **Linger.** A leader that submits at once leaves out the CPUs that were just answered and have the
//! next request ready a moment later: they would all wait twice as long. So a leader that has company looks again until as many are there as
//! were there last time, or none came for some looks, up to [`LINGER`]. Where that was in vain lately, it looks less.
//!
//! **Bound.** A request is among those that are taken at the latest when the submission under way ends: it
//! waits for two hardware waits at the most, however many CPUs there are. What does not fit into one submission ([`BATCH`]) goes in several, one after the other,
//! so where callers ask for more than 64 requests it is two times as many as these need.
//!
//! **Failure.** Every CPU is told what the hardware reports for the submission with its requests, and for no other.
//!
//! **Devices' own TLBs.** A submission that asks a device to forget ([`Invalidation::DeviceTlb`])
//! is in no batch: it goes as a whole to the hardware's queue at once, beside a batch that may be
//! under way. A device may take long to answer, or never do so; this way it delays, and fails, its
//! own domain and not every CPU in its batch. So does what is longer than a batch.
//!
//! **More threads than cores.** A lead that is handed to a thread that has no core costs everybody a time slice. So where more callers wait than there
//! are cores, the lead stays open for the one that runs first, and those that wait give their cores away.

mod batch;
mod staged;

use super::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use crate::addr::DomainId;
use crate::percpu::{CachePadded, LocalU64};
use crate::sync::{AtomicBool, AtomicU64, Ordering, cores, pause, spin};
use batch::{BATCH, Batch};
use staged::{Lead, Staged, Taken, Told, Waiting};

/// How often a leader looks in vain whether more come.
const LINGER: u64 = if cfg!(loom) { 1 } else { 8 };

/// For every eighth submission the leader lingers as long as it may, to find out whether that pays again.
const PROBE: u64 = 8;

/// How often a CPU looks for its answer before it tells the scheduler: for some
/// microseconds, longer than hardware mostly takes.
const SPINS: u32 = 256;

/// A submission that costs less than this, in nanoseconds, costs less than to share it.
const SHARED_FROM_NS: u32 = 100;

/// A queue that shares its waits among all callers that use it at the same time.
///
/// Every domain of an IOMMU uses one of these, in an `Arc`.
///
/// It is not for interrupt handlers: one that interrupts the leader, or a CPU that stages, would
/// wait for that CPU for ever. So with this as its queue no domain may wait for hardware in such a
/// handler, which a strict unmap does, and a lazy one now and then.
#[derive(Debug)]
pub struct SharedQueue<Q> {
    queue: Q,
    /// Submissions of one caller's requests alone, in no batch.
    alone: AtomicU64,
    machine: CachePadded<Machine>,
    meeting: CachePadded<Meeting>,
}

/// What CPUs read while they wait.
#[derive(Debug)]
struct Machine {
    /// Whether a wait is worth sharing.
    shares: bool,
    /// Threads that run at once.
    cores: u64,
    /// The last leader took more callers than there are cores.
    crowded: AtomicBool,
}

/// What CPUs pass each other. But for `staged`, all is the leader's.
#[derive(Debug)]
struct Meeting {
    staged: Staged,
    /// How many batches were submitted so far.
    batches: LocalU64,
    /// How many callers the last leader took.
    callers: LocalU64,
    /// For how many looks it paid to linger lately.
    linger: LocalU64,
}

impl<Q: InvalidationQueue> SharedQueue<Q> {
    /// Shares the waits of `queue`, if it states that a submission costs 100 ns or more; otherwise
    /// each caller submits alone.
    pub fn new(queue: Q) -> Self {
        let meeting = Meeting {
            staged: Staged::new(),
            batches: LocalU64::new(0),
            callers: LocalU64::new(0),
            linger: LocalU64::new(LINGER),
        };
        let machine = Machine {
            shares: queue.costs().submission_ns >= SHARED_FROM_NS,
            cores: cores(),
            crowded: AtomicBool::new(false),
        };
        let (machine, meeting) = (CachePadded(machine), CachePadded(meeting));
        Self { queue, alone: AtomicU64::new(0), machine, meeting }
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
    /// however many callers waited for each.
    pub fn submissions(&self) -> u64 {
        self.meeting.batches.get() + self.alone.load(Ordering::Relaxed)
    }

    /// Waits for the answer, and leads where it is told to.
    fn wait(&self, waiting: &Waiting<'_>) -> Result<(), InvalidationError> {
        let mut looks = 0;
        loop {
            match waiting.look() {
                Told::Answer(result) => return result,
                Told::Leads(lead) => self.lead(lead, true),
                Told::Nothing => {
                    // As a rule the leader is running, unless there are too few cores.
                    let crowded = self.machine.crowded.load(Ordering::Relaxed);
                    let lead = if crowded { waiting.claim() } else { None };
                    if let Some(lead) = lead {
                        self.lead(lead, true);
                    } else if crowded || looks == SPINS {
                        pause();
                    } else {
                        looks += 1;
                        spin();
                    }
                }
            }
        }
    }

    /// Takes all callers that are staged, submits what they ask for, and answers them. `after` says that it leads next after another.
    fn lead(&self, mut lead: Lead<'_>, after: bool) {
        let mut taken = Taken::nobody();
        lead.take(&mut taken);
        let mut callers = 0;
        loop {
            let mut batch = Batch::default();
            callers += gather(&mut taken, &mut batch);
            if taken.unseen().is_none() {
                callers = self.linger(&mut lead, &mut taken, &mut batch, callers, after);
            }
            let is_last = taken.unseen().is_none();
            self.meeting.batches.set(self.meeting.batches.get() + 1);
            let result = self.queue.submit(batch.requests());
            if is_last {
                self.meeting.callers.set(callers);
                lead.stays_open = callers > self.machine.cores;
                if self.machine.crowded.load(Ordering::Relaxed) != lead.stays_open {
                    self.machine.crowded.store(lead.stays_open, Ordering::Relaxed);
                }
                // The next one leads while this one answers.
                drop(lead);
                return taken.answer(result);
            }
            taken.answer(result);
        }
    }

    /// Gives the CPUs that were just answered time to come with their next request, and takes those that come. Returns how
    /// many were taken in all.
    fn linger(
        &self,
        lead: &mut Lead<'_>,
        taken: &mut Taken,
        batch: &mut Batch,
        mut callers: u64,
        after: bool,
    ) -> u64 {
        let Meeting { batches, callers: last, linger, .. } = &*self.meeting;
        // Where the leader comes after another, these are not those that the other has answered.
        let expected = last.get() + if after { callers } else { 0 };
        if callers >= expected {
            return callers;
        }
        let lately = linger.get();
        let most = if batches.get().is_multiple_of(PROBE) { LINGER } else { lately };
        // Where not all of them can be running, a look is one turn for others on this core.
        let rest: fn() = if expected > self.machine.cores { pause } else { spin };
        let mut looks = 0;
        while looks < most && callers < expected && taken.unseen().is_none() {
            rest();
            looks += 1;
            if lead.has_staged() {
                lead.take(taken);
                callers += gather(taken, batch);
                looks = 0;
            }
        }
        // It has paid if most of them came.
        let most_came = 4 * callers >= 3 * expected;
        linger.set(if most_came { LINGER } else { most / 2 });
        callers
    }
}

/// Adds to `batch` what the callers ask for that were taken and not seen, as long as there is room. Returns how many those were.
fn gather(taken: &mut Taken, batch: &mut Batch) -> u64 {
    let mut callers = 0;
    while taken.unseen().is_some_and(|requests| batch.add_all(requests)) {
        taken.see();
        callers += 1;
    }
    callers
}

// SAFETY: `Ok` is returned to a caller whose own submission `Q` has confirmed, or who was answered after `Q` has confirmed a batch
// that covers all its requests (`Batch`), and was submitted after they were staged (`Staged`). Of two calls that return `Ok`, the batches, or
// submissions, are calls of `Q`, which are in one order; what callers stored before they staged themselves is before the call of `Q` by
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

    /// Stages the requests and waits for the batch that they are in; those for devices' own TLBs, and those that are
    /// more than a batch holds, are in none.
    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let is_for_device =
            |request: &Request| matches!(request.invalidation, Invalidation::DeviceTlb { .. });
        if !self.machine.shares || requests.len() > BATCH || requests.iter().any(is_for_device) {
            self.alone.fetch_add(1, Ordering::Relaxed);
            return self.queue.submit(requests);
        }
        self.meeting.staged.with(requests, |waiting, lead| {
            if let Some(lead) = lead {
                self.lead(lead, false);
            }
            self.wait(&waiting)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
