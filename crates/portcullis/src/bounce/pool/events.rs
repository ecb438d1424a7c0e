//! What the pool does when the platform tells it of an event. At the timer it gives back what no
//! mapping has used lately, and tries again what was not confirmed; the timer comes again as long
//! as there may be either. When a CPU is released, what it kept goes to the others.

use super::BouncePool;
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform, PlatformEvents};

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Gives back what no mapping has used lately. What the hardware does not confirm is tried again the next time.
    fn trim_idle(&self) {
        let bounced = self.usage().bounced;
        let trimmed = match self.idle.is_quiet(bounced) {
            true => self.trim(self.config.keep_bytes),
            false => self.trim_unwanted(self.config.keep_bytes),
        };
        // Buffers that are in use now may wait later, and an unmap does not ask for the timer.
        if trimmed.is_err() || self.usage().buffer_bytes > self.config.keep_bytes || self.awaits() {
            self.look_later();
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> PlatformEvents for BouncePool<M, P, C> {
    fn timer(&self) {
        self.maintain();
        let Some(at) = self.idle.at_ns() else { return };
        // Also where what it comes for panics.
        let again = Guard::new(|| self.look_later());
        let not_asked = self.idle.not_asked();
        if self.domain.platform().now_ns() < at {
            // The platform may have forgotten this deadline for the one that has come now.
            self.domain.platform().wake_at(at);
            not_asked.done();
            again.done();
            return;
        }
        // Acquire, and first: a caller that wants the timer from now on asks again, and this call
        // sees what earlier callers asked for.
        drop(not_asked);
        self.trim_idle();
        again.done();
    }

    fn cpu_released(&self, index: usize) {
        self.collect(Some(index));
    }
}
