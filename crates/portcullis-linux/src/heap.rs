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

// SAFETY: each of the `len` bytes is written once, and no other.
unsafe impl CopyMemory for Heap {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        let (from, to) = (from.get() as usize, to.get() as usize);
        // SAFETY: the caller's ranges, of memory of the process.
        unsafe { copy(with_exposed_provenance(from), with_exposed_provenance(to), len as usize) }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        let (at, end) = (at.get() as usize, at.get() as usize + len as usize);
        // SAFETY: the caller's range, and addresses in it that are aligned.
        let byte = |at: usize| unsafe { &*with_exposed_provenance::<AtomicU8>(at) };
        // SAFETY: as above.
        let word = |at: usize| unsafe { &*with_exposed_provenance::<AtomicU64>(at) };
        let (words, tail) = words(at, end);
        (at..words).chain(tail..end).for_each(|at| byte(at).store(0, Ordering::Relaxed));
        (words..tail).step_by(WORD).for_each(|at| word(at).store(0, Ordering::Relaxed));
    }
}

/// Where the whole words between two addresses begin and end.
fn words(at: usize, end: usize) -> (usize, usize) {
    let first = at.checked_next_multiple_of(WORD).map_or(end, |first| first.min(end));
    (first, first + (end - first) / WORD * WORD)
}

/// Copies `len` bytes, one atomic after another.
///
/// # Safety
/// All bytes of both ranges are memory, and those at `to` may be written. The ranges do not overlap. Meanwhile nothing but
/// devices and atomics touches either.
unsafe fn copy(from: *const AtomicU8, to: *const AtomicU8, len: usize) {
    let byte = |at: usize| {
        // SAFETY: both are within the caller's ranges.
        let (from, to) = unsafe { (&*from.add(at), &*to.add(at)) };
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    };
    if !(from.addr() ^ to.addr()).is_multiple_of(WORD) {
        return (0..len).for_each(byte);
    }
    let (words, tail) = words(from.addr(), from.addr() + len);
    let (words, tail) = (words - from.addr(), tail - from.addr());
    (0..words).chain(tail..len).for_each(byte);
    for at in (words..tail).step_by(WORD) {
        // SAFETY: as above, and both are aligned for words, as the first is and the two differ by whole words.
        let (from, to) = unsafe { (&*from.add(at).cast::<AtomicU64>(), &*to.add(at).cast::<AtomicU64>()) };
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
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
        // SAFETY: the buffer's own bytes, and the caller's, which are its alone.
        unsafe { copy(from, out.as_mut_ptr().cast(), out.len()) };
        Some(())
    }

    /// Copies `bytes` to the buffer from `offset` on; `None`, with nothing copied, where some of it does not exist.
    /// O(`bytes.len()`); waits for nothing.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        let to = self.at(offset, bytes.len())?;
        // SAFETY: the buffer's own bytes. The caller's are loaded alone, and nobody writes them during the call.
        unsafe { copy(bytes.as_ptr().cast(), to, bytes.len()) };
        Some(())
    }

    fn at(&self, offset: usize, len: usize) -> Option<*const AtomicU8> {
        offset.checked_add(len).filter(|end| *end <= self.size())?;
        Some(with_exposed_provenance(self.segment.phys.get() as usize + offset))
    }
}

impl Drop for HeapBuffer {
    fn drop(&mut self) {
        // SAFETY: of one `alloc` in `new`; the owner of a buffer that no mapping has is its only user.
        unsafe { Heap.free(self.segment.phys, self.size().div_ceil(FRAME)) };
    }
}
