//! Bounce memory for non-coherent devices. Between two calls no cache holds a dirty line of it: no write-back overwrites a device's data, and devices
//! find the CPU's writes, zeros included.

use alloc::sync::Arc;

use crate::addr::PhysAddr;
use crate::platform::{CacheMaintenance, CopyMemory, FRAME_SIZE, Frames, Table};
use crate::sync::{AtomicU64, Ordering, fence};

/// `memory`, with cache maintenance: cleans each write, and invalidates before it reads a device's writes. Its pool shares no frame between two
/// mappings, and a frame is made of whole lines.
#[derive(Clone)]
pub(super) struct Cleaned<C> {
    pub(super) memory: C,
    pub(super) cache: Arc<dyn CacheMaintenance>,
}

impl<C: Frames> Cleaned<C> {
    /// Cleans new frames, so that their zeros replace an earlier owner's bytes in memory.
    fn clean_frames(&self, frames: Option<PhysAddr>, count: usize) -> Option<PhysAddr> {
        let first = frames?;
        // SAFETY: `clean`'s contract: the frames were allocated just now, so the CPU reaches them.
        unsafe { self.cache.clean(first, count as u64 * FRAME_SIZE) };
        Some(first)
    }
}

// SAFETY: the frames are `C`'s, as it allocates them.
unsafe impl<C: Frames> Frames for Cleaned<C> {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.clean_frames(self.memory.alloc(count), count)
    }

    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        self.clean_frames(self.memory.alloc_within(count, last), count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the frames are `C`'s, and `free`'s contract is the caller's.
        unsafe { self.memory.free(first, count) }
    }

    const COHERENT: bool = C::COHERENT;
    const UNCACHED: bool = C::UNCACHED;

    fn clean(&self, words: &[AtomicU64]) {
        self.memory.clean(words);
    }

    fn invalidate(&self, words: &[AtomicU64]) {
        self.memory.invalidate(words);
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the frame is `C`'s, and `table`'s contract is the caller's.
        unsafe { self.memory.table(frame) }
    }
}

// SAFETY: by clause of the trait: `C` writes the named bytes (1, 2), during other calls and accesses (3, 4); cache maintenance changes no byte.
unsafe impl<C: CopyMemory> CopyMemory for Cleaned<C> {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: `copy`'s clauses are the caller's.
        unsafe { self.memory.copy(from, to, len) }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        // SAFETY: `zero`'s clauses are the caller's, and say that the CPU reaches the bytes (`clean`).
        unsafe {
            self.memory.zero(at, len);
            self.cache.clean(at, len);
        }
    }

    /// The driver gives the device the address after this call, so the device reads the copied bytes.
    unsafe fn copy_in(&self, original: PhysAddr, buffer: PhysAddr, len: u64) {
        // SAFETY: `copy_in`'s clauses are the caller's, and say that the CPU reaches the bytes (`clean`).
        unsafe {
            self.memory.copy(original, buffer, len);
            self.cache.clean(buffer, len);
        }
    }

    /// The device has completed before this call, so its writes are in memory, and lines that the CPU has prefetched are stale. As none is dirty, the
    /// invalidation loses nothing.
    unsafe fn copy_out(&self, buffer: PhysAddr, original: PhysAddr, len: u64) {
        fence(Ordering::Acquire);
        // SAFETY: `copy_out`'s clauses are the caller's: all stores of the CPU to the buffer were cleaned (`invalidate`).
        unsafe {
            self.cache.invalidate(buffer, len);
            self.memory.copy(buffer, original, len);
        }
    }
}
