//! A sparse array of words: a radix tree over leaves of 512 words, with as many levels of 64 pointers as its length
//! needs. A leaf stays where it is until the array is dropped. Finding a word takes no lock.
//!
//! Memory ordering. A pointer is installed with `AcqRel` and followed with `Acquire`, so that a CPU that follows it
//! sees the zeroed level. Users order the words themselves.

use alloc::boxed::Box;
use core::ptr;

use crate::heap::{OutOfMemory, slice};
use crate::percpu::CachePadded;
use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// The binary logarithm of the words of a leaf, which has 4 KiB.
const LEAF_BITS: u32 = if cfg!(loom) { 1 } else { 9 };
const LEAF_WORDS: usize = 1 << LEAF_BITS;
/// The binary logarithm of the pointers of a level, which has 512 bytes.
const LEVEL_BITS: u32 = if cfg!(loom) { 1 } else { 6 };
const LEVEL_ENTRIES: usize = 1 << LEVEL_BITS;

/// The words of the smallest refill (16 ranges of one page), aligned to a pair of cache lines. If a leaf began inside a
/// line, the refill would share its first or last line with another CPU.
const GROUP: usize = if cfg!(loom) { 2 } else { 16 };
type Group = CachePadded<[AtomicU64; GROUP]>;
const GROUPS: usize = LEAF_WORDS / GROUP;

#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct WordLeaf([Group; GROUPS]);

/// Pointers to levels below, or, at the lowest level, to leaves.
type Level = [AtomicPtr<Below>; LEVEL_ENTRIES];

/// A [`Level`] or a [`WordLeaf`]; the height of a pointer decides to which it points.
#[derive(Debug)]
enum Below {}

/// A sparse array of words, 0 where nothing was written.
#[derive(Debug)]
pub(crate) struct Links {
    len: u64,
    height: u32,
    root: AtomicPtr<Below>,
    /// Bytes of all levels and leaves, on cache lines apart from the fields that every call reads.
    bytes: CachePadded<AtomicUsize>,
}

impl WordLeaf {
    pub(crate) const WORDS: u64 = LEAF_WORDS as u64;

    #[inline]
    pub(crate) fn word(&self, index: u64) -> &AtomicU64 {
        let at = index as usize % LEAF_WORDS;
        &self.0[at / GROUP].0[at % GROUP]
    }
}

impl Links {
    pub(crate) fn new(len: u64) -> Self {
        let mut height = 0;
        // With 2^64 words, the loop ends after all bits.
        while LEAF_BITS + height * LEVEL_BITS < u64::BITS
            && len.saturating_sub(1) >> (LEAF_BITS + height * LEVEL_BITS) > 0
        {
            height += 1;
        }
        Self { len, height, root: AtomicPtr::new(ptr::null_mut()), bytes: CachePadded(AtomicUsize::new(0)) }
    }

    /// Returns the leaf of `index`, if it exists. Costs one dependent load for each level and one for the root: nine at
    /// most for 2^52 words.
    #[inline]
    pub(crate) fn leaf(&self, index: u64) -> Option<&WordLeaf> {
        if index >= self.len {
            return None;
        }
        let mut below = self.root.load(Ordering::Acquire);
        for height in (0..self.height).rev() {
            // SAFETY: `level`, 1: pointers above height 0 lead to levels. 2: `&self` keeps the array alive.
            below = unsafe { level(below) }?[entry(index, height)].load(Ordering::Acquire);
        }
        // SAFETY: `leaf`, 1: pointers of the lowest level lead to leaves. 2: `&self` keeps the array alive.
        unsafe { leaf(below) }
    }

    /// Returns the leaf of `index`, which it allocates if it does not exist; `None` outside the array.
    pub(crate) fn leaf_or_make(&self, index: u64) -> Result<Option<&WordLeaf>, OutOfMemory> {
        if index >= self.len {
            return Ok(None);
        }
        let mut pointer = &self.root;
        for height in (0..self.height).rev() {
            let below = self.make::<Level>(pointer, || boxed(|| AtomicPtr::new(ptr::null_mut())))?;
            // SAFETY: as in `leaf`.
            let level = unsafe { level(below) }.ok_or(OutOfMemory)?;
            pointer = &level[entry(index, height)];
        }
        let group = || CachePadded(core::array::from_fn(|_| AtomicU64::new(0)));
        let below = self.make::<[Group; GROUPS]>(pointer, || boxed(group))?;
        // SAFETY: as in `leaf`; a leaf is nothing but these groups.
        Ok(unsafe { leaf(below) })
    }

    /// Calls `f` with each leaf, and the index of its first word. Costs a walk for each leaf, and for each null
    /// pointer.
    pub(crate) fn each_leaf(&self, mut f: impl FnMut(u64, &WordLeaf)) {
        let mut index = 0;
        while index < self.len {
            let (mut below, mut bits) = (self.root.load(Ordering::Acquire), LEAF_BITS);
            for height in (0..self.height).rev() {
                // SAFETY: as in `leaf`.
                let Some(level) = (unsafe { level(below) }) else {
                    bits = LEAF_BITS + (height + 1) * LEVEL_BITS;
                    break;
                };
                below = level[entry(index, height)].load(Ordering::Acquire);
            }
            // SAFETY: as in `leaf`; if the walk ended before that, `below` is null.
            if let Some(leaf) = unsafe { leaf(below) } {
                f(index, leaf);
            }
            let last = index | 1_u64.checked_shl(bits).map_or(u64::MAX, |words| words - 1);
            let Some(next) = last.checked_add(1) else { return };
            index = next;
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes.0.load(Ordering::Relaxed)
    }

    fn make<T>(
        &self,
        pointer: &AtomicPtr<Below>,
        make: impl FnOnce() -> Result<Box<T>, OutOfMemory>,
    ) -> Result<*mut Below, OutOfMemory> {
        let found = pointer.load(Ordering::Acquire);
        if !found.is_null() {
            return Ok(found);
        }
        let made = Box::into_raw(make()?);
        match pointer.compare_exchange(ptr::null_mut(), made.cast(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                self.bytes.0.fetch_add(size_of::<T>(), Ordering::Relaxed);
                Ok(made.cast())
            }
            Err(other) => {
                // SAFETY: it was made above, and no other CPU knows of it.
                drop(unsafe { Box::from_raw(made) });
                Ok(other)
            }
        }
    }
}

#[inline]
const fn entry(index: u64, height: u32) -> usize {
    (index >> (LEAF_BITS + height * LEVEL_BITS)) as usize % LEVEL_ENTRIES
}

/// Returns the level at `below`, if that is not null.
///
/// # Safety
/// 1. `below` is null or came from an array's pointer at a height where levels are.
/// 2. The array outlives `'a`.
#[inline]
unsafe fn level<'a>(below: *mut Below) -> Option<&'a Level> {
    // SAFETY: it is a level (1), which is freed only with its array (2).
    unsafe { below.cast::<Level>().as_ref() }
}

/// Returns the leaf at `below`, if that is not null.
///
/// # Safety
/// 1. `below` is null or came from an array's pointer below its lowest level.
/// 2. The array outlives `'a`.
#[inline]
unsafe fn leaf<'a>(below: *mut Below) -> Option<&'a WordLeaf> {
    // SAFETY: it is a leaf (1), which is freed only with its array (2).
    unsafe { below.cast::<WordLeaf>().as_ref() }
}

fn boxed<T, const N: usize>(mut make: impl FnMut() -> T) -> Result<Box<[T; N]>, OutOfMemory> {
    slice(N, |_| Ok(make()))?.try_into().map_err(|_| OutOfMemory)
}

fn free(pointer: &mut AtomicPtr<Below>, height: u32) {
    let below = pointer.swap(ptr::null_mut(), Ordering::AcqRel);
    if below.is_null() {
        return;
    }
    let Some(lower) = height.checked_sub(1) else {
        // SAFETY: called only from `drop`, so no other CPU uses any leaf; each came from a box, and one pointer leads
        // to it.
        drop(unsafe { Box::from_raw(below.cast::<WordLeaf>()) });
        return;
    };
    // SAFETY: as for leaves.
    let mut level = unsafe { Box::from_raw(below.cast::<Level>()) };
    level.iter_mut().for_each(|pointer| free(pointer, lower));
}

impl Drop for Links {
    fn drop(&mut self) {
        free(&mut self.root, self.height);
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/iova/links.rs"]
mod tests;
