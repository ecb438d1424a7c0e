//! The words of a book, with a cache of leaves that saves the walk through the levels above them. Each place keeps the first leaf that was looked up
//! for it, for ever: so no CPU writes to a line that all of them read.
//!
//! Memory ordering: one caller exchanges a place's null pointer for its leaf's, and stores the leaf's number with release. A caller that loads this
//! number with acquire sees the pointer and the leaf.

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

/// By the low bits of the leaves' numbers.
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

    pub(super) fn new() -> Result<Self, OutOfMemory> {
        let place = |_| Ok(Place { number: AtomicU64::new(NO_LEAF), leaf: AtomicPtr::new(ptr::null_mut()) });
        slice(Self::LEAVES, place)?.try_into().map(Self).map_err(|_| OutOfMemory)
    }
}

impl Place {
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

    /// The leaf with the word of `index`, if it exists: see [`Links::leaf`]. The last leaf has words beyond the last index, too; they are 0 unless a
    /// caller stores to them.
    #[inline]
    pub(super) fn leaf(&self, index: u64) -> Option<&WordLeaf> {
        let number = index / WordLeaf::WORDS;
        let place = &self.near.0[number as usize % Near::LEAVES];
        if place.number.load(Ordering::Acquire) == number {
            // SAFETY: the pointer was set once, before the number, to the leaf with this number in `links`, which stays there until `links` is
            // dropped; `links` is borrowed.
            return unsafe { place.leaf.load(Ordering::Relaxed).as_ref() };
        }
        let leaf = self.links.leaf(index)?;
        // Tests the pointer, which is stored before the number: so no caller tries while another is between the two stores.
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
