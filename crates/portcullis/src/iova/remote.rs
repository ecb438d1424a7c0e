//! Remote frees: ranges that another CPU freed, in transit to the CPU that owns them. Each arrives there once, and its
//! owner sees its word as the sender wrote it.
//!
//! A CPU that frees another's range links it into a [`RemoteBatch`] for that owner. When the batch is full, the CPU
//! pushes it onto the owner's [`RemoteQueue`] with one compare-and-swap. The owner takes all that has arrived with one
//! exchange. Nothing is ever popped singly, so there is no ABA problem.
//!
//! Memory ordering. The words of a batch are written before the push, which is a `Release`; the owner's exchange is an
//! `Acquire`, so it sees them. Later pushes keep that order: a compare-and-swap continues the release sequence of the
//! one before it. The owner may use a batch as its list and leave the words as they came: its own later writes to these
//! words come after its exchange, and so after the senders' writes.

use super::meta::RangeMeta;
use super::word::{Link, handed_out, owner_and_pages};
use crate::percpu::{CachePadded, LocalU64};
use crate::sync::{AtomicU64, Ordering};

/// A full remote batch: this many ranges are pushed with one compare-and-swap.
pub(super) const REMOTE_BATCH: u64 = 32;

/// A remote batch is sent once it holds this many pages, however few ranges these are.
pub(super) const REMOTE_BATCH_PAGES: u64 = 512;

/// One CPU's remote-free queue: the head of a Treiber-style chain that is only ever taken whole, and the pages in it
/// and in the rest that the owner has taken out and not yet put onto lists.
#[derive(Debug)]
pub(super) struct RemoteQueue {
    first: AtomicU64,
    pages: AtomicU64,
}

impl RemoteQueue {
    pub(super) fn new() -> Self {
        Self { first: AtomicU64::new(Link::END.bits()), pages: AtomicU64::new(0) }
    }

    pub(super) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    pub(super) fn arrived(&self, pages: u64) {
        self.pages.fetch_sub(pages, Ordering::Relaxed);
    }

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

    pub(super) fn take(&self) -> Link {
        // A load first, as an exchange would take the cache line from the CPUs that push.
        if self.first.load(Ordering::Relaxed) == Link::END.bits() {
            return Link::END;
        }
        Link::from_bits(self.first.swap(Link::END.bits(), Ordering::Acquire))
    }
}

/// A chain of unsent ranges for one owner. Only one CPU uses it.
#[derive(Debug, Default)]
pub(super) struct RemoteBatch {
    first: LocalU64,
    /// The word of a range that the owner has handed out, with page count 0; 0 if there is no owner yet.
    handed_out: LocalU64,
    /// The order of the newest range in the low six bits, and its zone above them.
    order_and_zone: LocalU64,
    /// How many more ranges of that order and zone fit before the one that fills, and so sends, the batch.
    room: LocalU64,
    /// What the counts will be once `room` is used up: the present ones are these less the room.
    count_at_full: LocalU64,
    pages_at_full: LocalU64,
    last: LocalU64,
}

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

    fn pages(&self) -> u64 {
        self.pages_at_full.get().wrapping_sub(self.room_pages())
    }

    fn room_pages(&self) -> u64 {
        self.room.get() << (self.order_and_zone.get() & Self::ORDER)
    }

    /// As [`pages`](Self::pages), for a reader on any CPU. It reads several words: while the batch changes, the number
    /// may be wrong, but it is never more than 512.
    pub(super) fn peek(&self) -> u64 {
        self.pages().min(REMOTE_BATCH_PAGES)
    }

    /// Adds a range whose word was `handed_out`, if that says `asked` pages and this batch's owner, if the batch has
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

    /// Adds a range of the CPU `owner`. A batch for another owner is sent first. If the range makes the batch full, or
    /// brings it to `most` pages, it is sent with the range. Returns the number of pages sent.
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
        // How many more ranges of this order fill the batch. `room` is one less, so the last one comes here, too.
        let pages_left = REMOTE_BATCH_PAGES.min(most).saturating_sub(pages);
        let until_full = REMOTE_BATCH.saturating_sub(count).min(pages_left.div_ceil(1 << order));
        self.order_and_zone.set(range.order_and_zone());
        self.set(until_full.saturating_sub(1), count, pages);
        if until_full == 0 { sent + self.send(meta, remote_queues) } else { sent }
    }

    fn count(&self) -> u64 {
        self.count_at_full.get() - self.room.get()
    }

    fn set(&self, room: u64, count: u64, pages: u64) {
        self.room.set(room);
        self.count_at_full.set(count + room);
        self.pages_at_full.set(pages + self.room_pages());
    }

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
