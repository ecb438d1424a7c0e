//! Limits: eviction order and cost, and errors that name the limit.

use portcullis::addr::{Iova, PhysAddr, PhysSegment};
use portcullis::dma::DmaDevice;
use portcullis::domain::MapListError;
use portcullis_linux::registration::{
    AcquireError, RegistrationCache, RegistrationConfigError, RegistrationLimits,
};

use crate::open::OpenCache;
use crate::rig::{Clocked, PAGE, Rig};
use crate::support::{BOTH, Bench, HELD, KEPT, bytes, pages};

#[test]
fn the_least_recently_used_idle_entry_makes_room() {
    let bench = Bench::new(4, 64);
    let held = bench.acquire(pages(0, 1), KEPT).unwrap();
    let iovas: Vec<Iova> = (1..4).map(|n| bench.touch(pages(n, 1), KEPT)).collect();
    // Used again: 2 is now the oldest.
    bench.touch(pages(1, 1), KEPT);
    bench.submissions();
    let new = bench.touch(pages(4, 1), HELD);
    assert_eq!(bench.submissions(), 2, "an eviction, and the strict end of what is not kept");
    assert_eq!(bench.reached(iovas[1]).filter(|phys| *phys == pages(2, 1).phys), None);
    assert_eq!(bench.reached(new), None);
    for (n, iova) in [(1, iovas[0]), (3, iovas[2])] {
        assert_eq!(bench.reached(iova), Some(pages(n, 1).phys), "{n} was evicted");
    }
    assert!(bench.rig.reaches(held.iova()));
    let usage = bench.cache.usage();
    assert_eq!((usage.evictions, usage.peak_entries, usage.entries), (1, 4, 3));
    bench.cache.release(held).unwrap();
    bench.finish();
}

#[test]
fn in_rotation_over_more_than_fits_a_sixteenth_is_evicted_with_one_invalidation() {
    for (entries, together) in [(4, 1), (64, 4), (1000, 16)] {
        let bench = Bench::new(entries, 1 << 20);
        (0..entries as u64).for_each(|n| _ = bench.touch(pages(n, 1), KEPT));
        bench.submissions();
        let rounds = 64 * together;
        for n in 0..rounds {
            bench.touch(pages(entries as u64 + n, 1), KEPT);
        }
        assert_eq!(bench.submissions(), rounds / together);
        let usage = bench.cache.usage();
        assert_eq!(usage.evictions, rounds);
        assert!(usage.peak_entries == entries && usage.entries > entries - together as usize);
        bench.finish();
    }
}

#[test]
fn a_large_range_takes_the_room_of_as_many_small_ones_as_it_needs() {
    let bench = Bench::new(1000, 500);
    (0..500).for_each(|n| _ = bench.touch(pages(n, 1), KEPT));
    bench.submissions();
    let large = bench.acquire(pages(1000, 200), KEPT).unwrap();
    let usage = bench.cache.usage();
    assert!((200..=200 + 64).contains(&usage.evictions), "{usage:?}");
    assert_eq!(bench.submissions(), usage.evictions.div_ceil(64));
    assert!(usage.bytes <= 500 * PAGE && usage.peak_bytes == 500 * PAGE);
    bench.cache.release(large).unwrap();
    bench.finish();
}

#[test]
fn what_does_not_fit_is_an_error_that_names_the_limit_and_evicts_nothing() {
    let bench = Bench::new(3, 8);
    let too_large = AcquireError::TooLarge { bytes: 9 * PAGE, limit: 8 * PAGE };
    // Eight pages of bytes on nine pages.
    assert_eq!(bench.acquire(bytes(1, 8 * PAGE), KEPT).unwrap_err(), too_large);
    let held = bench.acquire(pages(0, 5), HELD).unwrap();
    bench.touch(pages(10, 2), KEPT);
    bench.submissions();
    let error = bench.acquire(pages(20, 4), KEPT).unwrap_err();
    assert_eq!(error, AcquireError::NoBytes { wanted: 4 * PAGE, limit: 8 * PAGE, held: 5 * PAGE });
    assert_eq!((bench.submissions(), bench.cache.usage().idle_entries), (0, 1));
    // The room that was reserved for it is free again.
    let three = bench.acquire(pages(20, 3), HELD).unwrap();
    bench.cache.release(three).unwrap();

    let others = [pages(30, 1), pages(31, 1)].map(|memory| bench.acquire(memory, HELD).unwrap());
    let error = bench.acquire(pages(40, 1), KEPT).unwrap_err();
    assert_eq!(error, AcquireError::NoEntry { limit: 3 });
    for registration in others.into_iter().chain([held]) {
        bench.cache.release(registration).unwrap();
    }
    bench.finish();
}

#[test]
fn ranges_that_are_none_are_refused() {
    let bench = Bench::new(3, 8);
    let empty = bytes(0, 0);
    let error = MapListError::EmptySegment { index: 0, phys: empty.phys };
    assert_eq!(bench.acquire(empty, KEPT).unwrap_err(), AcquireError::Map(error));
    let (phys, len) = (PhysAddr::new(u64::MAX - 10), 12);
    let error = MapListError::Wraps { index: 0, phys, len };
    assert_eq!(bench.acquire(PhysSegment { phys, len }, KEPT).unwrap_err(), AcquireError::Map(error));
    assert_eq!(bench.cache.usage(), Default::default());
    bench.finish();
}

#[test]
fn caches_that_can_hold_nothing_are_refused() {
    let rig = Rig::new(Clocked::new(1), portcullis::domain::Policy::Strict, |queue| queue);
    for (entries, bytes) in [(0, 1 << 20), (1, PAGE - 1), (usize::MAX, 1 << 20)] {
        let result = RegistrationCache::new(rig.device.clone(), RegistrationLimits { entries, bytes });
        let most = u32::MAX as usize;
        assert_eq!(result.err(), Some(RegistrationConfigError::Limits { entries, bytes, most }));
    }
    let (passing, _) = rig.another(9, portcullis::domain::Policy::Passthrough);
    let device = DmaDevice::new(passing, u64::MAX).unwrap();
    let result = RegistrationCache::new(device, RegistrationLimits { entries: 1, bytes: PAGE });
    assert_eq!(result.err(), Some(RegistrationConfigError::NoTranslation));
}

#[test]
fn a_trim_leaves_what_was_used_last_and_what_is_held() {
    let bench = Bench::new(200, 400);
    let held = bench.acquire(pages(500, 3), KEPT).unwrap();
    (0..150).for_each(|n| _ = bench.touch(pages(n, 1), KEPT));
    bench.submissions();
    assert_eq!(bench.cache.trim(10 * PAGE), Ok(140 * PAGE));
    assert_eq!(bench.submissions(), 3);
    let usage = bench.cache.usage();
    assert_eq!((usage.entries, usage.idle_bytes, usage.bytes), (11, 10 * PAGE, 13 * PAGE));
    let misses = usage.misses;
    (140..150).for_each(|n| _ = bench.touch(pages(n, 1), KEPT));
    assert_eq!(bench.cache.usage().misses, misses);
    assert_eq!(bench.cache.trim(u64::MAX), Ok(0));
    assert_eq!(bench.cache.trim(0), Ok(10 * PAGE));
    assert!(bench.rig.reaches(held.iova()));
    bench.cache.release(held).unwrap();
    bench.finish();
}

#[test]
fn addresses_are_within_the_device_s_reach() {
    let bench = Bench::new(8, 64);
    let device = DmaDevice::new(bench.rig.domain.clone(), u32::MAX.into()).unwrap();
    let limits = RegistrationLimits { entries: 8, bytes: 64 * PAGE };
    let cache = RegistrationCache::new(device, limits).unwrap();
    let held = cache.open(pages(0, 3), BOTH, HELD).unwrap();
    assert!(held.iova().get() + 3 * PAGE <= 1 << 32);
    cache.release(held).unwrap();
    drop(cache);
    bench.finish();
}

#[test]
fn of_large_entries_as_many_go_together_as_a_sixteenth_of_the_bytes_has() {
    // Entries of 5 pages: two of them are a sixteenth of 160 pages.
    let bench = Bench::new(1000, 160);
    (0..32).for_each(|n| _ = bench.touch(pages(5 * n, 5), KEPT));
    bench.submissions();
    (32..40).for_each(|n| _ = bench.touch(pages(5 * n, 5), KEPT));
    assert_eq!((bench.submissions(), bench.cache.usage().evictions), (4, 8));
    bench.finish();
}
