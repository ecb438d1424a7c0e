//! The queues of *lazy* protection: ranges that are unmapped but that the hardware may not have
//! forgotten yet. A queue gives a range back only when an invalidation of the domain is confirmed
//! that began after the range was queued.
//!
//! Each CPU has a queue of its own, or all share a long one where flushes are expensive. One
//! domain-wide invalidation, a *flush*, covers what any CPU has queued. Which entries it covers is
//! told by numbers:
//!
//! - each flush gets a number when it begins, counting from 1;
//! - a queue is cut into *segments*, four to a full queue. A segment that is closed is stamped with
//!   the number of the flush that has begun last;
//! - once a flush with a higher number is confirmed, the segment is *safe*: that flush began after
//!   the segment was closed, so its translations are gone and its addresses may be used again. A
//!   flush that fails is never confirmed.
//!
//! So a CPU looks at what flushes write once per segment, whether it flushes itself or others do;
//! and a flush that a full queue wants looks at no other queue. What must cover the entries of
//! segments that are open, too (an explicit flush, a timer, a change of policy) is a flush *of all
//! queues*. It *asks* with a number of its own, which each CPU reads with each entry that it
//! queues: one that finds it changed closes its segment first. What was queued before it asked is
//! safe when it is confirmed, whenever the segment is closed. So a flush of all queues looks at
//! none of them either.
//!
//! Memory ordering, of segments. A flush must not begin before the hardware can see the cleared
//! page-table entries of everything that it will be taken to cover. The CPU that closes a segment
//! has them before a `SeqCst` fence, and the load of the stamp after it; a flush takes its number,
//! fences, and then has the hardware invalidate. Of the two fences one is first: if the segment's,
//! the flush and its hardware see the entries cleared; if the flush's, the load sees its number, so
//! the stamp says that this flush does not cover the segment.
//!
//! Memory ordering, of a flush of all queues. It asks with a number and then waits for the turns
//! that are under way ([`TurnLocal::wait_for_first`]), before it has the hardware invalidate. A CPU
//! clears an entry before it queues it, and reads the number in the turn in which it does: either
//! the flush waits for that turn, or finds it over, and the hardware sees the entry cleared; or the
//! turn reads the new number, and the entry is not taken to be covered. In the queue that is
//! shared, its lock does what the turn does elsewhere: the flush takes it once between the two.
//!
//! A queue is used by its CPU without a lock, in the turn in which the translations were cleared;
//! and by a visitor, while the CPU is kept out of the queue but out of nothing else: see
//! [`TurnLocal::apart`]. What the CPU did in its turns, and before them, is seen by the visitor;
//! turns after the visit see what the visitor did and saw before it, a new policy for one.
//! Meanwhile the CPU uses the queue that is shared, under its lock.
//!
//! Queues that no CPU has used are not visited, nor their CPUs' turns waited for. A CPU *announces*
//! its queue with its first entry, and then looks at the numbers (and at the policy, again); a
//! visitor, or a flush, stores what it has to tell first, and then looks which queues are
//! announced. With a fence between the two on both sides, one of them sees the other.

mod account;
mod ring;

use core::mem::MaybeUninit;

use crate::addr::IovaRange;
use crate::exposure::{ByteTime, Bytes};
use crate::heap::{OutOfMemory, Shared, place_of, write_fields};
use crate::percpu::{CachePadded, Marks, Turn, TurnLocal};
use crate::platform::{LocalCpu, Platform};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, fence};

use ring::Ring;

/// The number of entries that one CPU's queue holds. A CPU that finds its queue full flushes, which
/// covers the closed segments of all queues. (For the model checker a segment has four entries, of
/// which the second takes no more than some stores.)
pub const QUEUE_ENTRIES: usize = if cfg!(loom) { 16 } else { 256 };

/// The number of entries of the one queue that all CPUs share where flushes are expensive: as many
/// as Linux has in that case since 2023 (its `dma-iommu` driver's single queue).
pub const SHARED_ENTRIES: usize = if cfg!(loom) { 8 } else { 32_768 };

/// The most ranges that a call takes back, or gives back, while it holds one CPU.
pub const SLICE: usize = 64;

/// What became of a range that was to be deferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a range that was not queued must be flushed, a timer asked for must be set"]
pub enum Pushed {
    /// The range waits. The queue's timer is running.
    Queued,
    /// The range waits. The caller must set a timer: when this window ends,
    /// [`FlushQueue::end_timers`] is to be called, and a flush of all queues to begin if anything
    /// waits.
    QueuedFirst {
        /// The window in nanoseconds.
        window_ns: u64,
    },
    /// There was no room: the caller flushes and tries again.
    Full,
    /// The range must not wait any more: the caller flushes.
    Refused,
}

impl Pushed {
    /// Whether the range waits.
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
    /// How many of their bytes lie beside a buffer; all others are the buffer's.
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
    /// The queues of CPUs.
    own: TurnLocal<Ring, true>,
    /// The queue of callers that have none of their own, or of all callers.
    shared: Mutex<Ring>,
    flushes: CachePadded<Flushes>,
    announced: CachePadded<Announced>,
}

/// A flush that has begun.
#[derive(Debug, Clone, Copy)]
#[must_use = "a flush that is not confirmed makes nothing safe"]
pub struct Flush {
    number: u64,
    /// The number with which it asked all queues. It is 0, with which no flush asks, for a flush
    /// that covers closed segments only.
    asked: u64,
}

/// What flushes write, and each CPU reads once per segment.
#[derive(Debug)]
struct Flushes {
    /// The number of the flush that began last.
    begun: AtomicU64,
    /// The highest number of a confirmed flush, the highest with which a confirmed flush asked, and
    /// the latest time at which a flush was confirmed.
    confirmed: AtomicU64,
    confirmed_asked: AtomicU64,
    confirmed_ns: AtomicU64,
}

/// What CPUs read with each entry. Flushes of all queues write it; all other writes are rare.
#[derive(Debug)]
struct Announced {
    /// Only queues of CPUs with numbers below this have been used.
    queues: AtomicUsize,
    /// The number that all queues were asked with last: to close what is open, and to look whether
    /// timers have ended.
    asked: AtomicU64,
    /// How many timers have come, or could not be asked for.
    timers_ended: AtomicU64,
}

/// Makes the queue that callers without one of their own share in `place`, where nothing is after an error.
#[inline(never)]
fn share(place: &mut MaybeUninit<Mutex<Ring>>, entries: usize) -> Result<(), OutOfMemory> {
    let mut ring = MaybeUninit::uninit();
    Ring::make_in(&mut ring, entries)?;
    // SAFETY: it was made there.
    place.write(Mutex::new(unsafe { ring.assume_init() }));
    Ok(())
}

impl FlushQueue {
    /// Makes empty queues of 256 entries for `cpus` CPUs, as far as these have one of the `marks`,
    /// in whose turns the queues are used. All memory that they ever need is allocated here.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn per_cpu(marks: Shared<Marks>, cpus: usize) -> Result<Self, OutOfMemory> {
        Self::new(marks, cpus, QUEUE_ENTRIES)
    }

    /// Makes one queue of 32,768 entries (512 KiB, allocated here) for all CPUs: flushes are few,
    /// and all CPUs take one lock.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn shared() -> Result<Self, OutOfMemory> {
        Self::new(Shared::new(Marks::new(0)?)?, 0, SHARED_ENTRIES)
    }

    fn new(marks: Shared<Marks>, cpus: usize, entries: usize) -> Result<Self, OutOfMemory> {
        let mut place = MaybeUninit::uninit();
        Self::make_in(&mut place, marks, (cpus, entries))?;
        // SAFETY: it was made there.
        Ok(unsafe { place.assume_init() })
    }

    /// As [`per_cpu`](Self::per_cpu), or as [`shared`](Self::shared) where there are to be no queues of CPUs, in `place`: for owners of which a
    /// stack has no room for two.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing is in the place then.
    pub(crate) fn make_for(
        place: &mut MaybeUninit<Self>,
        marks: Option<Shared<Marks>>,
        cpus: usize,
    ) -> Result<&mut Self, OutOfMemory> {
        match marks {
            Some(marks) => Self::make_in(place, marks, (cpus, QUEUE_ENTRIES)),
            None => Self::make_in(place, Shared::new(Marks::new(0)?)?, (0, SHARED_ENTRIES)),
        }
    }

    #[inline(never)]
    fn make_in(
        place: &mut MaybeUninit<Self>,
        marks: Shared<Marks>,
        (cpus, entries): (usize, usize),
    ) -> Result<&mut Self, OutOfMemory> {
        let number = || AtomicU64::new(0);
        let own = TurnLocal::apart_in(marks, cpus, |_, place| Ring::make_in(place, entries))?;
        let at = place.as_mut_ptr();
        // SAFETY: the field lies in the caller's place, and its place is used for this call alone.
        share(unsafe { place_of(&raw mut (*at).shared) }, entries)?;
        // SAFETY: each write is to a field in the caller's place, where the shared queue is already; then all of them are there.
        unsafe {
            write_fields!(
                at,
                made [shared],
                own: own,
                flushes: CachePadded(Flushes {
                    begun: number(),
                    confirmed: number(),
                    confirmed_asked: number(),
                    confirmed_ns: number(),
                }),
                announced: CachePadded(Announced {
                    queues: AtomicUsize::new(0),
                    asked: number(),
                    timers_ended: number(),
                }),
            );
            Ok(place.assume_init_mut())
        }
    }

    /// Queues `cleared`, whose page-table entries the caller has cleared, until a flush covers it.
    /// `window` says for how many nanoseconds it may wait; where that is `None`, nothing is queued.
    /// It is called in the CPU's turn, or under the lock of the queue that is shared.
    ///
    /// A caller that makes `window` say `None` (or less), and *then* [flushes all
    /// queues](Self::begin_flush_of_all) can be sure: what was queued before is covered by that
    /// flush, and what comes after sees the change.
    ///
    /// Also takes out the queue's oldest entry, if that is known to be safe: its addresses are the
    /// caller's to give back. `clock` is read now and then. O(1), allocates nothing.
    ///
    /// Returns `None`, with nothing changed, where the CPU has no queue of its own, or a visitor
    /// has it: the caller then ends its turn, and goes to the queue that is
    /// [shared](Self::push_shared). A turn waits for no lock, as visitors wait for turns.
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
        // Relaxed: the turn orders it. (See the module's comment.)
        let asked = self.announced.asked.load(Ordering::Relaxed);
        match ring.push_fast(cleared.range, cleared.bytes(), window_ns, asked) {
            Some(oldest) => Some((Pushed::Queued, oldest)),
            None => self.push_own(turn, cleared.waiting(), window, clock),
        }
    }

    /// As [`push`](Self::push), for any [`Waiting`]: what has no addresses to give back is counted,
    /// and flushed, all the same.
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

    /// As [`push`](Self::push), in the queue that is shared, under its lock, for which it may wait.
    /// The caller is in no turn, as visitors wait for turns; it may be in one where no CPU has a
    /// queue of its own, as visitors then wait for no turn. The oldest entry's addresses go to
    /// `reclaim` under the lock, too: so a caller that takes everything back finds them in the
    /// queue, or given back already.
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
        if let Some(index) = index
            && !ring.is_announced()
        {
            self.announce(index);
            ring.be_announced();
        }
        // Acquire: pairs with `end_timers`.
        let asked = self.announced.asked.load(Ordering::Acquire);
        if ring.asked() != asked {
            self.close_segment(ring);
            ring.set_asked(asked);
            self.hear(ring);
        }
        if !ring.has_room() {
            // There may be a flush, by any CPU, that the queue has not heard of.
            self.hear(ring);
            if !ring.has_room() {
                return (Pushed::Full, None);
            }
        }
        let Some(window_ns) = window() else {
            return (Pushed::Refused, None);
        };
        // One entry is taken out for each that is queued: so the price is spread evenly, and the
        // CPU's free list gets back what the next map takes out, not a flood.
        let (is_last, oldest) = ring.push(range, bytes, clock);
        if is_last {
            self.close_segment(ring);
            self.hear(ring);
        }
        // Relaxed: `asked` was loaded before, with `Acquire`, and that orders this load.
        let timers_ended = self.announced.timers_ended.load(Ordering::Relaxed);
        let pushed = match ring.wants_timer(window_ns, timers_ended) {
            true => Pushed::QueuedFirst { window_ns },
            false => Pushed::Queued,
        };
        (pushed, oldest)
    }

    /// Closes the open segment of a ring that the caller has to itself.
    #[cold]
    fn close_segment(&self, ring: &Ring) {
        // Between the entries, which were cleared before, and the number: see the module's comment.
        fence(Ordering::SeqCst);
        ring.close(self.flushes.begun.load(Ordering::Relaxed));
    }

    /// Tells a ring, which the caller has to itself, which flushes are confirmed.
    fn hear(&self, ring: &Ring) {
        // Acquire: pairs with `confirm_flush`.
        let number = self.flushes.confirmed.load(Ordering::Acquire);
        let asked = self.flushes.confirmed_asked.load(Ordering::Acquire);
        if ring.asked() < asked {
            // What is in the open segment was queued before that flush asked, and is safe.
            self.close_segment(ring);
        }
        ring.confirm(Flush { number, asked }, self.flushes.confirmed_ns.load(Ordering::Relaxed));
    }

    /// Closes the queue of CPU `index`, which is being unplugged: what was queued there before is
    /// covered by a flush that [begins](Self::begin_flush) after the call. Returns whether anything
    /// waits there, so that a flush is due. One barrier of all CPUs and a wait for its turn. The
    /// caller holds no lock and no CPU.
    pub fn close_of<P: Platform>(&self, platform: &P, index: usize) -> bool {
        let mut due = false;
        self.own.with_others(platform, Some(index), |_, ring| {
            self.close_segment(ring);
            self.hear(ring);
            due = ring.waits();
        });
        due
    }

    /// Begins a flush, which covers the segments that are closed by now. The caller submits a
    /// domain-wide invalidation *after* this call. O(1).
    pub fn begin_flush(&self) -> Flush {
        self.begin(0)
    }

    /// Begins a flush that covers all that was queued before. The caller submits a domain-wide
    /// invalidation *after* this call. Costs one barrier of all CPUs, a wait for the turns of those
    /// whose queues are in use, and each of these a few cache lines with its next entry. The caller
    /// holds no lock and no CPU.
    pub fn begin_flush_of_all<P: Platform>(&self, platform: &P) -> Flush {
        let asked = self.announced.asked.fetch_add(1, Ordering::Relaxed) + 1;
        // Between the number and the load of which queues are announced.
        fence(Ordering::SeqCst);
        self.own.wait_for_first(platform, self.used());
        // Last: a CPU that is kept out of its own queue uses this one after its turn.
        platform.with_cpu(|_| drop(self.shared.lock()));
        self.begin(asked)
    }

    fn begin(&self, asked: u64) -> Flush {
        let number = self.flushes.begun.fetch_add(1, Ordering::Relaxed) + 1;
        // Between the number and the invalidation: see the module's comment.
        fence(Ordering::SeqCst);
        Flush { number, asked }
    }

    #[cold]
    fn announce(&self, index: usize) {
        self.announced.queues.fetch_max(index.saturating_add(1), Ordering::Relaxed);
        // Between the announcement and the numbers.
        fence(Ordering::SeqCst);
    }

    /// Records that the hardware has confirmed the invalidation of `flush`. A queue hears of it
    /// when it closes its next segment (the first entry after a flush of all queues has asked
    /// closes one), when it is full, or when it is [visited](Self::tell). O(1).
    pub fn confirm_flush(&self, flush: Flush, now_ns: u64) {
        self.flushes.confirmed_ns.fetch_max(now_ns, Ordering::Relaxed);
        // Release: a CPU that acts on the numbers acts after the confirmation.
        self.flushes.confirmed_asked.fetch_max(flush.asked, Ordering::Release);
        self.flushes.confirmed.fetch_max(flush.number, Ordering::Release);
    }

    /// Visits all queues that may hold anything, and tells them which flushes are confirmed. As
    /// every visit, it costs one barrier of all CPUs and a wait for the turns of those whose queues
    /// are in use, O(1) for each. The caller holds no lock and no CPU.
    pub fn tell<P: Platform>(&self, platform: &P) {
        self.visit(platform, |ring| self.hear(ring));
    }

    /// Records that a timer that was asked for has come, or could not be set: the next entry of
    /// each queue asks for another. O(1).
    pub fn end_timers(&self) {
        self.announced.timers_ended.fetch_add(1, Ordering::Relaxed);
        // Release: a CPU that sees the number, with its next entry, sees that they have ended. (It
        // then closes its segment as if a flush had asked with this number. No flush has, so none
        // is confirmed by it, and that does no harm.)
        self.announced.asked.fetch_add(1, Ordering::Release);
    }

    /// Whether any entry still waits for a flush. A visit: see [`tell`](Self::tell).
    pub fn is_pending<P: Platform>(&self, platform: &P) -> bool {
        let mut pending = false;
        self.visit(platform, |ring| {
            self.hear(ring);
            pending |= ring.waits();
        });
        pending
    }

    /// Takes all safe entries out of the queues, or out of the queue of CPU `only` alone, and hands
    /// their addresses to `reclaim`, in slices of 64 entries with a CPU lent for each. Meanwhile
    /// the owners of CPUs' queues are kept out of these; the queue that is shared is locked for
    /// each slice.
    ///
    /// This is for a space that is exhausted, and for a CPU that is gone. It is a visit: see
    /// [`tell`](Self::tell).
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

    /// Takes out up to 64 safe entries. Returns whether there may be more.
    fn pop_slice(ring: &Ring, mut reclaim: impl FnMut(IovaRange)) -> bool {
        (0..SLICE).all(|_| ring.pop().map(|range| range.into_iter().for_each(&mut reclaim)).is_some())
    }

    /// Byte-nanoseconds of all that has waited up to `now_ns`, and the longest that anything did. A visit: see
    /// [`tell`](Self::tell).
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
        // Between what the caller has to tell and the load of which queues are announced.
        fence(Ordering::SeqCst);
        self.own.with_first(platform, self.used(), |_, ring| f(ring));
        // Last: a CPU that was kept out of its own queue has used this one.
        platform.with_cpu(|_| f(&self.shared.lock()));
    }

    /// Whether CPU `index` has a queue of its own.
    pub fn has_queue(&self, index: usize) -> bool {
        index < self.own.cpus()
    }

    /// The number below which those CPUs are whose queues may hold anything.
    fn used(&self) -> usize {
        self.announced.queues.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
