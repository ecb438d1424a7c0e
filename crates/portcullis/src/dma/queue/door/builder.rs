//! The builder of a domain. It fixes what the domain's queues may use.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::convert::Infallible;

use super::{DmaDomain, Parts, SharedClock};
use crate::addr::{DomainId, Iova, IovaRange};
use crate::bounce::pool::PoolConfig;
use crate::bounce::swiotlb::Swiotlb;
use crate::dma::Machine;
use crate::domain::{Domain, Policy};
use crate::heap::{OutOfMemory, Shared};
use crate::invalidation::InvalidationQueue;
use crate::mapper::{Mapper, TableMapper};
use crate::pgtable::{Format, PageTable};
use crate::platform::{CacheMaintenance, CopyMemory, Frames, Platform};
use crate::setup::SetupError;

/// Builds a domain: see [`Domain::builder`].
#[must_use = "a domain is built by `build`"]
pub struct DomainBuilder<M: Mapper, P: Platform, C: CopyMemory + Clone = Infallible> {
    mapper: M,
    policy: Policy,
    limits: Limits,
    memory: Option<C>,
    pool: PoolConfig,
    swiotlb: Option<Shared<Swiotlb<P, C>>>,
    clock: Option<Result<SharedClock, OutOfMemory>>,
    cache: Option<Arc<dyn CacheMaintenance>>,
}

struct Limits {
    reserved: Result<Vec<IovaRange>, OutOfMemory>,
    last: Iova,
}

impl<F: Frames, Q: InvalidationQueue, X: Format, P: Platform> Domain<TableMapper<F, Q, X>, P> {
    /// Begins a domain whose translations are in `table`. The caller that lets hardware walk the table ensures that hardware knows it as `id`, and
    /// that `queue` invalidates what the hardware caches of it.
    pub fn builder(table: PageTable<F, X>, queue: Q, id: DomainId) -> DomainBuilder<TableMapper<F, Q, X>, P> {
        DomainBuilder::new(TableMapper::new(table, queue, id, Vec::new()))
    }
}

impl<M: Mapper, P: Platform> DomainBuilder<M, P> {
    /// Begins a domain over any mapper, such as a hypervisor's.
    pub fn new(mapper: M) -> Self {
        let (policy, pool) = (Policy::Strict, PoolConfig::default());
        let limits = Limits { reserved: Ok(Vec::new()), last: Iova::new(u64::MAX) };
        Self { mapper, policy, limits, memory: None, pool, swiotlb: None, clock: None, cache: None }
    }

    /// Lets queues copy, through buffers that stay mapped: frames of `memory`, which also copies, in a pool of these dimensions. The first queue that
    /// copies makes the pool, and the first for a [non-coherent](crate::dma::Device::not_coherent) device a second one.
    ///
    /// For a device that does not reach the pool's addresses, each copy is mapped and unmapped, with a wait. If devices have less than 64 bits of
    /// addresses, keep the pool below that: [`PoolConfig::reached_by`].
    ///
    /// The call allocates nothing but changes the builder's type, so it cannot stand in an `if`. A driver that decides at run time always calls it,
    /// and decides by the [`QueueConfig`](crate::dma::QueueConfig). If there may be no bounce memory, [`DmaDomain::over`] takes an `Option` of it:
    ///
    /// ```
    /// # #[cfg(feature = "std")]
    /// # use {portcullis::prelude::*, portcullis_model::{Iommu, IommuConfig, Memory}, std::sync::Arc};
    /// # #[cfg(feature = "std")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let memory = Memory::new(16 << 20);
    /// # let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    /// # let new_table = || PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level());
    /// # let (table, other, copies) = (new_table()?, new_table()?, false);
    /// // Whether it copies:
    /// let domain = Domain::builder(table, iommu.queue(), DomainId(1))
    ///     .bounce(Arc::clone(&memory), PoolConfig::default())
    ///     .build(StdPlatform::new())?;
    /// let nic = domain.attach(DeviceId(0), DmaMask::BITS_64)?;
    /// let config = if copies { QueueConfig::bounce() } else { QueueConfig::direct() };
    /// let rx: Queue<_> = nic.queue(config)?;
    ///
    /// // Whether it could:
    /// let plain = Domain::builder(other, iommu.queue(), DomainId(2)).build(StdPlatform::new())?;
    /// let space = plain.space().clone();
    /// let domain: DmaDomain<(_, _, Arc<Memory>)> = DmaDomain::over(space, copies.then_some(memory))?;
    /// # let _ = (rx, domain);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "std"))]
    /// # fn main() {}
    /// ```
    pub fn bounce<C: CopyMemory + Clone>(self, memory: C, pool: PoolConfig) -> DomainBuilder<M, P, C> {
        let Self { mapper, policy, limits, clock, cache, .. } = self;
        DomainBuilder { mapper, policy, limits, memory: Some(memory), pool, swiotlb: None, clock, cache }
    }

    /// Lets queues copy without translation, through the machine's pool. If the pool has the same type of memory, the builder gets the same type as
    /// from [`bounce`](Self::bounce).
    pub fn swiotlb<C: CopyMemory + Clone>(self, pool: Shared<Swiotlb<P, C>>) -> DomainBuilder<M, P, C> {
        let Self { mapper, policy, limits, pool: config, clock, cache, .. } = self;
        let swiotlb = Some(pool);
        DomainBuilder { mapper, policy, limits, memory: None, pool: config, swiotlb, clock, cache }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory + Clone> DomainBuilder<M, P, C> {
    /// The mapper of the domain.
    pub fn mapper(&self) -> &M {
        &self.mapper
    }

    /// Sets the policy, [`Policy::Strict`] by default: how long devices may reach unmapped memory.
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    /// Reserves the granules of `range`, such as x86's interrupt window, or addresses that firmware still uses: no map gets them. A range may lie
    /// outside of the mapper's addresses. The ranges of all calls add up.
    pub fn reserve(mut self, range: IovaRange) -> Self {
        self.limits.reserved = self.limits.reserved.and_then(|mut reserved| {
            reserved.try_reserve(1).map_err(|_| OutOfMemory)?;
            reserved.push(range);
            Ok(reserved)
        });
        self
    }

    /// Allocates no addresses above `last`: an IOMMU may translate fewer bits than its tables. Of several calls the lowest address counts, for
    /// devices behind several units. The mapper's [aperture](crate::mapper::Geometry::aperture) limits addresses in any case.
    pub fn last_iova(mut self, last: Iova) -> Self {
        self.limits.last = self.limits.last.min(last);
        self
    }

    /// Sets the clock of [`QueueConfig::auto`](crate::dma::QueueConfig::auto), in nanoseconds; the platform's by default.
    pub fn clock(self, clock: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        // SAFETY: the closure is an unsizing coercion: the same value, by the same pointer.
        let clock = Shared::new(clock)
            .map(|clock| unsafe { Shared::cast::<dyn Fn() -> u64 + Send + Sync>(clock, |counted| counted) });
        Self { clock: Some(clock), ..self }
    }

    /// Lets the domain have [non-coherent](crate::dma::Device::not_coherent) devices, around whose mappings `cache` is called.
    pub fn cache_maintenance(self, cache: Arc<dyn CacheMaintenance>) -> Self {
        Self { cache: Some(cache), ..self }
    }

    /// Makes the domain.
    ///
    /// # Errors
    /// As [`Domain::new`]; also [`SetupError::OutOfMemory`] if an earlier call of the builder had no memory.
    pub fn build(self, platform: P) -> Result<DmaDomain<(M, P, C)>, SetupError> {
        self.build_as(platform)
    }

    /// As [`build`](Self::build), for a [`Machine`] with a name.
    pub fn build_as<X: Machine<Mapper = M, Platform = P, Memory = C>>(
        self,
        platform: P,
    ) -> Result<DmaDomain<X>, SetupError> {
        let Self { mapper, policy, limits, memory, pool, swiotlb, clock, cache } = self;
        let clock = clock.transpose()?;
        let domain = Domain::within(platform, mapper, policy, limits.reserved?, limits.last)?;
        Ok(DmaDomain::from_parts(Parts { memory, pool, swiotlb, clock, cache, ..Parts::of(domain) })?)
    }
}
