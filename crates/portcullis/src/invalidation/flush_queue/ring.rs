//! One queue of deferred ranges: a ring of entries in segments, oldest first. It gives out an entry only when a flush that covers its
//! segment is known to be confirmed.

use alloc::boxed::Box;
use core::mem::MaybeUninit;
use core::num::NonZeroU64;

use super::Flush;
use super::account::{Account, SEGMENTS};
use crate::addr::{Iova, IovaRange};
use crate::exposure::{ByteTime, Bytes};
use crate::heap::{OutOfMemory, slice};
use crate::percpu::LocalU64;
use crate::sync::Mutex;

/// The entries of one CPU, or of all callers without a queue of their own. Only the present owner changes its words: the CPU in its
/// exclusive section, a visitor, or the holder of the shared queue's lock.
#[derive(Debug)]
pub(super) struct Ring {
    /// A power of two of entries: the start of the range, and its length, which is 0 for an entry without addresses.
    entries: Box<[[LocalU64; 2]]>,
    /// The numbers of entries ever taken out, and ever put in.
    head: LocalU64,
    tail: LocalU64,
    /// Entries below this count are safe: a flush that covers them is confirmed.
    safe: LocalU64,
    /// The value of `tail` when the open segment began.
    opened: LocalU64,
    /// When `tail` reaches this, the next push takes the slow path: it reads the clock, or ends the segment. The first push of a segment
    /// always does; so does the first push of a queue, which announces the queue.
    busy_at: LocalU64,
    /// The window of the running timer, in nanoseconds; `u64::MAX` without one.
    timer_ns: LocalU64,
    /// The [generation](super::FlushQueue::begin_flush_of_all) of the open segment's entries.
    generation: LocalU64,
    /// The number of [ended timers](Self::wants_timer) that the queue knows of.
    ended: LocalU64,
    /// 1 once the queue is announced.
    announced: LocalU64,
    /// All bytes that were ever queued, of both kinds.
    used: LocalU64,
    neighbour: LocalU64,
    /// The entry for which the clock is read next.
    sample_at: LocalU64,
    /// Used when the clock is read, when a segment is closed, and in visits.
    account: Mutex<Account>,
}

impl Ring {
    /// Makes a queue in `place`, which stays uninitialised after an error.
    #[inline(never)]
    pub(super) fn make_in(place: &mut MaybeUninit<Self>, entries: usize) -> Result<&mut Self, OutOfMemory> {
        let word = || LocalU64::new(0);
        let entries = slice(entries.next_power_of_two(), |_| Ok([word(), word()]))?;
        Ok(place.write(Self {
            entries,
            head: word(),
            tail: word(),
            safe: word(),
            opened: word(),
            busy_at: word(),
            timer_ns: LocalU64::new(u64::MAX),
            generation: word(),
            ended: word(),
            announced: word(),
            used: word(),
            neighbour: word(),
            sample_at: word(),
            account: Mutex::new(Account::default()),
        }))
    }

    /// Whether an entry can be added: a place is free, or the oldest entry is safe and can be taken out.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.head.get() != self.safe.get() || !self.is_full(self.tail.get())
    }

    #[inline]
    fn is_full(&self, tail: u64) -> bool {
        tail - self.head.get() == self.entries.len() as u64
    }

    /// The fast path of [`push`](Self::push): there is room, the clock need not be read, the segment is not full, `generation` is
    /// unchanged, and no [timer](Self::wants_timer) is wanted. Otherwise returns `None`, and nothing is changed.
    #[inline(always)]
    pub(super) fn push_fast(
        &self,
        range: IovaRange,
        bytes: Bytes,
        window_ns: u64,
        generation: u64,
    ) -> Option<Option<IovaRange>> {
        let tail = self.tail.get();
        if tail >= self.busy_at.get()
            || self.timer_ns.get() > window_ns
            || self.generation.get() != generation
        {
            return None;
        }
        let oldest = self.pop();
        if oldest.is_none() && self.is_full(tail) {
            return None;
        }
        self.put(tail, Some(range), bytes);
        Some(oldest.flatten())
    }

    /// Adds an entry, with or without addresses, where there is [room](Self::has_room), and takes out the oldest entry, if it is safe.
    /// Returns whether the new entry's segment is full, and must be [closed](Self::close); and the oldest entry's addresses, if any.
    pub(super) fn push(
        &self,
        range: Option<IovaRange>,
        bytes: Bytes,
        clock: impl FnOnce() -> u64,
    ) -> (bool, Option<IovaRange>) {
        let tail = self.tail.get();
        if tail >= self.sample_at.get() {
            // Nothing has changed yet: the clock may panic.
            let now_ns = clock();
            let next = self.account.lock().sample(now_ns, self.queued(), bytes);
            self.sample_at.set(tail + next);
        }
        let oldest = self.pop().flatten();
        self.put(tail, range, bytes);
        let last = self.opened.get() + (self.entries.len() / SEGMENTS).max(1) as u64 - 1;
        self.busy_at.set(self.sample_at.get().min(last));
        (tail >= last, oldest)
    }

    #[inline(always)]
    fn put(&self, tail: u64, range: Option<IovaRange>, bytes: Bytes) {
        let [start, len] = self.entry(tail);
        start.set(range.map_or(0, |range| range.start().get()));
        len.set(range.map_or(0, IovaRange::len));
        // No overflow: 2^64 entries do not happen.
        self.tail.set(tail + 1);
        self.used.set(self.used.get().wrapping_add(bytes.used));
        self.neighbour.set(self.neighbour.get().wrapping_add(bytes.neighbour));
    }

    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// Sets the generation of later entries. The caller has [closed](Self::close) the segment.
    pub(super) fn set_generation(&self, generation: u64) {
        self.generation.set(generation);
    }

    /// Closes the open segment: flushes above `stamp`, and flush-alls above its [generation](Self::generation), cover it.
    pub(super) fn close(&self, stamp: u64) {
        let tail = self.tail.get();
        if tail != self.opened.get() {
            self.opened.set(tail);
            // The clock is due for the first entry of the next segment.
            self.sample_at.set(tail);
            self.busy_at.set(tail);
            self.account.lock().close(stamp, self.generation.get(), tail, self.queued());
        }
    }

    /// Records that these flushes are confirmed, the last at `now_ns`: the entries that they cover are safe.
    pub(super) fn confirm(&self, confirmed: Flush, now_ns: u64) {
        if let Some(safe) = self.account.lock().confirm(confirmed, now_ns, self.queued()) {
            self.safe.set(safe);
        }
    }

    pub(super) fn waits(&self) -> bool {
        self.tail.get() != self.head.get() && self.tail.get() != self.safe.get()
    }

    /// Takes out the oldest entry, if it is safe. Returns its addresses, if any.
    #[inline(always)]
    pub(super) fn pop(&self) -> Option<Option<IovaRange>> {
        let head = self.head.get();
        if head == self.safe.get() {
            return None;
        }
        let [start, len] = self.entry(head);
        self.head.set(head + 1);
        Some(NonZeroU64::new(len.get()).map(|len| IovaRange::inside(Iova::new(start.get()), len)))
    }

    /// Whether an entry that may be deferred for `window_ns` needs a timer: none runs that ends in time. `ended` timers have ended by now;
    /// if that number is new to the queue, its own timer may be one of them.
    #[inline]
    pub(super) fn wants_timer(&self, window_ns: u64, ended: u64) -> bool {
        if self.ended.get() != ended {
            self.ended.set(ended);
            self.timer_ns.set(u64::MAX);
        }
        let is_wanted = self.timer_ns.get() > window_ns;
        if is_wanted {
            self.timer_ns.set(window_ns);
        }
        is_wanted
    }

    #[inline]
    pub(super) fn is_announced(&self) -> bool {
        self.announced.get() == 1
    }

    pub(super) fn be_announced(&self) {
        self.announced.set(1);
    }

    /// Byte-nanoseconds of all entries up to `now_ns`, and the longest deferral in nanoseconds.
    pub(super) fn exposure(&self, now_ns: u64) -> (ByteTime, u64) {
        self.account.lock().total(now_ns, self.queued())
    }

    fn queued(&self) -> Bytes {
        Bytes { used: self.used.get(), neighbour: self.neighbour.get() }
    }

    #[inline]
    fn entry(&self, count: u64) -> &[LocalU64; 2] {
        &self.entries[count as usize & (self.entries.len() - 1)]
    }
}
