//! What the platform tells the pool of: its timer gives back what no mapping has used lately and tries again
//! what was not confirmed, and a slot that is released leaves what it kept to the others.

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
        // Buffers in use may come to wait later, and they do not start the timer.
        if trimmed.is_err() || self.usage().buffer_bytes > self.config.keep_bytes || self.awaits() {
            self.look_later();
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> PlatformEvents for BouncePool<M, P, C> {
    fn timer(&self) {
        let Some(at) = self.idle.at_ns() else { return };
        // Also where what it comes for panics.
        let again = Guard::new(|| self.look_later());
        let not_asked = self.idle.not_asked();
        if self.domain.platform().now_ns() < at {
            // Forgotten, maybe, for the deadline that has come now.
            self.domain.platform().wake_at(at);
            not_asked.done();
            again.done();
            return;
        }
        // Acquire, and first: what comes from now on asks again, and what came before is seen.
        drop(not_asked);
        self.trim_idle();
        again.done();
    }

    fn cpu_released(&self, index: usize) {
        self.collect(Some(index));
    }
}
