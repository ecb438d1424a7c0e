//! The metadata of each slot, apart from the slots, so that no device can change it.
//!
//! A run's first slot has the metadata of the run: the mapping, or the link to the next run in a list, or neither while the run is in its area. The
//! other slots have the distance to the first. That is written when the run leaves its area, so the fast path writes the metadata of one slot, half a
//! cache line.
//!
//! Memory ordering. Metadata changes its owner with its run: through a CPU's list ([`BiasedLock`](crate::percpu::BiasedLock)), an area's lock, or the
//! driver's own handover of the mapping. So nearly all accesses are relaxed. Two are not: a list's first link, and the word of a mapping, which is
//! stored with release and loaded with acquire. A caller that asks for an ended mapping, and finds another mapping's word, also finds that mapping's
//! address, and gets a mismatch.

use core::ptr;

use super::bits::WORD_ORDER;
use crate::addr::{Direction, PhysAddr};
use crate::percpu::LocalU64;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// The class of runs that no list holds.
pub(super) const ODD: u32 = 15;
const _: () = assert!(WORD_ORDER < ODD);

/// Areas and mappings have at most 2^`LEN_BITS` bytes; offsets are less.
pub(super) const LEN_BITS: u32 = 28;

const LEN_MASK: u64 = (1 << LEN_BITS) - 1;
const TAG: u64 = 3;
const FREE: u64 = 0;
const MAPPED: u64 = 1;
const INSIDE: u64 = 2;

#[derive(Debug)]
#[repr(align(32))]
pub(super) struct SlotMeta {
    /// The lowest two bits tell a mapping, a slot inside a run and a free run apart. A mapping has its direction at bit 2, the class at bit
    /// 4, the offset at bit 8, and the length less one above that; a slot inside a run has the distance to the first slot at bit 2.
    word: AtomicU64,
    original: AtomicU64,
    /// The next run on a list. For a mapped odd run, its number of slots: no pointer.
    next: AtomicPtr<SlotMeta>,
    address: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Mapping {
    pub original: PhysAddr,
    pub direction: Direction,
    pub len: u64,
    /// Bytes from the run's start.
    pub offset: u64,
    /// The order of the run, or [`ODD`].
    pub class: u32,
}

pub(super) enum Says {
    Mapped(Mapping),
    /// The run's first slot is *n* slots before this one.
    Inside(u64),
    Free,
}

impl Default for SlotMeta {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self { word: zero(), original: zero(), next: AtomicPtr::new(ptr::null_mut()), address: zero() }
    }
}

impl SlotMeta {
    pub fn set_address(&self, address: u64) {
        self.address.store(address, Ordering::Relaxed);
    }

    #[inline]
    pub fn address(&self) -> u64 {
        self.address.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn map(&self, mapping: &Mapping) {
        let direction = mapping.direction.index() as u64;
        self.original.store(mapping.original.get(), Ordering::Relaxed);
        let word = (mapping.len - 1) << (LEN_BITS + 8)
            | mapping.offset << 8
            | u64::from(mapping.class) << 4
            | direction << 2
            | MAPPED;
        self.word.store(word, Ordering::Release);
    }

    #[inline]
    pub fn read(&self) -> Says {
        let word = self.word.load(Ordering::Acquire);
        match word & TAG {
            MAPPED => {
                let direction = Direction::from_bits(word >> 2);
                Says::Mapped(Mapping {
                    original: PhysAddr::new(self.original.load(Ordering::Relaxed)),
                    direction,
                    len: (word >> (LEN_BITS + 8)) + 1,
                    offset: word >> 8 & LEN_MASK,
                    class: (word >> 4 & 15) as u32,
                })
            }
            INSIDE => Says::Inside(word >> 2),
            _ => Says::Free,
        }
    }

    pub fn odd_slots(&self) -> usize {
        self.next.load(Ordering::Relaxed).addr()
    }

    pub fn set_odd_slots(&self, slots: usize) {
        self.next.store(ptr::without_provenance_mut(slots), Ordering::Relaxed);
    }

    /// Records that the slot is inside a run that begins `distance` slots before it.
    pub fn inside(&self, distance: u64) {
        self.word.store(distance << 2 | INSIDE, Ordering::Relaxed);
    }

    /// Records that the run is in its area, or on a list.
    #[inline]
    pub fn clear(&self) {
        self.word.store(FREE, Ordering::Relaxed);
    }
}

/// A list of free runs, linked by the metadata of their first slots, newest first. Only its owner changes it.
///
/// Memory ordering. `first` is stored with release by `put`, and loaded with acquire, although this CPU, or the one that handed the list over,
/// stored it: so a pointer of `put` leads to initialised metadata even where two threads claim one CPU, against the platform's contract.
#[derive(Debug)]
pub(super) struct List {
    first: AtomicPtr<SlotMeta>,
    count: LocalU64,
}

impl List {
    pub fn new() -> Self {
        Self { first: AtomicPtr::new(ptr::null_mut()), count: LocalU64::new(0) }
    }

    #[inline]
    pub fn count(&self) -> u64 {
        self.count.get()
    }

    /// Puts a run, which is on no other list, onto this one. O(1).
    #[inline]
    pub fn put(&self, meta: &SlotMeta) {
        meta.clear();
        meta.next.store(self.first.load(Ordering::Relaxed), Ordering::Relaxed);
        self.first.store(ptr::from_ref(meta).cast_mut(), Ordering::Release);
        self.count.set(self.count.get() + 1);
    }

    /// Takes the newest run off the list. O(1).
    ///
    /// # Safety
    /// 1. All metadata that is ever put onto the list lives as long as 'a.
    #[inline]
    pub unsafe fn take<'a>(&self) -> Option<&'a SlotMeta> {
        // SAFETY: the pointer is null, or was made of a reference to metadata that is alive by clause 1 and used by shared reference only.
        // (The link of an odd run is no pointer, but an odd run is on no list.)
        let meta: &'a SlotMeta = unsafe { self.first.load(Ordering::Acquire).as_ref() }?;
        self.first.store(meta.next.load(Ordering::Relaxed), Ordering::Relaxed);
        self.count.set(self.count.get() - 1);
        Some(meta)
    }

    /// Moves all runs of `other`, in their order, onto this list, which is empty. O(1).
    pub fn take_over(&self, other: &Self) {
        self.first.store(other.first.load(Ordering::Relaxed), Ordering::Relaxed);
        self.count.set(other.count.get());
        other.first.store(ptr::null_mut(), Ordering::Relaxed);
        other.count.set(0);
    }
}
