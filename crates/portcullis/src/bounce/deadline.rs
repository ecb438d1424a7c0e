//! A pool's next timer. The platform calls the timers of all pools at the earliest time that any has requested, and may forget later requests. So a
//! pool keeps its own time, and a timer that comes early requests the call again. If the platform panics, the time is cleared, and the next caller
//! that wants the timer requests it anew.

use crate::guard::Guard;
use crate::platform::Platform;
use crate::sync::{AtomicU64, Ordering};

const NEVER: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct Deadline(AtomicU64);

impl Default for Deadline {
    fn default() -> Self {
        Self(AtomicU64::new(NEVER))
    }
}

impl Deadline {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) != NEVER
    }

    /// Requests the timer in `ns` nanoseconds, unless it comes earlier. The caller has no CPU lent.
    pub(super) fn ask<P: Platform>(&self, platform: &P, ns: u64) {
        let unasked = self.unasked();
        let at = platform.now_ns().saturating_add(ns).min(NEVER - 1);
        // Release: the timer that clears the time sees what this caller did, also where another caller's time is earlier.
        if self.0.fetch_min(at, Ordering::Release) == NEVER {
            platform.wake_at(at);
        }
        unasked.done();
    }

    /// For the timer: returns whether the time has come, and clears it then.
    pub(super) fn has_come<P: Platform>(&self, platform: &P) -> bool {
        let at = self.0.load(Ordering::Relaxed);
        if at == NEVER {
            return false;
        }
        let unasked = self.unasked();
        if platform.now_ns() < at {
            platform.wake_at(at);
            unasked.done();
            return false;
        }
        // Clears the time before the timer's work: later callers request anew. Acquire: the work sees what earlier callers did.
        drop(unasked);
        true
    }

    fn unasked(&self) -> Guard<impl FnMut()> {
        Guard::new(|| _ = self.0.swap(NEVER, Ordering::Acquire))
    }
}
