//! The one place that names atomics and locks, so that the model checker's can take their place (`--cfg loom`). Three
//! modules have others, which the model checker need not see: `heap` (the counts of a `Shared`'s owners), `platform` (a
//! compiler fence) and `std_platform`.
//!
//! With `std` a lock sleeps. Without, it spins, and the embedder decides through
//! [`Platform::with_cpu`](crate::platform::Platform::with_cpu) whether interrupts are off meanwhile. So every lock of
//! this crate is taken inside such a call; or in code that no interrupt handler may call (revocations in `percpu`,
//! visits of flush queues, reclaims of tables, `DeviceTlbs`, and `SharedWaits` for a caller that waits for others,
//! which a driver keeps handlers away from meanwhile); or while a panic unwinds or a structure is dropped. No lock is
//! held while hardware works, except for a page table's reclaims and splits: a [`TicketLock`]. This layer uses no
//! other.

mod ticket_lock;

pub use ticket_lock::TicketLock;
#[cfg(feature = "parts")]
pub use ticket_lock::{Served, Ticket};

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};

#[cfg(loom)]
use loom::sync as imp;
#[cfg(all(not(loom), not(feature = "std")))]
use spin as imp;
#[cfg(all(not(loom), feature = "std"))]
use std::sync as imp;

/// Lets other threads run while the caller waits for one of them; without a scheduler, a hint to the processor.
pub fn pause() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(all(not(loom), feature = "std"))]
    std::thread::yield_now();
    #[cfg(not(any(loom, feature = "std")))]
    core::hint::spin_loop();
}

/// As [`pause`], for a caller that has polled `looks` times beside others that poll. The model checker would try all
/// orders of their loads, without end. Loads change no state, so from the third on it tries no further orders in that
/// execution.
#[inline]
pub fn pause_among(looks: u32) {
    #[cfg(loom)]
    if looks > 2 {
        loom::skip_branch();
    }
    let _ = looks;
    pause();
}

/// A hint to the core that the caller waits for another one.
#[inline]
pub fn spin() {
    #[cfg(coherence)]
    {
        unsafe extern "C" {
            /// Of the simulator that replaces ThreadSanitizer's library.
            safe fn coherence_spin();
        }
        coherence_spin();
    }
    if cfg!(loom) { pause() } else { core::hint::spin_loop() }
}

/// As [`spin()`], for a caller that has polled `looks` times, as [`pause_among`].
#[inline]
pub fn spin_among(looks: u32) {
    if cfg!(loom) { pause_among(looks) } else { spin() }
}

/// Prefetches the cache line of `place`, which the caller soon reads, so that lines of several places come at the same
/// time. A hint: `place` may be anything.
#[inline]
pub(crate) fn prefetch<T>(place: *const T) {
    #[cfg(coherence)]
    {
        unsafe extern "C" {
            /// Of the simulator that replaces ThreadSanitizer's library. It uses only the number.
            safe fn coherence_prefetch(address: usize);
        }
        coherence_prefetch(place.addr());
    }
    #[cfg(all(target_arch = "x86_64", not(any(loom, miri, coherence))))]
    // SAFETY: a prefetch never faults, and has no effect that the program sees. Each x86-64 has it, also where code may
    // not use SSE's registers.
    unsafe {
        core::arch::asm!("prefetcht0 [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(all(target_arch = "aarch64", not(any(loom, miri, coherence))))]
    // SAFETY: a prefetch never faults, and has no effect that the program sees.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    let _ = place;
}

/// A number for the calling thread, so that concurrent threads have different ones.
#[cfg(all(feature = "std", not(loom)))]
pub(crate) fn thread_number() -> usize {
    use core::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    std::thread_local! {
        static NUMBER: core::cell::Cell<usize> = const { core::cell::Cell::new(usize::MAX) };
    }
    let number = NUMBER.get();
    if number != usize::MAX {
        return number;
    }
    // Relaxed: only the number counts.
    let number = NEXT.fetch_add(1, Ordering::Relaxed) & usize::MAX >> 1;
    NUMBER.set(number);
    number
}

/// The same without threads, from the stack's address. Kernels' stacks are 16 KiB apart, or more.
#[cfg(not(all(feature = "std", not(loom))))]
pub(crate) fn thread_number() -> usize {
    let here = 0_u8;
    if cfg!(loom) { 0 } else { (&raw const here).addr() >> 14 }
}

/// How many threads run at once; `u64::MAX` without a scheduler.
pub fn cores() -> u64 {
    #[cfg(all(not(loom), feature = "std"))]
    return std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    #[cfg(not(all(not(loom), feature = "std")))]
    u64::MAX
}

/// Returns a number that no other call returns, never 0.
pub(crate) fn unique() -> u64 {
    // Not the model checker's atomic: the order of calls decides only which caller gets which number.
    static LAST: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);
    // Relaxed: only the number counts. 2^64 calls do not happen.
    LAST.fetch_add(1, core::sync::atomic::Ordering::Relaxed).wrapping_add(1)
}

/// A number, not 0, that is set once. It orders no other accesses, so it is not the model checker's atomic.
#[derive(Debug)]
pub(crate) struct Settled(core::sync::atomic::AtomicU64);

impl Default for Settled {
    fn default() -> Self {
        Self(core::sync::atomic::AtomicU64::new(Self::NOT_SET))
    }
}

impl Settled {
    /// No platform's number, and not 0, which stands for a platform without one.
    const NOT_SET: u64 = u64::MAX - 1;

    /// Whether it is `number`. If it is not set yet, sets it first, unless `number` is 0.
    #[inline]
    pub(crate) fn is(&self, number: u64) -> bool {
        self.is_set_to(number) || self.settle(number)
    }

    #[inline]
    pub(crate) fn is_set_to(&self, number: u64) -> bool {
        // Relaxed: a caller that does not see it set tries to set it.
        self.0.load(core::sync::atomic::Ordering::Relaxed) == number
    }

    #[cold]
    fn settle(&self, number: u64) -> bool {
        let relaxed = core::sync::atomic::Ordering::Relaxed;
        let set = || self.0.compare_exchange(Self::NOT_SET, number, relaxed, relaxed);
        number != 0 && set().map_or_else(|now| now == number, |_| true)
    }
}

/// A lock around a `T`. Uncontended, lock and unlock take two atomic operations.
#[derive(Debug, Default)]
pub struct Mutex<T>(imp::Mutex<T>);

/// The lock of a [`Mutex`], held until it is dropped.
pub type MutexGuard<'a, T> = imp::MutexGuard<'a, T>;

impl<T> Mutex<T> {
    /// Makes a free lock around `value`.
    pub fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    /// Waits until the lock is free and takes it. A panic under the lock does not poison it: the data is consistent at
    /// every step.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        #[cfg(any(loom, feature = "std"))]
        return self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        #[cfg(not(any(loom, feature = "std")))]
        return self.0.lock();
    }
}
