//! What the embedder supplies: local slots, a clock and a timer ([`Platform`]), and memory for page tables
//! ([`Frames`]).
//!
//! They are two traits because they have different users: an IOMMU that maps by request (iommufd,
//! virtio-iommu) needs slots and a clock but no table memory.

use alloc::sync::{Arc, Weak};
use core::marker::PhantomData;

use crate::addr::PhysAddr;
use crate::sync::{AtomicU64, Ordering, Settled, fence, unique};

/// Proof that its holder has a local slot to itself, for as long as the proof lives.
///
/// It cannot leave the thread it was made on.
#[derive(Debug)]
pub struct LocalSlot<'a> {
    index: usize,
    light_fence: bool,
    _on_this_cpu_only: PhantomData<(&'a (), *mut ())>,
}

impl LocalSlot<'_> {
    /// The proof for slot `index`. Only a [`Platform`] makes one, and only inside
    /// [`with_slot`](Platform::with_slot).
    ///
    /// # Safety
    /// - While the proof lives, no other caller has one for `index` of the same platform, in any thread, on any CPU, or in an
    ///   interrupt handler. What the last one stored is visible to the next.
    /// - `index` is below [`Platform::slots`].
    pub const unsafe fn new(index: usize) -> Self {
        Self { index, light_fence: false, _on_this_cpu_only: PhantomData }
    }

    /// The same, for a platform whose [`fence_all`](Platform::fence_all) makes every CPU that may hold a slot
    /// pass a full memory barrier: then the holder itself needs none.
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

    /// The slot's number, below [`Platform::slots`].
    #[inline]
    pub const fn index(&self) -> usize {
        self.index
    }
}

/// By which a platform is told from all others of the program: what is kept for the slots of one is not used with
/// another's of the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlatformNumber(u64);

impl PlatformNumber {
    /// That of a platform that does not say who it is.
    pub const NONE: Self = Self(0);

    /// One that no other call returns.
    pub fn new() -> Self {
        Self(unique())
    }
}

impl Default for PlatformNumber {
    fn default() -> Self {
        Self::new()
    }
}

/// The platform for whose slots something keeps values: the first that it is used with. Slots of others, which have the same
/// numbers, are none to it, and so are those of a platform that does not say who it is.
#[derive(Debug, Default)]
pub(crate) struct Home(Settled);

impl Home {
    /// What is settled on where no platform ever is home.
    const NOBODYS: u64 = u64::MAX;

    /// Whether `platform` is home, which it becomes where none is yet. A load and two compares.
    #[inline]
    pub fn is<P: Platform>(&self, platform: &P) -> bool {
        let number = platform.number().0;
        number != 0 && self.0.is(number)
    }

    /// Whether a barrier of `platform` reaches all CPUs whose slots count here, now and from now on: it is home, or it has no
    /// number and there is no home; then there never is one.
    pub fn is_reached<P: Platform>(&self, platform: &P) -> bool {
        self.is(platform) || platform.number() == PlatformNumber::NONE && self.0.is(Self::NOBODYS)
    }

    /// As [`Platform::with_slot`], but without a slot where `platform` is not home.
    #[inline]
    pub fn with_slot<P: Platform, R>(&self, platform: &P, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        let is_home = self.is(platform);
        platform.with_slot(|slot| f(slot.filter(|_| is_home)))
    }

    /// As [`Platform::with_slot_at_hand`], but `None` where `platform` is not home.
    #[inline]
    pub fn at_hand<P: Platform, R>(&self, platform: &P, f: impl FnOnce(&LocalSlot<'_>) -> R) -> Option<R> {
        if self.is(platform) { platform.with_slot_at_hand(f) } else { None }
    }
}

/// What happens on the platform that a domain must hear of.
pub trait PlatformEvents: Send + Sync {
    /// The time asked for with [`Platform::wake_at`] has come. May wait for hardware, for as long as that is silent:
    /// a platform must not let other listeners wait meanwhile, as their windows stay open. One listener is in one call
    /// at a time, and a time that comes meanwhile is followed by another call. The caller has no slot lent, and is no
    /// interrupt handler that may have interrupted one who has: the call may wait for the turns of all CPUs to end.
    fn timer(&self);

    /// The CPU (or thread) that had slot `index` is gone: give back what is cached there. May wait for
    /// hardware. The caller is as for [`timer`](Self::timer).
    fn slot_released(&self, index: usize);
}

/// What the machine offers.
///
/// A kernel gives the current CPU's slot with preemption off (with interrupts off, if it maps from interrupt
/// handlers); [`StdPlatform`](crate::std_platform::StdPlatform) gives each thread a slot for its life.
///
/// # Safety
/// What a CPU keeps in its slot is used without atomic read-modify-writes, and tables are freed when no slot is in use
/// that may have seen them. So:
///
/// - **A slot is lent to one caller at a time.** From the call of `f` until its return no other closure is given the same
///   slot: in no other thread, on no other CPU, and in no interrupt handler that interrupts `f`. (`f` itself never calls
///   [`with_slot`](Self::with_slot), so a platform need not tell the two apart.)
/// - What the last holder of a slot stored is visible to the next, wherever that runs: a slot moves from CPU to CPU, or
///   from thread to thread, by something that synchronises.
/// - `f` is called on the caller's CPU (or thread), at most once, before the method returns, and stays there: a holder is
///   not moved to another CPU while it has the slot, unless all it did moves with it, as with threads.
/// - A slot's number is below [`slots`](Self::slots), which always returns the same.
/// - [`fence_all`](Self::fence_all) is a full memory barrier of its caller's. Where any slot was made by
///   [`LocalSlot::with_light_fence`], every CPU on which such a slot may be in use passes a full memory barrier, too, between
///   the beginning and the end of the call.
/// - Clones, and handles such as an `Arc`, are the same platform: all of the above goes for all of them together.
/// - [`number`](Self::number) always returns the same, which that of no other platform is, unless it is
///   [`PlatformNumber::NONE`].
/// - [`slot_released`](PlatformEvents::slot_released) is called while nobody has the slot, and before it is lent again.
///
/// Of the clock and the timer no unsafe code relies on anything; lazy protection's window does.
pub unsafe trait Platform: Send + Sync + 'static {
    /// How many local slots there are. It never changes.
    fn slots(&self) -> usize;

    /// Who it is: a number that was made with it, by [`PlatformNumber::new`].
    ///
    /// A page table keeps turns for each slot, and an [`IovaSpace`](crate::iova::IovaSpace) lists, of *one* platform: the first
    /// that is used with it. Callers with another, or with one that does not say who it is, go by a lock, which is slower and as
    /// safe. Where a page table must wait for the turns of all others, to [reclaim](crate::pgtable::PageTable::reclaim) tables or
    /// to split a page of several entries, and where a space is to take back what all CPUs keep, nothing is done for a platform
    /// whose barrier would not reach them.
    #[inline]
    fn number(&self) -> PlatformNumber {
        PlatformNumber::NONE
    }

    /// Lends the caller a slot of its own for the length of `f`, or `None` where all are taken.
    ///
    /// `f` never blocks on hardware, never calls `with_slot` again, and takes bounded time, however much there is to do:
    /// what is long is done in slices, each with a slot of its own. A slice is at the most 64 ranges, of which each may
    /// take 64 others out of a list, O(log n) for each; or all CPUs' queues, counts or lists, a lock or a few words each (flushes,
    /// and figures such as [`Domain::usage`](crate::domain::Domain::usage)); or the slots of one area or one run of a
    /// bounce pool, a bit or a few words each.
    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R;

    /// As [`with_slot`](Self::with_slot), but where finding the slot takes more than a few instructions, `None`
    /// without a call of `f`: then the caller goes another way, which uses `with_slot`.
    ///
    /// It keeps the fast paths free of calls, and so of registers saved for them.
    #[inline]
    fn with_slot_at_hand<R>(&self, f: impl FnOnce(&LocalSlot<'_>) -> R) -> Option<R> {
        self.with_slot(|slot| slot.map(f))
    }

    /// Nanoseconds since some fixed time; never goes backwards. Called with a slot lent and locks held, too: it must
    /// not block, nor call [`with_slot`](Self::with_slot).
    fn now_ns(&self) -> u64;

    /// Makes what the caller has stored visible to every CPU that takes a slot from now on, and what they
    /// stored visible to the caller. Rare.
    ///
    /// A full fence of the caller's own is enough where slots are made by [`LocalSlot::new`]. With
    /// [`LocalSlot::with_light_fence`] it must interrupt every CPU (an inter-processor interrupt,
    /// `membarrier`).
    fn fence_all(&self) {
        fence(Ordering::SeqCst);
    }

    /// Has `events` told of timers and of slots that are given up, from now on until it is dropped.
    fn register(&self, events: Weak<dyn PlatformEvents>);

    /// Asks for [`PlatformEvents::timer`] to be called at `deadline_ns`, or soon after. Called with no lock
    /// held and no slot lent; must not call back at once.
    ///
    /// A later deadline never takes the place of an earlier one that is still to come. It may be forgotten for that: a
    /// call covers everything that waits by then, and who waits longer asks again. More calls than were asked for do
    /// no harm but the flushes that they cost.
    fn wake_at(&self, deadline_ns: u64);
}

/// Entries of one page table: 512 words, 4 KiB.
pub const TABLE_ENTRIES: usize = 512;

/// A frame of page table as the hardware and the library share it.
pub type Table = [AtomicU64; TABLE_ENTRIES];

/// The size in bytes of a [frame](Frames).
pub const FRAME_SIZE: u64 = 4096;

/// Physical memory for page tables and coherent buffers, in frames of 4 KiB that the CPU and the IOMMU's
/// walker both reach.
///
/// # Safety
/// What [`alloc`](Self::alloc) and [`alloc_within`](Self::alloc_within) return is as their documentation says: below 2^52, aligned, zeroed, and nobody
/// else's until it is freed; [`table`](Self::table) gives the words of that very memory. A handle (an `Arc`,
/// say) that is kept keeps the memory there.
pub unsafe trait Frames: Send + Sync + 'static {
    /// `count` frames in a row, all zero, aligned to `count` rounded up to a power of two; `None` when there
    /// are none (or for a `count` of 0). May allocate; must not wait for an I/O.
    fn alloc(&self, count: usize) -> Option<PhysAddr>;

    /// As [`alloc`](Self::alloc), of frames that end at `last` at the most, for devices that reach no further. `None` when
    /// there are none there.
    ///
    /// Unless an implementation that knows where its frames are does better, it takes any, and gives back at once what is
    /// beyond.
    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        let first = self.alloc(count)?;
        let end = (count as u64).checked_mul(FRAME_SIZE).and_then(|bytes| first.checked_add(bytes - 1));
        if end.is_some_and(|end| end <= last) {
            return Some(first);
        }
        // SAFETY: they are of the call above, and nobody has seen them.
        unsafe { self.free(first, count) };
        None
    }

    /// Takes back `count` frames that [`alloc`](Self::alloc) or [`alloc_within`](Self::alloc_within) gave out together.
    ///
    /// # Safety
    /// `first` and `count` are of one earlier `alloc` or `alloc_within` of this value, not freed since, and nobody (no walker
    /// either) uses the frames from now on.
    unsafe fn free(&self, first: PhysAddr, count: usize);

    /// Whether the IOMMU's walker sees what CPUs store without being told, and in the order in which they release it, as
    /// another CPU would (on Arm: it is of the inner shareable domain, the only one for which Rust's atomics order stores).
    /// Where it does not, [`clean`](Self::clean) is called after each change; that orders what was stored before it, for
    /// the walker, before what is stored after it (on Arm by a barrier of the walker's domain).
    const COHERENT: bool = true;

    /// Makes stores to `words`, which lie in one frame, visible to a walker that is not coherent: writes the
    /// cache lines back, once each, and waits for that. Never called where the walker is coherent.
    fn clean(&self, words: &[AtomicU64]) {
        let _ = words;
    }

    /// The words of the frame at `frame`.
    ///
    /// # Safety
    /// `frame` lies in what an `alloc` of this value gave out, and is not freed while the reference lives.
    unsafe fn table(&self, frame: PhysAddr) -> &Table;
}

/// Memory that the CPU copies for devices: between bounce buffers, made of [frames](Frames), and the buffers that
/// drivers name.
///
/// # Safety
/// Both methods write the bytes named, all of them, and nothing else.
pub unsafe trait CopyMemory: Frames {
    /// Copies `len` bytes from `from` to `to`, of any alignment, across any number of frames. A device may be changing
    /// them meanwhile: what is copied then is any mixture of old and new bytes. Never waits; O(len).
    ///
    /// # Safety
    /// All bytes of both ranges are memory that the CPU reaches. The ranges do not overlap, and nobody but devices
    /// (and those who access it as atomics) touches either meanwhile.
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64);

    /// Sets `len` bytes at `at` to 0.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn zero(&self, at: PhysAddr, len: u64);
}

// SAFETY: everything is passed on to `T`, which promises the same for all its handles together.
unsafe impl<T: Platform> Platform for Arc<T> {
    fn slots(&self) -> usize {
        T::slots(self)
    }

    #[inline]
    fn number(&self) -> PlatformNumber {
        T::number(self)
    }

    #[inline]
    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        T::with_slot(self, f)
    }

    #[inline(always)]
    fn with_slot_at_hand<R>(&self, f: impl FnOnce(&LocalSlot<'_>) -> R) -> Option<R> {
        T::with_slot_at_hand(self, f)
    }

    fn now_ns(&self) -> u64 {
        T::now_ns(self)
    }

    fn fence_all(&self) {
        T::fence_all(self);
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) {
        T::register(self, events);
    }

    fn wake_at(&self, deadline_ns: u64) {
        T::wake_at(self, deadline_ns);
    }
}

// SAFETY: everything is passed on to `T`, which promises the same.
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

    fn clean(&self, words: &[AtomicU64]) {
        T::clean(self, words);
    }

    #[inline]
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { T::table(self, frame) }
    }
}

// SAFETY: everything is passed on to `T`, which promises the same.
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
}
