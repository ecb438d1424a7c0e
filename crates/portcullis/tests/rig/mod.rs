//! A domain in the software IOMMU whose platform, and whose way to the hardware, are the test's own.
#![allow(dead_code, unused_imports, reason = "each test file uses a part")]

mod clocked;
mod hooked;
mod moody;
mod observed;

use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, MapListError, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationQueue;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::Platform;
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory, Queue};

use crate::played::Played;

pub use clocked::Clocked;
pub use hooked::Hooked;
pub use moody::{Call, Moody};
pub use observed::{Moment, Observed};

/// The same for all rigs, whatever their queues and platforms are: so the library is compiled for them once.
pub type Mapper = TableMapper<Arc<Memory>, Arc<dyn InvalidationQueue>>;
pub type Dom = Domain<Mapper, Played>;
pub type Device = DmaDevice<Mapper, Played>;

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
    pub domain: Shared<Dom>,
    pub device: Device,
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
        let (domain, device) =
            attach(&memory, &iommu, &platform, Arc::clone(&queue) as _, (DEVICE, DomainId(1)), policy);
        Self { memory, iommu, platform, queue, domain, device }
    }

    /// Another domain of the same unit, with a device of its own.
    pub fn another(&self, number: u16, policy: Policy) -> (Shared<Dom>, Device) {
        let ids = (DeviceId(number.into()), DomainId(number));
        attach(&self.memory, &self.iommu, &self.platform, Arc::clone(&self.queue) as _, ids, policy)
    }

    /// Takes back what CPUs keep. How many bytes of addresses are nobody's and not free, and how many are counted as lost. (What
    /// is asked for is to be powers of two, so that nothing is rounded.)
    pub fn gone(&self) -> (u64, u64) {
        self.domain.flush().unwrap();
        // SAFETY: nothing is mapped, as there is no such address: but all is looked through for it.
        let none = unsafe { self.domain.map(&[page(1 << 20)], Permissions::READ, Iova::new(PAGE - 1)) };
        assert!(matches!(none, Err(MapListError::Iova(_))), "{none:?}");
        let usage = self.domain.stats();
        (usage.taken_iova_bytes - usage.cached_iova_bytes, self.domain.stats().lost_iova_bytes)
    }

    /// Whether the device is let through at `iova`. It leaves a cached translation if so.
    pub fn reaches(&self, iova: Iova) -> bool {
        self.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok()
    }
}

fn attach<P: Platform + Clone>(
    memory: &Arc<Memory>,
    iommu: &Iommu,
    platform: &P,
    queue: Arc<dyn InvalidationQueue>,
    (device, id): (DeviceId, DomainId),
    policy: Policy,
) -> (Shared<Dom>, Device) {
    let format = VtdSecondStage::new(4, 3, 48).unwrap();
    let table = PageTable::for_cpus(Arc::clone(memory), format, platform.cpus()).unwrap();
    iommu.attach(device, Context::SecondStage { domain: id, root: table.root(), levels: 4 });
    let mapper = TableMapper::new(table, queue, id, Vec::new());
    let domain = Domain::new(Played::new(platform.clone()), mapper, policy).unwrap();
    let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
    (domain, device)
}

/// Memory that no test reads or writes, page `number`.
pub fn page(number: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + number * PAGE), len: PAGE }
}
