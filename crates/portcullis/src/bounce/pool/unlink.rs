//! Unmap and confirmation of the pool's own mappings. Once the mapper has failed to remove one of them, nothing is confirmed any more, and so no
//! memory is freed.

use super::BouncePool;
use crate::addr::IovaRange;
use crate::invalidation::{Gather, InvalidationError};
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::{CopyMemory, Platform};
use crate::sync::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(super) struct StillMapped(AtomicU64);

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Removes the translations of `range`, which the pool has made, and adds all of it to `gather`. Returns whether all were there. If not, another
    /// caller has removed some by number, perhaps without an invalidation: the gather becomes everything, and the addresses must leak.
    #[must_use]
    pub(super) fn unlink(&self, range: IovaRange, gather: &mut Gather) -> bool {
        let Unmapped { bytes, kept, .. } = self.domain.unlink(range, gather);
        if kept > 0 {
            self.still_mapped.0.fetch_add(kept, Ordering::Relaxed);
        }
        bytes == range.len()
    }

    /// Waits until no device reaches what is in `gather`. If the mapper ever failed to remove a mapping of the pool's, returns an error
    /// from then on. What was mapped as a whole can be unmapped as a whole, so such a mapper has broken its contract; it is unknown which
    /// memory is safe, and none is freed.
    pub(super) fn confirm(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.domain.confirm(gather)?;
        // Relaxed: this caller has set it, or the one that handed over its slots.
        match self.still_mapped.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            bytes => Err(InvalidationError::StillMapped { bytes }),
        }
    }
}
