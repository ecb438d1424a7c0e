//! Per-CPU magazines of free runs, newest first. Only their CPU changes them, so it takes and frees a run without a lock.
//!
//! Each size has two magazines. The CPU pops from and pushes to the *loaded* one. A full loaded magazine becomes the *previous* one, and the runs of
//! the former previous one, idle for the longest, go back to the areas. A list is linked through the metadata of its runs, so a free needs no memory.

use super::areas::Areas;
use super::bits::WORD_ORDER;
use super::slot_meta::{List, SlotMeta};
use crate::percpu::LocalU64;

/// A CPU keeps runs of 1, 2, 4, .. 2^(*ORDERS* - 1) slots: up to 128, the longest mapping of Linux's swiotlb.
pub(super) const ORDERS: u32 = WORD_ORDER + 2;

/// The most runs in a magazine, and the most that are taken from an area at once.
pub(super) const MOST: usize = 32;

/// One CPU's magazines. Only the holder of that CPU's lock changes its words.
#[derive(Debug)]
pub(super) struct Cpu {
    sizes: [Size; ORDERS as usize],
    /// 1 once any magazine was granted room, until the CPU is released.
    pub joined: LocalU64,
}

#[derive(Debug)]
#[repr(align(64))]
struct Size {
    loaded: List,
    previous: List,
    /// The most runs of each magazine; 0 until some are granted.
    granted: LocalU64,
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
    /// 1. All calls for this CPU, [`put`](Self::put) included, are with the same `areas`, or with their metadata.
    #[inline]
    pub unsafe fn take<'a>(&self, _areas: &'a Areas, order: u32) -> Option<&'a SlotMeta> {
        // SAFETY: `List::take`'s clause 1: metadata lives as long as its areas, and all metadata on the list is of these, by clause 1.
        unsafe { self.size(order).loaded.take() }
    }

    /// Puts a run into the loaded magazine, unless that is full. Returns whether it did. O(1).
    #[inline]
    pub fn put(&self, meta: &SlotMeta, order: u32) -> bool {
        let size = self.size(order);
        let room = size.loaded.count() < size.granted.get();
        if room {
            size.loaded.put(meta);
        }
        room
    }

    /// Loads the previous magazine, if the loaded one is empty.
    pub fn load_previous(&self, order: u32) {
        let size = self.size(order);
        if size.loaded.count() == 0 {
            size.loaded.take_over(&size.previous);
        }
    }

    pub fn is_empty(&self, order: u32) -> bool {
        self.size(order).loaded.count() == 0
    }

    /// Gives the runs of the previous magazine back to the areas, and makes the loaded one the previous.
    ///
    /// # Safety
    /// As [`take`](Self::take).
    pub unsafe fn retire_previous(&self, areas: &Areas, order: u32) {
        let size = self.size(order);
        // SAFETY: as in `take`, by the caller's clause 1.
        areas.give(core::iter::from_fn(|| unsafe { size.previous.take() }), 1 << order);
        size.previous.take_over(&size.loaded);
    }

    /// Grants each of a size's two magazines room for `runs` runs.
    pub fn grant(&self, order: u32, runs: u64) {
        self.size(order).granted.set(runs.min(MOST as u64));
    }

    /// The number of runs to take from an area now: twice as many as last time, up to the grant.
    pub fn next_batch(&self, order: u32) -> usize {
        let size = self.size(order);
        let next = (size.batch.get() * 2).min(size.granted.get()).clamp(1, MOST as u64);
        size.batch.set(next);
        next as usize
    }

    /// Gives all runs back, and takes back all grants. At most 8 x 64 runs.
    ///
    /// # Safety
    /// As [`take`](Self::take).
    pub unsafe fn drain(&self, areas: &Areas) {
        for order in 0..ORDERS {
            self.size(order).granted.set(0);
            // SAFETY: clause 1 is the caller's.
            unsafe {
                self.retire_previous(areas, order);
                self.retire_previous(areas, order);
            }
        }
    }

    /// The slots in all magazines; slightly wrong while the owner changes them.
    pub fn kept(&self) -> u64 {
        let of = |order| (self.size(order).loaded.count() + self.size(order).previous.count()) << order;
        (0..ORDERS).map(of).sum()
    }
}
