//! The kernel's pages, by its direct map.

use core::sync::atomic::{AtomicUsize, Ordering};

use portcullis::addr::PhysAddr;
use portcullis::platform::{CopyMemory, Frames, Table};

use crate::ffi;

/// Where physical address 0 is. Stored once, before anything is made.
static DIRECT_MAP: AtomicUsize = AtomicUsize::new(0);

/// Says where the direct map begins.
pub fn set_direct_map(begin: usize) {
    DIRECT_MAP.store(begin, Ordering::Relaxed);
}

#[inline]
fn at(phys: PhysAddr) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(
        (phys.get() as usize).wrapping_add(DIRECT_MAP.load(Ordering::Relaxed)),
    )
}

/// Pages come in powers of two.
fn order(count: usize) -> Option<u32> {
    count.checked_next_power_of_two().map(usize::trailing_zeros)
}

/// The page allocator.
#[derive(Clone, Copy)]
pub struct Memory;

// SAFETY: the page allocator's pages are below 2^52, aligned to their order and zeroed as `pcs_frames_alloc` says; `at` gives their words.
unsafe impl Frames for Memory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let order = order(count).filter(|_| count > 0)?;
        // SAFETY: it may be called in any context.
        let phys = unsafe { ffi::pcs_frames_alloc(order) };
        (phys != 0).then(|| PhysAddr::new(phys))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        if let Some(order) = order(count) {
            // SAFETY: the frames are of `alloc` of the same count, so of the same order, and nothing uses them.
            unsafe { ffi::pcs_frames_free(first.get(), order) }
        }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the frame is allocated, so it is in the direct map, and is of this size and alignment.
        unsafe { &*at(frame).cast() }
    }
}

// SAFETY: `memcpy` and `memset` access the bytes named and no other. No buffer of this crate is reached by safe code.
unsafe impl CopyMemory for Memory {
    #[inline]
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: both are memory that the CPU reaches, so in the direct map, and do not overlap.
        unsafe { core::ptr::copy_nonoverlapping(at(from), at(to), len as usize) }
    }

    unsafe fn zero(&self, place: PhysAddr, len: u64) {
        // SAFETY: as above.
        unsafe { core::ptr::write_bytes(at(place), 0, len as usize) }
    }
}
