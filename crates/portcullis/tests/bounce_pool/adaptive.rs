//! Copying or mapping by cost: what is chosen, when it changes, and that data and protection are the same either way.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, Permissions};
use portcullis::bounce::adaptive::{Adaptive, AdaptiveDevice, Choice};
use portcullis::bounce::pool::{Attributes, BounceMapError, DeviceProfile, PoolConfig, PoolMapping, Way};
use portcullis::domain::{PhysSegment, Policy};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::DeviceId;
use portcullis_model::open::OpenAdaptive;

use crate::chosen::Chosen;
use crate::costs::{Clock, Costs, row};
use crate::support::{Bench, DEVICE, Mapper, PAGE, Rationed, TIMEOUT, piece, small, without_timer};

pub type Device<P> = AdaptiveDevice<Mapper, P, Rationed, Clock>;

pub fn adaptive<P: Platform + Clone + Send + 'static>(
    bench: &Bench<P>,
    (wait_ns, copy_ns): (u64, u64),
) -> (Costs, Arc<Adaptive<Mapper, P, Rationed, Clock>>) {
    let costs = Costs::new(wait_ns, copy_ns);
    let all = Adaptive::new(Arc::clone(&bench.pool), costs.clock(bench));
    (costs, all)
}

/// Maps memory of the bench's, which only its devices and this thread use.
pub fn map<'a, P: Platform>(
    device: &Device<P>,
    list: &'a [PhysSegment],
    direction: Direction,
) -> Result<PoolMapping<'a>, BounceMapError> {
    // SAFETY: the memory is simulated, every access to it atomic, and any address allowed.
    unsafe { device.map(list, direction, Attributes::default()) }
}

/// Maps and unmaps a page `times` times. How many were mapped directly.
pub fn cycle(bench: &Bench, device: &Device<Arc<Chosen>>, times: u64) -> u64 {
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let once = |_: &u64| {
        let mapping = map(device, &list, Direction::FromDevice).unwrap();
        device.adaptive().close(mapping.iova(), mapping.len()).unwrap();
        mapping.way() == Way::Direct
    };
    (0..times).filter(once).count() as u64
}

#[test]
fn it_begins_with_what_is_cheaper_on_this_hardware() {
    for (prices, expected) in [((1000, 100), Choice::Copy), ((100, 1000), Choice::Map)] {
        let bench = Bench::new(small());
        let (_, all) = adaptive(&bench, prices);
        let rows = all.explain();
        assert_eq!(rows.len(), 8 * 3, "512 bytes to 64 KiB");
        for row in &rows {
            assert_eq!((row.choice, row.copied, row.mapped, row.switches), (expected, 0, 0, 0), "{row:?}");
            let (copy, map) = (row.copy.unwrap(), row.map.unwrap());
            // A mean in sixteenths may end a little below.
            assert!((prices.1 - 1..=prices.1).contains(&copy.map_ns) && copy.unmap_ns == 0, "{copy:?}");
            assert!((prices.0 - 1..=prices.0).contains(&map.unmap_ns) && map.map_ns == 0, "{map:?}");
        }
        // The measurement leaves nothing behind.
        assert_eq!(bench.pool.usage().buffer_bytes, 0);
        let device = all.device(DeviceProfile::default()).unwrap();
        let direct = cycle(&bench, &device, 30);
        assert_eq!(direct, if expected == Choice::Map { 30 } else { 0 });
        drop((device, all));
        bench.finish();
    }
}

#[test]
fn it_follows_costs_that_change_and_counts_what_went_which_way() {
    let bench = Bench::new(small());
    let (costs, all) = adaptive(&bench, (1000, 100));
    let device = all.device(DeviceProfile { untrusted: true, ..DeviceProfile::default() }).unwrap();
    let phases = [((1000, 100), Choice::Copy), ((10, 100), Choice::Map), ((1000, 100), Choice::Copy)];
    let mut direct = 0;
    let mut made = 0;
    for (phase, (prices, expected)) in phases.into_iter().enumerate() {
        costs.set(prices.0, prices.1);
        // One in 61 is timed, one in 64 of those goes the other way, and a mean forgets in some dozens.
        for _ in 0..40 {
            direct += cycle(&bench, &device, 61 * 64);
            made += 61 * 64;
            let row = row(&all.explain(), PAGE, Direction::FromDevice);
            if row.choice == expected && row.switches == phase as u64 {
                break;
            }
        }
        let row = row(&all.explain(), PAGE, Direction::FromDevice);
        assert_eq!((row.choice, row.switches), (expected, phase as u64), "{row:?}");
        assert_eq!((row.copied, row.mapped), (made - direct, direct));
        // And keeps to it, but for the probes.
        let before = direct;
        direct += cycle(&bench, &device, 10 * 61 * 64);
        made += 10 * 61 * 64;
        let others = if expected == Choice::Map { 10 * 61 * 64 - (direct - before) } else { direct - before };
        assert_eq!(others, 10, "phase {phase}");
    }
    drop((device, all));
    bench.finish();
}

#[test]
fn an_untrusted_device_gets_whole_granules_or_a_copy_whatever_it_costs() {
    let bench = Bench::new(small());
    let (_, all) = adaptive(&bench, (1, 1_000_000));
    let untrusted = all.device(DeviceProfile { untrusted: true, ..DeviceProfile::default() }).unwrap();
    let trusted = all.device(DeviceProfile::default()).unwrap();
    let buffer = bench.memory.buffer(4 * PAGE).unwrap();
    let mut part_copied = 0;
    for (offset, len) in [(0, PAGE), (1, PAGE), (0, PAGE - 1), (PAGE, 3 * PAGE), (5, 2 * PAGE)] {
        let list = [piece(buffer.phys(), offset, len)];
        let whole = offset % PAGE == 0 && len % PAGE == 0;
        for _ in 0..200 {
            let mapping = map(&untrusted, &list, Direction::Bidirectional).unwrap();
            assert_eq!(mapping.way(), if whole { Way::Direct } else { Way::Slot });
            part_copied += u64::from(!whole);
            all.close(mapping.iova(), mapping.len()).unwrap();
        }
        let mapping = map(&trusted, &list, Direction::ToDevice).unwrap();
        assert_eq!(mapping.way(), Way::Direct);
        all.close(mapping.iova(), mapping.len()).unwrap();
    }
    let copied: u64 = all.explain().iter().map(|row| row.copied).sum();
    let mapped: u64 = all.explain().iter().map(|row| row.mapped).sum();
    assert_eq!(copied + mapped, 5 * 200 + 5);
    assert_eq!(copied, part_copied);
    drop((untrusted, trusted, all, buffer));
    bench.finish();
}

#[test]
fn data_arrives_either_way_and_nothing_is_reached_afterwards() {
    let bench = Bench::new(small());
    // So near each other that probes and changes happen all the time.
    let (costs, all) = adaptive(&bench, (100, 100));
    let device = all.device(DeviceProfile { untrusted: true, ..DeviceProfile::default() }).unwrap();
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let mut ways = [0_u64; 2];
    for round in 0..20_000_u64 {
        costs.set(100 + (round >> 11 & 1) * 2000, 100 + (round >> 12 & 1) * 4000);
        // Whole pages mostly, up to beyond the threshold.
        let len = if round % 4 == 0 { 1 + round * 977 % (30 * PAGE) } else { PAGE * (1 + round % 20) };
        let direction = Direction::ALL[(round % 3) as usize];
        let bytes = vec![(round % 251) as u8 + 1; len as usize];
        bench.write(buffer.phys(), &bytes);
        let list = [piece(buffer.phys(), 0, len)];
        let mapping = map(&device, &list, direction).unwrap();
        ways[usize::from(mapping.way() == Way::Direct)] += 1;
        let iova = mapping.iova();
        if direction != Direction::FromDevice {
            assert_eq!(bench.seen(iova, len).as_deref(), Some(&bytes[..]), "round {round}");
        }
        if direction != Direction::ToDevice {
            bench.iommu.dma_write(DEVICE, iova, &vec![255; len as usize]).unwrap();
        }
        all.close(iova, mapping.len()).unwrap();
        let left = if direction == Direction::ToDevice { bytes } else { vec![255; len as usize] };
        assert_eq!(bench.bytes(buffer.phys(), len), left, "round {round}");
        if let Some(phys) = bench.reaches(iova, Permissions::READ).or(bench.reaches(iova, Permissions::WRITE))
        {
            let original = buffer.phys().get()..buffer.phys().get() + 40 * PAGE;
            assert!(!original.contains(&phys.get()), "round {round}: the original is still reached");
        }
    }
    assert!(ways[0] > 1000 && ways[1] > 1000, "{ways:?}");
    assert!(all.explain().iter().any(|row| row.switches > 0));
    drop((device, all, buffer));
    bench.finish();
}

#[test]
fn where_mapping_fails_it_copies() {
    const REACH: u64 = (4 << 20) - 1;
    let bench = Bench::new(PoolConfig { limit: Iova::new(REACH), ..small() });
    let (_, all) = adaptive(&bench, (1, 1_000_000));
    let device = all.device(DeviceProfile { mask: REACH, ..DeviceProfile::default() }).unwrap();
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    // Until addresses are used up, and slots.
    let mut live = Vec::new();
    let error = loop {
        match map(&device, &list, Direction::ToDevice) {
            Ok(mapping) => live.push(mapping),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, BounceMapError::List(_)), "{error}");
    let first_copied = live.iter().rposition(|mapping| mapping.way() == Way::Direct).unwrap() + 1;
    assert!(live[..first_copied].len() > 400, "{first_copied}");
    assert!(live[first_copied..].len() >= 60, "no address was left, but slots were: {}", live.len());
    live.iter().for_each(|mapping| all.close(mapping.iova(), mapping.len()).unwrap());
    drop((device, all, buffer));
    bench.finish();
}

#[test]
fn a_mapper_that_fails_while_it_measures_leaves_everything_copied() {
    let bench = Bench::new(small());
    bench.iommu.queue().fail_next(1, TIMEOUT);
    let (_, all) = adaptive(&bench, (1, 1_000_000));
    let rows = all.explain();
    assert!(rows.iter().all(|row| row.choice == Choice::Copy && row.map.is_none()), "{rows:?}");
    let device = all.device(DeviceProfile::default()).unwrap();
    // It finds out what mapping costs while it runs.
    cycle(&bench, &device, 61 * 64);
    let row = row(&all.explain(), PAGE, Direction::FromDevice);
    assert_eq!((row.choice, row.switches), (Choice::Map, 1), "{row:?}");
}

#[test]
fn wrong_addresses_and_second_unmaps_are_errors() {
    let bench = Bench::new(small());
    let (_, all) = adaptive(&bench, (1000, 100));
    let device = all.device(DeviceProfile::default()).unwrap();
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    // Timed ones among them.
    for _ in 0..200 {
        let mapping = map(&device, &list, Direction::FromDevice).unwrap();
        let (iova, len) = (mapping.iova(), mapping.len());
        all.close(iova, len - 1).unwrap_err();
        all.close(Iova::new(iova.get() + 1), len).unwrap_err();
        all.close(iova, len).unwrap();
        all.close(iova, len).unwrap_err();
    }
    map(&device, &[], Direction::ToDevice).unwrap_err();
    map(&device, &[piece(buffer.phys(), 0, 0)], Direction::ToDevice).unwrap_err();
    let endless = [piece(buffer.phys(), 0, u64::MAX), piece(buffer.phys(), 0, 2)];
    map(&device, &endless, Direction::ToDevice).unwrap_err();
    for iova in [0, 1, PAGE, u64::MAX] {
        for len in [0, 1, PAGE, u64::MAX] {
            all.close(Iova::new(iova), len).unwrap_err();
        }
    }
    drop((device, all, buffer));
    bench.finish();
}

#[test]
fn threads_share_what_is_measured() {
    let bench = Bench::on(StdPlatform::with_slots(3), Policy::Strict, without_timer(small()));
    let (costs, all) = adaptive(&bench, (100, 100));
    std::thread::scope(|scope| {
        let threads = (0..4_u32).map(|n| {
            let (bench, all, costs) = (&bench, &all, &costs);
            scope.spawn(move || {
                let device =
                    all.device(DeviceProfile { untrusted: n % 2 == 0, ..DeviceProfile::default() }).unwrap();
                for round in 0..3000_u64 {
                    costs.set(100 + (round >> 9 & 1) * 2000, 100 + (round >> 10 & 1) * 4000);
                    let len = PAGE * (1 + round % 3);
                    let buffer = bench.memory.buffer(len).unwrap();
                    let list = [piece(buffer.phys(), 0, len)];
                    let mapping = map(&device, &list, Direction::FromDevice).unwrap();
                    let bytes = vec![(round % 255) as u8 + 1; len as usize];
                    bench.iommu.dma_write(DeviceId(n), mapping.iova(), &bytes).unwrap();
                    all.close(mapping.iova(), mapping.len()).unwrap();
                    assert_eq!(bench.bytes(buffer.phys(), len), bytes);
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        // A scope does not wait for what a thread does as it goes: it gives its slot back, to the pool too.
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    let counted: u64 = all.explain().iter().map(|row| row.copied + row.mapped).sum();
    // Two of the threads share a slot and may lose each other's counts.
    assert!((6000..=12_000).contains(&counted), "{counted}");
    drop(all);
    bench.finish();
}
