//! Frames whose walker is not coherent: it sees what was cleaned, word by word, and rubbish before.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use portcullis::addr::{Permissions, PhysAddr};
use portcullis::pgtable::Format;
use portcullis::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES, Table};
use portcullis::sync::{AtomicU64, Ordering};
use portcullis_model::Memory;
use portcullis_model::open::Simulated;

use super::machine::Backing;

/// Memory as the CPUs have it, and as the walker has seen it.
///
/// Hardware is shown whole cache lines at least; here nothing but the words that were named, so that a word that was
/// forgotten is not shown by a neighbour's luck.
pub struct Shown {
    memory: Arc<Memory>,
    seen: Arc<Memory>,
    /// Where the words of each frame are.
    frames: Mutex<BTreeMap<usize, u64>>,
    /// What the walker finds in a frame of which it was shown nothing: a page, in a lowest table, that nobody mapped.
    rubbish: u64,
}

impl Shown {
    fn show(&self, at: u64, word: u64) {
        self.seen.write(PhysAddr::new(at), &word.to_le_bytes()).unwrap();
    }

    fn hide(&self, first: PhysAddr, count: usize) {
        let end = first.get() + count as u64 * FRAME_SIZE;
        (first.get()..end).step_by(8).for_each(|at| self.show(at, self.rubbish));
    }
}

impl Backing for Arc<Shown> {
    fn of<X: Format>(memory: &Arc<Memory>, format: &X) -> (Self, Arc<Memory>) {
        let seen = Memory::with_base(memory.base(), memory.capacity());
        let smallest = format.leaf_sizes()[0];
        let rubbish = format.leaf(PhysAddr::new(0), smallest, Permissions::READ_WRITE.into());
        let (memory, frames) = (Arc::clone(memory), Mutex::default());
        (Arc::new(Shown { memory, seen: Arc::clone(&seen), frames, rubbish }), seen)
    }
}

// SAFETY: it is the software IOMMU's memory.
unsafe impl Simulated for Shown {}

// SAFETY: everything is passed on to the memory.
unsafe impl Frames for Shown {
    const COHERENT: bool = false;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let first = self.memory.alloc(count)?;
        for frame in (0..count as u64).map(|number| first.get() + number * FRAME_SIZE) {
            let words = self.memory.table_at(PhysAddr::new(frame)).as_ptr() as usize;
            self.frames.lock().unwrap().insert(words, frame);
        }
        self.hide(first, count);
        Some(first)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        let freed = first.get()..first.get() + count as u64 * FRAME_SIZE;
        self.frames.lock().unwrap().retain(|_, frame| !freed.contains(frame));
        self.hide(first, count);
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.free(first, count) }
    }

    fn clean(&self, words: &[AtomicU64]) {
        let start = words.as_ptr() as usize;
        let (base, frame) = {
            let frames = self.frames.lock().unwrap();
            let (base, frame) = frames.range(..=start).next_back().expect("words of a frame in use");
            (*base, *frame)
        };
        let index = (start - base) / 8;
        assert!(index + words.len() <= TABLE_ENTRIES, "words of one frame");
        for (word, at) in words.iter().zip((frame + 8 * index as u64..).step_by(8)) {
            self.show(at, word.load(Ordering::Relaxed));
        }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.table(frame) }
    }
}
