//! A machine with one device, attached by the front door.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use portcullis::addr::{DeviceId, DmaSegment, DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::PoolConfig;
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::dma::{Device, DmaBuffer, DmaMask, DomainBuilder, QueueConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationError;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{CacheMaintenance, Platform};
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Buffer, Context, DeviceId as ModelDevice, Iommu, IommuConfig, Memory, Queue};

pub type Machine = (TableMapper<Arc<Memory>, Queue>, Arc<StdPlatform>, Arc<Memory>);

type Builder = DomainBuilder<TableMapper<Arc<Memory>, Queue>, Arc<StdPlatform>>;

pub const PAGE: u64 = 4096;
pub const CARD: ModelDevice = ModelDevice(7);
pub const BROKEN: InvalidationError = InvalidationError::TimedOut { waited_ns: 5 };

/// Four unmaps are a batch, where there are batches.
pub const BATCH: usize = 4;

/// Every strategy: this line is all that differs for a driver.
pub const STRATEGIES: [QueueConfig; 5] = [
    QueueConfig::direct(),
    QueueConfig::batched(BATCH),
    QueueConfig::ring(16, PAGE).batch(BATCH),
    QueueConfig::bounce(),
    QueueConfig::auto(16, PAGE).batch(BATCH),
];

/// Those whose unmaps wait for a batch. What owns buffers is the same for all, and Miri, which looks at that, is slow.
pub const BATCHES: &[QueueConfig] =
    if cfg!(miri) { &[STRATEGIES[1]] } else { &[STRATEGIES[1], STRATEGIES[2]] };

pub struct World {
    pub memory: Arc<Memory>,
    pub iommu: Arc<Iommu>,
    pub nic: Device<Machine>,
    /// Where nothing is translated.
    pub swiotlb: Option<Shared<Swiotlb<Arc<StdPlatform>, Arc<Memory>>>>,
}

impl World {
    pub fn new(policy: Policy) -> Self {
        Self::with(policy, |builder| builder)
    }

    /// The same with a pool of these dimensions.
    pub fn with_pool(policy: Policy, pool: PoolConfig) -> Self {
        Self::made(policy, pool, |builder| builder)
    }

    /// The same with a domain that `change` changes before it is built.
    pub fn with(policy: Policy, change: impl FnOnce(Builder) -> Builder) -> Self {
        Self::made(policy, PoolConfig::default(), change)
    }

    fn made(policy: Policy, pool: PoolConfig, change: impl FnOnce(Builder) -> Builder) -> Self {
        let memory = Memory::new(64 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let platform = Arc::new(StdPlatform::new());
        let format = VtdSecondStage::new(4, 3, 48).unwrap();
        let table = PageTable::for_cpus(Arc::clone(&memory), format, platform.cpus()).unwrap();
        let id = DomainId(1);
        let context = match policy {
            Policy::Passthrough => Context::Passthrough,
            _ => Context::SecondStage { domain: id, root: table.root(), levels: 4 },
        };
        iommu.attach(CARD, context);
        let builder = change(Domain::builder(table, iommu.queue(), id).policy(policy));
        let mut swiotlb = None;
        let builder = match policy {
            Policy::Passthrough => {
                let config = SwiotlbConfig::default();
                let pool = Swiotlb::new(Arc::clone(&platform), Arc::clone(&memory), &config).unwrap();
                swiotlb = Some(pool.clone());
                builder.swiotlb(pool)
            }
            _ => builder.bounce(Arc::clone(&memory), pool),
        };
        let builder = builder.cache_maintenance(Arc::new(NoCache));
        let nic = builder.build(platform).unwrap().attach(DeviceId(7), DmaMask::BITS_64).unwrap();
        Self { memory, iommu, nic, swiotlb }
    }

    pub fn frame(&self) -> Frame {
        self.frames(&[PAGE], &Arc::default())
    }

    /// A buffer of pieces that do not touch.
    pub fn frames(&self, lens: &[u64], drops: &Arc<AtomicUsize>) -> Frame {
        let pieces: Vec<Buffer> = lens
            .iter()
            .map(|len| {
                let piece = self.memory.buffer(*len).unwrap();
                drop(self.memory.buffer(PAGE));
                piece
            })
            .collect();
        let list = pieces.iter().map(|piece| piece.segments()[0]).collect();
        Frame { pieces, list, drops: Arc::clone(drops) }
    }

    pub fn writes(&self, iova: Iova, bytes: &[u8]) -> bool {
        self.iommu.dma_write(CARD, iova, bytes).is_ok()
    }

    /// What the device reads.
    pub fn reads(&self, iova: Iova) -> Option<[u8; 8]> {
        let mut at = None;
        self.iommu.translate_each(CARD, iova, 8, Permissions::READ, |_, phys, _| at = Some(phys)).ok()?;
        let mut bytes = [0; 8];
        self.memory.read(at?, &mut bytes).ok()?;
        Some(bytes)
    }

    /// The device fills all of a mapping.
    pub fn fill(&self, segments: impl Iterator<Item = DmaSegment>, byte: u8) {
        for segment in segments {
            assert!(self.writes(segment.iova, &vec![byte; segment.len as usize]), "{segment:?}");
        }
    }
}

/// There is nothing to maintain: the model's memory has no cache before it.
struct NoCache;

// SAFETY: neither method does anything, and none has to.
unsafe impl CacheMaintenance for NoCache {
    fn line_bytes(&self) -> u64 {
        64
    }

    unsafe fn clean(&self, _: PhysAddr, _: u64) {}

    unsafe fn invalidate(&self, _: PhysAddr, _: u64) {}
}

/// A driver's buffer, which counts its drops.
#[derive(Debug)]
pub struct Frame {
    pieces: Vec<Buffer>,
    list: Vec<PhysSegment>,
    drops: Arc<AtomicUsize>,
}

// SAFETY: its memory is that of the model's buffers, which are never exchanged; it is accessed as theirs is.
unsafe impl DmaBuffer for Frame {
    fn segments(&self) -> &[PhysSegment] {
        &self.list
    }
}

impl Frame {
    pub fn put(&self, bytes: &[u8; 8]) {
        self.pieces[0].write(0, bytes).unwrap();
    }

    pub fn get(&self) -> [u8; 8] {
        let mut bytes = [0; 8];
        self.pieces[0].read(0, &mut bytes).unwrap();
        bytes
    }

    /// Whether all bytes are this.
    pub fn is_all(&self, byte: u8) -> bool {
        self.pieces.iter().all(|piece| {
            let mut bytes = vec![0; piece.len() as usize];
            piece.read(0, &mut bytes).unwrap();
            bytes.iter().all(|found| *found == byte)
        })
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}
