//! A machine whose card is not coherent.

use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, PhysAddr, PhysSegment};
use portcullis::bounce::pool::PoolConfig;
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::dma::{AnyQueue, Device, DmaDomain, DmaMapError, DmaMask, QueueConfig, RawMapping};
use portcullis::domain::{Domain, Policy};
use portcullis::invalidation::InvalidationError;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Context, DeviceId as ModelDevice, Iommu, IommuConfig, Memory, Queue};

use crate::cache::{Cache, LINE, Ram};

pub type Machine = (TableMapper<Arc<Memory>, Queue>, Arc<StdPlatform>, Ram);

pub const PAGE: u64 = 4096;
pub const CARD: ModelDevice = ModelDevice(7);
pub const BROKEN: InvalidationError = InvalidationError::TimedOut { waited_ns: 5 };
pub const BATCH: usize = 3;

pub const STRATEGIES: [QueueConfig; 5] = [
    QueueConfig::direct(),
    QueueConfig::batched(BATCH),
    QueueConfig::ring(64, PAGE).batch(BATCH),
    QueueConfig::bounce(),
    QueueConfig::auto(64, PAGE).batch(BATCH),
];

/// Those that copy nothing.
pub const MAPPING: [QueueConfig; 3] = [STRATEGIES[0], STRATEGIES[1], STRATEGIES[2]];

pub struct World {
    pub memory: Arc<Memory>,
    pub cache: Arc<Cache>,
    pub iommu: Arc<Iommu>,
    pub domain: DmaDomain<Machine>,
}

impl World {
    pub fn new(policy: Policy) -> Self {
        Self::with(policy, LINE, 1)
    }

    pub fn with(policy: Policy, line: u64, seed: u64) -> Self {
        Self::made(policy, line, seed, PoolConfig::default())
    }

    /// One whose pool zeroes each buffer when its mapping ends.
    pub fn wiping() -> Self {
        Self::made(Policy::Strict, LINE, 1, PoolConfig { wipe: true, ..PoolConfig::default() })
    }

    fn made(policy: Policy, line: u64, seed: u64, pool: PoolConfig) -> Self {
        let memory = Memory::new(64 << 20);
        let cache = Cache::new(&memory, line, seed);
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
        let ram = Ram(Arc::clone(&cache));
        let builder = Domain::builder(table, iommu.queue(), id).policy(policy);
        let maintenance = Arc::clone(&cache);
        let domain = match policy {
            Policy::Passthrough => {
                let config = SwiotlbConfig {
                    slot_bytes: 256,
                    area_bytes: 256 << 10,
                    min_bytes: 256 << 10,
                    ..SwiotlbConfig::default()
                };
                let pool = Swiotlb::new(Arc::clone(&platform), ram, &config).unwrap();
                builder.swiotlb(pool).cache_maintenance(maintenance).build(platform)
            }
            _ => {
                let pool = PoolConfig { threshold: 2 * PAGE, ..pool };
                builder.cache_maintenance(maintenance).bounce(ram, pool).build(platform)
            }
        };
        Self { memory, cache, iommu, domain: domain.unwrap() }
    }

    pub fn card(&self) -> Device<Machine> {
        self.domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap().not_coherent().unwrap()
    }

    /// Pages of the CPU's, each with bytes of its own, all of which are dirty in the cache.
    pub fn pages(&self, count: u64) -> PhysAddr {
        let first =
            portcullis::platform::Frames::alloc(&Ram(Arc::clone(&self.cache)), count as usize).unwrap();
        self.cache.write(first, &vec![0xcc; (count * PAGE) as usize]);
        first
    }

    pub fn cpu(&self, list: &[PhysSegment]) -> Vec<u8> {
        let mut all = Vec::new();
        for piece in list {
            let mut bytes = vec![0; piece.len as usize];
            self.cache.read(piece.phys, &mut bytes);
            all.extend(bytes);
        }
        all
    }

    pub fn cpu_writes(&self, list: &[PhysSegment], mut bytes: &[u8]) {
        for piece in list {
            let (here, rest) = bytes.split_at(piece.len as usize);
            self.cache.write(piece.phys, here);
            bytes = rest;
        }
    }

    /// What the card reads.
    pub fn card_reads(&self, view: &[DmaSegment]) -> Vec<u8> {
        self.cache.stir();
        let mut all = Vec::new();
        for segment in view {
            let mut bytes = vec![0; segment.len as usize];
            self.iommu.dma_read(CARD, segment.iova, &mut bytes).unwrap();
            all.extend(bytes);
        }
        all
    }

    /// Whether the card could write.
    pub fn card_writes(&self, view: &[DmaSegment], mut bytes: &[u8]) -> bool {
        self.cache.stir();
        let mut reached = true;
        for segment in view {
            let (here, rest) = bytes.split_at(segment.len as usize);
            reached &= self.iommu.dma_write(CARD, segment.iova, here).is_ok();
            bytes = rest;
        }
        self.cache.stir();
        reached
    }
}

/// Maps, and returns what the card is given.
pub fn map(
    queue: &mut dyn AnyQueue,
    list: &[PhysSegment],
    direction: Direction,
) -> Result<(RawMapping, Vec<DmaSegment>), DmaMapError> {
    let mut out = vec![DmaSegment { iova: Iova::new(0), len: 0 }; list.len()];
    // SAFETY: the memory is the test's, all of it simulated, and no mapping is ended by others.
    let (mapping, used) = unsafe { queue.map_raw(list, direction, &mut out) }?;
    out.truncate(used);
    assert_eq!(mapping.iova(), out[0].iova);
    Ok((mapping, out))
}

pub fn segment(first: PhysAddr, offset: u64, len: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(first.get() + offset), len }
}
