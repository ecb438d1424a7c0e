//! Unmaps that found less than their range, or were not confirmed: an address comes back only if it is known that nothing is mapped at it
//! and nothing cached. Others are held, or lost and counted.

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
            // The guard runs while the CPU is lent; if the platform panics and lends none, it runs without.
            let losing = Guard::new(|| self.lose(unmapped.saturating_add(self.parts.forget(range))));
            let rest = self.platform.with_cpu(|_| {
                let is_rest = confirmed.is_ok() && kept == 0 && self.parts.was_rest(range, unmapped);
                is_rest.then(|| {
                    losing.done();
                    self.changing(range)
                })
            });
            match rest {
                Some(rest) => self.take_back(rest),
                None if confirmed.is_err() => self.leave_open(unmapped),
                None => {}
            }
        }
        if unmapped > 0 {
            // Otherwise another call unmapped all of it, and has subtracted the neighbours.
            self.platform.with_cpu(|cpu| self.uncount_neighbours(cpu, neighbours));
        }
        match confirmed {
            _ if kept > 0 => UnmapError::StillMapped { range, unmapped, kept },
            Err(error) => UnmapError::Unconfirmed { range, error },
            Ok(()) => UnmapError::NotMapped { range, unmapped },
        }
    }
}
