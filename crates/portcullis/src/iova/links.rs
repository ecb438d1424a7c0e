//! The words beside the pages: a sparse array that is filled in where ranges are handed out. A leaf
//! stays where it is until the array is dropped, so a CPU that has found one may keep using it.
//!
//! The array is a radix tree: as many levels of 64 pointers as its length asks for, over leaves of
//! 512 words. A level is installed with one compare-and-swap, so finding a word takes no lock.
//!
//! Memory ordering. A pointer is installed with `AcqRel` and followed with `Acquire`, so that a CPU
//! that follows it sees the zeroed level. Users of the words see to the order of these.

use alloc::boxed::Box;
use core::ptr;

use crate::heap::{OutOfMemory, slice};
use crate::percpu::CachePadded;
use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// The binary logarithm of the number of words of a leaf, which has 4 KiB.
const LEAF_BITS: u32 = if cfg!(loom) { 1 } else { 9 };
const LEAF_WORDS: usize = 1 << LEAF_BITS;
/// The binary logarithm of the number of pointers of a level, which has 512 bytes.
const LEVEL_BITS: u32 = if cfg!(loom) { 1 } else { 6 };
const LEVEL_ENTRIES: usize = 1 << LEVEL_BITS;

/// Words of the fewest ranges that a CPU fetches at a time, on two cache lines of their own: a leaf is aligned to these. Leaves at any
/// address put two words in 16 on a line that another CPU writes.
const GROUP: usize = if cfg!(loom) { 2 } else { 16 };
type Group = CachePadded<[AtomicU64; GROUP]>;
const GROUPS: usize = LEAF_WORDS / GROUP;

/// Words that lie side by side.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct WordLeaf([Group; GROUPS]);

/// Pointers to levels below, or, at the lowest level, to leaves.
type Level = [AtomicPtr<Below>; LEVEL_ENTRIES];

/// A [`Level`] or a [`WordLeaf`]; the height of a pointer decides which of them it points to.
#[derive(Debug)]
enum Below {}

/// A sparse array of words, 0 where nothing was written.
#[derive(Debug)]
pub(crate) struct Links {
    /// The number of words.
    len: u64,
    /// The number of levels of pointers under the root; 0 if the root is the only leaf.
    height: u32,
    root: AtomicPtr<Below>,
    /// The bytes that all levels take, apart from the fields that every call reads, and from what
    /// lies beside the array.
    bytes: CachePadded<AtomicUsize>,
}

impl WordLeaf {
    /// The number of words that lie side by side.
    pub(crate) const WORDS: u64 = LEAF_WORDS as u64;

    /// Returns the word of `index`, which lies in this leaf.
    #[inline]
    pub(crate) fn word(&self, index: u64) -> &AtomicU64 {
        let at = index as usize % LEAF_WORDS;
        &self.0[at / GROUP].0[at % GROUP]
    }
}

impl Links {
    /// Makes an array of `len` words. Allocates nothing yet.
    pub(crate) fn new(len: u64) -> Self {
        let mut height = 0;
        // With 2^64 words, the loop ends when it has looked at all bits.
        while LEAF_BITS + height * LEVEL_BITS < u64::BITS
            && len.saturating_sub(1) >> (LEAF_BITS + height * LEVEL_BITS) > 0
        {
            height += 1;
        }
        Self { len, height, root: AtomicPtr::new(ptr::null_mut()), bytes: CachePadded(AtomicUsize::new(0)) }
    }

    /// Returns the leaf that has the word of `index`, if it exists. Costs one dependent load for
    /// each level and one for the root: nine at most for 2^52 words.
    #[inline]
    pub(crate) fn leaf(&self, index: u64) -> Option<&WordLeaf> {
        if index >= self.len {
            return None;
        }
        let mut below = self.root.load(Ordering::Acquire);
        for height in (0..self.height).rev() {
            // SAFETY: at this height there are levels.
            below = unsafe { level(below) }?[entry(index, height)].load(Ordering::Acquire);
        }
        // SAFETY: what hangs under the lowest level is a leaf.
        unsafe { leaf(below) }
    }

    /// Returns the leaf that has the word of `index`, and makes it if it does not exist, which
    /// allocates. Returns `None` outside the array.
    pub(crate) fn leaf_or_make(&self, index: u64) -> Result<Option<&WordLeaf>, OutOfMemory> {
        if index >= self.len {
            return Ok(None);
        }
        let mut pointer = &self.root;
        for height in (0..self.height).rev() {
            let below = self.make::<Level>(pointer, || boxed(|| AtomicPtr::new(ptr::null_mut())))?;
            // SAFETY: at this height there are levels.
            let level = unsafe { level(below) }.ok_or(OutOfMemory)?;
            pointer = &level[entry(index, height)];
        }
        let group = || CachePadded(core::array::from_fn(|_| AtomicU64::new(0)));
        let below = self.make::<[Group; GROUPS]>(pointer, || boxed(group))?;
        // SAFETY: what hangs under the lowest level is a leaf, which is nothing but these groups.
        Ok(unsafe { leaf(below) })
    }

    /// Calls `f` with each leaf, and the index of its first word. Costs a walk for each leaf, and for each pointer that leads nowhere.
    pub(crate) fn each_leaf(&self, mut f: impl FnMut(u64, &WordLeaf)) {
        let mut index = 0;
        while index < self.len {
            let (mut below, mut bits) = (self.root.load(Ordering::Acquire), LEAF_BITS);
            for height in (0..self.height).rev() {
                // SAFETY: at this height there are levels.
                let Some(level) = (unsafe { level(below) }) else {
                    bits = LEAF_BITS + (height + 1) * LEVEL_BITS;
                    break;
                };
                below = level[entry(index, height)].load(Ordering::Acquire);
            }
            // SAFETY: what hangs under the lowest level is a leaf; where the walk ended before that, this is null.
            if let Some(leaf) = unsafe { leaf(below) } {
                f(index, leaf);
            }
            // All words behind this pointer.
            let last = index | 1_u64.checked_shl(bits).map_or(u64::MAX, |words| words - 1);
            let Some(next) = last.checked_add(1) else { return };
            index = next;
        }
    }

    /// Returns how many bytes of memory all levels and leaves take.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.0.load(Ordering::Relaxed)
    }

    /// Returns what `pointer` points to. If it points nowhere, `make` makes that first.
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
                // SAFETY: it was made above and no other CPU knows of it.
                drop(unsafe { Box::from_raw(made) });
                Ok(other)
            }
        }
    }
}

/// Returns the entry for `index` of a level with `height` levels below it.
#[inline]
const fn entry(index: u64, height: u32) -> usize {
    (index >> (LEAF_BITS + height * LEVEL_BITS)) as usize % LEVEL_ENTRIES
}

/// Returns the level at `below`, if that is not null.
///
/// # Safety
/// `below` is null or came from an array's pointer at a height where levels are, and the array lives.
#[inline]
unsafe fn level<'a>(below: *mut Below) -> Option<&'a Level> {
    // SAFETY: by the caller's promise it is a level, which is freed only with its array.
    unsafe { below.cast::<Level>().as_ref() }
}

/// Returns the leaf at `below`, if that is not null.
///
/// # Safety
/// `below` is null or came from an array's pointer below its lowest level, and the array lives.
#[inline]
unsafe fn leaf<'a>(below: *mut Below) -> Option<&'a WordLeaf> {
    // SAFETY: by the caller's promise it is a leaf, which is freed only with its array.
    unsafe { below.cast::<WordLeaf>().as_ref() }
}

/// Makes `N` fresh entries in the memory where they are to stay.
fn boxed<T, const N: usize>(mut make: impl FnMut() -> T) -> Result<Box<[T; N]>, OutOfMemory> {
    slice(N, |_| Ok(make()))?.try_into().map_err(|_| OutOfMemory)
}

/// Frees what hangs under `pointer`: `height` levels and their leaves.
fn free(pointer: &mut AtomicPtr<Below>, height: u32) {
    let below = pointer.swap(ptr::null_mut(), Ordering::AcqRel);
    if below.is_null() {
        return;
    }
    let Some(lower) = height.checked_sub(1) else {
        // SAFETY: called from `drop` only, by which time no other CPU uses any leaf; each came from a box and
        // is pointed to once.
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
