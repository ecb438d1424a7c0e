//! Where copying or mapping by cost went wrong once: each of these failed before it was mended.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use portcullis::addr::{Direction, Iova, IovaRange, Permissions};
use portcullis::bounce::adaptive::{Adaptive, Choice};
use portcullis::bounce::pool::{
    Attributes, BounceDevice, BounceMapError, BouncePool, DeviceProfile, PoolConfig, Way,
};
use portcullis::dma::{
    AdaptiveRing, AdaptiveUnmap, AdaptiveUnmapError, DmaDevice, DmaSegment, RingError, StrictRingConfig,
};
use portcullis::domain::{MapListError, Policy};
use portcullis::invalidation::Gather;
use portcullis::platform::{LocalSlot, Platform, PlatformEvents, PlatformNumber};
use portcullis_model::open::{OpenAdaptive, OpenMapper, OpenPool};

use crate::adaptive::{adaptive, cycle, map as map_one};
use crate::adaptive_ring::{Queue, map, page, queue, reaches, rows};
use crate::chosen::Chosen;
use crate::costs::{Costs, row};
use crate::support::{Bench, DEVICE, PAGE, TIMEOUT, piece, small};

const LAZY: Policy = Policy::Lazy { window_ns: 1 << 62 };
const BOTH: [Permissions; 2] = [Permissions::READ, Permissions::WRITE];

/// A queue of `pages` pages and a trusted device.
fn queue_of(bench: &Bench, pages: u32, batch: usize, (wait_ns, copy_ns): (u64, u64)) -> (Costs, Queue) {
    let costs = Costs::new(wait_ns, copy_ns);
    let device = DmaDevice::new(Arc::clone(&bench.domain), u64::MAX);
    let config = StrictRingConfig::new(pages, PAGE, batch);
    let clock = costs.clock(bench);
    (costs, AdaptiveRing::new(&device, bench.device.clone(), Direction::FromDevice, config, clock).unwrap())
}

/// A copy that is given out must not hide that the original was opened for a moment.
#[test]
fn a_mapping_that_was_refused_half_way_and_not_confirmed_is_no_copy() {
    let bench = Bench::new(small());
    let (_, all) = adaptive(&bench, (1, 1_000_000));
    let device = all.device(DeviceProfile::default()).unwrap();
    let buffer = bench.memory.buffer(2 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, 2 * PAGE)];
    let mapping = map_one(&device, &list, Direction::FromDevice).unwrap();
    assert_eq!(mapping.way(), Way::Direct);
    all.close(mapping.iova(), mapping.len()).unwrap();
    // Somebody else's translation where the second page of the next will be.
    let second = IovaRange::new(Iova::new(mapping.iova().get() + PAGE), PAGE).unwrap();
    let foreign = [(bench.memory.buffer(PAGE).unwrap().phys(), PAGE)];
    let mapper = bench.domain.mapper();
    mapper.open(&bench.platform, second, foreign, Permissions::READ, &mut Gather::new()).unwrap();
    bench.iommu.queue().fail_next(1, TIMEOUT);
    let error = map_one(&device, &list, Direction::FromDevice).unwrap_err();
    assert_eq!(error, BounceMapError::List(MapListError::Unconfirmed { error: TIMEOUT }));
    // Confirmed, it is only a reason to go another way.
    let mapping = map_one(&device, &list, Direction::FromDevice).unwrap();
    all.close(mapping.iova(), mapping.len()).unwrap();
}

#[test]
fn where_mapping_fails_the_attempt_and_the_copy_are_what_it_costs() {
    const REACH: u64 = (4 << 20) - 1;
    let bench = Bench::new(PoolConfig { limit: Iova::new(REACH), ..small() });
    let (_, all) = adaptive(&bench, (1, 1000));
    let device = all.device(DeviceProfile { mask: REACH, ..DeviceProfile::default() }).unwrap();
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let mut live = Vec::new();
    while live.last().is_none_or(|last: &(Way, Iova)| last.0 == Way::Direct) {
        let mapping = map_one(&device, &list, Direction::FromDevice).unwrap();
        live.push((mapping.way(), mapping.iova()));
    }
    let before = row(&all.explain(), PAGE, Direction::FromDevice);
    assert_eq!((before.choice, before.map.unwrap().map_ns), (Choice::Map, 0), "{before:?}");
    assert_eq!(cycle(&bench, &device, 61 * 32), 0, "no address is left");
    let row = row(&all.explain(), PAGE, Direction::FromDevice);
    assert!(row.map.unwrap().map_ns > 500, "{row:?}");
    live.into_iter().for_each(|(_, iova)| all.close(iova, PAGE).unwrap());
    drop((device, all, buffer));
    bench.finish();
}

#[test]
fn what_is_not_made_is_not_counted() {
    let bench = Bench::new(small());
    for prices in [(1, 1000), (1000, 1)] {
        let (_, all) = adaptive(&bench, prices);
        let device = all.device(DeviceProfile::default()).unwrap();
        let list = [piece(portcullis::addr::PhysAddr::new(u64::MAX - 9), 0, 100)];
        for _ in 0..200 {
            map_one(&device, &list, Direction::ToDevice).unwrap_err();
        }
        assert!(all.explain().iter().all(|row| (row.copied, row.mapped) == (0, 0)), "{prices:?}");
    }
    bench.finish();
}

/// A thread that is on another CPU at each call.
#[derive(Default)]
struct Wandering(Chosen, AtomicUsize);

// SAFETY: as for `Chosen`: one thread.
unsafe impl Platform for Wandering {
    fn slots(&self) -> usize {
        self.0.slots()
    }

    fn number(&self) -> PlatformNumber {
        self.0.number()
    }

    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        self.0.be(self.1.fetch_add(1, Ordering::Relaxed) % self.0.slots()).with_slot(f)
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn fence_all(&self) {
        self.0.fence_all();
    }

    fn register(&self, _: std::sync::Weak<dyn PlatformEvents>) {}

    fn wake_at(&self, _: u64) {}
}

/// (A build with overflow checks is what panicked.)
#[test]
fn what_one_cpu_counts_another_may_take_back() {
    let bench = Bench::on(Arc::new(Wandering(Chosen::new(3), AtomicUsize::new(0))), Policy::Strict, small());
    let (_, all) = adaptive(&bench, (1, 1000));
    let device = all.device(DeviceProfile { untrusted: true, ..DeviceProfile::default() }).unwrap();
    let buffer = bench.memory.buffer(PAGE).unwrap();
    for _ in 0..500 {
        let list = [piece(buffer.phys(), 1, PAGE - 1)];
        let mapping = map_one(&device, &list, Direction::FromDevice).unwrap();
        all.close(mapping.iova(), mapping.len()).unwrap();
    }
    let row = row(&all.explain(), PAGE, Direction::FromDevice);
    assert_eq!((row.choice, row.copied, row.mapped), (Choice::Map, 500, 0));
}

#[test]
fn memory_of_the_measurement_is_not_given_back_while_a_lazy_domain_leaves_it_open() {
    let bench = Bench::on(Arc::new(Chosen::new(3)), LAZY, small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    // Where the next pages will be.
    let direct = Attributes { direct: true, ..Attributes::default() };
    let iova = crate::support::map(&bench.device, &list, Direction::Bidirectional, direct).unwrap().iova();
    bench.pool.close(iova, PAGE).unwrap();
    bench.domain.flush().unwrap();
    // The device tries it all the time.
    let (iommu, reached) = (Arc::clone(&bench.iommu), Arc::new(AtomicUsize::new(0)));
    let clock = {
        let reached = Arc::clone(&reached);
        move || {
            let through = |access: &&Permissions| iommu.access(DEVICE, iova, 1, **access).is_ok();
            reached.fetch_add(BOTH.iter().filter(through).count(), Ordering::Relaxed);
            0
        }
    };
    let all = Adaptive::new(Arc::clone(&bench.pool), clock);
    assert!(reached.load(Ordering::Relaxed) > 0, "or the test means nothing");
    assert_eq!(BOTH.map(|access| bench.reaches(iova, access)), [None; 2]);
    drop(all);
}

#[test]
fn a_measurement_that_fails_loses_no_memory() {
    for grants in 0..6 {
        let bench = Bench::new(small());
        let before = bench.memory.frames_in_use();
        bench.tables.grant(grants);
        let (_, all) = adaptive(&bench, (1, 1000));
        let (_, queue) = queue_of(&bench, 64, 8, (1, 1000));
        bench.tables.grant(u64::MAX);
        drop((all, queue));
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
        bench.iommu.queue().fail_next(1, TIMEOUT);
        let (_, all) = adaptive(&bench, (1, 1000));
        drop((all, queue));
        bench.pool.trim(0).unwrap();
        bench.domain.reclaim().unwrap();
        let lost = bench.memory.frames_in_use() - before;
        // What is not confirmed at the second attempt either is leaked.
        assert!(lost == if fails == 1 { 0 } else { 16 }, "{lost} frames after {fails}");
    }
}

/// Neither the measurement's own unmaps are confirmed, nor the flush at its end.
#[test]
fn memory_that_was_measured_with_is_leaked_where_the_hardware_stays_silent() {
    for (fails, leaked) in [(0, 0), (u64::MAX, 16)] {
        let bench = Bench::new(small());
        let before = bench.memory.frames_in_use();
        bench.iommu.queue().fail_next(fails, TIMEOUT);
        let (_, all) = adaptive(&bench, (1, 1000));
        bench.iommu.queue().fail_next(0, TIMEOUT);
        bench.pool.trim(0).unwrap();
        bench.domain.reclaim().unwrap();
        assert_eq!(bench.memory.frames_in_use() - before, leaked);
        drop(all);
    }
}

#[test]
fn buffers_that_others_use_stay_when_costs_are_measured() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let none = Attributes::default();
    let live: Vec<_> = (0..5)
        .map(|_| crate::support::map(&bench.device, &list, Direction::FromDevice, none).unwrap().iova())
        .collect();
    live.into_iter().for_each(|iova| bench.pool.close(iova, PAGE).unwrap());
    assert_eq!(bench.pool.usage().cached_bytes, 5 * PAGE);
    let (_, all) = adaptive(&bench, (1, 1000));
    let (_, queue) = queue_of(&bench, 64, 8, (1, 1000));
    // They are found again without a look at the depots.
    let reused = bench.pool.usage().reused;
    for _ in 0..5 {
        let _ = crate::support::map(&bench.device, &list, Direction::FromDevice, none).unwrap();
    }
    assert_eq!(bench.pool.usage().reused, reused + 5);
    drop((all, queue, buffer));
}

#[test]
fn a_batch_of_one_knows_what_its_waits_cost() {
    let bench = Bench::new(small());
    let (costs, mut queue) = queue_of(&bench, 64, 1, (8, 1000));
    let (buffer, list) = page(&bench);
    assert_eq!(row(&rows(&queue), PAGE, Direction::FromDevice).choice, Choice::Map);
    costs.set(80_000, 1000);
    for _ in 0..61 * 64 {
        let mapping = map(&mut queue, &list).unwrap();
        let _ = queue.unmap(mapping).unwrap();
    }
    let row = row(&rows(&queue), PAGE, Direction::FromDevice);
    assert_eq!((row.choice, row.switches), (Choice::Copy, 1), "{row:?}");
    drop((queue, buffer));
    bench.finish();
}

#[test]
fn batches_that_are_never_full_cost_what_they_do() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue_of(&bench, 64, 8, (800, 300));
    let (buffer, list) = page(&bench);
    // 100 ns for each of a full batch, 800 for one alone.
    for (idles, expected) in [(true, Choice::Copy), (false, Choice::Map), (true, Choice::Copy)] {
        for _ in 0..61 * 64 * 40 {
            let mapping = map(&mut queue, &list).unwrap();
            let _ = queue.unmap(mapping).unwrap();
            if idles {
                queue.commit().unwrap();
            }
        }
        let row = row(&rows(&queue), PAGE, Direction::FromDevice);
        assert_eq!(row.choice, expected, "idles: {idles}: {row:?}");
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
    let kept =
        crate::support::map(&bench.device, &list, Direction::FromDevice, Attributes::default()).unwrap();
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

#[test]
fn another_ring_s_copy_comes_back_untouched() {
    let bench = Bench::new(small());
    let (_, mut first) = queue(&bench, Direction::FromDevice, (1_000_000, 1));
    // Of the same domain, with a pool of its own and fewer sizes.
    let config = PoolConfig { threshold: PAGE, ..small() };
    let pool = BouncePool::new(Arc::clone(&bench.domain), bench.frames.clone(), config).unwrap();
    let other = BounceDevice::new(Arc::clone(&pool), DeviceProfile::default()).unwrap();
    let device = DmaDevice::new(Arc::clone(&bench.domain), u64::MAX);
    let config = StrictRingConfig::new(64, PAGE, 8);
    let mut second = AdaptiveRing::new(&device, other, Direction::FromDevice, config, || 0).unwrap();
    let buffer = bench.memory.buffer(16 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, 16 * PAGE)];
    // Timed ones among them.
    for _ in 0..130 {
        let mapping = map(&mut first, &list).unwrap();
        let iova = mapping.iova();
        let sync = [second.sync_for_cpu(&mapping, 0, 1), second.sync_for_device(&mapping, 0, 1)];
        assert!(sync.iter().all(Result::is_err));
        let failed = second.unmap(mapping).unwrap_err();
        assert!(matches!(failed.error, AdaptiveUnmapError::Pool(_) | AdaptiveUnmapError::Ring(_)));
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
    let device = DmaDevice::new(Arc::clone(&one.domain), u64::MAX);
    let config = StrictRingConfig::new(64, PAGE, 8);
    let refused = AdaptiveRing::new(&device, other.device.clone(), Direction::ToDevice, config, || 0);
    assert!(matches!(refused, Err(RingError::OtherDomain)));
}

#[test]
fn what_neither_the_ring_nor_a_copy_is_for_ends_at_once_in_a_lazy_domain_too() {
    let bench = Bench::on(Arc::new(Chosen::new(3)), LAZY, small());
    let (_, mut queue) = queue_of(&bench, 16, 8, (8, 1000));
    let buffer = bench.memory.buffer(600 * PAGE).unwrap();
    // Persistent; and larger than the ring.
    for (persistent_streaming, pages) in [(true, 1), (false, 600)] {
        let list = [piece(buffer.phys(), 0, pages * PAGE)];
        let attributes = Attributes { persistent_streaming, ..Attributes::default() };
        // SAFETY: the memory is simulated, every access to it atomic.
        let (mapping, _) = unsafe { queue.map(&list, attributes, &mut [DmaSegment::default()]) }.unwrap();
        let iova = mapping.iova();
        assert_eq!(mapping.way(), Some(Way::Direct));
        assert!(bench.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok());
        assert_eq!(queue.unmap(mapping).unwrap(), AdaptiveUnmap::Done);
        assert!(!reaches(&bench, iova, &buffer), "{pages} pages");
    }
    drop((queue, buffer));
}
