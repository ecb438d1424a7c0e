//! CPUs, a clock and a timer: a CPU is lent to one caller at a time, so per-CPU values need no lock.

use alloc::sync::Arc;
use core::marker::PhantomData;

use crate::heap::{OutOfMemory, Shared, Weak};
use crate::sync::{Ordering, Settled, fence, unique};

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

    /// Orders the holder's earlier stores before its later loads, in relation to a [`fence_all`](Platform::fence_all)
    /// on another CPU.
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

/// The platform to which a structure's per-CPU values belong: the first that it is used with. A caller with another
/// platform, or with one without a number, gets no CPU.
#[derive(Debug, Default)]
pub(crate) struct OnePlatform(Settled);

impl OnePlatform {
    /// Stored so that no platform ever becomes the one.
    const NOBODYS: u64 = u64::MAX;

    /// Whether `platform` is the one. The first `platform` becomes it. Costs a load and a compare.
    #[inline]
    pub fn is<P: Platform>(&self, platform: &P) -> bool {
        self.0.is(platform.number().0)
    }

    /// Whether a barrier of `platform` reaches all CPUs that this structure has, or will have, values for. That is so
    /// if `platform` is the one; or if it has no number, and no platform is the one yet: then this call stores
    /// `NOBODYS`.
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
    /// Called when a deadline of [`Platform::wake_at`] has passed. The call may wait for the listener's hardware, for
    /// as long as that does not answer. A platform must not delay other listeners meanwhile, as their windows stay
    /// open. It makes one call of a listener's `timer` at a time, and another one for a deadline that passes during the
    /// call.
    ///
    /// Context: waits. The caller has no CPU lent, and is no interrupt handler that may have interrupted a holder of
    /// one, as the call may wait for the sections of all CPUs.
    fn timer(&self);

    /// Called when the CPU `index` is unplugged (or its thread has ended), to free what is cached there. Context: as
    /// for [`timer`](Self::timer).
    fn cpu_released(&self, index: usize);
}

/// The weak reference by which a platform calls a listener.
pub fn events_of<T: PlatformEvents + 'static>(listener: &Shared<T>) -> Weak<dyn PlatformEvents> {
    // SAFETY: `Shared::cast`, 1: an unsizing coercion.
    let listener = unsafe { Shared::cast::<dyn PlatformEvents>(listener.clone(), |counted| counted) };
    Shared::downgrade(&listener)
}

/// Supplies the library with CPUs, a barrier, a clock and a timer. A kernel lends the current CPU with preemption off
/// (with interrupts off, if it maps from interrupt handlers); [`StdPlatform`](crate::std_platform::StdPlatform) lends
/// each thread a CPU for its life.
///
/// # Safety
/// The holder of a CPU uses the CPU's values without atomic read-modify-writes, and tables are freed once no holder of
/// a CPU can have seen them.
///
/// 1. **A CPU is lent to one caller at a time.** From the call of `f` until its return no other closure is given the
///    same CPU: in no other thread, on no other processor, in no interrupt handler that interrupts `f`. (`f` itself
///    never calls [`with_cpu`](Self::with_cpu), so a platform need not detect nested calls.)
/// 2. What the last holder of a CPU stored is visible to the next, wherever that runs: a CPU moves between processors,
///    or threads, only by an operation that synchronises them.
/// 3. `f` is called on the caller's processor (or thread), at most once, before the method returns, and stays there; it
///    may move to another processor only as an operating system moves a thread, with its stores visible there.
/// 4. A CPU's number is below [`cpus`](Self::cpus), which always returns the same.
/// 5. [`fence_all`](Self::fence_all) is a full memory barrier for its caller. If any proof was made by
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
    /// The number of CPUs. It never changes.
    fn cpus(&self) -> usize;

    /// The number that was made with the platform by [`PlatformNumber::new`].
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
    /// each with a CPU of its own. A slice covers at most one of:
    ///
    /// - 64 ranges, each of which may move 64 others between a list and the bitmap, at O(log n) each;
    /// - the queues, counts or lists of all CPUs, at a lock or a few words each (flushes, and figures such as
    ///   [`Domain::stats`](crate::domain::Domain::stats));
    /// - 32 nodes and leaves of a space's bitmap, at 512 bits each;
    /// - the slots of one area or one run of a bounce pool, at a bit or a few words each.
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
    /// to the caller. Called rarely. A full fence of the caller's own is enough if all proofs are made by
    /// [`LocalCpu::new`]. With [`LocalCpu::with_light_fence`] it must interrupt every processor (an inter-processor
    /// interrupt, `membarrier`).
    fn fence_all(&self) {
        fence(Ordering::SeqCst);
    }

    /// Registers `events`, which the platform calls for timers and released CPUs until its last owner drops it.
    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory>;

    /// Requests a call of [`PlatformEvents::timer`] at `deadline_ns`, or soon after. Context: called with no lock held
    /// and no CPU lent; must not call back before it returns.
    ///
    /// A later deadline never replaces an earlier one that is still to come. The platform may forget the later one: a
    /// call covers everything that waits by then, and a listener that waits longer requests another. Extra calls are
    /// harmless, and cost a flush each.
    fn wake_at(&self, deadline_ns: u64);
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
