//! Events of the platform. The timer evicts idle buffers and retries confirmations. When a CPU is released, its magazines go to the depots.
//!
//! The timer comes as long as the pool has more bytes of buffers than it is to keep, or something is not confirmed: an empty pool wakes no CPU. The pool
//! asks for it when it gets a buffer, or when something is not confirmed, and the timer asks for itself again. So the fast paths know nothing of
//! time. The timer finds idle buffers without looking at slots. In a depot their number is the fewest slots since the last time (J. Bonwick's
//! working set). In magazines of CPUs all are idle if no mapping was made since.

use super::BouncePool;
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform, PlatformEvents};
use crate::sync::Ordering;

/// The shortest time between two looks, in nanoseconds.
const SHORTEST_NS: u64 = 1_000_000;

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Asks for the timer after the pool's idle time, unless it comes earlier. The caller has no CPU lent.
    pub(super) fn look_later(&self) {
        if self.config.idle_ns < u64::MAX {
            self.look.ask(self.domain.platform(), self.config.idle_ns.max(SHORTEST_NS));
        }
    }

    /// Evicts idle buffers. Unconfirmed ones are retried the next time.
    fn trim_idle(&self) {
        let bounced = self.usage().bounced;
        let is_quiet = self.bounced.swap(bounced, Ordering::Relaxed) == bounced;
        let keep = self.config.keep_bytes;
        let trimmed = if is_quiet { self.trim(keep) } else { self.trim_unwanted(keep) };
        // Buffers in use now may be idle later, and an unmap does not ask for the timer.
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
        // Also where a call below panics.
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
