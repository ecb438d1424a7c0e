//! Frames made of the model checker's atomics, and a format whose tables have two entries.

use std::sync::{Arc, Mutex};

use portcullis::addr::{Permissions, PhysAddr};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::pgtable::{Attributes, Entry, Format, LeafSize};
use portcullis::platform::{FRAME_SIZE, Frames, LocalCpu, Platform, PlatformEvents, PlatformNumber, Table};
use portcullis::sync::{AtomicU64, Ordering};

/// Words of a frame that the tests use.
const DIRTY: usize = 3;

/// What looks like a pointer to a table that is nobody's: a CPU that follows a pointer too early, or too late,
/// asks for it.
const DIRT: u64 = 0xdead_0003;

struct State {
    free: Vec<usize>,
    in_use: Vec<bool>,
}

struct Inner {
    frames: Vec<Box<Table>>,
    /// Only tables without entries are given back.
    only_empty: bool,
    /// A plain lock, as its own correctness is not what is checked here.
    state: Mutex<State>,
}

#[derive(Clone)]
pub struct LoomFrames(Arc<Inner>);

impl LoomFrames {
    pub fn new(count: usize, only_empty: bool) -> Self {
        let dirt = |index| if index < DIRTY { DIRT } else { 0 };
        let table = || Box::new(std::array::from_fn(|index| AtomicU64::new(dirt(index))));
        let frames = (0..count).map(|_| table()).collect();
        let state = State { free: (0..count).rev().collect(), in_use: vec![false; count] };
        Self(Arc::new(Inner { frames, only_empty, state: Mutex::new(state) }))
    }

    pub fn free_frames(&self) -> usize {
        self.0.state.lock().unwrap().free.len()
    }
}

// SAFETY: the indices of the free list are handed out one by one, and zeroed before.
unsafe impl Frames for LoomFrames {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        assert_eq!(count, 1);
        let mut state = self.0.state.lock().unwrap();
        let index = state.free.pop()?;
        assert!(!std::mem::replace(&mut state.in_use[index], true));
        drop(state);
        self.0.frames[index][..DIRTY].iter().for_each(|word| word.store(0, Ordering::Relaxed));
        Some(PhysAddr::new((index as u64 + 1) * FRAME_SIZE))
    }

    unsafe fn free(&self, first: PhysAddr, _count: usize) {
        let index = (first.get() / FRAME_SIZE - 1) as usize;
        // Before anybody else can have it. Two words do: the others are not used.
        for word in &self.0.frames[index][..2] {
            let entry = word.load(Ordering::Relaxed);
            assert!(entry == 0 || !self.0.only_empty, "{entry:#x} is lost with a table");
            word.store(DIRT, Ordering::Relaxed);
        }
        let mut state = self.0.state.lock().unwrap();
        assert!(std::mem::replace(&mut state.in_use[index], false), "freed twice");
        // Used again last.
        state.free.insert(0, index);
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        let index = (frame.get() / FRAME_SIZE).wrapping_sub(1) as usize;
        let in_use = self.0.state.lock().unwrap().in_use.get(index).copied();
        assert_eq!(in_use, Some(true), "the table at {frame} is not in use");
        &self.0.frames[index]
    }
}

/// Two levels of two entries each: four pages of 16 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Tiny;

const PRESENT: u64 = 1;
const TABLE: u64 = 2;

static SIZES: [LeafSize; 1] = [LeafSize { level: 1, run: 0 }];

// SAFETY: a table's address is all of an entry but its low 12 bits, its level one below; a leaf is at level 1 only. Two entries
// of 8 bytes make a table, and four pages the input.
unsafe impl Format for Tiny {
    const GRANULE_SHIFT: u32 = 4;
    const MARK: u64 = 4;
    const SPLIT: u64 = 8;
    const PRESENT: u64 = PRESENT;
    const KIND: u64 = PRESENT | TABLE;
    const BREAK_BEFORE_MAKE: bool = false;

    fn name(&self) -> &'static str {
        "tiny"
    }

    fn levels(&self) -> u32 {
        2
    }

    fn input_bits(&self) -> u32 {
        6
    }

    fn last_phys(&self) -> PhysAddr {
        PhysAddr::new(0xffff_ffff)
    }

    fn leaf_sizes(&self) -> &'static [LeafSize] {
        &SIZES
    }

    fn leaf(&self, page: PhysAddr, _: LeafSize, _: Attributes) -> u64 {
        page.get() | PRESENT
    }

    fn stride(&self, _: LeafSize) -> u64 {
        16
    }

    fn table(&self, table: PhysAddr, _: u32) -> u64 {
        table.get() | PRESENT | TABLE
    }

    fn decode(&self, entry: u64, level: u32) -> Entry {
        if entry & PRESENT == 0 {
            Entry::Absent
        } else if level == 1 {
            Entry::Leaf { run: 0 }
        } else {
            Entry::Table { table: PhysAddr::new(entry & !0xfff), level: level - 1 }
        }
    }

    fn page(&self, entry: u64, _: u32) -> PhysAddr {
        PhysAddr::new(entry & !0xf)
    }

    fn attributes(&self, _: u64, _: u32) -> Attributes {
        Permissions::READ_WRITE.into()
    }
}

/// The machine that the CPUs of a model are of.
pub static MACHINE: std::sync::LazyLock<PlatformNumber> = std::sync::LazyLock::new(PlatformNumber::new);

/// A platform that lends one CPU, or none, with full fences, as the model checker knows no others.
pub struct Cpu(pub Option<usize>);

// SAFETY: each thread of the model is a CPU of its own; fences are full.
unsafe impl Platform for Cpu {
    fn cpus(&self) -> usize {
        2
    }

    fn number(&self) -> PlatformNumber {
        *MACHINE
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: the tests give each thread a number of its own.
        f(self.0.map(|cpu| unsafe { LocalCpu::new(cpu) }).as_ref())
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}
