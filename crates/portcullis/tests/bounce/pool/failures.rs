//! When memory, addresses or tables run out, hardware does not answer, or somebody else's mapping is in the way.

use portcullis::addr::{Direction, Iova, IovaRange, Permissions};
use portcullis::bounce::pool::{Attributes, BounceDevice, DeviceProfile, PoolConfig, Way};
use portcullis::dma::{DmaMapError, DmaUnmapError};
use portcullis::domain::MapListError;
use portcullis::invalidation::Gather;
use portcullis::iova::IovaError;
use portcullis::pgtable::MapError;
use portcullis_model::open::{OpenMapper, OpenPool};

use crate::pool::support::{Bench, DEVICE, PAGE, TIMEOUT, map, piece, small};

const NONE: Attributes = Attributes { copy_in: false };

/// Every kind of mapping there is: offset and length.
const MAPPINGS: [(u64, u64); 6] =
    [(1, 10), (0, PAGE), (9, 3 * PAGE), (7, 16 * PAGE), (5, 100 * PAGE), (3, 2000 * PAGE)];

/// Maps all of them for an untrusted device, in every direction. How many were refused for want of memory.
fn everything(bench: &Bench) -> usize {
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(2002 * PAGE).unwrap();
    let mut refused = 0;
    let mut live = Vec::new();
    for (offset, len) in MAPPINGS {
        for direction in Direction::ALL {
            match map(&device, &[piece(buffer.phys(), offset, len)], direction, NONE) {
                Ok(mapping) => live.push((mapping.iova(), mapping.len())),
                Err(
                    DmaMapError::NoBuffer { .. }
                    | DmaMapError::List(MapListError::Map(MapError::OutOfMemory)),
                ) => {
                    refused += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    for (iova, len) in live {
        assert!(bench.reaches(iova, Permissions::READ).or(bench.reaches(iova, Permissions::WRITE)).is_some());
        bench.pool.close(iova, len).unwrap();
    }
    refused
}

#[test]
fn memory_for_buffers_that_runs_out_anywhere_is_an_error_and_nothing_is_lost() {
    for split in [true, false] {
        let mut refused = usize::MAX;
        let mut grants = 0;
        while refused > 0 {
            let bench = Bench::new(PoolConfig { split, ..small() });
            bench.frames.grant(grants);
            refused = everything(&bench);
            bench.frames.grant(u64::MAX);
            assert_eq!(everything(&bench), 0, "after {grants} grants");
            bench.finish();
            grants += if grants < 24 { 1 } else { 37 };
        }
        assert!(grants > 20);
    }
}

#[test]
fn table_memory_that_runs_out_anywhere_is_an_error_and_nothing_is_lost() {
    let mut refused = usize::MAX;
    let mut grants = 0;
    while refused > 0 {
        let bench = Bench::new(PoolConfig { split: false, ..small() });
        bench.tables.grant(grants);
        refused = everything(&bench);
        bench.tables.grant(u64::MAX);
        assert_eq!(everything(&bench), 0, "after {grants} grants");
        bench.finish();
        grants += 1;
    }
    assert!(grants > 4);
}

#[test]
fn what_waits_makes_room_before_a_map_fails() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(4 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, 4 * PAGE)];
    let small_one = [piece(buffer.phys(), 0, PAGE)];
    let mapping = map(&bench.device, &small_one, Direction::ToDevice, NONE).unwrap();
    bench.pool.close(mapping.iova(), PAGE).unwrap();
    bench.memory.fail_after(1);
    let mapping = map(&bench.device, &list, Direction::ToDevice, NONE).unwrap();
    let usage = bench.pool.usage();
    assert_eq!((usage.buffer_bytes, usage.cached_bytes), (4 * PAGE, 0), "the small one was given back");
    bench.pool.close(mapping.iova(), 4 * PAGE).unwrap();
    drop(buffer);
    bench.finish();
}

#[test]
fn addresses_that_run_out_are_an_error_and_nothing_is_lost() {
    let bench = Bench::new(small());
    let profile = DeviceProfile { mask: 0x3f_ffff, untrusted: true, ..DeviceProfile::default() };
    let device = BounceDevice::new(bench.pool.clone(), profile).unwrap();
    let buffer = bench.memory.buffer(200 * PAGE).unwrap();
    for (offset, len) in [(0, PAGE), (3, 100 * PAGE), (0, 128 * PAGE)] {
        let list = [piece(buffer.phys(), offset, len)];
        for _ in 0..2 {
            let mut live = Vec::new();
            let error = loop {
                match map(&device, &list, Direction::Bidirectional, NONE) {
                    Ok(mapping) => live.push(mapping.iova()),
                    Err(error) => break error,
                }
            };
            assert!(
                matches!(error, DmaMapError::List(MapListError::Iova(IovaError::Exhausted { .. }))),
                "{error}"
            );
            assert!(live.len() >= 3);
            live.into_iter().for_each(|iova| bench.pool.close(iova, len).unwrap());
        }
    }
    drop((buffer, device));
    bench.finish();
}

#[test]
fn a_trim_that_is_not_confirmed_keeps_the_memory_until_one_is() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let live: Vec<_> =
        (0..3).map(|_| map(&bench.device, &list, Direction::FromDevice, NONE).unwrap().iova()).collect();
    // The device has them all in its cache.
    live.iter().for_each(|iova| bench.iommu.dma_write(DEVICE, *iova, &[1]).unwrap());
    live.iter().for_each(|iova| bench.pool.close(*iova, PAGE).unwrap());
    let frames = bench.memory.frames_in_use();
    bench.iommu.queue().fail_next(2, TIMEOUT);
    for _ in 0..2 {
        assert_eq!(bench.pool.trim(0), Err(TIMEOUT));
        let usage = bench.pool.usage();
        assert_eq!((usage.cached_bytes, usage.unconfirmed_bytes), (0, 3 * PAGE));
        assert!(bench.reaches(live[0], Permissions::WRITE).is_some());
        assert_eq!(bench.memory.frames_in_use(), frames, "given back while reachable");
    }
    // Others get other slots meanwhile.
    let mapping = map(&bench.device, &list, Direction::FromDevice, NONE).unwrap();
    assert!(!live.contains(&mapping.iova()));
    bench.pool.close(mapping.iova(), PAGE).unwrap();
    assert_eq!(bench.pool.trim(PAGE), Ok(3 * PAGE));
    assert!(live.iter().all(|iova| bench.reaches(*iova, Permissions::WRITE).is_none()));
    drop(buffer);
    bench.finish();
}

#[test]
fn an_unmap_that_is_not_confirmed_gives_the_data_and_keeps_the_buffer() {
    for (split, way) in [(false, Way::SingleUse), (true, Way::Split)] {
        let bench = Bench::new(PoolConfig { split, ..small() });
        let device = bench.device(1, true);
        let buffer = bench.memory.buffer(40 * PAGE).unwrap();
        let (before, len) = (bench.memory.frames_in_use(), 20 * PAGE);
        let list = [piece(buffer.phys(), 9, len)];
        let mapping = map(&device, &list, Direction::FromDevice, NONE).unwrap();
        assert_eq!(mapping.way(), way);
        let iova = mapping.iova();
        bench.iommu.dma_write(DEVICE, iova, &vec![4; len as usize]).unwrap();
        bench.iommu.queue().fail_next(1, TIMEOUT);
        // Where the device never had the original, nothing is left to be said.
        let expected = if split { Err(DmaUnmapError::Unconfirmed { error: TIMEOUT }) } else { Ok(()) };
        assert_eq!(bench.pool.close(iova, len), expected);
        assert_eq!(bench.bytes(list[0].phys, len), vec![4; len as usize]);
        assert!(bench.reaches(iova, Permissions::WRITE).is_some(), "or the test means nothing");
        assert_eq!(bench.pool.close(iova, len), Err(DmaUnmapError::NotMapped { iova }));
        assert!(bench.memory.frames_in_use() > before + if split { 1 } else { 20 });
        // Its addresses are nobody else's.
        let again = map(&device, &list, Direction::FromDevice, NONE).unwrap();
        assert_ne!(again.iova().get() & !(PAGE - 1), iova.get() & !(PAGE - 1));
        bench.pool.close(again.iova(), len).unwrap();
        assert_eq!(bench.pool.usage().singles, 1);
        bench.iommu.queue().fail_next(1, TIMEOUT);
        assert_eq!(bench.pool.trim(0), Err(TIMEOUT));
        assert_eq!(bench.pool.trim(0), Ok(if split { 2 } else { 20 } * PAGE));
        assert!(bench.reaches(iova, Permissions::WRITE).is_none());
        drop((buffer, device));
        bench.finish();
    }
}

#[test]
fn a_map_that_could_not_be_undone_for_sure_keeps_its_buffer_until_a_trim() {
    let bench = Bench::new(PoolConfig { split: false, ..small() });
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(3000 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 9, 2000 * PAGE)];
    let before = bench.memory.frames_in_use();
    // Tables for the beginning, and none for the rest.
    let mut unconfirmed = 0;
    for grants in 0..8 {
        bench.tables.grant(grants);
        // Making room for tables asks the hardware, too.
        bench.iommu.queue().fail_next(9, TIMEOUT);
        let result = map(&device, &list, Direction::FromDevice, NONE).map(|mapping| mapping.iova());
        bench.iommu.queue().fail_next(0, TIMEOUT);
        bench.tables.grant(u64::MAX);
        let kept = bench.memory.frames_in_use() > before + 2000;
        match result {
            Err(DmaMapError::List(MapListError::Unconfirmed { error: TIMEOUT })) => {
                assert!(kept && bench.pool.usage().singles == 1, "given back while reachable");
                unconfirmed += 1;
            }
            Err(DmaMapError::List(MapListError::Map(MapError::OutOfMemory))) => assert!(!kept),
            Ok(iova) => bench.pool.close(iova, 2000 * PAGE).unwrap(),
            Err(error) => panic!("{error}"),
        }
        bench.pool.trim(0).unwrap();
        bench.domain.reclaim().unwrap();
        assert_eq!(bench.memory.frames_in_use(), before);
    }
    assert!(unconfirmed > 0, "or the test means nothing");
    drop((buffer, device));
    bench.finish();
}

#[test]
fn somebody_else_s_mapping_in_a_slot_costs_that_slot_alone() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, 64)];
    let first = map(&bench.device, &list, Direction::ToDevice, NONE).unwrap().iova();
    // The next slot that was never used: not the neighbour, which another CPU would have.
    let range = IovaRange::new(Iova::new(first.get() + 2 * PAGE), PAGE).unwrap();
    let mapper = bench.domain.mapper();
    let pages = [(buffer.phys(), PAGE)];
    mapper.open(&bench.platform, range, pages, Permissions::READ, &mut Gather::new()).unwrap();
    let error = map(&bench.device, &list, Direction::ToDevice, NONE).unwrap_err();
    let occupied = MapError::AlreadyMapped { at: range.start() };
    assert_eq!(error, DmaMapError::List(MapListError::Map(occupied)));
    let second = map(&bench.device, &list, Direction::ToDevice, NONE).unwrap().iova();
    assert_eq!(second.get(), first.get() + PAGE);
    assert_eq!(bench.reaches(range.start(), Permissions::READ), Some(buffer.phys()), "left alone");
    bench.pool.close(first, 64).unwrap();
    bench.pool.close(second, 64).unwrap();
    assert_eq!(bench.pool.trim(0), Ok(2 * PAGE));
    let usage = bench.pool.usage();
    assert_eq!((usage.lost_slots, usage.buffer_bytes), (1, 0));
    let Bench { pool, device, domain, .. } = bench;
    drop((pool, device));
    // The addresses must not be used again.
    assert_eq!(domain.stats().lost_iova_bytes, usage.iova_bytes);
}

/// The pages before somebody else's are entered, removed again, and not confirmed.
#[test]
fn a_slot_that_is_both_somebody_else_s_and_unconfirmed_is_not_used_again() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(16 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, 16 * PAGE)];
    let first = map(&bench.device, &list, Direction::ToDevice, NONE).unwrap().iova();
    let range = IovaRange::new(Iova::new(first.get() + 31 * PAGE), PAGE).unwrap();
    let pages = [(buffer.phys(), PAGE)];
    bench.domain.mapper().open(&bench.platform, range, pages, Permissions::READ, &mut Gather::new()).unwrap();
    bench.iommu.queue().fail_next(1, TIMEOUT);
    let error = map(&bench.device, &list, Direction::ToDevice, NONE).unwrap_err();
    assert_eq!(error, DmaMapError::List(MapListError::Unconfirmed { error: TIMEOUT }));
    assert_eq!((bench.pool.usage().unconfirmed_bytes, bench.pool.usage().lost_slots), (16 * PAGE, 1));
    assert_eq!(bench.pool.trim(0), Ok(16 * PAGE));
    let second = map(&bench.device, &list, Direction::ToDevice, NONE).unwrap().iova();
    assert_eq!(second.get(), first.get() + 32 * PAGE);
    assert_eq!(bench.reaches(range.start(), Permissions::READ), Some(buffer.phys()), "left alone");
    [first, second].iter().for_each(|iova| bench.pool.close(*iova, 16 * PAGE).unwrap());
    assert_eq!(bench.pool.trim(0), Ok(32 * PAGE));
    let usage = bench.pool.usage();
    assert_eq!((usage.lost_slots, usage.buffer_bytes, usage.unconfirmed_bytes), (1, 0, 0));
    let Bench { pool, device, domain, .. } = bench;
    drop((pool, device));
    assert_eq!(domain.stats().lost_iova_bytes, usage.iova_bytes);
}

/// A list that the tables cannot hold is an error, and no sum on the way there wraps.
#[test]
fn memory_at_the_end_of_all_addresses() {
    let bench = Bench::new(small());
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let last = portcullis::addr::PhysAddr::new(u64::MAX - (PAGE - 2));
    let end = piece(last, 0, PAGE - 1);
    let body = piece(buffer.phys(), 0, 30 * PAGE + 5);
    // Its beginning is bounced, and so is its end: nothing of the last page need be mapped.
    let list = [end, body];
    let mapping = map(&device, &list, Direction::FromDevice, NONE).unwrap();
    assert_eq!(mapping.way(), Way::Split);
    bench.pool.close(mapping.iova(), mapping.len()).unwrap();
    // With its granules it would be all addresses and one.
    let all = [piece(portcullis::addr::PhysAddr::new(1), 0, u64::MAX - 1)];
    let error = map(&device, &all, Direction::FromDevice, NONE);
    assert!(matches!(error, Err(DmaMapError::List(MapListError::Wraps { .. }))), "{error:?}");
    // Through a slot; no byte is copied, but all addresses are formed.
    let iova = map(&device, &[end], Direction::FromDevice, NONE).unwrap().iova();
    bench.pool.sync_cpu(iova, PAGE - 1, 0).unwrap();
    bench.pool.close(iova, PAGE - 1).unwrap();
    bench.pool.trim(0).unwrap();
    let usage = bench.pool.usage();
    assert_eq!((usage.singles, usage.buffer_bytes), (0, 0));
}

#[test]
fn a_pool_that_ends_unconfirmed_leaks_its_memory_rather_than_free_it() {
    let bench = Bench::new(small());
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let mut iovas = Vec::new();
    for len in [64, 30 * PAGE] {
        let list = [piece(buffer.phys(), 3, len)];
        let mapping = map(&device, &list, Direction::FromDevice, NONE).unwrap();
        bench.iommu.dma_write(DEVICE, mapping.iova(), &[1]).unwrap();
        iovas.push(mapping.iova());
    }
    let reached: Vec<_> =
        iovas.iter().map(|iova| bench.reaches(*iova, Permissions::WRITE).unwrap()).collect();
    let usage = bench.pool.usage();
    let Bench { pool, device: other, domain, iommu, memory, .. } = bench;
    iommu.queue().fail_next(1, TIMEOUT);
    drop((pool, device, other));
    for (iova, phys) in iovas.iter().zip(reached) {
        assert_eq!(iommu.probe(DEVICE, *iova, Permissions::WRITE), Some(phys), "or the test means nothing");
        assert!(memory.is_allocated(phys), "freed while reachable");
    }
    assert_eq!(domain.stats().lost_iova_bytes, usage.iova_bytes + 31 * PAGE);
}
