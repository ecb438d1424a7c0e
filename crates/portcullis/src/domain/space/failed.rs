//! Unmaps that found less than their range, or were not confirmed: an address comes back only where it is known that nothing is mapped at it and
//! nothing cached. Others are held, or lost and counted.

use core::cell::Cell;

use super::{Changing, Domain};
use crate::domain::UnmapError;
use crate::guard::Guard;
use crate::invalidation::InvalidationError;
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::Platform;

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Ends a range that was not mapped as a whole, or whose invalidation failed.
    #[cold]
    #[inline(never)]
    pub(super) fn end_badly(
        &self,
        changing: Changing<'_, M, P>,
        Unmapped { bytes: unmapped, kept, .. }: Unmapped,
        neighbours: u64,
        confirmed: Result<(), InvalidationError>,
    ) -> UnmapError {
        let range = changing.range();
        // Reachable bytes are counted before the clock is read again, which may panic.
        if confirmed.is_err() && unmapped == range.len() {
            self.quarantine(changing);
        } else {
            changing.done();
            let is_rest = Cell::new(false);
            // On a panic no CPU is borrowed, as that might panic again.
            let losing = Guard::new(|| {
                self.lose(if is_rest.get() {
                    range.len()
                } else {
                    unmapped.saturating_add(self.parts.forget(range))
                });
            });
            if confirmed.is_ok() && kept == 0 && !self.parts.is_empty() {
                self.platform.with_cpu(|_| is_rest.set(self.parts.was_rest(range, unmapped)));
            }
            losing.done();
            if is_rest.get() {
                self.take_back(self.changing(range));
            } else {
                self.lose_rest(range, unmapped);
                if confirmed.is_err() {
                    self.leave_open(unmapped);
                }
            }
        }
        if unmapped > 0 {
            // Otherwise another call unmapped all of it, and took them off.
            self.platform.with_cpu(|cpu| self.uncount_neighbours(cpu, neighbours));
        }
        match confirmed {
            _ if kept > 0 => UnmapError::StillMapped { range, unmapped, kept },
            Err(error) => UnmapError::Unconfirmed { range, error },
            Ok(()) => UnmapError::NotMapped { range, unmapped },
        }
    }
}
