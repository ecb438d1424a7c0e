//! Flushes, and the timer that begins them: the timer flushes at the end of the window, even if no CPU maps or unmaps any more. A flush
//! that fails or panics is tried again.

use super::Domain;
use crate::guard::Guard;
use crate::invalidation::{Flush, Gather, InvalidationError};
use crate::mapper::Mapper;
use crate::platform::{Platform, PlatformEvents};
use crate::sync::Ordering;

/// Nanoseconds until a failed invalidation is retried: the domain's window, within these limits.
const RETRY_NS: core::ops::RangeInclusive<u64> = 1_000_000..=10_000_000;

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Waits until devices reach nothing that was unmapped before the call. [`exposure`](Self::exposure) says how long deferred ranges
    /// count. CPUs free their deferred addresses during their next unmaps.
    ///
    /// Costs one barrier of all CPUs ([`Platform::fence_all`]), a wait for the exclusive sections of CPUs that have ever deferred (O(1)
    /// each), and one domain-wide invalidation. Context: waits for hardware. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach what they could before.
    pub fn flush(&self) -> Result<(), InvalidationError> {
        self.finish(self.flush_queue.begin_flush_of_all(&self.platform))
    }

    /// As [`flush`](Self::flush), but covers only the closed segments of flush queues, and waits for no CPU: for a full queue, and for a
    /// CPU that is gone.
    pub(super) fn flush_closed(&self) -> Result<(), InvalidationError> {
        self.finish(self.flush_queue.begin_flush())
    }

    // Out of line: its gather takes most of the stack.
    #[inline(never)]
    fn finish(&self, flush: Flush) -> Result<(), InvalidationError> {
        self.mapper.sync(Gather::EVERYTHING)?;
        self.flush_queue.confirm_flush(flush, self.platform.now_ns());
        self.platform.with_cpu(|cpu| self.books.of(cpu).add(|book| &book.flushes, 1));
        Ok(())
    }

    /// Takes back every range whose flush is confirmed, from all queues or from that of CPU `only`. Each range goes to its owner CPU.
    pub(super) fn reclaim_deferred(&self, only: Option<usize>) {
        self.flush_queue.reclaim(&self.platform, only, |cpu, safe| {
            self.space.with_own(cpu, |_, own| self.give_back(cpu, own, safe));
        });
    }

    pub(super) fn is_pending(&self) -> bool {
        self.flush_queue.is_pending(&self.platform)
    }

    pub(super) fn retry_ns(&self) -> u64 {
        let (least, most) = RETRY_NS.into_inner();
        self.window_by(None).unwrap_or(most).clamp(least, most)
    }

    /// Has the platform call [`timer`](crate::platform::PlatformEvents::timer) when a window that begins now ends. If the platform panics,
    /// the next range that is queued asks again.
    pub(super) fn set_timer(&self, window_ns: u64) {
        let untimed = self.untimed();
        let due_ns = self.platform.now_ns().saturating_add(window_ns).min(u64::MAX - 1);
        // Release: the timer that takes this time sees what was queued before.
        self.due_ns.fetch_min(due_ns, Ordering::Release);
        self.platform.wake_at(due_ns);
        untimed.done();
    }

    #[cold]
    #[inline(never)]
    pub(super) fn lose_timer(&self) {
        self.flush_queue.end_timers();
    }

    /// Whether a window of this domain has ended. The platform calls every domain when the earliest window of any ends; a domain that is
    /// early asks again.
    fn is_due(&self) -> bool {
        let due_ns = self.due_ns.load(Ordering::Relaxed);
        if due_ns == u64::MAX {
            return false;
        }
        let untimed = self.untimed();
        let is_early = self.platform.now_ns() < due_ns;
        if is_early {
            self.platform.wake_at(due_ns);
        }
        untimed.done();
        if is_early {
            return false;
        }
        // Acquire. The swap may drop a later time, but its caller has queued its range by now, and the timer's check of the queues sees
        // that.
        self.due_ns.swap(u64::MAX, Ordering::Acquire);
        true
    }
}

impl<M: Mapper, P: Platform> PlatformEvents for Domain<M, P> {
    fn timer(&self) {
        if !self.is_due() {
            return;
        }
        let _ = self.maintain();
        // If the flush fails or panics, devices may still reach deferred ranges. Nobody learns of it here, so the timer tries again.
        let again = Guard::new(|| self.set_timer(self.retry_ns()));
        self.flush_queue.end_timers();
        // The check comes after `end_timers`: what is queued later asks for a timer of its own.
        if !self.flush_queue.is_pending(&self.platform) {
            again.done();
        } else if self.flush().is_ok() {
            again.done();
            // CPUs that have stopped deferring stop counting exposure now.
            self.flush_queue.tell(&self.platform);
        }
    }

    fn cpu_released(&self, index: usize) {
        // If the flush fails, deferred ranges stay out of use until another flush succeeds. A queue that all CPUs share needs nothing: the
        // other CPUs take its ranges back.
        if self.flush_queue.has_queue(index) {
            let due = self.flush_queue.close_of(&self.platform, index);
            if !due || self.flush_closed().is_ok() {
                self.reclaim_deferred(Some(index));
            }
        }
        self.space.drain_cpu(&self.platform, index);
    }
}
