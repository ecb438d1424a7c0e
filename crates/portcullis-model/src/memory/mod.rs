//! Simulated physical memory: frames of 4 KiB that the library, the IOMMU's walker and devices all reach.
//!
//! Every byte lives in an atomic word, and all accesses are by [words], so any of them may run concurrently without undefined behaviour.
//! Memory is allocated in chunks of 256 KiB at their first use; until then each costs some 40 bytes. Mistakes of the code under test (a
//! double free, the use of a freed table) are counted and do no damage.
//!
//! Cost: reaching a word is three dependent loads. Allocating or freeing one frame is O(1) under a lock, plus zeroing it; a run of frames
//! is O(log n) plus zeroing.

mod allocator;
mod buffer;
mod copy;
mod dma;

pub use buffer::Buffer;

use std::fmt;
use std::sync::{Arc, OnceLock};

use portcullis::addr::PhysAddr;
use portcullis::platform::{FRAME_SIZE, Frames, Table, words};
use portcullis::sync::{AtomicU64, Mutex, Ordering};

use allocator::Allocator;

/// A word has one bit for each frame, hence 64. (Miri takes half a second to make as many.)
const FRAMES_PER_CHUNK: usize = if cfg!(miri) { 8 } else { u64::BITS as usize };
const WORD: u64 = size_of::<u64>() as u64;
/// The end of the addresses that a page-table entry can hold.
pub(crate) const PHYS_END: u64 = 1 << 52;

/// Some bytes of an access are outside this memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at {address:#x} are not all inside the memory")]
pub struct BadAddress {
    /// The start of the access.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
}

fn zeros() -> Table {
    // All at once: Miri takes more than a second word by word.
    #[cfg(not(loom))]
    let table = [const { AtomicU64::new(0) }; portcullis::platform::TABLE_ENTRIES];
    // The model checker's words are not constants.
    #[cfg(loom)]
    let table = std::array::from_fn(|_| AtomicU64::new(0));
    table
}

/// Frames that are allocated together.
#[derive(Debug)]
struct Chunk {
    frames: Box<[Table; FRAMES_PER_CHUNK]>,
    /// Bit n: frame n of the chunk is allocated.
    allocated: AtomicU64,
}

impl Chunk {
    fn new() -> Self {
        // Not an array first: that would be on the stack.
        let frames: Box<[Table]> = (0..FRAMES_PER_CHUNK).map(|_| zeros()).collect();
        let frames = frames.try_into().expect("as many as were made");
        Self { frames, allocated: AtomicU64::new(0) }
    }
}

/// Physical memory in frames of 4 KiB.
pub struct Memory {
    base: u64,
    frames: u64,
    chunks: Box<[OnceLock<Chunk>]>,
    allocator: Mutex<Allocator>,
    poison: Box<Table>,
    stray_tables: AtomicU64,
}

/// Only its place. Its bytes would be megabytes of text in everything that holds a [`Buffer`], such as the error of a map that a test
/// unwraps.
impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("base", &self.base())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl Memory {
    /// The default start of memory: not 0, so that an address is never mistaken for an offset, and above 4 GiB, so that a truncated one is
    /// noticed.
    pub const DEFAULT_BASE: u64 = 0x1_0000_0000;

    /// Memory of up to `capacity` bytes, rounded down to whole frames, from
    /// [`DEFAULT_BASE`](Self::DEFAULT_BASE) on.
    pub fn new(capacity: u64) -> Arc<Self> {
        Self::with_base(PhysAddr::new(Self::DEFAULT_BASE), capacity)
    }

    /// Memory of up to `capacity` bytes from `base` on, both rounded down to whole frames and cut off at the 52 bits of a page-table entry.
    pub fn with_base(base: PhysAddr, capacity: u64) -> Arc<Self> {
        let base = (base.get() & !(FRAME_SIZE - 1)).min(PHYS_END);
        let frames = capacity.min(PHYS_END - base) / FRAME_SIZE;
        let chunks = frames.div_ceil(FRAMES_PER_CHUNK as u64);
        Arc::new(Self {
            base,
            frames,
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
            allocator: Mutex::new(Allocator::new(base / FRAME_SIZE, frames)),
            poison: Box::new(zeros()),
            stray_tables: AtomicU64::new(0),
        })
    }

    /// The first address.
    pub fn base(&self) -> PhysAddr {
        PhysAddr::new(self.base)
    }

    /// Its size in bytes.
    pub fn capacity(&self) -> u64 {
        self.frames * FRAME_SIZE
    }

    /// A zeroed buffer of `len` bytes that starts at a frame; `None` without room (or for no bytes).
    pub fn buffer(self: &Arc<Self>, len: u64) -> Option<Buffer> {
        Buffer::new(self, len)
    }

    /// Frees `count` frames as [`Frames::free`] does. Safe: frames that were not allocated together are not freed, and counted in
    /// [`bad_frees`](Self::bad_frees).
    pub fn release(&self, first: PhysAddr, count: usize) {
        // Held until the allocation bits are cleared: otherwise a new owner's bits could be cleared.
        let mut allocator = self.allocator.lock();
        let number = if first.get().is_multiple_of(FRAME_SIZE) { first.get() / FRAME_SIZE } else { u64::MAX };
        if allocator.free(number, count as u64) {
            self.set_allocated(number, count as u64, false);
        }
    }

    /// The words of the frame at `frame`. For an address that is not allocated, a zeroed table that belongs to no allocation, counted in
    /// [`stray_tables`](Self::stray_tables).
    #[inline]
    pub fn table_at(&self, frame: PhysAddr) -> &Table {
        if frame.get().is_multiple_of(FRAME_SIZE)
            && let Some((chunk, frame)) = self.locate(frame)
            && let Some(chunk) = self.chunks[chunk].get()
            && chunk.allocated.load(Ordering::Acquire) & (1 << frame) != 0
        {
            return &chunk.frames[frame];
        }
        self.stray_table()
    }

    #[cold]
    fn stray_table(&self) -> &Table {
        self.stray_tables.fetch_add(1, Ordering::Relaxed);
        // Earlier stray writes must not look like entries.
        for word in self.poison.iter() {
            word.store(0, Ordering::Relaxed);
        }
        &self.poison
    }

    /// Whether the frame of `address` is allocated.
    pub fn is_allocated(&self, address: PhysAddr) -> bool {
        let Some((chunk, frame)) = self.locate(address) else { return false };
        let bits = self.chunks[chunk].get().map_or(0, |chunk| chunk.allocated.load(Ordering::Acquire));
        bits & (1 << frame) != 0
    }

    /// Allocated frames.
    pub fn frames_in_use(&self) -> u64 {
        self.allocator.lock().in_use()
    }

    /// The most frames allocated at once so far.
    pub fn peak_frames(&self) -> u64 {
        self.allocator.lock().peak()
    }

    /// Frees that matched no allocation. A correct program has 0.
    pub fn bad_frees(&self) -> u64 {
        self.allocator.lock().bad_frees()
    }

    /// Uses of tables in frames that are not allocated. A correct program has 0.
    pub fn stray_tables(&self) -> u64 {
        self.stray_tables.load(Ordering::Relaxed)
    }

    /// Makes the `n`-th allocation from now on fail, once; 0 cancels that.
    pub fn fail_after(&self, n: u64) {
        self.allocator.lock().fail_after(n);
    }

    /// Reads bytes. Frames need not be allocated: devices reach freed memory too.
    ///
    /// # Errors
    /// [`BadAddress`] if some of them are outside; nothing was read then.
    pub fn read(&self, address: PhysAddr, bytes: &mut [u8]) -> Result<(), BadAddress> {
        self.check(address, bytes.len())?;
        let mut at = address.get();
        let mut rest = bytes;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at_mut(in_frame(at).min(rest.len()));
            match self.existing_frame(PhysAddr::new(at)) {
                Some(table) => words::read(table, (at % FRAME_SIZE) as usize, piece).unwrap_or_default(),
                // Never written.
                None => piece.fill(0),
            }
            at += piece.len() as u64;
            rest = after;
        }
        Ok(())
    }

    /// Writes exactly these bytes: other bytes of a word keep the value of a concurrent writer.
    ///
    /// # Errors
    /// [`BadAddress`] if some of them are outside; nothing was written then.
    pub fn write(&self, address: PhysAddr, bytes: &[u8]) -> Result<(), BadAddress> {
        self.check(address, bytes.len())?;
        let mut at = address.get();
        let mut rest = bytes;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(in_frame(at).min(rest.len()));
            if let Some((chunk, frame)) = self.locate(PhysAddr::new(at)) {
                let chunk = self.chunks[chunk].get_or_init(Chunk::new);
                // A piece of one frame.
                let _ = words::write(&chunk.frames[frame], (at % FRAME_SIZE) as usize, piece);
            }
            at += piece.len() as u64;
            rest = after;
        }
        Ok(())
    }

    /// The 64-bit word at `address`, as a page-table walker reads it; `None` outside the memory or unaligned.
    pub fn read_u64(&self, address: PhysAddr) -> Option<u64> {
        if !address.get().is_multiple_of(WORD) {
            return None;
        }
        let (chunk, frame) = self.locate(address)?;
        let Some(chunk) = self.chunks[chunk].get() else { return Some(0) };
        let word = (address.get() % FRAME_SIZE / WORD) as usize;
        // Acquire: the library's stores to a table happen before the store that installs it.
        Some(chunk.frames[frame][word].load(Ordering::Acquire))
    }

    /// The chunk of the frame of `address`, and the frame's index in the chunk.
    #[inline]
    fn locate(&self, address: PhysAddr) -> Option<(usize, usize)> {
        let frame = address.get().checked_sub(self.base)? / FRAME_SIZE;
        let inside = frame < self.frames;
        inside.then_some((frame as usize / FRAMES_PER_CHUNK, frame as usize % FRAMES_PER_CHUNK))
    }

    fn existing_frame(&self, address: PhysAddr) -> Option<&Table> {
        let (chunk, frame) = self.locate(address)?;
        Some(&self.chunks[chunk].get()?.frames[frame])
    }

    fn check(&self, address: PhysAddr, len: usize) -> Result<(), BadAddress> {
        let inside = address
            .get()
            .checked_sub(self.base)
            .and_then(|offset| offset.checked_add(len as u64))
            .is_some_and(|end| end <= self.capacity());
        if inside { Ok(()) } else { Err(BadAddress { address: address.get(), len: len as u64 }) }
    }

    /// Sets or clears the allocation bits of frames.
    fn set_allocated(&self, number: u64, count: u64, allocated: bool) {
        for number in number..number + count {
            let Some((chunk, frame)) = self.locate(PhysAddr::new(number * FRAME_SIZE)) else { continue };
            let chunk = self.chunks[chunk].get_or_init(Chunk::new);
            if allocated {
                chunk.allocated.fetch_or(1 << frame, Ordering::Release);
            } else {
                chunk.allocated.fetch_and(!(1 << frame), Ordering::Release);
            }
        }
    }
}

// SAFETY: 1: the allocator marks frames as used and zeroes them, between a base and an end below 2^52, aligned as requested. 2: `table_at`
// finds the words of a frame by its number. 3: of memory behind an `Arc`. 4: the defaults are true of it.
#[allow(unsafe_code, reason = "the trait's signatures; the bodies are safe code")]
unsafe impl Frames for Memory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let number = self.allocator.lock().alloc(count as u64)?;
        self.set_allocated(number, count as u64, true);
        let first = PhysAddr::new(number * FRAME_SIZE);
        for frame in 0..count as u64 {
            let table = self.existing_frame(PhysAddr::new((number + frame) * FRAME_SIZE))?;
            for word in table {
                word.store(0, Ordering::Relaxed);
            }
        }
        Some(first)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        self.release(first, count);
    }

    #[inline]
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.table_at(frame)
    }
}

fn in_frame(address: u64) -> usize {
    (FRAME_SIZE - address % FRAME_SIZE) as usize
}
