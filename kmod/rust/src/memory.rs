//! The kernel's pages, through its direct map.

use core::sync::atomic::{AtomicUsize, Ordering};

use portcullis::addr::PhysAddr;
use portcullis::platform::{CopyMemory, Frames, Table};

use crate::ffi;

/// Virtual address of physical address 0. Stored once, before any other call.
static DIRECT_MAP: AtomicUsize = AtomicUsize::new(0);

/// Sets the beginning of the direct map.
pub fn set_direct_map(begin: usize) {
    DIRECT_MAP.store(begin, Ordering::Relaxed);
}

#[inline]
fn at(phys: PhysAddr) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(
        (phys.get() as usize).wrapping_add(DIRECT_MAP.load(Ordering::Relaxed)),
    )
}

/// The order of `count` pages, which is a power of two.
fn order(count: usize) -> Option<u32> {
    count.checked_next_power_of_two().map(usize::trailing_zeros)
}

/// The page allocator.
#[derive(Clone, Copy)]
pub struct Memory;

// SAFETY: 1: the page allocator's pages are below 2^52, aligned to their order and zeroed, by `pcs_frames_alloc`. 2: `at` returns their
// words. 3: pages exist until they are freed. 4: the defaults are true of them.
unsafe impl Frames for Memory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let order = order(count).filter(|_| count > 0)?;
        // SAFETY: it may be called in any context.
        let phys = unsafe { ffi::pcs_frames_alloc(order) };
        (phys != 0).then(|| PhysAddr::new(phys))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        if let Some(order) = order(count) {
            // SAFETY: 1 and 2 are the caller's: the frames are of `alloc` of the same count, so of the same order, and nothing uses them.
            unsafe { ffi::pcs_frames_free(first.get(), order) }
        }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: 1 is the caller's: the frame is allocated, so it is in the direct map, and has this size and alignment.
        unsafe { &*at(frame).cast() }
    }
}

// SAFETY: 1 and 2: `memcpy` and `memset` access exactly the bytes named. 3 and 4: no safe code reaches a buffer of this crate.
unsafe impl CopyMemory for Memory {
    #[inline]
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: 1 and 2 are the caller's: both are memory that the CPU reaches, so in the direct map, and do not overlap.
        unsafe { core::ptr::copy_nonoverlapping(at(from), at(to), len as usize) }
    }

    unsafe fn zero(&self, place: PhysAddr, len: u64) {
        // SAFETY: as above.
        unsafe { core::ptr::write_bytes(at(place), 0, len as usize) }
    }
}
