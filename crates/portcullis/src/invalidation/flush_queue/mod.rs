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
//! that it will be taken to cover. The CPU that closes a segment has them before a `SeqCst` fence, and the load of the stamp
//! after it; a flush takes its number, fences, and then has the hardware invalidate. Of the two fences one is first: if the
//! segment's, the flush and its hardware see the entries cleared; if the flush's, the load sees its number, so the stamp says
//! that this flush does not cover the segment.
//!
//! A queue is used by its CPU without a lock, in the turn in which the translations were cleared, and by a visitor while the CPU
//! is kept out of it, and of nothing else: see [`TurnLocal::apart`]. What the CPU did in its turns, and before them, is seen by the
//! visitor; turns after the visit see what the visitor did and saw before it, a new policy for one. Meanwhile the CPU uses the
//! queue that is shared, under its lock.
//!
//! Queues that no CPU has used are not visited. A CPU *announces* its queue with its first entry, and then looks at
//! the number (and at the policy, again); a visitor does what it has to tell first, and then looks who is announced. With a
//! fence between the two on both sides, one of them sees the other.

mod account;
mod ring;

use alloc::sync::Arc;

use crate::addr::IovaRange;
use crate::exposure::{ByteTime, Bytes};
use crate::percpu::{CachePadded, Marks, Turn, TurnLocal};
use crate::platform::{LocalCpu, Platform};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, fence};

use ring::Ring;

/// Entries that one CPU's queue holds: when it is full, every CPU's is flushed. (For the model checker a segment has four, of
/// which the second takes no more than some stores.)
pub const QUEUE_ENTRIES: usize = if cfg!(loom) { 16 } else { 256 };

/// Entries of the one queue that all CPUs share where flushes are expensive: as many as Linux has in that case
/// since 2023 (its `dma-iommu` driver's single queue).
pub const SHARED_ENTRIES: usize = if cfg!(loom) { 8 } else { 32_768 };

/// The most ranges that a call takes back, or gives back, while it holds one CPU.
pub const SLICE: usize = 64;

/// What became of a range that was to be deferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a range that was not queued must be flushed, a timer asked for must be set"]
pub enum Pushed {
    /// It waits. The queue's timer is running.
    Queued,
    /// It waits, and the caller must see to it that [`FlushQueue::timer`] is called when this window ends.
    QueuedFirst {
        /// The window in nanoseconds.
        window_ns: u64,
    },
    /// There was no room: the caller flushes and tries again.
    Full,
    /// It must not wait any more: the caller flushes.
    Refused,
}

impl Pushed {
    /// Whether it waits.
    #[inline]
    pub(crate) const fn is_queued(self) -> bool {
        matches!(self, Self::Queued | Self::QueuedFirst { .. })
    }
}

/// A range whose page-table entries are cleared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cleared {
    /// The pages.
    pub range: IovaRange,
    /// How many of their bytes are beside a buffer, all others being its own.
    pub neighbours: u64,
}

/// What waits for a flush: bytes, and the addresses that are given back when it is over, if there are any.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    pub(crate) range: Option<IovaRange>,
    pub(crate) bytes: Bytes,
}

impl Cleared {
    /// All of it.
    #[inline]
    pub fn waiting(&self) -> Waiting {
        Waiting { range: Some(self.range), bytes: self.bytes() }
    }

    #[inline]
    fn bytes(&self) -> Bytes {
        Bytes { used: self.range.len().saturating_sub(self.neighbours), neighbour: self.neighbours }
    }
}

/// The queues of all CPUs and the numbers that tell which entries are safe.
///
/// One value is used with the CPUs of one platform.
#[derive(Debug)]
pub struct FlushQueue {
    /// Those of CPUs.
    own: TurnLocal<Ring, true>,
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

impl FlushQueue {
    /// Empty queues for `cpus` CPUs, of those that have `marks`, 256 entries each, to be used in turns of these marks. All
    /// memory they ever need is allocated here.
    pub fn per_cpu(marks: Arc<Marks>, cpus: usize) -> Self {
        Self::new(marks, cpus, QUEUE_ENTRIES)
    }

    /// One queue of 32,768 entries (512 KiB, allocated here) for all CPUs: few flushes, and a lock that all of them
    /// take.
    pub fn shared() -> Self {
        Self::new(Arc::new(Marks::new(0)), 0, SHARED_ENTRIES)
    }

    fn new(marks: Arc<Marks>, cpus: usize, entries: usize) -> Self {
        let number = || AtomicU64::new(0);
        let flushes = Flushes { begun: number(), confirmed: number(), confirmed_ns: number() };
        let announced = Announced { queues: AtomicUsize::new(0), timers_lost: number() };
        Self {
            own: TurnLocal::apart(marks, cpus, |_| Ring::new(entries)),
            shared: Mutex::new(Ring::new(entries)),
            flushes: CachePadded(flushes),
            announced: CachePadded(announced),
        }
    }

    /// Queues `cleared`, whose page-table entries the caller has cleared, until a flush covers it: for `window`,
    /// which is asked for in the CPU's turn, or under the lock of the queue that is shared, or not at all where that says `None`.
    ///
    /// A caller that makes `window` say `None` (or less), [visits](Self::close) and flushes *then* can be sure: what was queued
    /// before is covered by that flush, and what comes after sees the change.
    ///
    /// Also takes out the queue's oldest entry, if it is known to be safe: its addresses are the caller's to give back. `clock` is
    /// read now and then. O(1), allocates nothing.
    ///
    /// `None`, with nothing changed, where the CPU has no queue of its own, or a visitor has it: the caller ends its turn, and goes
    /// to the queue that is [shared](Self::push_shared). A turn waits for no lock, as visitors wait for turns.
    #[inline(always)]
    pub fn push(
        &self,
        turn: &Turn<'_>,
        cleared: Cleared,
        window: impl Fn() -> Option<u64>,
        clock: impl Fn() -> u64,
    ) -> Option<(Pushed, Option<IovaRange>)> {
        let Some(window_ns) = window() else {
            return Some((Pushed::Refused, None));
        };
        let ring = self.own.get(turn)?;
        match ring.push_fast(cleared.range, cleared.bytes(), window_ns, self.timers_lost()) {
            Some(oldest) => Some((Pushed::Queued, oldest)),
            None => self.push_own(turn, cleared.waiting(), window, clock),
        }
    }

    /// The same for bytes whose addresses, if there are any to give back, are not all of theirs: what has no address is
    /// counted, and flushed, all the same.
    #[cold]
    #[inline(never)]
    pub(crate) fn push_own(
        &self,
        turn: &Turn<'_>,
        waiting: Waiting,
        window: impl Fn() -> Option<u64>,
        clock: impl Fn() -> u64,
    ) -> Option<(Pushed, Option<IovaRange>)> {
        Some(self.push_to(self.own.get(turn)?, Some(turn.index()), waiting, window, clock))
    }

    /// The same in the queue that is shared, under its lock. The caller is in no turn, as visitors wait for turns; or no CPU has a
    /// queue of its own, so that they wait for none. The oldest entry's addresses go to
    /// `reclaim` under the lock, too: so who takes all back finds them in the queue, or given back.
    pub fn push_shared(
        &self,
        waiting: Waiting,
        window: impl Fn() -> Option<u64>,
        clock: impl Fn() -> u64,
        reclaim: impl FnMut(IovaRange),
    ) -> Pushed {
        let ring = self.shared.lock();
        let (pushed, oldest) = self.push_to(&ring, None, waiting, window, clock);
        oldest.into_iter().for_each(reclaim);
        pushed
    }

    fn push_to(
        &self,
        ring: &Ring,
        index: Option<usize>,
        Waiting { range, bytes }: Waiting,
        window: impl Fn() -> Option<u64>,
        clock: impl Fn() -> u64,
    ) -> (Pushed, Option<IovaRange>) {
        if !ring.has_room() {
            // There may be a flush, by any CPU, that it has not heard of.
            self.hear(ring);
            if !ring.has_room() {
                return (Pushed::Full, None);
            }
        }
        if let Some(index) = index
            && !ring.is_announced()
        {
            self.announce(index);
            ring.be_announced();
        }
        let Some(window_ns) = window() else {
            return (Pushed::Refused, None);
        };
        // One for each that is queued: the price is spread evenly, and the CPU's address cache gets back what the next
        // map takes out, not a flood.
        let (is_last, oldest) = ring.push(range, bytes, clock);
        if is_last {
            self.close_segment(ring);
        }
        let pushed = match ring.wants_timer(window_ns, self.timers_lost()) {
            true => Pushed::QueuedFirst { window_ns },
            false => Pushed::Queued,
        };
        (pushed, oldest)
    }

    /// Timers that were lost so far.
    #[inline]
    fn timers_lost(&self) -> u64 {
        // Relaxed: it was lost before this one was queued, or the next one sees it.
        self.announced.timers_lost.load(Ordering::Relaxed)
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
    /// turns of those whose queues are in use, O(1) each. The caller holds no lock and no CPU.
    pub fn close<P: Platform>(&self, platform: &P) {
        self.visit(platform, |ring| {
            self.close_segment(ring);
        });
    }

    /// The same for the queue of CPU `index` alone, which is being unplugged: one barrier of all CPUs and a wait for its turn.
    /// Returns whether anything waits there, so that a flush is due.
    pub fn close_of<P: Platform>(&self, platform: &P, index: usize) -> bool {
        let mut due = false;
        self.own.with_others(platform, Some(index), |_, ring| {
            self.close_segment(ring);
            due = ring.waits();
        });
        due
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
        // Release: a CPU that acts on the number acts after the confirmation.
        self.flushes.confirmed.fetch_max(number, Ordering::Release);
    }

    /// Visits all queues, and tells them what is confirmed. Cost and context: see [`close`](Self::close).
    pub fn tell<P: Platform>(&self, platform: &P) {
        self.visit(platform, |ring| self.hear(ring));
    }

    /// The window of some CPU has ended: [closes](Self::close) all queues, and returns whether anything waits there, so that a
    /// flush is due.
    ///
    /// From here on the next entry of each CPU asks for a timer again.
    pub fn timer<P: Platform>(&self, platform: &P) -> bool {
        let mut due = false;
        self.visit(platform, |ring| {
            ring.stop_timer();
            self.close_segment(ring);
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

    /// Hands all safe entries to `reclaim`: those of CPUs' queues, or of the one of CPU `only`, with no CPU
    /// held, and no more of it used meanwhile. Those of the queue that is shared are handed over in slices of 64, with a
    /// CPU and under its lock.
    ///
    /// The space is exhausted, or a CPU is gone. A visit: see [`close`](Self::close).
    pub fn reclaim<P: Platform>(
        &self,
        platform: &P,
        only: Option<usize>,
        mut reclaim: impl FnMut(Option<&LocalCpu<'_>>, IovaRange),
    ) {
        let own = |_, ring: &Ring| {
            self.hear(ring);
            let mut slice = |cpu: Option<&LocalCpu<'_>>| Self::pop_slice(ring, |range| reclaim(cpu, range));
            while platform.with_cpu(&mut slice) {}
        };
        match only {
            Some(_) => return self.own.with_others(platform, only, own),
            None => self.own.with_first(platform, self.used(), own),
        }
        let mut slice = |cpu: Option<&LocalCpu<'_>>| {
            let ring = self.shared.lock();
            self.hear(&ring);
            Self::pop_slice(&ring, |range| reclaim(cpu, range))
        };
        while platform.with_cpu(&mut slice) {}
    }

    /// Takes out up to 64 entries that are safe. Returns whether there may be more.
    fn pop_slice(ring: &Ring, mut reclaim: impl FnMut(IovaRange)) -> bool {
        (0..SLICE).all(|_| ring.pop().map(|range| range.into_iter().for_each(&mut reclaim)).is_some())
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
        platform.with_cpu(|_| f(&self.shared.lock()));
    }

    /// Whether CPU `index` has a queue of its own.
    pub fn has_queue(&self, index: usize) -> bool {
        index < self.own.cpus()
    }

    /// How many queues of CPUs, from the first on, may hold anything.
    fn used(&self) -> usize {
        self.announced.queues.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
