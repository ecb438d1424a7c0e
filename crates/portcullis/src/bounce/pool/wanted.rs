//! Deferred work: what a map leaves to the timer where it may not wait for other callers ([`Domain::is_at_once`](crate::domain::Domain)). It collects
//! slots of other CPUs and directions, and evicts idle buffers. Each kind of work is a bit.

use super::BouncePool;
use super::layout::MOST_CLASSES;
use crate::addr::Direction;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::sync::Ordering;

/// Memory is wanted.
pub(super) const MEMORY: u64 = 1 << 63;
const _: () = assert!(MOST_CLASSES * Direction::ALL.len() <= 63);

/// Slots of a class whose buffers are mapped for this direction are wanted.
pub(super) fn slots(class: usize, direction: Direction) -> u64 {
    1 << (class * Direction::ALL.len() + direction.index())
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Defers work: sets its bit, and requests the timer, which calls [`maintain`](Self::maintain).
    #[cold]
    pub(super) fn want(&self, bit: u64) {
        // Release: the call that takes the bits sees what this caller did. The platform orders the timer after the request.
        if self.wants.fetch_or(bit, Ordering::Release) & bit == 0 {
            let platform = self.domain.platform();
            platform.wake_at(platform.now_ns());
        }
    }

    /// Does the deferred work, if there is any. Unconfirmed buffers wait for a later trim.
    ///
    /// Context: waits for hardware and for other CPUs' exclusive sections. The caller holds no lock and no CPU, and is no interrupt handler.
    pub(crate) fn maintain(&self) {
        let wants = self.wants.swap(0, Ordering::Acquire);
        if wants & MEMORY != 0 {
            let _ = self.trim(0);
        }
        if wants & !MEMORY == 0 {
            return;
        }
        for class in 0..self.layout.classes() {
            for direction in Direction::ALL {
                // What was free when a map asked may be taken by now.
                if wants & slots(class, direction) != 0 && self.cached_slots(class) > 0 {
                    self.rebalance(class, direction);
                }
            }
        }
    }
}
