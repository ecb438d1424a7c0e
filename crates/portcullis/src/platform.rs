//! The embedder's side of the library: [`Platform`] supplies CPUs, a clock and a timer, [`Frames`] supplies memory for
//! page tables, [`CopyMemory`] copies for bounce buffers, and [`CacheMaintenance`] cleans and invalidates the CPUs'
//! caches for non-coherent devices. Memory safety rests on them, so these traits are `unsafe`.
//!
//! A *CPU* of a platform is a number below [`Platform::cpus`], for which the library keeps values such as lists of
//! addresses. A kernel lends the number of the processor that the caller runs on, a program
//! ([`StdPlatform`](crate::std_platform::StdPlatform)) one that belongs to the thread.
//!
//! The traits are separate as their users differ: an IOMMU that maps by request (iommufd, virtio-iommu) needs CPUs and
//! a clock, but no table memory. `words.rs` has the accesses of shared bytes. This layer uses `addr`, `heap` and `sync`.

pub mod words;

use alloc::sync::Arc;
use core::marker::PhantomData;

use crate::addr::PhysAddr;
use crate::heap::{OutOfMemory, Shared, Weak};
use crate::sync::{AtomicU64, Ordering, Settled, fence, unique};

/// Proof that its holder has a CPU of the platform to itself while the proof lives. It is not `Send`.
#[derive(Debug)]
pub struct LocalCpu<'a> {
    index: usize,
    light_fence: bool,
    _on_this_cpu_only: PhantomData<(&'a (), *mut ())>,
}

impl LocalCpu<'_> {
    /// Makes the proof for CPU `index`. Only a [`Platform`] calls this, inside [`with_cpu`](Platform::with_cpu).
    ///
    /// # Safety
    /// 1. While the proof lives, no other caller has one for `index` of the same platform, in any thread, on any CPU,
    ///    or in an interrupt handler. What the last holder stored is visible to the next.
    /// 2. `index` is below [`Platform::cpus`].
    pub const unsafe fn new(index: usize) -> Self {
        Self { index, light_fence: false, _on_this_cpu_only: PhantomData }
    }

    /// As [`new`](Self::new), for a platform whose [`fence_all`](Platform::fence_all) makes every processor that may
    /// run the holder of a CPU pass a full memory barrier. The holder then needs only a compiler fence.
    ///
    /// # Safety
    /// 1. As for [`new`](Self::new), 1 and 2.
    /// 2. `fence_all` does this for the CPU on which the proof is used ([`Platform`], 5).
    pub const unsafe fn with_light_fence(index: usize) -> Self {
        Self { index, light_fence: true, _on_this_cpu_only: PhantomData }
    }

    /// Orders the holder's earlier stores before its later loads, as [`fence_all`](Platform::fence_all) on another CPU
    /// sees them.
    #[inline]
    pub(crate) fn fence(&self) {
        if self.light_fence && cfg!(not(loom)) {
            core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// The CPU's number, below [`Platform::cpus`].
    #[inline]
    pub const fn index(&self) -> usize {
        self.index
    }
}

/// Identifies a platform within the program, so that per-CPU values of one platform are not used with another's CPUs of
/// the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlatformNumber(pub(crate) u64);

impl PlatformNumber {
    /// The number of a platform that does not identify itself.
    pub const NONE: Self = Self(0);

    /// Returns a number that no other call returns.
    pub fn new() -> Self {
        Self(unique())
    }
}

impl Default for PlatformNumber {
    fn default() -> Self {
        Self::new()
    }
}

/// The one platform whose CPUs a structure has values for: the first that it is used with. It treats CPUs of other
/// platforms, and of platforms that do not identify themselves, as no CPUs.
#[derive(Debug, Default)]
pub(crate) struct OnePlatform(Settled);

impl OnePlatform {
    /// Settles that there will never be such a platform.
    const NOBODYS: u64 = u64::MAX;

    /// Returns whether `platform` is the one. The first `platform` becomes it. Costs a load and a compare.
    #[inline]
    pub fn is<P: Platform>(&self, platform: &P) -> bool {
        self.0.is(platform.number().0)
    }

    /// Returns whether a barrier of `platform` reaches all CPUs that this structure has values for, now and from now
    /// on: `platform` is the one; or it has no number and there is none yet, and the call settles that there never will
    /// be one.
    pub fn is_reached<P: Platform>(&self, platform: &P) -> bool {
        self.is(platform) || platform.number() == PlatformNumber::NONE && self.0.is(Self::NOBODYS)
    }

    /// As [`Platform::with_cpu`], without a CPU if `platform` is not the one.
    #[inline]
    pub fn with_cpu<P: Platform, R>(&self, platform: &P, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        let is_the_one = self.is(platform);
        platform.with_cpu(|cpu| f(cpu.filter(|_| is_the_one)))
    }

    /// As [`Platform::with_cpu_fast`], but `None` if `platform` is not the one yet.
    #[inline(always)]
    pub fn with_cpu_fast<P: Platform, R>(
        &self,
        platform: &P,
        f: impl FnOnce(&LocalCpu<'_>) -> R,
    ) -> Option<R> {
        if self.0.is_set_to(platform.number().0) { platform.with_cpu_fast(f) } else { None }
    }
}

/// Events of the platform that a domain must handle.
pub trait PlatformEvents: Send + Sync {
    /// Called when a deadline of [`Platform::wake_at`] has come. The call may wait for the listener's hardware, however
    /// long that is silent: a platform must not let other listeners wait meanwhile, as their windows stay open. It
    /// calls one listener's `timer` once at a time, and again for a deadline that comes during a call.
    ///
    /// Context: waits. The caller has no CPU lent, and is no interrupt handler that may have interrupted a holder of
    /// one, as the call may wait for the sections of all CPUs.
    fn timer(&self);

    /// Called when the CPU `index` is unplugged (or its thread has ended), to free what is cached there. Context: as
    /// for [`timer`](Self::timer).
    fn cpu_released(&self, index: usize);
}

/// Makes what a platform needs to call a listener while the listener has an owner.
pub fn events_of<T: PlatformEvents + 'static>(listener: &Shared<T>) -> Weak<dyn PlatformEvents> {
    // SAFETY: `Shared::cast`, 1: an unsizing coercion.
    let listener = unsafe { Shared::cast::<dyn PlatformEvents>(listener.clone(), |counted| counted) };
    Shared::downgrade(&listener)
}

/// Supplies the library with CPUs, a barrier, a clock and a timer.
///
/// A kernel lends the current CPU with preemption off (with interrupts off, if it maps from interrupt
/// handlers); [`StdPlatform`](crate::std_platform::StdPlatform) lends each thread a CPU for its life.
///
/// # Safety
/// The holder of a CPU uses the CPU's values without atomic read-modify-writes, and tables are freed once no holder of
/// a CPU can have seen them.
///
/// 1. **A CPU is lent to one caller at a time.** From the call of `f` until its return no other closure is given the
///    same CPU: in no other thread, on no other processor, in no interrupt handler that interrupts `f`. (`f` itself
///    never calls [`with_cpu`](Self::with_cpu), so a platform need not detect nested calls.)
/// 2. What the last holder of a CPU stored is visible to the next, wherever that runs: a CPU moves between processors,
///    or threads, by something that synchronises.
/// 3. `f` is called on the caller's processor (or thread), at most once, before the method returns, and stays there: a
///    holder is not moved to another processor while it has the CPU, unless all it did moves with it, as with threads.
/// 4. A CPU's number is below [`cpus`](Self::cpus), which always returns the same.
/// 5. [`fence_all`](Self::fence_all) is a full memory barrier of its caller's. If any proof was made by
///    [`LocalCpu::with_light_fence`], every processor that may run the holder of such a proof also passes a full memory
///    barrier, between the beginning and the end of the call.
/// 6. Clones, and handles such as an `Arc`, are the same platform: all clauses cover all of them together.
/// 7. [`number`](Self::number) always returns the same number, and no other platform returns it, unless it is
///    [`PlatformNumber::NONE`].
/// 8. [`cpu_released`](PlatformEvents::cpu_released) is called while the CPU has no holder, and before it is lent
///    again.
///
/// Lazy protection's window relies on the clock and the timer; no unsafe code does.
pub unsafe trait Platform: Send + Sync + 'static {
    /// Returns how many CPUs the platform has. It never changes.
    fn cpus(&self) -> usize;

    /// Identifies the platform: returns the number that was made with it by [`PlatformNumber::new`].
    ///
    /// A page table has section flags for the CPUs of *one* platform, the first that is used with it, and an address
    /// space has per-CPU lists for the CPUs of one. Callers with another platform, or with one that does not identify
    /// itself, take a lock, which is slower and as safe. A [reclaim](crate::pgtable::PageTable::reclaim) of tables, a
    /// split of contiguous PTEs and a drain of all lists wait for the sections of all CPUs: they do nothing for a
    /// platform whose barrier would not reach those.
    #[inline]
    fn number(&self) -> PlatformNumber {
        PlatformNumber::NONE
    }

    /// Lends the caller a CPU for the length of `f`, or `None` if all CPUs are taken.
    ///
    /// `f` never blocks on hardware, never calls `with_cpu` again, and takes bounded time: long work is done in slices,
    /// each with a CPU of its own. A slice covers at most one of these: 64 ranges, each of which may take 64 others out
    /// of a list, at O(log n) each; the queues, counts or lists of all CPUs, at a lock or a few words each (flushes,
    /// and figures such as [`Domain::stats`](crate::domain::Domain::stats)); 32 nodes and leaves of a space's bitmap,
    /// at 512 bits each; or the slots of one area or one run of a bounce pool, at a bit or a few words each.
    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R;

    /// As [`with_cpu`](Self::with_cpu), but returns `None` without calling `f` if finding the CPU takes more than a few
    /// instructions. The caller then takes the slow path, by `with_cpu`. This keeps fast paths free of calls, and so of
    /// saved registers.
    #[inline]
    fn with_cpu_fast<R>(&self, f: impl FnOnce(&LocalCpu<'_>) -> R) -> Option<R> {
        self.with_cpu(|cpu| cpu.map(f))
    }

    /// Returns nanoseconds since some fixed time; never goes backwards. Context: called also with a CPU lent and locks
    /// held, so it must not block, nor call [`with_cpu`](Self::with_cpu).
    fn now_ns(&self) -> u64;

    /// Makes what the caller has stored visible to every holder of a CPU from now on, and what holders stored visible
    /// to the caller. Called rarely.
    ///
    /// A full fence of the caller's own is enough if all proofs are made by [`LocalCpu::new`]. With
    /// [`LocalCpu::with_light_fence`] it must interrupt every processor (an inter-processor interrupt, `membarrier`).
    fn fence_all(&self) {
        fence(Ordering::SeqCst);
    }

    /// Calls `events` for timers and released CPUs, from now on until `events` has no owner.
    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory>;

    /// Requests a call of [`PlatformEvents::timer`] at `deadline_ns`, or soon after. Context: called with no lock held
    /// and no CPU lent; must not call back before it returns.
    ///
    /// A later deadline never replaces an earlier one that is still to come. The platform may forget the later one: a
    /// call covers everything that waits by then, and a listener that waits longer requests another. Extra calls cost a
    /// flush each, and do no other harm.
    fn wake_at(&self, deadline_ns: u64);
}

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
    /// `None` if there are none there.
    ///
    /// The default implementation takes any frames, and frees them at once if they lie beyond `last`. An implementation
    /// that knows where its frames lie does better.
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

    /// Whether the IOMMU's walker sees CPUs' stores without maintenance, and in the order in which CPUs release them,
    /// as another CPU would (on Arm, if the walker is of the inner shareable domain, the only one for which Rust's
    /// atomics order stores). If not, the library calls [`clean`](Self::clean) after each change; it orders earlier
    /// stores before later ones for the walker (on Arm by a barrier of the walker's domain). And the library calls
    /// [`invalidate`](Self::invalidate) before it loads what the IOMMU has written.
    const COHERENT: bool = true;

    /// Makes stores to `words`, which lie in one frame, visible to a non-coherent walker: writes each cache line back
    /// once, and waits for that. Never called if the walker is coherent.
    fn clean(&self, words: &[AtomicU64]) {
        let _ = words;
    }

    /// Makes what a non-coherent IOMMU has stored to `words`, which lie in one frame, visible to the caller: drops each
    /// cache line, after all that the caller has loaded before, and before all that it loads afterwards, registers
    /// included. No CPU has stored to the lines since they were last [cleaned](Self::clean). Called only for a unit's
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
/// 1. All methods change the bytes named, all of them, and nothing else.
/// 2. Outside of frames of its own (allocated by its `alloc` and not freed) a call accesses the bytes named, and no
///    other: the other bytes of a word may be anybody's.
/// 3. In frames of its own, a call is sound beside calls on other threads for other bytes, even of the same
///    [word](words).
/// 4. In frames of its own, a call is sound beside accesses of the same bytes by [words], as safe code of a
///    [buffer](crate::dma::DmaBuffer) may make them while a queue syncs its mapping. An implementation that is not
///    (`memcpy` is not) says so, and is given no buffers that safe code reaches while they are mapped.
pub unsafe trait CopyMemory: Frames {
    /// Copies `len` bytes from `from` to `to`, of any alignment, across any number of frames. A device may be changing
    /// them meanwhile: the copy is then any mixture of old and new bytes. O(len). Context: any that maps or unmaps;
    /// never waits.
    ///
    /// # Safety
    /// 1. All bytes of both ranges are memory that the CPU reaches, and the ranges do not overlap.
    /// 2. Meanwhile nothing accesses a byte of either but devices, and by [words] in frames of this memory's own.
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
    ///    [`zero`](Self::zero), and, in a pool of coherent devices alone, by [words].
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
/// Buffers go back to their owners, and memory to other users, on the word of this trait.
///
/// 1. [`clean`](Self::clean) changes no byte as any CPU sees it.
/// 2. Neither method affects a line that holds none of the bytes.
/// 3. What [`line_bytes`](Self::line_bytes) returns when a device is set up as non-coherent is, for as long as the
///    device is used, a multiple of every line that the two methods act on, on every CPU.
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

    /// Drops the lines. What the caller loads afterwards is what the memory holds after all that it loaded before.
    /// Hardware may write dirty lines back first (as Arm's does in a guest), as the library calls this only where none
    /// is dirty.
    ///
    /// # Safety
    /// 1. The bytes are memory that the CPU reaches.
    /// 2. What CPUs have stored to their lines and not cleaned may be lost.
    unsafe fn invalidate(&self, phys: PhysAddr, len: u64);
}

// SAFETY: every call goes to `T`, which keeps clauses 1 to 8 for all its handles together (6).
unsafe impl<T: Platform> Platform for Arc<T> {
    fn cpus(&self) -> usize {
        T::cpus(self)
    }

    #[inline]
    fn number(&self) -> PlatformNumber {
        T::number(self)
    }

    #[inline]
    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        T::with_cpu(self, f)
    }

    #[inline(always)]
    fn with_cpu_fast<R>(&self, f: impl FnOnce(&LocalCpu<'_>) -> R) -> Option<R> {
        T::with_cpu_fast(self, f)
    }

    fn now_ns(&self) -> u64 {
        T::now_ns(self)
    }

    fn fence_all(&self) {
        T::fence_all(self);
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        T::register(self, events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        T::wake_at(self, deadline_ns);
    }
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
