//! What is promised for devices without a TLB holds for one with it, by every way to unmap.

use std::sync::Arc;
use std::time::{Duration, Instant};

use portcullis::addr::{Direction, DomainId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{Ended, RawBatch, StrictRing, StrictRingConfig};
use portcullis::domain::{Policy, UnmapError};
use portcullis::invalidation::{Gather, Invalidation, InvalidationQueue, QUEUE_ENTRIES, Request};
use portcullis::mapper::{Mapper, TableMapper};
use portcullis::pgtable::{Arm, PageTable};
use portcullis::platform::Platform;
use portcullis_model::open::{OpenDomain, OpenMapper, OpenRing, OpenTlbs};

use crate::device_tlb::machine::{DEVICE, LAZY_FOREVER, Machine, OTHER, PAGE, SILENT, page};

const DOMAIN: DomainId = DomainId(1);

fn of_iotlb(range: IovaRange) -> Request {
    Request { domain: DOMAIN, invalidation: Invalidation::Range { range, leaf_only: true } }
}

fn of_device(range: Option<IovaRange>) -> Request {
    Request { domain: DOMAIN, invalidation: Invalidation::DeviceTlb { device: DEVICE, range } }
}

#[test]
fn a_strict_unmap_keeps_the_device_out() {
    let machine = Machine::new();
    let side = machine.caching(Policy::Strict);
    for number in 0..100 {
        let range = side.map(number);
        assert!(machine.reaches(DEVICE, range.start()));
        side.domain.unmap(range).unwrap();
        assert!(!machine.reaches(DEVICE, range.start()), "number {number}");
        let log = machine.hostile.log();
        assert_eq!(log, [[of_iotlb(range), of_device(Some(range))]], "one wait, the IOTLB first");
    }
    assert_eq!(machine.told(), 100);
}

#[test]
fn the_iotlb_alone_would_not_have_done() {
    let machine = Machine::new();
    let side = machine.caching(Policy::Strict);
    let range = side.map(0);
    assert!(machine.reaches(DEVICE, range.start()));
    side.domain.mapper().forget_tlb(DEVICE);
    side.domain.unmap(range).unwrap();
    assert!(machine.reaches(DEVICE, range.start()), "that is what the set of devices is for");
}

#[test]
fn without_such_devices_none_is_asked() {
    let machine = Machine::new();
    let side = machine.side(1, Policy::Strict);
    machine.iommu.attach(DEVICE, side.context);
    let unmap = |number| {
        let range = side.map(number);
        assert!(machine.reaches(DEVICE, range.start()));
        side.domain.unmap(range).unwrap();
        assert!(!machine.reaches(DEVICE, range.start()));
        assert_eq!(machine.hostile.log(), [[of_iotlb(range)]]);
    };
    unmap(0);
    // Nor after the last has gone.
    side.domain.mapper().add_device_tlb(DEVICE).unwrap();
    side.domain.mapper().remove_tlb(DEVICE).unwrap();
    machine.hostile.log();
    let told = machine.told();
    (1..10).for_each(unmap);
    side.domain.flush().unwrap();
    assert_eq!(machine.told(), told);
}

#[test]
fn a_device_of_another_domain_is_not_asked() {
    let machine = Machine::new();
    let _caching = machine.caching(Policy::Strict);
    let side = machine.side(2, Policy::Strict);
    side.domain.unmap(side.map(0)).unwrap();
    side.domain.flush().unwrap();
    assert_eq!(machine.told(), 0);
}

#[test]
fn a_lazy_unmap_ends_with_the_flush_for_the_device_too() {
    let machine = Machine::new();
    let side = machine.caching(LAZY_FOREVER);
    let first = side.map(0);
    assert!(machine.reaches(DEVICE, first.start()));
    side.domain.unmap(first).unwrap();
    assert!(machine.reaches(DEVICE, first.start()), "that is the price of lazy protection");
    side.domain.flush().unwrap();
    assert!(!machine.reaches(DEVICE, first.start()));
    assert_eq!(machine.told(), 1);
    // The flush that a full queue asks for.
    let ranges: Vec<_> = (0..=QUEUE_ENTRIES as u64).map(|number| side.map(number)).collect();
    let last = ranges[QUEUE_ENTRIES];
    assert!(machine.reaches(DEVICE, last.start()));
    // Last in the queue, first in the flush: the one that finds it full is queued after that.
    side.domain.unmap(last).unwrap();
    ranges[..QUEUE_ENTRIES].iter().for_each(|range| side.domain.unmap(*range).unwrap());
    assert_eq!((side.domain.stats().flushes, machine.told()), (2, 2));
    assert!(!machine.reaches(DEVICE, last.start()));
    let whole = Request { domain: DOMAIN, invalidation: Invalidation::Domain };
    assert_eq!(machine.hostile.log(), [[whole, of_device(None)], [whole, of_device(None)]]);
}

#[test]
fn a_batch_is_out_of_reach_after_its_commit() {
    let machine = Machine::new();
    for policy in [Policy::Strict, LAZY_FOREVER] {
        let side = machine.caching(policy);
        // Eight ranges by themselves; more, and the device forgets everything.
        for ranges in [8, 9] {
            let mut batch = RawBatch::new(&side.device, 16).unwrap();
            let all: Vec<_> = (0..4 * ranges).map(|number| side.map(number)).collect();
            // Too far apart to be joined.
            let (unmapped, kept): (Vec<IovaRange>, Vec<IovaRange>) =
                all.iter().partition(|range| (range.start().get() / PAGE).is_multiple_of(4));
            assert!(all.iter().all(|range| machine.reaches(DEVICE, range.start())));
            unmapped
                .iter()
                .for_each(|range| side.device.unmap_single_in(&mut batch, range.start(), PAGE).unwrap());
            assert!(unmapped.iter().all(|range| machine.reaches(DEVICE, range.start())));
            batch.commit().unwrap();
            assert!(unmapped.iter().all(|range| !machine.reaches(DEVICE, range.start())));
            assert!(kept.iter().all(|range| machine.reaches(DEVICE, range.start())));
            let log = machine.hostile.log();
            let asked: Vec<_> = log.iter().flatten().filter(|request| is_of_device(request)).collect();
            match ranges {
                8 => assert!(asked.len() == 8 && !asked.contains(&&of_device(None)), "{asked:?}"),
                _ => assert_eq!(asked, [&of_device(None)]),
            }
            assert_eq!(log.len(), 1);
            kept.into_iter().for_each(|range| side.domain.unmap_strictly(range).unwrap());
            machine.hostile.log();
        }
    }
}

fn is_of_device(request: &Request) -> bool {
    matches!(request.invalidation, Invalidation::DeviceTlb { .. })
}

#[test]
fn a_ring_s_batch_is_out_of_reach_after_its_commit() {
    let machine = Machine::new();
    for policy in [Policy::Strict, LAZY_FOREVER] {
        let side = machine.caching(policy);
        let mut ring = StrictRing::new(&side.device, StrictRingConfig::new(64, PAGE, 16)).unwrap();
        for _ in 0..20 {
            let live: Vec<_> =
                (0..16).map(|number| ring.open(&[page(number)], Direction::Bidirectional).unwrap()).collect();
            let iovas: Vec<_> = live.iter().map(|mapping| mapping.iova()).collect();
            assert!(iovas.iter().all(|iova| machine.reaches(DEVICE, *iova)));
            let mut last = Ended::Pending;
            live.into_iter().for_each(|mapping| last = ring.unmap(mapping).unwrap());
            assert_eq!(last, Ended::Flushed(()));
            assert!(iovas.iter().all(|iova| !machine.reaches(DEVICE, *iova)));
        }
        ring.commit().unwrap();
        assert_eq!(ring.arena().map_or(0, |arena| arena.in_use()), 0);
        drop(ring);
    }
}

#[test]
fn a_part_of_a_large_page_goes_from_the_device_too() {
    const LARGE: u64 = 2 << 20;
    let machine = Machine::new();
    let side = machine.caching(Policy::Strict);
    let large = PhysSegment { phys: PhysAddr::new(0x8_0000_0000), len: LARGE };
    let permissions = Direction::Bidirectional.permissions();
    let range = side.domain.open(&[large], permissions, Iova::new(u64::MAX)).unwrap();
    assert_eq!(range.start().get() % LARGE, 0, "one large page, and one entry in the device");
    assert!(machine.reaches(DEVICE, range.start()));
    let part = IovaRange::new(range.start().checked_add(PAGE).unwrap(), PAGE).unwrap();
    side.domain.unmap(part).unwrap();
    assert!(!machine.reaches(DEVICE, part.start()));
    assert!(machine.reaches(DEVICE, range.start()));
}

/// Where the architecture wants a large page broken before it is made of smaller ones, the device forgets it, too.
#[test]
fn a_page_that_is_broken_is_so_in_the_device() {
    const LARGE: u64 = 2 << 20;
    let machine = Machine::new();
    let format = Arm::<12>::stage_2(48, 48).unwrap();
    let table = PageTable::for_cpus(Arc::clone(&machine.memory), format, machine.platform.cpus()).unwrap();
    let mapper = TableMapper::new(table, Arc::clone(&machine.hostile), DOMAIN, Vec::new());
    mapper.add_device_tlb(DEVICE).unwrap();
    let large = IovaRange::new(Iova::new(LARGE), LARGE).unwrap();
    let part = IovaRange::new(Iova::new(LARGE + PAGE), PAGE).unwrap();
    let mut gather = Gather::new();
    let list = [(PhysAddr::new(LARGE), LARGE)];
    mapper.open(&machine.platform, large, list, Permissions::READ_WRITE, &mut gather).unwrap();
    // The device does not confirm: the page stays.
    machine.iommu.set_silent(DEVICE, true);
    assert_eq!(mapper.unmap(&machine.platform, part, &mut gather).bytes, 0);
    machine.iommu.set_silent(DEVICE, false);
    machine.hostile.log();
    assert_eq!(mapper.unmap(&machine.platform, part, &mut gather).bytes, PAGE);
    let mut log = machine.hostile.log();
    // The hint makes pages of 16 of the smallest, which are broken in their turn.
    let run = IovaRange::new(Iova::new(LARGE), 16 * PAGE).unwrap();
    // A table takes the page's place, so more than leaves change.
    let broken = |range| {
        let invalidation = Invalidation::Range { range, leaf_only: false };
        [Request { domain: DOMAIN, invalidation }, of_device(Some(range))]
    };
    assert_eq!(log.remove(0), broken(large));
    assert!(log.iter().all(|submission| *submission == broken(run)), "{log:?}");
    mapper.sync(&gather).unwrap();
    assert_eq!(machine.hostile.log(), [[of_iotlb(part), of_device(Some(part))]]);
}

#[test]
fn a_silent_device_s_unmap_is_not_confirmed_until_it_answers() {
    let machine = Machine::new();
    let side = machine.caching(Policy::Strict);
    let other = machine.side(2, Policy::Strict);
    machine.iommu.attach(OTHER, other.context);
    // There is room for one page more than what follows.
    let limit = Iova::new(32 * PAGE - 1);
    let map = || {
        let permissions = Direction::Bidirectional.permissions();
        side.domain.open(&[page(0)], permissions, limit)
    };
    let range = map().unwrap();
    assert!(machine.reaches(DEVICE, range.start()));
    machine.iommu.set_silent(DEVICE, true);
    let unconfirmed = UnmapError::Unconfirmed { range, error: SILENT };
    assert_eq!(side.domain.unmap(range), Err(unconfirmed));
    assert!(unconfirmed.to_string().contains("device 0x7"), "{unconfirmed}");
    assert!(machine.reaches(DEVICE, range.start()), "indeed it is still reachable");
    // Its address is not handed out, not even when there is no other.
    let mut live = Vec::new();
    while let Ok(another) = map() {
        assert!(another != range);
        live.push(another);
        assert!(live.len() < 32);
    }
    assert_eq!(live.len(), 30, "all but page 0 and the one that waits");
    assert_eq!(side.domain.flush(), Err(SILENT));
    // Nobody else has noticed anything.
    for number in 0..100 {
        let range = other.map(number);
        assert!(machine.reaches(OTHER, range.start()));
        other.domain.unmap(range).unwrap();
        assert!(!machine.reaches(OTHER, range.start()));
    }
    // It answers again.
    machine.iommu.set_silent(DEVICE, false);
    side.domain.flush().unwrap();
    assert!(!machine.reaches(DEVICE, range.start()));
    assert_eq!(map().unwrap(), range);
    assert_eq!(side.domain.stats().lost_iova_bytes, 0);
}

#[test]
fn a_lazy_window_does_not_end_while_the_device_is_silent() {
    let machine = Machine::new();
    let side = machine.caching(Policy::Lazy { window_ns: 1_000_000 });
    let range = side.map(0);
    assert!(machine.reaches(DEVICE, range.start()));
    machine.iommu.set_silent(DEVICE, true);
    side.domain.unmap(range).unwrap();
    // The timer's flushes fail, each time; the bounds here decide nothing but when to give up.
    let start = Instant::now();
    while machine.hostile.log().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(60), "nobody tried");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(side.domain.stats().flushes, 0);
    assert!(machine.reaches(DEVICE, range.start()));
    machine.iommu.set_silent(DEVICE, false);
    while machine.reaches(DEVICE, range.start()) {
        assert!(start.elapsed() < Duration::from_secs(60), "nobody tried again");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn whoever_waits_for_a_device_stops_nobody_else() {
    let machine = Machine::new();
    let side = machine.caching(Policy::Strict);
    let other = machine.side(2, Policy::Strict);
    let (range, others) = (side.map(0), other.map(0));
    // While the device's answer is waited for, another domain's unmap comes and goes.
    let (queue, done) = (Arc::clone(&machine.queue), std::sync::mpsc::channel());
    let (sender, receiver) = done;
    machine.hostile.before_next(move || {
        std::thread::spawn(move || {
            let request = Invalidation::Range { range: others, leaf_only: true };
            sender.send(queue.invalidate(DomainId(2), request)).unwrap();
        });
        let answer = receiver.recv_timeout(Duration::from_secs(60));
        assert_eq!(answer, Ok(Ok(())), "it waits for somebody else's device");
    });
    side.domain.unmap(range).unwrap();
    assert_eq!(machine.hostile.log().len(), 2, "its unmap, and the other's");
}
