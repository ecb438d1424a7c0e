//! A network driver's interface to the DMA layer, and its implementation by Portcullis. [`Linux`](super::linux::Linux) is the other one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use portcullis::addr::{Direction, DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{DmaDevice, Ended, RawMapping, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};
use portcullis_model::open::{OpenDevice, OpenRing};
use portcullis_model::{Context, DeviceId, Iommu, Memory, Queue};

pub const PAGE: u64 = 4096;
pub const NIC: DeviceId = DeviceId(1);
pub const DOMAIN: DomainId = DomainId(1);
/// Any address: no access checks the memory behind a translation.
pub const MEMORY: PhysAddr = PhysAddr::new(1 << 40);
/// CPUs that have used the address space.
pub const CPUS: usize = 32;
/// Pages of a receive descriptor.
pub const DESCRIPTOR_PAGES: u64 = 64;
/// Receive descriptors of each queue, and packets in its transmit queue.
pub const DESCRIPTORS: usize = 4;
pub const TRANSMITS: u64 = 1024;

/// The use of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Receive,
    Transmit,
    /// Another driver's.
    Other,
}

/// The addresses of pages that were mapped together.
pub struct Mapped {
    pub pages: Vec<Iova>,
    ring: Option<RawMapping>,
}

impl Mapped {
    /// Mapped one by one.
    pub fn pages(pages: Vec<Iova>) -> Self {
        Self { pages, ring: None }
    }
}

/// The DMA layer for a driver.
pub trait Driver {
    /// Maps `pages` pages on `cpu`.
    fn map(&mut self, cpu: usize, purpose: Purpose, pages: u64) -> Mapped;

    /// Unmaps all of what [`map`](Self::map) returned.
    fn unmap(&mut self, cpu: usize, purpose: Purpose, mapped: Mapped);

    /// Maps a queue's own memory, contiguous, for good.
    fn own(&mut self, bytes: u64) -> Iova;
}

/// Four-level tables with 4 KiB leaves, which `iommu` walks for the card.
pub fn table(iommu: &Arc<Iommu>) -> PageTable<Arc<Memory>, VtdSecondStage> {
    let format = VtdSecondStage::new(4, 1, 52).unwrap();
    let table = PageTable::for_cpus(Arc::clone(iommu.memory()), format, CPUS).unwrap();
    let (root, levels) = (table.root(), table.levels());
    iommu.attach(NIC, Context::SecondStage { domain: DOMAIN, root, levels });
    table
}

/// A machine of [`CPUS`] CPUs, one of which runs at a time.
#[derive(Debug, Clone, Default)]
pub struct Cpus {
    now: Arc<AtomicUsize>,
    number: PlatformNumber,
}

// SAFETY: one thread runs all CPUs, so no CPU is lent twice at once; its own stores need no fence.
unsafe impl Platform for Cpus {
    fn cpus(&self) -> usize {
        CPUS
    }

    fn number(&self) -> PlatformNumber {
        self.number
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: one thread runs all CPUs.
        f(Some(&unsafe { LocalCpu::new(self.now.load(Ordering::Relaxed)) }))
    }

    fn now_ns(&self) -> u64 {
        0
    }

    // Strict protection uses no timer, and no CPU goes offline.
    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}

type Device = DmaDevice<TableMapper<Arc<Memory>, Queue>, Cpus>;
type Ring = StrictRing<TableMapper<Arc<Memory>, Queue>, Cpus>;

/// Portcullis: a domain under the strict policy, with a receive and a transmit ring for each queue, or without rings.
pub struct Ours {
    iommu: Arc<Iommu>,
    device: Device,
    platform: Cpus,
    rings: Vec<[Ring; 2]>,
}

impl Ours {
    pub fn new(iommu: &Arc<Iommu>) -> Self {
        let mapper = TableMapper::new(table(iommu), iommu.queue(), DOMAIN, Vec::new());
        let platform = Cpus::default();
        let domain = Domain::new(platform.clone(), mapper, Policy::Strict).unwrap();
        let device = DmaDevice::new(domain, u64::MAX).unwrap();
        Self { iommu: Arc::clone(iommu), device, platform, rings: Vec::new() }
    }

    /// Makes rings for `queues` queues: received descriptors are unmapped one by one, sent ones in batches of 64.
    pub fn make_rings(&mut self, queues: usize) {
        let receive = StrictRingConfig::new(DESCRIPTORS as u32 + 1, DESCRIPTOR_PAGES * PAGE, 1);
        let transmit = StrictRingConfig::new(TRANSMITS as u32, PAGE, 64);
        let ring = |config| StrictRing::new(&self.device, config).unwrap();
        self.rings = (0..queues).map(|_| [ring(receive), ring(transmit)]).collect();
    }

    fn ring(&mut self, cpu: usize, purpose: Purpose) -> Option<&mut Ring> {
        let [receive, transmit] = self.rings.get_mut(cpu)?;
        match purpose {
            Purpose::Receive => Some(receive),
            Purpose::Transmit => Some(transmit),
            Purpose::Other => None,
        }
    }
}

fn direction(purpose: Purpose) -> Direction {
    if purpose == Purpose::Transmit { Direction::ToDevice } else { Direction::FromDevice }
}

impl Driver for Ours {
    fn map(&mut self, cpu: usize, purpose: Purpose, pages: u64) -> Mapped {
        self.platform.now.store(cpu, Ordering::Relaxed);
        let direction = direction(purpose);
        if let Some(ring) = self.ring(cpu, purpose) {
            let list = [PhysSegment { phys: MEMORY, len: pages * PAGE }];
            let mapping = ring.open(&list, direction).unwrap();
            let page = |n| mapping.iova().checked_add(n * PAGE).unwrap();
            return Mapped { pages: (0..pages).map(page).collect(), ring: Some(mapping) };
        }
        Mapped::pages((0..pages).map(|_| self.device.open_single(MEMORY, PAGE, direction).unwrap()).collect())
    }

    fn unmap(&mut self, cpu: usize, purpose: Purpose, mapped: Mapped) {
        self.platform.now.store(cpu, Ordering::Relaxed);
        let Mapped { pages, ring } = mapped;
        match (ring, self.ring(cpu, purpose)) {
            (Some(mapping), Some(ring)) => {
                if ring.unmap(mapping).unwrap() == Ended::Pending {
                    return;
                }
            }
            _ => pages.iter().for_each(|iova| self.device.unmap_single(*iova, PAGE).unwrap()),
        }
        for iova in pages {
            assert_eq!(self.iommu.probe(NIC, iova, Permissions::READ), None, "strict");
            assert_eq!(self.iommu.probe(NIC, iova, Permissions::WRITE), None, "strict");
        }
    }

    fn own(&mut self, bytes: u64) -> Iova {
        self.device.open_single(MEMORY, bytes, Direction::Bidirectional).unwrap()
    }
}
