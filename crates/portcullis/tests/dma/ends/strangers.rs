//! Somebody maps or unmaps by number in addresses that are not his: nothing of his is removed, the addresses are lost,
//! and exactly those; what he has removed is out of reach before anybody gets the memory.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, IovaRange, PageSize, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{
    BatchError, CoherentMemory, DmaDevice, DmaMapError, Ended, RawBatch, StrictRing, StrictRingConfig,
};
use portcullis::domain::{MapListError, Policy, UnmapError};
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::iova::IovaError;
use portcullis::pgtable::MapError;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::{OpenDevice, OpenDomain, OpenMapper, OpenRing};

use crate::ends::bench::{Bench, DEVICE, LAZY_FOREVER, PAGE, page};

const BROKEN: InvalidationError = InvalidationError::TimedOut { waited_ns: 5 };
const ANYWHERE: Iova = Iova::new(u64::MAX);
/// What somebody else has mapped.
const THEIRS: PhysAddr = PhysAddr::new(0x8_0000_0000);

fn pages(start: Iova, first: u64, count: u64) -> IovaRange {
    IovaRange::new(Iova::new(start.get() + first * PAGE), count * PAGE).unwrap()
}

/// Somebody else's page, by number.
fn intrude(bench: &Bench, at: IovaRange) {
    let platform = StdPlatform::new();
    let list = [(THEIRS, PAGE)];
    bench.domain.mapper().open(&platform, at, list, Permissions::READ_WRITE, &mut Gather::new()).unwrap();
}

fn theirs(bench: &Bench, at: IovaRange) -> bool {
    bench.iommu.probe(DEVICE, at.start(), Permissions::WRITE) == Some(THEIRS)
}

fn overlap(one: IovaRange, other: IovaRange) -> bool {
    one.start() <= other.last() && other.start() <= one.last()
}

#[test]
fn a_map_that_meets_somebody_else_s_page_loses_its_addresses_and_leaves_the_page() {
    for fails in [0, 1] {
        let bench = Bench::new(Policy::Strict);
        let list: Vec<_> = (0..3).map(|n| page(2 * n)).collect();
        let map = || bench.domain.open(&list, Permissions::READ_WRITE, ANYWHERE);
        let range = map().unwrap();
        bench.domain.unmap(range).unwrap();
        let last = pages(range.start(), 2, 1);
        intrude(&bench, last);
        bench.iommu.queue().fail_next(fails, BROKEN);
        let expected = match fails {
            0 => MapListError::Map(MapError::AlreadyMapped { at: last.start() }),
            _ => MapListError::Unconfirmed { error: BROKEN },
        };
        assert_eq!(map(), Err(expected), "the addresses that were freed last come first");
        assert_eq!(bench.domain.stats().lost_iova_bytes, 3 * PAGE);
        bench.domain.flush().unwrap();
        for _ in 0..100 {
            assert!(!overlap(map().unwrap(), range), "handed out again");
        }
        assert!(theirs(&bench, last) && !bench.reaches(range.start()));
        assert_eq!(bench.domain.stats().lost_iova_bytes, 3 * PAGE);
    }
}

/// A map that fails before anything of it is in somebody's way gives its addresses back, when that is safe.
#[test]
fn a_map_that_could_not_be_undone_for_sure_gets_its_addresses_after_a_flush() {
    let bench = Bench::new(Policy::Strict);
    // Two aligned pages of addresses are all there are.
    let limit = Iova::new(4 * PAGE - 1);
    let beyond = [page(0), PhysSegment { phys: PhysAddr::new(1 << 50), len: PAGE }];
    let map = |list: &[_]| bench.domain.open(list, Permissions::READ_WRITE, limit);
    bench.iommu.queue().fail_next(u64::MAX, BROKEN);
    assert_eq!(map(&beyond), Err(MapListError::Unconfirmed { error: BROKEN }));
    // The flush that would make room fails, too, as does the timer's, should that come first.
    assert!(matches!(map(&[page(1), page(3)]), Err(MapListError::Iova(IovaError::Exhausted { .. }))));
    bench.iommu.queue().fail_next(0, BROKEN);
    let range = map(&[page(1), page(3)]).unwrap();
    assert_eq!((range.start(), bench.domain.stats().lost_iova_bytes), (Iova::new(2 * PAGE), 0));
}

#[test]
fn a_ring_that_meets_somebody_else_s_page_uses_other_addresses_and_leaves_the_page() {
    for fails in [0, 1] {
        let bench = Bench::new(Policy::Strict);
        let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(8, PAGE, 1)).unwrap();
        let first = ring.open(&[page(0)], Direction::Bidirectional).unwrap();
        let next = pages(first.iova(), 1, 2);
        let last = pages(next.start(), 1, 1);
        intrude(&bench, last);
        bench.iommu.queue().fail_next(fails, BROKEN);
        let error = ring.open(&[page(2), page(4)], Direction::Bidirectional).unwrap_err();
        let expected = match fails {
            0 => MapListError::Map(MapError::AlreadyMapped { at: last.start() }),
            _ => MapListError::Unconfirmed { error: BROKEN },
        };
        assert_eq!(error, DmaMapError::List(expected));
        assert_eq!(ring.commit(), Ok(0));
        assert_eq!(ring.arena().unwrap().reservations(), 2, "the addresses stay reserved");
        for _ in 0..20 {
            let mapping = ring.open(&[page(2), page(4)], Direction::Bidirectional);
            let Ok(mapping) = mapping else { break };
            assert!(!overlap(mapping.range(PageSize::SIZE_4K).unwrap(), next));
            assert_eq!(ring.unmap(mapping).unwrap(), Ended::Flushed(()));
        }
        assert_eq!(ring.unmap(first).unwrap(), Ended::Flushed(()));
        assert!(theirs(&bench, last) && !bench.reaches(next.start()));
        let bytes = ring.arena().unwrap().range().len();
        drop(ring);
        assert!(theirs(&bench, last));
        assert_eq!(bench.domain.stats().lost_iova_bytes, bytes);
    }
}

#[test]
fn coherent_memory_that_meets_somebody_else_s_page_is_freed_when_that_is_safe() {
    for fails in [0, 1] {
        let bench = Bench::new(Policy::Strict);
        let frames = Arc::clone(&bench.memory);
        let make = || CoherentMemory::new(&bench.device, Arc::clone(&frames), 3 * PAGE as usize);
        let first = make().unwrap();
        let range = pages(first.iova(), 0, 3);
        first.free().unwrap();
        let last = pages(range.start(), 2, 1);
        intrude(&bench, last);
        let (in_use, handles) = (bench.memory.frames_in_use(), Arc::strong_count(&frames));
        bench.iommu.queue().fail_next(fails, BROKEN);
        let error = make().map(drop).unwrap_err();
        let expected = match fails {
            0 => MapListError::Map(MapError::AlreadyMapped { at: last.start() }),
            _ => MapListError::Unconfirmed { error: BROKEN },
        };
        assert_eq!(error, expected);
        let kept = (bench.memory.frames_in_use() - in_use, Arc::strong_count(&frames) - handles);
        assert_eq!(
            kept,
            if fails == 0 { (0, 0) } else { (3, 1) },
            "memory that may be reached, and its owner"
        );
        assert!(theirs(&bench, last));
    }
}

#[test]
fn what_somebody_has_unmapped_is_out_of_reach_after_a_commit() {
    // Under a lazy policy the unmap by number leaves the IOTLB as it is.
    let bench = Bench::new(LAZY_FOREVER);
    let view = bench.raw(0);
    let range = pages(view[0].iova, 0, 1);
    bench.domain.unmap(range).unwrap();
    assert!(bench.reaches(range.start()), "or the test means nothing");
    let mut batch = RawBatch::new(&bench.device, 4).unwrap();
    let error = bench.device.unmap_single_in(&mut batch, view[0].iova, PAGE).unwrap_err();
    assert_eq!(error, BatchError::Unmap(UnmapError::NotMapped { range, unmapped: 0 }));
    assert_eq!(batch.commit(), Ok(1));
    assert!(!bench.reaches(range.start()));
    assert_eq!(bench.domain.stats().lost_iova_bytes, 0, "they went with the first unmap");
    // A ring's descriptors: all of one, a part of one.
    let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(16, PAGE, 4)).unwrap();
    for (gone, count) in [(0, 1), (0, 3), (1, 1)] {
        let list = [page(0), page(2), page(4)];
        let mapping = ring.open(&list, Direction::Bidirectional).unwrap();
        let range = mapping.range(PageSize::SIZE_4K).unwrap();
        let reached = || (0..3).filter(|n| bench.reaches(pages(range.start(), *n, 1).start())).count();
        assert_eq!(reached(), 3);
        bench.domain.unmap(pages(range.start(), gone, count)).unwrap();
        assert_eq!(reached(), 3, "or the test means nothing");
        assert_eq!(ring.unmap(mapping).unwrap(), Ended::Pending);
        assert_eq!(ring.commit(), Ok(1));
        assert_eq!(reached(), 0, "{gone} {count}");
    }
}

#[test]
fn exactly_the_addresses_of_what_was_unmapped_in_part_are_lost() {
    let bench = Bench::new(Policy::Strict);
    let list: Vec<_> = (0..5).map(page).collect();
    let lost = || bench.domain.stats().lost_iova_bytes;
    let mut before = 0;
    for fails in [0, 1] {
        for batched in [false, true] {
            let range = bench.domain.open(&list, Permissions::READ_WRITE, ANYWHERE).unwrap();
            // A part waits for the rest.
            bench.domain.unmap(pages(range.start(), 1, 2)).unwrap();
            assert_eq!(lost(), before);
            assert!(bench.reaches(range.start()));
            bench.iommu.queue().fail_next(fails, BROKEN);
            if batched {
                let mut batch = RawBatch::new(&bench.device, 1).unwrap();
                let error = bench.device.unmap_single_in(&mut batch, range.start(), 5 * PAGE).unwrap_err();
                assert_eq!(error, BatchError::Unmap(UnmapError::NotMapped { range, unmapped: 3 * PAGE }));
                assert_eq!(batch.commit().is_ok(), fails == 0);
                assert_eq!((bench.reaches(range.start()), batch.len()), (fails > 0, fails as usize));
                drop(batch);
            } else {
                let expected = match fails {
                    0 => UnmapError::NotMapped { range, unmapped: 3 * PAGE },
                    _ => UnmapError::Unconfirmed { range, error: BROKEN },
                };
                assert_eq!(bench.domain.unmap(range), Err(expected));
                assert_eq!(bench.reaches(range.start()), fails > 0);
                bench.domain.flush().unwrap();
            }
            // Where the call itself confirms all of it, nothing is lost.
            let is_free = !batched && fails == 0;
            before += if is_free { 0 } else { 5 * PAGE };
            assert!(!bench.reaches(range.start()));
            assert_eq!(lost(), before);
            let other = bench.domain.open(&list, Permissions::READ_WRITE, ANYWHERE).unwrap();
            assert!(is_free || !overlap(other, range));
            bench.domain.unmap(other).unwrap();
            assert_eq!(lost(), before);
        }
    }
}

#[test]
fn a_batch_that_ends_unconfirmed_gives_its_addresses_back_after_a_flush() {
    let bench = Bench::new(Policy::Strict);
    // One page of addresses is all that the device reaches.
    let narrow = DmaDevice::new(bench.domain.clone(), 2 * PAGE - 1).unwrap();
    for policy in [Policy::Strict, LAZY_FOREVER] {
        bench.domain.set_policy(policy).unwrap();
        let iova = narrow.open_single(page(0).phys, PAGE, Direction::Bidirectional).unwrap();
        assert!(bench.reaches(iova));
        let mut batch = RawBatch::new(&narrow, 2).unwrap();
        narrow.unmap_single_in(&mut batch, iova, PAGE).unwrap();
        bench.iommu.queue().fail_next(u64::MAX, BROKEN);
        drop(batch);
        let error = narrow.open_single(page(1).phys, PAGE, Direction::Bidirectional).unwrap_err();
        assert!(matches!(error, MapListError::Iova(IovaError::Exhausted { .. })), "{error}");
        assert!(bench.reaches(iova), "or the test means nothing");
        bench.iommu.queue().fail_next(0, BROKEN);
        assert_eq!(narrow.open_single(page(1).phys, PAGE, Direction::Bidirectional), Ok(iova));
        narrow.unmap_single(iova, PAGE).unwrap();
        bench.domain.flush().unwrap();
        assert_eq!(bench.domain.stats().lost_iova_bytes, 0);
    }
}
