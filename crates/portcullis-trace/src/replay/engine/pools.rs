//! The queues of a replay's devices, and the memory of their copies.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{Direction, PhysAddr};
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::domain::Policy;

use super::Engine;
use crate::Origin;
use crate::replay::ReplayError;
use crate::replay::driver::Copies;

/// The pool of a machine without an IOMMU: it begins small, and mappings of up to 16 MiB fit.
const SWIOTLB: SwiotlbConfig = SwiotlbConfig {
    slot_bytes: 2 << 10,
    area_bytes: 16 << 20,
    min_bytes: 16 << 20,
    max_bytes: 1 << 30,
    reach: PhysAddr::new(u64::MAX),
    idle_ns: 1_000_000_000,
};

impl Engine {
    /// Makes a device's resources, as its driver would when it starts. Their waits and requests are not in the trace's figures.
    pub(super) fn prepare(
        &mut self,
        device: usize,
        direction: Direction,
        origin: Origin,
    ) -> Result<(), SetupError> {
        if self.ports[device].is_ready(direction, origin) {
            return Ok(());
        }
        let before = (self.queue.waited_ns(), self.invalidations(), self.copied_bytes());
        self.ports[device].prepare(direction, origin, &mut self.colours)?;
        self.startup.waited_ns += self.queue.waited_ns() - before.0;
        self.startup.invalidations += self.invalidations() - before.1;
        self.startup.copied_bytes += self.copied_bytes() - before.2;
        Ok(())
    }

    /// Invalidation requests.
    pub(super) fn invalidations(&self) -> u64 {
        let stats = self.iommu.stats();
        stats.range_invalidations + stats.domain_invalidations
    }

    pub(super) fn copied_bytes(&self) -> u64 {
        self.bytes.as_ref().map_or(0, |bytes| bytes.copied_bytes())
    }

    /// The memory of its queues' copies, if they copy.
    pub(super) fn copies(&mut self) -> Result<Copies, ReplayError> {
        let Some(bytes) = self.bytes.as_ref().filter(|_| self.mode.copies()) else {
            return Ok(Copies::None);
        };
        if self.policy != Policy::Passthrough {
            return Ok(Copies::Pool(Arc::clone(bytes)));
        }
        let pool = match &self.swiotlb {
            Some(pool) => pool.clone(),
            None => match Swiotlb::new(Arc::clone(&self.platform), Arc::clone(bytes), &SWIOTLB) {
                Err(SetupError::NoArea { area_bytes, .. }) => {
                    return Err(self.share.no_bytes(self.line, self.mode.name(), area_bytes));
                }
                pool => pool?,
            },
        };
        self.swiotlb = Some(pool.clone());
        Ok(Copies::Swiotlb(pool))
    }
}
