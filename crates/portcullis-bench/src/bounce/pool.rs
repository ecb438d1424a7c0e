//! Behind an IOMMU: the library's pool of buffers that stay mapped, and mappings that are made and ended strictly.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::std_platform::StdPlatform;
use portcullis_trace::replay::Profile;

use super::memory::{Buffers, Ram};
use super::requests::{ByRequest, by_request};
use super::subject::Subject;
use super::workload::Case;
use crate::invalidation::hardware::{Hardware, Timing};
use crate::invalidation::parts::{FramesInUse, settled};
use crate::lane::{Lane, put};
use crate::runner::Failure;
use crate::timer::OpTimer;

fn refused(error: impl std::error::Error) -> Failure {
    Failure::Refused(error.to_string())
}

/// A domain, strict, and the hardware behind it.
pub(crate) struct Machine {
    platform: StdPlatform,
    domain: Shared<Domain<ByRequest, StdPlatform>>,
    frames: FramesInUse,
}

impl Machine {
    /// Hardware that takes the waits of `profile`.
    pub(crate) fn new(
        platform: &StdPlatform,
        profile: &Profile,
        timer: &OpTimer,
        crowded: bool,
    ) -> Result<Self, Failure> {
        let hardware = Hardware::new(Timing::of(profile), profile.waits.costs(), timer, crowded, None);
        let (mapper, frames) = by_request(platform, Arc::new(hardware), profile)?;
        let domain = Domain::new(platform.clone(), mapper, Policy::Strict).map_err(refused)?;
        Ok(Self { platform: platform.clone(), domain, frames })
    }

    /// Where the tables lead.
    fn reach(&self, iova: u64) -> Option<u64> {
        let table = self.domain.mapper().inner().table();
        table.iova_to_phys(&self.platform, Iova::new(iova)).map(PhysAddr::get)
    }
}

type Device = BounceDevice<ByRequest, StdPlatform, Ram<true>>;

/// The pool, and a device that is trusted.
pub(crate) struct Pooled {
    machine: Machine,
    device: Device,
    case: Case,
}

impl Pooled {
    pub(crate) fn new(machine: Machine, case: &Case) -> Result<Self, Failure> {
        let default = PoolConfig::default();
        let class_bytes = default.class_bytes.max(case.pool_bytes());
        let config = PoolConfig { class_bytes, ..default };
        let pool = BouncePool::new(machine.domain.clone(), Ram, config).map_err(refused)?;
        let device = Device::new(pool, DeviceProfile::default()).map_err(refused)?;
        Ok(Self { machine, device, case: *case })
    }
}

impl Subject for Pooled {
    fn lane(self: Arc<Self>, _: usize, buffers: Arc<Buffers>) -> Result<Box<dyn Lane>, Failure> {
        let (device, direction) = (self.device.clone(), self.case.direction());
        let iovas = vec![Iova::new(0); self.case.buffers()];
        Ok(Box::new(Bounced { device, direction, buffers, iovas }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        self.machine.reach(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        // What is not in use goes; whatever stays is found in the tables.
        self.device.pool().trim(0).map_err(refused)?;
        let Machine { domain, frames, platform, .. } = &self.machine;
        frames.only_the_root(domain.mapper().inner(), platform)
    }
}

struct Bounced {
    device: Device,
    direction: Direction,
    buffers: Arc<Buffers>,
    iovas: Vec<Iova>,
}

impl Lane for Bounced {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let list = [PhysSegment { phys: PhysAddr::new(self.buffers.at(index)), len: self.buffers.bytes() }];
        // SAFETY: the buffer is memory of this process and as long as it is said to be (`iovas` has as many places as
        // there are buffers); only this thread uses it, and not during a call.
        let mapped = unsafe { self.device.map(&list, self.direction, Attributes::default()) };
        put(&mut self.iovas, index, mapped.ok().map(|mapping| mapping.iova()))
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        // SAFETY: only this thread uses the mapping, or the memory that it is of.
        unsafe { self.device.pool().unmap(self.iovas[index], self.buffers.bytes()) }.is_ok()
    }

    fn address(&self, index: usize) -> u64 {
        self.iovas[index].get()
    }
}

/// No bounce.
pub(crate) struct Strict {
    machine: Machine,
    device: DmaDevice<ByRequest, StdPlatform>,
    case: Case,
}

impl Strict {
    pub(crate) fn new(machine: Machine, case: &Case) -> Result<Self, Failure> {
        let device = DmaDevice::new(machine.domain.clone(), u64::MAX).map_err(refused)?;
        Ok(Self { machine, device, case: *case })
    }
}

impl Subject for Strict {
    fn lane(self: Arc<Self>, _: usize, buffers: Arc<Buffers>) -> Result<Box<dyn Lane>, Failure> {
        let (device, direction) = (self.device.clone(), self.case.direction());
        let iovas = vec![Iova::new(0); self.case.buffers()];
        Ok(Box::new(Mapped { device, direction, buffers, iovas }))
    }

    fn reach(&self, address: u64) -> Option<u64> {
        self.machine.reach(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        let Machine { domain, frames, platform, .. } = &self.machine;
        let stats = domain.stats();
        let handed_out = stats.taken_iova_bytes.saturating_sub(stats.cached_iova_bytes);
        settled(domain.mapper().inner(), frames, platform, handed_out)
    }
}

struct Mapped {
    device: DmaDevice<ByRequest, StdPlatform>,
    direction: Direction,
    buffers: Arc<Buffers>,
    iovas: Vec<Iova>,
}

impl Lane for Mapped {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let phys = PhysAddr::new(self.buffers.at(index));
        // SAFETY: no device is behind it.
        let mapped = unsafe { self.device.map_single(phys, self.buffers.bytes(), self.direction) };
        put(&mut self.iovas, index, mapped.ok())
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        self.device.unmap_single(self.iovas[index], self.buffers.bytes()).is_ok()
    }

    fn address(&self, index: usize) -> u64 {
        self.iovas[index].get()
    }
}

#[cfg(test)]
mod tests {
    use super::super::workload::{Shape, Way};
    use super::*;

    #[test]
    fn a_warm_pool_changes_no_mapping() {
        let profile = Profile::load("none").unwrap();
        let case =
            Case { shape: Shape::Pool(16 << 10), way: Some(Way::Both), threads: 1, depth: 1, crowded: true };
        let machine =
            Machine::new(&StdPlatform::new(), &profile, &OpTimer::calibrated(), case.crowded).unwrap();
        let pooled = Arc::new(Pooled::new(machine, &case).unwrap());
        let buffers = Arc::new(Buffers::new(case.buffers(), case.shape.bytes()).unwrap());
        let mut lane = Arc::clone(&pooled).lane(0, buffers).unwrap();
        let fresh = || {
            let usage = pooled.device.pool().usage();
            (usage.bounced - usage.reused, usage.bounced)
        };
        assert!(lane.pairs(1));
        let (before, after) = (fresh(), { lane.pairs(1000).then(&fresh).unwrap() });
        assert!(before.0 > 0, "the first one found no buffer");
        assert_eq!(after, (before.0, before.1 + 1000));
    }

    /// A device may read or write a copy as its mapping allows.
    #[test]
    fn a_device_may_do_what_the_direction_says() {
        let (platform, profile, timer) =
            (StdPlatform::new(), Profile::load("none").unwrap(), OpTimer::calibrated());
        for way in [Way::To, Way::From, Way::Both] {
            let case =
                Case { shape: Shape::Pool(16 << 10), way: Some(way), threads: 1, depth: 1, crowded: true };
            let machine = || Machine::new(&platform, &profile, &timer, case.crowded).unwrap();
            let pooled = Arc::new(Pooled::new(machine(), &case).unwrap());
            let strict = Arc::new(Strict::new(machine(), &case).unwrap());
            let buffers = || Arc::new(Buffers::new(case.buffers(), case.shape.bytes()).unwrap());
            let lanes = [Arc::clone(&pooled).lane(0, buffers()), Arc::clone(&strict).lane(0, buffers())];
            for (lane, machine) in lanes.into_iter().zip([&pooled.machine, &strict.machine]) {
                let mut lane = lane.unwrap();
                assert!(lane.map(0));
                let table = machine.domain.mapper().inner().table();
                let (_, found) = table.translate(&platform, Iova::new(lane.address(0))).unwrap();
                assert_eq!(found.permissions, way.direction().permissions(), "{way:?}");
                assert!(lane.unmap(0));
            }
        }
    }
}
