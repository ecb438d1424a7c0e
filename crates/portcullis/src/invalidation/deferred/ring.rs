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
    /// As many as the ring may ever hold, a power of two; `None` where none has been yet.
    entries: Box<[Option<Entry>]>,
    /// How many were ever taken out and put in.
    head: usize,
    tail: usize,
    /// The window of the timer that runs; the longest there is where none does.
    pub timer_ns: u64,
    /// Flushes know of it.
    pub announced: bool,
    pub account: Account,
}

impl Ring {
    pub(super) fn new(entries: usize) -> Self {
        let entries = core::iter::repeat_n(None, entries.next_power_of_two()).collect();
        Self { entries, head: 0, tail: 0, timer_ns: u64::MAX, announced: false, account: Account::default() }
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.tail.wrapping_sub(self.head) == self.entries.len()
    }

    /// Adds an entry to a ring that is not full.
    #[inline]
    pub(super) fn push(&mut self, entry: Entry) {
        let at = self.place(self.tail);
        self.entries[at] = Some(entry);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Whether any entry waits for a flush after the one `confirmed`.
    pub(super) fn waits(&self, confirmed: u64) -> bool {
        // Stamps never decrease along the ring.
        let newest = self.entries[self.place(self.tail.wrapping_sub(1))];
        self.tail != self.head && newest.is_some_and(|entry| entry.stamp >= confirmed)
    }

    /// Takes the oldest entry, if it is safe.
    #[inline]
    pub(super) fn pop(&mut self, confirmed: u64) -> Option<IovaRange> {
        if self.head == self.tail {
            return None;
        }
        let entry = self.entries[self.place(self.head)].filter(|entry| entry.stamp < confirmed)?;
        self.head = self.head.wrapping_add(1);
        Some(entry.range)
    }

    #[inline]
    fn place(&self, count: usize) -> usize {
        count & (self.entries.len() - 1)
    }
}
