//! The time at which a pool's timer is to come. The platform calls the timers of all pools at the earliest time that any has asked for, and may forget
//! later ones. So a pool keeps its own, and a timer that comes early asks again.
//!
//! If the platform panics, the time is cleared, and the next caller that wants the timer asks anew.

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

    /// Asks for the timer in `ns` nanoseconds, unless it comes earlier. The caller has no CPU lent.
    pub(super) fn ask<P: Platform>(&self, platform: &P, ns: u64) {
        let unasked = self.unasked();
        let at = platform.now_ns().saturating_add(ns).min(NEVER - 1);
        // Release: the timer that takes an earlier time away sees the work of this caller.
        if self.0.fetch_min(at, Ordering::Release) == NEVER {
            platform.wake_at(at);
        }
        unasked.done();
    }

    /// For the timer: whether the time has come. It is cleared then.
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
        // Acquire, and before the work: a caller that wants the timer from now on asks again, and this call sees the work of earlier callers.
        drop(unasked);
        true
    }

    fn unasked(&self) -> Guard<impl FnMut()> {
        Guard::new(|| _ = self.0.swap(NEVER, Ordering::Acquire))
    }
}
