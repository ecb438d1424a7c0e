//! One queue: entries in a ring, oldest first, in segments that are covered by a flush as a whole.

use alloc::boxed::Box;
use core::num::NonZeroU64;

use super::Flush;
use super::account::{Account, MARKS};
use crate::addr::{Iova, IovaRange};
use crate::exposure::{ByteTime, Bytes};
use crate::percpu::LocalU64;
use crate::sync::Mutex;

/// The entries of one CPU, or of all that have no queue of their own. All words are changed by the caller that has
/// it to itself.
#[derive(Debug)]
pub(super) struct Ring {
    /// As many as the ring may ever hold, a power of two: where each begins, and its length; 0 where nothing is to be given
    /// back.
    entries: Box<[[LocalU64; 2]]>,
    /// How many were ever taken out and put in.
    head: LocalU64,
    tail: LocalU64,
    /// Those below this count are safe: a flush that covers them is confirmed.
    safe: LocalU64,
    /// How many had been put in when the segment that is open began.
    opened: LocalU64,
    /// When `tail` has reached this, the next push takes the slow way: it reads the clock, or ends the segment. The first push of
    /// a segment always does; so a queue that is not announced has only slow pushes.
    busy_at: LocalU64,
    /// The window of the timer that runs; the longest there is where none does.
    timer_ns: LocalU64,
    /// The number that was [asked](super::FlushQueue::begin_flush_of_all) with last when each entry
    /// of the open segment was queued.
    asked: LocalU64,
    /// The timers that it knows to have come, or to be lost.
    ended: LocalU64,
    /// Flushes know of it: 0 or 1.
    announced: LocalU64,
    /// All bytes that were ever queued, and the entry for which the clock is read.
    used: LocalU64,
    neighbour: LocalU64,
    sample_at: LocalU64,
    /// Used once per segment, and by those who visit.
    account: Mutex<Account>,
}

impl Ring {
    pub(super) fn new(entries: usize) -> Self {
        let word = || LocalU64::new(0);
        let entries = (0..entries.next_power_of_two()).map(|_| [word(), word()]).collect();
        Self {
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
        }
    }

    /// Whether there is room for an entry, be it the oldest one's, which is safe.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.head.get() != self.safe.get() || !self.is_full(self.tail.get())
    }

    #[inline]
    fn is_full(&self, tail: u64) -> bool {
        tail - self.head.get() == self.entries.len() as u64
    }

    /// Adds an entry of `range` and takes out the oldest one, as [`push`](Self::push) does, if that
    /// is all that there is to do: there is room, and neither a clock to be read nor a segment to
    /// be closed nor a [timer](Self::wants_timer) to be asked for, of which `asked` says some.
    /// `None` where there is more; then nothing is changed.
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

    /// Adds an entry, of addresses or of none, where there is [room](Self::has_room), and takes out the oldest one, if that is
    /// safe: what of its addresses is to be given back. Returns first whether the entry's segment is full now, and must be
    /// [closed](Self::close).
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
        let last = self.opened.get() + (self.entries.len() / MARKS).max(1) as u64 - 1;
        self.busy_at.set(self.sample_at.get().min(last));
        (tail >= last, oldest)
    }

    /// Writes the entry after `tail` others.
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

    /// It is another one for those to come. The segment is [closed](Self::close).
    pub(super) fn set_asked(&self, asked: u64) {
        self.asked.set(asked);
    }

    /// Closes the segment that is open: flushes with a number above `stamp` cover it, and those of
    /// all queues that asked with a number above its [own](Self::asked).
    pub(super) fn close(&self, stamp: u64) {
        let tail = self.tail.get();
        if tail != self.opened.get() {
            self.opened.set(tail);
            // The first of the next one is to be timed.
            self.sample_at.set(tail);
            self.busy_at.set(tail);
            self.account.lock().close(stamp, self.asked.get(), tail, self.queued());
        }
    }

    /// These flushes are over, the last of them at `now_ns`: what they cover is safe.
    pub(super) fn confirm(&self, confirmed: Flush, now_ns: u64) {
        if let Some(safe) = self.account.lock().confirm(confirmed, now_ns, self.queued()) {
            self.safe.set(safe);
        }
    }

    /// Whether any entry waits for a flush that is not [known](Self::confirm) to be confirmed.
    pub(super) fn waits(&self) -> bool {
        self.tail.get() != self.head.get() && self.tail.get() != self.safe.get()
    }

    /// Takes out the oldest entry, if it is safe: its addresses, if it has any.
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

    /// Whether a timer is wanted for an entry that may wait for `window_ns`: one runs that comes in time otherwise, unless
    /// it is one of those that have ended, `ended` so far.
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

    /// Whether flushes know of it.
    #[inline]
    pub(super) fn is_announced(&self) -> bool {
        self.announced.get() == 1
    }

    pub(super) fn be_announced(&self) {
        self.announced.set(1);
    }

    /// Byte-nanoseconds of all that has waited up to `now_ns`, and the longest that anything did.
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
