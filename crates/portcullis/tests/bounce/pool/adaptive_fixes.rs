//! Where copying or mapping by cost went wrong once: each of these failed before it was mended.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{Direction, DmaSegment, Permissions};
use portcullis::bounce::pool::{Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig, Way};
use portcullis::dma::{AdaptiveRing, DmaDevice, DmaUnmapError, Ended, RawMapping, StrictRingConfig};
use portcullis::domain::Policy;
use portcullis_model::open::OpenPool;

use crate::chosen::Chosen;
use crate::pool::adaptive_ring::{Queue, map, page, queue, reaches, rows};
use crate::pool::costs::{Costs, row};
use crate::pool::support::{Bench, DEVICE, PAGE, TIMEOUT, piece, small};

const LAZY: Policy = Policy::Lazy { window_ns: 1 << 62 };

/// A queue of `pages` pages and a trusted device.
fn queue_of(bench: &Bench, pages: u32, batch: usize, (wait_ns, copy_ns): (u64, u64)) -> (Costs, Queue) {
    let costs = Costs::new(wait_ns, copy_ns);
    let device = DmaDevice::new(bench.domain.clone(), u64::MAX).unwrap();
    let config = StrictRingConfig::new(pages, PAGE, batch);
    let clock = costs.clock(bench);
    (costs, AdaptiveRing::new(&device, bench.device.clone(), Direction::FromDevice, config, clock).unwrap())
}

#[test]
fn where_mapping_fails_the_attempt_and_the_copy_are_what_it_costs() {
    let bench = Bench::new(small());
    // A wait alone is dearer than a copy, and a share of it is not.
    let (_, mut queue) = queue_of(&bench, 16, 8, (4000, 1000));
    let (buffer, list) = page(&bench);
    let mut live = Vec::new();
    while live.last().is_none_or(|last: &RawMapping| last.way().is_none()) {
        live.push(map(&mut queue, &list).unwrap());
    }
    let before = row(&rows(&queue), PAGE, Direction::FromDevice);
    assert_eq!((before.copies, before.map_ns.unwrap().0), (false, 0), "{before:?}");
    for _ in 0..61 * 32 {
        let mapping = map(&mut queue, &list).unwrap();
        assert_eq!(mapping.way(), Some(Way::Slot), "no address is left in the ring");
        assert_eq!(queue.unmap(mapping).unwrap(), Ended::Done(()));
    }
    let row = row(&rows(&queue), PAGE, Direction::FromDevice);
    assert!(row.map_ns.unwrap().0 > 500, "{row:?}");
    live.into_iter().for_each(|mapping| _ = queue.unmap(mapping).unwrap());
    queue.commit().unwrap();
    drop((queue, buffer));
    bench.finish();
}

#[test]
fn a_measurement_that_fails_loses_no_memory() {
    for grants in 0..6 {
        let bench = Bench::new(small());
        let before = bench.memory.frames_in_use();
        bench.tables.grant(grants);
        let (_, queue) = queue_of(&bench, 64, 8, (1, 1000));
        bench.tables.grant(u64::MAX);
        drop(queue);
        bench.domain.reclaim().unwrap();
        assert_eq!(bench.memory.frames_in_use(), before, "{grants} grants");
        bench.finish();
    }
}

/// Its users find the ring empty, too.
#[test]
fn a_wait_that_fails_once_while_costs_are_measured_loses_no_memory() {
    for fails in 1..4 {
        let bench = Bench::new(small());
        let before = bench.memory.frames_in_use();
        bench.iommu.queue().fail_next(fails, TIMEOUT);
        let (_, queue) = queue_of(&bench, 64, 8, (1, 1000));
        if fails == 1 {
            assert_eq!(queue.waiting(), 0);
        }
        drop(queue);
        bench.pool.trim(0).unwrap();
        bench.domain.reclaim().unwrap();
        let lost = bench.memory.frames_in_use() - before;
        // What is not confirmed at the second attempt either is leaked.
        assert!(lost == if fails == 1 { 0 } else { 16 }, "{lost} frames after {fails}");
    }
}

/// Neither the measurement's own unmaps are confirmed, nor the commit at its end.
#[test]
fn memory_that_was_measured_with_is_leaked_where_the_hardware_stays_silent() {
    for (fails, leaked) in [(0, 0), (u64::MAX, 16)] {
        let bench = Bench::new(small());
        let before = bench.memory.frames_in_use();
        bench.iommu.queue().fail_next(fails, TIMEOUT);
        let (_, queue) = queue_of(&bench, 64, 8, (1, 1000));
        bench.iommu.queue().fail_next(0, TIMEOUT);
        drop(queue);
        bench.pool.trim(0).unwrap();
        bench.domain.reclaim().unwrap();
        assert_eq!(bench.memory.frames_in_use() - before, leaked);
    }
}

#[test]
fn buffers_that_others_use_stay_when_costs_are_measured() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let none = Attributes::default();
    let live: Vec<_> = (0..5)
        .map(|_| crate::pool::support::map(&bench.device, &list, Direction::FromDevice, none).unwrap().iova())
        .collect();
    live.into_iter().for_each(|iova| bench.pool.close(iova, PAGE).unwrap());
    assert_eq!(bench.pool.usage().cached_bytes, 5 * PAGE);
    let (_, queue) = queue_of(&bench, 64, 8, (1, 1000));
    // They are found again without a look at the depots.
    let reused = bench.pool.usage().reused;
    for _ in 0..5 {
        let _ = crate::pool::support::map(&bench.device, &list, Direction::FromDevice, none).unwrap();
    }
    assert_eq!(bench.pool.usage().reused, reused + 5);
    drop((queue, buffer));
}

#[test]
fn a_batch_of_one_knows_what_its_waits_cost() {
    let bench = Bench::new(small());
    let (costs, mut queue) = queue_of(&bench, 64, 1, (8, 1000));
    let (buffer, list) = page(&bench);
    assert!(!row(&rows(&queue), PAGE, Direction::FromDevice).copies);
    costs.set(80_000, 1000);
    for _ in 0..61 * 64 {
        let mapping = map(&mut queue, &list).unwrap();
        let _ = queue.unmap(mapping).unwrap();
    }
    let row = row(&rows(&queue), PAGE, Direction::FromDevice);
    assert_eq!((row.copies, row.switches), (true, 1), "{row:?}");
    drop((queue, buffer));
    bench.finish();
}

#[test]
fn batches_that_are_never_full_cost_what_they_do() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue_of(&bench, 64, 8, (800, 300));
    let (buffer, list) = page(&bench);
    // 100 ns for each of a full batch, 800 for one alone.
    for (idles, copies) in [(true, true), (false, false), (true, true)] {
        for _ in 0..61 * 64 * 40 {
            let mapping = map(&mut queue, &list).unwrap();
            let _ = queue.unmap(mapping).unwrap();
            if idles {
                queue.commit().unwrap();
            }
        }
        let row = row(&rows(&queue), PAGE, Direction::FromDevice);
        assert_eq!(row.copies, copies, "idles: {idles}: {row:?}");
    }
    assert_eq!(row(&rows(&queue), PAGE, Direction::FromDevice).switches, 3);
    queue.commit().unwrap();
    drop((queue, buffer));
    bench.finish();
}

#[test]
fn where_the_ring_has_no_tables_it_copies() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue_of(&bench, 2048, 8, (8, 1_000_000));
    let (buffer, list) = page(&bench);
    // The pool has tables, and keeps them.
    let kept = crate::pool::support::map(&bench.device, &list, Direction::FromDevice, Attributes::default())
        .unwrap();
    bench.tables.grant(0);
    let mut ways = [0; 2];
    for _ in 0..3000 {
        let mapping = map(&mut queue, &list).unwrap();
        ways[usize::from(mapping.way().is_some())] += 1;
        let _ = queue.unmap(mapping).unwrap();
    }
    bench.tables.grant(u64::MAX);
    assert!(ways[0] > 0 && ways[1] > 0, "{ways:?}");
    bench.pool.close(kept.iova(), PAGE).unwrap();
    queue.commit().unwrap();
    drop((queue, buffer));
    bench.finish();
}

/// Nothing waits in a full ring, and a mapping by itself, which would be cheaper than a copy, finds no table either.
#[test]
fn where_the_ring_is_full_and_there_are_no_tables_it_copies() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue_of(&bench, 16, 8, (8, 1_000_000));
    let (buffer, list) = page(&bench);
    // The pool has a slot, and tables for it.
    let slot = crate::pool::support::map(&bench.device, &list, Direction::FromDevice, Attributes::default())
        .unwrap();
    bench.pool.close(slot.iova(), PAGE).unwrap();
    let mut live: Vec<_> = (0..20).map(|_| map(&mut queue, &list).unwrap()).collect();
    assert_eq!(live.last().unwrap().way(), Some(Way::Direct));
    bench.tables.grant(0);
    while live.last().unwrap().way() == Some(Way::Direct) {
        live.push(map(&mut queue, &list).unwrap());
    }
    bench.tables.grant(u64::MAX);
    let last = live.pop().unwrap();
    assert_eq!(last.way(), Some(Way::Slot));
    bench.iommu.dma_write(DEVICE, last.iova(), &[7; 100]).unwrap();
    assert_eq!(queue.unmap(last).unwrap(), Ended::Done(()));
    assert_eq!(bench.bytes(buffer.phys(), 100), [7; 100]);
    live.into_iter().for_each(|mapping| _ = queue.unmap(mapping).unwrap());
    queue.commit().unwrap();
    drop((queue, buffer));
    bench.finish();
}

#[test]
fn another_ring_s_copy_comes_back_untouched() {
    let bench = Bench::new(small());
    let (_, mut first) = queue(&bench, Direction::FromDevice, (1_000_000, 1));
    // Of the same domain, with a pool of its own and fewer sizes.
    let config = PoolConfig { threshold: PAGE, ..small() };
    let pool = BouncePool::new(bench.domain.clone(), bench.frames.clone(), config).unwrap();
    let other = BounceDevice::new(pool.clone(), DeviceProfile::default()).unwrap();
    let device = DmaDevice::new(bench.domain.clone(), u64::MAX).unwrap();
    let config = StrictRingConfig::new(64, PAGE, 8);
    let mut second = AdaptiveRing::new(&device, other, Direction::FromDevice, config, || 0).unwrap();
    let buffer = bench.memory.buffer(16 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, 16 * PAGE)];
    // Timed ones among them.
    for _ in 0..130 {
        let mapping = map(&mut first, &list).unwrap();
        let iova = mapping.iova();
        let sync = [second.sync_for_cpu(&mapping, 0, 1), second.sync_for_device(&mapping, 0, 1)];
        assert_eq!(sync, [Err(DmaUnmapError::OtherQueue); 2]);
        let failed = second.unmap(mapping).unwrap_err();
        assert!(matches!(failed.error, DmaUnmapError::OtherQueue));
        bench.iommu.dma_write(DEVICE, iova, &[7; 100]).unwrap();
        let _ = first.unmap(failed.mapping.unwrap()).unwrap();
        assert_eq!(bench.bytes(buffer.phys(), 100), [7; 100]);
    }
    first.commit().unwrap();
    drop((first, second, pool, device, buffer));
    bench.finish();
}

#[test]
fn a_pool_of_another_domain_is_refused() {
    let [one, other] = [Bench::new(small()), Bench::new(small())];
    let device = DmaDevice::new(one.domain.clone(), u64::MAX).unwrap();
    let config = StrictRingConfig::new(64, PAGE, 8);
    let refused = AdaptiveRing::new(&device, other.device.clone(), Direction::ToDevice, config, || 0);
    assert!(matches!(refused, Err(SetupError::OtherDomain)));
}

#[test]
fn what_neither_the_ring_nor_a_copy_is_for_ends_at_once_in_a_lazy_domain_too() {
    let bench = Bench::on(Arc::new(Chosen::new(3)), LAZY, small());
    let (_, mut queue) = queue_of(&bench, 16, 8, (8, 1000));
    let buffer = bench.memory.buffer(600 * PAGE).unwrap();
    // Larger than the ring.
    let list = [piece(buffer.phys(), 0, 600 * PAGE)];
    let mut view = [DmaSegment::default()];
    // SAFETY: the memory is simulated, every access to it atomic.
    let (mapping, _) = unsafe { queue.map(&list, Attributes::default(), &mut view) }.unwrap();
    let iova = mapping.iova();
    assert_eq!(mapping.way(), Some(Way::Direct));
    assert!(bench.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok());
    assert_eq!(queue.unmap(mapping).unwrap(), Ended::Done(()));
    assert!(!reaches(&bench, iova, &buffer));
    drop((queue, buffer));
}
