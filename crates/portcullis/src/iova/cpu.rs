//! One CPU's free lists of an address space, by size, and its remote batches for other CPUs. A free needs no memory.
//!
//! A list is linked through the metadata of its ranges, newest first, so it has no capacity of its own. Room for ranges
//! is *granted* to it; a zone's grants together are at most the CPU's budget. So a free looks at one list only.

mod remote;

use core::mem::MaybeUninit;

use super::class::{CACHED_ORDERS, Class};
use super::meta::{Place, RangeMeta};
use super::near::{Near, first_key};
use super::remote::{RemoteBatch, RemoteQueue};
use super::word::{Link, handed_out};
use crate::heap::{OutOfMemory, Shared, write_fields};
use crate::percpu::LocalU64;
use crate::sync::{AtomicU64, Ordering};

/// The low zone, and the rest: each has lists of its own.
pub(super) const ZONES: usize = 2;

/// The lists of a zone: a power of two, so that indexing needs no bounds check. Lists from [`CACHED_ORDERS`] on stay
/// empty; only their keys are used, to find the words of larger ranges.
const ORDER_ROOM: usize = 16;

/// The most ranges that a refill takes from the bitmap, and that a call which makes room returns to it.
pub(super) const BATCH: usize = 64;

/// Remote batches of a CPU. Owners with the same number modulo this share one.
const REMOTE_BATCHES: usize = 4;

/// The most ranges that a CPU takes back from its remote-free queue in one call.
const SLICE: usize = 64;

/// One CPU's lists and batches. They change only in an exclusive section of the CPU, or under a revocation.
#[derive(Debug)]
pub(super) struct Cpu {
    /// The lists by zone and order. Indexing takes a shift and no bounds check.
    lists: [[List; ORDER_ROOM]; ZONES],
    near: Near,
    remote_batches: [RemoteBatch; REMOTE_BATCHES],
    /// The head of the chain that was taken out of the remote-free queue and is not yet on a list.
    arrived: LocalU64,
    sent: LocalU64,
    received: LocalU64,
    /// The ranges of a refill under way, which would take too much of the stack.
    pub(super) fetched: [LocalU64; BATCH],
}

#[derive(Debug)]
#[repr(align(64))]
struct List {
    first: LocalU64,
    /// Free capacity, in ranges: `granted` less the length of the list.
    room: LocalU64,
    /// Capacity, in ranges, that the CPU's budget grants this list.
    granted: LocalU64,
    /// The ranges of the last refill.
    last_refill: LocalU64,
    /// The metadata word of a range that this CPU has handed out, with page count 0. An allocation ors the count in.
    handed_out: u64,
    /// The key of page 0's word. Its low six bits are free, and hold the shift from a page to the index of its word, so
    /// that one load gives both.
    key_and_shift: u64,
}

impl Cpu {
    /// Makes the lists of the CPU `owner` for the ranges of `meta` in `place`, as they take several KiB: empty, and
    /// without room.
    pub(super) fn make_in(place: &mut MaybeUninit<Self>, owner: u64, meta: Shared<RangeMeta>) -> &mut Self {
        let list = |order| List {
            first: LocalU64::new(Link::END.bits()),
            room: LocalU64::new(0),
            granted: LocalU64::new(0),
            last_refill: LocalU64::new(0),
            handed_out: handed_out(owner, 0),
            key_and_shift: first_key(Class::of(order).array()) | u64::from(Place::shift(Class::of(order))),
        };
        let at = place.as_mut_ptr();
        // SAFETY: each write is to a field of `place`, or to an element of one. The loops and `write_fields` cover all
        // of them. `Near::write`, 1: its field lies in `place`.
        unsafe {
            for zone in 0..ZONES {
                for order in 0..ORDER_ROOM {
                    (&raw mut (*at).lists[zone][order]).write(list(order as u32));
                }
            }
            Near::write(&raw mut (*at).near, meta);
            for number in 0..REMOTE_BATCHES {
                (&raw mut (*at).remote_batches[number]).write(RemoteBatch::default());
            }
            for number in 0..BATCH {
                (&raw mut (*at).fetched[number]).write(LocalU64::new(0));
            }
            write_fields!(
                at,
                made [lists, near, remote_batches, fetched],
                arrived: LocalU64::new(Link::END.bits()),
                sent: LocalU64::new(0),
                received: LocalU64::new(0),
            );
            place.assume_init_mut()
        }
    }

    pub(super) fn newest(&self, zone: usize, order: u32) -> Option<u64> {
        Link::from_bits(self.list(zone, order).first.get()).page()
    }

    /// Takes the newest free range of `class` in `zone`, and records that the CPU has handed it out for `asked` pages,
    /// fewer than 2^50. Returns `None` if there is none, or if its word is not [remembered](Self::find). O(1).
    #[inline]
    pub(super) fn take(&self, zone: usize, class: Class, asked: u64) -> Option<u64> {
        let list = self.list(zone, class.order());
        let first = Link::from_bits(list.first.get());
        if first == Link::END {
            return None;
        }
        // Every range on the list has the list's order.
        let page = first.bits().wrapping_sub(Link::to(0, class.order()).bits());
        let word = self.near.word(list.key_of(page))?;
        let next = Link::from_bits(word.load(Ordering::Relaxed));
        if !next.is_link() {
            return None;
        }
        word.store(list.handed_out | asked, Ordering::Relaxed);
        list.first.set(next.bits());
        list.room.set(list.room.get() + 1);
        Some(page)
    }

    /// Puts the range of `class` at `page` onto its list, if its word is [remembered](Self::find) and says that the CPU
    /// has handed it out for `asked` pages, and if the list has room. Returns whether it did. O(1). Refuses a page at
    /// which no such range begins: it has no word, or its word says another number of pages.
    #[inline]
    pub(super) fn put(&self, zone: usize, class: Class, (page, asked): (u64, u64)) -> bool {
        let list = self.list(zone, class.order());
        let Some(word) = self.near.word(list.key_of(page)) else {
            return false;
        };
        word.load(Ordering::Relaxed) == list.handed_out | asked && list.push(word, page, class.order())
    }

    /// Returns the word of the range of `class` at `page`, whichever CPU owns it, if there ever was one there. `page`
    /// is a multiple of its size below 2^53, as every page in a link is. Remembers the leaf, so that the next
    /// [`take`](Self::take) or [`put`](Self::put) needs no walk.
    #[inline]
    pub(super) fn find(&self, page: u64, class: Class) -> Option<&AtomicU64> {
        let key = self.list(0, class.order()).key_of(page);
        self.near.word(key).or_else(|| self.near.find(Place::of(page, class)))
    }

    #[inline]
    pub(super) fn push(&self, zone: usize, word: &AtomicU64, page: u64, order: u32) -> bool {
        self.list(zone, order).push(word, page, order)
    }

    /// As [`push`](Self::push), for a range that may have no word yet. May allocate; after an error the range is not on
    /// the list.
    pub(super) fn push_new(&self, zone: usize, class: Class, page: u64) -> Result<bool, OutOfMemory> {
        let list = self.list(zone, class.order());
        let word = match self.find(page, class) {
            Some(word) => word,
            None => {
                self.near.meta().make(page, class.order(), Link::END.bits())?;
                self.find(page, class).ok_or(OutOfMemory)?
            }
        };
        Ok(list.push(word, page, class.order()))
    }

    /// Raises the capacity of the list of `order` by up to `wanted` ranges, so that the zone's lists together stay
    /// within `budget` pages. If the budget is short, it first takes back the unused capacity of the other lists.
    /// Returns the list's room. O(1): looks at each list of the zone.
    pub(super) fn grant(&self, zone: usize, order: u32, wanted: u64, budget: u64) -> u64 {
        let lists = &self.lists[zone];
        let granted = || {
            lists.iter().zip(0..CACHED_ORDERS).map(|(list, order)| list.granted.get() << order).sum::<u64>()
        };
        let list = self.list(zone, order);
        let room = || (budget.saturating_sub(granted()) >> order).min(wanted);
        if room() < wanted {
            let others = lists.iter().filter(|other| !core::ptr::eq(*other, list));
            others.for_each(List::give_up_room);
        }
        let more = room();
        list.granted.set(list.granted.get() + more);
        list.room.set(list.room.get() + more);
        list.room.get()
    }

    /// Returns how many ranges of `order` to fetch next: twice as many as last time, 16 at least and 64 at most, before
    /// [`Cached::refill`](super::cached::Cached) limits it to a sixteenth of the budget. The words of 16 ranges, and
    /// their page-table entries, fill at least two cache lines, so CPUs share few of these lines.
    pub(super) fn next_batch(&self, zone: usize, order: u32) -> u64 {
        let list = self.list(zone, order);
        let ranges = (list.last_refill.get() * 2).clamp(16, BATCH as u64);
        list.last_refill.set(ranges);
        ranges
    }

    /// Takes the newest ranges off a list, as many as `out` has room for, and withdraws their room and the list's
    /// unused room. Halves the size of the last refill, so that the next is no larger. Returns the number of ranges.
    pub(super) fn spill(&self, zone: usize, order: u32, out: &mut [u64]) -> usize {
        let list = self.list(zone, order);
        let mut link = Link::from_bits(list.first.get());
        let mut spilled = 0;
        for place in out {
            let Some((page, _, next)) = self.near.meta().follow(link) else { break };
            *place = page;
            link = next;
            spilled += 1;
        }
        list.first.set(link.bits());
        list.last_refill.set(list.last_refill.get() / 2);
        list.room.set(list.room.get() + spilled as u64);
        list.give_up_room();
        spilled
    }

    /// Empties all lists and batches and the remote-free queue, and calls `spill` with the page and the order of each
    /// range, which is off its list by then: if `spill` panics, the others stay where they are.
    pub(super) fn drain(&self, remote_queue: &RemoteQueue, mut spill: impl FnMut(u64, u32)) {
        for list in self.lists.iter().flatten() {
            while let Some((page, order, next)) = self.near.meta().follow(Link::from_bits(list.first.get())) {
                list.first.set(next.bits());
                list.room.set(list.room.get() + 1);
                spill(page, order);
            }
            list.first.set(Link::END.bits());
            list.granted.set(0);
            list.room.set(0);
        }
        for remote_batch in &self.remote_batches {
            while let Some((page, order)) = remote_batch.pop(self.near.meta()) {
                spill(page, order);
            }
        }
        let received = |order| self.received.set(self.received.get().wrapping_add(1u64 << order));
        // First the rest of the arrived ranges, then those in the remote-free queue.
        for _ in 0..2 {
            while let Some((page, order, next)) = self.near.meta().follow(Link::from_bits(self.arrived.get()))
            {
                self.arrived.set(next.bits());
                received(order);
                remote_queue.arrived(1 << order);
                spill(page, order);
            }
            self.arrived.set(remote_queue.take().bits());
        }
    }

    pub(super) fn cached(&self) -> u64 {
        let lists = self.lists.iter().flat_map(|lists| lists.iter().zip(0..CACHED_ORDERS));
        lists.fold(0, |sum: u64, (list, order)| sum.wrapping_add(list.count() << order))
    }

    #[inline]
    fn list(&self, zone: usize, order: u32) -> &List {
        // The remainders show the compiler that both indices are in range.
        &self.lists[zone % ZONES][order as usize % ORDER_ROOM]
    }
}

impl List {
    /// The number of ranges. Another CPU may read the two words at different times; the result is then off by at most
    /// the list's room.
    fn count(&self) -> u64 {
        self.granted.get().saturating_sub(self.room.get())
    }

    fn give_up_room(&self) {
        self.granted.set(self.count());
        self.room.set(0);
    }

    /// Returns the key of the word of the range at `page`. If no range of this order begins there, the key lies outside
    /// the array, or is that of a word of another order, which says another number of pages.
    #[inline]
    fn key_of(&self, page: u64) -> u64 {
        const SHIFT: u64 = 63;
        page.rotate_right((self.key_and_shift & SHIFT) as u32).wrapping_add(self.key_and_shift & !SHIFT)
    }

    #[inline]
    fn push(&self, word: &AtomicU64, page: u64, order: u32) -> bool {
        let Some(room) = self.room.get().checked_sub(1) else {
            return false;
        };
        word.store(self.first.get(), Ordering::Relaxed);
        self.first.set(Link::to(page, order).bits());
        self.room.set(room);
        true
    }
}

#[cfg(test)]
impl Cpu {
    fn new(owner: u64, meta: Shared<RangeMeta>) -> alloc::boxed::Box<Self> {
        let mut place = alloc::boxed::Box::new_uninit();
        Self::make_in(&mut place, owner, meta);
        // SAFETY: it was made there.
        unsafe { place.assume_init() }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/iova/cpu.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "../../tests/inside/iova/cpu_model.rs"]
mod model;
