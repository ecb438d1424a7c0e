//! A domain in the software IOMMU, with one device.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::{Arc, LazyLock};

use portcullis::addr::{DomainId, Iova, Permissions};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationQueue;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory};

use crate::played::Played;

pub type Mapper = TableMapper<Arc<Memory>, Arc<dyn InvalidationQueue>>;

pub const DEVICE: DeviceId = DeviceId(7);
pub const PAGE: u64 = 4096;

/// A platform for those who need no events: threads share it.
pub static PLATFORM: LazyLock<StdPlatform> = LazyLock::new(StdPlatform::new);

/// The VT-d format with all page sizes.
pub fn vtd(levels: u32) -> VtdSecondStage {
    VtdSecondStage::new(levels, 3, 52).unwrap()
}

pub struct Bench {
    pub memory: Arc<Memory>,
    pub iommu: Arc<Iommu>,
    pub domain: Shared<Domain<Mapper, Played>>,
    pub device: DmaDevice<Mapper, Played>,
}

impl Bench {
    pub fn new(policy: Policy) -> Self {
        Self::on(StdPlatform::new(), policy)
    }

    pub fn on(platform: impl Platform, policy: Policy) -> Self {
        let memory = Memory::new(64 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::new(Arc::clone(&memory), vtd(4)).unwrap();
        let context = match policy {
            Policy::Passthrough => Context::Passthrough,
            _ => Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 },
        };
        iommu.attach(DEVICE, context);
        let mapper = TableMapper::new(table, Arc::new(iommu.queue()) as _, DomainId(1), Vec::new());
        let domain = Domain::new(Played::new(platform), mapper, policy).unwrap();
        let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
        Self { memory, iommu, domain, device }
    }

    /// Whether the device can write at `iova` now. It also leaves a cached translation if it can.
    pub fn writes(&self, iova: Iova) -> bool {
        self.iommu.dma_write(DEVICE, iova, &[0xee]).is_ok()
    }

    /// Whether the device can read at `iova` now.
    pub fn reads(&self, iova: Iova) -> bool {
        self.iommu.access(DEVICE, iova, 1, Permissions::READ).is_ok()
    }
}
