//! Memory that devices and IOMMUs reach: frames, copies between them, and the CPUs' caches over them.

use alloc::sync::Arc;

use crate::addr::PhysAddr;
use crate::sync::AtomicU64;

/// Entries of one frame of a page table: 512 words, 4 KiB.
pub const TABLE_ENTRIES: usize = 512;

/// A frame of a page table, as the hardware and the library share it.
pub type Table = [AtomicU64; TABLE_ENTRIES];

/// The size in bytes of a [frame](Frames).
pub const FRAME_SIZE: u64 = 4096;

/// Physical memory for page tables and coherent buffers, in frames of 4 KiB that the CPU and the IOMMU's walker both
/// reach.
///
/// # Safety
/// 1. [`alloc`](Self::alloc) and [`alloc_within`](Self::alloc_within) return frames as documented: below 2^52, aligned,
///    zeroed, and the caller's alone until they are freed.
/// 2. [`table`](Self::table) returns the words of that very memory.
/// 3. The memory exists for as long as a handle (an `Arc`, say) does.
/// 4. [`COHERENT`](Self::COHERENT) and [`UNCACHED`](Self::UNCACHED) are true of the memory, and [`clean`](Self::clean)
///    and [`invalidate`](Self::invalidate) do as documented.
pub unsafe trait Frames: Send + Sync + 'static {
    /// Allocates `count` frames in a row, all zero, aligned to `count` rounded up to a power of two. Returns `None` if
    /// there are none (or for a `count` of 0). Context: may allocate; must not wait for an I/O.
    fn alloc(&self, count: usize) -> Option<PhysAddr>;

    /// As [`alloc`](Self::alloc), but the frames end at `last` at the most, for devices that reach no further. Returns
    /// `None` if there are none there. The default takes any frames, and frees them at once if they lie beyond `last`.
    /// An implementation that knows where its frames lie does better.
    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        let first = self.alloc(count)?;
        let end = (count as u64).checked_mul(FRAME_SIZE).and_then(|bytes| first.checked_add(bytes - 1));
        if end.is_some_and(|end| end <= last) {
            return Some(first);
        }
        // SAFETY: 1: the frames are of the call above. 2: no other code has seen them.
        unsafe { self.free(first, count) };
        None
    }

    /// Frees `count` frames of one [`alloc`](Self::alloc) or [`alloc_within`](Self::alloc_within).
    ///
    /// # Safety
    /// 1. `first` and `count` are of one earlier `alloc` or `alloc_within` of this value, and were not freed since.
    /// 2. From now on nothing, walkers included, uses the frames.
    unsafe fn free(&self, first: PhysAddr, count: usize);

    /// Whether the IOMMU's walker sees CPUs' stores without maintenance, and in release order, as another CPU sees
    /// them. (On Arm this needs a walker in the inner shareable domain, the only one that Rust's atomics order.) If
    /// not, the library calls [`clean`](Self::clean) after each change; `clean` also orders earlier stores before later
    /// ones for the walker (on Arm by a barrier of the walker's domain). And the library calls
    /// [`invalidate`](Self::invalidate) before it loads what the IOMMU has written.
    const COHERENT: bool = true;

    /// Makes stores to `words`, which lie in one frame, visible to a non-coherent walker: writes each cache line back
    /// once, and waits for that. Never called if the walker is coherent.
    fn clean(&self, words: &[AtomicU64]) {
        let _ = words;
    }

    /// Makes what a non-coherent IOMMU has stored to `words`, which lie in one frame, visible to the caller: drops each
    /// cache line, after the caller's earlier loads and before its later ones, those of registers included. No CPU has
    /// stored to the lines since they were last [cleaned](Self::clean). Called only for a unit's
    /// event records and confirmations, and never if the walker is coherent.
    ///
    /// The default does nothing. That is enough on x86, where CPUs see all stores of a unit, and only its walker may
    /// not see theirs.
    fn invalidate(&self, words: &[AtomicU64]) {
        let _ = words;
    }

    /// Whether the CPU reaches the frames uncached, by [`table`](Self::table) and by any other address of their words,
    /// and no cache holds a line of a frame that comes from `alloc`. [Coherent memory](crate::dma::CoherentMemory) for
    /// a non-coherent device is made of such frames. The library loads and stores there, but does no atomic
    /// read-modify-writes, which the bus of many machines does not take for such memory.
    const UNCACHED: bool = false;

    /// Returns the words of the frame at `frame`.
    ///
    /// # Safety
    /// 1. `frame` lies in an `alloc` of this value's, and is not freed while the reference lives.
    unsafe fn table(&self, frame: PhysAddr) -> &Table;
}

/// Copies memory for devices: between bounce buffers, made of [frames](Frames), and the buffers of drivers.
///
/// # Safety
/// 1. Each method changes all of the bytes named, and nothing else.
/// 2. Outside of frames of its own (allocated by its `alloc` and not freed) a call accesses the bytes named, and no
///    other: the other bytes of a word may be another owner's.
/// 3. In frames of its own, a call is sound beside calls on other threads for other bytes, even of the same
///    [word](super::words).
/// 4. In frames of its own, a call is sound beside accesses of the same bytes by [words](super::words), as safe code of
///    a [buffer](crate::dma::DmaBuffer) may make them while a queue syncs its mapping. An implementation that is not,
///    such as one by `memcpy`, documents that, and its users give it no buffer that safe code can access while mapped.
pub unsafe trait CopyMemory: Frames {
    /// Copies `len` bytes from `from` to `to`, of any alignment, across any number of frames. A device may be changing
    /// them meanwhile: the copy is then any mixture of old and new bytes. O(len). Context: any that maps or unmaps;
    /// never waits.
    ///
    /// # Safety
    /// 1. All bytes of both ranges are memory that the CPU reaches, and the ranges do not overlap.
    /// 2. Meanwhile only devices access bytes of either; in frames of this memory's own, other code may, too, by
    ///    [words](super::words).
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64);

    /// Sets `len` bytes at `at` to 0.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn zero(&self, at: PhysAddr, len: u64);

    /// Copies an original to a bounce buffer: [`copy`](Self::copy). The library overrides this for non-coherent
    /// devices; an implementation does not.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    #[inline(always)]
    unsafe fn copy_in(&self, original: PhysAddr, buffer: PhysAddr, len: u64) {
        // SAFETY: the same contract.
        unsafe { self.copy(original, buffer, len) }
    }

    /// Copies a bounce buffer to an original. As [`copy_in`](Self::copy_in).
    ///
    /// # Safety
    /// 1. As for [`copy`](Self::copy), 1 and 2.
    /// 2. Since the buffer was allocated, CPUs have stored to its cache lines only by [`copy_in`](Self::copy_in) and
    ///    [`zero`](Self::zero), or, in a pool for coherent devices only, by [words](super::words).
    #[inline(always)]
    unsafe fn copy_out(&self, buffer: PhysAddr, original: PhysAddr, len: u64) {
        // SAFETY: the caller's (1).
        unsafe { self.copy(buffer, original, len) }
    }
}

/// Maintenance of the CPUs' data caches by range of memory, for non-coherent devices. See
/// [`Device::not_coherent`](crate::dma::Device::not_coherent).
///
/// Both methods act on each line that holds one of the `len` bytes at `phys`, in all caches of all CPUs, down to the
/// memory that devices reach (Arm's point of coherency). O(lines). Context: any CPU, and any context that maps or
/// unmaps; they wait only for the caches.
///
/// # Safety
/// The library relies on these when it returns buffers and frees memory:
///
/// 1. [`clean`](Self::clean) changes no byte as any CPU sees it.
/// 2. Neither method affects a line that holds none of the bytes.
/// 3. The value that [`line_bytes`](Self::line_bytes) returns when a device is set up as non-coherent is a multiple of
///    the size of every line that the two methods act on, on every CPU, for as long as the device is used.
pub unsafe trait CacheMaintenance: Send + Sync + 'static {
    /// Bytes of the largest line of any cache between a CPU and the devices: a power of two, the largest of all CPUs.
    /// Read once for each device. Buffers are aligned by it; the two methods step by the smallest line that they may
    /// meet.
    fn line_bytes(&self) -> u64;

    /// Writes dirty lines back. When it returns, devices read what CPUs had stored, before they see anything that the
    /// caller stores afterwards, in page tables and in registers too. It may also drop the lines.
    ///
    /// # Safety
    /// 1. The bytes are memory that the CPU reaches.
    unsafe fn clean(&self, phys: PhysAddr, len: u64);

    /// Drops the lines, after the caller's earlier loads and before its later ones, which read what the memory holds.
    /// Hardware may write dirty lines back first (as Arm's does in a guest), as the library calls this only where none
    /// is dirty.
    ///
    /// # Safety
    /// 1. The bytes are memory that the CPU reaches.
    /// 2. The caller accepts the loss of stores to these lines that were not cleaned.
    unsafe fn invalidate(&self, phys: PhysAddr, len: u64);
}

// SAFETY: every call goes to `T`, which keeps clauses 1 to 4.
unsafe impl<T: Frames> Frames for Arc<T> {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        T::alloc(self, count)
    }

    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        T::alloc_within(self, count, last)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the same contract, of the same memory.
        unsafe { T::free(self, first, count) }
    }

    const COHERENT: bool = T::COHERENT;
    const UNCACHED: bool = T::UNCACHED;

    fn clean(&self, words: &[AtomicU64]) {
        T::clean(self, words);
    }

    fn invalidate(&self, words: &[AtomicU64]) {
        T::invalidate(self, words);
    }

    #[inline]
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the same contract, of the same memory.
        unsafe { T::table(self, frame) }
    }
}

// SAFETY: every call goes to `T`, which keeps clauses 1 to 4.
unsafe impl<T: CopyMemory> CopyMemory for Arc<T> {
    #[inline]
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: the same contract, of the same memory.
        unsafe { T::copy(self, from, to, len) }
    }

    #[inline]
    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        // SAFETY: the same contract, of the same memory.
        unsafe { T::zero(self, at, len) }
    }

    #[inline(always)]
    unsafe fn copy_in(&self, original: PhysAddr, buffer: PhysAddr, len: u64) {
        // SAFETY: the same contract, of the same memory.
        unsafe { T::copy_in(self, original, buffer, len) }
    }

    #[inline(always)]
    unsafe fn copy_out(&self, buffer: PhysAddr, original: PhysAddr, len: u64) {
        // SAFETY: the same contract, of the same memory.
        unsafe { T::copy_out(self, buffer, original, len) }
    }
}
