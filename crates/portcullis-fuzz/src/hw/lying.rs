//! A unit of software whose registers say what the input wants, behind a clock that goes on with
//! each look at it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use portcullis_hw::software::{Kind, Software};
use portcullis_hw::{Host, Registers};
use portcullis_model::Memory;

/// Accesses of registers that one call of a driver makes at the most. (AMD's, without a command for
/// everything, makes one for each of 65,536 domains.)
const MOST: u64 = 2_000_000;

/// What a register says in place of what it is.
#[derive(Debug, Clone, Copy)]
pub struct Lie {
    pub offset: usize,
    /// The bits that are as they are, and those that are set besides.
    pub kept: u64,
    pub set: u64,
    /// How many reads it is said for.
    pub times: u8,
}

/// The registers.
#[derive(Debug)]
pub struct Lying<K> {
    pub unit: Software<K, Arc<Memory>>,
    lies: Mutex<Vec<Lie>>,
    accesses: AtomicU64,
}

impl<K: Kind> Lying<K> {
    pub fn new(memory: &Arc<Memory>) -> Self {
        // SAFETY: the driver's host has the same frames.
        let unit = unsafe { Software::new(Arc::clone(memory)) };
        Self { unit, lies: Mutex::default(), accesses: AtomicU64::new(0) }
    }

    pub fn lie(&self, lie: Lie) {
        self.lies.lock().unwrap_or_else(PoisonError::into_inner).push(lie);
    }

    /// The driver is called once more.
    pub fn called(&self) {
        self.accesses.store(0, Ordering::Relaxed);
    }

    fn said(&self, offset: usize, value: u64) -> u64 {
        let before = self.accesses.fetch_add(1, Ordering::Relaxed);
        assert!(before < MOST, "the driver does not come to an end");
        let mut lies = self.lies.lock().unwrap_or_else(PoisonError::into_inner);
        let mut said = value;
        for lie in lies.iter_mut().filter(|lie| lie.offset == offset && lie.times > 0) {
            // 255 is for ever.
            lie.times -= u8::from(lie.times < u8::MAX);
            said = said & lie.kept | lie.set;
        }
        said
    }
}

// SAFETY: the unit's, but for what reads say; memory is the model's, which no such word can harm.
unsafe impl<K: Kind> Registers for Lying<K> {
    fn read32(&self, offset: usize) -> u32 {
        self.said(offset, self.unit.read32(offset).into()) as u32
    }

    fn write32(&self, offset: usize, value: u32) {
        self.unit.write32(offset, value);
    }

    fn read64(&self, offset: usize) -> u64 {
        self.said(offset, self.unit.read64(offset))
    }

    fn write64(&self, offset: usize, value: u64) {
        self.unit.write64(offset, value);
    }
}

/// The host.
#[derive(Debug)]
pub struct LyingHost<R> {
    pub registers: R,
    pub memory: Arc<Memory>,
    now: AtomicU64,
}

impl<R> LyingHost<R> {
    pub fn new(registers: R, memory: &Arc<Memory>) -> Self {
        Self { registers, memory: Arc::clone(memory), now: AtomicU64::new(0) }
    }
}

impl<R: Registers> Host for LyingHost<R> {
    type Registers = R;
    type Frames = Arc<Memory>;

    fn registers(&self) -> &R {
        &self.registers
    }

    fn frames(&self) -> &Arc<Memory> {
        &self.memory
    }

    fn now_ns(&self) -> u64 {
        self.now.fetch_add(1_000, Ordering::Relaxed)
    }

    fn patience_ns(&self) -> u64 {
        20_000
    }
}
