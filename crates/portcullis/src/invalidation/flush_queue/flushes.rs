//! Flushes: their numbers, and the generation of a flush-all. What a flush covers was queued before it began.

use super::{Flush, FlushQueue};
use crate::platform::Platform;
use crate::sync::{Ordering, fence};

impl FlushQueue {
    /// Begins a flush that covers the closed segments. The caller submits a domain-wide invalidation *after* this call. O(1).
    pub fn begin_flush(&self) -> Flush {
        self.begin(0)
    }

    /// Begins a flush-all, which covers all entries that were queued before. The caller submits a domain-wide invalidation *after* this
    /// call.
    ///
    /// Context: one barrier of all CPUs, and a wait for the exclusive sections of CPUs whose queues are in use; each of these later fetches
    /// a few cache lines with its next entry. The caller holds no lock and no CPU.
    pub fn begin_flush_of_all<P: Platform>(&self, platform: &P) -> Flush {
        let generation = self.announced.generation.fetch_add(1, Ordering::Relaxed) + 1;
        // Between the generation and the load of which queues are announced.
        fence(Ordering::SeqCst);
        self.own.wait_for_first(platform, self.used());
        // Last: a CPU that is kept out of its own queue uses this one after its section.
        platform.with_cpu(|_| drop(self.shared.lock()));
        self.begin(generation)
    }

    fn begin(&self, generation: u64) -> Flush {
        let number = self.flushes.begun.fetch_add(1, Ordering::Relaxed) + 1;
        // Between the number and the invalidation: see the module's documentation.
        fence(Ordering::SeqCst);
        Flush { number, generation }
    }

    /// Records that the hardware has confirmed the invalidation of `flush`. A queue learns of it when it closes its next segment (the first
    /// entry of a new generation closes one), when it is full, or when it is [visited](Self::tell). O(1).
    pub fn confirm_flush(&self, flush: Flush, now_ns: u64) {
        self.flushes.confirmed_ns.fetch_max(now_ns, Ordering::Relaxed);
        // Release: a CPU that acts on these numbers acts after the confirmation.
        self.flushes.confirmed_generation.fetch_max(flush.generation, Ordering::Release);
        self.flushes.confirmed.fetch_max(flush.number, Ordering::Release);
    }

    /// Records that a timer has come, or could not be set: the next entry of each queue asks for another. O(1).
    pub fn end_timers(&self) {
        self.announced.timers_ended.fetch_add(1, Ordering::Relaxed);
        // Release: a CPU that sees the new generation with its next entry sees that timers have ended. (It also closes its segment. No
        // flush has this generation, so none is confirmed by it.)
        self.announced.generation.fetch_add(1, Ordering::Release);
    }
}
