//! The address space with its CPUs' lists: on several CPUs, and against the failures that other allocators are known for.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;

use crate::chosen::{ANYWHERE, Chosen, PAGE, alloc, config, free};
use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::iova::{IovaError, IovaSpace, SpaceConfig};
use portcullis::std_platform::StdPlatform;

/// free. A page claimed twice is an overlap.
#[test]
fn nothing_is_handed_out_twice_on_several_cpus() {
    let platform = StdPlatform::with_cpus(3);
    let pages = 1 << 14;
    let space = IovaSpace::new(&config(1, pages, 3)).unwrap();
    let claims: Vec<AtomicU8> = (0..=pages).map(|_| AtomicU8::new(0)).collect();
    let claim = |range: IovaRange, from: u8, to: u8| {
        let first = range.start().get() / PAGE;
        for page in first..first + range.len() / PAGE {
            let was = claims[page as usize].swap(to, Ordering::Relaxed);
            assert_eq!(was, from, "page {page} is somebody else's");
        }
    };
    const THREADS: usize = 4;
    let channels: Vec<_> = (0..THREADS).map(|_| mpsc::sync_channel::<IovaRange>(64)).collect();
    let (senders, receivers): (Vec<_>, Vec<_>) = channels.into_iter().unzip();
    std::thread::scope(|scope| {
        for (thread, received) in receivers.into_iter().enumerate() {
            let next = senders[(thread + 1) % THREADS].clone();
            let (platform, space, claim) = (&platform, &space, &claim);
            scope.spawn(move || {
                let give_back = |range: IovaRange| {
                    claim(range, 1, 0);
                    space.free(platform, range).unwrap();
                };
                let mut kept = Vec::new();
                for step in 0..30_000u64 {
                    let wanted = 1 + step.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 37;
                    match space.alloc(platform, wanted * PAGE, ANYWHERE) {
                        Ok(range) => {
                            claim(range, 0, 1);
                            if step % 3 == 0
                                && let Err(mpsc::TrySendError::Full(range)) = next.try_send(range)
                            {
                                give_back(range);
                            } else if step % 3 != 0 {
                                kept.push(range);
                            }
                        }
                        Err(IovaError::Exhausted { .. }) => kept.drain(..).for_each(give_back),
                        Err(error) => panic!("{error}"),
                    }
                    if kept.len() > 100 {
                        kept.drain(..50).for_each(give_back);
                    }
                    received.try_iter().for_each(give_back);
                }
                drop(next);
                kept.into_iter().chain(received.try_iter()).for_each(give_back);
                received
            });
        }
        drop(senders);
    });
    // What was still on its way when its receiver had finished is not freed; everything else is back.
    space.drain_all(&platform);
    let claimed = claims.iter().filter(|claim| claim.load(Ordering::Relaxed) == 1).count() as u64;
    assert!(space.usage().taken <= claimed * 2 * PAGE);
}

/// Failure 1: caches that hoard the address space.
#[test]
fn many_warm_cpus_keep_an_eighth_of_a_small_window_at_the_most() {
    let cpus = 64;
    let platform = Chosen::new(cpus);
    let space = IovaSpace::new(&config(1, (1 << 20) - 1, cpus)).unwrap();
    for cpu in 0..cpus {
        platform.be(cpu);
        for pages in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512] {
            let ranges: Vec<_> =
                (0..32).map(|_| alloc(&space, &platform, pages, ANYWHERE).unwrap()).collect();
            ranges.into_iter().for_each(|range| free(&space, &platform, range).unwrap());
        }
    }
    let usage = space.usage();
    assert!(usage.cached <= usage.total / 8, "{} of {} bytes are kept", usage.cached, usage.total);
    // And the window can be used to the last page all the same.
    let mut pages = 0;
    while alloc(&space, &platform, 512, ANYWHERE).is_ok() {
        pages += 512;
    }
    assert!(pages > (1 << 20) - 2 * 512, "{pages} pages");
}

/// Failure 3: a lower address limit makes an allocation look through a whole magazine.
#[test]
fn devices_with_a_limit_have_a_zone_of_their_own() {
    let platform = Chosen::new(1);
    let space = IovaSpace::new(&config(1, 1 << 30, 1)).unwrap();
    let low = Iova::new(u32::MAX.into());
    let high_range = alloc(&space, &platform, 1, ANYWHERE).unwrap();
    assert!(high_range.start() > low, "others leave the low zone alone");
    let low_range = alloc(&space, &platform, 1, low).unwrap();
    free(&space, &platform, high_range).unwrap();
    free(&space, &platform, low_range).unwrap();
    // Each finds its own at once, whatever was freed last.
    assert_eq!(alloc(&space, &platform, 1, low).unwrap(), low_range);
    assert_eq!(alloc(&space, &platform, 1, ANYWHERE).unwrap(), high_range);
}

/// Failure 6, first half: what another CPU frees comes back to the CPU that it was taken on.
#[test]
fn a_range_freed_elsewhere_returns_to_its_owner() {
    let platform = Chosen::new(2);
    let space = IovaSpace::new(&config(1, (1 << 30) - 1, 2)).unwrap();
    // As many as one block has, so that the owner's lists are empty.
    platform.be(0);
    let mine: Vec<_> = (0..16).map(|_| alloc(&space, &platform, 1, ANYWHERE).unwrap()).collect();
    platform.be(1);
    mine.iter().for_each(|range| free(&space, &platform, *range).unwrap());
    let others: Vec<_> = (0..64).map(|_| alloc(&space, &platform, 1, ANYWHERE).unwrap()).collect();
    assert!(others.iter().all(|range| !mine.contains(range)), "CPU 1 keeps nothing of CPU 0's");
    // A remote batch is sent when it is full: fill it.
    platform.be(0);
    let more: Vec<_> = (0..32).map(|_| alloc(&space, &platform, 2, ANYWHERE).unwrap()).collect();
    platform.be(1);
    more.iter().for_each(|range| free(&space, &platform, *range).unwrap());
    platform.be(0);
    let back = alloc(&space, &platform, 1, ANYWHERE).unwrap();
    assert!(mine.contains(&back));
}

/// A part of a range, or more than it, is never taken back.
#[test]
fn only_whole_ranges_are_taken_back() {
    let platform = Chosen::new(2);
    let space = IovaSpace::new(&config(1, 1 << 20, 2)).unwrap();
    for pages in [1, 3, 4, 33, 512, 700] {
        let range = alloc(&space, platform.be(0), pages, ANYWHERE).unwrap();
        for wrong in [pages - 1, pages + 1, pages.next_power_of_two()] {
            if let Ok(part) = IovaRange::new(range.start(), wrong * PAGE)
                && wrong != pages
            {
                for cpu in 0..3 {
                    let freed = free(&space, platform.be(cpu), part);
                    assert_eq!(freed, Err(IovaError::NotAllocated { range: part }), "{wrong} of {pages}");
                }
            }
        }
        free(&space, platform.be(1), range).unwrap();
    }
    space.drain_all(&platform);
    assert_eq!(space.usage().taken, 0);
}

/// Nor is a range that does not consist of whole granules, though it begins as one that is handed out.
#[test]
fn parts_of_granules_are_not_taken_back() {
    let platform = Chosen::new(2);
    for granule in [PageSize::SIZE_4K, PageSize::from_shift(16).unwrap()] {
        let aperture = IovaRange::new(Iova::new(1 << 20), 1 << 40).unwrap();
        let space = IovaSpace::new(&SpaceConfig::new(aperture, granule, 2)).unwrap();
        for granules in [1, 2, 3, 8, 33, 512, 513] {
            let len = granules * granule.bytes();
            let range = space.alloc(platform.be(0), len - 1, ANYWHERE).unwrap();
            assert_eq!(range.len(), len, "what is handed out is whole granules");
            let wrong = [(0, len - 1), (0, len - granule.bytes() + 1), (0, len + 1), (1, len), (1, len - 1)];
            for (shift, len) in wrong {
                let part = IovaRange::new(Iova::new(range.start().get() + shift), len).unwrap();
                // By the fast path, on another CPU, and without a CPU.
                for cpu in 0..3 {
                    let freed = space.free(platform.be(cpu), part);
                    assert_eq!(freed, Err(IovaError::NotAllocated { range: part }), "{shift} {granules}");
                }
            }
            space.free(platform.be(0), range).unwrap();
        }
        space.drain_all(&platform);
        assert_eq!(space.usage().taken, 0);
    }
}

/// A range that begins a little later than one that is handed out is not that one.
#[test]
fn shifted_ranges_are_not_taken_back() {
    let platform = Chosen::new(2);
    let space = IovaSpace::new(&SpaceConfig { ..config(1, 1 << 20, 2) }).unwrap();
    for pages in [1, 2, 7, 8, 33, 64, 512, 513, 1024] {
        // Two side by side.
        let ranges = [0; 2].map(|_| alloc(&space, platform.be(0), pages, ANYWHERE).unwrap());
        for range in ranges {
            for shift in [1, 2, 4, 7, 63] {
                let start = Iova::new(range.start().get() + shift * PAGE);
                let shifted = IovaRange::new(start, range.len()).unwrap();
                if ranges.contains(&shifted) {
                    continue;
                }
                for cpu in 0..3 {
                    let freed = free(&space, platform.be(cpu), shifted);
                    assert_eq!(freed, Err(IovaError::NotAllocated { range: shifted }), "{pages}");
                }
            }
        }
        ranges.iter().for_each(|range| free(&space, platform.be(1), *range).unwrap());
    }
    space.drain_all(&platform);
    assert_eq!(space.usage().taken, 0);
}

/// The smallest granule there is, and the largest numbers.
#[test]
fn a_granule_of_one_byte_is_survived() {
    let platform = Chosen::new(1);
    let byte = PageSize::from_shift(0).unwrap();
    let aperture = IovaRange::new(Iova::new(1), 1 << 39).unwrap();
    let mut config = SpaceConfig::new(aperture, byte, 1);
    config.reserved.push(IovaRange::new(Iova::new(1 << 39), u64::MAX - (1 << 39)).unwrap());
    let space = IovaSpace::new(&config).unwrap();
    assert!(matches!(space.alloc(&platform, 0, ANYWHERE), Err(IovaError::Empty)));
    let range = space.alloc(&platform, 3, ANYWHERE).unwrap();
    assert_eq!(space.free(&platform, range), Ok(()));
}

/// A size that is no longer wanted gives way to one that is.
#[test]
fn large_ranges_do_not_hold_the_budget_for_ever() {
    let platform = Chosen::new(1);
    let space = IovaSpace::new(&config(1, 1 << 30, 1)).unwrap();
    let large: Vec<_> = (0..16).map(|_| alloc(&space, &platform, 512, ANYWHERE).unwrap()).collect();
    large.into_iter().for_each(|range| free(&space, &platform, range).unwrap());
    let small: Vec<_> = (0..4096).map(|_| alloc(&space, &platform, 1, ANYWHERE).unwrap()).collect();
    small.iter().for_each(|range| free(&space, &platform, *range).unwrap());
    // Nearly all of the small ones are kept now: the next ones come from there, not from new addresses.
    let again: Vec<_> = (0..1024).map(|_| alloc(&space, &platform, 1, ANYWHERE).unwrap()).collect();
    assert!(again.iter().all(|range| small.contains(range)));
}

/// Ranges sent to a CPU that does nothing any more pile up to its share at the most.
#[test]
fn an_idle_owner_s_remote_free_queue_is_bounded() {
    let platform = Chosen::new(2);
    let space = IovaSpace::new(&config(1, 1 << 30, 2)).unwrap();
    let ranges: Vec<_> = (0..4096).map(|_| alloc(&space, platform.be(0), 64, ANYWHERE).unwrap()).collect();
    ranges.into_iter().for_each(|range| free(&space, platform.be(1), range).unwrap());
    let usage = space.usage();
    assert!(usage.taken <= 3 * SpaceConfig::CACHE_BYTES, "{usage:?}");
    space.drain_all(&platform);
    assert_eq!(space.usage().taken, 0);
}

/// Devices that reach all addresses leave the low zone to those that do not, to the last page above it.
#[test]
fn the_low_zone_is_used_last() {
    let platform = Chosen::new(1);
    let low_pages = (1 << 20) - 1;
    let space = IovaSpace::new(&config(1, low_pages + 1000, 1)).unwrap();
    for n in 0..1000 {
        let range = alloc(&space, &platform, 1, ANYWHERE).unwrap();
        assert!(range.start().get() >= 1 << 32, "allocation {n} is low");
    }
    assert!(alloc(&space, &platform, 1, ANYWHERE).unwrap().start().get() < 1 << 32);
}

#[test]
fn odd_configurations_are_survived() {
    let platform = Chosen::new(0);
    for cpus in [0, 5000] {
        let space = IovaSpace::new(&config(1, 100, cpus)).unwrap();
        let range = alloc(&space, &platform, 3, ANYWHERE).unwrap();
        free(&space, &platform, range).unwrap();
        assert_eq!(space.usage().taken, 0);
        assert!(matches!(space.alloc(&platform, 0, ANYWHERE), Err(IovaError::Empty)));
        for (len, limit) in
            [(u64::MAX, u64::MAX), (PAGE, 0), (PAGE, PAGE), (1 << 62, u64::MAX), (1 << 61, 1 << 62)]
        {
            let error = space.alloc(&platform, len, Iova::new(limit)).unwrap_err();
            assert!(matches!(error, IovaError::Exhausted { len: named, .. } if named == len), "{error}");
        }
    }
    let top = IovaRange::from_bounds(Iova::new(1 << 63), ANYWHERE).unwrap();
    let space = IovaSpace::new(&SpaceConfig::new(top, PageSize::SIZE_4K, 1)).unwrap();
    let platform = Chosen::new(1);
    let range = alloc(&space, &platform, 1, ANYWHERE).unwrap();
    assert_eq!(range.last(), ANYWHERE);
    free(&space, &platform, range).unwrap();
    let mut none = config(1, 100, 1);
    none.cache_bytes = 0;
    let space = IovaSpace::new(&none).unwrap();
    let range = alloc(&space, &platform, 1, ANYWHERE).unwrap();
    free(&space, &platform, range).unwrap();
    assert!(space.usage().cached <= 4 * PAGE);
}

/// Whatever the order in which CPUs fetch: what one has lies apart from what the others have. So the
/// lines that hardware fetches ahead for it are its own.
#[test]
fn ranges_of_different_cpus_do_not_alternate() {
    let cpus = 4;
    for pages in [1, 16] {
        let platform = Chosen::new(cpus);
        let space = IovaSpace::new(&config(1 << 20, 1 << 24, cpus)).unwrap();
        let mut spans = vec![(u64::MAX, 0); cpus];
        for _ in 0..300 {
            for (cpu, (low, high)) in spans.iter_mut().enumerate() {
                let range = alloc(&space, platform.be(cpu), pages, ANYWHERE).unwrap();
                let first = range.start().get() / PAGE;
                (*low, *high) = (first.min(*low), (first + pages - 1).max(*high));
            }
        }
        let apart = spans.windows(2).all(|pair| pair[0].0 > pair[1].1 + 512);
        assert!(apart, "{pages} pages: {spans:x?}");
    }
}

/// CPUs that fetch in turn from one hole, as below 4 GiB where there are no homes, share no line of range
/// metadata, whose words are for 1, 8 or 64 pages by the size of the ranges, wherever the hole ends.
#[test]
fn cpus_that_fetch_from_one_hole_share_no_line_of_metadata() {
    for (pages, pages_of_word) in [(1, 1), (4, 1), (8, 8), (32, 8), (64, 64), (256, 64)] {
        for offset in [0, 1, 100, 300, 500] {
            let cpus = 3;
            let platform = Chosen::new(cpus);
            let space = IovaSpace::new(&config(1, (1 << 20) - 1 - offset, cpus)).unwrap();
            let mut users = BTreeMap::new();
            for n in 0..40 * cpus {
                let cpu = n % cpus;
                let range = alloc(&space, platform.be(cpu), pages, ANYWHERE).unwrap();
                let line = range.start().get() / PAGE / pages_of_word / 8;
                let user = *users.entry(line).or_insert(cpu);
                assert_eq!(user, cpu, "{pages} pages {offset} below 4 GiB, at {range:?}");
            }
        }
    }
}

/// CPUs that have a page each break up the end of a space alone: there is as much room for large ranges as
/// where one CPU has all of these pages. Below a limit that is so for all sizes that are not cached.
#[test]
fn cpus_with_a_page_each_leave_large_holes() {
    let room = |space: &SpaceConfig, limit: u64, cpus: usize, pages: u64| {
        let (platform, limit) = (Chosen::new(space.cpus), Iova::new(limit));
        let space = IovaSpace::new(space).unwrap();
        for cpu in 0..26 {
            alloc(&space, platform.be(cpu % cpus), 1, limit).unwrap();
        }
        std::iter::from_fn(|| alloc(&space, platform.be(0), pages, limit).ok()).count()
    };
    let mib = 256;
    let [low, bits_36, bits_39, bits_48] = [20, 24, 27, 36].map(|bits| config(1, (1 << bits) - 1, 26));
    let gib_1 = SpaceConfig { low_end: Iova::new(0), ..config(1, 1024 * mib - 1, 26) };
    let all = u64::MAX;
    for (space, limit, sizes) in [
        (&bits_48, (256 << 20) - 1, &[4, 16, 64][..]),
        (&bits_39, u32::MAX.into(), &[4, 16, 64, 256]),
        (&low, u32::MAX.into(), &[4, 16, 64, 256]),
        (&low, all, &[4, 16, 64, 256]),
        (&gib_1, all, &[16, 64]),
        (&bits_36, all, &[512, 1024, 4096]),
        (&bits_39, all, &[4096, 1 << 16]),
    ] {
        for size in sizes {
            let [by_one, by_all] = [1, 26].map(|cpus| room(space, limit, cpus, size * mib));
            assert!(by_one > 0, "{size} MiB below {limit:#x}");
            assert_eq!(by_one, by_all, "{size} MiB below {limit:#x} in {:?}", space.aperture);
        }
    }
}

/// All of the high zone is used before the low one, also by a CPU that finds nothing below its home.
#[test]
fn what_lies_above_a_home_is_used_before_the_low_zone() {
    let (cpus, low_pages, high_pages) = (4, (1 << 20) - 1, 1 << 19);
    let platform = Chosen::new(cpus);
    let space = IovaSpace::new(&config(1, low_pages + high_pages, cpus)).unwrap();
    for n in 0..high_pages {
        let range = alloc(&space, platform.be(3), 1, ANYWHERE).unwrap();
        assert!(range.start().get() >= 1 << 32, "page {n} is low");
    }
    assert_eq!(space.usage().peak_taken, high_pages * PAGE, "no range of the low zone was even looked at");
    assert!(alloc(&space, platform.be(3), 1, ANYWHERE).unwrap().start().get() < 1 << 32);
}
