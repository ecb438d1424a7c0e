//! The leaves of notes that a CPU used last, so that it need not look for them again.

use core::ptr;

use super::links::Leaf;
use super::notes::{ARRAYS, Notes, Place};
use crate::percpu::LocalU64;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// Leaves remembered of each array, chosen by the low bits of their number: 1 KiB an array.
const ENTRIES: usize = 64;

/// No word has this index, nor one near it.
const NOWHERE: u64 = 1 << 62;

/// Leaves of one space's notes. Used by one CPU alone.
#[derive(Debug)]
pub(super) struct Near([[Entry; ENTRIES]; ARRAYS]);

#[derive(Debug)]
struct Entry {
    /// The index of the leaf's first word.
    first: LocalU64,
    leaf: AtomicPtr<Leaf>,
}

impl Entry {
    fn new() -> Self {
        Self { first: LocalU64::new(NOWHERE), leaf: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The word of `index`, if it is in this leaf.
    ///
    /// # Safety
    /// The leaf was set, if it was, to one of `notes`.
    #[inline]
    unsafe fn word<'a>(&self, _notes: &'a Notes, index: u64) -> Option<&'a AtomicU64> {
        let offset = index.wrapping_sub(self.first.get());
        if offset >= Leaf::WORDS {
            return None;
        }
        // Acquire, although this CPU stored the pointer itself: so what is behind it is sound even where two
        // threads claim one slot, against the platform's contract.
        // SAFETY: the pointer is null or was set to a leaf of these notes, by the caller's promise, and leaves
        // live as long as their notes.
        let leaf = unsafe { self.leaf.load(Ordering::Acquire).as_ref() }?;
        Some(leaf.word(offset))
    }

    fn set(&self, first: u64, leaf: *mut Leaf) {
        self.leaf.store(leaf, Ordering::Release);
        self.first.set(first);
    }
}

impl Near {
    /// None yet.
    pub(super) fn new() -> Self {
        Self([(); ARRAYS].map(|()| [(); ENTRIES].map(|()| Entry::new())))
    }

    /// The word at `place`, as [`Notes::word`] gives it, if its leaf is remembered.
    ///
    /// # Safety
    /// Every call of this on one value is with the same `notes`, and every leaf that it [remembers](Self::remember) is one of
    /// theirs.
    #[inline]
    pub(super) unsafe fn word<'a>(&self, notes: &'a Notes, place: Place) -> Option<&'a AtomicU64> {
        // SAFETY: entries are set by `remember` alone, by the caller's promise to leaves of these `notes`.
        unsafe { self.entry(place).word(notes, place.index) }
    }

    /// Remembers the leaf of `place`, as [`Notes::leaf`] gives it.
    pub(super) fn remember(&self, place: Place, leaf: &Leaf) {
        self.entry(place).set(place.index & !(Leaf::WORDS - 1), ptr::from_ref(leaf).cast_mut());
    }

    #[inline]
    fn entry(&self, place: Place) -> &Entry {
        &self.0[place.array][(place.index / Leaf::WORDS) as usize % ENTRIES]
    }
}
