//! Somebody maps or unmaps by number in the pool's own addresses: buffers stay out of reach of whoever gets their memory
//! next, and what somebody else has mapped there stays as it is.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::bounce::pool::{Attributes, PoolConfig, Way};
use portcullis::dma::DmaMapError;
use portcullis::domain::{MapListError, Policy};
use portcullis::invalidation::Gather;
use portcullis::mapper::Mapper;
use portcullis::pgtable::MapError;
use portcullis_model::open::OpenPool;

use crate::chosen::Chosen;
use crate::pool::support::{Bench, DEVICE, PAGE, TIMEOUT, map, piece, small};

/// A lazy domain whose flushes never come by themselves: what is unmapped by number stays in the IOTLB.
fn lazy(config: PoolConfig) -> Bench {
    Bench::on(Arc::new(Chosen::new(3)), Policy::Lazy { window_ns: 1 << 62 }, config)
}

/// What the device has written to, and cached, at `iova`.
fn used(bench: &Bench, iova: Iova) -> PhysAddr {
    bench.iommu.dma_write(DEVICE, iova, &[1]).unwrap();
    bench.reaches(iova, Permissions::WRITE).unwrap()
}

fn still_reaches(bench: &Bench, iova: Iova) -> bool {
    bench.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok()
}

fn range(iova: Iova, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(iova.get() & !(PAGE - 1)), pages * PAGE).unwrap()
}

/// Somebody else's page, by number.
fn intrude(bench: &Bench, iova: Iova, phys: PhysAddr) {
    let pages = [(phys, PAGE)];
    let mapper = bench.domain.mapper();
    // SAFETY: the memory is simulated, and every access to it is atomic.
    let mapped = unsafe {
        mapper.map(&bench.platform, range(iova, 1), pages, Permissions::READ.into(), &mut Gather::new())
    };
    mapped.unwrap();
}

#[test]
fn a_buffer_of_its_own_that_somebody_unmapped_is_out_of_reach_before_it_is_freed() {
    for (split, way, all) in [(false, Way::SingleUse, 20), (true, Way::Split, 21)] {
        // All of it, a part of it.
        for pages in [all, 1] {
            for fails in [0, 1] {
                let bench = lazy(PoolConfig { split, ..small() });
                let device = bench.device(1, true);
                let buffer = bench.memory.buffer(40 * PAGE).unwrap();
                let list = [piece(buffer.phys(), 9, 20 * PAGE)];
                let mapping = map(&device, &list, Direction::FromDevice, Attributes::default()).unwrap();
                assert_eq!(mapping.way(), way);
                let iova = mapping.iova();
                let head = used(&bench, iova);
                bench.domain.unmap(range(iova, pages)).unwrap();
                assert!(still_reaches(&bench, iova), "or the test means nothing");
                bench.iommu.queue().fail_next(fails, TIMEOUT);
                let unmapped = bench.pool.close(iova, mapping.len());
                assert_eq!(unmapped.is_ok(), fails == 0 || !split);
                assert_eq!(bench.bytes(list[0].phys, 1), [1], "what the device wrote came in any case");
                let unconfirmed = u64::from(fails > 0);
                assert_eq!(
                    (bench.pool.usage().singles, still_reaches(&bench, iova)),
                    (unconfirmed, fails > 0)
                );
                assert_eq!(bench.memory.is_allocated(head), fails > 0, "freed while reachable");
                bench.pool.trim(0).unwrap();
                assert!(!still_reaches(&bench, iova) && !bench.memory.is_allocated(head));
                // Nobody knows whose the addresses are.
                let again = map(&device, &list, Direction::FromDevice, Attributes::default()).unwrap();
                let (taken, lost) = (range(again.iova(), all), range(iova, all));
                assert!(taken.last() < lost.start() || taken.start() > lost.last());
                bench.pool.close(again.iova(), again.len()).unwrap();
                assert!(bench.domain.stats().lost_iova_bytes >= all * PAGE);
            }
        }
    }
}

/// Nor does anybody get its addresses where it ends with the pool.
#[test]
fn a_buffer_of_its_own_that_somebody_unmapped_ends_with_its_pool() {
    for (split, all) in [(false, 20), (true, 21)] {
        let bench = lazy(PoolConfig { split, ..small() });
        let device = bench.device(1, true);
        let buffer = bench.memory.buffer(40 * PAGE).unwrap();
        let list = [piece(buffer.phys(), 9, 20 * PAGE)];
        let iova = map(&device, &list, Direction::FromDevice, Attributes::default()).unwrap().iova();
        let head = used(&bench, iova);
        bench.domain.unmap(range(iova, 1)).unwrap();
        let Bench { pool, device: other, domain, iommu, memory, .. } = bench;
        drop((pool, device, other));
        assert!(iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_err() && !memory.is_allocated(head));
        assert_eq!(domain.stats().lost_iova_bytes, all * PAGE, "{split}");
    }
}

#[test]
fn a_slot_that_somebody_unmapped_is_out_of_reach_before_its_memory_is_freed() {
    for by_trim in [true, false] {
        let bench = lazy(small());
        let buffer = bench.memory.buffer(PAGE).unwrap();
        let list = [piece(buffer.phys(), 0, PAGE)];
        let iova = map(&bench.device, &list, Direction::FromDevice, Attributes::default()).unwrap().iova();
        let memory = used(&bench, iova);
        bench.domain.unmap(range(iova, 1)).unwrap();
        assert!(still_reaches(&bench, iova), "or the test means nothing");
        bench.pool.close(iova, PAGE).unwrap();
        if by_trim {
            assert_eq!(bench.pool.trim(0), Ok(PAGE));
            assert_eq!(bench.pool.usage().lost_slots, 1);
            let again = map(&bench.device, &list, Direction::FromDevice, Attributes::default()).unwrap();
            assert_ne!(again.iova(), iova, "its addresses are lost");
            bench.pool.close(again.iova(), PAGE).unwrap();
        }
        let Bench { pool, device, iommu, memory: all, domain, .. } = bench;
        let region = pool.usage().iova_bytes;
        drop((pool, device));
        assert!(!all.is_allocated(memory), "its memory is back");
        assert!(iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_err(), "freed while reachable");
        assert!(domain.stats().lost_iova_bytes >= region);
    }
}

#[test]
fn somebody_else_s_mapping_in_the_addresses_of_a_buffer_of_its_own_is_left_alone() {
    // Whether what was entered before it was met is confirmed to be gone; how the pool ends.
    for (fails, trims) in [(0, false), (1, true), (1, false)] {
        let bench = Bench::new(PoolConfig { split: false, ..small() });
        let device = bench.device(1, true);
        let buffer = bench.memory.buffer(40 * PAGE).unwrap();
        let list = [piece(buffer.phys(), 9, 20 * PAGE)];
        let first = map(&device, &list, Direction::FromDevice, Attributes::default()).unwrap();
        bench.pool.close(first.iova(), first.len()).unwrap();
        // The same addresses come next; somebody else has the last page of them.
        let (iova, frames) = (first.iova(), bench.memory.frames_in_use());
        let last = Iova::new(iova.get() + 19 * PAGE);
        intrude(&bench, last, buffer.phys());
        bench.iommu.queue().fail_next(fails, TIMEOUT);
        let error = map(&device, &list, Direction::FromDevice, Attributes::default()).unwrap_err();
        let expected = match fails {
            0 => MapListError::Map(MapError::AlreadyMapped { at: range(last, 1).start() }),
            _ => MapListError::Unconfirmed { error: TIMEOUT },
        };
        assert_eq!(error, DmaMapError::List(expected));
        assert_eq!(
            bench.memory.frames_in_use() > frames,
            fails > 0,
            "kept while it may be reached, and no longer"
        );
        if trims {
            bench.pool.trim(0).unwrap();
            assert_eq!(bench.memory.frames_in_use(), frames);
        }
        let Bench { pool, device: other, domain, iommu, memory, .. } = bench;
        let before = domain.stats().lost_iova_bytes;
        assert_eq!(before, if fails == 0 || trims { 20 * PAGE } else { 0 });
        drop((pool, device, other));
        assert_eq!(iommu.probe(DEVICE, last, Permissions::READ), Some(buffer.phys()), "somebody else's");
        assert_eq!(domain.stats().lost_iova_bytes, 20 * PAGE, "and its addresses are nobody's");
        drop(buffer);
        let _ = memory;
    }
}
