//! The front door: a builder makes the domain, the domain its devices, and each device its queues. An impossible configuration is an error when the
//! queue is made.

mod lanes;
mod maintained;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::convert::Infallible;
use core::fmt;
use core::mem::MaybeUninit;

use self::maintained::AnyPool;
use super::{Lane, Queue, QueueConfig};
use crate::addr::{DeviceId, DomainId, Iova, IovaRange};
use crate::bounce::pool::{BouncePool, DeviceProfile, PoolConfig, PoolUsage};
use crate::bounce::swiotlb::Swiotlb;
use crate::dma::machine::DeviceOf;
use crate::dma::{BufferPool, Clock, DmaBuffer, DmaDevice, DmaOps, Machine, OpsConfig};
use crate::domain::{Domain, Policy, PolicyError};
use crate::heap::{OutOfMemory, Shared, boxed, made};
use crate::invalidation::InvalidationQueue;
use crate::mapper::{Mapper, TableMapper};
use crate::pgtable::{Format, PageTable};
use crate::platform::{CacheMaintenance, CopyMemory, FRAME_SIZE, Frames, Platform};
use crate::setup::SetupError;
use crate::sync::Mutex;

/// The addresses that a device can put on the bus: Linux's `dma_set_mask`.
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

/// A builder of a domain: see [`Domain::builder`].
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
    /// An error if there was no memory for them.
    reserved: Result<Vec<IovaRange>, OutOfMemory>,
    last: Iova,
}

impl<F: Frames, Q: InvalidationQueue, X: Format, P: Platform> Domain<TableMapper<F, Q, X>, P> {
    /// Begins a domain whose translations are in `table`. The hardware knows it as `id`, and `queue` invalidates what the hardware caches
    /// of it. The caller that lets hardware walk the table ensures both.
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

    /// Lets queues copy, through buffers that stay mapped: frames of `memory`, which also does the copying, in a pool of these dimensions.
    /// The pool is made with the first queue that copies, and a second one with the first that copies for a
    /// [non-coherent](Device::not_coherent) device.
    ///
    /// A device that does not reach the pool's addresses gets copies that are mapped and unmapped each time, with a wait. If devices have
    /// less than 64 bits of addresses, keep the pool below that: [`PoolConfig::reached_by`].
    ///
    /// The call takes no memory, so a driver that chooses at run time whether to copy always makes it, and chooses by the [`QueueConfig`].
    /// It cannot stand behind an `if`, because it changes the builder's type. If there may be no bounce memory, [`DmaDomain::over`] takes
    /// an `Option` of it:
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

    /// Lets queues copy without translation, through the machine's pool. The builder gets the same type as by [`bounce`](Self::bounce), if
    /// the pool is of the same memory.
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

    /// Sets how long devices may reach unmapped memory; [`Policy::Strict`] without this call.
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    /// Reserves the addresses of `range`, such as x86's interrupt window, or addresses that firmware goes on using: they are not handed
    /// out. A range may lie outside of the mapper's addresses; a granule with any reserved byte is reserved. The ranges of all calls add
    /// up.
    pub fn reserve(mut self, range: IovaRange) -> Self {
        self.limits.reserved = self.limits.reserved.and_then(|mut reserved| {
            reserved.try_reserve(1).map_err(|_| OutOfMemory)?;
            reserved.push(range);
            Ok(reserved)
        });
        self
    }

    /// Hands out no addresses above `last`: IOMMUs may translate fewer bits than their tables. Of several calls the lowest address counts, so that a
    /// domain with devices behind several units takes the limits of all. At the most, and without this call, it hands out what the mapper
    /// [translates](crate::mapper::Geometry::aperture).
    pub fn last_iova(mut self, last: Iova) -> Self {
        self.limits.last = self.limits.last.min(last);
        self
    }

    /// Sets the clock by which [`QueueConfig::auto`] measures, in nanoseconds; the platform's without this call.
    pub fn clock(self, clock: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        // SAFETY: the closure is an unsizing coercion: the same value, by the same pointer.
        let clock = Shared::new(clock)
            .map(|clock| unsafe { Shared::cast::<dyn Fn() -> u64 + Send + Sync>(clock, |counted| counted) });
        Self { clock: Some(clock), ..self }
    }

    /// Lets the domain have [non-coherent](Device::not_coherent) devices, around whose mappings `cache` is called. It changes nothing for others.
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
    ///
    /// # Errors
    /// As [`build`](Self::build).
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

/// A domain for drivers: a [`Domain`], which is only the address space, with the bounce memory, the clock and the cache maintenance of
/// queues. Drivers attach devices here; kernels that map themselves use the [space](Self::space). Cheap to clone; a clone is the same
/// domain.
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
    /// Another, for non-coherent devices. Its type is not named here, so that only a crate with such devices compiles that pool.
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

    /// Makes one of an existing domain. Its queues may copy if there is `memory`. Allocates.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn over(
        domain: Shared<Domain<X::Mapper, X::Platform>>,
        memory: Option<X::Memory>,
    ) -> Result<Self, OutOfMemory> {
        Self::from_parts(Parts { memory, ..Parts::of(domain) })
    }

    /// The policy of the domain.
    pub fn policy(&self) -> Policy {
        self.parts.domain.policy()
    }

    /// Changes the policy while I/O runs: [`Domain::set_policy`]. A device may have [its own](Device::set_policy).
    ///
    /// # Errors
    /// As [`Domain::set_policy`].
    pub fn set_policy(&self, policy: Policy) -> Result<(), PolicyError> {
        self.parts.domain.set_policy(policy)
    }

    /// The address space: its counters, its mapper, mappings that belong to no device.
    pub fn space(&self) -> &Shared<Domain<X::Mapper, X::Platform>> {
        &self.parts.domain
    }

    /// The counters of the pool of bounce buffers; `None` before its first use. (The pool of a machine without an IOMMU has its own
    /// [usage](Swiotlb::usage).) Non-coherent devices have a pool of their own, which this reports if no other device has used one.
    ///
    /// Context: O(CPUs x size classes); takes the lock of each class in turn. The caller holds no lock and no CPU.
    pub fn pool_usage(&self) -> Option<PoolUsage> {
        let found = self.found(&self.parts.made).map(|pool| pool.usage());
        found.or_else(|| self.found(&self.parts.cleaned).map(|pool| pool.usage()))
    }

    /// Makes a device of this domain, with the addresses that it can put on the bus. The hardware is not told: the caller that attaches the
    /// device there lets it walk the domain's table.
    ///
    /// The device is taken for hostile, and trusts no other: see [`Device::trusted`].
    ///
    /// # Errors
    /// [`SetupError::BeyondReach`] if the device reaches none of the domain's addresses; [`SetupError::OutOfMemory`].
    pub fn attach(&self, id: DeviceId, mask: DmaMask) -> Result<Device<X>, SetupError> {
        let domain = &self.parts.domain;
        let first = domain.mapper().geometry().aperture.start();
        // Nothing is mapped at 0.
        let first = Iova::new(first.get().max(domain.granule().bytes()));
        if domain.is_translated() && first.get() > mask.last() {
            return Err(SetupError::BeyondReach { last: mask.last(), first });
        }
        let dma = DmaDevice::new(domain.clone(), mask.last())?;
        let profile = DeviceProfile { mask: mask.last(), offset_mask: 0, untrusted: true, group: id.0 };
        Ok(Device { domain: self.clone(), dma, id, profile, line: 0, maintained: None })
    }

    /// Makes a pool of bounce buffers from the domain's memory, as wrapped by `memory`.
    fn new_pool<C: CopyMemory>(
        &self,
        memory: impl FnOnce(X::Memory) -> C,
        config: PoolConfig,
    ) -> Result<Shared<Pool<X, C>>, SetupError> {
        let Parts { domain, memory: copies, .. } = &*self.parts;
        let memory = memory(copies.clone().ok_or(SetupError::NoCopyMemory)?);
        BouncePool::new(domain.clone(), memory, config)
    }

    /// The pool of bounce buffers for coherent devices, which is made by the first call.
    fn shared_pool(&self) -> Result<Shared<Pool<X, X::Memory>>, SetupError> {
        let Parts { made, pool, .. } = &*self.parts;
        match self.found(made) {
            Some(found) => Ok(found),
            None => Ok(self.keep(made, self.new_pool(|memory| memory, *pool)?)),
        }
    }

    /// Stores `pool` in `made`, and returns the pool that is there: another call's, if that was first. (A pool is not made under the lock,
    /// as it allocates and calls the platform. If two calls make one, one pool is dropped.)
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
                boxed(move || domain.now_ns())?
            }
        })
    }
}

/// A device of a domain, which makes [queues](Queue). Cheap to clone; a clone is the same device.
pub struct Device<X: Machine> {
    domain: DmaDomain<X>,
    dma: DeviceOf<X>,
    id: DeviceId,
    profile: DeviceProfile,
    /// Bytes of a cache line, for a non-coherent device; else 0.
    line: u64,
    /// Makes the lanes of a non-coherent device's queues. It is a pointer, so that only a crate with such a device compiles their code.
    maintained: Option<MakeLane<X>>,
}

type MakeLane<X> = fn(&Device<X>, &QueueConfig) -> Result<Lane<X>, SetupError>;

impl<X: Machine> Clone for Device<X> {
    fn clone(&self) -> Self {
        Self { domain: self.domain.clone(), dma: self.dma.clone(), ..*self }
    }
}

impl<X: Machine> fmt::Debug for Device<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("id", &self.id).field("profile", &self.profile).finish_non_exhaustive()
    }
}

impl<X: Machine> Device<X> {
    /// Its name.
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// Its domain.
    pub fn domain(&self) -> &DmaDomain<X> {
        &self.domain
    }

    /// The present policy for the end of the device's mappings, where their queue has no own.
    pub fn policy(&self) -> Policy {
        self.dma.policy()
    }

    /// Gives the device a policy of its own, or, with `None`, its domain's again, while I/O runs: [`DmaDevice::set_policy`].
    ///
    /// # Errors
    /// As [`DmaDevice::set_policy`].
    pub fn set_policy(&self, policy: Option<Policy>) -> Result<(), PolicyError> {
        self.dma.set_policy(policy)
    }

    /// The device for the layers below: [coherent memory](crate::dma::CoherentMemory), mappings that belong to no queue.
    pub fn dma(&self) -> &DeviceOf<X> {
        &self.dma
    }

    /// Declares that the device is not hostile: where queues copy, it may reach pages that buffers share with other data, so that buffers above the
    /// threshold are mapped as they are.
    pub fn trusted(mut self) -> Self {
        self.profile.untrusted = false;
        self
    }

    /// Puts the device into a group of devices that trust each other. Where queues copy, one may see what another had in a buffer. Devices
    /// of different groups never find each other's bytes in a buffer. Without this call each device has a group of its own, with the number
    /// of its [id](Self::id).
    ///
    /// Devices of one domain share its addresses, so a hostile one can look into the *present* mappings of another, as in any domain. If
    /// that matters, give devices domains of their own.
    pub fn in_group(mut self, group: u32) -> Self {
        self.profile.group = group;
        self
    }

    /// Makes copies keep these low bits of a buffer's address: 0xfff for NVMe (Linux's `dma_set_min_align_mask`). If they cannot be kept, making a
    /// [queue](Self::queue) that copies is an error.
    pub fn keeping_offsets(mut self, mask: u64) -> Self {
        self.profile.offset_mask = mask;
        self
    }

    /// Declares that the device is non-coherent: it does not see the CPUs' caches, and they do not see its writes (Linux's device tree: no
    /// `dma-coherent` on Arm, `dma-noncoherent` on RISC-V). Its queues call the domain's [`CacheMaintenance`] around each mapping: the
    /// device finds what the CPU wrote before a map or a sync for the device, and the CPU what the device wrote before an unmap that gives
    /// the buffer back, or a sync for the CPU. That costs a step for each cache line.
    ///
    /// If the device may write, a piece that does not consist of whole cache lines would lose bytes to its neighbours, and take bytes from them. So
    /// [`auto`](QueueConfig::auto) and [`bounce`](QueueConfig::bounce) copy it, whatever its length, and the others refuse it:
    /// [`SharesLine`](super::DmaMapError::SharesLine). For such a device `auto` measures nothing: it maps what it may, and copies the rest.
    ///
    /// If the device may write, a partial sync ends only at the end of a line of the memory, or of the mapping. A list of which two pieces
    /// meet inside a line is synced as a whole, as its pieces lie otherwise in a copy.
    ///
    /// Its [coherent memory](crate::dma::CoherentMemory) needs [uncached](Frames::UNCACHED) frames. Mappings that belong to no queue are
    /// [refused](crate::domain::MapListError::NotCoherent). An earlier clone stays coherent.
    /// # Errors
    /// [`SetupError::NoCacheMaintenance`] if the domain has none, [`SetupError::CacheLine`] if its lines are larger than a frame.
    pub fn not_coherent(mut self) -> Result<Self, SetupError> {
        let cache = self.domain.parts.cache.as_ref().ok_or(SetupError::NoCacheMaintenance)?;
        self.line = cache.line_bytes();
        check_line(self.line, FRAME_SIZE)?;
        self.dma = self.dma.not_coherent();
        self.maintained = Some(Self::maintained);
        Ok(self)
    }

    /// Makes a queue for buffers of one type, which the compiler knows from the first [`map`](Queue::map). If it sees none (error E0283,
    /// "type annotations needed"), name the type: `nic.queue::<Buffer>(config)?`. A `let rx: Queue<_> = nic.queue(config)?` is a queue that
    /// is only used [by number](Queue::map_raw).
    ///
    /// Context: allocates all that its fast paths need. [`QueueConfig::auto`] measures, on scratch memory: twelve mappings of each size and
    /// direction, and twelve with shared ends, half of which may wait for the hardware. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`SetupError`]: there is no bounce memory, there are no addresses or no memory for a ring or a pool, or their dimensions are out of bounds.
    pub fn queue<B: DmaBuffer>(&self, config: QueueConfig) -> Result<Queue<X, B>, SetupError> {
        config.check()?;
        // First, and out of line: measuring goes deep, and a queue on its way to the caller takes much of the stack.
        let adaptive = self.adaptive(&config)?;
        self.assemble(&config, adaptive)
    }

    /// Makes a handle on the domain's pool, from which a driver takes I/O buffers if it can choose them: they stay mapped, and the pool
    /// does not copy them. Makes the pool, if there is none.
    ///
    /// Context: allocates. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`SetupError`]: [`NotTranslated`](SetupError::NotTranslated), [`NoCopyMemory`](SetupError::NoCopyMemory),
    /// [`NotCoherent`](SetupError::NotCoherent), also for a pool of [uncached](Frames::UNCACHED) frames,
    /// [`PoolBeyondReach`](SetupError::PoolBeyondReach) for a device that does not reach the pool, or why there is no pool.
    pub fn buffers(&self) -> Result<BufferPool<X>, SetupError> {
        if !self.dma.is_translated() {
            return Err(SetupError::NotTranslated);
        }
        // `CopyMemory::copy_out` relies on it: drivers store by words only in buffers of a coherent devices' pool.
        if !self.dma.is_coherent() || X::Memory::UNCACHED {
            return Err(SetupError::NotCoherent);
        }
        let device = self.pool()?;
        device.check_reach()?;
        Ok(BufferPool::new(device)?)
    }

    /// Makes a handle for a kernel whose drivers map and unmap by number, from all CPUs at once. Such a kernel makes one for each device,
    /// and uses nothing else for its mappings: the handle knows only its own.
    ///
    /// From then on no map of the domain waits for other callers, by any handle or queue: see [`dma::ops`](crate::dma::ops). If the domain has bounce
    /// memory, its pool is made, too, so that the configuration may [change](DmaOps::set_config) later.
    ///
    /// Context: allocates. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`SetupError`]: [`NotTranslated`](SetupError::NotTranslated), [`NoCopyMemory`](SetupError::NoCopyMemory),
    /// [`Threshold`](SetupError::Threshold) above the pool's, [`NotCoherent`](SetupError::NotCoherent), or why there is no pool.
    pub fn ops(&self, config: OpsConfig) -> Result<DmaOps<X>, SetupError> {
        made(|place| self.ops_in(config, place))
    }

    /// As [`ops`](Self::ops), in `place`: a handle takes more than half a KiB, and two may not fit on a kernel's stack. Returns the handle
    /// in its place, which the caller drops.
    ///
    /// # Errors
    /// As [`ops`](Self::ops); `place` stays uninitialised.
    pub fn ops_in<'a>(
        &self,
        config: OpsConfig,
        place: &'a mut MaybeUninit<DmaOps<X>>,
    ) -> Result<&'a mut DmaOps<X>, SetupError> {
        if !self.dma.is_coherent() {
            return Err(SetupError::NotCoherent);
        }
        let (domain, parts) = (&self.domain, &*self.domain.parts);
        let has_pool = parts.memory.is_some() && parts.domain.is_translated();
        let pool = if has_pool { Some(domain.shared_pool()?) } else { None };
        DmaOps::new_in(place, &parts.domain, pool, self.profile, (config, domain.clock()?))
    }
}

/// Checks that no cache line of `line` bytes is a part of two blocks of `most` bytes.
fn check_line(line: u64, most: u64) -> Result<(), SetupError> {
    if line.is_power_of_two() && line <= most { Ok(()) } else { Err(SetupError::CacheLine { line, most }) }
}
