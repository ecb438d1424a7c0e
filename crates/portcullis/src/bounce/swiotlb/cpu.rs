//! What one CPU keeps: lists of free runs of slots, newest first.
//!
//! Of each size there are two magazines. The loaded one is used; when it is full it becomes the previous one, and what was
//! the previous one goes back to the areas as a whole: the runs that have been of no use for the longest, under one lock.
//! A list is threaded through the metadata of its runs, so a free needs no memory.

use super::areas::Areas;
use super::bits::WORD_ORDER;
use super::slot_meta::{List, SlotMeta};
use crate::percpu::LocalU64;

/// Runs of 1, 2, 4, .. 2^(this - 1) slots are kept: up to 128, which is the longest mapping that Linux's swiotlb has.
pub(super) const ORDERS: u32 = WORD_ORDER + 2;

/// The most runs of a list, and the most that are taken out of an area at once.
pub(super) const MOST: usize = 32;

/// One CPU's lists. All words are changed by whoever has it alone.
#[derive(Debug)]
pub(super) struct Cpu {
    sizes: [Size; ORDERS as usize],
    /// Whether anything was granted to any list.
    pub joined: LocalU64,
}

/// The free runs of one size.
#[derive(Debug)]
#[repr(align(64))]
struct Size {
    loaded: List,
    previous: List,
    /// The most runs of either list; 0 until something is granted.
    granted: LocalU64,
    /// How many were taken out of an area at once last time.
    batch: LocalU64,
}

impl Cpu {
    pub fn new() -> Self {
        let zero = || LocalU64::new(0);
        let size = |_| Size { loaded: List::new(), previous: List::new(), granted: zero(), batch: zero() };
        Self { sizes: [0; ORDERS as usize].map(size), joined: zero() }
    }

    #[inline]
    fn size(&self, order: u32) -> &Size {
        &self.sizes[order as usize]
    }

    /// Takes the newest run of 2^`order` slots from the loaded magazine. O(1).
    ///
    /// # Safety
    /// Every call of this, of [`put`](Self::put), and of what gives runs back, is with the same `areas` or metadata of
    /// those.
    #[inline]
    pub unsafe fn take<'a>(&self, _areas: &'a Areas, order: u32) -> Option<&'a SlotMeta> {
        // SAFETY: metadata live as long as their areas, and all that were put onto the list are of these.
        unsafe { self.size(order).loaded.take() }
    }

    /// Puts a run onto the loaded magazine, unless that is full. Whether it did. O(1).
    #[inline]
    pub fn put(&self, meta: &SlotMeta, order: u32) -> bool {
        let size = self.size(order);
        let room = size.loaded.count() < size.granted.get();
        if room {
            size.loaded.put(meta);
        }
        room
    }

    /// Makes the previous magazine the loaded one, if that is empty.
    pub fn turn(&self, order: u32) {
        let size = self.size(order);
        if size.loaded.count() == 0 {
            size.loaded.take_over(&size.previous);
        }
    }

    /// Whether the loaded magazine has nothing.
    pub fn is_empty(&self, order: u32) -> bool {
        self.size(order).loaded.count() == 0
    }

    /// Makes the loaded magazine the previous one, and gives back what was on that.
    ///
    /// # Safety
    /// As [`take`](Self::take).
    pub unsafe fn turn_out(&self, areas: &Areas, order: u32) {
        let size = self.size(order);
        // SAFETY: as in `take`.
        areas.give(core::iter::from_fn(|| unsafe { size.previous.take() }), 1 << order);
        size.previous.take_over(&size.loaded);
    }

    /// Grants room for so many runs to each of the two lists of a size.
    pub fn grant(&self, order: u32, runs: u64) {
        self.size(order).granted.set(runs.min(MOST as u64));
    }

    /// How many runs to take out of an area now: twice as many as last time, up to what is granted.
    pub fn next_batch(&self, order: u32) -> usize {
        let size = self.size(order);
        let next = (size.batch.get() * 2).min(size.granted.get()).clamp(1, MOST as u64);
        size.batch.set(next);
        next as usize
    }

    /// Gives everything back, and grants nothing any more. At most 8 x 64 runs.
    ///
    /// # Safety
    /// As [`take`](Self::take).
    pub unsafe fn drain(&self, areas: &Areas) {
        for order in 0..ORDERS {
            self.size(order).granted.set(0);
            // SAFETY: the caller's promise is passed on.
            unsafe {
                self.turn_out(areas, order);
                self.turn_out(areas, order);
            }
        }
    }

    /// Slots on all lists; a little off while the owner is at work.
    pub fn kept(&self) -> u64 {
        let of = |order| (self.size(order).loaded.count() + self.size(order).previous.count()) << order;
        (0..ORDERS).map(of).sum()
    }
}
