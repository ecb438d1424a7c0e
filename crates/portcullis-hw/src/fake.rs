//! A host without hardware, for behaviour that QEMU's units never show: the test answers for the registers and owns the memory, and each
//! read of the clock advances it.

use alloc::sync::Arc;
use alloc::vec::Vec;

use portcullis::addr::PhysAddr;
use portcullis::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES, Table};

use crate::host::{Host, Registers};
use crate::sync::{AtomicU64, Mutex, Ordering};

const BASE: u64 = 0x10_0000;

/// How far a read of the clock advances it, and the host's patience, in nanoseconds.
const LOOK: u64 = 1_000;
const PATIENCE: u64 = 100_000;

pub(crate) trait Unit: Send + Sync + 'static {
    fn read(&self, offset: usize, bits: u32) -> u64;

    fn write(&self, offset: usize, bits: u32, value: u64);
}

/// What a unit can see of its driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    /// A zeroed frame, by its address.
    Frame(u64),
    /// A word stored to memory: its address, and its value.
    Word(u64, u64),
    /// A register write: offset, bits, value.
    Register(usize, u32, u64),
}

pub(crate) fn word(at: u64, value: u64) -> Seen {
    Seen::Word(at, value)
}

pub(crate) fn register(at: usize, value: u32) -> Seen {
    Seen::Register(at, 32, value.into())
}

/// Entries of two words, in places of `size` bytes of the ring at `ring`, from the place `first` on.
pub(crate) fn entries<'a>(
    (ring, size): (u64, u64),
    first: u64,
    entries: impl IntoIterator<Item = &'a [u64; 2]>,
) -> Vec<Seen> {
    let words = |(place, [low, high]): (u64, &[u64; 2])| {
        let at = ring + place * size;
        [word(at, *low), word(at + 8, *high)]
    };
    (first..).zip(entries).flat_map(words).collect()
}

pub(crate) type Log = Arc<Mutex<Vec<Seen>>>;

#[derive(Debug)]
pub(crate) struct Faked<U> {
    unit: U,
    log: Log,
}

impl<U: Unit> Faked<U> {
    /// Registers are naturally aligned.
    #[track_caller]
    fn assert_place(offset: usize, bits: u32) {
        assert!(offset.is_multiple_of(bits as usize / 8), "no register of {bits} bits is at {offset:#x}");
    }

    fn read(&self, offset: usize, bits: u32) -> u64 {
        Self::assert_place(offset, bits);
        self.unit.read(offset, bits)
    }

    fn write(&self, offset: usize, bits: u32, value: u64) {
        Self::assert_place(offset, bits);
        self.log.lock().push(Seen::Register(offset, bits, value));
        self.unit.write(offset, bits, value);
    }
}

// SAFETY: the unit is this process; it accesses memory by atomics.
unsafe impl<U: Unit> Registers for Faked<U> {
    fn read32(&self, offset: usize) -> u32 {
        self.read(offset, 32) as u32
    }

    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, 32, u64::from(value));
    }

    fn read64(&self, offset: usize) -> u64 {
        self.read(offset, 64)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.write(offset, 64, value);
    }
}

/// Memory that counts its frames. A clone shares it.
#[derive(Debug, Clone)]
pub(crate) struct Memory(Arc<(Vec<Table>, Mutex<Vec<bool>>)>);

impl Memory {
    pub const FIRST: u64 = BASE;

    pub fn new(frames: usize) -> Self {
        let table = || core::array::from_fn::<_, TABLE_ENTRIES, _>(|_| AtomicU64::new(0));
        let tables = (0..frames).map(|_| table()).collect();
        Self(Arc::new((tables, Mutex::new(alloc::vec![false; frames]))))
    }

    pub fn taken(&self) -> usize {
        self.0.1.lock().iter().filter(|taken| **taken).count()
    }

    pub fn word(&self, at: u64) -> &AtomicU64 {
        &self.frame(at)[(at % FRAME_SIZE / 8) as usize]
    }

    fn frame(&self, at: u64) -> &Table {
        &self.0.0[((at - BASE) / FRAME_SIZE) as usize]
    }
}

// SAFETY: 1: a frame has one owner until it is freed, and is zeroed then. 2 and 3: of a table behind an `Arc`. 4: all accesses are atomic.
unsafe impl Frames for Memory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let mut taken = self.0.1.lock();
        let is_free =
            |first: &usize| taken.get(*first..first + count).is_some_and(|run| !run.contains(&true));
        // The base is a multiple of 1 MiB, the largest piece that tests take.
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

/// Non-coherent memory, which records what is cleaned.
#[derive(Debug)]
pub(crate) struct Uncached {
    memory: Memory,
    log: Log,
}

// SAFETY: the memory's clauses.
unsafe impl Frames for Uncached {
    const COHERENT: bool = false;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.memory.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.memory.free(first, count) };
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: clause 1 is the caller's.
        unsafe { self.memory.table(frame) }
    }

    fn clean(&self, words: &[AtomicU64]) {
        let tables = self.memory.0.0.as_ptr().addr();
        let address = |word: &AtomicU64| BASE + (core::ptr::from_ref(word).addr() - tables) as u64;
        let values = words.iter().map(|word| (address(word), word.load(Ordering::Relaxed)));
        let mut log = self.log.lock();
        if words.len() == TABLE_ENTRIES && values.clone().all(|(_, value)| value == 0) {
            log.push(Seen::Frame(address(&words[0])));
        } else {
            log.extend(values.map(|(at, value)| Seen::Word(at, value)));
        }
    }
}

#[derive(Debug)]
pub(crate) struct FakeHost<U, F = Memory> {
    registers: Faked<U>,
    frames: F,
    now: AtomicU64,
    relaxed: AtomicU64,
}

impl<U: Unit> FakeHost<U> {
    pub fn new(unit: U, memory: &Memory) -> Self {
        let registers = Faked { unit, log: Log::default() };
        Self { registers, frames: memory.clone(), now: AtomicU64::new(0), relaxed: AtomicU64::new(0) }
    }

    /// As `new`, with memory that is cleaned, so that [`seen`](Self::seen) includes stores to memory.
    pub fn uncached(self) -> FakeHost<U, Uncached> {
        let Self { registers, frames: memory, now, relaxed } = self;
        let frames = Uncached { memory, log: Arc::clone(&registers.log) };
        FakeHost { registers, frames, now, relaxed }
    }
}

impl<U: Unit, F> FakeHost<U, F> {
    pub fn unit(&self) -> &U {
        &self.registers.unit
    }

    /// The source of [`seen`](Self::seen), for what a unit sees after its driver is dropped.
    pub fn log(&self) -> &Log {
        &self.registers.log
    }

    /// Calls of `relax` since the last call of this.
    pub fn relaxed(&self) -> u64 {
        self.relaxed.swap(0, Ordering::Relaxed)
    }

    /// What the unit could see since the last call.
    pub fn seen(&self) -> Vec<Seen> {
        core::mem::take(&mut self.registers.log.lock())
    }
}

impl<U: Unit, F: Frames> Host for FakeHost<U, F> {
    type Registers = Faked<U>;
    type Frames = F;

    fn registers(&self) -> &Faked<U> {
        &self.registers
    }

    fn frames(&self) -> &F {
        &self.frames
    }

    fn now_ns(&self) -> u64 {
        self.now.fetch_add(LOOK, Ordering::Relaxed)
    }

    fn relax(&self) {
        self.relaxed.fetch_add(1, Ordering::Relaxed);
    }

    fn patience_ns(&self) -> u64 {
        PATIENCE
    }
}
