//! Removing translations, and knowing when no device uses them. Once the mapper has failed to
//! remove one of the pool's, nothing is confirmed any more, and so no memory is given back.

use super::BouncePool;
use crate::addr::IovaRange;
use crate::invalidation::{Gather, InvalidationError};
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::{CopyMemory, Platform};
use crate::sync::{AtomicU64, Ordering};

/// Bytes that the mapper could not unmap.
#[derive(Debug, Default)]
pub(super) struct StillMapped(AtomicU64);

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Removes the translations of `range`, which the pool has made, and adds all of it to `gather`. Returns whether
    /// they were there. If not, another caller has removed some by number, perhaps without an invalidation: the gather has
    /// everything then, and the addresses must not be used again.
    #[must_use]
    pub(super) fn unlink(&self, range: IovaRange, gather: &mut Gather) -> bool {
        let Unmapped { bytes, kept, .. } = self.domain.unlink(range, gather);
        if kept > 0 {
            self.still_mapped.0.fetch_add(kept, Ordering::Relaxed);
        }
        bytes == range.len()
    }

    /// Waits until no device reaches what is in `gather`. Returns an error from then on, always,
    /// where the mapper could not remove something of the pool's. What was mapped as a whole and is
    /// unmapped as a whole can be removed, so such a mapper has broken its word; it is not known
    /// any more which of the pool's memory is safe, and none is given back.
    pub(super) fn confirm(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.domain.confirm(gather)?;
        // Relaxed: it was set by this caller, or by the one that handed over what it has in its hands.
        match self.still_mapped.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            bytes => Err(InvalidationError::StillMapped { bytes }),
        }
    }
}
