//! The machine's memory, as both sides share it.

use std::fmt;
use std::fs::File;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapOptions, MmapRaw};
use portcullis::addr::PhysAddr;
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, Table};

use super::Result;

/// How much of its beginning is left alone: QEMU puts firmware there.
const FIRST: u64 = 16 << 20;

/// A handle; a clone is the same memory.
#[derive(Clone)]
pub struct Ram(Arc<Shared>);

struct Shared {
    map: MmapRaw,
    /// Where it begins, for the machine.
    base: u64,
    /// Whether each frame is taken.
    taken: Mutex<Vec<bool>>,
}

impl fmt::Debug for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.map.len())
    }
}

impl Ram {
    pub fn new(file: &File, base: u64, bytes: usize) -> Result<Self> {
        let map = MmapOptions::new().len(bytes).map_raw(file)?;
        let frames = bytes as u64 / FRAME_SIZE;
        let taken = (0..frames).map(|frame| frame < FIRST / FRAME_SIZE).collect();
        Ok(Self(Arc::new(Shared { map, base, taken: Mutex::new(taken) })))
    }

    /// How many frames are taken.
    pub fn taken(&self) -> usize {
        self.0.taken.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|taken| **taken).count()
    }

    /// Where memory begins.
    pub fn base(&self) -> PhysAddr {
        PhysAddr::new(self.0.base)
    }

    /// Where `len` bytes at `at` lie in the mapping.
    fn offset(&self, at: u64, len: u64) -> usize {
        let offset = at.checked_sub(self.0.base).filter(|offset| offset + len <= self.0.map.len() as u64);
        offset.unwrap_or_else(|| panic!("no memory at {at:#x}")) as usize
    }

    /// The byte at `at`.
    fn byte(&self, at: u64) -> &AtomicU8 {
        // SAFETY: inside the mapping, which lives as long as the handle; all accesses of this process are atomic.
        unsafe { AtomicU8::from_ptr(self.0.map.as_mut_ptr().add(self.offset(at, 1))) }
    }

    /// The `N` bytes from `at` on.
    pub fn read<const N: usize>(&self, at: PhysAddr) -> [u8; N] {
        std::array::from_fn(|index| self.byte(at.get() + index as u64).load(Ordering::Acquire))
    }

    /// The `len` bytes from `at` on.
    pub fn read_all(&self, at: PhysAddr, len: u64) -> Vec<u8> {
        (at.get()..at.get() + len).map(|address| self.byte(address).load(Ordering::Acquire)).collect()
    }

    /// Stores bytes from `at` on.
    pub fn write(&self, at: PhysAddr, bytes: &[u8]) {
        for (address, byte) in (at.get()..).zip(bytes) {
            self.byte(address).store(*byte, Ordering::Release);
        }
    }
}

// SAFETY: frames are inside the mapping, given out once until they are freed, and zeroed when they are given out. All that reaches
// them from this process is atomic.
unsafe impl Frames for Ram {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let step = count.checked_next_power_of_two().filter(|_| count > 0)?;
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |first: &usize| taken.get(*first..first + count).is_some_and(|run| !run.contains(&true));
        let first = (0..taken.len()).step_by(step).find(fits)?;
        taken[first..first + count].fill(true);
        drop(taken);
        let at = PhysAddr::new(self.0.base + first as u64 * FRAME_SIZE);
        for frame in 0..count as u64 {
            // SAFETY: given out above.
            let words = unsafe { self.table(PhysAddr::new(at.get() + frame * FRAME_SIZE)) };
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        Some(at)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        let first = self.offset(first.get(), FRAME_SIZE) / FRAME_SIZE as usize;
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(taken[first..first + count].iter().all(|taken| *taken), "freed twice");
        taken[first..first + count].fill(false);
    }

    // QEMU's VT-d says that its walker is not coherent. It is, so there is nothing to clean; the driver must not rely on that.
    const COHERENT: bool = false;

    fn clean(&self, _: &[AtomicU64]) {}

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        assert!(frame.get().is_multiple_of(FRAME_SIZE));
        let at = self.offset(frame.get(), FRAME_SIZE);
        // SAFETY: a whole frame inside the mapping, aligned; all accesses of this process are atomic.
        unsafe { &*self.0.map.as_mut_ptr().add(at).cast() }
    }
}

// SAFETY: byte by byte, all of them and no other.
unsafe impl CopyMemory for Ram {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        for offset in 0..len {
            let byte = self.byte(from.get() + offset).load(Ordering::Acquire);
            self.byte(to.get() + offset).store(byte, Ordering::Release);
        }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        (0..len).for_each(|offset| self.byte(at.get() + offset).store(0, Ordering::Release));
    }
}
