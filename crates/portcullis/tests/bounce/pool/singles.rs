//! Buffers of their own at their ends: wiped, out of reach, and given back.

use portcullis::addr::{Direction, Permissions};
use portcullis::bounce::pool::{Attributes, PoolConfig, Way};
use portcullis::dma::{DmaMapError, DmaUnmapError};
use portcullis_model::open::OpenPool;

use crate::pool::support::{Bench, DEVICE, PAGE, TIMEOUT, map, piece, small};

const NONE: Attributes = Attributes { copy_in: false };

#[test]
fn a_buffer_that_is_to_be_wiped_goes_back_empty() {
    for split in [false, true] {
        let bench = Bench::new(PoolConfig { split, wipe: true, ..small() });
        let device = bench.device(1, true);
        let buffer = bench.memory.buffer(40 * PAGE).unwrap();
        let len = 20 * PAGE;
        let list = [piece(buffer.phys(), 9, len)];
        let mapping = map(&device, &list, Direction::FromDevice, NONE).unwrap();
        let iova = mapping.iova();
        bench.iommu.dma_write(DEVICE, iova, &vec![7; len as usize]).unwrap();
        let bounced = bench.reaches(iova, Permissions::WRITE).unwrap();
        // It is not freed, and so not cleared by its owner, before it is confirmed.
        bench.iommu.queue().fail_next(1, TIMEOUT);
        let unmapped = bench.pool.close(iova, len);
        assert_eq!(unmapped.is_ok(), !split);
        assert_eq!(bench.bytes(list[0].phys, len), vec![7; len as usize]);
        assert_eq!(bench.bytes(bounced, 64), [0; 64]);
        bench.pool.trim(0).unwrap();
        drop((buffer, device));
        bench.finish();
    }
}

#[test]
fn a_sync_outside_of_a_buffer_of_its_own_is_an_error_and_copies_nothing() {
    let bench = Bench::new(PoolConfig { split: false, ..small() });
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let mapped = 20 * PAGE;
    let list = [piece(buffer.phys(), 9, mapped)];
    let mapping = map(&device, &list, Direction::Bidirectional, NONE).unwrap();
    assert_eq!(mapping.way(), Way::SingleUse);
    let iova = mapping.iova();
    bench.iommu.dma_write(DEVICE, iova, &vec![3; mapped as usize]).unwrap();
    for (offset, len) in [(0, mapped + 1), (mapped, 1), (mapped - 1, 2), (1, u64::MAX)] {
        let out = DmaUnmapError::OutOfRange { iova, offset, len, mapped };
        assert_eq!(bench.pool.sync_cpu(iova, offset, len), Err(out));
        assert_eq!(bench.pool.sync_device(iova, offset, len), Err(out));
    }
    assert_eq!(bench.bytes(list[0].phys, mapped), vec![0; mapped as usize]);
    bench.pool.sync_cpu(iova, mapped - 1, 1).unwrap();
    assert_eq!(bench.bytes(piece(list[0].phys, mapped - 2, 2).phys, 2), [0, 3]);
    bench.pool.close(iova, mapped).unwrap();
    drop((buffer, device));
    bench.finish();
}

#[test]
fn a_sync_leaves_what_the_driver_has_written_for_a_device() {
    for (split, way) in [(false, Way::SingleUse), (true, Way::Split)] {
        let bench = Bench::new(PoolConfig { split, ..small() });
        let device = bench.device(1, true);
        let buffer = bench.memory.buffer(40 * PAGE).unwrap();
        let (list, len) = ([piece(buffer.phys(), 9, 20 * PAGE)], 20 * PAGE);
        let mapping = map(&device, &list, Direction::ToDevice, NONE).unwrap();
        assert_eq!(mapping.way(), way);
        bench.write(list[0].phys, b"the next");
        bench.pool.sync_cpu(mapping.iova(), 0, len).unwrap();
        assert_eq!(bench.bytes(list[0].phys, 8), b"the next");
        bench.pool.close(mapping.iova(), len).unwrap();
        drop((buffer, device));
        bench.finish();
    }
}

#[test]
fn memory_in_small_pieces_is_used_before_cached_buffers_are_given_back_for_a_large_one() {
    let bench = Bench::new(PoolConfig { split: false, ..small() });
    let device = bench.device(1, true);
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let cached = map(&device, &list, Direction::ToDevice, NONE).unwrap();
    bench.pool.close(cached.iova(), PAGE).unwrap();
    bench.frames.break_up(1);
    let len = 20 * PAGE;
    let list = [piece(buffer.phys(), 9, len)];
    let mapping = map(&device, &list, Direction::ToDevice, NONE).unwrap();
    assert_eq!((mapping.way(), bench.pool.usage().cached_bytes), (Way::SingleUse, PAGE));
    bench.pool.close(mapping.iova(), len).unwrap();
    bench.pool.trim(0).unwrap();
    drop((buffer, device));
    bench.finish();
}

#[test]
fn a_pool_that_ends_asks_once_more_for_what_was_not_confirmed() {
    for split in [false, true] {
        let bench = Bench::new(PoolConfig { split, ..small() });
        let device = bench.device(1, true);
        let buffer = bench.memory.buffer(40 * PAGE).unwrap();
        let list = [piece(buffer.phys(), 9, 20 * PAGE)];
        let mapping = map(&device, &list, Direction::FromDevice, NONE).unwrap();
        let iova = mapping.iova();
        bench.iommu.dma_write(DEVICE, iova, &[1]).unwrap();
        let head = bench.reaches(iova, Permissions::WRITE).unwrap();
        bench.iommu.queue().fail_next(1, TIMEOUT);
        assert_eq!(bench.pool.close(iova, mapping.len()).is_ok(), !split);
        let Bench { pool, device: other, domain, iommu, memory, .. } = bench;
        let reaches = || iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok();
        assert!(reaches(), "or the test means nothing");
        drop((pool, device, other));
        assert!(!reaches() && !memory.is_allocated(head));
        assert_eq!(domain.stats().lost_iova_bytes, 0);
    }
}

/// Of a slot, and of a mapping by itself whose end is confirmed only then.
#[test]
fn a_trim_says_how_much_memory_came_back() {
    for split in [false, true] {
        let bench = Bench::new(PoolConfig { split, ..small() });
        let device = bench.device(1, true);
        let buffer = bench.memory.buffer(40 * PAGE).unwrap();
        let lists = [PAGE, 20 * PAGE].map(|len| [piece(buffer.phys(), 9, len)]);
        let [slot, own] =
            lists.each_ref().map(|list| map(&device, list, Direction::FromDevice, NONE).unwrap());
        bench.pool.close(slot.iova(), PAGE).unwrap();
        bench.iommu.queue().fail_next(1, TIMEOUT);
        assert_eq!(bench.pool.close(own.iova(), own.len()).is_ok(), !split);
        let before = bench.memory.frames_in_use();
        let said = bench.pool.trim(0).unwrap();
        let came = (before - bench.memory.frames_in_use()) * PAGE;
        assert_eq!((said, came > 2 * PAGE), (came, true), "split: {split}");
        drop((buffer, device));
        bench.finish();
    }
}

#[test]
fn a_pool_that_ends_asks_once_more_for_slots_that_were_not_confirmed() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let iova = map(&bench.device, &list, Direction::FromDevice, NONE).unwrap().iova();
    bench.iommu.dma_write(DEVICE, iova, &[1]).unwrap();
    let slot = bench.reaches(iova, Permissions::WRITE).unwrap();
    bench.pool.close(iova, PAGE).unwrap();
    bench.iommu.queue().fail_next(1, TIMEOUT);
    assert_eq!(bench.pool.trim(0), Err(TIMEOUT));
    let Bench { pool, device, domain, iommu, memory, .. } = bench;
    let reaches = || iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok();
    assert!(reaches() && memory.is_allocated(slot), "or the test means nothing");
    drop((pool, device));
    assert!(!reaches() && !memory.is_allocated(slot));
    assert_eq!(domain.stats().lost_iova_bytes, 0);
}

#[test]
fn a_slot_that_got_no_memory_gets_some_later() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(16 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, 16 * PAGE)];
    bench.frames.grant(0);
    for _ in 0..20 {
        let error = map(&bench.device, &list, Direction::ToDevice, NONE).unwrap_err();
        assert_eq!(error, DmaMapError::NoBuffer { bytes: 16 * PAGE, held: 0 });
    }
    bench.frames.grant(u64::MAX);
    let live: Vec<_> =
        (0..4).map(|_| map(&bench.device, &list, Direction::ToDevice, NONE).unwrap()).collect();
    assert!(live.iter().all(|mapping| mapping.way() == Way::Slot), "{live:?}");
    live.iter().for_each(|mapping| bench.pool.close(mapping.iova(), mapping.len()).unwrap());
    drop(buffer);
    bench.finish();
}
