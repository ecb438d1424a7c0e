//! How much is done while a CPU is lent: in a kernel preemption, or interrupts, are off meanwhile, and whoever waits for
//! other CPUs' turns waits for that. What takes long is done in slices, and slices are counted.

use std::sync::Arc;

use crate::chosen::{ANYWHERE, Chosen, PAGE, alloc, config, free};
use crate::pool::support::{Bench, map, piece, small};
use crate::rig::{LAZY_FOREVER, Rig, page};
use portcullis::addr::{Direction, Permissions, PhysSegment};
use portcullis::bounce::pool::Attributes;
use portcullis::bounce::swiotlb::{Constraints, Swiotlb, SwiotlbConfig};
use portcullis::dma::{DmaMapError, MOST_IN_BATCH, RawBatch};
use portcullis::domain::Policy;
use portcullis::invalidation::SLICE;
use portcullis::iova::IovaSpace;
use portcullis_model::Memory;
use portcullis_model::open::OpenPool;

/// How often a CPU was lent for `work`.
fn lends<T>(platform: &Chosen, work: impl FnOnce() -> T) -> (T, usize) {
    let before = platform.lends();
    let result = work();
    (result, platform.lends() - before)
}

#[test]
fn the_addresses_of_a_batch_go_back_in_slices() {
    let platform = Arc::new(Chosen::new(1));
    let bench = Rig::new(Arc::clone(&platform), Policy::Strict, |queue| queue);
    let lends_for = |mappings: usize| {
        let mut batch = RawBatch::new(&bench.device, MOST_IN_BATCH).unwrap();
        // SAFETY: the memory is the software IOMMU's, or nobody's at all.
        let map =
            |n| unsafe { bench.domain.map(&[page(n)], Permissions::READ_WRITE, ANYWHERE) }.unwrap().start();
        let mapped: Vec<_> = (0..mappings as u64).map(map).collect();
        for iova in mapped {
            bench.device.unmap_single_in(&mut batch, iova, PAGE).unwrap();
        }
        let (committed, lends) = lends(&platform, || batch.commit());
        committed.unwrap();
        lends
    };
    let one = lends_for(1);
    assert_eq!(lends_for(SLICE), one);
    assert_eq!(lends_for(SLICE + 1), one + 1);
    assert_eq!(lends_for(MOST_IN_BATCH), one + MOST_IN_BATCH / SLICE - 1);
    assert_eq!(bench.domain.stats().unmaps as usize, 2 + 2 * SLICE + MOST_IN_BATCH);
}

#[test]
fn what_waited_for_a_flush_goes_back_in_slices() {
    const WAIT: usize = 200;
    let platform = Arc::new(Chosen::new(1));
    let bench = Rig::new(Arc::clone(&platform), LAZY_FOREVER, |queue| queue);
    let unmap = |n| {
        // SAFETY: as above.
        let range = unsafe { bench.domain.map(&[page(n)], Permissions::READ_WRITE, ANYWHERE) }.unwrap();
        bench.domain.unmap(range).unwrap();
    };
    (0..WAIT as u64).for_each(unmap);
    bench.domain.flush().unwrap();
    let released =
        |cpu| lends(&platform, || portcullis::platform::PlatformEvents::cpu_released(&*bench.domain, cpu)).1;
    let lent = released(0);
    // All of what waited, and then the CPU's own lists, range by range.
    let taken = bench.domain.stats();
    assert_eq!(taken.taken_iova_bytes - taken.cached_iova_bytes, 0);
    assert!(lent >= WAIT.div_ceil(SLICE) + WAIT, "{lent}");
}

#[test]
fn a_list_that_needs_room_turns_out_64_ranges_at_once() {
    // A CPU that keeps 2,048 pages, all of them singly.
    let (platform, space) = (Chosen::new(1), IovaSpace::new(&config(16, 16 << 10, 1)).unwrap());
    let singles: Vec<_> = (0..3000).map(|_| alloc(&space, &platform, 1, ANYWHERE).unwrap()).collect();
    singles.into_iter().for_each(|range| free(&space, &platform, range).unwrap());
    let pages = || space.usage().cached / PAGE;
    assert!(pages() > 1024, "{}", pages());
    // Eight slices make room for one of 512, which is kept from then on.
    for call in 1.. {
        let before = pages();
        let range = alloc(&space, &platform, 512, ANYWHERE).unwrap();
        let out = before - pages();
        assert!(out <= 64, "{out} at once");
        let before = pages();
        free(&space, &platform, range).unwrap();
        if pages() > before {
            assert_eq!((call, pages() - before), (8, 512));
            break;
        }
        assert!(call < 8, "there is never room");
    }
    space.drain_all(&platform);
    assert_eq!(space.usage().taken, 0);
}

#[test]
fn a_pool_s_own_mappings_are_looked_through_in_slices() {
    const MAPPINGS: usize = 3 * SLICE + 1;
    let bench = Bench::new(small());
    let (base, device) = (bench.memory.base(), bench.device(1, true));
    let (trimmed, without) = lends(&bench.platform, || bench.pool.trim(0));
    trimmed.unwrap();
    // Longer than any class, and not aligned: their ends are bounced.
    let lists: Vec<_> = (0..MAPPINGS as u64).map(|n| [piece(base, n * (80 << 10) + 100, 72 << 10)]).collect();
    let attributes = Attributes::default();
    let mapped: Vec<_> =
        lists.iter().map(|list| map(&device, list, Direction::ToDevice, attributes).unwrap()).collect();
    assert_eq!(bench.pool.usage().singles as usize, MAPPINGS);
    let (trimmed, with) = lends(&bench.platform, || bench.pool.trim(u64::MAX));
    trimmed.unwrap();
    // Once for what waits, once for what was confirmed.
    assert!(with >= without + 2 * MAPPINGS.div_ceil(SLICE), "{with}, and {without} without them");
    for (mapping, list) in mapped.iter().zip(&lists) {
        bench.pool.close(mapping.iova(), list[0].len).unwrap();
    }
    drop(device);
    bench.finish();
}

#[test]
fn areas_are_looked_through_one_by_one_for_a_run_of_any_length() {
    const AREA: u64 = 512 << 10;
    const AREAS: u64 = 8;
    let (platform, memory) = (Arc::new(Chosen::new(1)), Memory::new(32 << 20));
    let bytes = AREAS * AREA;
    let config =
        SwiotlbConfig { area_bytes: AREA, min_bytes: bytes, max_bytes: bytes, ..SwiotlbConfig::default() };
    let pool = Swiotlb::new(Arc::clone(&platform), Arc::clone(&memory), &config).unwrap();
    let any = Constraints::new();
    let map = |len| {
        let original = PhysSegment { phys: memory.base(), len };
        // SAFETY: all access to the model's memory is by atomics.
        unsafe { pool.map(original, Direction::ToDevice, &any) }
    };
    // Every area has much that is free, and nowhere as much in a row.
    let first: Vec<_> = (0..AREAS).map(|_| map(320 << 10).unwrap()).collect();
    let (full, lent) = lends(&platform, || map(320 << 10));
    assert!(matches!(full, Err(DmaMapError::Pressure { .. })), "{full:?}");
    assert!(map(160 << 10).is_ok());
    // Areas whose count says no are passed without lending a CPU; each of them was asked at least once.
    assert!(lent >= AREAS as usize, "{lent}");
    for mapped in first {
        // SAFETY: each mapping is ended once.
        unsafe { pool.unmap(mapped.phys, mapped.len) }.unwrap();
    }
}
