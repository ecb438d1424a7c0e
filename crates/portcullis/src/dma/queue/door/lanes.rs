//! Makes queues of coherent devices.

use alloc::boxed::Box;

use super::Device;
use crate::addr::{Direction, PhysAddr};
use crate::bounce::pool::{BounceDevice, DeviceProfile};
use crate::bounce::swiotlb::Constraints;
use crate::dma::machine::{AdaptiveOf, CopyingOf, RingOf};
use crate::dma::queue::swiotlb::Copies;
use crate::dma::queue::{AnyLane, Direct, Queue, QueueConfig, Strategy};
use crate::dma::{AdaptiveRing, DmaBuffer, Machine, RawBatch, StrictRing, StrictRingConfig};
use crate::heap::{boxed, boxed_in};
use crate::setup::SetupError;

impl<X: Machine> Device<X> {
    #[inline(never)]
    pub(super) fn assemble<B: DmaBuffer>(
        &self,
        config: &QueueConfig,
        adaptive: Option<Box<AdaptiveOf<X>>>,
    ) -> Result<Queue<X, B>, SetupError> {
        let lane = match self.maintained {
            Some(maintained) => maintained(self, config)?,
            None => self.coherent(config, adaptive)?,
        };
        Ok(Queue::new(self.dma.clone(), lane, config)?)
    }

    fn coherent(
        &self,
        config: &QueueConfig,
        adaptive: Option<Box<AdaptiveOf<X>>>,
    ) -> Result<AnyLane<X>, SetupError> {
        if let Some(adaptive) = adaptive {
            return Ok(AnyLane::Auto(adaptive));
        }
        let translated = self.dma.is_translated();
        Ok(match config.strategy {
            Strategy::Direct => AnyLane::Direct(Direct),
            Strategy::Batch => AnyLane::Batch(RawBatch::new(&self.dma, config.batch_size())?),
            Strategy::Ring => AnyLane::Ring(self.ring(config)?),
            Strategy::Bounce if translated => AnyLane::Bounce(self.pool()?),
            Strategy::Bounce => {
                let pool = self.domain.parts.swiotlb.as_ref().ok_or(SetupError::NoCopyMemory)?;
                AnyLane::Swiotlb(boxed(Copies::new(pool.clone(), self.constraints()?))?)
            }
            Strategy::Auto if !translated => AnyLane::Direct(Direct),
            // There is no bounce memory.
            Strategy::Auto => AnyLane::Ring(self.ring(config)?),
        })
    }

    fn ring_config(config: &QueueConfig) -> StrictRingConfig {
        let batch = config.batch_size();
        // Unmapped buffers keep their addresses until a commit.
        let descriptors = config.descriptors.saturating_add(batch as u32);
        StrictRingConfig { colour: config.colour, ..StrictRingConfig::new(descriptors, config.bytes, batch) }
    }

    fn ring(&self, config: &QueueConfig) -> Result<RingOf<X>, SetupError> {
        let config = Self::ring_config(config);
        StrictRing::new(&self.dma, config)
    }

    pub(super) fn pool(&self) -> Result<CopyingOf<X>, SetupError> {
        BounceDevice::new(self.domain.shared_pool()?, self.profile)
    }

    /// For [`QueueConfig::auto`] in a domain with bounce memory.
    #[inline(never)]
    pub(super) fn adaptive(&self, config: &QueueConfig) -> Result<Option<Box<AdaptiveOf<X>>>, SetupError> {
        let chooses = config.strategy == Strategy::Auto && self.maintained.is_none();
        if !chooses || !self.dma.is_translated() || self.domain.parts.memory.is_none() {
            return Ok(None);
        }
        let (pool, clock) = (self.pool()?, self.domain.clock()?);
        let (ring, directions) = (Self::ring_config(config), config.direction);
        let mut adaptive =
            boxed_in(|place| AdaptiveRing::unmeasured_in(place, &self.dma, pool, ring, clock))?;
        let directions = directions.as_ref().map_or(&Direction::ALL[..], core::slice::from_ref);
        for direction in directions {
            adaptive.measure_toward(*direction)?;
        }
        Ok(Some(adaptive))
    }

    fn constraints(&self) -> Result<Constraints, SetupError> {
        let DeviceProfile { mask, offset_mask, .. } = self.profile;
        Constraints::new().with_reach(PhysAddr::new(mask)).with_min_align_mask(offset_mask)
    }
}
