//! The words of a book, with a cache of leaves that need no walk through the levels above them: each place keeps the first leaf that was
//! looked up for it, for good. So once a place is taken, no CPU writes the line that all of them read.
//!
//! Memory ordering. Several callers may exchange a place's null pointer for their leaf's; one succeeds, and stores the leaf's number, with release. A
//! caller that loads this number, with acquire, sees the pointer and the leaf.

use alloc::boxed::Box;
use core::ptr;

use crate::heap::{OutOfMemory, slice};
use crate::iova::{Links, WordLeaf};
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct Words {
    links: Links,
    near: Near,
}

/// The cached leaves, by the low bits of their numbers.
#[derive(Debug)]
pub(super) struct Near(Box<[Place; Near::LEAVES]>);

#[derive(Debug)]
struct Place {
    /// The leaf's number, or [`NO_LEAF`].
    number: AtomicU64,
    leaf: AtomicPtr<WordLeaf>,
}

const NO_LEAF: u64 = u64::MAX;

impl Near {
    pub(super) const LEAVES: usize = if cfg!(loom) { 1 } else { 64 };

    /// An empty cache. Allocates.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn new() -> Result<Self, OutOfMemory> {
        let place = |_| Ok(Place { number: AtomicU64::new(NO_LEAF), leaf: AtomicPtr::new(ptr::null_mut()) });
        slice(Self::LEAVES, place)?.try_into().map(Self).map_err(|_| OutOfMemory)
    }
}

impl Place {
    /// Caches a leaf, if the place is free.
    #[cold]
    #[inline(never)]
    fn set(&self, number: u64, leaf: &WordLeaf) {
        let (none, pointer) = (ptr::null_mut(), ptr::from_ref(leaf).cast_mut());
        if self.leaf.compare_exchange(none, pointer, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.number.store(number, Ordering::Release);
        }
    }
}

impl Words {
    pub(super) fn new(len: u64, near: Near) -> Self {
        Self { links: Links::new(len), near }
    }

    pub(super) fn bytes(&self) -> usize {
        self.links.bytes() + size_of_val(&*self.near.0)
    }

    /// The leaf with the word of `index`, if it exists: see [`Links::leaf`]. For an index behind the last word, this may be the last leaf,
    /// whose words there are 0 unless a caller stores one.
    #[inline]
    pub(super) fn leaf(&self, index: u64) -> Option<&WordLeaf> {
        let number = index / WordLeaf::WORDS;
        let place = &self.near.0[number as usize % Near::LEAVES];
        if place.number.load(Ordering::Acquire) == number {
            // SAFETY: the pointer was set once, before the number, and is to the leaf with this number in `links`; the leaf stays there
            // until `links` is dropped, which is borrowed.
            return unsafe { place.leaf.load(Ordering::Relaxed).as_ref() };
        }
        let leaf = self.links.leaf(index)?;
        // The pointer decides: while a caller is between its two stores, no other tries again.
        if place.leaf.load(Ordering::Relaxed).is_null() {
            place.set(number, leaf);
        }
        Some(leaf)
    }

    pub(super) fn leaf_or_make(&self, index: u64) -> Result<Option<&WordLeaf>, OutOfMemory> {
        self.links.leaf_or_make(index)
    }

    pub(super) fn each_leaf(&self, f: impl FnMut(u64, &WordLeaf)) {
        self.links.each_leaf(f);
    }
}
