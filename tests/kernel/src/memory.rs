//! Memory: a heap for the kernel's own values, and frames for everything that devices and the IOMMU reach.

use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::dma::DmaBuffer;
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, Table};
use spin::Mutex;

use crate::interrupts;

#[global_allocator]
static HEAP: Uninterrupted = Uninterrupted(linked_list_allocator::LockedHeap::empty());

/// A heap behind a lock that interrupt handlers take, too.
struct Uninterrupted(linked_list_allocator::LockedHeap);

// SAFETY: everything is passed on.
unsafe impl GlobalAlloc for Uninterrupted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        interrupts::off(|| unsafe { self.0.alloc(layout) })
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        interrupts::off(|| unsafe { self.0.dealloc(at, layout) });
    }
}

/// The heap, and the frames behind it: 16 MiB, and up to 128 MiB.
const HEAP_BEGIN: usize = 16 << 20;
const HEAP_BYTES: usize = 16 << 20;
const FRAMES_BEGIN: u64 = 32 << 20;
const MOST_FRAMES: usize = 32 << 10;

/// Whether each frame is taken, from `FRAMES_BEGIN` on.
static TAKEN: Mutex<[bool; MOST_FRAMES]> = Mutex::new([true; MOST_FRAMES]);
/// Where memory ends.
static END: AtomicU64 = AtomicU64::new(0);

/// Takes the memory that the loader names: where its map of regions is, and how many there are.
pub fn start(map: u64, regions: u32) {
    // SAFETY: memory of the machine from 16 MiB on, which holds nothing: the kernel is below, the loader's data above or below.
    unsafe { HEAP.0.lock().init(HEAP_BEGIN as *mut u8, HEAP_BYTES) };
    for index in 0..u64::from(regions) {
        let at = (map + index * 24) as *const u64;
        // SAFETY: the loader's map, of entries of 24 bytes.
        let [first, len, kind] = [0, 1, 2].map(|word| unsafe { at.add(word).read_unaligned() });
        if kind as u32 == 1 && first <= FRAMES_BEGIN && first.saturating_add(len) > FRAMES_BEGIN {
            END.store(first + len, Ordering::Relaxed);
        }
    }
    let frames = (END.load(Ordering::Relaxed).saturating_sub(FRAMES_BEGIN) / FRAME_SIZE) as usize;
    TAKEN.lock()[..frames.min(MOST_FRAMES)].fill(false);
}

/// How many frames are free.
pub fn free_frames() -> usize {
    TAKEN.lock().iter().filter(|taken| !**taken).count()
}

/// The machine's memory. All of it is one to one.
#[derive(Debug, Clone, Copy)]
pub struct Memory;

// SAFETY: frames are given out once until they are freed, zeroed, at their own addresses; what is here lives as long as the machine.
unsafe impl Frames for Memory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let step = count.checked_next_power_of_two().filter(|_| count > 0)?;
        let first = interrupts::off(|| {
            let mut taken = TAKEN.lock();
            let fits =
                |first: &usize| taken.get(*first..first + count).is_some_and(|run| !run.contains(&true));
            let first = (0..MOST_FRAMES).step_by(step).find(fits)?;
            taken[first..first + count].fill(true);
            Some(first)
        })?;
        let at = FRAMES_BEGIN + first as u64 * FRAME_SIZE;
        // SAFETY: given out above.
        unsafe { core::ptr::write_bytes(at as *mut u8, 0, count * FRAME_SIZE as usize) };
        Some(PhysAddr::new(at))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        let first = ((first.get() - FRAMES_BEGIN) / FRAME_SIZE) as usize;
        interrupts::off(|| TAKEN.lock()[first..first + count].fill(false));
    }

    // QEMU's units say that their walkers are not coherent; on x86 a store is seen by all when it has left the CPU.
    const COHERENT: bool = false;

    fn clean(&self, words: &[AtomicU64]) {
        for line in words.chunks(8) {
            // SAFETY: an address inside the slice.
            unsafe { core::arch::x86_64::_mm_clflush(line.as_ptr().cast()) };
        }
        // SAFETY: an instruction of every x86-64.
        unsafe { core::arch::x86_64::_mm_mfence() };
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's frame, one to one; everything that reaches it is atomic.
        unsafe { &*(frame.get() as *const Table) }
    }
}

// SAFETY, by clause. 1, 2 and 3: all the bytes, and no others. 4: it is not sound beside other accesses, so a `Buffer` lets nobody but
// its owner reach its bytes, and a mapping is not that.
unsafe impl CopyMemory for Memory {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: the caller's ranges, which do not overlap.
        unsafe { core::ptr::copy_nonoverlapping(from.get() as *const u8, to.get() as *mut u8, len as usize) };
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        // SAFETY: the caller's range.
        unsafe { core::ptr::write_bytes(at.get() as *mut u8, 0, len as usize) };
    }
}

/// A buffer of whole frames for a device.
pub struct Buffer([PhysSegment; 1]);

// SAFETY: the frames are this value's alone until it is dropped. Its owner alone reads them, as volatile bytes; a reference to it
// reaches none.
unsafe impl DmaBuffer for Buffer {
    fn segments(&self) -> &[PhysSegment] {
        &self.0
    }
}

impl Buffer {
    /// `len` bytes, each of them `byte`.
    pub fn new(len: u64, byte: u8) -> Option<Self> {
        let phys = Memory.alloc(len.div_ceil(FRAME_SIZE) as usize)?;
        let buffer = Self([PhysSegment { phys, len }]);
        // SAFETY: the frames from above.
        unsafe { core::ptr::write_bytes(phys.get() as *mut u8, byte, len as usize) };
        Some(buffer)
    }

    /// Where it is.
    pub fn phys(&self) -> PhysAddr {
        self.0[0].phys
    }

    /// Whether every byte is `byte`.
    pub fn is_all(&mut self, byte: u8) -> bool {
        (0..self.0[0].len).all(|at| peek(self.phys().get() + at) == byte)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: of one `alloc`; a queue gives a buffer back only when no device reaches it.
        unsafe { Memory.free(self.0[0].phys, self.0[0].len.div_ceil(FRAME_SIZE) as usize) };
    }
}

/// The byte at `at`, which is memory.
pub fn peek(at: u64) -> u8 {
    // SAFETY: memory is one to one; a device may write it meanwhile, so it is volatile.
    unsafe { (at as *const u8).read_volatile() }
}
