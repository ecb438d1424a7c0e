//! Events of the platform. The timer evicts idle buffers and retries confirmations, and comes again as long as there may be either. When a CPU
//! is released, its magazines go to the depots.

use super::BouncePool;
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform, PlatformEvents};

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Evicts idle buffers. Unconfirmed ones are retried the next time.
    fn trim_idle(&self) {
        let bounced = self.usage().bounced;
        let trimmed = match self.idle.is_quiet(bounced) {
            true => self.trim(self.config.keep_bytes),
            false => self.trim_unwanted(self.config.keep_bytes),
        };
        // Buffers in use now may be idle later, and an unmap does not ask for the timer.
        if trimmed.is_err() || self.usage().buffer_bytes > self.config.keep_bytes || self.awaits() {
            self.look_later();
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> PlatformEvents for BouncePool<M, P, C> {
    fn timer(&self) {
        self.maintain();
        let Some(at) = self.idle.at_ns() else { return };
        // Runs also where the work below panics.
        let again = Guard::new(|| self.look_later());
        let not_asked = self.idle.not_asked();
        if self.domain.platform().now_ns() < at {
            // The platform may have replaced this deadline by the one that has come now.
            self.domain.platform().wake_at(at);
            not_asked.done();
            again.done();
            return;
        }
        // Acquire, and before the work: a caller that wants the timer from now on asks again, and this call sees the work of earlier callers.
        drop(not_asked);
        self.trim_idle();
        again.done();
    }

    fn cpu_released(&self, index: usize) {
        self.collect(Some(index));
    }
}
