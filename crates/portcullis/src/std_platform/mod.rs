//! The ready-made [`Platform`] for programs on an operating system: it lends each thread a slot
//! that no other thread has until that one ends. The clock is the system's monotonic one, and
//! threads of its own keep the timers.

mod barrier;
mod timer;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread_local;
use std::time::{Duration, Instant};
use std::vec::Vec;

use self::timer::Timer;
use crate::platform::{LocalSlot, Platform, PlatformEvents, PlatformNumber};

/// The number of slots that [`StdPlatform::new`] makes. Threads beyond it work without a slot. (It
/// is small under Miri, which takes a quarter of a second for what a domain keeps for each slot.)
pub const DEFAULT_SLOTS: usize = if cfg!(miri) { 4 } else { 64 };

/// Threads as CPUs. Cheap to clone; the clones are one platform.
///
/// A thread gets a slot with its first call (which allocates) and keeps it until it ends. Then the
/// slot's caches are drained, as when a CPU is unplugged, and the next thread may have it. While
/// all slots are taken, further threads work without one.
///
/// The timers need a thread that keeps the time, and one worker more than the most
/// [listeners](PlatformEvents) that were ever in a call at the same time: a domain whose flush
/// blocks, as its hardware is silent, keeps a worker to itself and delays no other domain's. A
/// listener that panics, in a call or when its last handle is dropped here, ends nothing but that
/// call. These threads take no slots, and end with the last handle on the platform.
#[derive(Debug, Clone)]
pub struct StdPlatform {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    number: PlatformNumber,
    /// Whether [`barrier::all`] reaches every thread.
    light_fence: bool,
    /// What [`LAST`] names the platform by: its number; where fences are heavy the complement, so that `with_slot_fast`,
    /// which compares with the number, never finds a slot.
    name: u64,
    slots: usize,
    start: Instant,
    free_slots: Mutex<Vec<usize>>,
    timer: Timer,
}

/// A thread's hold on a slot of one platform.
struct Lease {
    platform: Weak<Inner>,
    slot: usize,
}

thread_local! {
    /// The platform that this thread used last, and the thread's slot there. Nearly every call
    /// finds its slot here.
    static LAST: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
    /// This thread's slots: one for each platform it has used, hardly ever more than one.
    static LEASES: RefCell<Vec<Lease>> = const { RefCell::new(Vec::new()) };
    /// Whether this thread gets no slots.
    static WITHOUT: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread work without slots from now on, which leaves them to threads that do I/O.
fn go_without_slots() {
    WITHOUT.set(true);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StdPlatform {
    /// Makes a platform with [`DEFAULT_SLOTS`] slots. Starts the thread that keeps its timers.
    pub fn new() -> Self {
        Self::with_slots(DEFAULT_SLOTS)
    }

    /// Makes a platform with `slots` slots. With 0, every thread works without one.
    pub fn with_slots(slots: usize) -> Self {
        Self::with_fence(slots, barrier::register())
    }

    /// Makes a platform with `slots` slots; `light_fence` says whether [`barrier::all`] works.
    fn with_fence(slots: usize, light_fence: bool) -> Self {
        let start = Instant::now();
        let number = PlatformNumber::new();
        let inner = Inner {
            number,
            light_fence,
            name: if light_fence { number.0 } else { !number.0 },
            slots,
            start,
            free_slots: Mutex::new((0..slots).rev().collect()),
            timer: Timer::start(start),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Returns what [`LAST`] holds for this thread. (`LocalKey::get` is not inlined into other
    /// crates' code.)
    #[inline]
    fn last() -> (u64, usize) {
        LAST.try_with(Cell::get).unwrap_or((0, 0))
    }

    #[cold]
    fn leased_slot(&self) -> Option<usize> {
        let find = |leases: &RefCell<Vec<Lease>>| {
            if WITHOUT.get() {
                return None;
            }
            let mut leases = leases.try_borrow_mut().ok()?;
            let ours = Arc::as_ptr(&self.inner);
            if let Some(lease) = leases.iter().find(|lease| lease.platform.as_ptr() == ours) {
                return Some(lease.slot);
            }
            let slot = lock(&self.inner.free_slots).pop()?;
            leases.retain(|lease| lease.platform.strong_count() > 0);
            leases.push(Lease { platform: Arc::downgrade(&self.inner), slot });
            Some(slot)
        };
        let slot = LEASES.try_with(find).ok().flatten()?;
        LAST.set((self.inner.name, slot));
        Some(slot)
    }
}

impl Default for StdPlatform {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: a slot is taken off the free ones, under a lock, by the thread that leases it, and put back, under the same lock,
// when that thread ends and its listeners have been told; in between, no other thread has it. `LAST` names it by the
// platform's name, which is never used twice, and is reset before it is put back. A thread takes it with itself.
// `barrier::all` interrupts every thread of the process; it is registered before any slot is called light.
unsafe impl Platform for StdPlatform {
    fn slots(&self) -> usize {
        self.inner.slots
    }

    #[inline]
    fn number(&self) -> PlatformNumber {
        self.inner.number
    }

    #[inline]
    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        // The thread's slot is taken now if it has none; there may be none left, or the thread may be ending.
        let (name, last) = Self::last();
        let slot = if name == self.inner.name { Some(last) } else { self.leased_slot() };
        let light = self.inner.light_fence;
        f(slot
            .map(|slot| {
                // SAFETY: this thread has leased the slot; `light` says that `fence_all` interrupts all threads.
                unsafe { if light { LocalSlot::with_light_fence(slot) } else { LocalSlot::new(slot) } }
            })
            .as_ref())
    }

    // Always: `f` is the fast path itself. Where that is long, the compiler makes a function of the two by itself, and the
    // caller a call, with results through memory.
    #[inline(always)]
    fn with_slot_fast<R>(&self, f: impl FnOnce(&LocalSlot<'_>) -> R) -> Option<R> {
        let (name, slot) = Self::last();
        // If each turn needs a fence, one more call makes no difference.
        (name == self.inner.number.0).then(|| {
            // SAFETY: this thread has leased the slot, and the number is the platform's name only where `fence_all` interrupts
            // all threads.
            f(&unsafe { LocalSlot::with_light_fence(slot) })
        })
    }

    fn fence_all(&self) {
        if self.inner.light_fence {
            // A full barrier of this thread's own, too: membarrier(2) orders its caller's accesses before the call with those
            // after it, and the compiler moves none across a call that it cannot see into.
            barrier::all();
        } else {
            fence(Ordering::SeqCst);
        }
    }

    fn now_ns(&self) -> u64 {
        // 584 years of nanoseconds fit.
        self.inner.start.elapsed().as_nanos() as u64
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) {
        self.inner.timer.register(events);
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.inner.timer.wake_at(Duration::from_nanos(deadline_ns));
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The thread is ending: from here on it works without a slot.
        LAST.set((0, 0));
        let Some(platform) = self.platform.upgrade() else {
            return;
        };
        // First empty the slot, then let another thread have it.
        for events in platform.timer.listeners() {
            timer::tell(&events, |listener| listener.slot_released(self.slot));
        }
        lock(&platform.free_slots).push(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use std::{format, vec};

    use super::*;

    /// Returns whether the owner of `slot` needs no fence of its own.
    fn is_light(slot: &LocalSlot<'_>) -> bool {
        format!("{slot:?}").contains("light_fence: true")
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn owners_without_a_fence_have_others_who_make_all_cpus_pass_one() {
        let platform = StdPlatform::new();
        // `include/uapi/linux/membarrier.h`: register, then the barrier itself.
        let (register, all) = (1 << 4, 1 << 3);
        assert_eq!(barrier::COMMANDS.take(), [register]);
        let light = platform.with_slot(|slot| is_light(slot.unwrap()));
        assert_eq!(light, platform.inner.light_fence);
        platform.fence_all();
        assert_eq!(barrier::COMMANDS.take(), vec![all; usize::from(light)]);
        assert_eq!(platform.with_slot_fast(is_light), light.then_some(true));
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn the_barrier_is_used_where_the_system_has_it() {
        // SAFETY: the query, command 0, takes numbers and touches no memory.
        let commands = unsafe { libc::syscall(libc::SYS_membarrier, 0, 0, 0) };
        let (register, all) = (1 << 4, 1 << 3);
        let has = commands >= 0 && commands & register != 0 && commands & all != 0;
        assert_eq!(StdPlatform::new().inner.light_fence, has);
    }

    #[test]
    fn owners_pass_a_fence_themselves_where_the_system_has_none_for_all() {
        let platform = StdPlatform::with_fence(DEFAULT_SLOTS, false);
        assert!(!platform.with_slot(|slot| is_light(slot.unwrap())));
        assert_eq!(platform.with_slot_fast(is_light), None);
        platform.fence_all();
        assert!(barrier::COMMANDS.take().is_empty(), "the process is not registered");
    }
}
