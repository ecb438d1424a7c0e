//! What is left behind where a call below does not return.

use super::Swiotlb;
use super::slot_meta::SlotMeta;
use crate::platform::{CopyMemory, Platform};
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// No time was set.
pub(super) const NEVER: u64 = u64::MAX;

/// Slots that were found, and are nobody's mapping yet. Dropped, they are free again.
#[must_use]
pub(super) struct Found<'a, P: Platform, C: CopyMemory> {
    pool: &'a Swiotlb<P, C>,
    pub meta: &'a SlotMeta,
    pub class: u32,
    /// From the run's start to the mapping's, in bytes.
    pub offset: u64,
}

impl<P: Platform, C: CopyMemory> Found<'_, P, C> {
    /// They are a mapping.
    #[inline(always)]
    pub(super) fn done(self) {
        core::mem::forget(self);
    }
}

impl<P: Platform, C: CopyMemory> Drop for Found<'_, P, C> {
    #[cold]
    fn drop(&mut self) {
        // Without a CPU's slot: what panicked may be what lends them.
        let _told = Told(&self.pool.freed);
        self.pool.give_to_area(self.meta, self.class);
    }
}

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// The run of `meta`, which the caller has taken.
    #[inline(always)]
    pub(super) fn found<'a>(&'a self, meta: &'a SlotMeta, class: u32, offset: u64) -> Found<'a, P, C> {
        Found { pool: self, meta, class, offset }
    }
}

/// Something that may free slots, or make room for more. Dropped, all who wait are told.
pub(super) struct Told<'a>(pub &'a AtomicU64);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// A flag for what is under way. Dropped, it is lowered, so that the next tries again.
pub(super) struct Lowered<'a>(pub &'a AtomicBool);

impl Drop for Lowered<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A time that no timer may come for. Dropped, it is as if none was set: the next that takes slots from an area asks for a
/// timer.
pub(super) struct Untimed<'a>(pub &'a AtomicU64);

impl Drop for Untimed<'_> {
    fn drop(&mut self) {
        self.0.store(NEVER, Ordering::Relaxed);
    }
}
