//! Builder of a unit's domain: reserved addresses, and mappings before the first device is attached.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::convert::Infallible;

use portcullis::addr::{DeviceId, Iova, IovaRange};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{DomainBuilder, Machine};
use portcullis::domain::Policy;
use portcullis::platform::{CacheMaintenance, CopyMemory, Platform};

use super::{DomainError, UnitDomain, UnitMapper};
use crate::acpi::Reserved;
use crate::host::UnitError;

/// Builder of a unit's domain: see [`Iommu::domain`](crate::Iommu::domain). It reserves what the unit does not translate, and is otherwise
/// a [`DomainBuilder`].
#[must_use = "a domain is built by `build`"]
pub struct UnitDomainBuilder<M: UnitMapper, P: Platform, C: CopyMemory + Clone = Infallible> {
    domain: DomainBuilder<M, P, C>,
    policy: Policy,
    last: Iova,
    /// All reserved ranges; and the untranslated ones among them.
    kept: Vec<IovaRange>,
    untranslated: Vec<IovaRange>,
    regions: Vec<Reserved>,
}

impl<M: UnitMapper, P: Platform> UnitDomainBuilder<M, P> {
    pub(crate) fn new(mapper: M) -> Self {
        let (last, policy) = (mapper.geometry().aperture.last(), Policy::Strict);
        let (kept, untranslated) = (mapper.geometry().reserved.clone(), mapper.geometry().reserved.clone());
        let domain = DomainBuilder::new(mapper);
        Self { domain, policy, last, kept, untranslated, regions: Vec::new() }
    }

    /// As [`DomainBuilder::bounce`]: lets queues copy.
    pub fn bounce<C: CopyMemory + Clone>(self, memory: C, pool: PoolConfig) -> UnitDomainBuilder<M, P, C> {
        let Self { domain, policy, last, kept, untranslated, regions } = self;
        let domain = domain.bounce(memory, pool);
        UnitDomainBuilder { domain, policy, last, kept, untranslated, regions }
    }
}

impl<M: UnitMapper, P: Platform, C: CopyMemory + Clone> UnitDomainBuilder<M, P, C> {
    /// As [`DomainBuilder::policy`], except [`Policy::Passthrough`], which [`build`](Self::build) refuses.
    pub fn policy(self, policy: Policy) -> Self {
        Self { domain: self.domain.policy(policy), policy, ..self }
    }

    /// As [`DomainBuilder::clock`].
    pub fn clock(self, clock: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self { domain: self.domain.clock(clock), ..self }
    }

    /// As [`DomainBuilder::cache_maintenance`].
    pub fn cache_maintenance(self, cache: Arc<dyn CacheMaintenance>) -> Self {
        Self { domain: self.domain.cache_maintenance(cache), ..self }
    }

    /// As [`DomainBuilder::reserve`]: never allocates addresses of `range`.
    pub fn reserve(mut self, range: IovaRange) -> Self {
        self.kept.push(range);
        Self { domain: self.domain.reserve(range), ..self }
    }

    /// As [`DomainBuilder::last_iova`]: allocates no addresses above `last`, nor any that the unit does not translate.
    pub fn last_iova(self, last: Iova) -> Self {
        let last = self.last.min(last);
        Self { domain: self.domain.last_iova(last), last, ..self }
    }

    /// Reserves `range`, which the unit does not translate.
    pub(crate) fn without(mut self, range: IovaRange) -> Self {
        self.untranslated.push(range);
        self.reserve(range)
    }

    /// Reserves the addresses that `device`, which is to be attached, reserves. Only a virtio-iommu reports any, such as a window for
    /// interrupts, and it attaches no device whose reserved addresses the domain may allocate. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError`] if the unit did not answer.
    pub fn for_device(self, device: DeviceId) -> Result<Self, UnitError> {
        let kept = self.domain.mapper().kept_by(device)?;
        Ok(kept.into_iter().fold(self, Self::without))
    }

    /// Reserves and identity-maps what firmware reserves for devices that are to be attached, before the first one is. `reserved_for` of
    /// firmware's table ([`acpi`](crate::acpi)) returns a device's regions.
    ///
    /// # Safety
    /// 1. The memory is the devices', as firmware says, and nothing else relies on the contents of the pages that it touches.
    pub unsafe fn regions(mut self, regions: impl IntoIterator<Item = Reserved>) -> Self {
        for region in regions {
            self.regions.push(region);
            self = self.reserve(region.range);
        }
        self
    }

    /// Builds the domain, without devices. Allocates page tables if firmware reserves memory.
    ///
    /// # Errors
    /// [`DomainError`]; as [`DomainBuilder::build`]. Nothing remains of it.
    pub fn build(self, platform: P) -> Result<UnitDomain<(M, P, C)>, DomainError> {
        self.build_as(platform)
    }

    /// As [`build`](Self::build), for a [`Machine`] with a name.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn build_as<X: Machine<Mapper = M, Platform = P, Memory = C>>(
        self,
        platform: P,
    ) -> Result<UnitDomain<X>, DomainError> {
        let Self { domain, policy, last, kept, untranslated, regions } = self;
        if policy == Policy::Passthrough {
            return Err(DomainError::PassThrough);
        }
        for Reserved { range, .. } in &regions {
            let is_window =
                |window: &IovaRange| range.start() <= window.last() && range.last() >= window.start();
            if range.last() > last || untranslated.iter().any(is_window) {
                return Err(DomainError::Untranslated { range: *range, last });
            }
        }
        let dma = domain.build_as::<X>(platform)?;
        let space = dma.space();
        // SAFETY: clause 1 of `regions`. No device is attached yet.
        let mapped = unsafe { Reserved::map(&regions, space.mapper(), space.platform()) };
        mapped.map_err(DomainError::Region)?;
        Ok(UnitDomain::new(dma, kept))
    }
}
