//! A host without hardware, for what QEMU's units never do: the test answers for the registers, memory is the test's own, and
//! each look at the clock moves it on.

use alloc::sync::Arc;
use alloc::vec::Vec;

use portcullis::addr::PhysAddr;
use portcullis::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES, Table};

use crate::host::{Host, Registers};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Where memory begins.
const BASE: u64 = 0x10_0000;

/// How much a look at the clock moves it on, and how long the host has patience, in nanoseconds.
const LOOK: u64 = 1_000;
const PATIENCE: u64 = 100_000;

/// What answers for the registers.
pub(crate) trait Unit: Send + Sync + 'static {
    /// The register at `offset`, of 32 or 64 `bits`.
    fn read(&self, offset: usize, bits: u32) -> u64;

    /// A write to it.
    fn write(&self, offset: usize, bits: u32, value: u64);
}

/// A unit's registers.
#[derive(Debug)]
pub(crate) struct Faked<U>(pub U);

// SAFETY: the unit is this process itself; what it reads of memory are atomics.
unsafe impl<U: Unit> Registers for Faked<U> {
    fn read32(&self, offset: usize) -> u32 {
        self.0.read(offset, 32) as u32
    }

    fn write32(&self, offset: usize, value: u32) {
        self.0.write(offset, 32, u64::from(value));
    }

    fn read64(&self, offset: usize) -> u64 {
        self.0.read(offset, 64)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.0.write(offset, 64, value);
    }
}

/// Memory that counts its frames. A clone is the same memory.
#[derive(Debug, Clone)]
pub(crate) struct Memory(Arc<(Vec<Table>, Mutex<Vec<bool>>)>);

impl Memory {
    /// Where it begins.
    pub const FIRST: u64 = BASE;

    pub fn new(frames: usize) -> Self {
        let table = || core::array::from_fn::<_, TABLE_ENTRIES, _>(|_| AtomicU64::new(0));
        let tables = (0..frames).map(|_| table()).collect();
        Self(Arc::new((tables, Mutex::new(alloc::vec![false; frames]))))
    }

    /// How many frames are taken.
    pub fn taken(&self) -> usize {
        self.0.1.lock().iter().filter(|taken| **taken).count()
    }

    /// The word at `at`, a multiple of 8.
    pub fn word(&self, at: u64) -> &AtomicU64 {
        &self.frame(at)[(at % FRAME_SIZE / 8) as usize]
    }

    fn frame(&self, at: u64) -> &Table {
        &self.0.0[((at - BASE) / FRAME_SIZE) as usize]
    }
}

// SAFETY: frames are given out once until they are freed, and zeroed then; all accesses are atomic.
unsafe impl Frames for Memory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let mut taken = self.0.1.lock();
        let is_free =
            |first: &usize| taken.get(*first..first + count).is_some_and(|run| !run.contains(&true));
        // The base is a multiple of 1 MiB, which is as much as tests take in one piece.
        let first = (0..taken.len()).step_by(count.checked_next_power_of_two()?).find(is_free)?;
        taken[first..first + count].fill(true);
        let words = self.0.0[first..first + count].iter().flatten();
        words.for_each(|word| word.store(0, Ordering::Relaxed));
        Some(PhysAddr::new(BASE + first as u64 * FRAME_SIZE))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        let first = ((first.get() - BASE) / FRAME_SIZE) as usize;
        let mut taken = self.0.1.lock();
        assert!(taken[first..first + count].iter().all(|taken| *taken), "freed twice");
        taken[first..first + count].fill(false);
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.frame(frame.get())
    }
}

/// The host.
#[derive(Debug)]
pub(crate) struct FakeHost<U> {
    registers: Faked<U>,
    memory: Memory,
    now: AtomicU64,
}

impl<U: Unit> FakeHost<U> {
    pub fn new(unit: U, memory: &Memory) -> Self {
        Self { registers: Faked(unit), memory: memory.clone(), now: AtomicU64::new(0) }
    }

    /// What answers for the registers.
    pub fn unit(&self) -> &U {
        &self.registers.0
    }
}

impl<U: Unit> Host for FakeHost<U> {
    type Registers = Faked<U>;
    type Frames = Memory;

    fn registers(&self) -> &Faked<U> {
        &self.registers
    }

    fn frames(&self) -> &Memory {
        &self.memory
    }

    fn now_ns(&self) -> u64 {
        self.now.fetch_add(LOOK, Ordering::Relaxed)
    }

    fn patience_ns(&self) -> u64 {
        PATIENCE
    }
}
