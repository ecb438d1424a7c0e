//! [`Device`]: what a device may reach and which devices it trusts. It makes queues.

use core::fmt;
use core::mem::MaybeUninit;

use super::DmaDomain;
use crate::addr::DeviceId;
use crate::bounce::pool::DeviceProfile;
use crate::dma::machine::DeviceOf;
use crate::dma::queue::{AnyLane, Queue, QueueConfig};
use crate::dma::{BufferPool, DmaBuffer, DmaOps, Machine, OpsConfig};
use crate::domain::{Policy, PolicyError};
use crate::heap::made;
use crate::platform::{FRAME_SIZE, Frames};
use crate::setup::SetupError;

/// A device of a domain, which makes [queues](Queue). Cheap to clone; a clone is the same device.
pub struct Device<X: Machine> {
    pub(super) domain: DmaDomain<X>,
    pub(super) dma: DeviceOf<X>,
    pub(super) id: DeviceId,
    pub(super) profile: DeviceProfile,
    /// Bytes of a cache line, for a non-coherent device; else 0.
    pub(super) line: u64,
    /// Makes the lanes of a non-coherent device. A pointer, so that only a crate with such a device compiles their code.
    pub(super) maintained: Option<MakeLane<X>>,
}

type MakeLane<X> = fn(&Device<X>, &QueueConfig) -> Result<AnyLane<X>, SetupError>;

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
    /// The number by which the IOMMU knows the device.
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// The domain.
    pub fn domain(&self) -> &DmaDomain<X> {
        &self.domain
    }

    /// The policy by which the device's mappings end now, unless their queue or a split buffer makes them end strictly.
    pub fn policy(&self) -> Policy {
        self.dma.policy()
    }

    /// Gives the device a policy of its own, or, with `None`, its domain's again: see [`DmaDevice::set_policy`](crate::dma::DmaDevice::set_policy).
    pub fn set_policy(&self, policy: Option<Policy>) -> Result<(), PolicyError> {
        self.dma.set_policy(policy)
    }

    /// The device for the layers below: [coherent memory](crate::dma::CoherentMemory), mappings that belong to no queue.
    pub fn dma(&self) -> &DeviceOf<X> {
        &self.dma
    }

    /// Declares that the device is not hostile: it may reach pages that buffers share with other data, so queues that copy map buffers above the
    /// threshold as they are.
    pub fn trusted(mut self) -> Self {
        self.profile.untrusted = false;
        self
    }

    /// Puts the device into a group of devices that trust each other: one may see what another had in a bounce buffer. Devices of different groups
    /// never find each other's bytes there. By default each device has a group of its own, with the number of its [id](Self::id).
    ///
    /// Devices of one domain share its addresses, so a hostile one can reach another's *open* mappings. If that matters, give devices domains of
    /// their own.
    pub fn in_group(mut self, group: u32) -> Self {
        self.profile.group = group;
        self
    }

    /// Makes copies keep these low bits of a buffer's address: 0xfff for NVMe (Linux's `dma_set_min_align_mask`). If that is impossible, making a
    /// [queue](Self::queue) that copies is an error.
    pub fn keeping_offsets(mut self, mask: u64) -> Self {
        self.profile.offset_mask = mask;
        self
    }

    /// Declares that the device is non-coherent: it does not see the CPUs' caches, and they do not see its writes (Linux's device tree: no
    /// `dma-coherent` on Arm, `dma-noncoherent` on RISC-V). Its queues call the domain's [`CacheMaintenance`](crate::platform::CacheMaintenance)
    /// around each mapping, in O(cache lines): the device finds what the CPU wrote before a map or a sync for the device, and the CPU what the device
    /// wrote before an unmap that gives the buffer back, or a sync for the CPU.
    ///
    /// If the device may write, the CPU's accesses beside a piece that shares a cache line could destroy the device's data, and the reverse. So
    /// [`auto`](QueueConfig::auto) and [`bounce`](QueueConfig::bounce) copy it, and the others refuse it:
    /// [`SharesLine`](crate::dma::DmaMapError::SharesLine). For a non-coherent device `auto` measures nothing: it maps what it may, and copies the
    /// rest.
    ///
    /// If the device may write, a partial sync ends only at the end of a line of the memory, or of the mapping. Sync a list as a whole if two of its
    /// pieces meet inside a line, as its pieces lie otherwise in a copy.
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

    /// Makes a queue for buffers of one type, which the compiler infers from the first [`map`](Queue::map). Without a map (error E0283, "type
    /// annotations needed"), name the type: `nic.queue::<Buffer>(config)?`; or, for a queue that is only used [by address](Queue::map_raw),
    /// `let rx: Queue<_> = nic.queue(config)?`.
    ///
    /// Context: allocates all that its fast paths need. [`QueueConfig::auto`] measures, on scratch memory: twelve mappings of each size and
    /// direction, and twelve with shared ends, half of which may wait for hardware. A ring flushes if addresses are exhausted, which waits for
    /// hardware. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`SetupError`]: no bounce memory, no addresses or memory for a ring or a pool, or dimensions out of bounds.
    pub fn queue<B: DmaBuffer>(&self, config: QueueConfig) -> Result<Queue<X, B>, SetupError> {
        config.check()?;
        // First, and out of line: measuring needs much stack, and so does a queue that is being returned.
        let adaptive = self.adaptive(&config)?;
        self.assemble(&config, adaptive)
    }

    /// Makes a handle on the domain's pool, from which a driver takes I/O buffers that stay mapped. Makes the pool, if there is none.
    ///
    /// Context: allocates. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`SetupError`]: [`NotTranslated`](SetupError::NotTranslated), [`NoCopyMemory`](SetupError::NoCopyMemory),
    /// [`NotCoherent`](SetupError::NotCoherent), also for a pool of [uncached](Frames::UNCACHED) frames,
    /// [`PoolBeyondReach`](SetupError::PoolBeyondReach), or why there is no pool.
    pub fn buffers(&self) -> Result<BufferPool<X>, SetupError> {
        if !self.dma.is_translated() {
            return Err(SetupError::NotTranslated);
        }
        // `CopyMemory::copy_out` relies on this: drivers store by words only in buffers of a coherent device's pool.
        if !self.dma.is_coherent() || X::Memory::UNCACHED {
            return Err(SetupError::NotCoherent);
        }
        let device = self.pool()?;
        device.check_reach()?;
        Ok(BufferPool::new(device)?)
    }

    /// Makes a handle for a kernel whose drivers map and unmap by address, on any CPU. Such a kernel makes one for each device, and uses nothing else
    /// for its mappings: the handle knows only its own.
    ///
    /// From then on no map of the domain waits for other callers, by any handle or queue: see [`dma::ops`](crate::dma::ops). If the domain has bounce
    /// memory, this makes its pool, too, so that the configuration may [change](DmaOps::set_config) later.
    ///
    /// Context: allocates. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`SetupError`]: [`NotTranslated`](SetupError::NotTranslated), [`NoCopyMemory`](SetupError::NoCopyMemory),
    /// [`Threshold`](SetupError::Threshold) above the pool's, [`NotCoherent`](SetupError::NotCoherent), or why there is no pool.
    pub fn ops(&self, config: OpsConfig) -> Result<DmaOps<X>, SetupError> {
        made(|place| self.ops_in(config, place))
    }

    /// As [`ops`](Self::ops), in `place`: a handle takes more than half a KiB of a kernel's stack. The caller drops the handle. After an error `place`
    /// is uninitialised.
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

/// Checks that no cache line lies in two blocks of `most` bytes.
pub(super) fn check_line(line: u64, most: u64) -> Result<(), SetupError> {
    if line.is_power_of_two() && line <= most { Ok(()) } else { Err(SetupError::CacheLine { line, most }) }
}
