//! Memory to copy through for devices that are not coherent. Between two calls no cache holds a
//! dirty line of it, so no line that is written back takes the place of what a device wrote, and
//! devices find what the CPU wrote, zeros included.

use alloc::sync::Arc;

use crate::addr::PhysAddr;
use crate::platform::{CacheMaintenance, CopyMemory, FRAME_SIZE, Frames, Table};
use crate::sync::{AtomicU64, Ordering, fence};

/// `memory`, each write to which is cleaned before devices may look for it, and each read of what
/// devices wrote is invalidated for. The pool that is made of it shares no frame between two
/// mappings, and a frame is made of whole lines.
#[derive(Clone)]
pub(super) struct Cleaned<C> {
    pub(super) memory: C,
    pub(super) cache: Arc<dyn CacheMaintenance>,
}

impl<C: Frames> Cleaned<C> {
    /// Has the zeros of frames that were allocated reach the memory, in the place of what an
    /// earlier owner had there.
    fn clean_frames(&self, frames: Option<PhysAddr>, count: usize) -> Option<PhysAddr> {
        let first = frames?;
        // SAFETY: the frames were allocated just now.
        unsafe { self.cache.clean(first, count as u64 * FRAME_SIZE) };
        Some(first)
    }
}

// SAFETY: the frames are `C`'s, as it gives them out, and none is kept.
unsafe impl<C: Frames> Frames for Cleaned<C> {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.clean_frames(self.memory.alloc(count), count)
    }

    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        self.clean_frames(self.memory.alloc_within(count, last), count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        unsafe { self.memory.table(frame) }
    }
}

// SAFETY: `C` writes the bytes that are named, and cleaning changes none.
unsafe impl<C: CopyMemory> CopyMemory for Cleaned<C> {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.memory.copy(from, to, len) }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            self.memory.zero(at, len);
            self.cache.clean(at, len);
        }
    }

    /// The device is told of the mapping after this, so it reads what was copied.
    unsafe fn copy_in(&self, original: PhysAddr, buffer: PhysAddr, len: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            self.memory.copy(original, buffer, len);
            self.cache.clean(buffer, len);
        }
    }

    /// The driver has heard from the device before this, so what the device wrote is in the memory,
    /// and a line that the CPU has prefetched meanwhile is older. Nothing is lost, as no line is
    /// dirty.
    unsafe fn copy_out(&self, buffer: PhysAddr, original: PhysAddr, len: u64) {
        fence(Ordering::Acquire);
        // SAFETY: the caller's promise; what the CPU stored to the buffer was all cleaned.
        unsafe {
            self.cache.invalidate(buffer, len);
            self.memory.copy(buffer, original, len);
        }
    }
}
