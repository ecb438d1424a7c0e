//! The bounce buffers of a replay's devices.

use std::sync::Arc;

use portcullis::addr::{Direction, PhysAddr};
use portcullis::bounce::pool::{BounceDevice, BouncePool, DeviceProfile, PoolConfig, TrustGroup};
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::dma::RingError;
use portcullis::domain::Domain;
use portcullis::pgtable::Format;

use super::{Engine, ReplayMapper};
use crate::Origin;
use crate::replay::ReplayError;
use crate::replay::platform::ReplayPlatform;
use crate::replay::pools::Pool;
use crate::replay::port::Clock;

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
    ) -> Result<(), RingError> {
        if self.ports[device].is_ready(direction, origin) {
            return Ok(());
        }
        let before = (self.queue.waited_ns(), self.invalidations());
        let clock = || {
            let (queue, timer) = (Arc::clone(&self.queue), self.timer.clone());
            // What is measured, less the model's part, and what is modelled.
            let now = move || {
                let ticks = timer.ticks().wrapping_sub(queue.ticks());
                (timer.ns_of(ticks) + queue.waited_ns()) as u64
            };
            Box::new(now) as Clock
        };
        self.ports[device].prepare(direction, origin, &mut self.colours, clock)?;
        self.startup.waited_ns += self.queue.waited_ns() - before.0;
        self.startup.invalidations += self.invalidations() - before.1;
        Ok(())
    }

    /// Invalidations that the hardware was asked for.
    pub(super) fn invalidations(&self) -> u64 {
        let stats = self.iommu.stats();
        stats.range_invalidations + stats.domain_invalidations
    }

    /// The bounce buffers of device `number`, if its mappings are copied.
    #[allow(clippy::type_complexity, reason = "it is what a port has")]
    pub(super) fn pool(
        &mut self,
        domain: &Arc<Domain<ReplayMapper<X>, Arc<ReplayPlatform>>>,
        number: usize,
    ) -> Result<Option<Pool<ReplayMapper<X>, Arc<ReplayPlatform>>>, ReplayError> {
        let Some(bytes) = self.bytes.as_ref().filter(|_| self.mode.copies()) else { return Ok(None) };
        if domain.is_translated() {
            let pool = BouncePool::new(Arc::clone(domain), Arc::clone(bytes), PoolConfig::default())?;
            let group = TrustGroup(number as u32);
            let profile = DeviceProfile { untrusted: true, group, ..DeviceProfile::default() };
            return Ok(Some(Pool::Dynamic(BounceDevice::new(pool, profile)?)));
        }
        let pool = match &self.swiotlb {
            Some(pool) => Arc::clone(pool),
            None => Swiotlb::new(Arc::clone(&self.platform), Arc::clone(bytes), &SWIOTLB)?,
        };
        self.swiotlb = Some(Arc::clone(&pool));
        Ok(Some(Pool::Swiotlb(pool)))
    }
}
