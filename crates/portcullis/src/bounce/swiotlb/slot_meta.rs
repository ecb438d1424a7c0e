//! The metadata of each slot: never in the slot, which the device can write.
//!
//! A run of slots is known by its first slot's metadata: it says what is mapped there, or which run comes after it in a
//! list, or nothing while the run is with its area. The metadata of a run's other slots say how far back the first is.
//! Those are written when the run is taken out of its area, so the fast path writes one slot's metadata, half a cache line.
//!
//! Metadata changes hands with its run, through a CPU's list ([`Owned`](crate::percpu::Owned)), an area's lock, or whatever
//! the driver hands the mapping over with, so nearly all accesses are relaxed. Two are not: a list's link, and the word
//! of a mapping, which is stored with release and loaded with acquire. Whoever asks for what is no mapping any more, and
//! finds another's word, finds that one's address with it, and is told of a mismatch.

use core::ptr;

use super::bits::WORD_ORDER;
use crate::addr::{Direction, PhysAddr};
use crate::percpu::LocalU64;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// The class of runs that no list keeps.
pub(super) const ODD: u32 = 15;
const _: () = assert!(WORD_ORDER < ODD);

/// Lengths and offsets are below 2^this: so is the size of an area.
pub(super) const LEN_BITS: u32 = 28;

const LEN_MASK: u64 = (1 << LEN_BITS) - 1;
const TAG: u64 = 3;
const FREE: u64 = 0;
const MAPPED: u64 = 1;
const INSIDE: u64 = 2;

/// The metadata of one slot.
#[derive(Debug)]
#[repr(align(32))]
pub(super) struct SlotMeta {
    /// Two bits say which it is. Of a mapping the direction is at bit 2, the class at bit 4, the offset at bit 8, and the
    /// length less one above; of a slot inside a run the distance to the first is at bit 2.
    word: AtomicU64,
    /// Where the buffer is.
    original: AtomicU64,
    /// What comes after it on a list. Of an odd run that is mapped, how many slots it has: no pointer.
    next: AtomicPtr<SlotMeta>,
    /// Where the slot begins.
    address: AtomicU64,
}

/// A mapping, as noted.
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

/// What metadata says about who has the slot.
pub(super) enum Says {
    Mapped(Mapping),
    /// The run's first slot is so many before this one.
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
    /// The slot is at `address`.
    pub fn set_address(&self, address: u64) {
        self.address.store(address, Ordering::Relaxed);
    }

    /// Where it begins.
    #[inline]
    pub fn address(&self) -> u64 {
        self.address.load(Ordering::Relaxed)
    }

    /// Records a mapping.
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

    /// What it says.
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

    /// How many slots the odd run has that is mapped here.
    pub fn odd_slots(&self) -> usize {
        self.next.load(Ordering::Relaxed).addr()
    }

    /// Records them.
    pub fn set_odd_slots(&self, slots: usize) {
        self.next.store(ptr::without_provenance_mut(slots), Ordering::Relaxed);
    }

    /// The slot is inside a run that begins `distance` slots before it.
    pub fn inside(&self, distance: u64) {
        self.word.store(distance << 2 | INSIDE, Ordering::Relaxed);
    }

    /// The run is with its area, or on a list.
    #[inline]
    pub fn clear(&self) {
        self.word.store(FREE, Ordering::Relaxed);
    }
}

/// Free runs, by the metadata of their first slots, newest first. Changed by whoever has it alone.
///
/// Memory ordering. Pointers are loaded with acquire, although it was this CPU or one that handed the list over that
/// stored them: so what is behind them is sound even where two threads claim one slot, against the platform's contract.
#[derive(Debug)]
pub(super) struct List {
    first: AtomicPtr<SlotMeta>,
    count: LocalU64,
}

impl List {
    /// With nothing on it.
    pub fn new() -> Self {
        Self { first: AtomicPtr::new(ptr::null_mut()), count: LocalU64::new(0) }
    }

    /// How many runs are on it.
    #[inline]
    pub fn count(&self) -> u64 {
        self.count.get()
    }

    /// Puts a run onto it, which is on no other. O(1).
    #[inline]
    pub fn put(&self, meta: &SlotMeta) {
        meta.clear();
        meta.next.store(self.first.load(Ordering::Relaxed), Ordering::Relaxed);
        self.first.store(ptr::from_ref(meta).cast_mut(), Ordering::Release);
        self.count.set(self.count.get() + 1);
    }

    /// Takes the newest run off it. O(1).
    ///
    /// # Safety
    /// All metadata that are ever put onto it live as long as 'a.
    #[inline]
    pub unsafe fn take<'a>(&self) -> Option<&'a SlotMeta> {
        // SAFETY: the pointer is null, or was made of a reference to metadata that is alive, by the caller's promise. (An
        // odd run's, which is none, is on no list.) Metadata are only used by shared reference.
        let meta: &'a SlotMeta = unsafe { self.first.load(Ordering::Acquire).as_ref() }?;
        self.first.store(meta.next.load(Ordering::Relaxed), Ordering::Relaxed);
        self.count.set(self.count.get() - 1);
        Some(meta)
    }

    /// Puts what is on `other`, in its order, onto this one, on which nothing is. O(1).
    pub fn take_over(&self, other: &Self) {
        self.first.store(other.first.load(Ordering::Relaxed), Ordering::Relaxed);
        self.count.set(other.count.get());
        other.first.store(ptr::null_mut(), Ordering::Relaxed);
        other.count.set(0);
    }
}
