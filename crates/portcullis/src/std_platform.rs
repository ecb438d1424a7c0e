//! The ready-made [`Platform`] for programs on an operating system: a slot for each thread, the system's
//! monotonic clock, and a thread that keeps the timers.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::thread_local;
use std::time::{Duration, Instant};
use std::vec::Vec;

use crate::platform::{LocalSlot, Platform, PlatformEvents};

/// Slots that [`StdPlatform::new`] makes: threads beyond these share one slot.
pub const DEFAULT_SLOTS: usize = 64;

/// Threads as CPUs. Cheap to clone; the clones are one platform.
///
/// A thread gets a slot with its first call and keeps it until it ends; then the slot's caches are drained,
/// as when a CPU is unplugged, and the next thread may have it. While all slots are taken, further threads
/// work without one.
#[derive(Debug, Clone)]
pub struct StdPlatform {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    slots: usize,
    start: Instant,
    free_slots: Mutex<Vec<usize>>,
    listeners: Mutex<Vec<Listener>>,
    timer: Mutex<TimerState>,
    timer_changed: Condvar,
}

struct Listener(Weak<dyn PlatformEvents>);

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}

#[derive(Debug, Default)]
struct TimerState {
    deadline: Option<Duration>,
    running: bool,
}

/// A thread's hold on a slot of one platform.
struct Lease {
    platform: Weak<Inner>,
    slot: usize,
}

thread_local! {
    /// This thread's slots: one for each platform it has used, hardly ever more than one.
    static LEASES: RefCell<Vec<Lease>> = const { RefCell::new(Vec::new()) };
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StdPlatform {
    /// A platform with [`DEFAULT_SLOTS`] slots.
    pub fn new() -> Self {
        Self::with_slots(DEFAULT_SLOTS)
    }

    /// A platform with `slots` slots (0 is possible: then every thread shares).
    pub fn with_slots(slots: usize) -> Self {
        let inner = Inner {
            slots,
            start: Instant::now(),
            free_slots: Mutex::new((0..slots).rev().collect()),
            listeners: Mutex::default(),
            timer: Mutex::default(),
            timer_changed: Condvar::new(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// This thread's slot, taken now if it has none; `None` where none is left or the thread is ending.
    fn slot(&self) -> Option<usize> {
        let find = |leases: &RefCell<Vec<Lease>>| {
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
        LEASES.try_with(find).ok().flatten()
    }
}

impl Default for StdPlatform {
    fn default() -> Self {
        Self::new()
    }
}

impl Inner {
    /// Whoever listens and still lives. The list is copied, so that no lock is held while they are called.
    fn listeners(&self) -> Vec<Arc<dyn PlatformEvents>> {
        let mut listeners = lock(&self.listeners);
        listeners.retain(|listener| listener.0.strong_count() > 0);
        listeners.iter().filter_map(|listener| listener.0.upgrade()).collect()
    }

    /// Waits for the next deadline, as long as there is one; `false` when the timer thread is to end.
    fn wait_for_deadline(&self) -> bool {
        let mut timer = lock(&self.timer);
        loop {
            let Some(deadline) = timer.deadline else {
                timer.running = false;
                return false;
            };
            let left = deadline.saturating_sub(self.start.elapsed());
            if left.is_zero() {
                timer.deadline = None;
                return true;
            }
            let waited = self.timer_changed.wait_timeout(timer, left);
            timer = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Platform for StdPlatform {
    fn slots(&self) -> usize {
        self.inner.slots
    }

    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        f(self.slot().map(LocalSlot::new).as_ref())
    }

    fn now_ns(&self) -> u64 {
        // 584 years of nanoseconds fit.
        self.inner.start.elapsed().as_nanos() as u64
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) {
        lock(&self.inner.listeners).push(Listener(events));
    }

    fn wake_at(&self, deadline_ns: u64) {
        let deadline = Duration::from_nanos(deadline_ns);
        let mut timer = lock(&self.inner.timer);
        if timer.deadline.is_some_and(|earlier| earlier <= deadline) {
            // That one will find everybody who waits.
            return;
        }
        timer.deadline = Some(deadline);
        if timer.running {
            self.inner.timer_changed.notify_one();
            return;
        }
        let inner = Arc::clone(&self.inner);
        let keep_time = move || {
            while inner.wait_for_deadline() {
                inner.listeners().iter().for_each(|listener| listener.timer());
            }
        };
        // Without a thread there is no timer; the next unmap's full queue or an explicit flush still works.
        timer.running = thread::Builder::new().name("portcullis-timer".into()).spawn(keep_time).is_ok();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(platform) = self.platform.upgrade() else {
            return;
        };
        // First empty the slot, then let another thread have it.
        platform.listeners().iter().for_each(|listener| listener.slot_released(self.slot));
        lock(&platform.free_slots).push(self.slot);
    }
}
