//! Software units: the registers of each IOMMU, with just the behaviour that a driver waits for.
//!
//! Such a unit enters the states that it is told to enter, and consumes the commands of its ring inside the write of the doorbell, on the
//! CPU that rings; it walks no tables, and caches nothing. They measure what a driver costs without hardware (`portcullis bench
//! invalidation`, `cargo xtask coherence`); and fuzzers change their registers and memory under a driver.
//!
//! A unit reads commands and stores confirmations where the driver has said. A unit with an unacknowledged error reads no more commands. A
//! [watched](Software::watched) unit stops where its watcher says so.

mod amdvi;
mod riscv;
mod smmuv3;
mod vtd;

use alloc::boxed::Box;
use core::fmt;
use core::marker::PhantomData;

use portcullis::addr::PhysAddr;
use portcullis::platform::{FRAME_SIZE, Frames};

use crate::host::{Host, Registers};
use crate::sync::{AtomicU64, Mutex, Ordering};

pub use amdvi::AmdVi;
pub use riscv::RiscV;
pub use smmuv3::SmmuV3;
pub use vtd::VtD;

/// Registers are in two pages of this many bytes: at 0, and at some offset from 0x1000 on. A kind of unit may have more elsewhere.
const PAGE: usize = 0x400;

/// Words of these two pages.
const TWO_PAGES: usize = 2 * PAGE / 4;

/// One kind of unit.
pub trait Kind: Sized + Send + Sync + 'static {
    /// 32-bit registers that are not 0 after a reset: offsets and values.
    const RESET: &'static [(usize, u32)];

    /// The word index of the register at `offset`, a multiple of 4.
    fn word(offset: usize) -> Option<usize> {
        of_two_pages(offset)
    }

    /// The new value of the 32-bit register at `offset`, which reads `old`, after a write of `value`.
    fn taken<F: Frames>(unit: &Software<Self, F>, offset: usize, old: u32, value: u32) -> u32;

    /// The unit's reaction to a write of `offset` (and the next register, if `bits` is 64). It stops at a command that the watcher rejects.
    fn written<F: Frames>(unit: &Software<Self, F>, offset: usize, bits: u32, watcher: Option<&Watcher>);
}

/// Called with each command before its execution. If it returns `false`, the unit stops there, with an error.
pub type Watcher = Box<dyn Fn([u64; 2]) -> bool + Send + Sync>;

/// The registers of a unit of this kind, and its memory.
pub struct Software<K, F> {
    words: Box<[AtomicU64]>,
    frames: F,
    /// Held for each write of a register, because the CPU that resumes the unit is not the one that rings.
    watcher: Option<Mutex<Watcher>>,
    kind: PhantomData<K>,
}

/// The word index of a register in the two pages.
fn of_two_pages(offset: usize) -> Option<usize> {
    let (page, rest) = (usize::from(offset >= 0x1000), offset & 0xfff);
    (rest < PAGE).then_some((page * PAGE + rest) / 4)
}

fn words(count: usize) -> Box<[AtomicU64]> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

impl<K, F> fmt::Debug for Software<K, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a unit of software")
    }
}

impl<K: Kind, F: Frames> Software<K, F> {
    /// A unit after reset.
    ///
    /// # Safety
    /// 1. Addresses that are written to its registers, and those in its commands, are of `frames`, and stay allocated while the unit may
    ///    use them: so it is with a driver whose host has the same frames.
    pub unsafe fn new(frames: F) -> Self {
        let unit = Self { words: words(TWO_PAGES), frames, watcher: None, kind: PhantomData };
        for (offset, value) in K::RESET {
            unit.set(*offset, *value);
        }
        unit
    }

    /// The same, with a `watcher` of its commands.
    ///
    /// # Safety
    /// That of [`new`](Self::new).
    pub unsafe fn watched(frames: F, watcher: Watcher) -> Self {
        // SAFETY: clause 1 is the caller's.
        Self { watcher: Some(Mutex::new(watcher)), ..unsafe { Self::new(frames) } }
    }

    /// The memory.
    pub fn frames(&self) -> &F {
        &self.frames
    }

    fn place(&self, offset: usize) -> Option<&AtomicU64> {
        if offset.is_multiple_of(4) { self.words.get(K::word(offset)?) } else { None }
    }

    /// The 32-bit register at `offset`: all ones if there is none.
    pub fn get(&self, offset: usize) -> u32 {
        self.place(offset).map_or(u32::MAX, |word| word.load(Ordering::Acquire) as u32)
    }

    /// The 64-bit register at `offset`.
    pub fn get64(&self, offset: usize) -> u64 {
        u64::from(self.get(offset)) | u64::from(self.get(offset + 4)) << 32
    }

    /// Sets the 32-bit register at `offset`, even if it is read-only.
    pub fn set(&self, offset: usize, value: u32) {
        if let Some(word) = self.place(offset) {
            word.store(u64::from(value), Ordering::Release);
        }
    }

    /// The same for 64 bits.
    pub fn set64(&self, offset: usize, value: u64) {
        self.set(offset, value as u32);
        self.set(offset + 4, (value >> 32) as u32);
    }

    /// The word of memory at `address`, rounded down to a multiple of 8.
    fn memory(&self, address: u64) -> &AtomicU64 {
        // SAFETY: clause 1 of `new`.
        let table = unsafe { self.frames.table(PhysAddr::new(address & !(FRAME_SIZE - 1))) };
        &table[(address % FRAME_SIZE / 8) as usize]
    }

    fn command(&self, base: u64, index: u32) -> [u64; 2] {
        [0, 8].map(|word| self.memory(base + u64::from(index) * 16 + word).load(Ordering::Acquire))
    }

    /// Stores a confirmation at an address of 4 bytes, in a word that is otherwise 0.
    fn confirm(&self, number: u32, address: u64) {
        let shift = address % 8 * 8;
        self.memory(address).store(u64::from(number) << shift, Ordering::Release);
    }

    fn take(&self, offset: usize, value: u32) {
        self.set(offset, K::taken(self, offset, self.get(offset), value));
    }

    fn write(&self, offset: usize, bits: u32, value: u64) {
        let watcher = self.watcher.as_ref().map(|watcher| watcher.lock());
        self.take(offset, value as u32);
        if bits == 64 {
            self.take(offset + 4, (value >> 32) as u32);
        }
        K::written(self, offset, bits, watcher.as_deref());
    }
}

// SAFETY: 1 to 6: each access is carried out before it returns, in the order of the calls; the unit loads memory with `Acquire`, in the
// call of the write that tells it to, and stores memory, and then registers, with `Release`. 7: an offset that is no register's reads as
// all ones. 8 is left to the host's owner.
unsafe impl<K: Kind, F: Frames> Registers for Software<K, F> {
    fn read32(&self, offset: usize) -> u32 {
        self.get(offset)
    }

    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, 32, value.into());
    }

    fn read64(&self, offset: usize) -> u64 {
        self.get64(offset)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.write(offset, 64, value);
    }
}

/// A host with a software unit.
#[derive(Debug)]
pub struct SoftwareHost<K, F> {
    /// The unit, and the memory.
    pub unit: Software<K, F>,
    /// The clock, in nanoseconds.
    pub now: fn() -> u64,
    /// Called while polling.
    pub relax: fn(),
    /// The longest wait, in nanoseconds.
    pub patience: u64,
    /// How many CPUs share waits.
    pub cpus: usize,
    /// The number of the calling CPU.
    pub cpu: fn() -> Option<usize>,
}

impl<K: Kind, F: Frames> Host for SoftwareHost<K, F> {
    type Registers = Software<K, F>;
    type Frames = F;

    fn registers(&self) -> &Software<K, F> {
        &self.unit
    }

    fn frames(&self) -> &F {
        self.unit.frames()
    }

    fn now_ns(&self) -> u64 {
        (self.now)()
    }

    fn relax(&self) {
        (self.relax)();
    }

    fn patience_ns(&self) -> u64 {
        self.patience
    }

    fn cpus(&self) -> usize {
        self.cpus
    }

    fn cpu(&self) -> Option<usize> {
        (self.cpu)()
    }
}
