//! Mistakes, trims, and how a pool begins and ends.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{Direction, DomainId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BouncePool, PoolConfig, Way};
use portcullis::dma::DmaUnmapError;
use portcullis::domain::{Domain, MapListError, Policy, UnmapError};

use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis_model::open::OpenPool;
use portcullis_model::{Iommu, IommuConfig, Memory};

use crate::chosen::Chosen;
use crate::pool::support::{Bench, DEVICE, PAGE, Rationed, map, piece, small};

const NONE: Attributes = Attributes { copy_in: false };

#[test]
fn mistakes_are_named_and_change_nothing() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(2 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, 100)];
    let fill: [(&[PhysSegment], MapListError); 3] = [
        (&[], MapListError::EmptyList),
        (&[piece(buffer.phys(), 0, 0)], MapListError::EmptySegment { index: 0, phys: buffer.phys() }),
        (
            &[piece(PhysAddr::new(u64::MAX), 0, 2)],
            MapListError::Wraps { index: 0, phys: PhysAddr::new(u64::MAX), len: 2 },
        ),
    ];
    for (list, error) in fill {
        assert_eq!(map(&bench.device, list, Direction::ToDevice, NONE).unwrap_err(), error.into());
    }
    let mapping = map(&bench.device, &list, Direction::FromDevice, NONE).unwrap();
    let iova = mapping.iova();
    bench.iommu.dma_write(DEVICE, iova, &[7; 100]).unwrap();
    let wrong = DmaUnmapError::OutOfRange { iova, offset: 0, len: 99, mapped: 100 };
    assert_eq!(bench.pool.close(iova, 99), Err(wrong));
    let inside = Iova::new(iova.get() + 1);
    assert_eq!(bench.pool.close(inside, 100), Err(DmaUnmapError::NotMapped { iova: inside }));
    for (offset, len) in [(0, 101), (100, 1), (u64::MAX, 2)] {
        let out = DmaUnmapError::OutOfRange { iova, offset, len, mapped: 100 };
        assert_eq!(bench.pool.sync_cpu(iova, offset, len), Err(out));
        assert_eq!(bench.pool.sync_device(iova, offset, len), Err(out));
    }
    bench.pool.sync_cpu(iova, 100, 0).unwrap();
    assert_eq!(bench.bytes(buffer.phys(), 1), [0]);
    bench.pool.close(iova, 100).unwrap();
    assert_eq!(bench.bytes(buffer.phys(), 100), [7; 100]);
    for _ in 0..2 {
        assert_eq!(bench.pool.close(iova, 100), Err(DmaUnmapError::NotMapped { iova }));
        assert_eq!(bench.pool.sync_cpu(iova, 0, 1), Err(DmaUnmapError::NotMapped { iova }));
    }
    // A slot that was never used, a range that reaches into the slots, no range at all.
    let usage = bench.pool.usage();
    let never = Iova::new(iova.get() & !(usage.iova_bytes.next_power_of_two() - 1));
    assert!(bench.pool.close(Iova::new(never.get() + PAGE), 1).is_err());
    let below = Iova::new(never.get() - PAGE);
    assert_eq!(bench.pool.close(below, 2 * PAGE), Err(DmaUnmapError::NotMapped { iova: below }));
    assert!(bench.reaches(iova, Permissions::WRITE).is_some(), "the slot's translation is untouched");
    assert_eq!(bench.pool.close(below, 0), Err(DmaUnmapError::NotMapped { iova: below }));
    // An address that nobody mapped.
    let foreign = Iova::new(0x1234_5000);
    let range = IovaRange::new(foreign, PAGE).unwrap();
    let error = DmaUnmapError::Unmap(UnmapError::NotMapped { range, unmapped: 0 });
    assert_eq!(bench.pool.close(foreign, 1), Err(error));
    // The next user of the slot gets it once.
    let (one, two) = (
        map(&bench.device, &list, Direction::FromDevice, NONE).unwrap(),
        map(&bench.device, &list, Direction::FromDevice, NONE).unwrap(),
    );
    assert_ne!(one.iova(), two.iova());
    bench.pool.close(one.iova(), 100).unwrap();
    bench.pool.close(two.iova(), 100).unwrap();
    drop(buffer);
    bench.finish();
}

#[test]
fn a_single_use_mapping_is_named_as_a_whole_or_not_at_all() {
    let bench = Bench::new(small());
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 1, 20 * PAGE)];
    let mapping = map(&device, &list, Direction::FromDevice, NONE).unwrap();
    let (iova, len) = (mapping.iova(), mapping.len());
    let wrong = DmaUnmapError::OutOfRange { iova, offset: 0, len: len - 1, mapped: len };
    assert_eq!(bench.pool.close(iova, len - 1), Err(wrong));
    for (at, len) in [(iova.get() + PAGE, 10), (iova.get() - PAGE, 3 * PAGE), (iova.get() + 1, len)] {
        let iova = Iova::new(at);
        assert_eq!(bench.pool.close(iova, len), Err(DmaUnmapError::NotMapped { iova }));
    }
    bench.pool.close(iova, len).unwrap();
    assert!(bench.pool.close(iova, len).is_err());
    drop((buffer, device));
    bench.finish();
}

#[test]
fn trimming_keeps_what_it_is_told_with_one_invalidation() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let live: Vec<_> = (0..50)
        .map(|n| {
            bench.platform.be(n % 4);
            map(&bench.device, &list, Direction::ToDevice, NONE).unwrap().iova()
        })
        .collect();
    assert_eq!(bench.pool.trim(0).unwrap(), 0, "nothing waits");
    for (n, iova) in live[1..].iter().enumerate() {
        bench.platform.be(n % 4);
        bench.pool.close(*iova, PAGE).unwrap();
    }
    let before = bench.iommu.stats();
    assert_eq!(bench.pool.trim(10 * PAGE + 1).unwrap(), 39 * PAGE);
    assert_eq!(bench.iommu.stats().submissions, before.submissions + 1);
    let usage = bench.pool.usage();
    assert_eq!((usage.buffer_bytes, usage.cached_bytes), (11 * PAGE, 10 * PAGE));
    let reached = live.iter().filter(|iova| bench.reaches(**iova, Permissions::READ).is_some()).count();
    assert_eq!(reached, 11);
    bench.pool.close(live[0], PAGE).unwrap();
    drop(buffer);
    bench.finish();
}

#[test]
fn a_pool_is_refused_what_it_cannot_be() {
    let bench = Bench::new(small());
    let refused = |config: PoolConfig| {
        BouncePool::new(bench.domain.clone(), bench.frames.clone(), config).err().unwrap()
    };
    let (threshold, most) = (4 << 20, 2 << 20);
    assert_eq!(refused(PoolConfig { threshold, ..small() }), SetupError::Threshold { threshold, most });
    for bytes in [0, 32 << 10, 3 << 20, 1 << 60] {
        let error = SetupError::ClassBytes { bytes, least: 64 << 10, most: 1 << 40 };
        assert_eq!(refused(PoolConfig { class_bytes: bytes, ..small() }), error);
    }
    let limit = Iova::new((1 << 20) - 1);
    assert!(matches!(refused(PoolConfig { limit, ..small() }), SetupError::Space(_)));
    bench.finish();
    // Physical addresses leave nothing to stand between.
    let memory = Memory::new(1 << 20);
    let table =
        PageTable::for_cpus(Rationed::new(&memory), VtdSecondStage::new(3, 1, 52).unwrap(), 1).unwrap();
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let mapper = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
    let domain = Domain::new(Arc::new(Chosen::new(1)), mapper, Policy::Passthrough).unwrap();
    let refused = BouncePool::new(domain, Rationed::new(&memory), small()).err();
    assert_eq!(refused, Some(SetupError::NotTranslated));
}

#[test]
fn a_pool_that_is_dropped_takes_everything_with_it() {
    let bench = Bench::new(small());
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let mut iovas = Vec::new();
    for (offset, len) in [(0, 10), (0, 16 * PAGE), (9, 30 * PAGE)] {
        let list = [piece(buffer.phys(), offset, len)];
        for _ in 0..5 {
            iovas.push(map(&device, &list, Direction::ToDevice, NONE).unwrap().iova());
        }
    }
    bench.pool.close(iovas[0], 10).unwrap();
    assert!(bench.reaches(iovas[12], Permissions::READ).is_some());
    let Bench { pool, device: other, domain, memory, iommu, frames_before, .. } = bench;
    drop((pool, device, other, buffer));
    assert!(iovas.iter().all(|iova| iommu.probe(DEVICE, *iova, Permissions::READ).is_none()));
    domain.reclaim().unwrap();
    assert_eq!((memory.frames_in_use(), memory.bad_frees()), (frames_before, 0));
    let usage = domain.stats();
    assert_eq!((usage.taken_iova_bytes - usage.cached_iova_bytes, domain.stats().lost_iova_bytes), (0, 0));
}

/// The pool only knows of it, as a list with gaps: it is its owner's, and the domain's.
#[test]
fn what_was_mapped_directly_outlives_the_pool() {
    let bench = Bench::new(small());
    let device = bench.device(1, false);
    let buffer = bench.memory.buffer(64 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 9, 20 * PAGE), piece(buffer.phys(), 30 * PAGE + 9, 20 * PAGE)];
    let mapping = map(&device, &list, Direction::ToDevice, NONE).unwrap();
    assert_eq!(mapping.way(), Way::Direct);
    let (iova, len) = (mapping.iova(), mapping.len());
    let original = Some(PhysAddr::new(buffer.phys().get() + 9));
    assert_eq!(bench.reaches(iova, Permissions::READ), original);
    let Bench { pool, device: other, domain, iommu, .. } = bench;
    drop((pool, device, other));
    assert_eq!(iommu.probe(DEVICE, iova, Permissions::READ), original);
    let pages = IovaRange::new(Iova::new(iova.get() - 9), (len + 9).next_multiple_of(PAGE)).unwrap();
    domain.unmap(pages).unwrap();
    assert_eq!(iommu.probe(DEVICE, iova, Permissions::READ), None);
    let usage = domain.stats();
    assert_eq!((usage.taken_iova_bytes - usage.cached_iova_bytes, usage.lost_iova_bytes), (0, 0));
}
