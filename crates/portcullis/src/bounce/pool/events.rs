//! Events of the platform. The timer evicts idle buffers and retries confirmations. When a CPU is released, its magazines go to the depots.
//!
//! The timer runs while the pool has more bytes of buffers than [`keep_bytes`](super::PoolConfig::keep_bytes), or an unconfirmed unmap; an empty pool
//! sets none. The pool requests it when it gets a buffer, or when an unmap is not confirmed, and the timer requests itself again. So the fast paths
//! know nothing of time. The timer finds idle buffers without visiting slots: in a depot their number is the minimum since it looked last (the
//! working set of Bonwick and Adams); in CPUs' magazines all are idle if no mapping was made since.

use super::BouncePool;
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform, PlatformEvents};
use crate::sync::Ordering;

/// The timer's shortest period, in nanoseconds.
const SHORTEST_NS: u64 = 1_000_000;

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Requests the timer after the pool's idle time, unless it comes earlier. The caller has no CPU lent.
    pub(super) fn look_later(&self) {
        if self.config.idle_ns < u64::MAX {
            self.look.ask(self.domain.platform(), self.config.idle_ns.max(SHORTEST_NS));
        }
    }

    /// Evicts idle buffers. Unconfirmed ones are retried the next time.
    fn trim_idle(&self) {
        let bounced = self.usage().bounced;
        let is_quiet = self.bounced_before.swap(bounced, Ordering::Relaxed) == bounced;
        let keep = self.config.keep_bytes;
        let trimmed = if is_quiet { self.trim(keep) } else { self.trim_unwanted(keep) };
        // Buffers in use now may be idle later, and an unmap does not request the timer.
        if trimmed.is_err() || self.usage().buffer_bytes > keep || self.awaits() {
            self.look_later();
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> PlatformEvents for BouncePool<M, P, C> {
    fn timer(&self) {
        self.maintain();
        if !self.look.is_set() {
            return;
        }
        // If a call below panics, the guard requests the timer again.
        let again = Guard::new(|| self.look_later());
        if self.look.has_come(self.domain.platform()) {
            self.trim_idle();
        }
        again.done();
    }

    fn cpu_released(&self, index: usize) {
        self.collect(Some(index));
    }
}
