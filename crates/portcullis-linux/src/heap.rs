//! The process's own memory, as devices' memory: [`Heap`] is where page tables and bounce buffers come from, and a
//! [`HeapBuffer`] is a buffer for a mapping to own. A program or a test needs no `unsafe` of its own for either.
//!
//! A "physical" address is one of the process here. VFIO and iommufd take such addresses; so does a test whose hardware is
//! made of software. A device behind an IOMMU that walks page tables by itself does *not*: it wants the machine's addresses.
//! So the caller of [`AddressSpace::mapper`](crate::vfio::AddressSpace::mapper) signs which kind of address the domain is given.
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
/// The end of what an entry of a page table can name.
const END: u64 = 1 << 52;

/// Frames out of the process's heap, by the global allocator: page tables, coherent memory, bounce buffers.
///
/// An allocation costs what the allocator takes, the zeroing, and a note for each frame. It may wait for the allocator's lock,
/// never for hardware. On Linux a block of 2 MiB or more is the kernel's own: on huge pages that the administrator has set aside
/// (`vm.nr_hugepages`), while there are some; else on transparent ones, where the kernel makes them; else on small pages. Blocks of up to 128 KiB,
/// as the slots of pools are, are cut out of such blocks of 2 MiB, of which one is kept.
///
/// **Who may access what beside a copy.** In frames that this has given out, [`HeapBuffer`]'s among them, all access of the library
/// is by [words], so whatever is done there by words at the same time is sound. Of other memory (a list that was mapped by
/// number) a copy accesses the bytes named and no other: those of whole words as words, the others as bytes. Its owner
/// accesses none of them meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Heap;

/// Counts frames of somebody else's as the heap's: all access to them is by words. `None`, with nothing counted, where there is no memory for that.
#[cfg(target_os = "linux")]
pub(crate) fn adopt(start: u64, len: usize) -> Option<()> {
    given::give(start / FRAME_SIZE, len / FRAME)
}

/// Takes that back.
#[cfg(target_os = "linux")]
pub(crate) fn disown(start: u64, len: usize) {
    given::take_back(start / FRAME_SIZE, len / FRAME);
}

/// A zeroed block, on huge pages where it is large or small and the system has some.
fn alloc_block(layout: Layout) -> *mut u8 {
    #[cfg(all(target_os = "linux", not(any(miri, watched))))]
    if let Some(bytes) = large::bytes(layout.size()) {
        return large::alloc(bytes, layout.align()).map_or(std::ptr::null_mut(), std::ptr::NonNull::as_ptr);
    } else if layout.size() <= small::MOST * FRAME
        && let Some(block) = small::alloc(layout.size() / FRAME)
    {
        return block.as_ptr();
    }
    // SAFETY: the layout has a size.
    unsafe { alloc_zeroed(layout) }
}

/// # Safety
/// It is of one [`alloc_block`] of this layout, and nothing uses it.
unsafe fn free_block(block: *mut u8, layout: Layout) {
    #[cfg(all(target_os = "linux", not(any(miri, watched))))]
    if let Some(bytes) = large::bytes(layout.size()) {
        // SAFETY: the caller's promise.
        return unsafe { large::free(block, bytes) };
    } else if layout.size() <= small::MOST * FRAME {
        // SAFETY: as above. What came from elsewhere goes there.
        if unsafe { small::free(block, layout.size() / FRAME) }.is_ok() {
            return;
        }
    }
    // SAFETY: the caller's promise.
    unsafe { dealloc(block, layout) };
}

/// The block of `count` frames; `None` for none, and for more than an address space holds.
fn layout(count: usize) -> Option<Layout> {
    let align = count.checked_next_power_of_two()?.checked_mul(FRAME)?;
    Layout::from_size_align(count.checked_mul(FRAME)?, align).ok().filter(|layout| layout.size() > 0)
}

// SAFETY: the global allocator, or the kernel, gives each block to one owner, zeroed and aligned as the layout says; blocks that end beyond 2^52
// go back at once. An address here is the pointer's own, whose provenance is exposed. The heap exists as long as the process.
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
            // SAFETY: the block from above, which nobody has seen.
            unsafe { free_block(first, layout) };
            return None;
        }
        Some(PhysAddr::new(address))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        if let Some(layout) = layout(count) {
            // First, as the allocator may give the memory to anybody.
            given::take_back(first.get() / FRAME_SIZE, count);
            // SAFETY: the caller's promise: of one `alloc` of as many frames, and nothing uses them.
            unsafe { free_block(with_exposed_provenance_mut(first.get() as usize), layout) };
        }
    }

    #[inline]
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's frame, which is not freed while the reference lives; all access to it is atomic.
        unsafe { &*with_exposed_provenance(frame.get() as usize) }
    }
}

/// A range of bytes that a copy may access.
#[derive(Clone, Copy)]
struct Bytes {
    start: usize,
    end: usize,
}

/// The word at an aligned address.
///
/// # Safety
/// It is memory of the process, of which nothing but devices and words touches anything while the reference lives.
#[inline]
unsafe fn word<'a>(at: usize) -> &'a AtomicU64 {
    // SAFETY: the caller's promise.
    unsafe { &*with_exposed_provenance(at) }
}

/// The byte at an address.
///
/// # Safety
/// As [`word`], but that nothing touches it besides devices.
#[inline]
unsafe fn byte<'a>(at: usize) -> &'a AtomicU8 {
    // SAFETY: the caller's promise.
    unsafe { &*with_exposed_provenance(at) }
}

impl Bytes {
    /// # Safety
    /// They are memory that the CPU reaches, and meanwhile nothing accesses them but devices, and words in frames of the heap's.
    unsafe fn new(start: PhysAddr, len: u64) -> Self {
        let start = start.get() as usize;
        Self { start, end: start + len as usize }
    }

    /// The part of them that is in the word at `at`, as numbers of its bytes.
    #[inline]
    fn part(self, at: usize) -> std::ops::Range<usize> {
        self.start.saturating_sub(at)..(self.end - at).min(WORD)
    }

    /// Whether all of the word at `at`, of which they have some, may be accessed.
    #[inline]
    fn has_word(self, at: usize) -> bool {
        (self.start <= at && self.end - at >= WORD) || given::is_given((at / FRAME) as u64)
    }

    /// What they have of the word at `at`, in the places that it has there. Counts from the first byte as the lowest.
    fn load(self, at: usize) -> u64 {
        if self.has_word(at) {
            // SAFETY: all of it is of the range, or of a frame of the heap's, whose bytes are all accessed as words.
            return u64::from_le(unsafe { word(at) }.load(Ordering::Relaxed));
        }
        let mut bytes = [0; WORD];
        for index in self.part(at) {
            // SAFETY: it is of the range, outside of the heap's frames.
            bytes[index] = unsafe { byte(at + index) }.load(Ordering::Relaxed);
        }
        u64::from_le_bytes(bytes)
    }

    /// Stores what they have of the word at `at`: the bytes of `value` in those places, and no others.
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

    /// The address of the first word that has some of them.
    fn first_word(self) -> usize {
        self.start & !(WORD - 1)
    }
}

/// `count` words from an aligned address on.
///
/// # Safety
/// As [`word`], for each of them.
#[inline]
unsafe fn run<'a>(at: usize, count: usize) -> &'a [AtomicU64] {
    // SAFETY: the caller's promise. A run of none may be anywhere that is aligned.
    unsafe { slice::from_raw_parts(with_exposed_provenance(if count > 0 { at } else { WORD }), count) }
}

/// Words that a copy loads before it stores them.
const GROUP: usize = 8;

/// Stores to each word of `to` what `change` makes of the word in its place in `from`.
///
/// A group is loaded, and then stored. Buffers and slots begin at multiples of their sizes, so pages of source and target often have the same
/// low bits. Where a TLB then has one place for both, as that of QEMU's software has, a copy of word by word misses it twice for each word: 128
/// KiB took 740 us in a guest, and not 25. By groups they take 115.
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

/// Stores to each word of `to` what `change` makes of the word in its place in `from`.
fn copy_words(from: &[AtomicU64], to: &[AtomicU64], change: impl FnMut(u64) -> u64) {
    let store = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
    copy_run(from, to, |word| word.load(Ordering::Relaxed), store, change);
}

/// The bytes from number `shift` on of a word, and as many of the next as make up a word.
#[inline]
fn joined(before: u64, after: u64, shift: usize) -> u64 {
    before >> (8 * shift) | after << (8 * (WORD - shift))
}

// SAFETY: by clause. 1: each of the `len` bytes is stored once, and of no other anything but what it was. 2 and 4: `Bytes` accesses
// whole words only where all of them is named, or the heap's. 3: in frames that `given` knows, it accesses whole words only, by
// atomics, and so does `HeapBuffer`.
unsafe impl CopyMemory for Heap {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        if len == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        let (source, target) = unsafe { (Bytes::new(from, len), Bytes::new(to, len)) };
        // From a byte of the target to the one of the source, and how far that is into a word where the target's begins one.
        let distance = source.start.wrapping_sub(target.start);
        let shift = distance % WORD;
        let mut at = target.first_word();
        if shift == 0 {
            if source.part(at.wrapping_add(distance)).len() < WORD {
                target.store(at, source.load(at.wrapping_add(distance)));
                at += WORD;
            }
            let count = target.end.saturating_sub(at) / WORD;
            // SAFETY: all of these words is of the ranges.
            let (from, to) = unsafe { (run(at.wrapping_add(distance), count), run(at, count)) };
            copy_words(from, to, |word| word);
            at += count * WORD;
            if at < target.end {
                target.store(at, source.load(at.wrapping_add(distance)));
            }
            return;
        }
        // Each word of the target has the end of one word of the source, and the beginning of the next.
        let mut next = at.wrapping_add(distance) - shift;
        let some = |at: usize| if at < source.end && at + WORD > source.start { source.load(at) } else { 0 };
        let mut before = some(next);
        if at < target.start {
            next += WORD;
            let after = some(next);
            target.store(at, joined(before, after, shift));
            (before, at) = (after, at + WORD);
        }
        // Words of the target all of which are of the range, and all of those behind which are of the source's.
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
        // SAFETY: the caller's promise.
        let bytes = unsafe { Bytes::new(at, len) };
        (bytes.first_word()..bytes.end).step_by(WORD).for_each(|at| bytes.store(at, 0));
    }
}

/// Bytes in frames of their own in the process's heap, for a mapping to own. Nothing else shares a page with them.
///
/// A device may change them while it is mapped, and so may other threads, so the CPU copies them in and out by [words]. All are
/// zero at first. They are freed when the value is dropped.
#[derive(Debug)]
pub struct HeapBuffer {
    segment: PhysSegment,
}

// SAFETY: the frames are the value's own until it is dropped, wherever it is moved, and safe code reaches them by words alone.
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
    /// or another thread writes them, each byte is an old or a new one. O(`out.len()`); waits for nothing.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        self.holds(offset, out.len())?;
        words::read(self.words(), offset, out)
    }

    /// Copies `bytes` to the buffer from `offset` on, and changes no other; `None`, with nothing copied, where some of it does
    /// not exist. O(`bytes.len()`); waits for nothing.
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
        // SAFETY: the frames are of one `alloc`, and freed when the value is dropped. All access to them is by words.
        unsafe { slice::from_raw_parts(with_exposed_provenance(first), frames * FRAME / WORD) }
    }
}

impl Drop for HeapBuffer {
    fn drop(&mut self) {
        // SAFETY: of one `alloc` in `new`; the owner of a buffer that no mapping has is its only user.
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
        // SAFETY: of one `alloc` of as many frames, and nothing uses them.
        unsafe { Heap.free(first, 3) };
        assert_eq!(given(), [false; 3]);
    }
}
