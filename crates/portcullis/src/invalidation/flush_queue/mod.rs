//! The queues of *lazy* protection: unmapped ranges that the hardware may still have cached. A queue frees a range only when an
//! invalidation of the domain is confirmed that began after the range was queued.
//!
//! Each CPU has a queue of its own, or all share a long one where flushes are expensive. One domain-wide invalidation, a *flush*, covers
//! the entries of all CPUs. Numbers tell which entries it covers:
//!
//! - each flush gets a number when it begins, counting from 1;
//! - a queue is cut into *segments*, four to a full queue. A segment that is closed is stamped with the number of the last flush that has
//!   begun;
//! - once a flush with a higher number is confirmed, the segment is *safe*: that flush began after the segment was closed, so its
//!   translations are gone and its addresses may be used again. A flush that fails is never confirmed.
//!
//! So a CPU reads the flushes' words once per segment, and a flush for a full queue looks at no other queue. An explicit flush, a timer and
//! a change of policy must also cover open segments: they are a *flush-all*. It bumps a *generation*, which each CPU reads with each entry
//! that it queues; a CPU that sees a new one closes its segment first. Entries that were queued under an older generation are safe when the
//! flush-all is confirmed, whenever their segment is closed. So a flush-all looks at no queue either.
//!
//! Memory ordering of segments. A flush must not begin before the hardware can see all cleared page-table entries that it will be taken to
//! cover. A CPU that closes a segment clears entries, passes a `SeqCst` fence, and then loads the stamp. A flush takes its number, passes a
//! fence, and then has the hardware invalidate. One of the fences is first. If the segment's is, the flush and its hardware see the entries
//! cleared. If the flush's is, the load sees its number, and the stamp says that this flush does not cover the segment.
//!
//! Memory ordering of a flush-all. It bumps the generation, waits for the exclusive sections under way ([`TurnLocal::wait_for_first`]), and
//! then has the hardware invalidate. A CPU clears an entry before it queues it, and reads the generation in the exclusive section that
//! queues it. Either the flush waits for that section, or finds it over, and the hardware sees the entry cleared; or the section reads the
//! new generation, and the entry is not taken to be covered. In the shared queue the lock replaces the section: the flush takes it once
//! between the two steps.
//!
//! A CPU uses its queue without a lock, in the exclusive section in which it clears the translations. A visitor uses it while the CPU is
//! kept out of this queue, but not out of its other per-CPU values: see [`TurnLocal::apart_in`]. The visitor sees what the CPU did in its
//! sections and before. Sections after the visit see what the visitor did and saw before it, such as a new policy. Meanwhile the CPU uses
//! the shared queue, under its lock.
//!
//! A flush does not visit unused queues, nor wait for sections of their CPUs. A CPU *announces* its queue with its first entry, and then
//! reads the generation (and the policy, again). A visitor, or a flush, stores its update first, and then reads which queues are announced.
//! With a fence between the two steps on both sides, one of them sees the other.

mod account;
mod flushes;
mod ring;
mod visits;

use core::mem::MaybeUninit;

use crate::addr::IovaRange;
use crate::exposure::Bytes;
use crate::heap::{OutOfMemory, Shared, place_of, write_fields};
use crate::percpu::{CachePadded, Marks, Turn, TurnLocal};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, fence};

use ring::Ring;

/// Entries of one CPU's queue. A CPU whose queue is full flushes, which covers the closed segments of all queues. (Under loom a segment has
/// four entries, the second of which takes the fast path.)
pub const QUEUE_ENTRIES: usize = if cfg!(loom) { 16 } else { 256 };

/// Entries of the one queue that all CPUs share where flushes are expensive: as many as Linux has in that case since 2023 (the single queue
/// of its `dma-iommu` driver).
pub const SHARED_ENTRIES: usize = if cfg!(loom) { 8 } else { 32_768 };

/// The most ranges that a call takes or gives back while it holds one CPU.
pub const SLICE: usize = 64;

/// The result of queueing a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a range that was not queued must be flushed, a timer that is asked for must be set"]
pub enum Pushed {
    /// The range is deferred. The queue's timer is running.
    Queued,
    /// The range is deferred. The caller must set a timer. When this window ends, call [`FlushQueue::end_timers`], and begin a flush-all if
    /// anything is deferred.
    QueuedFirst {
        /// The window in nanoseconds.
        window_ns: u64,
    },
    /// No room: the caller flushes and tries again.
    Full,
    /// The range may no longer be deferred: the caller invalidates it.
    Refused,
}

impl Pushed {
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
    /// Bytes that are not the buffer's.
    pub neighbours: u64,
}

/// An entry: deferred bytes, and the addresses to free after the flush, if any.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    pub(crate) range: Option<IovaRange>,
    pub(crate) bytes: Bytes,
}

impl Cleared {
    /// The entry for it.
    #[inline]
    pub fn waiting(&self) -> Waiting {
        Waiting { range: Some(self.range), bytes: self.bytes() }
    }

    #[inline]
    fn bytes(&self) -> Bytes {
        Bytes { used: self.range.len().saturating_sub(self.neighbours), neighbour: self.neighbours }
    }
}

/// The queues of all CPUs, and the numbers that tell which entries are safe. One value is used with the CPUs of one platform.
#[derive(Debug)]
pub struct FlushQueue {
    own: TurnLocal<Ring, true>,
    /// The queue of callers without one of their own, or of all callers.
    shared: Mutex<Ring>,
    flushes: CachePadded<Flushes>,
    announced: CachePadded<Announced>,
}

/// A flush that has begun.
#[derive(Debug, Clone, Copy)]
#[must_use = "a flush that is not confirmed makes nothing safe"]
pub struct Flush {
    number: u64,
    /// The generation of a flush-all. 0, which no flush-all has, for a flush that covers closed segments only.
    generation: u64,
}

/// Words that flushes write, and each CPU reads once per segment.
#[derive(Debug)]
struct Flushes {
    begun: AtomicU64,
    /// The highest number and generation of a confirmed flush, and the latest time at which one was confirmed.
    confirmed: AtomicU64,
    confirmed_generation: AtomicU64,
    confirmed_ns: AtomicU64,
}

/// Words that CPUs read with each entry. Flush-alls write them; all other writes are rare.
#[derive(Debug)]
struct Announced {
    /// All queues that were ever used belong to CPUs below this number.
    queues: AtomicUsize,
    /// Bumped to make CPUs close open segments and look at `timers_ended`.
    generation: AtomicU64,
    timers_ended: AtomicU64,
}

/// Makes the shared queue in `place`, which stays uninitialised after an error.
#[inline(never)]
fn share(place: &mut MaybeUninit<Mutex<Ring>>, entries: usize) -> Result<(), OutOfMemory> {
    let mut ring = MaybeUninit::uninit();
    Ring::make_in(&mut ring, entries)?;
    // SAFETY: `make_in` has just initialised it.
    place.write(Mutex::new(unsafe { ring.assume_init() }));
    Ok(())
}

impl FlushQueue {
    /// Makes empty queues, and allocates all their memory. With `marks` there are [`QUEUE_ENTRIES`] for each of `cpus` CPUs that have
    /// section flags there, in whose exclusive sections the queues are used. Without, there is one queue of [`SHARED_ENTRIES`] (512 KiB)
    /// for all CPUs: flushes are few, and all CPUs take one lock.
    #[cfg(any(test, feature = "parts"))]
    pub fn new(marks: Option<Shared<Marks>>, cpus: usize) -> Result<Self, OutOfMemory> {
        let mut place = MaybeUninit::uninit();
        Self::make_for(&mut place, marks, cpus)?;
        // SAFETY: `make_for` has just initialised it.
        Ok(unsafe { place.assume_init() })
    }

    /// As `new`, in `place`, which stays uninitialised after an error: two of these do not fit on a kernel's stack.
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
        // SAFETY: the field lies in the caller's place, and only this call uses it.
        share(unsafe { place_of(&raw mut (*at).shared) }, entries)?;
        // SAFETY: each write is to a field in the caller's place, where the shared queue is already; after them all fields are initialised.
        unsafe {
            write_fields!(
                at,
                made [shared],
                own: own,
                flushes: CachePadded(Flushes {
                    begun: number(),
                    confirmed: number(),
                    confirmed_generation: number(),
                    confirmed_ns: number(),
                }),
                announced: CachePadded(Announced {
                    queues: AtomicUsize::new(0),
                    generation: number(),
                    timers_ended: number(),
                }),
            );
            Ok(place.assume_init_mut())
        }
    }

    /// Queues `cleared`, whose page-table entries the caller has cleared, until a flush covers it. `window` returns the nanoseconds for
    /// which it may be deferred; with `None` nothing is queued. It is called in the CPU's exclusive section, or under the shared queue's
    /// lock. So if a caller makes `window` return `None` (or less), and *then* begins a [flush-all](Self::begin_flush_of_all), the flush
    /// covers earlier entries, and later pushes see the change.
    ///
    /// Also takes out the queue's oldest entry, if it is known to be safe: the caller frees its addresses. `clock` is read now and then.
    /// O(1), allocates nothing.
    ///
    /// Returns `None`, with nothing changed, where the CPU has no queue of its own, or a visitor has it. The caller then leaves its
    /// section, and uses the [shared](Self::push_shared) queue: a section may not wait for that lock, as visitors wait for sections.
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
        // Relaxed: the exclusive section orders it, as the module's documentation says.
        let generation = self.announced.generation.load(Ordering::Relaxed);
        match ring.push_fast(cleared.range, cleared.bytes(), window_ns, generation) {
            Some(oldest) => Some((Pushed::Queued, oldest)),
            None => self.push_own(turn, cleared.waiting(), window, clock),
        }
    }

    /// As [`push`](Self::push), for any [`Waiting`]: an entry without addresses is counted and flushed all the same.
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

    /// As [`push`](Self::push), into the shared queue, for whose lock it may wait. The caller is in no exclusive section, as visitors wait
    /// for these; except where no CPU has a queue of its own, as then visitors wait for none. The oldest entry's addresses go to `reclaim`
    /// under the lock, too: a caller that takes everything back finds them in the queue, or freed already.
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
        let generation = self.announced.generation.load(Ordering::Acquire);
        if ring.generation() != generation {
            self.close_segment(ring);
            ring.set_generation(generation);
            self.catch_up(ring);
        }
        if !ring.has_room() {
            // A flush may be confirmed that the queue does not know of.
            self.catch_up(ring);
            if !ring.has_room() {
                return (Pushed::Full, None);
            }
        }
        let Some(window_ns) = window() else {
            return (Pushed::Refused, None);
        };
        // Each push takes one entry out: this spreads the cost evenly, and the CPU's cache gets back just what the next map takes.
        let (is_last, oldest) = ring.push(range, bytes, clock);
        if is_last {
            self.close_segment(ring);
            self.catch_up(ring);
        }
        // Relaxed: the `Acquire` load of the generation before orders it.
        let timers_ended = self.announced.timers_ended.load(Ordering::Relaxed);
        let pushed = match ring.wants_timer(window_ns, timers_ended) {
            true => Pushed::QueuedFirst { window_ns },
            false => Pushed::Queued,
        };
        (pushed, oldest)
    }

    /// Closes the open segment of a ring that the caller owns at the moment.
    #[cold]
    fn close_segment(&self, ring: &Ring) {
        // Orders the cleared entries before the number: see the module's documentation.
        fence(Ordering::SeqCst);
        ring.close(self.flushes.begun.load(Ordering::Relaxed));
    }

    /// Updates a ring, which the caller owns at the moment, with the confirmed flushes.
    fn catch_up(&self, ring: &Ring) {
        // Acquire: pairs with `confirm_flush`.
        let number = self.flushes.confirmed.load(Ordering::Acquire);
        let generation = self.flushes.confirmed_generation.load(Ordering::Acquire);
        if ring.generation() < generation {
            // The open segment was queued before that generation, and is safe.
            self.close_segment(ring);
        }
        ring.confirm(Flush { number, generation }, self.flushes.confirmed_ns.load(Ordering::Relaxed));
    }

    #[cold]
    fn announce(&self, index: usize) {
        self.announced.queues.fetch_max(index.saturating_add(1), Ordering::Relaxed);
        // Between the announcement and the generation.
        fence(Ordering::SeqCst);
    }

    /// Whether CPU `index` has a queue of its own.
    pub fn has_queue(&self, index: usize) -> bool {
        index < self.own.cpus()
    }

    fn used(&self) -> usize {
        self.announced.queues.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
