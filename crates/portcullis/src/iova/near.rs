//! A CPU's direct-mapped cache of metadata leaves. A lookup returns the leaf that holds the key's word, or none.

use core::ptr;

use super::links::WordLeaf;
use super::meta::{Place, RangeMeta};
use crate::heap::Shared;
use crate::percpu::LocalU64;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// Cached leaves of all arrays together: 4 KiB of entries, indexed by the low bits of the leaves' keys. Loom's atomics
/// are larger, so the model checker has half as many, the fewest that [`first_key`] allows.
const ENTRIES: usize = if cfg!(loom) { 128 } else { 256 };

/// The key of the first word of an array; a word's *key* is this plus its index. No two words of a space have the same
/// key, as indices are below 2^52. The n-th leaves of different arrays map to different entries, so they do not evict
/// each other. The lowest six bits are 0.
pub(super) const fn first_key(array: usize) -> u64 {
    ((array as u64) << 60) + (array * ENTRIES / 4) as u64 * WordLeaf::WORDS
}

/// A key that no word has, and that is far from those of words.
const NOWHERE: u64 = 1 << 58;

#[derive(Debug)]
pub(super) struct Near {
    entries: [Entry; ENTRIES],
    meta: Shared<RangeMeta>,
}

#[derive(Debug)]
struct Entry {
    first: LocalU64,
    leaf: AtomicPtr<WordLeaf>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct LeafAt<'a>(Option<(u64, &'a WordLeaf)>);

impl<'a> LeafAt<'a> {
    pub(super) const NONE: Self = Self(None);

    #[inline]
    pub(super) fn word(self, key: u64) -> Option<&'a AtomicU64> {
        let (first, leaf) = self.0?;
        let offset = key.wrapping_sub(first);
        (offset < WordLeaf::WORDS).then(|| leaf.word(offset))
    }
}

impl Entry {
    fn new() -> Self {
        Self { first: LocalU64::new(NOWHERE), leaf: AtomicPtr::new(ptr::null_mut()) }
    }

    fn set(&self, first: u64, leaf: *mut WordLeaf) {
        self.leaf.store(leaf, Ordering::Release);
        self.first.set(first);
    }
}

impl Near {
    /// Initialises `at` for `meta`, with no leaf remembered.
    ///
    /// # Safety
    /// 1. `at` may be written, and is aligned.
    pub(super) unsafe fn write(at: *mut Self, meta: Shared<RangeMeta>) {
        // SAFETY: each write is to an element or a field of `at` (1). There are no other fields.
        unsafe {
            for number in 0..ENTRIES {
                (&raw mut (*at).entries[number]).write(Entry::new());
            }
            (&raw mut (*at).meta).write(meta);
        }
    }

    pub(super) fn meta(&self) -> &RangeMeta {
        &self.meta
    }

    /// Returns the word of `key`, if its leaf is remembered. There need not be a word with that key.
    #[inline]
    pub(super) fn word(&self, key: u64) -> Option<&AtomicU64> {
        let entry = self.entry(key);
        let offset = key.wrapping_sub(entry.first.get());
        if offset >= WordLeaf::WORDS {
            return None;
        }
        Some(self.leaf_of(entry)?.word(offset))
    }

    #[inline]
    fn leaf_of(&self, entry: &Entry) -> Option<&WordLeaf> {
        // Acquire: two threads that claim one CPU, against the platform's contract, still see a whole leaf. A CPU that
        // stored the pointer itself needs no order.
        // SAFETY: the pointer is null or was set by `find` to a leaf of `meta`, which keeps its leaves and which this
        // value keeps alive.
        unsafe { entry.leaf.load(Ordering::Acquire).as_ref() }
    }

    /// Finds the word at `place` by a walk, if its leaf exists, and remembers the leaf.
    #[cold]
    #[inline(never)]
    pub(super) fn find(&self, place: Place) -> Option<&AtomicU64> {
        let leaf = self.meta.leaf(place)?;
        let first = first_key(place.array) + (place.index & !(WordLeaf::WORDS - 1));
        self.entry(first).set(first, ptr::from_ref(leaf).cast_mut());
        Some(leaf.word(place.index))
    }

    #[inline]
    pub(super) fn leaf(&self, key: u64) -> LeafAt<'_> {
        let entry = self.entry(key);
        LeafAt(self.leaf_of(entry).map(|leaf| (entry.first.get(), leaf)))
    }

    #[inline]
    fn entry(&self, key: u64) -> &Entry {
        &self.entries[(key / WordLeaf::WORDS) as usize % ENTRIES]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::iova::links::Links;

    #[test]
    fn a_leaf_has_its_own_words_and_no_others() {
        let links = Links::new(WordLeaf::WORDS);
        let leaf = links.leaf_or_make(0).unwrap().unwrap();
        for first in [first_key(0), first_key(5) + 3 * WordLeaf::WORDS] {
            let at = LeafAt(Some((first, leaf)));
            for index in 0..WordLeaf::WORDS {
                assert!(at.word(first + index).is_some_and(|word| ptr::eq(word, leaf.word(index))));
            }
            let others =
                [first.wrapping_sub(1), first + WordLeaf::WORDS, first + 2 * WordLeaf::WORDS, NOWHERE];
            assert!(others.iter().all(|key| at.word(*key).is_none()));
        }
        assert!(LeafAt::NONE.word(0).is_none());
    }
}
