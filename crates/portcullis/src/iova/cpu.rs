//! What one CPU keeps of an address space: lists of free ranges by size, and chains for other CPUs.
//!
//! A list is threaded through the notes of its ranges, newest first, so it has no capacity of its own: a free
//! needs no memory. Beside it stands the rest of the last block that was fetched from the backing structure,
//! which is handed out piece by piece without ever having been a list.

use super::inbox::{Inbox, Outbox};
use super::notes::Notes;
use super::space::Request;
use super::word::{Link, Note, handed_out};
use crate::percpu::{CachePadded, LocalU64};
use crate::sync::{AtomicU64, Ordering};

/// Size classes that are cached: 1, 2, 4, .. 512 granules (4 KiB to 2 MiB with the usual granule).
pub const CACHED_ORDERS: u32 = 10;

/// Zones with lists of their own: below 4 GiB, and above.
pub(super) const ZONES: usize = 2;

/// Owners that one CPU collects ranges for at the same time.
const OUTBOXES: usize = 4;

/// Ranges of its inbox that a CPU sorts in at once.
const SLICE: usize = 64;

/// One CPU's lists. All its words are changed by the CPU that has it alone.
#[derive(Debug, Default)]
pub(super) struct Cpu {
    classes: [[Class; CACHED_ORDERS as usize]; ZONES],
    outboxes: [Outbox; OUTBOXES],
    /// The rest of what came out of the inbox.
    arrived: LocalU64,
    /// Pages in each zone's lists and blocks.
    cached: [LocalU64; ZONES],
    /// Pages sent to other CPUs so far, and pages received from them.
    sent: LocalU64,
    received: LocalU64,
}

#[derive(Debug, Default)]
struct Class {
    /// The link to the newest free range.
    first: LocalU64,
    count: LocalU64,
    /// The rest of a block: its ranges below `block_end`, `block_left` of them.
    block_end: LocalU64,
    block_left: LocalU64,
    /// How many ranges to fetch at once.
    batch: LocalU64,
}

/// What a CPU gives up.
pub(super) enum Drained {
    /// A free range of 2^`order` pages at `page`.
    Range { page: u64, order: u32 },
    /// The rest of a block: `pages` pages from `page` on, `count` ranges.
    Block { page: u64, pages: u64, count: usize },
}

impl Cpu {
    /// The newest free range of `order` in `zone`, or a piece of the block, if that lies at or below
    /// `max_page`. O(1): one entry is looked at. Notes that `owner` has handed it out for `asked` pages.
    #[inline]
    pub(super) fn take(
        &self,
        notes: &Notes,
        zone: usize,
        Request { pages: asked, order, max_page }: Request,
        owner: u64,
    ) -> Option<u64> {
        let class = &self.classes[zone][order as usize];
        let pages = 1 << order;
        let handed_out = handed_out(owner, asked);
        let page = if let Some((page, _)) = Link::from_bits(class.first.get()).target() {
            if page + (pages - 1) > max_page {
                return None;
            }
            let word = notes.word(page, order)?;
            class.first.set(Note::next(word.load(Ordering::Relaxed))?.bits());
            word.store(handed_out, Ordering::Relaxed);
            class.count.set(class.count.get() - 1);
            page
        } else {
            let left = class.block_left.get().checked_sub(1)?;
            let page = class.block_end.get() - pages;
            let word = notes.word(page, order).filter(|_| page + (pages - 1) <= max_page)?;
            word.store(handed_out, Ordering::Relaxed);
            class.block_end.set(page);
            class.block_left.set(left);
            page
        };
        self.cached[zone].set(self.cached[zone].get() - pages);
        Some(page)
    }

    /// Puts a free range of its own, whose word is `word`, onto its list.
    #[inline]
    pub(super) fn put(&self, word: &AtomicU64, zone: usize, order: u32, page: u64) {
        let class = &self.classes[zone][order as usize];
        let note = Note::Listed { order, next: Link::from_bits(class.first.get()) };
        word.store(note.encode(), Ordering::Relaxed);
        class.first.set(Link::to(page, order).bits());
        class.count.set(class.count.get() + 1);
        self.cached[zone].set(self.cached[zone].get() + (1 << order));
    }

    /// Whether the class has neither a list nor a block.
    pub(super) fn is_empty(&self, zone: usize, order: u32) -> bool {
        let class = &self.classes[zone][order as usize];
        Link::from_bits(class.first.get()) == Link::END && class.block_left.get() == 0
    }

    /// Puts another CPU's range onto the chain for it, unless more than `most` pages are on their way to that
    /// CPU already. Whether it did.
    pub(super) fn post(
        &self,
        notes: &Notes,
        inboxes: &[CachePadded<Inbox>],
        owner: u64,
        order: u32,
        page: u64,
        most: u64,
    ) -> bool {
        if inboxes.get(owner as usize).is_none_or(|inbox| inbox.pages() + (1 << order) > most) {
            return false;
        }
        self.sent.set(self.sent.get().wrapping_add(1 << order));
        self.outboxes[owner as usize % OUTBOXES].add(notes, inboxes, owner, page, order);
        true
    }

    /// Sorts in up to 64 ranges that other CPUs sent. Each goes to `keep` with its order. Whether there were
    /// any.
    pub(super) fn receive(&self, notes: &Notes, inbox: &Inbox, mut keep: impl FnMut(u64, u32)) -> bool {
        let mut link = Link::from_bits(self.arrived.get());
        if link == Link::END {
            link = inbox.take();
        }
        let mut received = 0;
        while received < SLICE
            && let Some((page, order, next)) = notes.follow(link)
        {
            link = next;
            self.received.set(self.received.get().wrapping_add(1 << order));
            inbox.arrived(1 << order);
            keep(page, order);
            received += 1;
        }
        self.arrived.set(link.bits());
        received > 0
    }

    /// How many ranges of `order` to fetch next, at least one: twice as many as the last time, up to `most`
    /// pages.
    pub(super) fn next_batch(&self, zone: usize, order: u32, most: u64) -> u64 {
        let class = &self.classes[zone][order as usize];
        let batch = (class.batch.get() * 2).clamp(4, 64).min(most >> order).max(1);
        class.batch.set(batch);
        batch
    }

    /// Takes over a block of `count` ranges that ends before page `end`. The class has no other.
    pub(super) fn set_block(&self, zone: usize, order: u32, end: u64, count: u64) {
        let class = &self.classes[zone][order as usize];
        class.block_end.set(end);
        class.block_left.set(count);
        self.cached[zone].set(self.cached[zone].get() + (count << order));
    }

    /// Takes half of the ranges of a class off its list, giving each page to `spill`, and fetches less next
    /// time. Whether there were any.
    pub(super) fn spill(&self, notes: &Notes, zone: usize, order: u32, mut spill: impl FnMut(u64)) -> bool {
        let class = &self.classes[zone][order as usize];
        let half = class.count.get().div_ceil(2);
        class.batch.set(class.batch.get() / 2);
        for _ in 0..half {
            let Some((page, _, next)) = notes.follow(Link::from_bits(class.first.get())) else { break };
            class.first.set(next.bits());
            class.count.set(class.count.get() - 1);
            self.cached[zone].set(self.cached[zone].get() - (1 << order));
            spill(page);
        }
        half > 0
    }

    /// Empties everything, the inbox too, giving to `spill` each range, and each rest of a block as a whole.
    pub(super) fn drain(&self, notes: &Notes, inbox: &Inbox, mut spill: impl FnMut(Drained)) {
        // Gives up a list; how many pages there were.
        let mut chain = |mut link| {
            let mut pages: u64 = 0;
            while let Some((page, order, next)) = notes.follow(link) {
                // The link is read before the range is given up: then its word may be anybody's.
                link = next;
                pages += 1 << order;
                spill(Drained::Range { page, order });
            }
            pages
        };
        for class in self.classes.iter().flatten() {
            chain(Link::from_bits(class.first.get()));
            class.first.set(Link::END.bits());
            class.count.set(0);
        }
        // What was on its way never arrives: it is received here.
        let unsent: u64 = self.outboxes.iter().map(|outbox| chain(outbox.take())).sum();
        let sent = chain(Link::from_bits(self.arrived.get())) + chain(inbox.take());
        self.arrived.set(Link::END.bits());
        inbox.arrived(sent);
        self.received.set(self.received.get().wrapping_add(unsent).wrapping_add(sent));
        for zone in &self.classes {
            for (order, class) in zone.iter().enumerate() {
                let count = class.block_left.get();
                if count > 0 {
                    let pages = count << order;
                    let page = class.block_end.get() - pages;
                    spill(Drained::Block { page, pages, count: count as usize });
                }
                class.block_left.set(0);
            }
        }
        self.cached.iter().for_each(|cached| cached.set(0));
    }

    /// Pages in the lists and blocks of `zone`.
    #[inline]
    pub(super) fn cached(&self, zone: usize) -> u64 {
        self.cached[zone].get()
    }

    /// Pages sent to other CPUs less pages received from them, wrapped: over all CPUs, those on their way.
    pub(super) fn on_their_way(&self) -> u64 {
        self.sent.get().wrapping_sub(self.received.get())
    }
}
