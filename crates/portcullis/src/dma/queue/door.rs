//! Setup: a builder makes the domain, the domain its devices, each device its queues.

mod builder;
mod device;
mod lanes;
mod maintained;

pub use builder::DomainBuilder;
pub use device::Device;

use alloc::sync::Arc;
use core::fmt;

use self::maintained::AnyPool;
use crate::addr::{DeviceId, Iova};
use crate::bounce::pool::{BouncePool, DeviceProfile, PoolConfig, PoolUsage};
use crate::bounce::swiotlb::Swiotlb;
use crate::dma::{Clock, DmaDevice, Machine};
use crate::domain::{Domain, Policy, PolicyError};
use crate::heap::{OutOfMemory, Shared, boxed};
use crate::mapper::Mapper;
use crate::platform::{CacheMaintenance, CopyMemory, Platform};
use crate::setup::SetupError;
use crate::sync::Mutex;

/// The addresses that a device can use: Linux's `dma_set_mask`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DmaMask(u64);

impl DmaMask {
    /// All addresses.
    pub const BITS_64: Self = Self::bits(64);
    /// Addresses below 4 GiB.
    pub const BITS_32: Self = Self::bits(32);

    /// Addresses of `bits` bits, Linux's `DMA_BIT_MASK(n)`.
    pub const fn bits(bits: u32) -> Self {
        Self(if bits < u64::BITS { (1 << bits) - 1 } else { u64::MAX })
    }

    /// The highest address.
    pub const fn last(self) -> u64 {
        self.0
    }
}

/// A domain for drivers: a [`Domain`], which is only the address space, with the queues' bounce memory, clock and cache maintenance. Drivers attach
/// devices here; kernels that map themselves use the [space](Self::space). Cheap to clone; a clone is the same domain.
pub struct DmaDomain<X: Machine> {
    parts: Shared<Parts<X>>,
}

struct Parts<X: Machine> {
    domain: Shared<Domain<X::Mapper, X::Platform>>,
    memory: Option<X::Memory>,
    pool: PoolConfig,
    swiotlb: Option<Shared<Swiotlb<X::Platform, X::Memory>>>,
    clock: Option<SharedClock>,
    cache: Option<Arc<dyn CacheMaintenance>>,
    made: MadePool<Pool<X, <X as Machine>::Memory>>,
    /// The pool of non-coherent devices. `dyn`, so that only a crate with such devices compiles it.
    cleaned: MadePool<dyn AnyPool>,
}

type SharedClock = Shared<dyn Fn() -> u64 + Send + Sync>;
type MadePool<T> = Mutex<Option<Shared<T>>>;
type Pool<X, C> = BouncePool<<X as Machine>::Mapper, <X as Machine>::Platform, C>;

impl<X: Machine> Parts<X> {
    fn of(domain: Shared<Domain<X::Mapper, X::Platform>>) -> Self {
        let (pool, made, cleaned) = (PoolConfig::default(), Mutex::new(None), Mutex::new(None));
        Self { domain, memory: None, pool, swiotlb: None, clock: None, cache: None, made, cleaned }
    }
}

impl<X: Machine> Clone for DmaDomain<X> {
    fn clone(&self) -> Self {
        Self { parts: self.parts.clone() }
    }
}

impl<X: Machine> fmt::Debug for DmaDomain<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaDomain").field("policy", &self.parts.domain.policy()).finish_non_exhaustive()
    }
}

impl<X: Machine> DmaDomain<X> {
    fn from_parts(parts: Parts<X>) -> Result<Self, OutOfMemory> {
        Ok(Self { parts: Shared::new(parts)? })
    }

    /// Wraps an existing domain. Its queues may copy if there is `memory`. Allocates.
    pub fn over(
        domain: Shared<Domain<X::Mapper, X::Platform>>,
        memory: Option<X::Memory>,
    ) -> Result<Self, OutOfMemory> {
        Self::from_parts(Parts { memory, ..Parts::of(domain) })
    }

    /// The domain's policy.
    pub fn policy(&self) -> Policy {
        self.parts.domain.policy()
    }

    /// Changes the policy while I/O runs, as [`Domain::set_policy`]. A device may have [its own](Device::set_policy).
    pub fn set_policy(&self, policy: Policy) -> Result<(), PolicyError> {
        self.parts.domain.set_policy(policy)
    }

    /// The address space, with its counters, its mapper, and mappings that belong to no device.
    pub fn space(&self) -> &Shared<Domain<X::Mapper, X::Platform>> {
        &self.parts.domain
    }

    /// The counters of the pool of bounce buffers; `None` before its first use. Without an IOMMU see [`Swiotlb::usage`]. Non-coherent devices have a
    /// pool of their own, which this reports if no other device has used one.
    ///
    /// Context: O(CPUs x size classes); takes the lock of each class in turn. The caller holds no lock and no CPU.
    pub fn pool_usage(&self) -> Option<PoolUsage> {
        let found = self.found(&self.parts.made).map(|pool| pool.usage());
        found.or_else(|| self.found(&self.parts.cleaned).map(|pool| pool.usage()))
    }

    /// Makes a device of this domain. This does not configure the IOMMU: the caller attaches the device to the domain's table there.
    ///
    /// The device counts as hostile, and trusts no other: see [`Device::trusted`].
    ///
    /// # Errors
    /// [`SetupError::BeyondReach`] if the device reaches none of the domain's addresses; [`SetupError::OutOfMemory`].
    pub fn attach(&self, id: DeviceId, mask: DmaMask) -> Result<Device<X>, SetupError> {
        let domain = &self.parts.domain;
        let first = domain.mapper().geometry().aperture.start();
        // No map uses address 0.
        let first = Iova::new(first.get().max(domain.granule().bytes()));
        if domain.is_translated() && first.get() > mask.last() {
            return Err(SetupError::BeyondReach { last: mask.last(), first });
        }
        let dma = DmaDevice::new(domain.clone(), mask.last())?;
        let profile = DeviceProfile { mask: mask.last(), offset_mask: 0, untrusted: true, group: id.0 };
        Ok(Device { domain: self.clone(), dma, id, profile, line: 0, maintained: None })
    }

    fn new_pool<C: CopyMemory>(
        &self,
        memory: impl FnOnce(X::Memory) -> C,
        config: PoolConfig,
    ) -> Result<Shared<Pool<X, C>>, SetupError> {
        let Parts { domain, memory: copies, .. } = &*self.parts;
        let memory = memory(copies.clone().ok_or(SetupError::NoCopyMemory)?);
        BouncePool::new(domain.clone(), memory, config)
    }

    fn shared_pool(&self) -> Result<Shared<Pool<X, X::Memory>>, SetupError> {
        let Parts { made, pool, .. } = &*self.parts;
        match self.found(made) {
            Some(found) => Ok(found),
            None => Ok(self.keep(made, self.new_pool(|memory| memory, *pool)?)),
        }
    }

    /// Stores `pool` in `made`, unless another call was first, and returns the stored one. (A pool is not made under the lock, as that allocates and
    /// calls the platform. If two calls make one, one is dropped.)
    fn keep<T: ?Sized>(&self, made: &MadePool<T>, pool: Shared<T>) -> Shared<T> {
        let mut kept = None;
        let mut keep = || kept = Some(made.lock().get_or_insert_with(|| pool.clone()).clone());
        self.parts.domain.platform().with_cpu(|_| keep());
        kept.unwrap_or(pool)
    }

    fn found<T: ?Sized>(&self, made: &MadePool<T>) -> Option<Shared<T>> {
        self.parts.domain.platform().with_cpu(|_| made.lock().clone())
    }

    #[allow(clippy::redundant_closure, reason = "what is shared is no function itself")]
    fn clock(&self) -> Result<Clock, OutOfMemory> {
        Ok(match self.parts.clock.clone() {
            #[allow(clippy::redundant_closure, reason = "the closure owns the clock, which has no size")]
            Some(clock) => boxed(move || clock())?,
            None => {
                let domain = self.parts.domain.clone();
                boxed(move || domain.platform().now_ns())?
            }
        })
    }
}
