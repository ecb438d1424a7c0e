//! Devices that come and go, also while others map and unmap.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::domain::Policy;
use portcullis::invalidation::{Gather, Invalidation, InvalidationError, MOST_DEVICE_TLBS, Request};
use portcullis::mapper::Mapper as _;
use portcullis_model::open::{OpenMapper, OpenTlbs};

use crate::device_tlb::machine::{DEVICE, Machine, OTHER, PAGE, SILENT, TLB, page};
use crate::rig::Mapper;

const FAILED: InvalidationError = InvalidationError::Rejected { code: 5 };

fn memory(number: u64) -> (PhysAddr, u64) {
    (page(number).phys, PAGE)
}

/// An unmap is between its look at the set and the hardware when the device comes: the IOTLB holds then what the
/// tables no longer do.
#[test]
fn a_device_that_comes_in_the_midst_of_an_unmap_gets_nothing() {
    let machine = Machine::new();
    let (mapper, context) = machine.mapper(1, Arc::clone(&machine.hostile) as _);
    let mapper = Arc::new(mapper);
    machine.iommu.attach(OTHER, context);
    let range = IovaRange::new(Iova::new(PAGE), PAGE).unwrap();
    let mut gather = Gather::new();
    mapper.open(&machine.platform, range, [memory(0)], Permissions::READ_WRITE, &mut gather).unwrap();
    assert!(machine.reaches(OTHER, range.start()), "it is in the IOTLB");
    assert_eq!(mapper.unmap(&machine.platform, range, &mut gather).bytes, PAGE);
    let reached = Arc::new(AtomicBool::new(true));
    let (coming, iommu, found) = (Arc::clone(&mapper), Arc::clone(&machine.iommu), Arc::clone(&reached));
    machine.hostile.before_next(move || {
        coming.add_device_tlb(DEVICE).unwrap();
        iommu.attach_with_tlb(DEVICE, context, TLB);
        found.store(iommu.access(DEVICE, range.start(), 1, Permissions::WRITE).is_ok(), Ordering::Relaxed);
    });
    mapper.sync(&gather).unwrap();
    assert!(!reached.load(Ordering::Relaxed));
    assert!(!machine.reaches(DEVICE, range.start()));
}

#[test]
fn a_device_that_cannot_be_added_is_not_asked() {
    let machine = Machine::new();
    let side = machine.side(1, Policy::Strict);
    let mapper = side.domain.mapper();
    machine.iommu.queue().fail_next(1, FAILED);
    assert_eq!(mapper.add_device_tlb(DEVICE), Err(FAILED));
    side.domain.unmap(side.map(0)).unwrap();
    assert_eq!(machine.told(), 0);
    let devices = (0..MOST_DEVICE_TLBS as u32).map(DeviceId);
    devices.clone().for_each(|device| mapper.add_device_tlb(device).unwrap());
    let full = mapper.add_device_tlb(DeviceId(u32::MAX)).unwrap_err();
    assert_eq!(full, InvalidationError::TooManyDevices { limit: MOST_DEVICE_TLBS });
    assert!(full.to_string().contains("16"), "{full}");
    // One that is there already is there once.
    devices.for_each(|device| mapper.add_device_tlb(device).unwrap());
    side.domain.flush().unwrap();
    assert_eq!(machine.told(), MOST_DEVICE_TLBS as u64);
    mapper.remove_tlb(DeviceId(3)).unwrap();
    mapper.add_device_tlb(DeviceId(u32::MAX)).unwrap();
}

#[test]
fn many_devices_and_ranges_take_several_submissions_the_iotlb_first() {
    let machine = Machine::new();
    let side = machine.side(1, Policy::Strict);
    let devices: Vec<_> = (0..MOST_DEVICE_TLBS as u32).map(DeviceId).collect();
    devices.iter().for_each(|device| side.domain.mapper().add_device_tlb(*device).unwrap());
    machine.hostile.log();
    let mut gather = Gather::new();
    let ranges: Vec<_> = (1..9).map(|n| IovaRange::new(Iova::new(n * 1000 * PAGE), PAGE).unwrap()).collect();
    ranges.iter().for_each(|range| gather.add(*range));
    side.domain.mapper().sync(&gather).unwrap();
    let log = machine.hostile.log();
    assert_eq!(log.iter().map(Vec::len).collect::<Vec<_>>(), [20, 20, 20, 20, 20, 20, 16]);
    let of_iotlb = ranges.iter().map(|range| Invalidation::Range { range: *range, leaf_only: true });
    let of_devices = devices.iter().flat_map(|device| {
        let of_device = |range: &IovaRange| Invalidation::DeviceTlb { device: *device, range: Some(*range) };
        ranges.iter().map(of_device)
    });
    let expected: Vec<_> = of_iotlb.chain(of_devices).collect();
    let one = |request: &Request| {
        assert_eq!(request.domain, DomainId(1));
        request.invalidation
    };
    assert_eq!(log.iter().flatten().map(one).collect::<Vec<_>>(), expected);
    // The first of them fails: so does all of it.
    let broken = InvalidationError::Rejected { code: 9 };
    machine.iommu.queue().fail_next(1, broken);
    assert_eq!(side.domain.mapper().sync(&gather), Err(broken));
}

#[test]
fn a_device_goes_when_it_has_forgotten_everything_or_can_reach_nothing() {
    let machine = Machine::new();
    let side = machine.caching(Policy::Strict);
    let mapper = side.domain.mapper();
    mapper.remove_tlb(OTHER).unwrap();
    assert_eq!(machine.told(), 0, "it was never there");
    machine.iommu.set_silent(DEVICE, true);
    assert_eq!(mapper.remove_tlb(DEVICE), Err(SILENT));
    let range = side.map(0);
    assert!(side.domain.unmap(range).is_err(), "it is asked still");
    machine.iommu.set_silent(DEVICE, false);
    let range = side.map(1);
    let access = || machine.iommu.access(DEVICE, range.start(), 1, Permissions::WRITE).unwrap();
    (0..2).for_each(|_| access());
    assert_eq!(machine.iommu.stats().device_tlb_hits, 1);
    mapper.remove_tlb(DEVICE).unwrap();
    access();
    assert_eq!(machine.iommu.stats().device_tlb_hits, 1, "it had to ask again");
    // One that never answers.
    mapper.add_device_tlb(DEVICE).unwrap();
    machine.iommu.set_silent(DEVICE, true);
    assert_eq!(side.domain.flush(), Err(SILENT));
    machine.iommu.detach(DEVICE);
    mapper.forget_tlb(DEVICE);
    side.domain.flush().unwrap();
    side.domain.unmap(range).unwrap();
    assert_eq!(side.domain.stats().lost_iova_bytes, 0);
}

/// The first call waits for the hardware when others come for the same device.
#[test]
fn a_device_that_is_just_being_added_is_neither_there_yet_nor_taken_out() {
    let machine = Machine::new();
    let (mapper, _) = machine.mapper(1, Arc::clone(&machine.hostile) as _);
    let mapper = Arc::new(mapper);
    let asked = || {
        let told = machine.told();
        mapper.sync(&Gather::everything()).unwrap();
        machine.told() - told
    };
    let beside = |mapper: &Mapper| {
        assert_eq!(mapper.add_device_tlb(DEVICE), Err(InvalidationError::BeingAdded), "it may not fetch yet");
        mapper.remove_tlb(DEVICE).unwrap();
        mapper.forget_tlb(DEVICE);
        // Nor does another have to wait for it.
        mapper.add_device_tlb(OTHER).unwrap();
    };
    let met = Arc::new(AtomicBool::new(false));
    let (other, done) = (Arc::clone(&mapper), Arc::clone(&met));
    machine.hostile.before_next(move || {
        beside(&other);
        done.store(true, Ordering::Relaxed);
    });
    mapper.add_device_tlb(DEVICE).unwrap();
    assert!(met.load(Ordering::Relaxed));
    assert_eq!((mapper.add_device_tlb(DEVICE), asked()), (Ok(()), 2), "both are there, once");
    // One that is taken out by two goes once.
    let other = Arc::clone(&mapper);
    machine.hostile.before_next(move || other.forget_tlb(DEVICE));
    mapper.remove_tlb(DEVICE).unwrap();
    assert_eq!(asked(), 1, "the other is there still");
    mapper.forget_tlb(OTHER);
    assert_eq!(asked(), 0);
    // The first call fails: it is for the second to try again.
    machine.iommu.queue().fail_next(1, FAILED);
    let (other, failed) = (Arc::clone(&mapper), FAILED);
    machine.hostile.before_next(move || {
        assert_eq!(other.add_device_tlb(DEVICE), Err(InvalidationError::BeingAdded));
    });
    assert_eq!((mapper.add_device_tlb(DEVICE), asked()), (Err(failed), 0));
    assert_eq!((mapper.add_device_tlb(DEVICE), asked()), (Ok(()), 1));
}

/// Threads map, let the device in, unmap and try again, while the device's TLB comes and goes.
#[test]
fn a_device_that_comes_and_goes_never_reaches_what_is_unmapped() {
    const PAGES: u64 = 8;
    const COMINGS: u64 = 300;
    // The threads work until the device has come so often, or they have done so much.
    const MOST_ROUNDS: u64 = 100_000;
    let machine = Machine::new();
    let Machine { iommu, queue, platform, .. } = &machine;
    let (mapper, context) = machine.mapper(1, Arc::clone(queue) as _);
    iommu.attach(DEVICE, context);
    let range = |number: u64| IovaRange::new(Iova::new(number * PAGE), PAGE).unwrap();
    let access = |range: IovaRange| iommu.access(DEVICE, range.start(), 1, Permissions::WRITE).is_ok();
    let map = |range, memory| {
        let mut gather = Gather::new();
        mapper.open(platform, range, [memory], Permissions::READ_WRITE, &mut gather).unwrap();
        assert!(access(range), "it is mapped");
        gather
    };
    let stays = range(1);
    map(stays, memory(0));
    let comings = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 1..=2_u64 {
            let (mapper, comings, map, range, access) = (&mapper, &comings, &map, &range, &access);
            scope.spawn(move || {
                for round in 0..MOST_ROUNDS {
                    let range = range(1 + thread * PAGES + round % PAGES);
                    let mut gather = map(range, memory(round));
                    assert_eq!(mapper.unmap(platform, range, &mut gather).bytes, PAGE);
                    mapper.sync(&gather).unwrap();
                    assert!(!access(range), "round {round} of thread {thread}");
                    if comings.load(Ordering::Relaxed) >= COMINGS {
                        break;
                    }
                    std::thread::yield_now();
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..COMINGS {
                mapper.add_device_tlb(DEVICE).unwrap();
                iommu.attach_with_tlb(DEVICE, context, TLB);
                (1..2 + 3 * PAGES).for_each(|number| _ = access(range(number)));
                assert!(access(stays), "from its own TLB, unless that was told to forget everything");
                iommu.attach(DEVICE, context);
                mapper.remove_tlb(DEVICE).unwrap();
                comings.fetch_add(1, Ordering::Relaxed);
            }
        });
    });
    let stats = iommu.stats();
    assert!(stats.device_tlb_hits > 0 && stats.device_invalidations >= COMINGS, "{stats:?}");
}
