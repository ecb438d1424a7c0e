//! One queue: entries in a ring, oldest first, in segments that are covered by a flush as a whole.

use alloc::boxed::Box;

use super::account::{Account, MARKS};
use crate::addr::{Iova, IovaRange};
use crate::broken::broken;
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
    /// Entries of the segment that is open.
    open: LocalU64,
    /// The window of the timer that runs; the longest there is where none does.
    timer_ns: LocalU64,
    /// The timers that it knows to be lost.
    lost: LocalU64,
    /// Flushes know of it: 0 or 1.
    announced: LocalU64,
    /// All bytes that were ever queued, and how many more entries come before the clock is read.
    used: LocalU64,
    neighbour: LocalU64,
    until_sample: LocalU64,
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
            open: word(),
            timer_ns: LocalU64::new(u64::MAX),
            lost: word(),
            announced: word(),
            used: word(),
            neighbour: word(),
            until_sample: word(),
            account: Mutex::new(Account::default()),
        }
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.tail.get().wrapping_sub(self.head.get()) == self.entries.len() as u64
    }

    /// Adds an entry, of addresses or of none, to a ring that is not full. Returns whether its segment is full now, and
    /// must be [closed](Self::close).
    #[inline]
    pub(super) fn push(&self, range: Option<IovaRange>, bytes: Bytes, clock: impl FnOnce() -> u64) -> bool {
        let left = self.until_sample.get();
        // Before anything has changed: the clock may panic.
        let now_ns = (left == 0).then(clock);
        let [start, len] = self.entry(self.tail.get());
        start.set(range.map_or(0, |range| range.start().get()));
        len.set(range.map_or(0, |range| range.len()));
        self.tail.set(self.tail.get().wrapping_add(1));
        self.open.set(self.open.get() + 1);
        match now_ns {
            Some(now_ns) => {
                let next = self.account.lock().sample(now_ns, self.queued(), bytes);
                self.until_sample.set(next - 1);
            }
            None => self.until_sample.set(left - 1),
        }
        self.used.set(self.used.get().wrapping_add(bytes.used));
        self.neighbour.set(self.neighbour.get().wrapping_add(bytes.neighbour));
        self.open.get() >= (self.entries.len() / MARKS).max(1) as u64
    }

    /// Closes the segment that is open: flushes with a number above `stamp` cover it.
    pub(super) fn close(&self, stamp: u64) {
        if self.open.get() > 0 {
            self.open.set(0);
            // The first of the next one is to be timed.
            self.until_sample.set(0);
            self.account.lock().close(stamp, self.tail.get(), self.queued());
        }
    }

    /// All flushes up to the number `confirmed` are over, the last of them at `now_ns`: what they cover is safe.
    pub(super) fn confirm(&self, confirmed: u64, now_ns: u64) {
        if let Some(safe) = self.account.lock().confirm(confirmed, now_ns, self.queued()) {
            self.safe.set(safe);
        }
    }

    /// Whether any entry waits for a flush that is not [known](Self::confirm) to be confirmed.
    pub(super) fn waits(&self) -> bool {
        self.tail.get() != self.head.get() && self.tail.get() != self.safe.get()
    }

    /// Takes the oldest entry, if it is safe, and hands its addresses, if it has any, to `reclaim`. Returns whether it did.
    #[inline]
    pub(super) fn pop(&self, reclaim: impl FnOnce(IovaRange)) -> bool {
        let head = self.head.get();
        if head == self.safe.get() {
            return false;
        }
        let [start, len] = self.entry(head);
        self.head.set(head.wrapping_add(1));
        match IovaRange::new(Iova::new(start.get()), len.get()) {
            Ok(range) => reclaim(range),
            Err(_) if len.get() == 0 => {}
            Err(_) => broken("what was queued is a range"),
        }
        true
    }

    /// Whether a timer is wanted for an entry that may wait for `window_ns`: one runs that comes in time otherwise, unless
    /// it is one of those that were lost, `lost` so far.
    #[inline]
    pub(super) fn wants_timer(&self, window_ns: u64, lost: u64) -> bool {
        if self.lost.get() != lost {
            self.lost.set(lost);
            self.stop_timer();
        }
        let is_wanted = self.timer_ns.get() > window_ns;
        if is_wanted {
            self.timer_ns.set(window_ns);
        }
        is_wanted
    }

    /// The timer has come, or was lost.
    pub(super) fn stop_timer(&self) {
        self.timer_ns.set(u64::MAX);
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
