//! Ranges on their way back to the CPU that owns them.
//!
//! A CPU that frees another's range threads it onto a chain of its own for that owner, a [`RemoteBatch`]; when the
//! chain is long enough, it is pushed onto the owner's [`RemoteQueue`] with one compare-and-swap. The owner takes all
//! that has come with one exchange. Since nothing is ever popped singly, there is no ABA problem.
//!
//! Memory ordering. The chain's words are written before the push, which is a `Release`; the owner's exchange
//! is an `Acquire`, so it sees them. Pushes onto a chain that others pushed before keep that order: a
//! compare-and-swap continues the release sequence of the one before it. The owner may use a chain as its list and
//! leave the words as they came: what it writes there later comes after them, as the exchange did.

use super::meta::RangeMeta;
use super::word::{Link, handed_out, owner_and_pages};
use crate::percpu::{CachePadded, LocalU64};
use crate::sync::{AtomicU64, Ordering};

/// Ranges that one CPU sends at once.
pub(super) const REMOTE_BATCH: u64 = 32;

/// Pages after which a remote batch is sent in any case.
pub(super) const REMOTE_BATCH_PAGES: u64 = 512;

/// Where one CPU's ranges arrive: the link to the first, and how many pages were sent and are not sorted in.
#[derive(Debug)]
pub(super) struct RemoteQueue {
    first: AtomicU64,
    pages: AtomicU64,
}

impl RemoteQueue {
    pub(super) fn new() -> Self {
        Self { first: AtomicU64::new(Link::END.bits()), pages: AtomicU64::new(0) }
    }

    /// Pages that were sent and are not sorted in yet. A hint.
    pub(super) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// The owner has sorted in so many pages.
    pub(super) fn arrived(&self, pages: u64) {
        self.pages.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Puts the chain from `first` to `last` in front of what is there.
    fn push(&self, meta: &RangeMeta, first: Link, last: Link) {
        let mut old = self.first.load(Ordering::Relaxed);
        loop {
            last.page().into_iter().for_each(|page| meta.write(page, last.order(), old));
            match self.first.compare_exchange_weak(old, first.bits(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => old = now,
            }
        }
    }

    /// Takes everything that has arrived.
    pub(super) fn take(&self) -> Link {
        // Looked at first: an exchange would take the line from those who push.
        if self.first.load(Ordering::Relaxed) == Link::END.bits() {
            return Link::END;
        }
        Link::from_bits(self.first.swap(Link::END.bits(), Ordering::Acquire))
    }
}

/// A remote batch for one owner, not sent yet. Used by one CPU alone.
#[derive(Debug, Default)]
pub(super) struct RemoteBatch {
    first: LocalU64,
    /// The word of a range of no pages that the owner has handed out, or 0 for no owner.
    handed_out: LocalU64,
    /// The order of the newest range in the low six bits, and its zone.
    order_and_zone: LocalU64,
    /// How many more ranges of that order and zone the remote batch takes before the one that makes it full.
    room: LocalU64,
    /// How many ranges, and pages, the remote batch has once there is no room.
    count_without: LocalU64,
    pages_without: LocalU64,
    /// The link to the oldest range.
    last: LocalU64,
}

/// A range on its way back to its owner.
#[derive(Debug, Clone, Copy)]
pub(super) struct Returned<'a> {
    pub word: &'a AtomicU64,
    pub page: u64,
    pub order: u32,
    pub zone: usize,
}

impl Returned<'_> {
    #[inline]
    fn order_and_zone(&self) -> u64 {
        (self.zone as u64 * (RemoteBatch::ORDER + 1)) | u64::from(self.order)
    }
}

impl RemoteBatch {
    const ORDER: u64 = 63;

    /// Pages in it.
    fn pages(&self) -> u64 {
        self.pages_without.get().wrapping_sub(self.room_pages())
    }

    /// Pages that there is room for.
    fn room_pages(&self) -> u64 {
        self.room.get() << (self.order_and_zone.get() & Self::ORDER)
    }

    /// As [`pages`](Self::pages), for a reader on any CPU. It reads several words: while their CPU changes them, the
    /// number may be wrong, but it is never more than a full remote batch has.
    pub(super) fn peek(&self) -> u64 {
        self.pages().min(REMOTE_BATCH_PAGES)
    }

    /// Adds a range whose word was `handed_out`, if that says `asked` pages and this remote batch's owner, if the remote batch has
    /// room, and if its newest range is of the same order and zone. Returns whether it did.
    #[inline]
    pub(super) fn add_fast(&self, range: Returned<'_>, handed_out: u64, asked: u64) -> bool {
        if handed_out != self.handed_out.get() | asked || self.order_and_zone.get() != range.order_and_zone()
        {
            return false;
        }
        let Some(room) = self.room.get().checked_sub(1) else {
            return false;
        };
        range.word.store(self.first.get(), Ordering::Relaxed);
        self.first.set(Link::to(range.page, range.order).bits());
        self.room.set(room);
        true
    }

    /// Adds a range, which the CPU `owner` owns. Sends a remote batch to another owner before that, and the remote batch with the
    /// range if it is full then or has `most` pages. Returns how many pages were sent.
    pub(super) fn add(
        &self,
        meta: &RangeMeta,
        remote_queues: &[CachePadded<RemoteQueue>],
        owner: u64,
        range: Returned<'_>,
        most: u64,
    ) -> u64 {
        let Returned { word, page, order, .. } = range;
        let mut sent = 0;
        if self.handed_out.get() != handed_out(owner, 0) {
            sent += self.send(meta, remote_queues);
            self.handed_out.set(handed_out(owner, 0));
        }
        let (next, link) = (self.first.get(), Link::to(page, order).bits());
        if next == Link::END.bits() {
            self.last.set(link);
        }
        word.store(next, Ordering::Relaxed);
        self.first.set(link);
        let (count, pages) = (self.count() + 1, self.pages() + (1 << order));
        // How many ranges of this order make it full. The last of them is added here again, which sends the remote batch.
        let pages_left = REMOTE_BATCH_PAGES.min(most).saturating_sub(pages);
        let until_full = REMOTE_BATCH.saturating_sub(count).min(pages_left.div_ceil(1 << order));
        self.order_and_zone.set(range.order_and_zone());
        self.set(until_full.saturating_sub(1), count, pages);
        if until_full == 0 { sent + self.send(meta, remote_queues) } else { sent }
    }

    fn count(&self) -> u64 {
        self.count_without.get() - self.room.get()
    }

    /// Records that it has `count` ranges of `pages` pages, and room for `room` more of its order.
    fn set(&self, room: u64, count: u64, pages: u64) {
        self.room.set(room);
        self.count_without.set(count + room);
        self.pages_without.set(pages + self.room_pages());
    }

    /// Sends what is in it. Returns how many pages that was.
    #[cold]
    #[inline(never)]
    fn send(&self, meta: &RangeMeta, remote_queues: &[CachePadded<RemoteQueue>]) -> u64 {
        let pages = self.pages();
        let first = self.take();
        if let (Some((owner, _)), true) = (owner_and_pages(self.handed_out.get()), first != Link::END)
            && let Some(remote_queue) = remote_queues.get(owner as usize)
        {
            remote_queue.pages.fetch_add(pages, Ordering::Relaxed);
            remote_queue.push(meta, first, Link::from_bits(self.last.get()));
        }
        pages
    }

    /// Takes the newest range out: its page and order.
    pub(super) fn pop(&self, meta: &RangeMeta) -> Option<(u64, u32)> {
        let Some((page, order, next)) = meta.follow(Link::from_bits(self.first.get())) else {
            self.take();
            return None;
        };
        let (count, pages) = (self.count(), self.pages());
        self.first.set(next.bits());
        self.set(0, count.saturating_sub(1), pages.saturating_sub(1 << order));
        Some((page, order))
    }

    /// Empties it: the link to the first of its ranges.
    fn take(&self) -> Link {
        let first = Link::from_bits(self.first.get());
        self.first.set(Link::END.bits());
        self.set(0, 0, 0);
        first
    }
}

#[cfg(all(test, loom))]
#[path = "../../tests/inside/iova/remote.rs"]
mod tests;
