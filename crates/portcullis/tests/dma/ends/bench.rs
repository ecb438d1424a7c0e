//! A domain in the software IOMMU, with one device.

use std::sync::Arc;

use portcullis::addr::{DmaSegment, DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{DmaDevice, Mapping, QueueConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenDevice;
use portcullis_model::{Buffer, Context, DeviceId, Iommu, IommuConfig, Memory, Queue};

use crate::queued::{QueueOf, queue};

pub type Mapper = TableMapper<Arc<Memory>, Queue>;
pub type BufferQueue = QueueOf<Mapper, StdPlatform, Buffer>;

pub const DEVICE: DeviceId = DeviceId(7);
pub const PAGE: u64 = 4096;
/// Lazy protection whose window no test outlives.
pub const LAZY_FOREVER: Policy = Policy::Lazy { window_ns: u64::MAX };

pub struct Bench {
    pub memory: Arc<Memory>,
    pub iommu: Arc<Iommu>,
    pub domain: Shared<Domain<Mapper, StdPlatform>>,
    pub device: DmaDevice<Mapper, StdPlatform>,
}

impl Bench {
    pub fn new(policy: Policy) -> Self {
        let memory = Memory::new(8 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let platform = StdPlatform::new();
        let format = VtdSecondStage::new(4, 3, 48).unwrap();
        let table = PageTable::for_cpus(Arc::clone(&memory), format, platform.cpus()).unwrap();
        let context = match policy {
            Policy::Passthrough => Context::Passthrough,
            _ => Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 },
        };
        iommu.attach(DEVICE, context);
        let mapper = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let domain = Domain::new(platform, mapper, policy).unwrap();
        let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
        Self { memory, iommu, domain, device }
    }

    /// A mapped buffer of `pages`, of which the device has used, and cached, every one.
    pub fn mapped(&self, queue: &mut BufferQueue, pages: u64) -> Mapping<Buffer> {
        let buffer = self.memory.buffer(pages * PAGE).unwrap();
        let mapping = queue.map(buffer, portcullis::addr::Direction::Bidirectional).unwrap();
        assert!((0..pages).all(|page| self.writes(mapping.iova(), page)));
        mapping
    }

    /// A queue of the device, for batches of so many.
    pub fn batched(&self, most: usize) -> BufferQueue {
        queue(&self.device, QueueConfig::batched(most))
    }

    /// Whether the device can write to the `page`-th page from `iova` on. It leaves a cached translation if so.
    pub fn writes(&self, iova: Iova, page: u64) -> bool {
        self.iommu.dma_write(DEVICE, Iova::new(iova.get() + page * PAGE), &[0xee]).is_ok()
    }

    /// Whether the device is let through, wherever that leads. It leaves a cached translation if so.
    pub fn reaches(&self, iova: Iova) -> bool {
        self.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok()
    }

    pub fn submissions(&self) -> u64 {
        self.iommu.stats().submissions
    }

    /// Maps one page of memory by number, and has the device use it.
    pub fn raw(&self, number: u64) -> [DmaSegment; 1] {
        let mut view = [DmaSegment::default()];
        let list = [page(number)];
        self.device.open_sg(&list, portcullis::addr::Direction::Bidirectional, &mut view).unwrap();
        assert!(self.reaches(view[0].iova));
        view
    }
}

/// Memory that no test reads or writes, page `number`.
pub fn page(number: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + number * PAGE), len: PAGE }
}
