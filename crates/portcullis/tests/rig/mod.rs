//! A domain in the software IOMMU whose platform, and whose way to the hardware, are the test's own.
#![allow(dead_code, unused_imports, reason = "each test file uses a part")]

mod clocked;
mod hooked;
mod observed;

use std::sync::Arc;

use portcullis::addr::{Iova, Permissions, PhysAddr};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, PhysSegment, Policy};
use portcullis::invalidation::{DomainId, InvalidationQueue};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::Platform;
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory, Queue};

pub use clocked::Clocked;
pub use hooked::Hooked;
pub use observed::{Moment, Observed};

pub type Mapper<Q> = TableMapper<Arc<Memory>, Arc<Q>>;
pub type Dom<P, Q> = Domain<Mapper<Q>, P>;
pub type Device<P, Q> = DmaDevice<Mapper<Q>, P>;

pub const DEVICE: DeviceId = DeviceId(7);
pub const PAGE: u64 = 4096;
pub const ANYWHERE: Iova = Iova::new(u64::MAX);
/// Lazy protection whose window no test outlives.
pub const LAZY_FOREVER: Policy = Policy::Lazy { window_ns: 1 << 62 };

pub struct Rig<P: Platform, Q: InvalidationQueue> {
    pub memory: Arc<Memory>,
    pub iommu: Arc<Iommu>,
    pub platform: P,
    pub queue: Arc<Q>,
    pub domain: Arc<Dom<P, Q>>,
    pub device: Device<P, Q>,
}

impl<P: Platform + Clone, Q: InvalidationQueue> Rig<P, Q> {
    /// `wrap` puts something between the domain and the unit's queue.
    pub fn new(platform: P, policy: Policy, wrap: impl FnOnce(Queue) -> Q) -> Self {
        Self::with_config(platform, policy, |_| (), wrap)
    }

    /// The same with a unit that is not like others.
    pub fn with_config(
        platform: P,
        policy: Policy,
        change: impl FnOnce(&mut IommuConfig),
        wrap: impl FnOnce(Queue) -> Q,
    ) -> Self {
        let memory = Memory::new(256 << 20);
        // An IOTLB that forgets next to nothing by itself: what was not invalidated is found.
        let mut config = IommuConfig { iotlb_entries: 1 << 14, ..IommuConfig::new(Arc::clone(&memory)) };
        change(&mut config);
        let iommu = Iommu::new(config);
        let queue = Arc::new(wrap(iommu.queue()));
        let (domain, device) = attach(&memory, &iommu, &platform, &queue, (DEVICE, DomainId(1)), policy);
        Self { memory, iommu, platform, queue, domain, device }
    }

    /// Another domain of the same unit, with a device of its own.
    pub fn another(&self, number: u16, policy: Policy) -> (Arc<Dom<P, Q>>, Device<P, Q>) {
        let ids = (DeviceId(number.into()), DomainId(number));
        attach(&self.memory, &self.iommu, &self.platform, &self.queue, ids, policy)
    }

    /// Whether the device is let through at `iova`. It leaves a cached translation if so.
    pub fn reaches(&self, iova: Iova) -> bool {
        self.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok()
    }
}

fn attach<P: Platform + Clone, Q: InvalidationQueue>(
    memory: &Arc<Memory>,
    iommu: &Iommu,
    platform: &P,
    queue: &Arc<Q>,
    (device, id): (DeviceId, DomainId),
    policy: Policy,
) -> (Arc<Dom<P, Q>>, Device<P, Q>) {
    let format = VtdSecondStage::new(4, 3, 48).unwrap();
    let table = PageTable::new(Arc::clone(memory), format, platform.slots()).unwrap();
    iommu.attach(device, Context::SecondStage { domain: id, root: table.root(), levels: 4 });
    let mapper = TableMapper::new(table, Arc::clone(queue), id, Vec::new());
    let domain = Domain::new(platform.clone(), mapper, policy).unwrap();
    let device = DmaDevice::new(Arc::clone(&domain), u64::MAX);
    (domain, device)
}

/// Memory that no test reads or writes, page `number`.
pub fn page(number: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + number * PAGE), len: PAGE }
}
