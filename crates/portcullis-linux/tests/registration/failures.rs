//! Invalidations that fail, memory and addresses that run out, owners and CPUs that come at the wrong moment.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use portcullis::addr::{Iova, IovaRange, Permissions};
use portcullis::dma::DmaDevice;
use portcullis::domain::{MapListError, Policy};
use portcullis::invalidation::Gather;
use portcullis::iova::IovaError;
use portcullis::pgtable::MapError;
use portcullis::platform::Frames;
use portcullis::std_platform::StdPlatform;
use portcullis_linux::registration::{
    AcquireError, ForgetError, RegistrationCache, RegistrationLimits, ReleaseRegistrationError, Released,
};
use portcullis_model::open::{OpenDevice, OpenMapper};

use crate::open::OpenCache;
use crate::rig::{Clocked, Hooked, PAGE, Rig};
use crate::support::{BOTH, Bench, HELD, KEPT, TIMEOUT, pages};

#[test]
fn an_eviction_that_is_not_confirmed_keeps_its_entry_and_its_share_of_the_limit() {
    let bench = Bench::new(2, 64);
    let iovas = [0, 1].map(|n| bench.touch(pages(n, 1), KEPT));
    bench.fail(true);
    for _ in 0..3 {
        let error = bench.acquire(pages(2, 1), KEPT).unwrap_err();
        assert_eq!(error, AcquireError::Eviction { error: TIMEOUT });
        assert!(bench.reached(iovas[0]).is_some(), "or the test means nothing");
        let usage = bench.cache.usage();
        assert_eq!((usage.entries, usage.bytes, usage.unconfirmed_entries), (2, 2 * PAGE, 1));
        assert_eq!((usage.evictions, usage.idle_entries), (1, 1), "no other is evicted in vain");
    }
    // It is not shared any more, and not mapped again, because there is no room.
    assert_eq!(bench.acquire(pages(0, 1), KEPT).unwrap_err(), AcquireError::Eviction { error: TIMEOUT });
    bench.touch(pages(1, 1), KEPT);
    bench.fail(false);
    let new = bench.touch(pages(2, 1), KEPT);
    let usage = bench.cache.usage();
    assert_eq!((usage.entries, usage.unconfirmed_entries, usage.evictions), (2, 0, 1));
    assert_eq!(bench.reached(iovas[0]).filter(|phys| *phys == pages(0, 1).phys), None);
    assert_eq!(bench.reached(new), Some(pages(2, 1).phys));
    assert_eq!(bench.reached(iovas[1]), Some(pages(1, 1).phys));
    bench.finish();
}

#[test]
fn a_release_that_is_not_confirmed_says_so_and_is_tried_again() {
    let bench = Bench::new(4, 64);
    let held = bench.acquire(pages(0, 1), HELD).unwrap();
    let iova = held.iova();
    assert!(bench.rig.reaches(iova));
    bench.fail(true);
    assert_eq!(bench.cache.release(held), Err(ReleaseRegistrationError::Unconfirmed { error: TIMEOUT }));
    assert!(bench.rig.reaches(iova), "or the test means nothing");
    assert_eq!(bench.cache.trim(u64::MAX), Err(TIMEOUT));
    // Acquired again, it is another mapping; its old addresses stay reserved.
    let again = bench.acquire(pages(0, 1), HELD).unwrap();
    assert_ne!(again.iova(), iova);
    assert_eq!(bench.cache.usage().bytes, 2 * PAGE);
    let two = ForgetError { entries: 2, error: TIMEOUT };
    assert_eq!(bench.cache.forget(pages(0, 1)), Err(two));
    assert!(bench.rig.reaches(iova), "or the test means nothing");
    bench.fail(false);
    let forgotten = bench.cache.forget(pages(0, 1)).unwrap();
    assert_eq!((forgotten.entries, forgotten.held), (2, 1));
    assert!(!bench.rig.reaches(iova) && !bench.rig.reaches(again.iova()));
    assert_eq!(bench.cache.release(again), Ok(Released::Forgotten));
    assert_eq!(bench.cache.usage().entries, 0);
    bench.finish();
}

#[test]
fn a_forget_that_fails_unmaps_all_the_same() {
    let bench = Bench::new(200, 400);
    let iovas: Vec<Iova> = (0..150).map(|n| bench.touch(pages(n, 1), KEPT)).collect();
    // The second of three submissions fails.
    let (queue, failing) = (bench.rig.iommu.queue(), Arc::new(AtomicBool::new(false)));
    bench.rig.queue.set(move || {
        let second = failing.fetch_xor(true, Ordering::Relaxed);
        queue.fail_next(if second { u64::MAX } else { 0 }, TIMEOUT);
    });
    assert_eq!(bench.cache.forget(pages(0, 150)), Err(ForgetError { entries: 64, error: TIMEOUT }));
    let reached = iovas.iter().filter(|iova| bench.rig.reaches(**iova)).count();
    assert_eq!(reached, 64);
    let usage = bench.cache.usage();
    assert_eq!((usage.entries, usage.unconfirmed_entries, usage.idle_entries), (64, 64, 0));
    bench.unhook();
    bench.fail(false);
    assert_eq!(bench.cache.forget(pages(0, 150)).unwrap().entries, 64);
    assert!(iovas.iter().all(|iova| !bench.rig.reaches(*iova)));
    bench.finish();
}

#[test]
fn a_cache_that_ends_unconfirmed_keeps_its_addresses_from_use() {
    let bench = Bench::new(8, 64);
    let iova = bench.touch(pages(0, 1), KEPT);
    bench.fail(true);
    let Bench { rig, cache, .. } = bench;
    drop(cache);
    assert!(rig.reaches(iova), "or the test means nothing");
    rig.iommu.queue().fail_next(0, TIMEOUT);
    let others: Vec<_> =
        (1..5).map(|n| rig.device.open_single(pages(n, 1).phys, PAGE, BOTH).unwrap()).collect();
    assert!(!others.contains(&iova));
    rig.domain.flush().unwrap();
    assert!(!rig.reaches(iova));
    assert_eq!(rig.domain.stats().lost_iova_bytes, 0);
}

/// A held entry's addresses are leaked; memory that devices may reach is invalidated all the same, and counted meanwhile.
#[test]
fn what_a_cache_leaves_unconfirmed_is_tried_again_and_counted() {
    for keep in [HELD, KEPT] {
        let rig = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
        let limits = RegistrationLimits { entries: 4, bytes: 1 << 20 };
        let cache = RegistrationCache::new(rig.device.clone(), limits).unwrap();
        let held = cache.open(pages(0, 1), BOTH, keep).unwrap();
        let iova = held.iova();
        if keep == KEPT {
            cache.release(held).unwrap();
        }
        assert!(rig.reaches(iova));
        let before = rig.domain.exposure().stale_byte_ns;
        rig.iommu.queue().fail_next(1, TIMEOUT);
        drop(cache);
        assert!(rig.reaches(iova), "or the test means nothing");
        rig.platform.go_to(1_000_000_000);
        assert!(!rig.reaches(iova), "reached after a second");
        let counted = rig.domain.exposure().stale_byte_ns - before;
        assert!(counted >= u128::from(PAGE * 1_000_000), "{counted} counted");
        let lost = if keep == KEPT { 0 } else { PAGE };
        assert_eq!(rig.gone(), (lost, lost));
    }
}

#[test]
fn a_map_without_table_memory_leaves_nothing() {
    let bench = Bench::new(8, 4096);
    // All memory is taken, except one frame: the first table of a range, and not the next.
    let mut taken = Vec::new();
    while let Some(frame) = bench.rig.memory.alloc(1) {
        taken.push(frame);
    }
    let free = |count: usize, taken: &mut Vec<_>| {
        // SAFETY: 1: allocated in the loop above. 2: not used.
        taken.drain(..count).for_each(|frame| unsafe { bench.rig.memory.free(frame, 1) });
    };
    free(4, &mut taken);
    let large = pages(1, 2000);
    for fails in [false, true] {
        bench.fail(fails);
        let error = bench.acquire(large, KEPT).unwrap_err();
        let usage = bench.cache.usage();
        if fails {
            let unconfirmed = MapListError::Unconfirmed { error: TIMEOUT };
            assert_eq!(error, AcquireError::Map(unconfirmed));
            assert_eq!((usage.unconfirmed_entries, usage.bytes), (1, 2000 * PAGE));
        } else {
            assert_eq!(error, AcquireError::Map(MapListError::Map(MapError::OutOfMemory)));
            assert_eq!((usage.entries, usage.bytes), (0, 0));
        }
    }
    let error = bench.cache.forget(large).unwrap_err();
    assert_eq!(error, ForgetError { entries: 1, error: TIMEOUT });
    bench.fail(false);
    assert_eq!(bench.cache.forget(large).unwrap().entries, 1);
    free(taken.len(), &mut taken);
    let iova = bench.touch(large, HELD);
    assert_eq!(bench.reached(iova), None);
    assert_eq!(bench.cache.usage().entries, 0);
    let domain = bench.rig.domain.clone();
    drop(bench);
    let usage = domain.stats();
    assert_eq!((usage.taken_iova_bytes - usage.cached_iova_bytes, domain.stats().lost_iova_bytes), (0, 0));
}

#[test]
fn a_device_without_addresses_left_leaves_nothing() {
    let bench = Bench::new(8, 64);
    let device = DmaDevice::new(bench.rig.domain.clone(), 4 * PAGE - 1).unwrap();
    let limits = RegistrationLimits { entries: 8, bytes: 64 * PAGE };
    let cache = RegistrationCache::new(device, limits).unwrap();
    // Page 0 is reserved.
    let held = cache.open(pages(0, 2), BOTH, HELD).unwrap();
    for _ in 0..3 {
        let error = cache.open(pages(9, 2), BOTH, KEPT).unwrap_err();
        assert!(
            matches!(error, AcquireError::Map(MapListError::Iova(IovaError::Exhausted { .. }))),
            "{error:?}"
        );
        assert_eq!(cache.usage().entries, 1);
    }
    assert_eq!(cache.release(held), Ok(Released::Unmapped));
    cache.release(cache.open(pages(9, 2), BOTH, KEPT).unwrap()).unwrap();
    drop(cache);
    bench.finish();
}

#[test]
fn another_s_translation_in_the_addresses_is_left_alone() {
    let bench = Bench::new(8, 64);
    let domain = &bench.rig.domain;
    // The address of the next mapping.
    let iova = bench.touch(pages(0, 2), HELD);
    let mapper = domain.mapper();
    let second = IovaRange::new(Iova::new(iova.get() + PAGE), PAGE).unwrap();
    let foreign = [(pages(7, 1).phys, PAGE)];
    mapper.open(&bench.rig.platform, second, foreign, Permissions::READ_WRITE, &mut Gather::new()).unwrap();
    for fails in [true, false] {
        bench.fail(fails);
        let result = bench.acquire(pages(0, 2), HELD);
        assert!(fails || result.is_ok(), "somewhere else by now");
        bench.fail(false);
        result.into_iter().for_each(|held| assert!(bench.cache.release(held).is_ok()));
    }
    bench.cache.trim(0).unwrap();
    assert_eq!(bench.reached(second.start()), Some(pages(7, 1).phys), "left alone");
    // They are leaked, and counted once.
    assert_eq!((bench.cache.usage().entries, bench.rig.gone()), (0, (2 * PAGE, 2 * PAGE)));
}

#[test]
fn an_entry_that_somebody_else_unmapped_costs_its_addresses() {
    for fails in [false, true] {
        let bench = Bench::new(8, 64);
        let iova = bench.touch(pages(0, 2), KEPT);
        bench.rig.domain.unmap_strictly(IovaRange::new(iova, PAGE).unwrap()).unwrap();
        if fails {
            bench.fail(true);
            bench.cache.forget(pages(0, 1)).unwrap_err();
            bench.fail(false);
        }
        assert_eq!(bench.cache.forget(pages(0, 1)).unwrap().entries, 1);
        assert!(!bench.rig.reaches(iova));
        assert_eq!(bench.cache.usage().entries, 0);
        // Two are leaked: each counts when it ended.
        assert_eq!(bench.rig.gone(), (2 * PAGE, 2 * PAGE), "{fails}");
    }
}

#[test]
fn a_cache_that_ends_gives_up_what_somebody_else_unmapped() {
    let bench = Bench::new(8, 64);
    let domain = bench.rig.domain.clone();
    let iova = bench.touch(pages(0, 2), KEPT);
    domain.unmap_strictly(IovaRange::new(iova, PAGE).unwrap()).unwrap();
    let rig = bench.rig;
    drop(bench.cache);
    assert!(!rig.reaches(iova));
    // As above.
    assert_eq!(domain.stats().lost_iova_bytes, 2 * PAGE);
}

/// By number and under a lazy policy: nothing of it was invalidated.
#[test]
fn what_somebody_else_unmapped_is_out_of_reach_when_the_cache_ends() {
    for ends in [true, false] {
        let bench = Bench::new(8, 64);
        let domain = bench.rig.domain.clone();
        let iova = bench.touch(pages(0, 2), KEPT);
        domain.unmap(IovaRange::new(iova, 2 * PAGE).unwrap()).unwrap();
        assert!(bench.rig.reaches(iova), "or the test means nothing");
        if !ends {
            bench.cache.forget(pages(0, 1)).unwrap();
            assert!(!bench.rig.reaches(iova));
        }
        let rig = bench.rig;
        drop(bench.cache);
        assert!(!rig.reaches(iova));
        // All of it was ended by number: its addresses are freed there.
        assert_eq!(domain.stats().lost_iova_bytes, 0);
    }
}

#[test]
fn a_map_that_meets_somebody_else_s_page_gives_its_addresses_up() {
    let bench = Bench::new(8, 64);
    let domain = bench.rig.domain.clone();
    // The last address freed is reused first.
    let iova = bench.touch(pages(0, 2), HELD);
    let second = IovaRange::new(iova.checked_add(PAGE).unwrap(), PAGE).unwrap();
    let foreign = [(pages(7, 1).phys, PAGE)];
    let mapper = domain.mapper();
    mapper.open(&bench.rig.platform, second, foreign, Permissions::READ_WRITE, &mut Gather::new()).unwrap();
    let error = bench.acquire(pages(0, 2), HELD).unwrap_err();
    let occupied = MapError::AlreadyMapped { at: second.start() };
    assert_eq!(error, AcquireError::Map(MapListError::Map(occupied)));
    assert_eq!((bench.cache.usage().entries, domain.stats().lost_iova_bytes), (0, 2 * PAGE));
    for _ in 0..20 {
        assert!(!(iova..=second.last()).contains(&bench.touch(pages(0, 2), HELD)));
    }
    drop(bench.cache);
    assert!(bench.rig.reaches(second.start()), "left alone");
    assert_eq!(domain.stats().lost_iova_bytes, 2 * PAGE);
}

#[test]
fn no_lock_is_held_and_nothing_is_lent_while_the_hardware_works() {
    let bench = Bench::on(StdPlatform::new(), 4, 64);
    let other = bench.acquire(pages(9, 1), KEPT).unwrap();
    let iova = bench.touch(pages(0, 1), KEPT);
    let (cache, asked) = (Arc::clone(&bench.cache), Arc::new(AtomicBool::new(false)));
    let seen = Arc::clone(&asked);
    bench.rig.queue.set(move || {
        if !seen.swap(true, Ordering::Relaxed) {
            // A hit elsewhere; and a range that is being forgotten becomes another mapping.
            cache.release(cache.open(pages(9, 1), BOTH, HELD).unwrap()).unwrap();
            let again = cache.open(pages(0, 1), BOTH, HELD).unwrap();
            assert_ne!(again.iova(), iova);
            cache.release(again).unwrap();
        }
    });
    assert_eq!(bench.cache.forget(pages(0, 1)).unwrap().entries, 1);
    assert!(asked.load(Ordering::Relaxed));
    bench.unhook();
    bench.cache.release(other).unwrap();
    bench.finish();
}

#[test]
fn a_forget_waits_for_whoever_unmaps_the_range_already() {
    for trims in [false, true] {
        let bench = Bench::on(StdPlatform::new(), 4, 64);
        let held = (!trims).then(|| bench.acquire(pages(0, 1), HELD).unwrap());
        let iova = match &held {
            Some(held) => held.iova(),
            None => bench.touch(pages(0, 1), KEPT),
        };
        assert!(bench.rig.reaches(iova));
        std::thread::scope(|scope| {
            let (begin, begun) = channel();
            let (cache, rig) = (&bench.cache, &bench.rig);
            let forgetting = scope.spawn(move || {
                begun.recv().unwrap();
                cache.forget(pages(0, 1)).unwrap();
                // The other's invalidation is over by now.
                assert!(!rig.reaches(iova));
            });
            let first = AtomicBool::new(true);
            bench.rig.queue.set(move || {
                if first.swap(false, Ordering::Relaxed) {
                    begin.send(()).unwrap();
                    // Gives a wrong implementation time to fail; a right one does not depend on it.
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
            });
            match held {
                Some(held) => _ = bench.cache.release(held).unwrap(),
                None => _ = bench.cache.trim(0).unwrap(),
            }
            forgetting.join().unwrap();
        });
        bench.unhook();
        bench.finish();
    }
}

#[test]
fn what_waits_for_room_when_it_is_forgotten_is_not_mapped() {
    let bench = Bench::on(StdPlatform::new(), 1, 64);
    bench.touch(pages(0, 1), KEPT);
    let (cache, first) = (Arc::clone(&bench.cache), AtomicBool::new(true));
    bench.rig.queue.set(move || {
        if first.swap(false, Ordering::Relaxed) {
            // Touches one of the two, and no mapped byte.
            assert_eq!(cache.forget(pages(6, 1)).unwrap().entries, 0);
        }
    });
    let memory = pages(5, 2);
    let error = bench.acquire(memory, KEPT).unwrap_err();
    assert_eq!(error, AcquireError::Forgotten { phys: memory.phys, len: memory.len });
    assert_eq!(bench.cache.usage().entries, 0);
    bench.unhook();
    bench.touch(memory, KEPT);
    bench.finish();
}

/// The last holder may use its memory again after `Ok` of a release: also if its owner has forgotten it.
#[test]
fn the_last_release_of_what_a_forget_could_not_confirm_tries_again() {
    for keep in [HELD, KEPT] {
        let bench = Bench::new(4, 64);
        let held = [HELD, keep, HELD].map(|keep| bench.acquire(pages(0, 1), keep).unwrap());
        let iova = held[0].iova();
        assert!(bench.rig.reaches(iova));
        bench.fail(true);
        bench.cache.forget(pages(0, 1)).unwrap_err();
        let [first, second, third] = held;
        // Others hold it, and nothing is promised yet.
        assert_eq!(bench.cache.release(first), Ok(Released::Forgotten));
        assert_eq!(bench.cache.release(second), Ok(Released::Forgotten));
        bench.submissions();
        let last = bench.cache.release(third);
        assert!(bench.rig.reaches(iova), "or the test means nothing");
        if keep == KEPT {
            // Only a successful forget returns the memory to the owner.
            assert_eq!((last, bench.submissions()), (Ok(Released::Forgotten), 0));
        } else {
            assert_eq!(last, Err(ReleaseRegistrationError::Unconfirmed { error: TIMEOUT }));
        }
        assert_eq!(bench.cache.usage().unconfirmed_entries, 1);
        bench.fail(false);
        assert_eq!(bench.cache.forget(pages(0, 1)).unwrap().entries, 1);
        assert!(!bench.rig.reaches(iova));
        // If the hardware works again, the release suffices.
        let held = bench.acquire(pages(0, 1), HELD).unwrap();
        assert!(bench.rig.reaches(held.iova()));
        bench.fail(true);
        bench.cache.forget(pages(0, 1)).unwrap_err();
        bench.fail(false);
        let iova = held.iova();
        assert_eq!(bench.cache.release(held), Ok(Released::Forgotten));
        assert!(!bench.rig.reaches(iova));
        assert_eq!(bench.cache.usage().entries, 0);
        bench.finish();
    }
}

#[test]
fn the_last_release_of_what_is_being_forgotten_waits_for_the_confirmation() {
    for fails in [false, true] {
        let bench = Bench::on(StdPlatform::new(), 4, 64);
        let held = bench.acquire(pages(0, 1), HELD).unwrap();
        let iova = held.iova();
        assert!(bench.rig.reaches(iova));
        bench.fail(fails);
        std::thread::scope(|scope| {
            let (begin, begun) = channel();
            let (cache, rig) = (&bench.cache, &bench.rig);
            let releasing = scope.spawn(move || {
                begun.recv().unwrap();
                let released = cache.release(held);
                // The other's invalidation is over by now.
                assert!(!rig.reaches(iova) || released.is_err(), "{released:?}");
                released
            });
            let first = AtomicBool::new(true);
            bench.rig.queue.set(move || {
                if first.swap(false, Ordering::Relaxed) {
                    begin.send(()).unwrap();
                    // Gives a wrong implementation time to fail; a right one does not depend on it.
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
            });
            assert_eq!(bench.cache.forget(pages(0, 1)).is_err(), fails);
            let unconfirmed = Err(ReleaseRegistrationError::Unconfirmed { error: TIMEOUT });
            assert_eq!(releasing.join().unwrap(), if fails { unconfirmed } else { Ok(Released::Forgotten) });
        });
        bench.unhook();
        bench.fail(false);
        bench.cache.trim(0).unwrap();
        assert!(!bench.rig.reaches(iova));
        assert_eq!(bench.cache.usage().entries, 0);
        bench.finish();
    }
}

/// The forget comes while the entry gets its addresses, which flushes deferred unmaps.
#[test]
fn what_was_forgotten_while_it_was_acquired_and_is_not_confirmed_says_so() {
    let bench = Bench::on(StdPlatform::new(), 4, 64);
    let device = DmaDevice::new(bench.rig.domain.clone(), 16 * PAGE - 1).unwrap();
    let limits = RegistrationLimits { entries: 4, bytes: 64 * PAGE };
    let cache = &Arc::new(RegistrationCache::new(device.clone(), limits).unwrap());
    cache.release(cache.open(pages(0, 1), BOTH, KEPT).unwrap()).unwrap();
    let all: Vec<_> = core::iter::from_fn(|| device.open_single(pages(9, 1).phys, PAGE, BOTH).ok()).collect();
    all.into_iter().for_each(|iova| device.unmap_single(iova, PAGE).unwrap());
    let ((begin, begun), (see, seen)) = (channel(), channel());
    let (queue, hooked) = (bench.rig.iommu.queue(), Arc::clone(cache));
    let (turn, seen) = (AtomicU64::new(0), Mutex::new(seen));
    bench.rig.queue.set(move || match turn.fetch_add(1, Ordering::Relaxed) {
        // During the search for addresses.
        0 => {
            begin.send(()).unwrap();
            seen.lock().unwrap().recv().unwrap();
        }
        // The forget has found both entries, and unmaps one.
        1 => see.send(()).unwrap(),
        // The other is mapped, and unmapped again.
        2 => {
            while hooked.usage().entries > 1 {
                std::thread::yield_now();
            }
            queue.fail_next(1, TIMEOUT);
        }
        _ => {}
    });
    std::thread::scope(|scope| {
        let forgetting = scope.spawn(move || {
            begun.recv().unwrap();
            cache.forget(pages(0, 2))
        });
        let error = cache.open(pages(1, 1), BOTH, HELD).unwrap_err();
        assert_eq!(error, AcquireError::Unconfirmed { error: TIMEOUT });
        // It tries again what the other could not do.
        assert_eq!(forgetting.join().unwrap().unwrap().entries, 2);
    });
    assert_eq!(cache.usage().entries, 0);
    bench.rig.queue.clear();
}

/// A range that is acquired during a forget is another mapping, for which its owner is responsible anew.
#[test]
fn a_forget_leaves_what_was_acquired_since_it_began() {
    let bench = Bench::on(StdPlatform::new(), 200, 400);
    (0..150).for_each(|n| _ = bench.touch(pages(n, 1), KEPT));
    let (cache, first) = (Arc::clone(&bench.cache), AtomicBool::new(true));
    bench.rig.queue.set(move || {
        if first.swap(false, Ordering::Relaxed) {
            // Of two pages with entries still to be unmapped, and longer, so that the search meets it behind them.
            cache.release(cache.open(pages(140, 2), BOTH, KEPT).unwrap()).unwrap();
        }
    });
    assert_eq!(bench.cache.forget(pages(0, 150)).unwrap().entries, 150);
    let usage = bench.cache.usage();
    assert_eq!((usage.entries, usage.idle_bytes), (1, 2 * PAGE));
    bench.unhook();
    bench.finish();
}

/// Only the last holder of a range that is not persistent must learn that no device reaches it.
#[test]
fn a_release_of_what_is_kept_waits_for_no_forget() {
    let bench = Bench::on(StdPlatform::new(), 4, 64);
    let held = Mutex::new(Some(bench.acquire(pages(0, 1), KEPT).unwrap()));
    let (cache, said) = (Arc::clone(&bench.cache), Arc::new(Mutex::new(None)));
    let answer = Arc::clone(&said);
    bench.rig.queue.set(move || {
        if let Some(held) = held.lock().unwrap().take() {
            *answer.lock().unwrap() = Some(cache.release(held));
        }
    });
    assert_eq!(bench.cache.forget(pages(0, 1)).unwrap().held, 1);
    assert_eq!(*said.lock().unwrap(), Some(Ok(Released::Forgotten)));
    bench.unhook();
    bench.finish();
}
