//! The words beside the pages: a sparse array, filled in where ranges are handed out.
//!
//! Three levels of pointers over leaves of 512 words. A level is installed with one compare-and-swap and stays
//! until the array is dropped, so finding a word is four dependent loads and takes no lock.
//!
//! Memory ordering. A pointer is installed with `AcqRel` and followed with `Acquire`, so that whoever follows
//! it sees the zeroed level. The words' own order is their users' affair.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr;

use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// Entries of the lower levels, as a power of two: 4 KiB.
const BITS: u32 = if cfg!(loom) { 1 } else { 9 };
const ENTRIES: usize = 1 << BITS;
/// Entries of the level below the root, as a power of two: 16 KiB, for 2^29 words.
const UPPER_BITS: u32 = if cfg!(loom) { 1 } else { 11 };
const UPPER_ENTRIES: usize = 1 << UPPER_BITS;

type Leaf = [AtomicU64; ENTRIES];
type Lower = [AtomicPtr<Leaf>; ENTRIES];
type Upper = [AtomicPtr<Lower>; UPPER_ENTRIES];

/// No memory for a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OutOfMemory;

/// A sparse array of words, 0 where nothing was written.
#[derive(Debug)]
pub(super) struct Links {
    /// The array's first index; those below have no word.
    first: u64,
    len: u64,
    root: Box<[AtomicPtr<Upper>]>,
    bytes: AtomicUsize,
}

/// Where a word is: indices into the levels.
struct Place {
    root: usize,
    upper: usize,
    lower: usize,
    leaf: usize,
}

impl Links {
    /// Indices of one leaf, counted from the array's first.
    pub(super) const LEAF: u64 = 1 << BITS;

    /// An array with the indices from `first` on, `len` of them. Allocates the root only: one pointer for
    /// each 2^29 words.
    pub(super) fn new(first: u64, len: u64) -> Result<Self, OutOfMemory> {
        let roots = usize::try_from(len.div_ceil(1 << (2 * BITS + UPPER_BITS))).map_err(|_| OutOfMemory)?;
        let root = level(roots, || AtomicPtr::new(ptr::null_mut()))?;
        let bytes = AtomicUsize::new(size_of_val(&*root));
        Ok(Self { first, len, root, bytes })
    }

    /// The word of `index`, if its leaf exists.
    #[inline]
    pub(super) fn get(&self, index: u64) -> Option<&AtomicU64> {
        let place = self.place(index)?;
        let upper = self.follow(self.root.get(place.root)?)?;
        let lower = self.follow(&upper[place.upper])?;
        let leaf = self.follow(&lower[place.lower])?;
        Some(&leaf[place.leaf])
    }

    /// The word of `index`; its leaf is made where there is none. `None` outside the array.
    pub(super) fn get_or_make(&self, index: u64) -> Result<Option<&AtomicU64>, OutOfMemory> {
        let Some(place) = self.place(index) else {
            return Ok(None);
        };
        let Some(root) = self.root.get(place.root) else {
            return Ok(None);
        };
        let upper = self.follow_or_make(root, || AtomicPtr::new(ptr::null_mut()))?;
        let lower = self.follow_or_make(&upper[place.upper], || AtomicPtr::new(ptr::null_mut()))?;
        let leaf = self.follow_or_make(&lower[place.lower], || AtomicU64::new(0))?;
        Ok(Some(&leaf[place.leaf]))
    }

    /// Bytes of memory that all levels take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    #[inline]
    fn place(&self, index: u64) -> Option<Place> {
        // What lies below the first wraps to beyond the last.
        let offset = index.wrapping_sub(self.first);
        if offset >= self.len {
            return None;
        }
        Some(Place {
            root: (offset >> (2 * BITS + UPPER_BITS)) as usize,
            upper: (offset >> (2 * BITS)) as usize & (UPPER_ENTRIES - 1),
            lower: (offset >> BITS) as usize & (ENTRIES - 1),
            leaf: offset as usize & (ENTRIES - 1),
        })
    }

    /// The level behind `pointer`; `None` where there is none.
    #[inline]
    fn follow<T, const N: usize>(&self, pointer: &AtomicPtr<[T; N]>) -> Option<&[T; N]> {
        let level = pointer.load(Ordering::Acquire);
        // SAFETY: a pointer that is not null was installed by `follow_or_make` from a boxed array, which is
        // freed only when `self` is dropped.
        unsafe { level.as_ref() }
    }

    fn follow_or_make<T, const N: usize>(
        &self,
        pointer: &AtomicPtr<[T; N]>,
        make: impl FnMut() -> T,
    ) -> Result<&[T; N], OutOfMemory> {
        if let Some(found) = self.follow(pointer) {
            return Ok(found);
        }
        // `level` gave exactly so many entries.
        let made: *mut [T; N] = Box::into_raw(level(N, make)?).cast();
        match pointer.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                self.bytes.fetch_add(size_of::<[T; N]>(), Ordering::Relaxed);
            }
            // SAFETY: the array was made above and nobody else knows of it.
            Err(_) => drop(unsafe { Box::from_raw(made) }),
        }
        Ok(self.follow(pointer).expect("a level is there: it was installed by us or by another CPU"))
    }
}

/// `len` fresh entries.
fn level<T>(len: usize, make: impl FnMut() -> T) -> Result<Box<[T]>, OutOfMemory> {
    let mut entries = Vec::new();
    entries.try_reserve_exact(len).map_err(|_| OutOfMemory)?;
    entries.resize_with(len, make);
    Ok(entries.into_boxed_slice())
}

/// Takes what `pointer` points to, to drop it.
fn take<T>(pointer: &mut AtomicPtr<T>) -> Option<Box<T>> {
    let level = pointer.swap(ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: called from `drop` only, by which time nobody else uses any level; each came from a box and is
    // pointed to once.
    (!level.is_null()).then(|| unsafe { Box::from_raw(level) })
}

impl Drop for Links {
    fn drop(&mut self) {
        for upper in &mut self.root {
            for lower in take(upper).iter_mut().flat_map(|upper| upper.iter_mut()) {
                take(lower).iter_mut().flat_map(|lower| lower.iter_mut()).for_each(|leaf| drop(take(leaf)));
            }
        }
    }
}
