//! What could not be unmapped is still reached: it is said so, and neither its memory nor its addresses are used again.

use std::convert::Infallible;
use std::sync::Arc;

use crate::common::{Bench, DEVICE, PAGE};
use crate::queued::queue;
use crate::stuck::Stuck;
use portcullis::addr::{Direction, DomainId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig};
use portcullis::dma::{
    AdaptiveRing, BatchError, CoherentMemory, DmaAttributes, DmaDevice, DmaDomain, DmaMask, DmaUnmapError,
    OpsConfig, QueueConfig, RawBatch, StrictRing, StrictRingConfig,
};
use portcullis::domain::{Domain, Policy, UnmapError};
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationError;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::PageTable;
use portcullis::platform::{FRAME_SIZE, Platform};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::{OpenDomain, OpenPool, OpenRing};
use portcullis_model::{Context, Iommu, IommuConfig, Memory};

const LARGE: u64 = 2 << 20;
const ANYWHERE: Iova = Iova::new(u64::MAX);
const BOTH: Direction = Direction::Bidirectional;

/// A large page of memory that no test reads or writes.
const LIST: [PhysSegment; 1] = [PhysSegment { phys: PhysAddr::new(0x9_0000_0000), len: LARGE }];

fn part(range: IovaRange, page: u64) -> IovaRange {
    IovaRange::new(Iova::new(range.start().get() + page * PAGE), PAGE).unwrap()
}

#[test]
fn a_part_of_a_large_page_that_cannot_be_split_is_still_mapped() {
    for policy in [Policy::Strict, Policy::Lazy { window_ns: u64::MAX }] {
        let bench = Bench::new(policy);
        let range = bench.domain.open(&LIST, Permissions::READ_WRITE, ANYWHERE).unwrap();
        let part = part(range, 5);
        bench.memory.fail_after(1);
        let still_mapped = UnmapError::StillMapped { range: part, unmapped: 0, kept: PAGE };
        assert_eq!(bench.domain.unmap(part), Err(still_mapped));
        assert!(bench.reads(part.start()));
        let two = IovaRange::new(part.start(), 2 * PAGE).unwrap();
        bench.memory.fail_after(1);
        let mut batch = RawBatch::new(&bench.device, 4).unwrap();
        let error = bench.device.unmap_single_in(&mut batch, two.start(), two.len()).unwrap_err();
        let still_mapped = UnmapError::StillMapped { range: two, unmapped: 0, kept: 2 * PAGE };
        assert_eq!(error, BatchError::Unmap(still_mapped));
        assert_eq!((batch.len(), batch.commit()), (0, Ok(0)), "no commit ends it");
        assert!(bench.reads(two.start()), "nothing is said of what stays");
        // Its addresses are nobody else's.
        assert_eq!(bench.domain.stats().unmaps, 0);
        bench.domain.unmap_strictly(part).unwrap();
        assert!(!bench.reads(part.start()) && bench.reads(range.start()));
    }
}

struct StuckBench {
    memory: Arc<Memory>,
    iommu: Arc<Iommu>,
    domain: Shared<Domain<Stuck, StdPlatform>>,
    device: DmaDevice<Stuck, StdPlatform>,
    /// Frames that are in use before anything is mapped.
    before: u64,
}

impl StuckBench {
    fn new() -> Self {
        let (memory, platform) = (Memory::new(8 << 20), StdPlatform::new());
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::for_cpus(Arc::clone(&memory), crate::common::vtd(4), platform.cpus()).unwrap();
        iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
        let inner = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let domain = Domain::new(platform, Stuck::new(inner), Policy::Strict).unwrap();
        let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
        // The tables that the first mapping needs.
        let range = domain.open(&LIST[..1], Permissions::READ, ANYWHERE).unwrap();
        domain.unmap(range).unwrap();
        let before = memory.frames_in_use() - tables(&domain);
        Self { memory, iommu, domain, device, before }
    }

    fn stick(&self, stuck: bool) {
        self.domain.mapper().stick(stuck);
    }

    fn writes(&self, iova: Iova) -> bool {
        self.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok()
    }

    /// Frames of buffers.
    fn buffers(&self) -> u64 {
        self.memory.frames_in_use() - tables(&self.domain) - self.before
    }
}

fn tables(domain: &Domain<Stuck, StdPlatform>) -> u64 {
    domain.mapper().inner.table().table_bytes() as u64 / FRAME_SIZE
}

fn is_still_mapped<T>(result: Result<T, UnmapError>) -> bool {
    matches!(result, Err(UnmapError::StillMapped { unmapped: 0, kept, .. }) if kept > 0)
}

#[test]
fn a_typed_buffer_stays_where_it_is_until_it_is_gone() {
    let bench = StuckBench::new();
    let buffer = || bench.memory.buffer(PAGE).unwrap();
    let mut late = Vec::new();
    for (config, waits) in [
        (QueueConfig::direct(), false),
        (QueueConfig::batched(1), false),
        (QueueConfig::ring(8, PAGE).batch(1), true),
    ] {
        bench.stick(false);
        let mut queue = queue(&bench.device, config);
        let mapping = queue.map(buffer(), BOTH).unwrap();
        let iova = mapping.iova();
        late.push(iova);
        bench.stick(true);
        let failed = queue.unmap(mapping).map(drop).unwrap_err();
        let still_mapped = match failed.error {
            DmaUnmapError::Unmap(error) => is_still_mapped(Err::<(), _>(error)),
            error => matches!(error, DmaUnmapError::StillMapped { kept: PAGE, .. }),
        };
        assert!(still_mapped && failed.mapping.is_none(), "{failed}");
        // It is in no commit, or none is before it is gone.
        match waits {
            true => assert!(matches!(queue.commit().map(drop), Err(DmaUnmapError::StillMapped { .. }))),
            false => assert_eq!(queue.commit().unwrap().len(), 0),
        }
        assert!(bench.writes(iova));
        // Its address is not used again.
        let others: Vec<_> = (0..4).map(|_| queue.map(buffer(), BOTH).unwrap()).collect();
        assert!(others.iter().all(|other| !late.contains(&other.iova())));
        bench.stick(false);
        for other in others {
            queue.unmap(other).unwrap().for_each(drop);
        }
        let back = queue.commit().unwrap().len();
        // What waits was committed with the first of the others.
        assert_eq!((back, queue.waiting()), (0, 0));
        assert_eq!(bench.writes(iova), !waits);
        drop(queue);
        let leaked = late.iter().filter(|iova| bench.writes(**iova)).count();
        assert_eq!(bench.buffers(), leaked as u64, "leaked rather than freed");
    }
    assert_eq!(bench.buffers(), 2);
}

#[test]
fn coherent_memory_is_not_freed() {
    let bench = StuckBench::new();
    let coherent = CoherentMemory::new(&bench.device, Arc::clone(&bench.memory), 100).unwrap();
    bench.stick(true);
    assert!(is_still_mapped(coherent.free()));
    assert_eq!(bench.buffers(), 1);
}

#[test]
fn a_ring_keeps_what_waits() {
    let bench = StuckBench::new();
    let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(4, PAGE, 1)).unwrap();
    let mapping = ring.open(&[PhysSegment { len: PAGE, ..LIST[0] }], BOTH).unwrap();
    let iova = mapping.iova();
    bench.stick(true);
    let failed = ring.unmap(mapping).unwrap_err();
    assert!(matches!(failed.error, DmaUnmapError::StillMapped { kept: PAGE, .. }), "{failed}");
    assert!(matches!(ring.commit(), Err(DmaUnmapError::StillMapped { .. })));
    assert!(bench.writes(iova) && ring.waiting() == 1);
    bench.stick(false);
    assert_eq!(ring.commit(), Ok(1));
    assert!(!bench.writes(iova));
}

#[test]
fn a_pool_gives_no_memory_back_any_more() {
    let bench = StuckBench::new();
    let config = PoolConfig::default();
    let pool = BouncePool::new(bench.domain.clone(), Arc::clone(&bench.memory), config).unwrap();
    let device =
        BounceDevice::new(pool.clone(), DeviceProfile { untrusted: true, ..DeviceProfile::default() })
            .unwrap();
    let original = bench.memory.buffer(PAGE).unwrap();
    let list = [PhysSegment { phys: original.phys(), len: 100 }];
    // SAFETY: the original is this test's, and outlives the mapping.
    let iova = unsafe { device.map(&list, BOTH, Attributes::default()) }.unwrap().iova();
    pool.close(iova, 100).unwrap();
    let held = bench.buffers();
    bench.stick(true);
    assert!(matches!(pool.trim(0), Err(InvalidationError::StillMapped { .. })));
    bench.stick(false);
    assert!(matches!(pool.trim(0), Err(InvalidationError::StillMapped { .. })), "nor later");
    assert!(bench.writes(iova));
    drop((device, pool));
    assert_eq!(bench.buffers(), held, "leaked rather than freed");
}

#[test]
fn what_the_first_measurement_could_not_unmap_is_not_freed() {
    let bench = StuckBench::new();
    let config = PoolConfig::default();
    let pool = BouncePool::new(bench.domain.clone(), Arc::clone(&bench.memory), config).unwrap();
    bench.domain.mapper().mapped.lock().unwrap().clear();
    let copies = BounceDevice::new(pool, DeviceProfile::default()).unwrap();
    bench.stick(true);
    drop(AdaptiveRing::new(&bench.device, copies, BOTH, StrictRingConfig::new(64, PAGE, 8), || 1).unwrap());
    let mapped = bench.domain.mapper().mapped.lock().unwrap();
    let reads = |iova| bench.iommu.access(DEVICE, iova, 1, Permissions::READ).is_ok();
    let reached: Vec<_> = mapped.iter().filter(|(iova, _)| reads(*iova)).collect();
    assert!(!reached.is_empty(), "or the test means nothing");
    let freed = |phys: PhysAddr| !bench.memory.is_allocated(phys);
    assert!(!reached.iter().any(|(_, phys)| freed(*phys)), "freed, and the device reaches it: {reached:?}");
}

/// Its memory is not the driver's again, whatever else ends.
#[test]
fn what_a_driver_leaves_and_stays_mapped_is_no_success() {
    let bench = StuckBench::new();
    let domain = DmaDomain::<(Stuck, StdPlatform, Infallible)>::over(bench.domain.clone(), None).unwrap();
    let ops = domain.attach(DEVICE, DmaMask::BITS_64).unwrap().ops(OpsConfig::Strict).unwrap();
    // SAFETY: no memory is there, and only a simulated device would reach it.
    let map = || unsafe { ops.map(PhysAddr::new(0x9_0000_0000), PAGE, BOTH, DmaAttributes::default()) };
    let iova = map().unwrap();
    bench.domain.mapper().stick(true);
    let error = DmaUnmapError::Unconfirmed { error: InvalidationError::StillMapped { bytes: PAGE } };
    // SAFETY: nothing else runs.
    assert_eq!(unsafe { ops.unmap_all() }, Err(error));
    assert!(bench.iommu.access(DEVICE, iova, 1, Permissions::READ).is_ok(), "still mapped");
    assert_eq!(bench.domain.stats().lost_iova_bytes, PAGE);
    bench.domain.mapper().stick(false);
    map().unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { ops.unmap_all() }, Ok((1, PAGE)));
}
