//! One queue: entries in a ring, oldest first.

use alloc::boxed::Box;

use super::account::Account;
use crate::addr::IovaRange;

/// A range that waits, and the number of the flush that began last before it was queued.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub range: IovaRange,
    pub stamp: u64,
}

#[derive(Debug)]
pub(super) struct Ring {
    entries: Box<[Option<Entry>]>,
    head: usize,
    len: usize,
    /// The window of the timer that runs; the longest there is where none does.
    pub timer_ns: u64,
    pub account: Account,
}

impl Ring {
    pub(super) fn new(entries: usize) -> Self {
        let entries = core::iter::repeat_n(None, entries).collect();
        Self { entries, head: 0, len: 0, timer_ns: u64::MAX, account: Account::default() }
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len == self.entries.len()
    }

    /// Adds an entry to a ring that is not full.
    #[inline]
    pub(super) fn push(&mut self, entry: Entry) {
        let tail = self.wrap(self.head + self.len);
        self.entries[tail] = Some(entry);
        self.len += 1;
    }

    /// Whether any entry waits for a flush after the one `confirmed`.
    pub(super) fn waits(&self, confirmed: u64) -> bool {
        // Stamps never decrease along the ring.
        let newest = self.len.checked_sub(1).map(|last| self.wrap(self.head + last));
        newest.and_then(|at| self.entries[at]).is_some_and(|entry| entry.stamp >= confirmed)
    }

    /// Hands the oldest entries that are safe to `reclaim`, up to `most`. How many.
    #[inline]
    pub(super) fn reclaim(
        &mut self,
        confirmed: u64,
        most: usize,
        mut reclaim: impl FnMut(IovaRange),
    ) -> usize {
        for done in 0..most {
            match self.entries[self.head] {
                Some(entry) if self.len > 0 && entry.stamp < confirmed => {
                    self.entries[self.head] = None;
                    self.head = self.wrap(self.head + 1);
                    self.len -= 1;
                    reclaim(entry.range);
                }
                _ => return done,
            }
        }
        most
    }

    fn wrap(&self, at: usize) -> usize {
        if at >= self.entries.len() { at - self.entries.len() } else { at }
    }
}
