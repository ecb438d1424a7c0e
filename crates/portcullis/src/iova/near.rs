//! The leaves of range metadata that a CPU used last, so that it need not look for them again.

use core::ptr;

use super::links::Leaf;
use super::meta::{Place, RangeMeta};
use crate::percpu::LocalU64;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// Leaves remembered of all arrays, chosen by the low bits of their keys: 4 KiB. Half of them in the model checker, whose words are
/// larger: a CPU's lists are built on a stack, and its threads have 32 KiB. [`first_key`] needs no fewer.
const ENTRIES: usize = if cfg!(loom) { 128 } else { 256 };

/// The key of the first word of an array: a word's *key* is this and its index. No two words of a space have the same, as indices
/// are below 2^52; leaves of the same number in different arrays have different entries; and its lowest six bits are 0.
pub(super) const fn first_key(array: usize) -> u64 {
    ((array as u64) << 60) + (array * ENTRIES / 4) as u64 * Leaf::WORDS
}

/// No word has this key, nor one near it.
const NOWHERE: u64 = 1 << 58;

/// Leaves of one space's range metadata. Used by one CPU alone.
#[derive(Debug)]
pub(super) struct Near([Entry; ENTRIES]);

#[derive(Debug)]
struct Entry {
    /// The key of the leaf's first word.
    first: LocalU64,
    leaf: AtomicPtr<Leaf>,
}

/// A leaf, and the key of its first word.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeafAt<'a>(Option<(u64, &'a Leaf)>);

impl<'a> LeafAt<'a> {
    pub(super) const NONE: Self = Self(None);

    /// The word of `key`, if it is in this leaf.
    #[inline]
    pub(super) fn word(self, key: u64) -> Option<&'a AtomicU64> {
        let (first, leaf) = self.0?;
        let offset = key.wrapping_sub(first);
        (offset < Leaf::WORDS).then(|| leaf.word(offset))
    }
}

impl Entry {
    fn new() -> Self {
        Self { first: LocalU64::new(NOWHERE), leaf: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The word of `key`, if it is in this leaf.
    ///
    /// # Safety
    /// The leaf was set, if it was, to one of `meta`.
    #[inline]
    unsafe fn word<'a>(&self, meta: &'a RangeMeta, key: u64) -> Option<&'a AtomicU64> {
        let offset = key.wrapping_sub(self.first.get());
        if offset >= Leaf::WORDS {
            return None;
        }
        // SAFETY: the caller's promise is passed on.
        let leaf = unsafe { self.leaf(meta) }?;
        Some(leaf.word(offset))
    }

    /// The leaf.
    ///
    /// # Safety
    /// As [`word`](Self::word).
    #[inline]
    unsafe fn leaf<'a>(&self, _meta: &'a RangeMeta) -> Option<&'a Leaf> {
        // Acquire: two threads that claim one CPU, against the platform's contract, still see a whole leaf. A CPU that
        // stored the pointer itself needs no order.
        // SAFETY: the pointer is null or was set to a leaf of this range metadata, by the caller's promise, and leaves
        // live as long as it.
        unsafe { self.leaf.load(Ordering::Acquire).as_ref() }
    }

    fn set(&self, first: u64, leaf: *mut Leaf) {
        self.leaf.store(leaf, Ordering::Release);
        self.first.set(first);
    }
}

impl Near {
    /// None yet.
    pub(super) fn new() -> Self {
        Self([(); ENTRIES].map(|()| Entry::new()))
    }

    /// The word of `key`, which may be of no word, if its leaf is remembered.
    ///
    /// # Safety
    /// Every call of this and of [`find`](Self::find) on one value is with the same `meta`.
    #[inline]
    pub(super) unsafe fn word<'a>(&self, meta: &'a RangeMeta, key: u64) -> Option<&'a AtomicU64> {
        // SAFETY: entries are set by `find` alone, by the caller's promise to leaves of this `meta`.
        unsafe { self.entry(key).word(meta, key) }
    }

    /// The word at `place`, if its leaf exists, found by a walk. The leaf is remembered.
    ///
    /// # Safety
    /// As [`word`](Self::word).
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn find<'a>(&self, meta: &'a RangeMeta, place: Place) -> Option<&'a AtomicU64> {
        let leaf = meta.leaf(place)?;
        let first = first_key(place.array) + (place.index & !(Leaf::WORDS - 1));
        self.entry(first).set(first, ptr::from_ref(leaf).cast_mut());
        Some(leaf.word(place.index))
    }

    /// The leaf in the entry for `key`, whether it has the word of `key` or not.
    ///
    /// # Safety
    /// As [`word`](Self::word).
    #[inline]
    pub(super) unsafe fn leaf<'a>(&self, meta: &'a RangeMeta, key: u64) -> LeafAt<'a> {
        let entry = self.entry(key);
        // SAFETY: as for `word`.
        LeafAt(unsafe { entry.leaf(meta) }.map(|leaf| (entry.first.get(), leaf)))
    }

    #[inline]
    fn entry(&self, key: u64) -> &Entry {
        &self.0[(key / Leaf::WORDS) as usize % ENTRIES]
    }
}
