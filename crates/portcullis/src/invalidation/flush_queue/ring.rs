//! One queue of ranges that wait for a flush: entries in a ring, the oldest first, in segments. It
//! gives an entry out only when a flush that covers its segment is known to be confirmed.

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

/// The entries of one CPU, or of all callers that have no queue of their own. Words are changed
/// only by a caller that has the ring to itself: in its CPU's turn, in a visit, or under the lock
/// of the queue that is shared.
#[derive(Debug)]
pub(super) struct Ring {
    /// As many as the ring may ever hold, a power of two: where the range of each begins, and its
    /// length, which is 0 where no addresses are to be given back.
    entries: Box<[[LocalU64; 2]]>,
    /// How many entries were ever taken out, and how many put in.
    head: LocalU64,
    tail: LocalU64,
    /// Entries below this count are safe: a flush that covers them is confirmed.
    safe: LocalU64,
    /// How many entries had been put in when the segment that is open began.
    opened: LocalU64,
    /// When `tail` has reached this, the next push takes the slow way: it reads the clock, or ends
    /// the segment. The first push of a segment always does; so the first push of a queue, which
    /// announces the queue, is slow.
    busy_at: LocalU64,
    /// The window of the timer that runs, in nanoseconds; `u64::MAX` where none runs.
    timer_ns: LocalU64,
    /// The number that was [asked](super::FlushQueue::begin_flush_of_all) with last when each entry
    /// of the open segment was queued.
    asked: LocalU64,
    /// How many timers the queue knows to have come, or to be lost.
    ended: LocalU64,
    /// 1 where flushes know of the queue, else 0.
    announced: LocalU64,
    /// All bytes that were ever queued, of both kinds, and the entry for which the clock is read
    /// next.
    used: LocalU64,
    neighbour: LocalU64,
    sample_at: LocalU64,
    /// Used when the clock is read, when a segment is closed, and in visits.
    account: Mutex<Account>,
}

impl Ring {
    /// Makes a queue in `place`, where nothing is after an error.
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
            asked: word(),
            ended: word(),
            announced: word(),
            used: word(),
            neighbour: word(),
            sample_at: word(),
            account: Mutex::new(Account::default()),
        }))
    }

    /// Whether an entry can be added: a place is free, or will be when the oldest entry, which is
    /// safe, is taken out.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.head.get() != self.safe.get() || !self.is_full(self.tail.get())
    }

    #[inline]
    fn is_full(&self, tail: u64) -> bool {
        tail - self.head.get() == self.entries.len() as u64
    }

    /// Adds an entry of `range` and takes out the oldest one, as [`push`](Self::push) does, if
    /// nothing else is to be done: there is room, the clock need not be read, the segment is not
    /// full, no flush of all queues has asked since the last entry (`asked` is the newest number),
    /// and no [timer](Self::wants_timer) is to be asked for. Otherwise returns `None`, and nothing
    /// is changed.
    #[inline(always)]
    pub(super) fn push_fast(
        &self,
        range: IovaRange,
        bytes: Bytes,
        window_ns: u64,
        asked: u64,
    ) -> Option<Option<IovaRange>> {
        let tail = self.tail.get();
        if tail >= self.busy_at.get() || self.timer_ns.get() > window_ns || self.asked.get() != asked {
            return None;
        }
        let oldest = self.pop();
        if oldest.is_none() && self.is_full(tail) {
            return None;
        }
        self.put(tail, Some(range), bytes);
        Some(oldest.flatten())
    }

    /// Adds an entry, with addresses to give back or without, where there is
    /// [room](Self::has_room), and takes out the oldest entry, if that is safe. Returns whether the
    /// segment of the new entry is full now, and must be [closed](Self::close); and the addresses
    /// of the oldest one, if it had any.
    pub(super) fn push(
        &self,
        range: Option<IovaRange>,
        bytes: Bytes,
        clock: impl FnOnce() -> u64,
    ) -> (bool, Option<IovaRange>) {
        let tail = self.tail.get();
        if tail >= self.sample_at.get() {
            // Before anything has changed: the clock may panic.
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

    /// Writes the entry before which `tail` others were put in.
    #[inline(always)]
    fn put(&self, tail: u64, range: Option<IovaRange>, bytes: Bytes) {
        let [start, len] = self.entry(tail);
        start.set(range.map_or(0, |range| range.start().get()));
        len.set(range.map_or(0, IovaRange::len));
        // 2^64 entries do not happen.
        self.tail.set(tail + 1);
        self.used.set(self.used.get().wrapping_add(bytes.used));
        self.neighbour.set(self.neighbour.get().wrapping_add(bytes.neighbour));
    }

    /// The number that was asked with last when the entries of the open segment were queued.
    #[inline]
    pub(super) fn asked(&self) -> u64 {
        self.asked.get()
    }

    /// Sets that number for the entries to come. The caller has [closed](Self::close) the segment.
    pub(super) fn set_asked(&self, asked: u64) {
        self.asked.set(asked);
    }

    /// Closes the segment that is open: flushes with a number above `stamp` cover it, and those of
    /// all queues that asked with a number above its [own](Self::asked).
    pub(super) fn close(&self, stamp: u64) {
        let tail = self.tail.get();
        if tail != self.opened.get() {
            self.opened.set(tail);
            // The clock is to be read for the first entry of the next segment.
            self.sample_at.set(tail);
            self.busy_at.set(tail);
            self.account.lock().close(stamp, self.asked.get(), tail, self.queued());
        }
    }

    /// Records that these flushes are confirmed, the last of them at `now_ns`: the entries that
    /// they cover are safe.
    pub(super) fn confirm(&self, confirmed: Flush, now_ns: u64) {
        if let Some(safe) = self.account.lock().confirm(confirmed, now_ns, self.queued()) {
            self.safe.set(safe);
        }
    }

    /// Whether any entry waits for a flush that is not [known](Self::confirm) to be confirmed.
    pub(super) fn waits(&self) -> bool {
        self.tail.get() != self.head.get() && self.tail.get() != self.safe.get()
    }

    /// Takes out the oldest entry, if it is safe. Returns its addresses, if it has any.
    #[inline(always)]
    pub(super) fn pop(&self) -> Option<Option<IovaRange>> {
        let head = self.head.get();
        if head == self.safe.get() {
            return None;
        }
        let [start, len] = self.entry(head);
        self.head.set(head + 1);
        // It was a range when it was queued.
        Some(NonZeroU64::new(len.get()).map(|len| IovaRange::inside(Iova::new(start.get()), len)))
    }

    /// Returns whether a timer is to be asked for, for an entry that may wait for `window_ns`:
    /// unless one runs that comes in time. `ended` timers have ended by now; where that is news to
    /// the queue, it takes its own timer to be one of them.
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

    /// Whether flushes know of the queue.
    #[inline]
    pub(super) fn is_announced(&self) -> bool {
        self.announced.get() == 1
    }

    pub(super) fn be_announced(&self) {
        self.announced.set(1);
    }

    /// Byte-nanoseconds of all that has waited up to `now_ns`, and the longest time in nanoseconds
    /// that any of it has waited.
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
