//! The machine's memory, shared with QEMU.

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

/// Bytes at its beginning that are not used: QEMU puts firmware there.
const FIRST: u64 = 16 << 20;

/// A handle; clones share the memory.
#[derive(Clone)]
pub struct Ram(Arc<Shared>);

struct Shared {
    bytes: Place,
    /// Its physical address.
    base: u64,
    len: u64,
    taken: Mutex<Vec<bool>>,
}

enum Place {
    /// A file that QEMU maps, too. Bytes go through the file, words through the mapping: both are one page cache.
    Shared { file: File, map: MmapRaw },
    /// Frames of the software IOMMU's memory, all allocated at once.
    Software(Arc<Memory>),
}

impl fmt::Debug for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len)
    }
}

impl Ram {
    /// Memory in `file`, at physical address `base`.
    pub fn new(file: File, base: u64, bytes: usize) -> Result<Self> {
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        Ok(Self::of(Place::Shared { file, map }, base, bytes, FIRST))
    }

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

    pub fn taken(&self) -> usize {
        self.0.taken.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|taken| **taken).count()
    }

    pub fn base(&self) -> PhysAddr {
        PhysAddr::new(self.0.base)
    }

    /// Checks `len` bytes at `at`, and returns their offset.
    fn offset(&self, at: u64, len: u64) -> u64 {
        let offset = at.checked_sub(self.0.base).filter(|offset| offset + len <= self.0.len);
        offset.unwrap_or_else(|| panic!("no memory at {at:#x}"))
    }

    fn read_to(&self, at: PhysAddr, bytes: &mut [u8]) {
        let offset = self.offset(at.get(), bytes.len() as u64);
        match &self.0.bytes {
            Place::Shared { file, .. } => file.read_exact_at(bytes, offset).expect("it is there"),
            Place::Software(memory) => memory.read(at, bytes).expect("it is there"),
        }
    }

    pub fn read<const N: usize>(&self, at: PhysAddr) -> [u8; N] {
        let mut bytes = [0; N];
        self.read_to(at, &mut bytes);
        bytes
    }

    pub fn read_all(&self, at: PhysAddr, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.read_to(at, &mut bytes);
        bytes
    }

    pub fn write(&self, at: PhysAddr, bytes: &[u8]) {
        let offset = self.offset(at.get(), bytes.len() as u64);
        match &self.0.bytes {
            Place::Shared { file, .. } => file.write_all_at(bytes, offset).expect("it is there"),
            Place::Software(memory) => memory.write(at, bytes).expect("it is there"),
        }
    }
}

// SAFETY: 1: frames have one owner until they are freed, and are zeroed then. 2 and 3: they lie inside the mapping. 4: all accesses of this
// process are atomic, and QEMU is coherent.
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
            // SAFETY: 1: allocated above.
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

    // QEMU's VT-d says that its walker is not coherent. It is, so `clean` does nothing; the driver must not rely on that.
    const COHERENT: bool = false;

    fn clean(&self, _: &[AtomicU64]) {}

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        assert!(frame.get().is_multiple_of(FRAME_SIZE));
        let at = self.offset(frame.get(), FRAME_SIZE);
        match &self.0.bytes {
            // SAFETY: a whole aligned frame inside the mapping; this process only uses atomics.
            Place::Shared { map, .. } => unsafe { &*map.as_mut_ptr().add(at as usize).cast() },
            Place::Software(memory) => memory.table_at(frame),
        }
    }
}

// SAFETY: byte by byte, exactly the bytes named.
unsafe impl CopyMemory for Ram {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        self.write(to, &self.read_all(from, len));
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        self.write(at, &vec![0; len as usize]);
    }
}
