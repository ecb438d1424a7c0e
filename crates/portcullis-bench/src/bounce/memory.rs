//! Memory as the CPU sees it, whose physical addresses are its own: for pools, and for the buffers of drivers.

use std::ptr;

use portcullis::addr::PhysAddr;
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, Table};

use crate::pgtable::memory::Memory;
use crate::runner::Failure;

/// The process's memory, which is copied where `COPIES` is true.
///
/// Otherwise the bytes are never read, and the benchmark measures everything but the copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ram<const COPIES: bool>;

const RAM: Memory<true> = Memory;

// SAFETY: everything is passed on to `Memory`, which promises the same.
unsafe impl<const COPIES: bool> Frames for Ram<COPIES> {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        RAM.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { RAM.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise is passed on unchanged, and `Memory` is the same wherever it is.
        unsafe { (const { &RAM }).table(frame) }
    }
}

// SAFETY: the bytes named are written, and nothing else. Without copies none is: but then no driver, device or CPU
// reads a byte of what was named (the check of `slot` looks at what a device itself has written only), so that it was
// not written no code can tell.
unsafe impl<const COPIES: bool> CopyMemory for Ram<COPIES> {
    #[inline]
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        if COPIES {
            // SAFETY: the caller's promise: both ranges are memory of this process, whose provenance was exposed when it
            // was allocated; they do not overlap, and no other code accesses them meanwhile.
            unsafe {
                ptr::copy_nonoverlapping(pointer(from.get()).cast_const(), pointer(to.get()), len as usize)
            };
        }
    }

    #[inline]
    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        if COPIES {
            // SAFETY: as in `copy`.
            unsafe { ptr::write_bytes(pointer(at.get()), 0, len as usize) };
        }
    }
}

/// Where the CPU finds the byte at `address`.
#[inline]
pub(crate) fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Frames that are given back at the end.
#[derive(Debug)]
pub(crate) struct Block {
    first: PhysAddr,
    frames: usize,
}

impl Block {
    /// Zeroed memory of at least `bytes` bytes, every page of which has been written: none is first touched while a
    /// clock runs.
    pub(crate) fn new(bytes: u64) -> Result<Self, Failure> {
        let frames = bytes.div_ceil(FRAME_SIZE).max(1) as usize;
        let none = || Failure::Refused(format!("no memory for {bytes} bytes"));
        let first = Ram::<true>.alloc(frames).ok_or_else(none)?;
        // SAFETY: it was allocated above.
        unsafe { Ram::<true>.zero(first, frames as u64 * FRAME_SIZE) };
        Ok(Self { first, frames })
    }

    /// Where it begins.
    pub(crate) fn start(&self) -> u64 {
        self.first.get()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it, and every user that was told of it is gone.
        unsafe { Ram::<true>.free(self.first, self.frames) }
    }
}

/// The buffers of one thread's driver, each on pages of its own with a page before and behind it that no other thread
/// has.
#[derive(Debug)]
pub(crate) struct Buffers {
    block: Block,
    bytes: u64,
    /// From one to the next: its pages and one between.
    stride: u64,
}

impl Buffers {
    /// `count` buffers of `bytes` bytes.
    pub(crate) fn new(count: usize, bytes: u64) -> Result<Self, Failure> {
        let stride = bytes.next_multiple_of(FRAME_SIZE) + FRAME_SIZE;
        let block = Block::new(stride * count as u64 + FRAME_SIZE)?;
        Ok(Self { block, bytes, stride })
    }

    /// Bytes of each.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where buffer `index` begins.
    #[inline]
    pub(crate) fn at(&self, index: usize) -> u64 {
        self.block.start() + FRAME_SIZE + self.stride * index as u64
    }

    /// Where the pages begin that hold buffer `index` and what is around it, and how many bytes these are.
    pub(crate) fn around(&self, index: usize) -> (u64, u64) {
        (self.at(index) - FRAME_SIZE, self.stride + FRAME_SIZE)
    }
}
