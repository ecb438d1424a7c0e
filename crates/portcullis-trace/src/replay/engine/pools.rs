//! The bounce buffers of a replay's devices.

use std::sync::Arc;

use portcullis::addr::PhysAddr;
use portcullis::bounce::adaptive::Adaptive;
use portcullis::bounce::pool::{BounceDevice, BouncePool, DeviceProfile, PoolConfig, TrustGroup};
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::domain::Domain;
use portcullis::pgtable::Format;

use super::{Engine, ReplayMapper};
use crate::replay::ReplayError;
use crate::replay::memory::TraceMemory;
use crate::replay::mode::Mode;
use crate::replay::platform::ReplayPlatform;
use crate::replay::pools::{Clock, Pool};

/// The pool of a machine without an IOMMU: it begins small, and mappings of up to 16 MiB fit.
const SWIOTLB: SwiotlbConfig = SwiotlbConfig {
    slot_bytes: 2 << 10,
    area_bytes: 16 << 20,
    min_bytes: 16 << 20,
    max_bytes: 1 << 30,
    reach: PhysAddr::new(u64::MAX),
    idle_ns: 1_000_000_000,
};

type ReplayPool<X> = BouncePool<ReplayMapper<X>, Arc<ReplayPlatform>, Arc<TraceMemory>>;
type ReplayAdaptive<X> = Adaptive<ReplayMapper<X>, Arc<ReplayPlatform>, Arc<TraceMemory>, Clock>;

impl<X: Format> Engine<X> {
    /// What decides for a pool's domain. It begins with a measurement, as a driver does when it is loaded: that is no part
    /// of the trace's figures.
    fn measured(&mut self, pool: Arc<ReplayPool<X>>) -> Arc<ReplayAdaptive<X>> {
        let (queue, timer) = (Arc::clone(&self.queue), self.timer.clone());
        let clock = move || {
            // What is measured, less the model's part, and what is modelled.
            let ticks = timer.ticks().wrapping_sub(queue.ticks());
            (timer.ns_of(ticks) + queue.waited_ns()) as u64
        };
        let before = (self.queue.waited_ns(), self.invalidations());
        let adaptive = Adaptive::new(pool, Box::new(clock) as Clock);
        self.startup.waited_ns += self.queue.waited_ns() - before.0;
        self.startup.invalidations += self.invalidations() - before.1;
        adaptive
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
            return Ok(Some(match self.mode {
                Mode::Adaptive => Pool::Adaptive(self.measured(pool).device(profile)?),
                _ => Pool::Dynamic(BounceDevice::new(pool, profile)?),
            }));
        }
        let pool = match &self.swiotlb {
            Some(pool) => Arc::clone(pool),
            None => Swiotlb::new(Arc::clone(&self.platform), Arc::clone(bytes), &SWIOTLB)?,
        };
        self.swiotlb = Some(Arc::clone(&pool));
        Ok(Some(Pool::Swiotlb(pool)))
    }
}
