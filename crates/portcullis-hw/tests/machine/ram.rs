//! The machine's memory, as both sides share it.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapOptions, MmapRaw};
use portcullis::addr::PhysAddr;
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, Table};
use portcullis_model::Memory;

use super::Result;

/// How much of its beginning is left alone: QEMU puts firmware there.
const FIRST: u64 = 16 << 20;

/// A handle; a clone is the same memory.
#[derive(Clone)]
pub struct Ram(Arc<Shared>);

struct Shared {
    bytes: Place,
    /// Where it begins, for the machine.
    base: u64,
    /// How many bytes there are.
    len: u64,
    /// Whether each frame is taken.
    taken: Mutex<Vec<bool>>,
}

/// Where the bytes are.
enum Place {
    /// In a file that QEMU has mapped, too. Bytes go through the file, words through the mapping: the system has one copy of both.
    Shared { file: File, map: MmapRaw },
    /// In the software IOMMU's memory, all of whose frames were taken at once.
    Software(Arc<Memory>),
}

impl fmt::Debug for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len)
    }
}

impl Ram {
    /// Memory in `file`, which begins at `base` for the machine.
    pub fn new(file: File, base: u64, bytes: usize) -> Result<Self> {
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        Ok(Self::of(Place::Shared { file, map }, base, bytes, FIRST))
    }

    /// The software IOMMU's.
    pub fn software(bytes: usize) -> Result<(Self, Arc<Memory>)> {
        let memory = Memory::new(bytes as u64 * 2);
        let first = memory.alloc(bytes / FRAME_SIZE as usize).ok_or("no memory")?;
        Ok((Self::of(Place::Software(Arc::clone(&memory)), first.get(), bytes, 0), memory))
    }

    fn of(bytes: Place, base: u64, len: usize, kept: u64) -> Self {
        let frames = len as u64 / FRAME_SIZE;
        let taken = (0..frames).map(|frame| frame < kept / FRAME_SIZE).collect();
        Self(Arc::new(Shared { bytes, base, len: len as u64, taken: Mutex::new(taken) }))
    }

    /// How many frames are taken.
    pub fn taken(&self) -> usize {
        self.0.taken.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|taken| **taken).count()
    }

    /// Where memory begins.
    pub fn base(&self) -> PhysAddr {
        PhysAddr::new(self.0.base)
    }

    /// Where `len` bytes at `at` lie, counted from the beginning of memory.
    fn offset(&self, at: u64, len: u64) -> u64 {
        let offset = at.checked_sub(self.0.base).filter(|offset| offset + len <= self.0.len);
        offset.unwrap_or_else(|| panic!("no memory at {at:#x}"))
    }

    /// Reads the bytes from `at` on.
    fn read_to(&self, at: PhysAddr, bytes: &mut [u8]) {
        let offset = self.offset(at.get(), bytes.len() as u64);
        match &self.0.bytes {
            Place::Shared { file, .. } => file.read_exact_at(bytes, offset).expect("it is there"),
            Place::Software(memory) => memory.read(at, bytes).expect("it is there"),
        }
    }

    /// The `N` bytes from `at` on.
    pub fn read<const N: usize>(&self, at: PhysAddr) -> [u8; N] {
        let mut bytes = [0; N];
        self.read_to(at, &mut bytes);
        bytes
    }

    /// The `len` bytes from `at` on.
    pub fn read_all(&self, at: PhysAddr, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.read_to(at, &mut bytes);
        bytes
    }

    /// Stores bytes from `at` on.
    pub fn write(&self, at: PhysAddr, bytes: &[u8]) {
        let offset = self.offset(at.get(), bytes.len() as u64);
        match &self.0.bytes {
            Place::Shared { file, .. } => file.write_all_at(bytes, offset).expect("it is there"),
            Place::Software(memory) => memory.write(at, bytes).expect("it is there"),
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
        let first = (self.offset(first.get(), FRAME_SIZE) / FRAME_SIZE) as usize;
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
        match &self.0.bytes {
            // SAFETY: a whole frame inside the mapping, aligned; all accesses of this process are atomic.
            Place::Shared { map, .. } => unsafe { &*map.as_mut_ptr().add(at as usize).cast() },
            Place::Software(memory) => memory.table_at(frame),
        }
    }
}

// SAFETY: byte by byte, all of them and no other.
unsafe impl CopyMemory for Ram {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        self.write(to, &self.read_all(from, len));
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        self.write(at, &vec![0; len as usize]);
    }
}
