//! The queues of a replay's devices, and what they copy through.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{Direction, PhysAddr};
use portcullis::bounce::PoolConfig;
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::dma::{DmaDomain, DomainBuilder};
use portcullis::domain::{Domain, Policy};
use portcullis::pgtable::Format;

use super::{Engine, ReplayMachine, ReplayMapper};
use crate::Origin;
use crate::replay::ReplayError;

/// The pool of a machine without an IOMMU: it begins small, and mappings of up to 16 MiB fit.
const SWIOTLB: SwiotlbConfig = SwiotlbConfig {
    slot_bytes: 2 << 10,
    area_bytes: 16 << 20,
    min_bytes: 16 << 20,
    max_bytes: 1 << 30,
    reach: PhysAddr::new(u64::MAX),
    idle_ns: 1_000_000_000,
};

impl<X: Format> Engine<X> {
    /// Makes what mappings of a device come from, as its driver would when it starts. What it waits for then, and asks
    /// for, is no part of the trace's figures.
    pub(super) fn prepare(
        &mut self,
        device: usize,
        direction: Direction,
        origin: Origin,
    ) -> Result<(), SetupError> {
        if self.ports[device].is_ready(direction, origin) {
            return Ok(());
        }
        let before = (self.queue.waited_ns(), self.invalidations());
        self.ports[device].prepare(direction, origin, &mut self.colours)?;
        self.startup.waited_ns += self.queue.waited_ns() - before.0;
        self.startup.invalidations += self.invalidations() - before.1;
        Ok(())
    }

    /// Invalidations that the hardware was asked for.
    pub(super) fn invalidations(&self) -> u64 {
        let stats = self.iommu.stats();
        stats.range_invalidations + stats.domain_invalidations
    }

    /// The domain of a device, with what its queues copy through, if they do.
    pub(super) fn domain(
        &mut self,
        mapper: ReplayMapper<X>,
    ) -> Result<DmaDomain<ReplayMachine<X>>, ReplayError> {
        let platform = Arc::clone(&self.platform);
        let Some(bytes) = self.bytes.as_ref().filter(|_| self.mode.copies()) else {
            return Ok(DmaDomain::over(Domain::new(platform, mapper, self.policy)?, None));
        };
        let (queue, timer) = (Arc::clone(&self.queue), self.timer.clone());
        // What is measured, less the model's part, and what is modelled.
        let now = move || {
            let ticks = timer.ticks().wrapping_sub(queue.ticks());
            (timer.ns_of(ticks) + queue.waited_ns()) as u64
        };
        let builder = DomainBuilder::new(mapper).policy(self.policy).clock(now);
        if self.policy != Policy::Passthrough {
            return Ok(builder.bounce(Arc::clone(bytes), PoolConfig::default()).build(platform)?);
        }
        let pool = match &self.swiotlb {
            Some(pool) => Arc::clone(pool),
            None => Swiotlb::new(Arc::clone(&self.platform), Arc::clone(bytes), &SWIOTLB)?,
        };
        self.swiotlb = Some(Arc::clone(&pool));
        Ok(builder.swiotlb(pool).build(platform)?)
    }
}
