//! One hardware wait for all callers that wait at the same time. A [`SharedQueue`] returns `Ok` to
//! a caller only when the hardware has confirmed submissions that cover all of the caller's
//! requests and began after these were made.
//!
//! This is group commit, as databases do it for their logs. A CPU that needs an invalidation
//! *stages* it in the open batch. One of the waiting CPUs becomes the *leader*: it closes the
//! batch, submits all of it with one wait, and stores the number of the complete batch, which the
//! other CPUs poll. Meanwhile CPUs stage into the next batch, which one of them leads when this one
//! is complete. A CPU holds the lock to stage and to close a batch, never while hardware works.
//!
//! **Linger.** A leader that closes its batch at once leaves out the CPUs that come back from the batch before and have the
//! next request ready a moment later: they would all wait twice as long. So the leader counts how many CPUs waited when the
//! last batch was complete, and lingers for them. It adapts the number of rounds to whether they came in time, up to
//! [`LINGER`].
//!
//! **Bound.** A request is in a batch that begins at the latest when the one under way ends: it
//! waits for two hardware waits at the most, however many CPUs there are. A batch that is full
//! still makes room for requests of the domains in it; a submission that finds no room first waits
//! until that batch is complete, which takes two more hardware waits each time.
//!
//! **Failure.** Every CPU in a batch gets what the hardware reports for it. Up to eight failed
//! batches are remembered one by one until each of their waiters has asked. While more are open,
//! the eighth entry stands for all from its own batch to the newest failed one; batches between
//! them that were confirmed then count as failed, too, but no failed batch ever counts as
//! confirmed.
//!
//! **Devices' own TLBs.** A submission that asks a device to forget ([`Invalidation::DeviceTlb`])
//! is in no batch: it goes as a whole to the hardware's queue at once, beside a batch that may be
//! under way. A device may take long to answer, or never do so; this way it delays, and fails, its
//! own domain and not every CPU in its batch.
//!
//! Memory ordering. What a CPU stored before it staged is before the leader's submission, by the lock. The
//! number of the complete batch is stored with `Release`, after a failure was noted, and read with `Acquire`:
//! so a CPU that finds its batch complete sees the failure, and acts after the hardware did.

use arrayvec::ArrayVec;

use super::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use crate::addr::DomainId;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, cores, pause, spin};

/// The number of requests that one batch holds. When it is full, a further request finds room only
/// where it takes the place of the ranges of its own domain, by asking for that whole domain.
const BATCH: usize = if cfg!(loom) { 2 } else { 64 };

/// The most rounds for which a leader lingers.
const LINGER: u64 = if cfg!(loom) { 1 } else { 16 };

/// The number of looks in a round, where all expected CPUs may be running.
const LOOKS: u32 = if cfg!(loom) { 1 } else { 2 };

/// How often a CPU looks for the end of a batch before it tells the scheduler: for some
/// microseconds, longer than hardware mostly takes.
const SPINS: u32 = 256;

/// A submission that costs less than this, in nanoseconds, costs less than to share it.
const SHARED_FROM_NS: u32 = 100;

/// For every eighth batch the leader lingers as long as it may, to find out whether that pays
/// again.
const PROBE: u64 = 8;

/// The number of failed batches that are remembered one by one.
const FAILURES: usize = if cfg!(loom) { 1 } else { 8 };

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
    state: Mutex<State>,
    /// A leader submits a batch, or is about to.
    led: AtomicBool,
    /// The number of the last batch that is complete, whether it was confirmed or failed.
    complete: AtomicU64,
    /// How many batches were submitted so far, and how many submissions were in no batch.
    submissions: AtomicU64,
    /// How many callers wait for the batch that is open. Changed under the lock.
    waiters: AtomicU64,
    /// How many callers waited when the last batch was over, for it and for the next one.
    expected: AtomicU64,
    /// For how many rounds it paid to linger lately.
    linger: AtomicU64,
    /// Threads that run at once.
    cores: u64,
    /// Whether a wait is worth sharing.
    shares: bool,
}

#[derive(Debug)]
struct State {
    /// The number of the batch that is open, from 1 on.
    open: u64,
    staged: ArrayVec<Request, BATCH>,
    failed: ArrayVec<Failed, FAILURES>,
}

/// The batches from `first` to `last`, of which some failed, and how many waiters of those have not
/// asked yet.
#[derive(Debug, Clone, Copy)]
struct Failed {
    first: u64,
    last: u64,
    waiters: u64,
    error: InvalidationError,
}

/// The right to submit. Dropping it says what became of the batch and gives the right up, also when
/// the queue panics.
struct Leading<'a, Q> {
    shared: &'a SharedQueue<Q>,
    number: u64,
    waiters: u64,
    /// How many of the waiters will ask what became of the batch.
    asking: u64,
    result: Result<(), InvalidationError>,
}

impl<Q> Drop for Leading<'_, Q> {
    fn drop(&mut self) {
        if let Err(error) = self.result {
            self.shared.state.lock().note_failure(self.number, self.asking, error);
        }
        let next = self.shared.waiters.load(Ordering::Relaxed);
        self.shared.expected.store(self.waiters + next, Ordering::Relaxed);
        self.shared.complete.store(self.number, Ordering::Release);
        self.shared.led.store(false, Ordering::Release);
    }
}

impl<Q: InvalidationQueue> SharedQueue<Q> {
    /// Shares the waits of `queue`, if it states that a submission costs 100 ns or more; otherwise
    /// each caller submits alone.
    pub fn new(queue: Q) -> Self {
        let shares = queue.costs().submission_ns >= SHARED_FROM_NS;
        let state = State { open: 1, staged: ArrayVec::new(), failed: ArrayVec::new() };
        Self {
            queue,
            state: Mutex::new(state),
            led: AtomicBool::new(false),
            complete: AtomicU64::new(0),
            submissions: AtomicU64::new(0),
            waiters: AtomicU64::new(0),
            expected: AtomicU64::new(0),
            linger: AtomicU64::new(LINGER),
            cores: cores(),
            shares,
        }
    }

    /// The queue itself.
    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// How many batches were submitted, and submissions beside them: the number of hardware waits,
    /// however many callers waited for each.
    pub fn submissions(&self) -> u64 {
        self.submissions.load(Ordering::Relaxed)
    }

    /// Waits until the batch `number` is complete, and leads a batch where no other CPU does. The caller has requests in
    /// the batch `mine`, if in any.
    fn wait(&self, number: u64, mine: Option<u64>) {
        let mut looks = 0;
        while self.complete.load(Ordering::Acquire) < number {
            if !self.try_to_lead() {
                // As a rule the CPU that it waits for is running, unless there are too few cores.
                let crowded = self.expected.load(Ordering::Relaxed) > self.cores;
                if crowded || looks == SPINS {
                    pause()
                } else {
                    spin()
                }
                looks += u32::from(looks < SPINS);
            } else if self.complete.load(Ordering::Acquire) < number {
                self.lead(mine);
            } else {
                self.led.store(false, Ordering::Release);
            }
        }
    }

    /// Takes the right to submit, if no CPU has it. Looks before it tries, as CPUs that wait would take the line from
    /// each other.
    fn try_to_lead(&self) -> bool {
        let free = || self.led.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        !self.led.load(Ordering::Relaxed) && free()
    }

    /// Submits the batch that is open. The caller has `led`, and waits for the batch `mine`, if for any.
    fn lead(&self, mine: Option<u64>) {
        self.linger();
        let (number, requests, waiters) = {
            let mut state = self.state.lock();
            let number = state.open;
            state.open += 1;
            (number, core::mem::take(&mut state.staged), self.waiters.swap(0, Ordering::Relaxed))
        };
        // Should the queue panic, the leader never asks what became of its own request.
        let asking = waiters - u64::from(mine == Some(number));
        let result = Err(InvalidationError::Abandoned);
        let mut leading = Leading { shared: self, number, waiters, asking, result };
        self.submissions.fetch_add(1, Ordering::Relaxed);
        leading.result = self.queue.submit(&requests);
        leading.asking = waiters;
    }

    /// Gives the CPUs that waited when the last batch was complete time to come with their next request. The caller
    /// has `led`, so no other CPU changes what this uses.
    fn linger(&self) {
        let expected = self.expected.load(Ordering::Relaxed);
        let is_here = || self.waiters.load(Ordering::Relaxed) >= expected;
        if is_here() {
            return;
        }
        let lately = self.linger.load(Ordering::Relaxed);
        let probes = self.submissions.load(Ordering::Relaxed).is_multiple_of(PROBE);
        let most = if probes { LINGER } else { lately };
        // Where not all of them can be running, a round is one turn for others on this core.
        let (looks, rest): (_, fn()) = if expected > self.cores { (1, pause) } else { (LOOKS, spin) };
        let comes = || {
            rest();
            is_here()
        };
        for round in 1..=most {
            if (0..looks).any(|_| comes()) {
                return self.linger.store((2 * round).min(LINGER), Ordering::Relaxed);
            }
        }
        // It has paid as well if most of them came.
        let most_came = 4 * self.waiters.load(Ordering::Relaxed) >= 3 * expected;
        let rounds = if most_came { most.max(1) } else { most / 2 };
        self.linger.store(rounds, Ordering::Relaxed);
    }

    /// Adds `requests` to the open batch. Returns its number if there was room, and in any case the
    /// number of the open batch.
    fn stage(&self, requests: &[Request]) -> (Option<u64>, u64) {
        let mut state = self.state.lock();
        let staged = state.stage(requests);
        if staged {
            self.waiters.fetch_add(1, Ordering::Relaxed);
        }
        (staged.then_some(state.open), state.open)
    }
}

impl State {
    /// Adds `requests` to the open batch. Returns whether there was room.
    fn stage(&mut self, requests: &[Request]) -> bool {
        // A single request is added or not; several are added together or not at all.
        let before = (requests.len() > 1).then(|| self.staged.clone());
        for request in requests {
            if !self.add(*request) {
                if let Some(before) = before {
                    self.staged = before;
                }
                return false;
            }
        }
        true
    }

    fn add(&mut self, request: Request) -> bool {
        let whole = Request { invalidation: Invalidation::Domain, ..request };
        if self.staged.contains(&whole) {
            return true;
        }
        if request.invalidation == Invalidation::Domain || self.staged.is_full() {
            // The whole domain covers all that is staged of it already, which makes room, unless
            // nothing of it is staged.
            if !self.staged.is_full() || self.staged.iter().any(|other| other.domain == request.domain) {
                self.staged.retain(|other| other.domain != request.domain);
                self.staged.push(whole);
                return true;
            }
            return false;
        }
        self.staged.push(request);
        true
    }

    fn note_failure(&mut self, number: u64, waiters: u64, error: InvalidationError) {
        if waiters == 0 {
            return;
        }
        let failed = Failed { first: number, last: number, waiters, error };
        if let Err(full) = self.failed.try_push(failed)
            && let Some(last) = self.failed.last_mut()
        {
            *last = Failed { first: last.first, waiters: last.waiters + waiters, ..full.element() };
        }
    }

    /// Returns what became of the batch `mine`, to one of its waiters.
    fn outcome(&mut self, mine: u64) -> Result<(), InvalidationError> {
        let failed = |failed: &Failed| (failed.first..=failed.last).contains(&mine);
        let Some(index) = self.failed.iter().position(failed) else {
            return Ok(());
        };
        let entry = &mut self.failed[index];
        let error = entry.error;
        entry.waiters = entry.waiters.saturating_sub(1);
        // Where an entry stands for several batches, waiters of confirmed ones may have asked it,
        // too, so its count proves nothing: that entry stays.
        if entry.waiters == 0 && entry.first == entry.last {
            self.failed.remove(index);
        }
        Err(error)
    }
}

// SAFETY: `Ok` is returned to a caller whose own submission `Q` has confirmed, or who sees, with an acquire load, that a batch
// is complete which was submitted after all its requests were staged and which `Q` has confirmed as a whole.
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

    /// Stages the requests and waits for the batch that they are in; those for devices' own TLBs are in none.
    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let is_for_device =
            |request: &Request| matches!(request.invalidation, Invalidation::DeviceTlb { .. });
        if !self.shares || requests.iter().any(is_for_device) {
            self.submissions.fetch_add(1, Ordering::Relaxed);
            return self.queue.submit(requests);
        }
        loop {
            match self.stage(requests) {
                (Some(mine), _) => {
                    self.wait(mine, Some(mine));
                    return self.state.lock().outcome(mine);
                }
                // The batch is full: the caller can only wait until it is complete.
                (None, _) if requests.len() > BATCH => return self.submit_halves(requests),
                (None, open) => self.wait(open, None),
            }
        }
    }
}

impl<Q: InvalidationQueue> SharedQueue<Q> {
    /// Submits more requests than a batch holds, for which the open one had no room: one half after
    /// the other.
    fn submit_halves(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let (first, second) = requests.split_at(requests.len() / 2);
        self.submit(first)?;
        self.submit(second)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
