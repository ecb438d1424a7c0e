//! Buffers that come a large page at a time: filled, given back as they came, kept apart, and done without.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, IovaRange, Permissions};
use portcullis::bounce::pool::{Attributes, BounceMapError, PoolConfig, Way};
use portcullis::domain::{MapListError, Policy};
use portcullis::invalidation::Gather;
use portcullis::pgtable::MapError;
use portcullis::platform::PlatformEvents;
use portcullis_model::Buffer;
use portcullis_model::open::{OpenMapper, OpenPool};

use crate::support::{Bench, DEVICE, PAGE, TIMEOUT, Ticking, large, map, piece};

const RUN: u64 = 2 << 20;
/// The largest slots, and how many a run has.
const SLOT: u64 = 16 * PAGE;
const SLOTS: usize = (RUN / SLOT) as usize;

/// A bench, and a driver's buffer.
fn bench(config: PoolConfig) -> (Bench, Buffer) {
    let bench = Bench::new(config);
    let buffer = bench.memory.buffer(SLOT).unwrap();
    (bench, buffer)
}

fn try_open(bench: &Bench, buffer: &Buffer, direction: Direction) -> Result<Iova, BounceMapError> {
    let list = [piece(buffer.phys(), 0, SLOT)];
    let mapping = map(&bench.device, &list, direction, Attributes::default())?;
    assert_eq!(mapping.way(), Way::Slot);
    Ok(mapping.iova())
}

/// Maps the buffer so many times.
fn open(bench: &Bench, buffer: &Buffer, direction: Direction, count: usize) -> Vec<Iova> {
    (0..count).map(|_| try_open(bench, buffer, direction).unwrap()).collect()
}

fn close(bench: &Bench, live: &[Iova]) {
    live.iter().for_each(|iova| bench.pool.close(*iova, SLOT).unwrap());
}

/// Bytes in buffers, in large pages, and waiting.
fn held(bench: &Bench) -> [u64; 3] {
    let usage = bench.pool.usage();
    [usage.buffer_bytes, usage.large_bytes, usage.cached_bytes]
}

fn run_of(iova: Iova) -> u64 {
    iova.get() / RUN
}

#[test]
fn one_entry_maps_all_slots_of_a_run_and_each_has_bytes_of_its_own() {
    let (bench, buffer) = bench(large());
    let live = open(&bench, &buffer, Direction::FromDevice, 2 * SLOTS);
    assert_eq!(held(&bench), [2 * RUN, 2 * RUN, 0]);
    let before = bench.iommu.stats();
    for (n, iova) in live.iter().enumerate() {
        bench.iommu.dma_write(DEVICE, *iova, &vec![n as u8 + 1; SLOT as usize]).unwrap();
    }
    let after = bench.iommu.stats();
    assert_eq!(after.accesses - before.accesses, 2 * RUN / PAGE);
    assert_eq!(after.iotlb_misses - before.iotlb_misses, 2, "one for each large page");
    for (n, iova) in live.iter().enumerate() {
        bench.pool.close(*iova, SLOT).unwrap();
        assert_eq!(bench.bytes(buffer.phys(), SLOT), vec![n as u8 + 1; SLOT as usize]);
    }
    assert_eq!(held(&bench), [2 * RUN, 2 * RUN, 2 * RUN]);
    drop(buffer);
    bench.finish();
}

#[test]
fn a_run_goes_when_all_of_it_waits_and_not_before() {
    for direction in Direction::ALL {
        let (bench, buffer) = bench(large());
        // Those of the second run but one, in the first as in the last place.
        for stays in [SLOTS, 2 * SLOTS - 1] {
            let mut live = open(&bench, &buffer, direction, 2 * SLOTS);
            live.sort();
            let last = live.remove(stays);
            close(&bench, &live);
            let frames = bench.memory.frames_in_use();
            assert_eq!(bench.pool.trim(0), Ok(RUN));
            assert_eq!(held(&bench), [RUN, RUN, RUN - SLOT]);
            assert_eq!(bench.memory.frames_in_use(), frames - RUN / PAGE);
            assert!(live[..SLOTS].iter().all(|iova| bench.reaches(*iova, direction.permissions()).is_none()));
            assert!(bench.reaches(last, direction.permissions()).is_some());
            // What was spared is there to be used.
            let reused = bench.pool.usage().reused;
            let again = open(&bench, &buffer, direction, SLOTS - 1);
            assert_eq!(bench.pool.usage().reused, reused + SLOTS as u64 - 1);
            assert!(again.iter().all(|iova| run_of(*iova) == run_of(last)));
            close(&bench, &again);
            close(&bench, &[last]);
            assert_eq!(bench.pool.trim(1), Ok(RUN), "no less than what came together");
            assert_eq!(held(&bench), [0; 3]);
        }
        drop(buffer);
        bench.finish();
    }
}

#[test]
fn runs_begin_where_there_is_use_for_them() {
    let (bench, buffer) = bench(PoolConfig { large_from: 4 * SLOT, ..large() });
    let few = open(&bench, &buffer, Direction::ToDevice, 4);
    assert_eq!(held(&bench), [4 * SLOT, 0, 0]);
    let more = open(&bench, &buffer, Direction::ToDevice, 1);
    assert_eq!(held(&bench), [4 * SLOT + RUN, RUN, RUN - SLOT]);
    // The rest of the addresses, of which the run in the middle is broken up; and none is left.
    let rest = open(&bench, &buffer, Direction::ToDevice, 2 * SLOTS - 5);
    assert_eq!(held(&bench), [2 * RUN, RUN, 0]);
    [few, more, rest].iter().for_each(|live| close(&bench, live));
    assert_eq!(bench.pool.trim(0), Ok(2 * RUN));
    drop(buffer);
    bench.finish();
}

#[test]
fn without_memory_in_one_piece_each_slot_has_its_own() {
    let (bench, buffer) = bench(large());
    bench.frames.break_up(SLOT / PAGE);
    let few = open(&bench, &buffer, Direction::FromDevice, 3);
    assert_eq!(held(&bench), [3 * SLOT, 0, 0]);
    bench.frames.break_up(u64::MAX);
    let more = open(&bench, &buffer, Direction::FromDevice, 3);
    assert_eq!(held(&bench), [3 * SLOT + RUN, RUN, RUN - 3 * SLOT]);
    [few, more].iter().for_each(|live| close(&bench, live));
    // One invalidation for all, whatever they came as.
    let waits = bench.iommu.stats().waits;
    assert_eq!(bench.pool.trim(0), Ok(3 * SLOT + RUN));
    assert_eq!(bench.iommu.stats().waits, waits + 1);
    drop(buffer);
    bench.finish();
}

#[test]
fn memory_that_runs_out_anywhere_is_an_error_and_nothing_is_lost() {
    let (mut refused, mut done) = (0, 0);
    for grants in 0..8 {
        for tables in [true, false] {
            let (bench, buffer) = bench(large());
            if tables {
                bench.tables.grant(grants)
            } else {
                bench.frames.grant(grants)
            }
            for direction in Direction::ALL {
                match try_open(&bench, &buffer, direction) {
                    Ok(iova) => {
                        done += 1;
                        close(&bench, &[iova]);
                    }
                    Err(_) => refused += 1,
                }
            }
            bench.tables.grant(u64::MAX);
            drop(buffer);
            bench.finish();
        }
    }
    assert!(refused > 0 && done > 0, "or nothing was short");
}

#[test]
fn a_trim_that_is_not_confirmed_keeps_the_run_until_one_is() {
    let (bench, buffer) = bench(large());
    let live = open(&bench, &buffer, Direction::FromDevice, SLOTS);
    live.iter().for_each(|iova| bench.iommu.dma_write(DEVICE, *iova, &[1]).unwrap());
    close(&bench, &live);
    let frames = bench.memory.frames_in_use();
    bench.iommu.queue().fail_next(2, TIMEOUT);
    for _ in 0..2 {
        assert_eq!(bench.pool.trim(0), Err(TIMEOUT));
        assert_eq!((held(&bench), bench.pool.usage().unconfirmed_bytes), ([RUN, RUN, 0], RUN));
        assert!(live.iter().all(|iova| bench.reaches(*iova, Permissions::WRITE).is_some()), "still cached");
        assert_eq!(bench.memory.frames_in_use(), frames, "given back while reachable");
    }
    // Others get another run meanwhile.
    let other = try_open(&bench, &buffer, Direction::FromDevice).unwrap();
    assert_ne!(run_of(other), run_of(live[0]));
    assert_eq!(bench.pool.trim(0), Ok(RUN));
    assert!(live.iter().all(|iova| bench.reaches(*iova, Permissions::WRITE).is_none()));
    // Its addresses are a run's again.
    let again = open(&bench, &buffer, Direction::FromDevice, 2 * SLOTS - 1);
    assert_eq!(held(&bench), [2 * RUN, 2 * RUN, 0]);
    close(&bench, &again);
    close(&bench, &[other]);
    drop(buffer);
    bench.finish();
}

#[test]
fn a_run_is_open_for_one_permission_only() {
    let (bench, buffer) = bench(large());
    for direction in [Direction::ToDevice, Direction::FromDevice] {
        let live = try_open(&bench, &buffer, direction).unwrap();
        let other = if direction == Direction::ToDevice { Permissions::WRITE } else { Permissions::READ };
        let start = run_of(live) * RUN;
        for at in (start..start + RUN).step_by(PAGE as usize) {
            assert!(bench.reaches(Iova::new(at), direction.permissions()).is_some());
            assert!(bench.reaches(Iova::new(at), other).is_none(), "opened for the other direction");
        }
        close(&bench, &[live]);
    }
    assert_eq!(held(&bench), [2 * RUN; 3], "one for each");
    // The class is full, and the third direction has none: one of the two goes, as a whole.
    let live = open(&bench, &buffer, Direction::Bidirectional, SLOTS);
    assert!(live.iter().all(|iova| run_of(*iova) == run_of(live[0])));
    assert!(live.iter().all(|iova| bench.reaches(*iova, Direction::Bidirectional.permissions()).is_some()));
    close(&bench, &live);
    drop(buffer);
    bench.finish();
}

#[test]
fn a_slot_that_waits_holds_no_bytes_of_another_group() {
    let (bench, buffer) = bench(large());
    let live = try_open(&bench, &buffer, Direction::FromDevice).unwrap();
    bench.iommu.dma_write(DEVICE, live, &vec![9; SLOT as usize]).unwrap();
    close(&bench, &[live]);
    let other = bench.device(1, true);
    let list = [piece(buffer.phys(), 0, SLOT)];
    for _ in 0..2 {
        let mapping = map(&other, &list, Direction::FromDevice, Attributes::default()).unwrap();
        bench.pool.close(mapping.iova(), SLOT).unwrap();
        assert_eq!(bench.bytes(buffer.phys(), SLOT), vec![0; SLOT as usize]);
    }
    drop((other, buffer));
    bench.finish();
}

/// Enters somebody else's page, the last of the run at the end of the class.
fn occupy(bench: &Bench, buffer: &Buffer, class_end: u64) -> IovaRange {
    let range = IovaRange::new(Iova::new(class_end - PAGE), PAGE).unwrap();
    let pages = [(buffer.phys(), PAGE)];
    bench.domain.mapper().open(&bench.platform, range, pages, Permissions::READ, &mut Gather::new()).unwrap();
    range
}

#[test]
fn somebody_else_s_mapping_in_a_run_costs_one_slot() {
    // What was entered before it is removed again: confirmed, or not.
    for silent in [false, true] {
        let (bench, buffer) = bench(PoolConfig { large_from: SLOT, ..large() });
        let first = try_open(&bench, &buffer, Direction::ToDevice).unwrap();
        let range = occupy(&bench, &buffer, (run_of(first) + 2) * RUN);
        bench.iommu.queue().fail_next(u64::from(silent), TIMEOUT);
        let mut live = vec![first];
        let mut errors = Vec::new();
        for _ in 0..2 * SLOTS {
            match map(
                &bench.device,
                &[piece(buffer.phys(), 0, SLOT)],
                Direction::ToDevice,
                Attributes::default(),
            ) {
                Ok(mapping) if mapping.way() == Way::Slot => live.push(mapping.iova()),
                Ok(mapping) => bench.pool.close(mapping.iova(), SLOT).unwrap(),
                Err(error) => errors.push(error),
            }
        }
        assert_eq!(bench.reaches(range.start(), Permissions::READ), Some(buffer.phys()), "left alone");
        let usage = bench.pool.usage();
        let lost = if silent { SLOTS } else { 1 };
        assert_eq!((usage.lost_slots, live.len()), (lost as u64, 2 * SLOTS - lost));
        let error = match silent {
            true => MapListError::Unconfirmed { error: TIMEOUT },
            false => MapListError::Map(MapError::AlreadyMapped { at: range.start() }),
        };
        assert_eq!(errors, [BounceMapError::List(error)]);
        assert_eq!(usage.unconfirmed_bytes, if silent { RUN } else { 0 });
        close(&bench, &live);
        assert_eq!(bench.pool.trim(0), Ok(live.len() as u64 * SLOT + usage.unconfirmed_bytes));
        assert_eq!(held(&bench), [0; 3]);
        let Bench { pool, device, domain, memory, .. } = bench;
        drop((pool, device, buffer));
        assert_eq!(domain.stats().lost_iova_bytes, usage.iova_bytes);
        assert_eq!((memory.bad_frees(), memory.stray_tables()), (0, 0));
    }
}

#[test]
fn a_pool_that_ends_gives_its_runs_back_unless_they_may_still_be_reached() {
    for (silent, early) in [(0, 0), (0, 1), (1, 0), (2, 1)] {
        let (bench, buffer) = bench(large());
        let live = open(&bench, &buffer, Direction::FromDevice, SLOTS + 1);
        live.iter().for_each(|iova| bench.iommu.dma_write(DEVICE, *iova, &[1]).unwrap());
        let reached: Vec<_> =
            live.iter().map(|iova| bench.reaches(*iova, Permissions::WRITE).unwrap()).collect();
        // One run is not confirmed before the end, and one slot of the other is in use.
        close(&bench, &live[..SLOTS]);
        bench.iommu.queue().fail_next(silent.max(early), TIMEOUT);
        if early > 0 {
            assert_eq!(bench.pool.trim(0), Err(TIMEOUT));
        }
        let (usage, before) = (bench.pool.usage(), bench.frames_before);
        let Bench { pool, device, domain, iommu, memory, .. } = bench;
        drop((pool, device, buffer));
        if silent == 0 {
            assert!(
                live.iter().all(|iova| iommu.probe(DEVICE, *iova, Permissions::WRITE).is_none()),
                "cached"
            );
            domain.reclaim().unwrap();
            assert_eq!((memory.frames_in_use(), domain.stats().lost_iova_bytes), (before, 0));
        } else {
            assert_eq!(domain.stats().lost_iova_bytes, usage.iova_bytes);
            assert!(reached.iter().all(|phys| memory.is_allocated(*phys)), "freed while reachable");
        }
        assert_eq!(
            (memory.bad_frees(), memory.stray_tables(), iommu.stats().walks_into_freed_frames),
            (0, 0, 0)
        );
    }
}

#[test]
fn the_timer_gives_back_the_runs_that_light_use_does_not_touch() {
    const IDLE: u64 = 1_000_000_000;
    let bench = Bench::on(Arc::new(Ticking::new(1)), Policy::Strict, large());
    let buffer = bench.memory.buffer(SLOT).unwrap();
    let list = [piece(buffer.phys(), 0, SLOT)];
    let burst = |count| {
        let mapped = || map(&bench.device, &list, Direction::ToDevice, Attributes::default()).unwrap();
        let live: Vec<_> = (0..count).map(|_| mapped().iova()).collect();
        // In any order: the last freed is the first used.
        live.iter().rev().for_each(|iova| bench.pool.close(*iova, SLOT).unwrap());
    };
    let tick = || {
        bench.platform.advance(IDLE);
        bench.pool.timer();
        bench.pool.usage().buffer_bytes
    };
    burst(2 * SLOTS);
    assert_eq!(tick(), 2 * RUN, "used since");
    for _ in 0..3 {
        burst(SLOTS + 8);
        assert_eq!(tick(), 2 * RUN, "unwanted were fewer than a run");
    }
    burst(1);
    assert_eq!(tick(), RUN);
    // What waits in a run that is used stays with it, again and again.
    for _ in 0..3 {
        burst(1);
        assert_eq!(tick(), RUN);
    }
    assert_eq!(tick(), 0);
    drop(buffer);
    bench.finish();
}
