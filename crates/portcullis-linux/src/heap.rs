//! The process's own memory, as devices' memory: [`Heap`] is where page tables and bounce buffers come from, and a
//! [`HeapBuffer`] is a buffer for a mapping to own. A program or a test needs no `unsafe` of its own for either.
//!
//! A "physical" address is one of the process here. VFIO and iommufd take such addresses; so does a test whose hardware is
//! made of software. A device behind an IOMMU that walks page tables by itself does *not*: it wants the machine's addresses.
//!
//! ```
//! use portcullis::prelude::*;
//! use portcullis_linux::heap::{Heap, HeapBuffer};
//! # use portcullis_model::{Iommu, IommuConfig, Memory};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # // A unit that walks no table: it has no device.
//! # let hardware = Iommu::new(IommuConfig::new(Memory::new(1 << 20))).queue();
//! let platform = StdPlatform::new();
//! # let cpus = platform.clone();
//! let table = PageTable::new(Heap, VtdSecondStage::four_level())?;
//! let domain = Domain::builder(table, hardware, DomainId(1))
//!     .bounce(Heap, PoolConfig::default())
//!     .build(platform)?;
//! let mut queue = domain.attach(DeviceId(0), DmaMask::BITS_64)?.queue(QueueConfig::direct())?;
//!
//! let buffer = HeapBuffer::new(2048).ok_or("out of memory")?;
//! buffer.write(0, b"a packet").ok_or("too long")?;
//! let (phys, mapping) = (buffer.phys(), queue.map(buffer, Direction::ToDevice)?);
//! # let table = domain.space().mapper().table();
//! # assert_eq!(table.iova_to_phys(&cpus, mapping.iova()), Some(phys));
//! let Ended::Done(buffer) = queue.unmap(mapping)? else { return Err("a direct queue keeps nothing".into()) };
//! # assert_eq!(buffer.phys(), phys);
//! # Ok(())
//! # }
//! ```

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::dma::DmaBuffer;
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, Table};

const FRAME: usize = FRAME_SIZE as usize;
const WORD: usize = size_of::<u64>();
/// The end of what an entry of a page table can name.
const END: u64 = 1 << 52;

/// Frames out of the process's heap, by the global allocator: page tables, coherent memory, bounce buffers.
///
/// An allocation costs what the allocator takes, and the zeroing. It may wait for the allocator's lock, never for hardware.
/// Copies and zeros go by words of 64 bits where both sides are aligned alike, and by bytes elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Heap;

/// The block of `count` frames; `None` for none, and for more than an address space holds.
fn layout(count: usize) -> Option<Layout> {
    let align = count.checked_next_power_of_two()?.checked_mul(FRAME)?;
    Layout::from_size_align(count.checked_mul(FRAME)?, align).ok().filter(|layout| layout.size() > 0)
}

// SAFETY: the global allocator gives each block to one owner, zeroed and aligned as the layout says; blocks that end beyond 2^52
// go back at once. An address here is the pointer's own, whose provenance is exposed. The heap exists as long as the process.
unsafe impl Frames for Heap {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let layout = layout(count)?;
        // SAFETY: the layout has a size.
        let first = unsafe { alloc_zeroed(layout) };
        let address = first.expose_provenance() as u64;
        if first.is_null() {
            return None;
        }
        if address.checked_add(layout.size() as u64).is_none_or(|end| end > END) {
            // SAFETY: the block from above, which nobody has seen.
            unsafe { dealloc(first, layout) };
            return None;
        }
        Some(PhysAddr::new(address))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        if let Some(layout) = layout(count) {
            // SAFETY: the caller's promise: of one `alloc` of as many frames, and nothing uses them.
            unsafe { dealloc(with_exposed_provenance_mut(first.get() as usize), layout) };
        }
    }

    #[inline]
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's frame, which is not freed while the reference lives; all access to it is atomic.
        unsafe { &*with_exposed_provenance(frame.get() as usize) }
    }
}

/// The byte at an address.
///
/// # Safety
/// It is memory of the process, of which nothing but devices and atomics touches anything while the reference lives.
unsafe fn byte<'a>(at: usize) -> &'a AtomicU8 {
    // SAFETY: the caller's promise.
    unsafe { &*with_exposed_provenance(at) }
}

/// The word at an aligned address.
///
/// # Safety
/// As [`byte`], for each of its bytes.
unsafe fn word<'a>(at: usize) -> &'a AtomicU64 {
    // SAFETY: the caller's promise.
    unsafe { &*with_exposed_provenance(at) }
}

/// Visits `len` bytes from address `at` on, each once, with its distance from the first: whole aligned words as such, the others alone.
///
/// # Safety
/// As [`byte`], for each of them.
unsafe fn each(
    at: usize,
    len: usize,
    mut of_byte: impl FnMut(usize, &AtomicU8),
    mut of_word: impl FnMut(usize, &AtomicU64),
) {
    let words = at.wrapping_neg() % WORD;
    let words = words.min(len);
    let tail = words + (len - words) / WORD * WORD;
    for index in (0..words).chain(tail..len) {
        // SAFETY: within the caller's range.
        of_byte(index, unsafe { byte(at + index) });
    }
    for index in (words..tail).step_by(WORD) {
        // SAFETY: within the caller's range, and aligned, as `at + words` is.
        of_word(index, unsafe { word(at + index) });
    }
}

// SAFETY: each of the `len` bytes is written once, and no other.
unsafe impl CopyMemory for Heap {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        let (from, to, len) = (from.get() as usize, to.get() as usize, len as usize);
        let copy = |index: usize, to: &AtomicU8| {
            // SAFETY: within the caller's range, of memory of the process.
            let from = unsafe { byte(from + index) };
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        };
        if (from ^ to).is_multiple_of(WORD) {
            let words = |index: usize, to: &AtomicU64| {
                // SAFETY: as above, and aligned, as the two sides differ by whole words.
                let from = unsafe { word(from + index) };
                to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
            };
            // SAFETY: the caller's range.
            unsafe { each(to, len, copy, words) };
        } else {
            // SAFETY: as above.
            (0..len).for_each(|index| copy(index, unsafe { byte(to + index) }));
        }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        let (byte, word) = (
            |_, byte: &AtomicU8| byte.store(0, Ordering::Relaxed),
            |_, word: &AtomicU64| {
                word.store(0, Ordering::Relaxed);
            },
        );
        // SAFETY: the caller's range.
        unsafe { each(at.get() as usize, len as usize, byte, word) };
    }
}

/// Bytes in frames of their own in the process's heap, for a mapping to own. Nothing else shares a page with them.
///
/// A device may change them while it is mapped, so the CPU copies them in and out by atomics. All are zero at first. They are
/// freed when the value is dropped.
#[derive(Debug)]
pub struct HeapBuffer {
    segment: PhysSegment,
}

// SAFETY: the frames are the value's own until it is dropped, wherever it is moved, and the CPU reaches them by atomics alone.
unsafe impl DmaBuffer for HeapBuffer {
    fn segments(&self) -> &[PhysSegment] {
        std::slice::from_ref(&self.segment)
    }
}

impl HeapBuffer {
    /// A buffer of `len` bytes; `None` for no bytes, and where there is no memory. Costs an allocation and the zeroing of whole
    /// frames.
    pub fn new(len: usize) -> Option<Self> {
        let phys = Heap.alloc(len.div_ceil(FRAME))?;
        Some(Self { segment: PhysSegment { phys, len: len as u64 } })
    }

    /// The address of the first byte, in the process and for a mapper that takes the process's addresses.
    pub fn phys(&self) -> PhysAddr {
        self.segment.phys
    }

    /// How many bytes it holds.
    pub fn size(&self) -> usize {
        self.segment.len as usize
    }

    /// Copies the bytes from `offset` on to `out`; `None`, with nothing copied, where some of them do not exist. While a device
    /// writes them, each byte is an old or a new one. O(`out.len()`); waits for nothing.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        let from = self.at(offset, out.len())?;
        let len = out.len();
        let out = Cell::from_mut(out).as_slice_of_cells();
        let byte = |index: usize, byte: &AtomicU8| out[index].set(byte.load(Ordering::Relaxed));
        let word = |index: usize, word: &AtomicU64| {
            let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            out[index..].iter().zip(bytes).for_each(|(out, byte)| out.set(byte));
        };
        // SAFETY: the buffer's own bytes.
        unsafe { each(from, len, byte, word) };
        Some(())
    }

    /// Copies `bytes` to the buffer from `offset` on; `None`, with nothing copied, where some of it does not exist.
    /// O(`bytes.len()`); waits for nothing.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        let to = self.at(offset, bytes.len())?;
        let byte = |index: usize, byte: &AtomicU8| byte.store(bytes[index], Ordering::Relaxed);
        let word = |index: usize, word: &AtomicU64| {
            let mut whole = [0; WORD];
            whole.copy_from_slice(&bytes[index..index + WORD]);
            word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
        };
        // SAFETY: the buffer's own bytes.
        unsafe { each(to, bytes.len(), byte, word) };
        Some(())
    }

    /// The address of the byte at `offset`, if the `len` bytes from there on exist.
    fn at(&self, offset: usize, len: usize) -> Option<usize> {
        offset.checked_add(len).filter(|end| *end <= self.size())?;
        Some(self.segment.phys.get() as usize + offset)
    }
}

impl Drop for HeapBuffer {
    fn drop(&mut self) {
        // SAFETY: of one `alloc` in `new`; the owner of a buffer that no mapping has is its only user.
        unsafe { Heap.free(self.segment.phys, self.size().div_ceil(FRAME)) };
    }
}
