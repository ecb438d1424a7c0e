//! Ranges that are unmapped but not yet forgotten by the hardware: the queues of *lazy* protection.
//!
//! Each CPU has a queue of its own. One domain-wide invalidation, a *flush*, covers every entry that any
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

use crate::addr::IovaRange;
use crate::percpu::PerCpu;
use crate::platform::LocalSlot;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Entries that one CPU's queue holds: when it is full, every CPU's is flushed.
pub const QUEUE_ENTRIES: usize = if cfg!(loom) { 2 } else { 256 };

/// How many addresses one unmap at most takes back from its CPU's queue. One for each that it queues: the
/// price is spread evenly, and the CPU's address cache gets back what the next map takes out, not a flood.
const RECLAIM_SLICE: usize = 1;

/// What became of a range that was to be deferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a range that was not queued must be flushed, a timer asked for must be set"]
pub enum Deferred {
    /// It waits. The CPU's timer is running.
    Queued,
    /// It waits, and the caller must see to it that [`DeferredQueue::timer`] is called when the window ends.
    QueuedFirst,
    /// There was no room: the caller flushes and tries again.
    Full,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    range: IovaRange,
    stamp: u64,
}

/// One CPU's entries, oldest first, in a ring.
#[derive(Debug)]
struct Ring {
    entries: [Option<Entry>; QUEUE_ENTRIES],
    head: usize,
    len: usize,
    timer_set: bool,
}

/// The queues of all CPUs and the numbers that tell which entries are safe.
#[derive(Debug)]
pub struct DeferredQueue {
    rings: PerCpu<Mutex<Ring>>,
    /// The number of the flush that began last.
    begun: AtomicU64,
    /// The highest number of a flush that is confirmed.
    confirmed: AtomicU64,
}

impl DeferredQueue {
    /// Empty queues for `slots` CPUs, 256 entries each. All memory they ever need is allocated here.
    pub fn new(slots: usize) -> Self {
        let ring = || Ring { entries: [None; QUEUE_ENTRIES], head: 0, len: 0, timer_set: false };
        Self {
            rings: PerCpu::new(slots, || Mutex::new(ring())),
            begun: AtomicU64::new(0),
            confirmed: AtomicU64::new(0),
        }
    }

    /// Queues `range`, whose page-table entries the caller has cleared, until a flush covers it.
    ///
    /// First hands the oldest entry of this CPU to `reclaim`, if it became safe. O(1), allocates nothing.
    pub fn push(
        &self,
        slot: Option<&LocalSlot<'_>>,
        range: IovaRange,
        reclaim: impl FnMut(IovaRange),
    ) -> Deferred {
        let mut ring = self.rings.get(slot).lock();
        self.reclaim_from(&mut ring, RECLAIM_SLICE, reclaim);
        if ring.len == QUEUE_ENTRIES {
            return Deferred::Full;
        }
        // Relaxed: the ring's lock orders this against `begin_flush`, as the module's comment says.
        let stamp = self.begun.load(Ordering::Relaxed);
        let tail = (ring.head + ring.len) % QUEUE_ENTRIES;
        ring.entries[tail] = Some(Entry { range, stamp });
        ring.len += 1;
        if ring.timer_set {
            return Deferred::Queued;
        }
        ring.timer_set = true;
        Deferred::QueuedFirst
    }

    /// Begins a flush and returns its number: what is queued by now will be covered by a domain-wide
    /// invalidation that the caller submits *after* this call. O(CPUs), takes each queue's lock in turn.
    pub fn begin_flush(&self) -> u64 {
        let number = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
        self.rings.iter().for_each(|ring| drop(ring.lock()));
        number
    }

    /// The hardware has confirmed the invalidation of the flush that `begin_flush` numbered so.
    pub fn confirm_flush(&self, number: u64) {
        // Release: whoever acts on the number acts after the confirmation.
        self.confirmed.fetch_max(number, Ordering::Release);
    }

    /// The window of some CPU has ended. Whether anything waits, so that a flush is due. O(CPUs).
    ///
    /// From here on the next entry of each CPU asks for a timer again.
    pub fn timer(&self) -> bool {
        self.rings.iter().fold(false, |due, ring| {
            let mut ring = ring.lock();
            ring.timer_set = false;
            due | self.waits(&ring)
        })
    }

    /// Whether any entry still waits for a flush. O(CPUs).
    pub fn is_pending(&self) -> bool {
        self.rings.iter().any(|ring| self.waits(&ring.lock()))
    }

    /// Hands every safe entry of every CPU to `reclaim`: the space is exhausted, or a CPU is gone.
    /// O(CPUs x 256), under one queue's lock at a time.
    pub fn reclaim_all(&self, mut reclaim: impl FnMut(IovaRange)) {
        for ring in self.rings.iter() {
            self.reclaim_from(&mut ring.lock(), QUEUE_ENTRIES, &mut reclaim);
        }
    }

    fn waits(&self, ring: &Ring) -> bool {
        let newest = ring.len.checked_sub(1).map(|last| (ring.head + last) % QUEUE_ENTRIES);
        newest.and_then(|at| ring.entries[at]).is_some_and(|entry| !self.is_safe(&entry))
    }

    fn is_safe(&self, entry: &Entry) -> bool {
        // Acquire: pairs with `confirm_flush`.
        entry.stamp < self.confirmed.load(Ordering::Acquire)
    }

    fn reclaim_from(&self, ring: &mut Ring, most: usize, mut reclaim: impl FnMut(IovaRange)) {
        for _ in 0..most {
            // Stamps never decrease along the ring, so the first entry that waits ends the search.
            match ring.entries[ring.head] {
                Some(entry) if ring.len > 0 && self.is_safe(&entry) => {
                    ring.entries[ring.head] = None;
                    ring.head = (ring.head + 1) % QUEUE_ENTRIES;
                    ring.len -= 1;
                    reclaim(entry.range);
                }
                _ => break,
            }
        }
    }
}
