//! Makes queues of non-coherent devices. Compiled for a machine only if [`Device::not_coherent`] is called for it.

use alloc::sync::Arc;
use core::any::Any;
use core::convert::Infallible;

use super::device::check_line;
use super::{Device, Pool};
use crate::bounce::pool::{BounceDevice, BouncePool, DeviceProfile, PoolConfig, PoolUsage};
use crate::broken::broken;
use crate::dma::queue::cleaned::Cleaned;
use crate::dma::queue::not_coherent::{Copying, Inner, NotCoherent};
use crate::dma::queue::{AnyLane, Machine, Queue, QueueConfig, Strategy};
use crate::heap::{Shared, boxed};
use crate::mapper::Mapper;
use crate::platform::{CacheMaintenance, CopyMemory, Platform};
use crate::setup::SetupError;

pub(super) trait AnyPool: Any + Send + Sync {
    fn usage(&self) -> PoolUsage;
}

impl<M: Mapper, P: Platform, C: CopyMemory> AnyPool for BouncePool<M, P, C> {
    fn usage(&self) -> PoolUsage {
        self.usage()
    }
}

type CleanedPool<X> = Pool<X, Cleaned<<X as Machine>::Memory>>;

impl<X: Machine> Device<X> {
    pub(super) fn maintained(&self, config: &QueueConfig) -> Result<AnyLane<X>, SetupError> {
        let (parts, strategy, translated) = (&*self.domain.parts, config.strategy, self.dma.is_translated());
        let cache = Arc::clone(parts.cache.as_ref().ok_or(SetupError::NoCacheMaintenance)?);
        let line = self.line;
        // A copy keeps the original's offset within a line, so that whole lines of the one are whole lines of the other, and can be synced.
        let offset_mask = self.profile.offset_mask | (line - 1);
        let profile = DeviceProfile { offset_mask, ..self.profile };
        let alone = Self { dma: self.dma.maintained(), maintained: None, profile, ..self.clone() };
        let nothing = if translated { parts.memory.is_none() } else { parts.swiotlb.is_none() };
        let copies = match strategy {
            Strategy::Direct | Strategy::Batch | Strategy::Ring => None,
            Strategy::Auto if nothing => None,
            _ if translated => {
                let pool = self.cleaned_pool(&cache)?;
                let most = pool.threshold();
                let up_to = if strategy == Strategy::Auto { 0 } else { most };
                let granule = self.dma.domain().granule().offset_mask();
                let units = if self.profile.untrusted { [granule; 2] } else { [0, line - 1] };
                let device = BounceDevice::new(pool, DeviceProfile { untrusted: true, ..profile })?;
                let queue = Queue::<(_, _, _)>::new(alone.dma.clone(), AnyLane::Bounce(device), config)?;
                Some(Copying { queue: boxed(queue)?, up_to, most, slot: 0, units })
            }
            _ => {
                let queue = boxed(alone.queue::<Infallible>(QueueConfig::bounce())?)?;
                let slot = parts.swiotlb.as_ref().map_or(0, |pool| pool.slot_bytes());
                check_line(line, slot)?;
                Some(Copying { queue, up_to: 0, most: 0, slot, units: [0, line - 1] })
            }
        };
        let strategy_to_map = match strategy {
            Strategy::Bounce if !translated => None,
            Strategy::Bounce => Some(Strategy::Direct),
            Strategy::Auto if translated => Some(Strategy::Ring),
            Strategy::Auto => Some(Strategy::Direct),
            other => Some(other),
        };
        let queue_to_map = |strategy| -> Result<Inner, SetupError> {
            Ok(boxed(alone.queue::<Infallible>(config.by(strategy))?)?)
        };
        let mapped = strategy_to_map.map(queue_to_map).transpose()?;
        Ok(AnyLane::NotCoherent(boxed(NotCoherent::new(strategy, (cache, line), mapped, copies))?))
    }

    fn cleaned_pool(&self, cache: &Arc<dyn CacheMaintenance>) -> Result<Shared<CleanedPool<X>>, SetupError> {
        let (domain, parts) = (&self.domain, &*self.domain.parts);
        let pool = match domain.found(&parts.cleaned) {
            Some(found) => found,
            None => {
                let memory = |memory| Cleaned { memory, cache: Arc::clone(cache) };
                // The pool only copies: it splits no mapping, and gets none above its threshold (`up_to`, `most`).
                let config = PoolConfig { split: false, ..parts.pool };
                let made = domain.new_pool(memory, config)?;
                // SAFETY: the closure is an unsizing coercion: the same value, by the same pointer.
                domain.keep(&parts.cleaned, unsafe { Shared::cast::<dyn AnyPool>(made, |counted| counted) })
            }
        };
        // SAFETY: the closure is an upcast: the same value, by the same pointer.
        let pool = unsafe { Shared::cast::<dyn Any + Send + Sync>(pool, |counted| counted) };
        Ok(pool.downcast().unwrap_or_else(|| broken("the pool is of the domain's memory, cleaned")))
    }
}
