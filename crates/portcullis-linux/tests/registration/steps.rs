//! Step by step: hits, open bytes, forgets.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, Permissions, PhysSegment};
use portcullis::dma::DmaDevice;
use portcullis::domain::Policy;
use portcullis_linux::registration::{
    Forgotten, RegistrationCache, RegistrationLimits, ReleaseRegistrationError, Released,
};
use portcullis_model::open::OpenDevice;

use crate::open::OpenCache;
use crate::rig::{DEVICE, PAGE};
use crate::support::{BOTH, Bench, HELD, KEPT, bytes, pages};

#[test]
fn a_hit_maps_nothing_and_asks_no_hardware() {
    let bench = Bench::new(8, 64);
    let iova = bench.touch(pages(0, 3), KEPT);
    bench.submissions();
    let maps = bench.rig.domain.stats().maps;
    for _ in 0..10 {
        assert_eq!(bench.touch(pages(0, 3), KEPT), iova);
    }
    assert_eq!((bench.rig.domain.stats().maps, bench.submissions()), (maps, 0));
    let usage = bench.cache.usage();
    assert_eq!((usage.hits, usage.misses, usage.entries, usage.bytes), (10, 1, 1, 3 * PAGE));
    bench.finish();
}

#[test]
fn what_is_not_said_to_live_long_is_unmapped_by_its_last_holder_however_often_it_comes_back() {
    let bench = Bench::new(8, 64);
    for _ in 0..100 {
        let first = bench.acquire(pages(0, 2), HELD).unwrap();
        let second = bench.acquire(pages(0, 2), HELD).unwrap();
        let iova = first.iova();
        assert_eq!(second.iova(), iova);
        assert!(bench.rig.reaches(iova));
        assert_eq!(bench.cache.release(first), Ok(Released::Open));
        assert!(bench.rig.reaches(iova), "still held");
        bench.submissions();
        assert_eq!(bench.cache.release(second), Ok(Released::Unmapped));
        assert_eq!(bench.submissions(), 1);
        assert_eq!(bench.reached(iova), None);
    }
    assert_eq!(bench.cache.usage().entries, 0);
    bench.finish();
}

#[test]
fn the_owner_s_word_keeps_what_is_held_already() {
    let bench = Bench::new(8, 64);
    let held = bench.acquire(pages(0, 2), HELD).unwrap();
    let kept = bench.acquire(pages(0, 2), KEPT).unwrap();
    let iova = kept.iova();
    assert_eq!(iova, held.iova());
    assert_eq!(bench.cache.release(kept), Ok(Released::Open));
    assert_eq!(bench.cache.release(held), Ok(Released::Open));
    assert!(bench.rig.reaches(iova));
    assert_eq!(bench.cache.usage().idle_entries, 1);
    bench.finish();
}

#[test]
fn a_part_is_lent_from_a_kept_entry_and_never_from_one_that_is_only_held() {
    let bench = Bench::new(8, 64);
    let part = bytes(2 * PAGE + 100, 200);
    let large = bench.acquire(bytes(300, 8 * PAGE), HELD).unwrap();
    let own = bench.acquire(part, HELD).unwrap();
    assert_eq!(bench.reached(own.iova()), Some(part.phys));
    bench.cache.release(large).unwrap();
    // Otherwise the small one's holder would keep the large one open.
    let open = bench.cache.usage();
    assert_eq!((open.entries, open.bytes), (1, PAGE));
    bench.cache.release(own).unwrap();

    let first = bench.touch(bytes(300, 8 * PAGE), KEPT);
    let misses = bench.cache.usage().misses;
    let lent = bench.acquire(part, HELD).unwrap();
    assert_eq!(lent.iova().get() - first.get(), 2 * PAGE + 100 - 300);
    assert_eq!((bench.reached(lent.iova()), lent.len()), (Some(part.phys), 200));
    assert_eq!(bench.cache.release(lent), Ok(Released::Open));
    // Its granules are larger than the entry: the rest is not shared.
    let before = bench.acquire(bytes(200, 200), HELD).unwrap();
    assert_eq!(bench.cache.usage().misses, misses + 1);
    bench.cache.release(before).unwrap();
    bench.finish();
}

#[test]
fn an_entry_has_one_kind_of_access() {
    let bench = Bench::new(8, 64);
    let cases = [
        (Direction::ToDevice, true, false),
        (Direction::FromDevice, false, true),
        (Direction::Bidirectional, true, true),
    ];
    let held = cases.map(|(direction, ..)| bench.cache.open(pages(0, 1), direction, KEPT).unwrap());
    for (registration, (_, reads, writes)) in held.iter().zip(cases) {
        let may = |access| bench.rig.iommu.probe(DEVICE, registration.iova(), access).is_some();
        assert_eq!((may(Permissions::READ), may(Permissions::WRITE)), (reads, writes));
    }
    assert_eq!(bench.cache.usage().entries, 3);
    held.into_iter().for_each(|registration| _ = bench.cache.release(registration).unwrap());
    assert_eq!(bench.cache.forget(pages(0, 1)).unwrap().entries, 3);
    bench.finish();
}

#[test]
fn what_is_forgotten_is_out_of_reach_and_comes_back_as_another_mapping() {
    let bench = Bench::new(8, 64);
    let ranges =
        [pages(0, 4), bytes(3 * PAGE + 100, 2 * PAGE), pages(6, 2), bytes(3 * PAGE, 2 * PAGE), pages(9, 1)];
    let iovas = ranges.map(|memory| bench.touch(memory, KEPT));
    bench.submissions();
    // One byte of page 3: the first two, and the fourth.
    let forgotten = bench.cache.forget(bytes(3 * PAGE + 120, 1)).unwrap();
    assert_eq!(forgotten, Forgotten { entries: 3, bytes: 9 * PAGE, held: 0 });
    assert_eq!(bench.submissions(), 1);
    for (at, iova) in iovas.iter().enumerate() {
        assert_eq!(bench.reached(*iova).is_some(), [2, 4].contains(&at), "{at}");
    }
    let usage = bench.cache.usage();
    assert_eq!((usage.entries, usage.bytes, usage.idle_entries), (2, 3 * PAGE, 2));
    let misses = usage.misses;
    bench.touch(pages(0, 4), KEPT);
    assert_eq!(bench.cache.usage().misses, misses + 1);
    bench.finish();
}

#[test]
fn the_bounds_of_what_is_forgotten_are_bytes() {
    let bench = Bench::new(8, 64);
    let iova = bench.touch(bytes(100, 200), KEPT);
    let nothing = Ok(Forgotten::default());
    bench.submissions();
    assert_eq!(bench.cache.forget(bytes(99, 1)), nothing);
    assert_eq!(bench.cache.forget(bytes(300, u64::MAX)), nothing);
    assert_eq!(bench.cache.forget(bytes(150, 0)), nothing);
    assert_eq!(bench.submissions(), 0);
    assert!(bench.rig.reaches(iova));
    assert_eq!(bench.cache.forget(bytes(299, u64::MAX)).unwrap().entries, 1);
    assert_eq!(bench.reached(iova), None);
    bench.touch(bytes(100, 200), KEPT);
    let everything = PhysSegment { phys: portcullis::addr::PhysAddr::new(0), len: u64::MAX };
    assert_eq!(bench.cache.forget(everything).unwrap().entries, 1);
    bench.finish();
}

#[test]
fn addresses_that_a_holder_still_knows_are_nobody_else_s() {
    let bench = Bench::new(8, 64);
    for keep in [HELD, KEPT] {
        let held = bench.acquire(pages(0, 1), keep).unwrap();
        let iova = held.iova();
        assert!(bench.rig.reaches(iova));
        assert_eq!(bench.cache.forget(pages(0, 1)).unwrap().held, 1);
        assert!(!bench.rig.reaches(iova));
        let usage = bench.cache.usage();
        assert_eq!((usage.entries, usage.forgotten_entries, usage.bytes), (1, 1, 0));
        // The next mappings would reuse the last addresses freed, if they were free.
        let others: Vec<_> = (1..6).map(|n| bench.acquire(pages(n, 1), HELD).unwrap()).collect();
        let again = bench.acquire(pages(0, 1), HELD).unwrap();
        assert!(others.iter().chain([&again]).all(|other| other.iova() != iova));
        assert!(!bench.rig.reaches(iova));
        assert_eq!(bench.cache.release(held), Ok(Released::Forgotten));
        assert_eq!(bench.cache.usage().forgotten_entries, 0);
        others.into_iter().chain([again]).for_each(|other| _ = bench.cache.release(other).unwrap());
    }
    bench.finish();
}

#[test]
fn another_cache_s_registration_is_refused_and_comes_back() {
    let bench = Bench::new(8, 64);
    let limits = RegistrationLimits { entries: 8, bytes: 64 * PAGE };
    let other = RegistrationCache::new(bench.rig.device.clone(), limits).unwrap();
    let own = bench.acquire(pages(0, 1), KEPT).unwrap();
    let foreign = other.open(pages(0, 1), BOTH, KEPT).unwrap();
    let iova = foreign.iova();
    let refused = bench.cache.release(foreign);
    let Err(ReleaseRegistrationError::OtherCache { registration }) = refused else { panic!("{refused:?}") };
    assert!(bench.rig.reaches(iova) && bench.rig.reaches(own.iova()));
    assert_eq!(other.release(registration), Ok(Released::Open));
    let held = other.open(pages(0, 1), BOTH, KEPT).unwrap();
    assert_eq!(other.forget(pages(0, 1)).unwrap().held, 1);
    drop(other);
    // A holder may still tell them to its device.
    assert_eq!((held.iova(), bench.rig.domain.stats().lost_iova_bytes), (iova, PAGE));
    bench.cache.release(own).unwrap();
}

#[test]
fn what_stays_open_is_counted_as_exposure() {
    let bench = Bench::new(8, 64);
    let platform = &bench.rig.platform;
    let exposed = || bench.rig.domain.exposure().neighbour_byte_ns;
    // Bytes that are open for a millisecond.
    let open = |what: &str, bytes: u64| {
        let before = exposed();
        platform.take(1_000_000);
        assert_eq!(exposed() - before, u128::from(bytes) * 1_000_000, "{what}");
    };
    let memory = bytes(100, 5000);
    let held = bench.acquire(memory, HELD).unwrap();
    open("held: the rest of its pages", 2 * PAGE - 5000);
    bench.cache.release(held).unwrap();
    open("unmapped", 0);
    let first = bench.acquire(memory, KEPT).unwrap();
    let second = bench.acquire(memory, KEPT).unwrap();
    open("held twice", 2 * PAGE - 5000);
    bench.cache.release(first).unwrap();
    open("held once", 2 * PAGE - 5000);
    bench.cache.release(second).unwrap();
    open("idle: all of it", 2 * PAGE);
    let part = bench.acquire(bytes(200, 300), HELD).unwrap();
    open("held in part", 2 * PAGE);
    let whole = bench.acquire(memory, HELD).unwrap();
    open("held as a whole, too", 2 * PAGE - 5000);
    bench.cache.release(whole).unwrap();
    bench.fail(true);
    bench.cache.forget(memory).unwrap_err();
    open("not confirmed", 2 * PAGE);
    bench.fail(false);
    bench.cache.forget(memory).unwrap();
    open("forgotten", 0);
    bench.cache.release(part).unwrap();
    open("nothing", 0);
    bench.touch(memory, KEPT);
    open("idle again", 2 * PAGE);
    let domain = bench.rig.domain.clone();
    let platform = Arc::clone(platform);
    bench.finish();
    // The clock is read for the last change, too.
    let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
    device.set_policy(Some(Policy::Strict)).unwrap();
    for _ in 0..64 {
        let iova = device.open_single(memory.phys, 100, BOTH).unwrap();
        device.unmap_single(iova, 100).unwrap();
    }
    let before = domain.exposure();
    platform.take(1_000_000);
    assert_eq!(domain.exposure(), before, "nothing is left open");
}

#[test]
fn a_cache_that_ends_unmaps_everything() {
    let bench = Bench::new(8, 64);
    let iovas: Vec<Iova> = (0..5).map(|n| bench.touch(pages(n, 1), KEPT)).collect();
    let held = bench.acquire(pages(7, 2), HELD).unwrap();
    assert!(bench.rig.reaches(held.iova()));
    let (rig, domain) = (bench.rig, bench.cache.device().domain().clone());
    drop(bench.cache);
    assert!(iovas.iter().chain([&held.iova()]).all(|iova| !rig.reaches(*iova)));
    assert_eq!(domain.stats().lost_iova_bytes, 2 * PAGE, "the holder still knows them");
    // The device works as before.
    let device = DmaDevice::new(domain, u64::MAX).unwrap();
    let iova = device.open_single(pages(0, 1).phys, PAGE, BOTH).unwrap();
    assert!(rig.reaches(iova) && iova != held.iova());
    device.unmap_single(iova, PAGE).unwrap();
}
