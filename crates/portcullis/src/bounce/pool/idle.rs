//! What the platform's timer does: buffers that nobody wants go back, and what was not confirmed is tried again.
//!
//! The timer is asked for when a buffer comes, or when something is not confirmed, and again as long as there is more than
//! the pool is to keep: so a pool that is empty wakes nobody, and mapping and unmapping know nothing of time. What nobody
//! wants is found without looking at each slot: of a depot, the fewest slots that it had since the last time (as J.
//! Bonwick's working set); of the CPUs' stacks, everything, when no mapping was made since.

use super::BouncePool;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform, PlatformEvents};
use crate::sync::{AtomicU64, Ordering};

/// No time was set.
const NEVER: u64 = u64::MAX;

/// The shortest time between two looks, in nanoseconds.
const SHORTEST_NS: u64 = 1_000_000;

/// When to look, and what there was to see the last time.
#[derive(Debug)]
pub(super) struct Idle {
    at_ns: AtomicU64,
    /// Mappings made until then.
    bounced: AtomicU64,
}

impl Default for Idle {
    fn default() -> Self {
        Self { at_ns: AtomicU64::new(NEVER), bounced: AtomicU64::new(0) }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Has the timer come in a while, unless it comes anyway. Without a slot lent.
    pub(super) fn look_later(&self) {
        if self.config.idle_ns == u64::MAX {
            return;
        }
        let platform = self.domain.platform();
        let not_asked = NotAsked(&self.idle);
        let at = platform.now_ns().saturating_add(self.config.idle_ns.max(SHORTEST_NS)).min(NEVER - 1);
        // Release: the timer that takes an earlier time away sees what there was until now.
        if self.idle.at_ns.fetch_min(at, Ordering::Release) == NEVER {
            platform.wake_at(at);
        }
        not_asked.done();
    }

    /// Gives back what nobody wants. What the hardware does not confirm is tried again the next time.
    fn trim_idle(&self) {
        let bounced = self.usage().bounced;
        let trimmed = match self.idle.bounced.swap(bounced, Ordering::Relaxed) == bounced {
            true => self.trim(self.config.keep_bytes),
            false => self.trim_unwanted(self.config.keep_bytes),
        };
        // Buffers in use may wait later, which nobody would tell.
        if trimmed.is_err() || self.usage().buffer_bytes > self.config.keep_bytes || self.awaits() {
            self.look_later();
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> PlatformEvents for BouncePool<M, P, C> {
    fn timer(&self) {
        let at = self.idle.at_ns.load(Ordering::Relaxed);
        if at == NEVER {
            return;
        }
        let again = Again(self);
        let not_asked = NotAsked(&self.idle);
        if self.domain.platform().now_ns() < at {
            // Forgotten, maybe, for the deadline that has come now.
            self.domain.platform().wake_at(at);
            not_asked.done();
            core::mem::forget(again);
            return;
        }
        // Acquire, and first: what comes from now on asks again, and what came before is seen.
        drop(not_asked);
        self.trim_idle();
        core::mem::forget(again);
    }

    fn slot_released(&self, index: usize) {
        self.collect(Some(index));
    }
}

/// A time that is set, and that the platform does not know yet. Dropped, the next that wants one sets it anew.
struct NotAsked<'a>(&'a Idle);

impl NotAsked<'_> {
    fn done(self) {
        core::mem::forget(self);
    }
}

impl Drop for NotAsked<'_> {
    fn drop(&mut self) {
        self.0.at_ns.swap(NEVER, Ordering::Acquire);
    }
}

/// Has the timer come again when it is dropped: where what it came for panics.
struct Again<'a, M: Mapper, P: Platform, C: CopyMemory>(&'a BouncePool<M, P, C>);

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Again<'_, M, P, C> {
    fn drop(&mut self) {
        self.0.look_later();
    }
}
