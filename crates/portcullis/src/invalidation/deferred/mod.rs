//! Ranges that are unmapped but not yet forgotten by the hardware: the queues of *lazy* protection.
//!
//! Each CPU has a queue of its own, or all share a long one where flushes are expensive. One domain-wide invalidation, a *flush*, covers every entry that any
//! CPU queued before the flush began. Which entries those are is told by numbers:
//!
//! - each flush gets a number when it begins, counting from 1;
//! - an entry is stamped with the number of the flush that began last before it was queued;
//! - once a flush with a higher number is confirmed, it began after the entry was queued, so the entry's
//!   translation is gone and its address may be used again. A flush that fails is just never confirmed.
//!
//! Memory ordering. A flush must not begin before the hardware can see the cleared page-table entries of
//! everything that it will be taken to cover. [`DeferredQueue::begin_flush`] therefore takes its number first
//! and then takes and releases each queue's lock once. A CPU that queued an entry under its lock *before*
//! that visit has its earlier stores made visible by the lock; one that queues *after* the visit sees the
//! new number, again by the lock, so its stamp says that this flush does not cover it. The fast path needs no
//! fence and writes no line that another CPU writes, except while a flush goes on.
//!
//! Queues that no CPU has used are not visited. A CPU *announces* its queue with its first entry, and then looks at
//! the number (and at the policy); a flush takes its number, and then looks who is announced. With a fence between
//! the two on both sides, one of them sees the other.

mod account;
mod ring;

use crate::addr::IovaRange;
use crate::exposure::{ByteTime, Bytes};
use crate::percpu::PerCpu;
use crate::platform::LocalSlot;
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, fence};

use ring::{Entry, Ring};

/// Entries that one CPU's queue holds: when it is full, every CPU's is flushed.
pub const QUEUE_ENTRIES: usize = if cfg!(loom) { 2 } else { 256 };

/// Entries of the one queue that all CPUs share where flushes are expensive: as many as Linux has in that case
/// since 2023 (its `dma-iommu` driver's single queue).
pub const SHARED_ENTRIES: usize = if cfg!(loom) { 4 } else { 32_768 };

/// How many [`reclaim_slice`](DeferredQueue::reclaim_slice) hands out at the most.
pub const SLICE: usize = 64;

/// What became of a range that was to be deferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a range that was not queued must be flushed, a timer asked for must be set"]
pub enum Deferred {
    /// It waits. The queue's timer is running.
    Queued,
    /// It waits, and the caller must see to it that [`DeferredQueue::timer`] is called when this window ends.
    QueuedFirst {
        /// The window in nanoseconds.
        window_ns: u64,
    },
    /// There was no room: the caller flushes and tries again.
    Full,
    /// It must not wait any more: the caller flushes.
    Refused,
}

/// A range whose page-table entries are cleared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cleared {
    /// The pages.
    pub range: IovaRange,
    /// How many of their bytes are a buffer's. The others are its neighbours.
    pub used: u64,
}

impl Cleared {
    fn bytes(&self) -> Bytes {
        Bytes { used: self.used, neighbour: self.range.len().saturating_sub(self.used) }
    }
}

/// The queues of all CPUs and the numbers that tell which entries are safe.
#[derive(Debug)]
pub struct DeferredQueue {
    /// The last is shared: by callers without a slot, or by all.
    rings: PerCpu<Mutex<Ring>>,
    /// From the first on, so many queues of CPUs have been used.
    announced: AtomicUsize,
    /// The number of the flush that began last.
    begun: AtomicU64,
    /// The highest number of a flush that is confirmed.
    confirmed: AtomicU64,
}

impl DeferredQueue {
    /// Empty queues for `slots` CPUs, 256 entries each. All memory they ever need is allocated here.
    pub fn per_cpu(slots: usize) -> Self {
        Self::new(slots, QUEUE_ENTRIES)
    }

    /// One queue of 32,768 entries (1 MiB, allocated here) for all CPUs: few flushes, and a lock that all of them
    /// take.
    pub fn shared() -> Self {
        Self::new(0, SHARED_ENTRIES)
    }

    fn new(slots: usize, entries: usize) -> Self {
        Self {
            rings: PerCpu::new(slots, || Mutex::new(Ring::new(entries))),
            announced: AtomicUsize::new(0),
            begun: AtomicU64::new(0),
            confirmed: AtomicU64::new(0),
        }
    }

    /// Queues `cleared`, whose page-table entries the caller has cleared, until a flush covers it: for `window`,
    /// which is asked for under the queue's lock, or not at all where that says `None`.
    ///
    /// Whoever makes `window` say `None` (or less) and flushes *then* can be sure: what was queued before is covered
    /// by that flush, as it takes each queue's lock, and what comes after sees the change.
    ///
    /// First hands the oldest entry of this CPU to `reclaim`, if it became safe. `clock` is read now and then. O(1),
    /// allocates nothing.
    #[inline]
    pub fn push(
        &self,
        slot: Option<&LocalSlot<'_>>,
        cleared: Cleared,
        window: impl FnOnce() -> Option<u64>,
        clock: impl FnOnce() -> u64,
        reclaim: impl FnMut(IovaRange),
    ) -> Deferred {
        let mut ring = self.rings.get(slot).lock();
        // One for each that is queued: the price is spread evenly, and the CPU's address cache gets back what the next
        // map takes out, not a flood.
        ring.pop(self.confirmed()).into_iter().for_each(reclaim);
        if ring.is_full() {
            return Deferred::Full;
        }
        if let (false, Some(slot)) = (ring.announced, slot) {
            self.announce(slot.index());
            ring.announced = true;
        }
        let Some(window_ns) = window() else {
            return Deferred::Refused;
        };
        // Relaxed: the ring's lock, or the fence of the announcement, orders this against `begin_flush`.
        let stamp = self.begun.load(Ordering::Relaxed);
        ring.push(Entry { range: cleared.range, stamp });
        ring.account.queued(cleared.bytes(), clock);
        if ring.timer_ns <= window_ns {
            return Deferred::Queued;
        }
        ring.timer_ns = window_ns;
        Deferred::QueuedFirst { window_ns }
    }

    /// Begins a flush and returns its number: what is queued by now will be covered by a domain-wide
    /// invalidation that the caller submits *after* this call. O(CPUs that ever queued), takes each one's lock in turn.
    pub fn begin_flush(&self) -> u64 {
        let number = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
        // Between the number and who is announced.
        fence(Ordering::SeqCst);
        self.used().for_each(|ring| ring.lock().account.begin(number));
        number
    }

    #[cold]
    fn announce(&self, index: usize) {
        self.announced.fetch_max(index.saturating_add(1), Ordering::Relaxed);
        // Between the announcement and the number.
        fence(Ordering::SeqCst);
    }

    /// The queues that may hold anything.
    fn used(&self) -> impl Iterator<Item = &Mutex<Ring>> {
        let shared = self.rings.len() - 1;
        let own = self.announced.load(Ordering::Relaxed).min(shared);
        self.rings.iter().take(own).chain(self.rings.at(shared))
    }

    /// The hardware has confirmed the invalidation of the flush that `begin_flush` numbered so. O(CPUs), takes
    /// each queue's lock in turn.
    pub fn confirm_flush(&self, number: u64, now_ns: u64) {
        // Release: whoever acts on the number acts after the confirmation.
        self.confirmed.fetch_max(number, Ordering::Release);
        self.used().for_each(|ring| ring.lock().account.confirm(number, now_ns));
    }

    /// The window of some CPU has ended. Whether anything waits, so that a flush is due. O(CPUs).
    ///
    /// From here on the next entry of each CPU asks for a timer again.
    pub fn timer(&self) -> bool {
        let confirmed = self.confirmed();
        // Who announces a queue and then finds a timer running that has just ended must be seen here, however little
        // the platform's timer orders: nobody else would come.
        fence(Ordering::SeqCst);
        self.used().fold(false, |due, ring| {
            let mut ring = ring.lock();
            ring.timer_ns = u64::MAX;
            due | ring.waits(confirmed)
        })
    }

    /// Whether any entry still waits for a flush. O(CPUs).
    pub fn is_pending(&self) -> bool {
        let confirmed = self.confirmed();
        self.used().any(|ring| ring.lock().waits(confirmed))
    }

    /// How many queues there are: one for each CPU and one more, or one for all.
    pub fn queues(&self) -> usize {
        self.rings.len()
    }

    /// The queue that belongs to the CPU of slot `index` alone, if there is one.
    pub fn queue_of(&self, index: usize) -> Option<usize> {
        (index < self.queues() - 1).then_some(index)
    }

    /// Hands up to 64 safe entries of one queue to `reclaim`, under its lock: the space is exhausted, or its CPU is
    /// gone. Whether there may be more.
    pub fn reclaim_slice(&self, queue: usize, reclaim: impl FnMut(IovaRange)) -> bool {
        let Some(ring) = self.rings.at(queue) else {
            return false;
        };
        let mut ring = ring.lock();
        let confirmed = self.confirmed();
        let safe = core::iter::from_fn(|| ring.pop(confirmed)).take(SLICE);
        safe.map(reclaim).count() == SLICE
    }

    /// Byte-nanoseconds of all that has waited up to `now_ns`, and the longest that anything did.
    pub(crate) fn exposure(&self, now_ns: u64) -> (ByteTime, u64) {
        let mut sum = (ByteTime::default(), 0);
        for ring in self.used() {
            let (time, longest_ns) = ring.lock().account.total(now_ns);
            sum.0 += time;
            sum.1 = longest_ns.max(sum.1);
        }
        sum
    }

    #[inline]
    fn confirmed(&self) -> u64 {
        // Acquire: pairs with `confirm_flush`.
        self.confirmed.load(Ordering::Acquire)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
