//! Guards that restore the pool's state where a call below panics.

use super::Swiotlb;
use super::slot_meta::SlotMeta;
use crate::guard::Guard;
use crate::platform::{CopyMemory, Platform};
use crate::sync::Ordering;

pub(super) const NEVER: u64 = u64::MAX;

/// Slots that were found for a mapping. Dropping it frees them.
#[must_use]
pub(super) struct Found<'a, P: Platform, C: CopyMemory> {
    pool: &'a Swiotlb<P, C>,
    pub meta: &'a SlotMeta,
    pub class: u32,
    /// From the run's start to the mapping's, in bytes.
    pub offset: u64,
}

impl<P: Platform, C: CopyMemory> Found<'_, P, C> {
    #[inline(always)]
    pub(super) fn done(self) {
        core::mem::forget(self);
    }
}

impl<P: Platform, C: CopyMemory> Drop for Found<'_, P, C> {
    #[cold]
    fn drop(&mut self) {
        // Without a CPU: the code that panicked may be the code that lends CPUs.
        self.pool.give_to_area(self.meta, self.class);
    }
}

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    #[inline(always)]
    pub(super) fn found<'a>(&'a self, meta: &'a SlotMeta, class: u32, offset: u64) -> Found<'a, P, C> {
        Found { pool: self, meta, class, offset }
    }

    /// Guards a time for which the timer may never come. Dropping it clears the time: the next caller that takes slots from an area asks for a timer.
    pub(super) fn untimed(&self) -> Guard<impl FnMut()> {
        Guard::new(|| self.trim_at_ns.store(NEVER, Ordering::Relaxed))
    }

    /// Guards a request for growth. Dropping it withdraws the request: the next caller asks again.
    pub(super) fn growth_asked(&self) -> Guard<impl FnMut()> {
        Guard::new(|| self.growth_asked.store(false, Ordering::Relaxed))
    }
}
