//! What cannot be done without: the entries are stored in place, and nothing else.

use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{Permissions, PhysAddr};
use portcullis::pgtable::{Format, LeafSize};
use portcullis::platform::{FRAME_SIZE, Frames};

use super::table::Table;
use super::work::Pattern;
use crate::runner::Failure;

/// Entries like those of the lowest tables, one after the other: no walk, and no look at whether an entry is
/// free.
pub(crate) struct Stores<F: Frames, X: Format> {
    frames: F,
    format: X,
    size: LeafSize,
    permissions: Permissions,
    memory: PhysAddr,
    count: usize,
    words: *const AtomicU64,
    first: u64,
    shift: u32,
}

// SAFETY: the words are atomic and live as long as this value; nothing of it belongs to a thread.
unsafe impl<F: Frames, X: Format> Send for Stores<F, X> {}
// SAFETY: as above.
unsafe impl<F: Frames, X: Format> Sync for Stores<F, X> {}

impl<F: Frames, X: Format> Stores<F, X> {
    pub(crate) fn new(frames: F, format: X, pattern: &Pattern) -> Result<Self, Failure> {
        let count = (pattern.entries * 8).div_ceil(FRAME_SIZE) as usize;
        let memory =
            frames.alloc(count).ok_or_else(|| Failure::Refused("there is no memory for entries".into()))?;
        // SAFETY: it is the first of the frames just allocated.
        let words = unsafe { frames.table(memory) }.as_ptr();
        Ok(Self {
            frames,
            format,
            size: LeafSize { level: pattern.level, run: 0 },
            permissions: Permissions::READ_WRITE,
            memory,
            count,
            words,
            first: pattern.first,
            shift: pattern.shift,
        })
    }

    /// The entries from that for `iova` on.
    #[inline]
    fn entries(&self, iova: u64, count: u64) -> Option<&[AtomicU64]> {
        // SAFETY: so many words were allocated, in one piece, and are freed in `drop`; they are accessed as
        // atomics only.
        let words = unsafe { std::slice::from_raw_parts(self.words, self.count * (FRAME_SIZE / 8) as usize) };
        words.get((iova.wrapping_sub(self.first) >> self.shift) as usize..)?.get(..count as usize)
    }

    #[inline]
    fn leaf(&self, phys: u64) -> u64 {
        self.format.leaf(PhysAddr::new(phys), self.size, self.permissions.into())
    }

    #[inline]
    fn clean(&self, words: &[AtomicU64]) {
        if !F::COHERENT {
            self.frames.clean(words);
        }
    }
}

impl<F: Frames, X: Format> Table for Stores<F, X> {
    #[inline]
    fn map(&self, iova: u64, phys: u64, _: u64, pages: u64) -> bool {
        let Some(words) = self.entries(iova, pages) else {
            return false;
        };
        let (mut value, stride) = (self.leaf(phys), self.format.stride(self.size));
        for word in words {
            word.store(value, Ordering::Relaxed);
            value = value.wrapping_add(stride);
        }
        self.clean(words);
        true
    }

    #[inline]
    fn map_list(&self, iova: u64, _: u64, pieces: &[(PhysAddr, u64)]) -> bool {
        let Some(words) = self.entries(iova, pieces.len() as u64) else {
            return false;
        };
        for (word, (phys, _)) in words.iter().zip(pieces) {
            word.store(self.leaf(phys.get()), Ordering::Relaxed);
        }
        self.clean(words);
        true
    }

    #[inline]
    fn unmap(&self, iova: u64, _: u64, pages: u64) -> bool {
        let Some(words) = self.entries(iova, pages) else {
            return false;
        };
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.clean(words);
        true
    }

    #[inline]
    fn phys(&self, iova: u64) -> Option<u64> {
        let entry = self.entries(iova, 1)?.first()?.load(Ordering::Relaxed);
        let offset = iova & !(u64::MAX << self.shift);
        (entry & X::PRESENT != 0).then(|| self.format.page(entry, self.size.level).get() | offset)
    }
}

impl<F: Frames, X: Format> Drop for Stores<F, X> {
    fn drop(&mut self) {
        // SAFETY: they came from `alloc` in `new`, and `&mut self` proves that no other code uses the words.
        unsafe { self.frames.free(self.memory, self.count) }
    }
}
