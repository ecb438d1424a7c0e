//! The ready-made [`Platform`] for programs on an operating system: it lends each thread a CPU, until the thread ends.
//! The clock is the system's monotonic one, and threads of its own run the timers. This layer uses `addr`, `heap` and
//! `platform`.

mod barrier;
mod timer;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::vec::Vec;
use std::{format, io, thread_local};

use self::timer::Timer;
use crate::heap::{self, OutOfMemory};
use crate::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};

/// The CPUs of [`StdPlatform::new`]. Further threads work without a CPU. (It is small under Miri, which takes a quarter
/// of a second for a domain's per-CPU values.)
pub const DEFAULT_CPUS: usize = if cfg!(miri) { 4 } else { 64 };

/// Threads as CPUs. Cheap to clone; the clones are one platform.
///
/// A thread gets a CPU with its first call (which allocates) and holds it until it ends. Then the CPU's caches are
/// drained, as when a CPU is unplugged, and another thread may have it. While all CPUs are taken, further threads work
/// without one.
///
/// The timers need a timer thread, and one worker more than the most [listeners](PlatformEvents) that were ever in a
/// call at the same time: a domain whose flush blocks, as its hardware is silent, occupies a worker and delays no other
/// domain's. A panic of a listener, in a call or when its last handle is dropped here, ends only that call. These
/// threads take no CPUs, and end with the platform's last handle.
#[derive(Debug, Clone)]
pub struct StdPlatform {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    number: PlatformNumber,
    /// Whether [`barrier::all`] reaches every thread.
    light_fence: bool,
    /// The platform's name in [`LAST`]: its number; or, with heavy fences, the complement, so that `with_cpu_fast`,
    /// which compares with the number, never finds a CPU.
    name: u64,
    cpus: usize,
    start: Instant,
    free_cpus: Mutex<Vec<usize>>,
    timer: Timer,
}

struct Lease {
    platform: Weak<Inner>,
    cpu: usize,
}

thread_local! {
    /// The platform that this thread used last, and the thread's CPU there. Nearly every call finds its CPU here.
    static LAST: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
    /// This thread's CPUs: one for each platform it has used, hardly ever more than one.
    static LEASES: RefCell<Vec<Lease>> = const { RefCell::new(Vec::new()) };
    static WITHOUT: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread work without CPUs from now on, which leaves them to threads that do I/O.
fn go_without_cpus() {
    WITHOUT.set(true);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StdPlatform {
    /// Makes a platform with [`DEFAULT_CPUS`] CPUs. Context: allocates, and starts the timer thread.
    ///
    /// # Panics
    /// If the system has no thread to give, for which [`try_new`](Self::try_new) has an error.
    pub fn new() -> Self {
        Self::with_cpus(DEFAULT_CPUS)
    }

    /// As [`new`](Self::new), without that panic.
    ///
    /// # Errors
    /// The system has no thread for the timers: nothing would end lazy protection's window. The text says what to do.
    pub fn try_new() -> io::Result<Self> {
        Self::with_fence(DEFAULT_CPUS, barrier::register())
    }

    /// As [`new`](Self::new), with `cpus` CPUs. With 0, every thread works without one.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn with_cpus(cpus: usize) -> Self {
        Self::with_fence(cpus, barrier::register()).expect("the system starts a thread for the timers")
    }

    fn with_fence(cpus: usize, light_fence: bool) -> io::Result<Self> {
        let start = Instant::now();
        let no_thread = |error: io::Error| {
            let text = format!(
                "the system has no thread to give for the timers ({error}): end threads or processes, or allow more of them \
                 (ulimit -u; TasksMax of a service; pids.max of a cgroup)"
            );
            io::Error::new(error.kind(), text)
        };
        let number = PlatformNumber::new();
        let inner = Inner {
            number,
            light_fence,
            name: if light_fence { number.0 } else { !number.0 },
            cpus,
            start,
            free_cpus: Mutex::new((0..cpus).rev().collect()),
            timer: Timer::start(start).map_err(no_thread)?,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// (`LocalKey::get` is not inlined into other crates' code.)
    #[inline]
    fn last() -> (u64, usize) {
        LAST.try_with(Cell::get).unwrap_or((0, 0))
    }

    #[cold]
    fn leased_cpu(&self) -> Option<usize> {
        let find = |leases: &RefCell<Vec<Lease>>| {
            if WITHOUT.get() {
                return None;
            }
            let mut leases = leases.try_borrow_mut().ok()?;
            let ours = Arc::as_ptr(&self.inner);
            if let Some(lease) = leases.iter().find(|lease| lease.platform.as_ptr() == ours) {
                return Some(lease.cpu);
            }
            leases.retain(|lease| lease.platform.strong_count() > 0);
            // Without memory for the lease, this call gets no CPU.
            leases.try_reserve(1).ok()?;
            let cpu = lock(&self.inner.free_cpus).pop()?;
            leases.push(Lease { platform: Arc::downgrade(&self.inner), cpu });
            Some(cpu)
        };
        let cpu = LEASES.try_with(find).ok().flatten()?;
        LAST.set((self.inner.name, cpu));
        Some(cpu)
    }
}

impl Default for StdPlatform {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: 1 and 2: a thread takes its CPU off the free ones, under a lock, and puts it back, under the same lock, when
// it ends; `LAST` names the CPU by the platform's name, which is never used twice. 3: `f` runs on the calling thread.
// 4: the free CPUs are `0..cpus`. 5: `barrier::all` interrupts every thread of the process, and is registered before
// any CPU is light; otherwise `fence_all` is a fence. 6: clones share `Inner`. 7: the number is new. 8: `Lease::drop`
// resets `LAST`, then tells the listeners, then puts the CPU back.
unsafe impl Platform for StdPlatform {
    fn cpus(&self) -> usize {
        self.inner.cpus
    }

    #[inline]
    fn number(&self) -> PlatformNumber {
        self.inner.number
    }

    #[inline]
    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // Takes a CPU for the thread if it has none; there may be none left, or the thread may be ending.
        let (name, last) = Self::last();
        let cpu = if name == self.inner.name { Some(last) } else { self.leased_cpu() };
        let light = self.inner.light_fence;
        f(cpu
            .map(|cpu| {
                // SAFETY: `LocalCpu::new`, 1 and 2: this thread has leased the CPU, which is below `cpus`.
                // `with_light_fence`, 2: with `light`, `fence_all` interrupts all threads.
                unsafe { if light { LocalCpu::with_light_fence(cpu) } else { LocalCpu::new(cpu) } }
            })
            .as_ref())
    }

    // Always inlined: if the fast path `f` is long, the compiler would otherwise make a function of the two, which
    // returns its result through memory.
    #[inline(always)]
    fn with_cpu_fast<R>(&self, f: impl FnOnce(&LocalCpu<'_>) -> R) -> Option<R> {
        let (name, cpu) = Self::last();
        // Never equal with heavy fences: beside a fence in each section, the call of `with_cpu` makes no difference.
        (name == self.inner.number.0).then(|| {
            // SAFETY: `with_light_fence`, 1: this thread has leased the CPU. 2: the number is the platform's name only
            // if `fence_all` interrupts all threads.
            f(&unsafe { LocalCpu::with_light_fence(cpu) })
        })
    }

    fn fence_all(&self) {
        if self.inner.light_fence {
            // A full barrier of this thread's own, too: membarrier(2) orders its caller's accesses before and after the
            // call, and the compiler moves none across an opaque call.
            barrier::all();
        } else {
            fence(Ordering::SeqCst);
        }
    }

    fn now_ns(&self) -> u64 {
        // 584 years of nanoseconds fit.
        self.inner.start.elapsed().as_nanos() as u64
    }

    fn register(&self, events: heap::Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.inner.timer.register(events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.inner.timer.wake_at(Duration::from_nanos(deadline_ns));
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The thread is ending: from here on it works without a CPU.
        LAST.set((0, 0));
        let Some(platform) = self.platform.upgrade() else {
            return;
        };
        // First empty the CPU's lists, then let another thread have it.
        platform.timer.tell_all(|listener| listener.cpu_released(self.cpu));
        lock(&platform.free_cpus).push(self.cpu);
    }
}

#[cfg(test)]
#[path = "../../tests/inside/std_platform.rs"]
mod tests;
