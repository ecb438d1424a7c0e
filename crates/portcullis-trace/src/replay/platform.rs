//! A platform with the trace's CPUs and clock.
#![allow(unsafe_code, reason = "the trait is unsafe to implement: it makes a promise")]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use portcullis::heap::{OutOfMemory, Shared, Weak};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};

const MOST_CPUS: usize = 256;

/// Timers between two events, for each listener: its own two idle checks, and a window's end, have different times, and all listeners get
/// each.
const TIMERS: usize = 8;

/// For how long timers have work without events, in nanoseconds: windows end after 10 ms, and pools free their cached memory at their
/// second check, a second after the first.
const BUSY_NS: u64 = 8_000_000_000;

/// No timer is set.
const NEVER: u64 = u64::MAX;

/// The machine of a trace, replayed by one thread: [`at`](Self::at) sets the CPU and the time.
pub struct ReplayPlatform {
    cpus: usize,
    cpu: AtomicUsize,
    now_ns: AtomicU64,
    number: PlatformNumber,
    /// The earliest deadline, plus one; 0 without one.
    deadline: AtomicU64,
    listeners: Mutex<Vec<Weak<dyn PlatformEvents>>>,
}

impl std::fmt::Debug for ReplayPlatform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplayPlatform").field("cpu", &self.cpu).field("now_ns", &self.now_ns).finish()
    }
}

impl ReplayPlatform {
    /// A machine of `cpus` CPUs (at most 256; recorded CPU n is CPU n modulo that).
    pub fn new(cpus: usize) -> Self {
        Self {
            cpus: cpus.clamp(1, MOST_CPUS),
            number: PlatformNumber::new(),
            cpu: AtomicUsize::new(0),
            now_ns: AtomicU64::new(0),
            deadline: AtomicU64::new(0),
            listeners: Mutex::default(),
        }
    }

    /// Advances to `time_ns` on `cpu`. Runs earlier timers first, each at its own time, after calling `at_timer` with that time. Returns
    /// how many listener calls that made.
    ///
    /// A timer that rearms itself, as a pool's does as long as it has buffers, would run for ever in a recording whose time leaps. Nothing
    /// else happens meanwhile: after a few of its own timers each listener has flushed, and freed its cached memory. So after `TIMERS` for
    /// each listener, or `BUSY_NS`, the rest of the time passes at once, with its deadlines at its end.
    pub fn at(&self, cpu: u32, time_ns: u64, mut at_timer: impl FnMut(u64)) -> u64 {
        let (mut timers, mut told) = (0, 0);
        let busy_until = self.now_ns().saturating_add(BUSY_NS);
        loop {
            let deadline = self.deadline();
            if deadline > time_ns || deadline == NEVER {
                break;
            }
            let listeners = self.listeners();
            if timers > TIMERS * (listeners.len() + 1) || timers > 0 && deadline > busy_until {
                // Not before its time: the next event runs it.
                break;
            }
            timers += 1;
            told += listeners.len() as u64;
            self.deadline.store(0, Ordering::Relaxed);
            let due = deadline.max(self.now_ns());
            self.now_ns.store(due, Ordering::Relaxed);
            at_timer(due);
            for listener in listeners {
                listener.timer();
            }
        }
        self.now_ns.store(time_ns.max(self.now_ns()), Ordering::Relaxed);
        self.cpu.store(cpu as usize % self.cpus, Ordering::Relaxed);
        told
    }

    fn deadline(&self) -> u64 {
        self.deadline.load(Ordering::Relaxed).checked_sub(1).unwrap_or(NEVER)
    }

    fn listeners(&self) -> Vec<Shared<dyn PlatformEvents>> {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.iter().filter_map(Weak::upgrade).collect()
    }
}

// SAFETY: one thread runs all CPUs, so no CPU is lent twice at once; its own stores need no fence.
unsafe impl Platform for ReplayPlatform {
    fn cpus(&self) -> usize {
        self.cpus
    }

    fn number(&self) -> PlatformNumber {
        self.number
    }

    #[inline]
    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // One thread replays all CPUs, and sees its own stores in order: the fence that a real machine's `fence_all` would cause has no CPU
        // to reach.
        // SAFETY: for that reason, and no CPU is lent twice at once.
        f(Some(&unsafe { LocalCpu::with_light_fence(self.cpu.load(Ordering::Relaxed)) }))
    }

    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(events);
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        let earliest = self.deadline().min(deadline_ns);
        self.deadline.store(earliest.saturating_add(1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use portcullis::platform::events_of;

    use super::*;

    #[test]
    fn the_timer_runs_at_the_earliest_time_that_was_asked_for() {
        let platform = ReplayPlatform::new(1);
        let asked = [70, 50, 60, 50, 0].map(|deadline_ns| {
            platform.wake_at(deadline_ns);
            platform.deadline()
        });
        assert_eq!((asked, ReplayPlatform::new(1).deadline()), ([70, 50, 50, 50, 0], NEVER));
    }

    /// Rearms the timer, as long as it wants it.
    struct Listener {
        platform: Arc<ReplayPlatform>,
        again: AtomicU64,
        every_ns: u64,
    }

    impl PlatformEvents for Listener {
        fn timer(&self) {
            let left = self.again.load(Ordering::Relaxed);
            if left > 0 {
                self.again.store(left - 1, Ordering::Relaxed);
                self.platform.wake_at(self.platform.now_ns() + self.every_ns);
            }
        }

        fn cpu_released(&self, _: usize) {}
    }

    /// Each of two listeners gets each timer; a leap of time runs a bounded number, and has a bounded busy time.
    #[test]
    fn each_listener_hears_of_each_timer_up_to_a_bound() {
        for (again, every_ns, to_ns, hears, now_ns) in [
            (0, 1, 9, 0, &[][..]),
            (0, 1, 10, 2, &[10]),
            (2, 5, 14, 2, &[10]),
            (2, 5, 15, 4, &[10, 15]),
            (2, 5, 99, 6, &[10, 15, 20]),
            (2, BUSY_NS - 10, NEVER - 1, 4, &[10, BUSY_NS]),
            (2, BUSY_NS, NEVER - 1, 2, &[10]),
        ] {
            let platform = Arc::new(ReplayPlatform::new(1));
            let one = |again| {
                let again = AtomicU64::new(again);
                Shared::new(Listener { platform: Arc::clone(&platform), again, every_ns }).unwrap()
            };
            let listeners = [one(again), one(0)];
            listeners.iter().for_each(|listener| platform.register(events_of(listener)).unwrap());
            platform.wake_at(10);
            let mut times = Vec::new();
            assert_eq!(
                platform.at(0, to_ns, |time_ns| times.push(time_ns)),
                hears,
                "{again} {every_ns} {to_ns}"
            );
            assert_eq!((&times[..], platform.now_ns()), (now_ns, to_ns));
        }
        // Eight each, and one set more.
        let platform = Arc::new(ReplayPlatform::new(1));
        let again = AtomicU64::new(u64::MAX);
        let listener = Shared::new(Listener { platform: Arc::clone(&platform), again, every_ns: 1 }).unwrap();
        platform.register(events_of(&listener)).unwrap();
        platform.wake_at(10);
        assert_eq!((platform.at(0, 1 << 20, |_| ()), platform.now_ns()), (17, 1 << 20));
    }
}
