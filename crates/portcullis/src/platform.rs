//! The embedder's side of the library: [`Platform`] supplies CPUs, a clock and a timer,
//! [`Frames`] supplies memory for page tables, [`CopyMemory`] copies for bounce buffers, and
//! [`CacheMaintenance`] keeps the CPUs' caches in order for devices that are not coherent. A CPU is
//! lent to one caller at a time, and a frame has one owner until it is freed. Memory safety rests on
//! both, so these traits are `unsafe`.
//!
//! A *CPU* of a platform is a number below [`Platform::cpus`], for which the library keeps values
//! such as lists of addresses. A kernel lends the number of the processor that the caller runs on,
//! a program ([`StdPlatform`](crate::std_platform::StdPlatform)) one that belongs to the thread.
//!
//! The four traits are separate because they have different users: an IOMMU that maps by request
//! (iommufd, virtio-iommu) needs CPUs and a clock, but no table memory.

pub mod words;

use alloc::sync::Arc;
use core::marker::PhantomData;

use crate::addr::PhysAddr;
use crate::heap::{OutOfMemory, Shared, Weak};
use crate::sync::{AtomicU64, Ordering, Settled, fence, unique};

/// Proof that its holder has a CPU of the platform to itself, for as long as the proof lives.
///
/// The proof cannot leave the thread it was made on.
#[derive(Debug)]
pub struct LocalCpu<'a> {
    index: usize,
    light_fence: bool,
    _on_this_cpu_only: PhantomData<(&'a (), *mut ())>,
}

impl LocalCpu<'_> {
    /// Makes the proof for CPU `index`. Only a [`Platform`] calls this, and only inside
    /// [`with_cpu`](Platform::with_cpu).
    ///
    /// # Safety
    /// - While the proof lives, no other caller has one for `index` of the same platform, in any thread, on any CPU, or in an
    ///   interrupt handler. What the last one stored is visible to the next.
    /// - `index` is below [`Platform::cpus`].
    pub const unsafe fn new(index: usize) -> Self {
        Self { index, light_fence: false, _on_this_cpu_only: PhantomData }
    }

    /// As [`new`](Self::new), for a platform whose [`fence_all`](Platform::fence_all) makes every
    /// processor that may run the holder of a CPU pass a full memory barrier. The holder then needs no fence of its
    /// own.
    ///
    /// # Safety
    /// As for [`new`](Self::new); and `fence_all` keeps that promise for the CPU that the proof is used on.
    pub const unsafe fn with_light_fence(index: usize) -> Self {
        Self { index, light_fence: true, _on_this_cpu_only: PhantomData }
    }

    /// Orders the holder's earlier stores before its later loads, as
    /// [`fence_all`](Platform::fence_all) on another CPU sees them.
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

/// Identifies a platform among all platforms of the program, so that values kept for the CPUs of
/// one platform are not used with another platform's CPUs of the same numbers.
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

/// Records the one platform for whose CPUs a structure keeps values: the first that the structure
/// is used with. CPUs of another platform have the same numbers, so the structure treats them as no
/// CPUs, and likewise those of a platform that does not identify itself.
#[derive(Debug, Default)]
pub(crate) struct OnePlatform(Settled);

impl OnePlatform {
    /// Stored to settle that there will never be such a platform.
    const NOBODYS: u64 = u64::MAX;

    /// Returns whether `platform` is the one. If there is none yet, `platform` becomes it. Costs a
    /// load and a compare.
    #[inline]
    pub fn is<P: Platform>(&self, platform: &P) -> bool {
        self.0.is(platform.number().0)
    }

    /// Returns whether a barrier of `platform` reaches all CPUs that count here, now and
    /// from now on. It does if `platform` is the one, or if it has no number and there is none yet;
    /// the call then settles that there never will be one.
    pub fn is_reached<P: Platform>(&self, platform: &P) -> bool {
        self.is(platform) || platform.number() == PlatformNumber::NONE && self.0.is(Self::NOBODYS)
    }

    /// As [`Platform::with_cpu`], but without a CPU where `platform` is not the one.
    #[inline]
    pub fn with_cpu<P: Platform, R>(&self, platform: &P, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        let is_the_one = self.is(platform);
        platform.with_cpu(|cpu| f(cpu.filter(|_| is_the_one)))
    }

    /// As [`Platform::with_cpu_fast`], but `None` where `platform` is not the one, or not yet.
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
    /// Called when the time asked for with [`Platform::wake_at`] has come. The call may wait for
    /// hardware, for as long as that is silent: a platform must not let other listeners wait
    /// meanwhile, as their windows stay open. A listener is in one call of `timer` at a time, and a
    /// time that comes during a call is followed by another call. The caller has no CPU lent, and
    /// is no interrupt handler that may have interrupted a holder of one: the call may wait for the
    /// turns of all CPUs to end.
    fn timer(&self);

    /// Called when the CPU `index` is unplugged (or its thread has ended), to give back what is
    /// cached there. May wait for hardware. The caller is as for [`timer`](Self::timer).
    fn cpu_released(&self, index: usize);
}

/// What a platform is given to tell a value of events, as long as that has an owner.
pub fn events_of<T: PlatformEvents + 'static>(listener: &Shared<T>) -> Weak<dyn PlatformEvents> {
    // SAFETY: an unsizing coercion.
    let listener = unsafe { Shared::cast::<dyn PlatformEvents>(listener.clone(), |counted| counted) };
    Shared::downgrade(&listener)
}

/// Supplies the library with CPUs, a barrier, a clock and a timer.
///
/// A kernel lends the current CPU with preemption off (with interrupts off, if it maps from interrupt
/// handlers); [`StdPlatform`](crate::std_platform::StdPlatform) lends each thread a CPU for its life.
///
/// # Safety
/// The holder of a CPU uses that CPU's values without atomic read-modify-writes, and tables are
/// freed when no CPU is lent whose holder may have seen them. So:
///
/// - **A CPU is lent to one caller at a time.** From the call of `f` until its return no other closure is given the same
///   CPU: in no other thread, on no other processor, in no interrupt handler that interrupts `f`. (`f` itself never calls
///   [`with_cpu`](Self::with_cpu), so a platform need not tell a call within `f` from one beside it.)
/// - What the last holder of a CPU stored is visible to the next, wherever that runs: a CPU moves from processor to
///   processor, or from thread to thread, by something that synchronises.
/// - `f` is called on the caller's processor (or thread), at most once, before the method returns, and stays there: a
///   holder is not moved to another processor while it has the CPU, unless all it did moves with it, as with threads.
/// - A CPU's number is below [`cpus`](Self::cpus), which always returns the same.
/// - [`fence_all`](Self::fence_all) is a full memory barrier of its caller's. Where any proof was made by
///   [`LocalCpu::with_light_fence`], every processor that may run the holder of such a proof passes a full memory barrier,
///   too, between the beginning and the end of the call.
/// - Clones, and handles such as an `Arc`, are the same platform: all of the above goes for all of them together.
/// - [`number`](Self::number) always returns the same number, and no other platform returns it,
///   unless it is [`PlatformNumber::NONE`].
/// - [`cpu_released`](PlatformEvents::cpu_released) is called while the CPU has no holder, and
///   before it is lent again.
///
/// No unsafe code relies on the clock or the timer; lazy protection's window does.
pub unsafe trait Platform: Send + Sync + 'static {
    /// Returns how many CPUs the platform has. It never changes.
    fn cpus(&self) -> usize;

    /// Identifies the platform: returns the number that was made with it by
    /// [`PlatformNumber::new`].
    ///
    /// A page table keeps turns for the CPUs of *one* platform, the first that is used with it,
    /// and an address space keeps lists of its own for the CPUs of one.
    /// Callers with another platform, or with one that does not identify itself, take a lock,
    /// which is slower and as safe. A page table waits for the turns of all others to
    /// [reclaim](crate::pgtable::PageTable::reclaim) tables or to split a page of several entries,
    /// and a space takes back what all CPUs keep: both do nothing for a platform whose barrier
    /// would not reach those turns.
    #[inline]
    fn number(&self) -> PlatformNumber {
        PlatformNumber::NONE
    }

    /// Lends the caller a CPU of its own for the length of `f`, or `None` where all CPUs are
    /// taken.
    ///
    /// `f` never blocks on hardware, never calls `with_cpu` again, and takes bounded time, however
    /// much there is to do: long work is done in slices, each with a CPU of its own. A slice
    /// covers at most one of these: 64 ranges, each of which may take 64 others out of a list, at
    /// O(log n) each; the queues, counts or lists of all CPUs, at a lock or a few words each
    /// (flushes, and figures such as [`Domain::stats`](crate::domain::Domain::stats)); 32 nodes and
    /// leaves of a space's bitmap, at 512 bits each; or the slots of one area or one run of a bounce
    /// pool, at a bit or a few words each.
    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R;

    /// As [`with_cpu`](Self::with_cpu), but returns `None` without calling `f` where finding the
    /// CPU takes more than a few instructions. The caller then goes another way, which uses
    /// `with_cpu`.
    ///
    /// It keeps the fast paths free of calls, and so of registers saved for them.
    #[inline]
    fn with_cpu_fast<R>(&self, f: impl FnOnce(&LocalCpu<'_>) -> R) -> Option<R> {
        self.with_cpu(|cpu| cpu.map(f))
    }

    /// Returns nanoseconds since some fixed time; never goes backwards. It is called with a CPU
    /// lent and locks held, too, so it must not block, nor call [`with_cpu`](Self::with_cpu).
    fn now_ns(&self) -> u64;

    /// Makes what the caller has stored visible to every holder of a CPU from now on, and
    /// what holders stored visible to the caller. Called rarely.
    ///
    /// A full fence of the caller's own is enough where proofs are made by [`LocalCpu::new`]. With
    /// [`LocalCpu::with_light_fence`] it must interrupt every processor (an inter-processor
    /// interrupt, `membarrier`).
    fn fence_all(&self) {
        fence(Ordering::SeqCst);
    }

    /// Tells `events` of timers and of CPUs that are given up, from now on until `events` is
    /// dropped.
    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory>;

    /// Asks for [`PlatformEvents::timer`] to be called at `deadline_ns`, or soon after. Called with
    /// no lock held and no CPU lent; must not call back before it returns.
    ///
    /// A later deadline never takes the place of an earlier one that is still to come. The platform
    /// may forget the later one: a call covers everything that waits by then, and a listener that
    /// waits longer asks again. More calls than were asked for do no harm but the flushes that they
    /// cost.
    fn wake_at(&self, deadline_ns: u64);
}

/// Entries of one page table: 512 words, 4 KiB.
pub const TABLE_ENTRIES: usize = 512;

/// A frame of a page table, as the hardware and the library share it.
pub type Table = [AtomicU64; TABLE_ENTRIES];

/// The size in bytes of a [frame](Frames).
pub const FRAME_SIZE: u64 = 4096;

/// Physical memory for page tables and coherent buffers, in frames of 4 KiB that the CPU and the IOMMU's
/// walker both reach.
///
/// # Safety
/// What [`alloc`](Self::alloc) and [`alloc_within`](Self::alloc_within) return is as their
/// documentation says: below 2^52, aligned, zeroed, and the caller's alone until it is freed.
/// [`table`](Self::table) gives the words of that very memory. The memory exists for as long as a
/// handle (an `Arc`, say) is kept.
pub unsafe trait Frames: Send + Sync + 'static {
    /// Allocates `count` frames in a row, all zero, aligned to `count` rounded up to a power of
    /// two. Returns `None` when there are none (or for a `count` of 0). May allocate; must not wait
    /// for an I/O.
    fn alloc(&self, count: usize) -> Option<PhysAddr>;

    /// As [`alloc`](Self::alloc), but the frames end at `last` at the most, for devices that reach
    /// no further. Returns `None` when there are none there.
    ///
    /// The default implementation takes any frames, and gives them back immediately if they lie
    /// beyond `last`. An implementation that knows where its frames are does better.
    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        let first = self.alloc(count)?;
        let end = (count as u64).checked_mul(FRAME_SIZE).and_then(|bytes| first.checked_add(bytes - 1));
        if end.is_some_and(|end| end <= last) {
            return Some(first);
        }
        // SAFETY: the frames are of the call above, and no other code has seen them.
        unsafe { self.free(first, count) };
        None
    }

    /// Takes back `count` frames that [`alloc`](Self::alloc) or [`alloc_within`](Self::alloc_within) gave out together.
    ///
    /// # Safety
    /// `first` and `count` are of one earlier `alloc` or `alloc_within` of this value and were not
    /// freed since, and from now on nothing, walkers included, uses the frames.
    unsafe fn free(&self, first: PhysAddr, count: usize);

    /// Whether the IOMMU's walker sees what CPUs store without being told, and in the order in
    /// which they release it, as another CPU would (on Arm, if the walker is of the inner shareable
    /// domain, the only one for which Rust's atomics order stores). If not, [`clean`](Self::clean)
    /// is called after each change; it orders what was stored before it, for the walker, before
    /// what is stored after it (on Arm by a barrier of the walker's domain). And
    /// [`invalidate`](Self::invalidate) is called before each look at what the IOMMU has written.
    const COHERENT: bool = true;

    /// Makes stores to `words`, which lie in one frame, visible to a walker that is not coherent:
    /// writes each cache line back once, and waits for that. Never called where the walker is
    /// coherent.
    fn clean(&self, words: &[AtomicU64]) {
        let _ = words;
    }

    /// Makes what an IOMMU that is not coherent has stored to `words`, which lie in one frame, visible to the caller: drops each cache
    /// line, after all that the caller has loaded before, and before all that it loads afterwards, registers included. No CPU has
    /// stored to the lines since they were last [cleaned](Self::clean). Called for a unit's event records and confirmations
    /// alone, and never where the walker is coherent.
    ///
    /// Does nothing where it is not implemented: that is enough on x86, where what any unit stores is seen, and its walker alone
    /// may not see what CPUs store.
    fn invalidate(&self, words: &[AtomicU64]) {
        let _ = words;
    }

    /// Whether the CPU reaches the frames uncached, by [`table`](Self::table) and by whatever
    /// addresses its words have, and no cache holds a line of a frame that comes from `alloc`.
    /// [Coherent memory](crate::dma::CoherentMemory) for a device that is not coherent is made of
    /// such frames. The library loads and stores there. Of atomic read-modify-writes, which the
    /// bus of many machines does not take for such memory, it does none.
    const UNCACHED: bool = false;

    /// Returns the words of the frame at `frame`.
    ///
    /// # Safety
    /// `frame` lies in what an `alloc` of this value gave out, and is not freed while the reference lives.
    unsafe fn table(&self, frame: PhysAddr) -> &Table;
}

/// Memory that the CPU copies for devices: between bounce buffers, made of [frames](Frames), and the buffers that
/// drivers name.
///
/// # Safety
/// 1. All methods change the bytes named, all of them, and nothing else.
/// 2. Outside of frames of its own (those that its `alloc` has given out, and that are not freed) a call accesses the bytes named,
///    and no other: what shares a word with them may be anybody's.
/// 3. In frames of its own, a call is sound beside calls on other threads for other bytes, though of the same [word](words).
/// 4. In frames of its own, a call is sound beside accesses of the same bytes by [words], as safe code of a
///    [buffer](crate::dma::DmaBuffer) may make them while a queue syncs its mapping. An implementation that is not (`memcpy` is
///    not) says so, and is given no buffers that safe code reaches while they are mapped.
pub unsafe trait CopyMemory: Frames {
    /// Copies `len` bytes from `from` to `to`, of any alignment, across any number of frames. A
    /// device may be changing them meanwhile: the copy is then any mixture of old and new bytes.
    /// Never waits; O(len).
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

    /// Copies an original to a bounce buffer: [`copy`](Self::copy). The library itself does more
    /// for devices that are not coherent; an implementation leaves this as it is.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    #[inline(always)]
    unsafe fn copy_in(&self, original: PhysAddr, buffer: PhysAddr, len: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.copy(original, buffer, len) }
    }

    /// Copies a bounce buffer to an original. As [`copy_in`](Self::copy_in).
    ///
    /// # Safety
    /// As for [`copy`](Self::copy). Since the buffer was allocated, CPUs have stored to its cache
    /// lines by [`copy_in`](Self::copy_in) and [`zero`](Self::zero) alone, and, in a pool of coherent devices alone, by [words].
    #[inline(always)]
    unsafe fn copy_out(&self, buffer: PhysAddr, original: PhysAddr, len: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.copy(buffer, original, len) }
    }
}

/// Maintenance of the CPUs' data caches by range of memory, for devices that do not see what those
/// hold. See [`Device::not_coherent`](crate::dma::Device::not_coherent).
///
/// Both methods act on each line that holds one of the `len` bytes at `phys`, in all caches of all
/// CPUs, down to the memory that devices reach (Arm's point of coherency). They may be called on
/// any CPU, in any context that maps or unmaps, and wait for the caches alone. O(lines).
///
/// # Safety
/// Buffers go back to their owners, and memory to other users, on the word of this trait:
///
/// - [`clean`](Self::clean) changes no byte as any CPU sees it.
/// - Neither method affects a line that holds none of the bytes.
/// - What [`line_bytes`](Self::line_bytes) returns when a device is said to be not coherent is, for
///   as long as the device is used, a multiple of every line that the two methods act on, on every
///   CPU.
pub unsafe trait CacheMaintenance: Send + Sync + 'static {
    /// Bytes of the largest line of any cache between a CPU and the devices: a power of two, of all
    /// CPUs together where they differ. Read once for each device. Buffers are aligned by it; the two
    /// methods step by the smallest line that they may meet, which may be less.
    fn line_bytes(&self) -> u64;

    /// Writes dirty lines back. When it returns, devices read what CPUs had stored, and that is so
    /// before anything that the caller stores afterwards is seen, in page tables and in registers
    /// too. It may also drop the lines.
    ///
    /// # Safety
    /// The bytes are memory that the CPU reaches.
    unsafe fn clean(&self, phys: PhysAddr, len: u64);

    /// Drops the lines. What the caller loads afterwards is what the memory holds after all that it
    /// loaded before. Where the hardware writes dirty lines back first (as Arm's does in a guest)
    /// that is as good, as the library calls this only where none is dirty.
    ///
    /// # Safety
    /// The bytes are memory that the CPU reaches, and what CPUs have stored to their lines and not
    /// cleaned may be lost.
    unsafe fn invalidate(&self, phys: PhysAddr, len: u64);
}

// SAFETY: every call is passed on to `T`, which promises the same for all its handles together.
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

// SAFETY: every call is passed on to `T`, which promises the same.
unsafe impl<T: Frames> Frames for Arc<T> {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        T::alloc(self, count)
    }

    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        T::alloc_within(self, count, last)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise is passed on unchanged.
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
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { T::table(self, frame) }
    }
}

// SAFETY: every call is passed on to `T`, which promises the same.
unsafe impl<T: CopyMemory> CopyMemory for Arc<T> {
    #[inline]
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { T::copy(self, from, to, len) }
    }

    #[inline]
    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { T::zero(self, at, len) }
    }

    #[inline(always)]
    unsafe fn copy_in(&self, original: PhysAddr, buffer: PhysAddr, len: u64) {
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { T::copy_in(self, original, buffer, len) }
    }

    #[inline(always)]
    unsafe fn copy_out(&self, buffer: PhysAddr, original: PhysAddr, len: u64) {
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { T::copy_out(self, buffer, original, len) }
    }
}
