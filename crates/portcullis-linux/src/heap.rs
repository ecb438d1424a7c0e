//! The process's memory as devices' memory: [`Heap`] provides page tables and bounce buffers, and [`HeapBuffer`] is a mapping's buffer. A
//! program or a test needs no `unsafe` of its own for either.
//!
//! A "physical" address here is an address of the process. VFIO and iommufd take such addresses; so does a test with software hardware. A
//! device behind an IOMMU that walks page tables itself does *not*: it needs the machine's addresses. So the caller of
//! [`AddressSpace::mapper`](crate::vfio::AddressSpace::mapper) promises which kind of address the domain gets.
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

mod given;
#[cfg(all(target_os = "linux", not(any(miri, watched))))]
pub(crate) mod large;
#[cfg(all(target_os = "linux", not(any(miri, watched))))]
mod small;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::slice;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::dma::DmaBuffer;
use portcullis::platform::words::{self, WORD};
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, Table};

pub(crate) const FRAME: usize = FRAME_SIZE as usize;
/// The end of the addresses that a page table entry can hold.
const END: u64 = 1 << 52;

/// Frames of the global allocator: page tables, coherent memory, bounce buffers.
///
/// An allocation costs the allocator's time, the zeroing, and a bit for each frame. It may wait for the allocator's lock, never for
/// hardware. On Linux, blocks of 2 MiB or more come from the kernel: on reserved huge pages (`vm.nr_hugepages`), while there are some; else
/// on transparent ones, if the kernel makes them; else on small pages. Blocks of up to 128 KiB, such as slots of pools, are cut out of such
/// blocks of 2 MiB. One empty block stays cached.
///
/// **Concurrent access.** The library accesses frames from this allocator, [`HeapBuffer`]'s included, only by [words], so any concurrent
/// access by words is sound. In other memory (a list that was mapped by number) a copy accesses exactly the bytes named: whole words as
/// words, other bytes as bytes. The memory's owner accesses none of them meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Heap;

/// Registers foreign frames as the heap's: all access to them is by words. `None`, with nothing registered, if there is no memory for that.
#[cfg(target_os = "linux")]
pub(crate) fn adopt(start: u64, len: usize) -> Option<()> {
    given::give(start / FRAME_SIZE, len / FRAME)
}

/// Undoes [`adopt`].
#[cfg(target_os = "linux")]
pub(crate) fn disown(start: u64, len: usize) {
    given::take_back(start / FRAME_SIZE, len / FRAME);
}

/// A zeroed block, on a huge page if its size allows and the system has some.
fn alloc_block(layout: Layout) -> *mut u8 {
    #[cfg(all(target_os = "linux", not(any(miri, watched))))]
    if let Some(bytes) = large::bytes(layout.size()) {
        return large::alloc(bytes, layout.align()).map_or(std::ptr::null_mut(), std::ptr::NonNull::as_ptr);
    } else if layout.size() <= small::MOST * FRAME
        && let Some(block) = small::alloc(layout.size() / FRAME)
    {
        return block.as_ptr();
    }
    // SAFETY: the size is not 0.
    unsafe { alloc_zeroed(layout) }
}

/// # Safety
/// 1. The block is of one [`alloc_block`] of this layout.
/// 2. Nothing uses it.
unsafe fn free_block(block: *mut u8, layout: Layout) {
    #[cfg(all(target_os = "linux", not(any(miri, watched))))]
    if let Some(bytes) = large::bytes(layout.size()) {
        // SAFETY: clauses 1 and 2.
        return unsafe { large::free(block, bytes) };
    } else if layout.size() <= small::MOST * FRAME {
        // SAFETY: clause 2; a block of another allocator is returned as an error.
        if unsafe { small::free(block, layout.size() / FRAME) }.is_ok() {
            return;
        }
    }
    // SAFETY: clauses 1 and 2, and the block is of the global allocator.
    unsafe { dealloc(block, layout) };
}

/// The layout of `count` frames; `None` for none, and for more than an address space holds.
fn layout(count: usize) -> Option<Layout> {
    let align = count.checked_next_power_of_two()?.checked_mul(FRAME)?;
    Layout::from_size_align(count.checked_mul(FRAME)?, align).ok().filter(|layout| layout.size() > 0)
}

// SAFETY: 1: the global allocator, or the kernel, gives each block to one owner, zeroed and aligned to the layout; blocks beyond 2^52 are
// freed at once. 2: an address is the pointer's, with exposed provenance. 3: the heap exists as long as the process. 4: the defaults are
// true of it.
unsafe impl Frames for Heap {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let layout = layout(count)?;
        let first = alloc_block(layout);
        let address = first.expose_provenance() as u64;
        if first.is_null() {
            return None;
        }
        let fits = address.checked_add(layout.size() as u64).is_some_and(|end| end <= END);
        if !fits || given::give(address / FRAME_SIZE, count).is_none() {
            // SAFETY: clauses 1 and 2: allocated above, and not returned.
            unsafe { free_block(first, layout) };
            return None;
        }
        Some(PhysAddr::new(address))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        if let Some(layout) = layout(count) {
            // First, because the allocator may reuse the memory at once.
            given::take_back(first.get() / FRAME_SIZE, count);
            // SAFETY: clauses 1 and 2 are the caller's: one `alloc` of this many frames, and nothing uses them.
            unsafe { free_block(with_exposed_provenance_mut(first.get() as usize), layout) };
        }
    }

    #[inline]
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: clause 1 is the caller's: the frame is not freed while the reference lives. All access to it is atomic.
        unsafe { &*with_exposed_provenance(frame.get() as usize) }
    }
}

/// The bytes of a copy.
#[derive(Clone, Copy)]
struct Bytes {
    start: usize,
    end: usize,
}

/// The word at an aligned address.
///
/// # Safety
/// 1. It is memory of the process; while the reference lives, only devices and words access it.
#[inline]
unsafe fn word<'a>(at: usize) -> &'a AtomicU64 {
    // SAFETY: clause 1.
    unsafe { &*with_exposed_provenance(at) }
}

/// The byte at an address.
///
/// # Safety
/// 1. It is memory of the process; while the reference lives, only devices access it.
#[inline]
unsafe fn byte<'a>(at: usize) -> &'a AtomicU8 {
    // SAFETY: clause 1.
    unsafe { &*with_exposed_provenance(at) }
}

impl Bytes {
    /// # Safety
    /// 1. They are memory that the CPU reaches.
    /// 2. Meanwhile nothing accesses them but devices, and words in the heap's frames.
    unsafe fn new(start: PhysAddr, len: u64) -> Self {
        let start = start.get() as usize;
        Self { start, end: start + len as usize }
    }

    /// The bytes of the word at `at` that are in the range, as indices.
    #[inline]
    fn part(self, at: usize) -> std::ops::Range<usize> {
        self.start.saturating_sub(at)..(self.end - at).min(WORD)
    }

    /// Whether all of the word at `at`, which overlaps the range, may be accessed.
    #[inline]
    fn has_word(self, at: usize) -> bool {
        (self.start <= at && self.end - at >= WORD) || given::is_given((at / FRAME) as u64)
    }

    /// The bytes of the range in the word at `at`, at their places; the first byte is the lowest.
    fn load(self, at: usize) -> u64 {
        if self.has_word(at) {
            // SAFETY: clause 1: the range has all of it, or it is in a frame of the heap, whose bytes are only accessed as words.
            return u64::from_le(unsafe { word(at) }.load(Ordering::Relaxed));
        }
        let mut bytes = [0; WORD];
        for index in self.part(at) {
            // SAFETY: clause 1: in the range, outside the heap's frames.
            bytes[index] = unsafe { byte(at + index) }.load(Ordering::Relaxed);
        }
        u64::from_le_bytes(bytes)
    }

    /// Stores the bytes of `value` that are in the range to the word at `at`, and no others.
    fn store(self, at: usize, value: u64) {
        let (part, bytes) = (self.part(at), value.to_le_bytes());
        if self.has_word(at) {
            // SAFETY: as in `load`.
            return words::store_part(unsafe { word(at) }, part.start, &bytes[part]);
        }
        for index in part {
            // SAFETY: as in `load`.
            unsafe { byte(at + index) }.store(bytes[index], Ordering::Relaxed);
        }
    }

    /// Address of the first word that overlaps the range.
    fn first_word(self) -> usize {
        self.start & !(WORD - 1)
    }
}

/// `count` words from an aligned address on.
///
/// # Safety
/// 1. As [`word`], for each of them.
#[inline]
unsafe fn run<'a>(at: usize, count: usize) -> &'a [AtomicU64] {
    // SAFETY: clause 1. An empty run may have any aligned address.
    unsafe { slice::from_raw_parts(with_exposed_provenance(if count > 0 { at } else { WORD }), count) }
}

/// Words that a copy loads before it stores them.
const GROUP: usize = 8;

/// Stores `change` of each word of `from` to its place in `to`.
///
/// Loads a group of words before it stores them. Buffers and slots are aligned to their sizes, so pages of source and target often have the
/// same low address bits. A TLB that maps both to one set, such as that of QEMU's software, then misses twice for each word: copying 128
/// KiB took 740 us in a guest instead of 25. With groups it takes 115 us.
fn copy_run<W>(
    from: &[W],
    to: &[W],
    load: impl Fn(&W) -> u64,
    store: impl Fn(&W, u64),
    mut change: impl FnMut(u64) -> u64,
) {
    let ((groups, from), (places, to)) = (from.as_chunks::<GROUP>(), to.as_chunks::<GROUP>());
    for (group, place) in groups.iter().zip(places) {
        let words = group.each_ref().map(&load);
        place.iter().zip(words).for_each(|(place, word)| store(place, change(word)));
    }
    let mut words = [0; GROUP];
    words.iter_mut().zip(from).for_each(|(word, from)| *word = load(from));
    to.iter().zip(words).for_each(|(to, word)| store(to, change(word)));
}

/// Stores `change` of each word of `from` to its place in `to`.
fn copy_words(from: &[AtomicU64], to: &[AtomicU64], change: impl FnMut(u64) -> u64) {
    let store = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
    copy_run(from, to, |word| word.load(Ordering::Relaxed), store, change);
}

/// The bytes of a word from index `shift` on, filled up with the first bytes of the next.
#[inline]
fn joined(before: u64, after: u64, shift: usize) -> u64 {
    before >> (8 * shift) | after << (8 * (WORD - shift))
}

// SAFETY: 1: each of the `len` bytes is stored once, and other bytes keep their values. 2 and 4: `Bytes` accesses whole words only if all
// of their bytes are named, or the heap's. 3: in frames that `given` knows, it accesses only whole words, by atomics, and so does
// `HeapBuffer`.
unsafe impl CopyMemory for Heap {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        if len == 0 {
            return;
        }
        // SAFETY: clauses 1 and 2 are the caller's.
        let (source, target) = unsafe { (Bytes::new(from, len), Bytes::new(to, len)) };
        // The distance from a target byte to its source byte, and the shift between their words.
        let distance = source.start.wrapping_sub(target.start);
        let shift = distance % WORD;
        let mut at = target.first_word();
        if shift == 0 {
            if source.part(at.wrapping_add(distance)).len() < WORD {
                target.store(at, source.load(at.wrapping_add(distance)));
                at += WORD;
            }
            let count = target.end.saturating_sub(at) / WORD;
            // SAFETY: clause 1: the ranges have all of these words.
            let (from, to) = unsafe { (run(at.wrapping_add(distance), count), run(at, count)) };
            copy_words(from, to, |word| word);
            at += count * WORD;
            if at < target.end {
                target.store(at, source.load(at.wrapping_add(distance)));
            }
            return;
        }
        // Each target word has the end of one source word, and the beginning of the next.
        let mut next = at.wrapping_add(distance) - shift;
        let some = |at: usize| if at < source.end && at + WORD > source.start { source.load(at) } else { 0 };
        let mut before = some(next);
        if at < target.start {
            next += WORD;
            let after = some(next);
            target.store(at, joined(before, after, shift));
            (before, at) = (after, at + WORD);
        }
        // Target words that are all in the range, with the source words behind them in theirs.
        let count = (target.end.saturating_sub(at) / WORD).min(source.end.saturating_sub(next + WORD) / WORD);
        // SAFETY: as above.
        let (from, to) = unsafe { (run(next + WORD, count), run(at, count)) };
        copy_words(from, to, |word| {
            let after = u64::from_le(word);
            joined(std::mem::replace(&mut before, after), after, shift).to_le()
        });
        (next, at) = (next + count * WORD, at + count * WORD);
        while at < target.end {
            next += WORD;
            let after = some(next);
            target.store(at, joined(before, after, shift));
            (before, at) = (after, at + WORD);
        }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        if len == 0 {
            return;
        }
        // SAFETY: clauses 1 and 2 are the caller's.
        let bytes = unsafe { Bytes::new(at, len) };
        (bytes.first_word()..bytes.end).step_by(WORD).for_each(|at| bytes.store(at, 0));
    }
}

/// A mapping's buffer in frames of its own on the process's heap: no other memory shares a page with it.
///
/// A device may change it while it is mapped, and so may other threads, so the CPU copies bytes in and out by [words]. It is zeroed at
/// first, and freed on drop.
#[derive(Debug)]
pub struct HeapBuffer {
    segment: PhysSegment,
}

// SAFETY: 1: the addresses are the process's. 2: the value owns the frames until it is dropped, wherever it is moved. 3 and 4: safe code
// reaches them only by words, in frames of the heap.
unsafe impl DmaBuffer for HeapBuffer {
    fn segments(&self) -> &[PhysSegment] {
        std::slice::from_ref(&self.segment)
    }
}

impl HeapBuffer {
    /// A buffer of `len` bytes; `None` for no bytes, and without memory. Costs an allocation and the zeroing of whole frames.
    pub fn new(len: usize) -> Option<Self> {
        let phys = Heap.alloc(len.div_ceil(FRAME))?;
        Some(Self { segment: PhysSegment { phys, len: len as u64 } })
    }

    /// Address of the first byte, in the process and for a mapper that takes process addresses.
    pub fn phys(&self) -> PhysAddr {
        self.segment.phys
    }

    /// Its length in bytes.
    pub fn size(&self) -> usize {
        self.segment.len as usize
    }

    /// Copies the bytes from `offset` on to `out`; `None`, with nothing copied, if they are out of bounds. Each byte is an old or a new one
    /// if a device or another thread writes it meanwhile. O(`out.len()`); does not wait.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        self.holds(offset, out.len())?;
        words::read(self.words(), offset, out)
    }

    /// Copies `bytes` to the buffer from `offset` on; `None`, with nothing copied, if they are out of bounds. Changes no other byte.
    /// O(`bytes.len()`); does not wait.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        self.holds(offset, bytes.len())?;
        words::write(self.words(), offset, bytes)
    }

    fn holds(&self, offset: usize, len: usize) -> Option<()> {
        offset.checked_add(len).filter(|end| *end <= self.size()).map(|_| ())
    }

    /// All words of its frames.
    fn words(&self) -> &[AtomicU64] {
        let (first, frames) = (self.segment.phys.get() as usize, self.size().div_ceil(FRAME));
        // SAFETY: the frames are of one `alloc`, and freed on drop. All access to them is by words.
        unsafe { slice::from_raw_parts(with_exposed_provenance(first), frames * FRAME / WORD) }
    }
}

impl Drop for HeapBuffer {
    fn drop(&mut self) {
        // SAFETY: 1: of one `alloc` in `new`. 2: the owner of an unmapped buffer is its only user.
        unsafe { Heap.free(self.segment.phys, self.size().div_ceil(FRAME)) };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_copy_goes_from_its_source_to_its_target_once_for_eight_words() {
        for count in 0..50 {
            let side = |is_target| (0..count).map(|number| (is_target, number)).collect::<Vec<(bool, u64)>>();
            let seen = RefCell::new(Vec::new());
            let load = |word: &(bool, u64)| {
                seen.borrow_mut().push(*word);
                word.1
            };
            let store = |word: &(bool, u64), value| {
                assert_eq!(value, word.1 + 1);
                seen.borrow_mut().push(*word);
            };
            copy_run(&side(false), &side(true), load, store, |value| value + 1);
            let seen = seen.into_inner();
            let of =
                |is_target: bool| seen.iter().copied().filter(|word| word.0 == is_target).collect::<Vec<_>>();
            assert_eq!((of(false), of(true)), (side(false), side(true)));
            let turns = seen.windows(2).filter(|pair| !pair[0].0 && pair[1].0).count() as u64;
            assert_eq!(turns, count.div_ceil(8));
        }
    }

    #[test]
    fn frames_are_the_heaps_until_they_are_freed() {
        let first = Heap.alloc(3).unwrap();
        let given = || [0, 1, 2].map(|frame| given::is_given(first.get() / FRAME_SIZE + frame));
        assert_eq!(given(), [true; 3]);
        // SAFETY: clauses 1 and 2: allocated above, and not used.
        unsafe { Heap.free(first, 3) };
        assert_eq!(given(), [false; 3]);
    }
}
