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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use portcullis::pgtable::VtdSecondStage;
    use portcullis::platform::Table as Frame;
    use portcullis::std_platform::StdPlatform;

    use super::*;
    use crate::pgtable::format::AnyFormat;
    use crate::pgtable::memory::Memory;
    use crate::pgtable::ours::Tables;
    use crate::pgtable::work::Shape;

    /// Memory that counts entries that are written back, and of which there is none where the test says so.
    #[derive(Debug, Clone, Default)]
    struct Noted {
        cleaned: Arc<AtomicU64>,
        none: Arc<AtomicBool>,
    }

    // SAFETY: all is the process's memory.
    unsafe impl Frames for Noted {
        fn alloc(&self, count: usize) -> Option<PhysAddr> {
            if self.none.load(Ordering::Relaxed) { None } else { Memory::<true>.alloc(count) }
        }

        unsafe fn free(&self, first: PhysAddr, count: usize) {
            // SAFETY: the caller's promise.
            unsafe { Memory::<true>.free(first, count) }
        }

        const COHERENT: bool = false;

        fn clean(&self, words: &[AtomicU64]) {
            self.cleaned.fetch_add(words.len() as u64, Ordering::Relaxed);
        }

        unsafe fn table(&self, frame: PhysAddr) -> &Frame {
            // SAFETY: the caller's promise.
            unsafe { Memory::<true>.table(frame) }
        }
    }

    fn subjects(frames: &Noted, pattern: &Pattern) -> [Result<Box<dyn Table>, Failure>; 2] {
        let (format, platform) = (VtdSecondStage::four_level(), StdPlatform::with_cpus(1));
        let (ours, stores) =
            (Tables::new(frames.clone(), format, &platform), Stores::new(frames.clone(), format, pattern));
        [ours.map(|made| Box::new(made) as _), stores.map(|made| Box::new(made) as _)]
    }

    fn pattern() -> Pattern {
        let geometry = VtdSecondStage::four_level().geometry();
        Pattern::new(Shape::Page { level: 1 }, &geometry, 1, None).unwrap()
    }

    #[test]
    fn a_subject_for_which_there_is_no_memory_is_refused() {
        let frames = Noted::default();
        frames.none.store(true, Ordering::Relaxed);
        let said = subjects(&frames, &pattern()).map(|made| made.map(drop).unwrap_err());
        let refused = |said: String| Failure::Refused(said);
        let ours = portcullis::SetupError::OutOfMemory.to_string();
        assert_eq!(said, [refused(ours), refused("there is no memory for entries".into())]);
    }

    #[test]
    fn each_entry_is_written_back_once() {
        let (frames, pattern) = (Noted::default(), pattern());
        for table in subjects(&frames, &pattern).map(Result::unwrap) {
            // Tables above the lowest are there from now on.
            assert!(table.map(pattern.first, 0, 4096, 1));
            let phys = PhysAddr::new(1 << 20);
            for operation in [
                &|| table.map(pattern.first + 4096, 0, 4096, 4) as _,
                &|| table.unmap(pattern.first + 4096, 4096, 4) as _,
                &|| table.map_list(pattern.first + 4096, 4096, &[(phys, 4096); 4]) as _,
            ] as [&dyn Fn() -> bool; 3]
            {
                frames.cleaned.store(0, Ordering::Relaxed);
                assert!(operation());
                assert_eq!(frames.cleaned.load(Ordering::Relaxed), 4);
            }
        }
    }
}
