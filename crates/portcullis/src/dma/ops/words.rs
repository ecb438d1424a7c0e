//! The words of a book, of which some leaves are found without a walk through the levels above them: for each place, the first leaf that
//! was looked for there, for good. So once a place is taken, no CPU writes what all of them read.
//!
//! Memory ordering. Several callers may exchange a place's null pointer for their leaf's, and one of them succeeds. It alone then stores the leaf's
//! number, with release ordering. A caller that loads this number, with acquire ordering, sees the pointer and the leaf.

use alloc::boxed::Box;
use core::ptr;

use crate::heap::{OutOfMemory, slice};
use crate::iova::{Links, WordLeaf};
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// The words.
#[derive(Debug)]
pub(super) struct Words {
    links: Links,
    near: Near,
}

/// The leaves that are remembered, by the low bits of their numbers.
#[derive(Debug)]
pub(super) struct Near(Box<[Place; Near::LEAVES]>);

#[derive(Debug)]
struct Place {
    /// The leaf's number, or [`NO_LEAF`].
    number: AtomicU64,
    leaf: AtomicPtr<WordLeaf>,
}

/// The number of no leaf: there are fewer.
const NO_LEAF: u64 = u64::MAX;

impl Near {
    /// How many are remembered.
    pub(super) const LEAVES: usize = if cfg!(loom) { 1 } else { 64 };

    /// Remembers none yet. Allocates.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn new() -> Result<Self, OutOfMemory> {
        let place = |_| Ok(Place { number: AtomicU64::new(NO_LEAF), leaf: AtomicPtr::new(ptr::null_mut()) });
        slice(Self::LEAVES, place)?.try_into().map(Self).map_err(|_| OutOfMemory)
    }
}

impl Place {
    /// Remembers a leaf, if none is.
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
    /// Makes `len` words. Allocates nothing yet.
    pub(super) fn new(len: u64, near: Near) -> Self {
        Self { links: Links::new(len), near }
    }

    /// Bytes of memory that the words take, and what is remembered of them.
    pub(super) fn bytes(&self) -> usize {
        self.links.bytes() + size_of_val(&*self.near.0)
    }

    /// The leaf that has the word of `index`, if it exists: see [`Links::leaf`]. Of an index behind the last word, this may be the last
    /// leaf, whose words there are 0 unless a caller stores one.
    #[inline]
    pub(super) fn leaf(&self, index: u64) -> Option<&WordLeaf> {
        let number = index / WordLeaf::WORDS;
        let place = &self.near.0[number as usize % Near::LEAVES];
        if place.number.load(Ordering::Acquire) == number {
            // SAFETY: the pointer is that of the leaf with this number in `links`, as it was set before the number was stored, and never
            // again; the leaf stays where it is until `links` is dropped, which is borrowed.
            return unsafe { place.leaf.load(Ordering::Relaxed).as_ref() };
        }
        let leaf = self.links.leaf(index)?;
        // Asked of the pointer: while a caller is between its two stores, no other tries again.
        if place.leaf.load(Ordering::Relaxed).is_null() {
            place.set(number, leaf);
        }
        Some(leaf)
    }

    /// See [`Links::leaf_or_make`].
    pub(super) fn leaf_or_make(&self, index: u64) -> Result<Option<&WordLeaf>, OutOfMemory> {
        self.links.leaf_or_make(index)
    }

    /// See [`Links::each_leaf`].
    pub(super) fn each_leaf(&self, f: impl FnMut(u64, &WordLeaf)) {
        self.links.each_leaf(f);
    }
}
