//! Both sides of a remote free: the freeing CPU posts the range to its owner; the owner adopts what has arrived. Each
//! range is on one CPU's list, in one remote batch, or in one remote-free queue.

use super::{Cpu, REMOTE_BATCHES, SLICE};
use crate::iova::class::Class;
use crate::iova::near::LeafAt;
use crate::iova::remote::{RemoteBatch, RemoteQueue, Returned};
use crate::iova::word::{Link, owner};
use crate::percpu::CachePadded;
use crate::sync::{AtomicU64, Ordering};

impl Cpu {
    /// Puts the range of `class` at `page` in `zone`, which another CPU has handed out for `asked` pages, into the
    /// remote batch to that CPU, if there is one with room whose newest range is of the same class and zone. Returns
    /// whether it did. O(1). Refuses what [`put`](Self::put) refuses.
    #[inline]
    pub(in crate::iova) fn post_fast(&self, zone: usize, class: Class, (page, asked): (u64, u64)) -> bool {
        let key = self.list(0, class.order()).key_of(page);
        let Some(word) = self.near.word(key) else {
            return false;
        };
        // Relaxed: the owner wrote the word before it returned the range, and the caller has the range from there. A
        // caller that frees it a second time may find an older word, as in the slow path.
        let handed_out = word.load(Ordering::Relaxed);
        let range = Returned { word, page, order: class.order(), zone };
        self.remote_batch(owner(handed_out)).add_fast(range, handed_out, asked)
    }

    /// Puts another CPU's range into a remote batch to that CPU, unless the owner's remote-free queue would then hold
    /// more than `most` pages. Returns whether it did.
    #[inline]
    pub(in crate::iova) fn post(
        &self,
        remote_queues: &[CachePadded<RemoteQueue>],
        owner: u64,
        range: Returned<'_>,
        most: u64,
    ) -> bool {
        if remote_queues
            .get(owner as usize)
            .is_none_or(|remote_queue| remote_queue.pages() + (1 << range.order) > most)
        {
            return false;
        }
        // The remote batches of one CPU hold at most half of its budget, so all unsent ranges together are at most half
        // of all budgets.
        let batch = most / (2 * REMOTE_BATCHES as u64);
        let sent = self.remote_batch(owner).add(self.near.meta(), remote_queues, owner, range, batch);
        self.sent.set(self.sent.get().wrapping_add(sent));
        true
    }

    #[inline]
    pub(super) fn remote_batch(&self, owner: u64) -> &RemoteBatch {
        &self.remote_batches[owner as usize % REMOTE_BATCHES]
    }

    /// Makes the front of the arrived chain the list of `class` in `zone`, which is empty. Stops after 64 ranges, at
    /// the first range of another class or zone, or when the list is full. Returns whether there were any. Writes only
    /// the last range's word.
    #[inline(never)]
    pub(in crate::iova) fn adopt(
        &self,
        remote_queue: &RemoteQueue,
        zone: usize,
        class: Class,
        is_in_zone: impl Fn(u64) -> bool,
    ) -> bool {
        let list = self.list(zone, class.order());
        let first = self.arriving(remote_queue);
        let most = list.room.get().min(SLICE as u64);
        let (mut link, mut last, mut count) = (first, None, 0);
        // Most of the ranges are neighbours: the next word is in the same leaf, and finding it takes no load.
        let mut leaf = LeafAt::NONE;
        while count < most
            && let Some(page) = link.page_of(class.order())
            && is_in_zone(page)
        {
            let key = list.key_of(page);
            let word = match leaf.word(key) {
                Some(word) => word,
                None => {
                    let Some(word) = self.find(page, class) else { break };
                    leaf = self.near.leaf(key);
                    word
                }
            };
            let next = Link::from_bits(word.load(Ordering::Relaxed));
            if !next.is_link() {
                break;
            }
            (link, last) = (next, Some(word));
            count += 1;
        }
        self.arrived.set(link.bits());
        let Some(last) = last else { return false };
        last.store(Link::END.bits(), Ordering::Relaxed);
        list.first.set(first.bits());
        list.room.set(list.room.get() - count);
        self.count_received(remote_queue, count << class.order());
        true
    }

    fn arriving(&self, remote_queue: &RemoteQueue) -> Link {
        let rest = Link::from_bits(self.arrived.get());
        if rest == Link::END { remote_queue.take() } else { rest }
    }

    fn count_received(&self, remote_queue: &RemoteQueue, pages: u64) {
        self.received.set(self.received.get().wrapping_add(pages));
        remote_queue.arrived(pages);
    }

    /// Takes up to 64 arrived ranges and calls `keep` with the word, the page and the order of each. Returns whether
    /// there were any.
    #[inline(never)]
    pub(in crate::iova) fn receive(
        &self,
        remote_queue: &RemoteQueue,
        mut keep: impl FnMut(&AtomicU64, u64, u32),
    ) -> bool {
        let mut link = self.arriving(remote_queue);
        let (mut received, mut pages) = (0, 0);
        while received < SLICE
            && let (Some(page), order) = (link.page(), link.order())
            && let Some(word) = self.find(page, Class::of(order))
            && let next = Link::from_bits(word.load(Ordering::Relaxed))
            && next.is_link()
        {
            link = next;
            pages += 1 << order;
            received += 1;
            keep(word, page, order);
        }
        if received == 0 {
            // Nothing has arrived; or a double free broke the chain, and the ranges after the break leak.
            link = Link::END;
        }
        self.arrived.set(link.bits());
        if received > 0 {
            self.count_received(remote_queue, pages);
        }
        received > 0
    }

    /// Returns the pages for other CPUs, sent or not, less the pages received from them. The difference wraps; its sum
    /// over all CPUs is the number of pages in transit.
    pub(in crate::iova) fn on_their_way(&self) -> u64 {
        let unsent = self
            .remote_batches
            .iter()
            .fold(0, |sum: u64, remote_batch| sum.wrapping_add(remote_batch.peek()));
        unsent.wrapping_add(self.sent.get()).wrapping_sub(self.received.get())
    }
}
