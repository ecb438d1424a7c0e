//! The free runs of slots that one CPU keeps, newest first. Only the CPU that has them changes
//! them, so taking a run or freeing one needs no lock.
//!
//! For each size there are two magazines. The CPU takes from and puts into the *loaded* one. When
//! that is full it becomes the *previous* one, and the runs of the former previous one, which were
//! unused for the longest, go back to the areas as a whole, under one lock. A list is threaded
//! through the metadata of its runs, so a free needs no memory.

use super::areas::Areas;
use super::bits::WORD_ORDER;
use super::slot_meta::{List, SlotMeta};
use crate::percpu::LocalU64;

/// A CPU keeps runs of 1, 2, 4, .. 2^(*ORDERS* - 1) slots: up to 128, the longest mapping that
/// Linux's swiotlb has.
pub(super) const ORDERS: u32 = WORD_ORDER + 2;

/// The most runs of a magazine, and the most that a CPU takes out of an area in one visit.
pub(super) const MOST: usize = 32;

/// One CPU's magazines. Only the CPU that has it, or a call that has it in that CPU's place,
/// changes its words.
#[derive(Debug)]
pub(super) struct Cpu {
    sizes: [Size; ORDERS as usize],
    /// Not 0 once room was granted to any magazine.
    pub joined: LocalU64,
}

/// The free runs of one size.
#[derive(Debug)]
#[repr(align(64))]
struct Size {
    loaded: List,
    previous: List,
    /// The most runs of either magazine; 0 until some are granted.
    granted: LocalU64,
    /// The number of runs that the last visit to an area took.
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
    /// Every call of this, of [`put`](Self::put), and of what gives runs back, is with the same
    /// `areas`, or with metadata of those.
    #[inline]
    pub unsafe fn take<'a>(&self, _areas: &'a Areas, order: u32) -> Option<&'a SlotMeta> {
        // SAFETY: metadata lives as long as its areas, and all metadata that was put onto the list
        // is of these.
        unsafe { self.size(order).loaded.take() }
    }

    /// Puts a run onto the loaded magazine, unless that is full. Returns whether it did. O(1).
    #[inline]
    pub fn put(&self, meta: &SlotMeta, order: u32) -> bool {
        let size = self.size(order);
        let room = size.loaded.count() < size.granted.get();
        if room {
            size.loaded.put(meta);
        }
        room
    }

    /// Makes the previous magazine the loaded one, if the loaded one is empty.
    pub fn turn(&self, order: u32) {
        let size = self.size(order);
        if size.loaded.count() == 0 {
            size.loaded.take_over(&size.previous);
        }
    }

    /// Returns whether the loaded magazine is empty.
    pub fn is_empty(&self, order: u32) -> bool {
        self.size(order).loaded.count() == 0
    }

    /// Gives the runs of the previous magazine back to the areas, and makes the loaded magazine the
    /// previous one.
    ///
    /// # Safety
    /// As [`take`](Self::take).
    pub unsafe fn turn_out(&self, areas: &Areas, order: u32) {
        let size = self.size(order);
        // SAFETY: as in `take`.
        areas.give(core::iter::from_fn(|| unsafe { size.previous.take() }), 1 << order);
        size.previous.take_over(&size.loaded);
    }

    /// Grants room for `runs` runs to each of the two magazines of a size.
    pub fn grant(&self, order: u32, runs: u64) {
        self.size(order).granted.set(runs.min(MOST as u64));
    }

    /// Returns how many runs to take out of an area now: twice as many as last time, up to what is
    /// granted.
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
            // SAFETY: the caller's promise is passed on.
            unsafe {
                self.turn_out(areas, order);
                self.turn_out(areas, order);
            }
        }
    }

    /// Returns the slots in all magazines; slightly wrong while the owner changes them.
    pub fn kept(&self) -> u64 {
        let of = |order| (self.size(order).loaded.count() + self.size(order).previous.count()) << order;
        (0..ORDERS).map(of).sum()
    }
}
