//! The memory of a unit's structures: whole frames, freed once the unit no longer reads them.

use portcullis::addr::PhysAddr;
use portcullis::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES};

use crate::host::UnitError;
use crate::sync::{AtomicU64, Ordering};

/// Contiguous frames that a unit reads or writes, as 64-bit words.
///
/// A drop leaks them, because the unit may still use them: [`free`](Self::free) frees.
#[derive(Debug)]
pub(crate) struct Words {
    first: PhysAddr,
    count: usize,
}

impl Words {
    /// Allocates `count` zeroed frames, aligned to their size.
    pub fn new<F: Frames>(frames: &F, count: usize) -> Result<Self, UnitError> {
        let first = frames.alloc(count).ok_or(UnitError::OutOfMemory)?;
        if !F::COHERENT {
            // The unit must see zeros: the old contents could be taken for entries.
            for frame in 0..count as u64 {
                // SAFETY: 1: allocated above, and not freed.
                frames.clean(unsafe { frames.table(PhysAddr::new(first.get() + frame * FRAME_SIZE)) });
            }
        }
        Ok(Self { first, count })
    }

    pub fn phys(&self) -> PhysAddr {
        self.first
    }

    pub fn frames(&self) -> usize {
        self.count
    }

    pub fn len(&self) -> usize {
        self.count * TABLE_ENTRIES
    }

    /// The word at `index`, as a CPU left it last. 0 beyond the end.
    pub fn load<F: Frames>(&self, frames: &F, index: usize) -> u64 {
        self.with(frames, index, |word| word.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// The word at `index` as the unit left it, in a cache line to which no CPU stores meanwhile. If the caller has seen a report of the
    /// unit, it finds what the unit stored before that report.
    pub fn load_from_unit<F: Frames>(&self, frames: &F, index: usize) -> u64 {
        let load = |word: &AtomicU64| {
            if !F::COHERENT {
                // A cache may hold stale contents: from the last lap, or prefetched.
                frames.invalidate(core::slice::from_ref(word));
            }
            word.load(Ordering::Acquire)
        };
        self.with(frames, index, load).unwrap_or(0)
    }

    /// Stores `value` at `index`, after all earlier stores of the caller, and makes it visible to the unit. Does nothing beyond the end.
    pub fn store<F: Frames>(&self, frames: &F, index: usize, value: u64) {
        self.with(frames, index, |word| {
            word.store(value, Ordering::Release);
            if !F::COHERENT {
                frames.clean(core::slice::from_ref(word));
            }
        });
    }

    fn with<F: Frames, R>(&self, frames: &F, index: usize, f: impl FnOnce(&AtomicU64) -> R) -> Option<R> {
        if index >= self.len() {
            return None;
        }
        let frame = self.first.checked_add((index / TABLE_ENTRIES) as u64 * FRAME_SIZE)?;
        // SAFETY: 1: `new` allocated the frame, and only `free`, which consumes the value, frees it.
        let table = unsafe { frames.table(frame) };
        table.get(index % TABLE_ENTRIES).map(f)
    }

    /// Frees the frames.
    ///
    /// # Safety
    /// 1. `frames` allocated them.
    /// 2. The unit no longer uses them.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        // SAFETY: 1: one `alloc` of `frames`, by clause 1. 2: clause 2.
        unsafe { frames.free(self.first, self.count) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use core::sync::atomic::AtomicUsize;

    use portcullis::platform::Table;

    use super::*;

    /// Two frames that the unit does not see until they are cleaned, and how many words were.
    struct Unseen {
        frames: [Table; 2],
        cleaned: AtomicUsize,
    }

    const FIRST: u64 = 0x1_0000;

    // SAFETY: 1 to 3: two zeroed frames of the value, allocated once. 4: it records what is cleaned.
    unsafe impl Frames for Unseen {
        fn alloc(&self, count: usize) -> Option<PhysAddr> {
            (count <= 2).then_some(PhysAddr::new(FIRST))
        }

        unsafe fn free(&self, _: PhysAddr, _: usize) {}

        const COHERENT: bool = false;

        fn clean(&self, words: &[AtomicU64]) {
            self.cleaned.fetch_add(words.len(), Ordering::Relaxed);
        }

        unsafe fn table(&self, frame: PhysAddr) -> &Table {
            &self.frames[((frame.get() - FIRST) / FRAME_SIZE) as usize]
        }
    }

    #[test]
    fn a_unit_that_is_not_coherent_sees_zeros_before_it_is_told_of_a_structure() {
        let table = || [const { AtomicU64::new(0) }; TABLE_ENTRIES];
        let frames = Unseen { frames: [table(), table()], cleaned: AtomicUsize::new(0) };
        let words = Words::new(&frames, 2).unwrap();
        assert_eq!(frames.cleaned.load(Ordering::Relaxed), 2 * TABLE_ENTRIES);
        words.store(&frames, TABLE_ENTRIES + 3, 7);
        assert_eq!(frames.cleaned.load(Ordering::Relaxed), 2 * TABLE_ENTRIES + 1);
        assert_eq!(words.load(&frames, TABLE_ENTRIES + 3), 7);
        words.store(&frames, 2 * TABLE_ENTRIES, 7);
        assert_eq!(words.load(&frames, 2 * TABLE_ENTRIES), 0, "beyond the end");
    }
}
