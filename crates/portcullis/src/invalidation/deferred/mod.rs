//! Ranges that are unmapped but not yet forgotten by the hardware: the queues of *lazy* protection.
//!
//! Each CPU has a queue of its own, or all share a long one where flushes are expensive. One domain-wide invalidation, a
//! *flush*, covers what any CPU has queued. Which entries those are is told by numbers:
//!
//! - each flush gets a number when it begins, counting from 1;
//! - a queue is cut into *segments*, four to a full one. When one is closed it is stamped with the number of the flush that
//!   began last before;
//! - once a flush with a higher number is confirmed, it began after the segment was closed, so its translations are
//!   gone and its addresses may be used again. A flush that fails is just never confirmed.
//!
//! So a CPU looks at what flushes write once per segment, whether it flushes itself or others do; and a flush that a full queue
//! asks for looks at no other queue. What must reach every entry at once (an explicit flush, a timer, a change of
//! policy) *visits* all queues instead, and closes what is open there.
//!
//! Memory ordering. A flush must not begin before the hardware can see the cleared page-table entries of everything
//! that it will be taken to cover. Whoever closes a segment has them before a `SeqCst` fence, and the load of the stamp
//! after it; a flush takes its number, fences, and then has the hardware invalidate. Of the two fences one is first: if the
//! segment's, the flush and its hardware see the entries cleared; if the flush's, the load sees its number, so the stamp says
//! that this flush does not cover the segment.
//!
//! A queue is used by its CPU without a lock, and by a visitor while the CPU is kept out: see
//! [`Owned`]. What the CPU did in its turns, and before them, is seen by the visitor; turns after the visit see what
//! the visitor did and saw before it, a new policy for one. Meanwhile the CPU uses the queue that is shared, under its lock.
//!
//! Queues that no CPU has used are not visited. A CPU *announces* its queue with its first entry, and then looks at
//! the number (and at the policy); a visitor does what it has to tell first, and then looks who is announced. With a fence
//! between the two on both sides, one of them sees the other.

mod account;
mod ring;

use crate::addr::IovaRange;
use crate::exposure::{ByteTime, Bytes};
use crate::percpu::{CachePadded, Owned};
use crate::platform::{LocalSlot, Platform};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, fence};

use ring::Ring;

/// Entries that one CPU's queue holds: when it is full, every CPU's is flushed.
pub const QUEUE_ENTRIES: usize = if cfg!(loom) { 8 } else { 256 };

/// Entries of the one queue that all CPUs share where flushes are expensive: as many as Linux has in that case
/// since 2023 (its `dma-iommu` driver's single queue).
pub const SHARED_ENTRIES: usize = if cfg!(loom) { 8 } else { 32_768 };

/// Ranges that are taken back at once, or given back with one slot, at the most.
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
///
/// One value is used with the slots of one platform.
#[derive(Debug)]
pub struct DeferredQueue {
    /// Those of CPUs.
    own: Owned<Ring>,
    /// That of callers without one, or of all.
    shared: Mutex<Ring>,
    flushes: CachePadded<Flushes>,
    announced: CachePadded<Announced>,
}

/// What flushes write, and each CPU reads once per segment.
#[derive(Debug)]
struct Flushes {
    /// The number of the flush that began last.
    begun: AtomicU64,
    /// The highest number of a flush that is confirmed, and when one was.
    confirmed: AtomicU64,
    confirmed_ns: AtomicU64,
}

/// What is read with each entry, and written hardly ever.
#[derive(Debug)]
struct Announced {
    /// From the first on, this many queues of CPUs have been used.
    queues: AtomicUsize,
    /// How many timers were to be asked for, and were not.
    timers_lost: AtomicU64,
}

impl DeferredQueue {
    /// Empty queues for `slots` CPUs, 256 entries each. All memory they ever need is allocated here.
    pub fn per_cpu(slots: usize) -> Self {
        Self::new(slots, QUEUE_ENTRIES)
    }

    /// One queue of 32,768 entries (512 KiB, allocated here) for all CPUs: few flushes, and a lock that all of them
    /// take.
    pub fn shared() -> Self {
        Self::new(0, SHARED_ENTRIES)
    }

    fn new(slots: usize, entries: usize) -> Self {
        let number = || AtomicU64::new(0);
        let flushes = Flushes { begun: number(), confirmed: number(), confirmed_ns: number() };
        let announced = Announced { queues: AtomicUsize::new(0), timers_lost: number() };
        Self {
            own: Owned::new(slots, || Ring::new(entries)),
            shared: Mutex::new(Ring::new(entries)),
            flushes: CachePadded(flushes),
            announced: CachePadded(announced),
        }
    }

    /// Queues `cleared`, whose page-table entries the caller has cleared, until a flush covers it: for `window`,
    /// which is asked for in the queue's turn (or under its lock), or not at all where that says `None`.
    ///
    /// Whoever makes `window` say `None` (or less), [visits](Self::close) and flushes *then* can be sure: what was queued
    /// before is covered by that flush, and what comes after sees the change.
    ///
    /// First hands the oldest entry of this CPU to `reclaim`, if it is known to be safe. `clock` is read now and then. O(1),
    /// allocates nothing.
    #[inline]
    pub fn push(
        &self,
        slot: Option<&LocalSlot<'_>>,
        cleared: Cleared,
        window: impl Fn() -> Option<u64>,
        clock: impl Fn() -> u64,
        reclaim: impl FnMut(IovaRange),
    ) -> Deferred {
        self.push_any(slot, (Some(cleared.range), cleared.bytes()), window, clock, reclaim)
    }

    /// The same for `bytes` whose addresses, if there are any to give back, are not all of theirs: what has no address is
    /// counted, and flushed, all the same.
    #[inline]
    pub(crate) fn push_any(
        &self,
        slot: Option<&LocalSlot<'_>>,
        cleared: (Option<IovaRange>, Bytes),
        window: impl Fn() -> Option<u64>,
        clock: impl Fn() -> u64,
        mut reclaim: impl FnMut(IovaRange),
    ) -> Deferred {
        let index = slot.map(LocalSlot::index);
        let own = |ring: &Ring| self.push_to(ring, index, cleared, &window, &clock, &mut reclaim);
        match self.own.with(slot, own) {
            Some(deferred) => deferred,
            None => self.push_to(&self.shared.lock(), None, cleared, &window, &clock, &mut reclaim),
        }
    }

    #[inline]
    fn push_to(
        &self,
        ring: &Ring,
        index: Option<usize>,
        (range, bytes): (Option<IovaRange>, Bytes),
        window: impl Fn() -> Option<u64>,
        clock: impl Fn() -> u64,
        mut reclaim: impl FnMut(IovaRange),
    ) -> Deferred {
        // One for each that is queued: the price is spread evenly, and the CPU's address cache gets back what the next
        // map takes out, not a flood.
        ring.pop(&mut reclaim);
        if ring.is_full() {
            // There may be a flush, anybody's, that it has not heard of.
            self.hear(ring);
            if !ring.pop(&mut reclaim) {
                return Deferred::Full;
            }
        }
        if let Some(index) = index
            && !ring.is_announced()
        {
            self.announce(index);
            ring.be_announced();
        }
        let Some(window_ns) = window() else {
            return Deferred::Refused;
        };
        if ring.push(range, bytes, clock) {
            self.close_segment(ring);
        }
        // Relaxed: it was lost before this one was queued, or the next one sees it.
        let lost = self.announced.timers_lost.load(Ordering::Relaxed);
        match ring.wants_timer(window_ns, lost) {
            true => Deferred::QueuedFirst { window_ns },
            false => Deferred::Queued,
        }
    }

    /// Closes the open segment of a ring that the caller has to itself, and hears of what is confirmed.
    #[cold]
    fn close_segment(&self, ring: &Ring) {
        // Between the entries, which were cleared before, and the number: see the module's comment.
        fence(Ordering::SeqCst);
        ring.close(self.flushes.begun.load(Ordering::Relaxed));
        self.hear(ring);
    }

    /// Tells a ring that the caller has to itself what is confirmed.
    fn hear(&self, ring: &Ring) {
        // Acquire: pairs with `confirm`.
        let confirmed = self.flushes.confirmed.load(Ordering::Acquire);
        ring.confirm(confirmed, self.flushes.confirmed_ns.load(Ordering::Relaxed));
    }

    /// Visits all queues and closes what is open: all that was queued before is covered by a flush that
    /// [begins](Self::begin_flush) after the call. Costs and context: as for each visit, one barrier of all CPUs and a wait for the
    /// turns of those whose queues are in use, O(1) each. The caller holds no lock and no slot.
    pub fn close<P: Platform>(&self, platform: &P) {
        self.visit(platform, |ring| {
            self.close_segment(ring);
        });
    }

    /// Begins a flush and returns its number: it covers the segments that are closed by now. The caller submits a
    /// domain-wide invalidation *after* this call. O(1).
    pub fn begin_flush(&self) -> u64 {
        let number = self.flushes.begun.fetch_add(1, Ordering::Relaxed) + 1;
        // Between the number and the invalidation: see the module's comment.
        fence(Ordering::SeqCst);
        number
    }

    #[cold]
    fn announce(&self, index: usize) {
        self.announced.queues.fetch_max(index.saturating_add(1), Ordering::Relaxed);
        // Between the announcement and the number.
        fence(Ordering::SeqCst);
    }

    /// The hardware has confirmed the invalidation of the flush that `begin_flush` numbered so. Queues hear of it with
    /// their next segments, or at once when they are [visited](Self::tell). O(1).
    pub fn confirm_flush(&self, number: u64, now_ns: u64) {
        self.flushes.confirmed_ns.fetch_max(now_ns, Ordering::Relaxed);
        // Release: whoever acts on the number acts after the confirmation.
        self.flushes.confirmed.fetch_max(number, Ordering::Release);
    }

    /// Visits all queues, and tells them what is confirmed. Cost and context: see [`close`](Self::close).
    pub fn tell<P: Platform>(&self, platform: &P) {
        self.visit(platform, |ring| self.hear(ring));
    }

    /// The window of some CPU has ended. Returns whether anything waits, so that a flush is due. A visit: see
    /// [`close`](Self::close).
    ///
    /// From here on the next entry of each CPU asks for a timer again.
    pub fn timer<P: Platform>(&self, platform: &P) -> bool {
        let mut due = false;
        self.visit(platform, |ring| {
            ring.stop_timer();
            self.hear(ring);
            due |= ring.waits();
        });
        due
    }

    /// A timer that was asked for is not set: the next entry of each queue asks for one. O(1).
    pub fn lose_timer(&self) {
        self.announced.timers_lost.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether any entry still waits for a flush. A visit: see [`close`](Self::close).
    pub fn is_pending<P: Platform>(&self, platform: &P) -> bool {
        let mut pending = false;
        self.visit(platform, |ring| {
            self.hear(ring);
            pending |= ring.waits();
        });
        pending
    }

    /// Hands all safe entries to `reclaim`: those of CPUs' queues, or of the one of the CPU of slot `only`, with no slot
    /// held, and no more of it used meanwhile. Those of the queue that is shared are handed over in slices of 64, with a
    /// slot and under its lock.
    ///
    /// The space is exhausted, or a CPU is gone. A visit: see [`close`](Self::close).
    pub fn reclaim<P: Platform>(
        &self,
        platform: &P,
        only: Option<usize>,
        mut reclaim: impl FnMut(Option<&LocalSlot<'_>>, IovaRange),
    ) {
        let own = |_, ring: &Ring| {
            self.hear(ring);
            let mut slice =
                |slot: Option<&LocalSlot<'_>>| Self::pop_slice(ring, |range| reclaim(slot, range));
            while platform.with_slot(&mut slice) {}
        };
        match only {
            Some(_) => return self.own.with_others(platform, only, own),
            None => self.own.with_first(platform, self.used(), own),
        }
        let mut slice = |slot: Option<&LocalSlot<'_>>| {
            let ring = self.shared.lock();
            self.hear(&ring);
            Self::pop_slice(&ring, |range| reclaim(slot, range))
        };
        while platform.with_slot(&mut slice) {}
    }

    /// Takes out up to 64 entries that are safe. Returns whether there may be more.
    fn pop_slice(ring: &Ring, mut reclaim: impl FnMut(IovaRange)) -> bool {
        (0..SLICE).all(|_| ring.pop(&mut reclaim))
    }

    /// Byte-nanoseconds of all that has waited up to `now_ns`, and the longest that anything did. A visit: see
    /// [`close`](Self::close).
    pub(crate) fn exposure<P: Platform>(&self, platform: &P, now_ns: u64) -> (ByteTime, u64) {
        let mut sum = (ByteTime::default(), 0);
        self.visit(platform, |ring| {
            self.hear(ring);
            let (time, longest_ns) = ring.exposure(now_ns);
            sum.0 += time;
            sum.1 = longest_ns.max(sum.1);
        });
        sum
    }

    /// Calls `f` with each queue that may hold anything, alone with it.
    fn visit<P: Platform>(&self, platform: &P, mut f: impl FnMut(&Ring)) {
        // Between what the caller has to tell and who is announced.
        fence(Ordering::SeqCst);
        self.own.with_first(platform, self.used(), |_, ring| f(ring));
        // Last: a CPU that was kept out of its own queue has used this one.
        platform.with_slot(|_| f(&self.shared.lock()));
    }

    /// Whether the CPU of slot `index` has a queue of its own.
    pub fn has_queue(&self, index: usize) -> bool {
        index < self.own.slots()
    }

    /// How many queues of CPUs, from the first on, may hold anything.
    fn used(&self) -> usize {
        self.announced.queues.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
