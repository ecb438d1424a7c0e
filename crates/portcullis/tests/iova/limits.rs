//! Where an address space ends, and what its CPUs keep at the most: of each zone, of what comes back from others, and
//! after all of it was taken back.

use crate::chosen::{ANYWHERE, Chosen, PAGE, alloc, config, free};
use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::iova::{IovaError, IovaSpace, SpaceConfig};

/// All that a space hands out, a page at a time.
fn all(space: &IovaSpace, platform: &Chosen) -> Vec<IovaRange> {
    std::iter::from_fn(|| alloc(space, platform, 1, ANYWHERE).ok()).collect()
}

/// A granule of which a byte is reserved, or lies outside of the aperture, is never handed out; all others are.
#[test]
fn granules_in_part_are_nobodys() {
    let bytes = |first: u64, last: u64| IovaRange::from_bounds(Iova::new(first), Iova::new(last)).unwrap();
    for (cut, reserved) in [
        ((PAGE, 20 * PAGE - 1), (5 * PAGE + 1, 7 * PAGE)),
        ((PAGE + 1, 20 * PAGE), (5 * PAGE, 7 * PAGE - 1)),
        ((1, 20 * PAGE - 2), (6 * PAGE - 1, 6 * PAGE - 1)),
        ((PAGE - 1, 20 * PAGE + 7), (6 * PAGE - 1, 6 * PAGE)),
    ] {
        let (aperture, reserved) = (bytes(cut.0, cut.1), bytes(reserved.0, reserved.1));
        let mut config = SpaceConfig::new(aperture, PageSize::SIZE_4K, 1);
        config.reserved = vec![reserved];
        let (space, platform) = (IovaSpace::new(&config).unwrap(), Chosen::new(1));
        let mut pages: Vec<u64> = all(&space, &platform).iter().map(|range| range.start().get()).collect();
        pages.sort_unstable();
        let open = |page: &u64| {
            let page = bytes(*page, page + (PAGE - 1));
            let apart = page.last() < reserved.start() || reserved.last() < page.start();
            aperture.contains_range(page) && apart
        };
        let expected: Vec<u64> = (0..30).map(|page| page * PAGE).filter(open).collect();
        assert_eq!(pages, expected, "{aperture} without {reserved}");
    }
}

/// More pages than a range's word has room for are refused, or can be freed.
#[test]
fn the_largest_ranges_can_be_freed() {
    let byte = PageSize::from_shift(0).unwrap();
    let aperture = IovaRange::new(Iova::new(0), u64::MAX).unwrap();
    let config = SpaceConfig { ..SpaceConfig::new(aperture, byte, 1) };
    let (space, platform) = (IovaSpace::new(&config).unwrap(), Chosen::new(1));
    for len in [(1 << 50) - 1, 1 << 50, (1 << 50) + 1, 1 << 51, (1 << 52) - 1, 1 << 52, 1 << 53] {
        match space.alloc(&platform, len, ANYWHERE) {
            Ok(range) => assert_eq!((range.len(), space.free(&platform, range)), (len, Ok(()))),
            Err(error) => {
                assert!(matches!(error, IovaError::Exhausted { .. }) && len >= 1 << 50, "{error}")
            }
        }
    }
    assert_eq!(space.usage().taken, space.usage().cached);
}

/// A request that no space of this size can satisfy takes nothing back from other CPUs.
#[test]
fn what_never_fits_disturbs_nobody() {
    let platform = Chosen::new(2);
    let space = IovaSpace::new(&config(1, 1 << 12, 2)).unwrap();
    let kept = alloc(&space, platform.be(1), 1, ANYWHERE).unwrap();
    free(&space, &platform, kept).unwrap();
    for (pages, limit) in [(1 << 13, ANYWHERE), (1 << 40, ANYWHERE), (512, Iova::new(64 * PAGE - 1))] {
        assert!(alloc(&space, platform.be(0), pages, limit).is_err());
        assert_eq!(platform.fences(), 0, "{pages} pages");
    }
    assert!(space.usage().cached > 0);
}

/// A limit is served from the lists of its zone, whatever was freed last; and a range that lies on both sides of a zone's
/// end is in none of them.
#[test]
fn zones_keep_to_themselves() {
    let platform = Chosen::new(1);
    let space = IovaSpace::new(&config(1, 1 << 30, 1)).unwrap();
    let low = Iova::new(u32::MAX.into());
    let [high_range, low_range] = [ANYWHERE, low].map(|limit| alloc(&space, &platform, 1, limit).unwrap());
    free(&space, &platform, low_range).unwrap();
    free(&space, &platform, high_range).unwrap();
    assert_eq!(alloc(&space, &platform, 1, low), Ok(low_range));
    assert_eq!(alloc(&space, &platform, 1, ANYWHERE), Ok(high_range));
    // 512 pages across the end of a low zone that is not aligned, and no others.
    let config = SpaceConfig { low_end: Iova::new(700 * PAGE), ..config(512, 512, 1) };
    let (space, platform) = (IovaSpace::new(&config).unwrap(), Chosen::new(1));
    let below = Iova::new(700 * PAGE - 1);
    for _ in 0..3 {
        let range = alloc(&space, &platform, 512, ANYWHERE).unwrap();
        assert!(alloc(&space, &platform, 512, below).is_err());
        free(&space, &platform, range).unwrap();
        assert!(alloc(&space, &platform, 512, below).is_err());
    }
}

/// What is on its way to another CPU counts as kept, sent or not, and arrives or is taken back.
#[test]
fn what_is_on_its_way_is_accounted_for() {
    let platform = Chosen::new(2);
    let space = IovaSpace::new(&config(1, 1 << 20, 2)).unwrap();
    for count in [1, 3, 31, 32, 33, 100] {
        let ranges: Vec<_> =
            (0..count).map(|_| alloc(&space, platform.be(0), 2, ANYWHERE).unwrap()).collect();
        for (freed, range) in (1..).zip(&ranges) {
            free(&space, platform.be(1), *range).unwrap();
            let usage = space.usage();
            assert_eq!(usage.taken - usage.cached, (count - freed) * 2 * PAGE, "{freed} of {count}");
            assert!(free(&space, platform.be(freed as usize % 3), *range).is_err(), "freed twice");
        }
        if count == 33 {
            space.drain_all(&platform);
            assert_eq!((space.usage().taken, space.usage().cached), (0, 0));
        }
    }
}

/// Whatever mixture of sizes is freed, and wherever, a CPU keeps no more of a zone than it was told.
#[test]
fn a_cpu_keeps_its_share_of_each_zone_at_the_most() {
    const CACHE: u64 = 600 * PAGE;
    let platform = Chosen::new(1);
    let config = SpaceConfig { cache_bytes: CACHE, ..config(1, 1 << 22, 1) };
    let space = IovaSpace::new(&config).unwrap();
    let zones = [ANYWHERE, Iova::new(u32::MAX as u64)];
    for round in 0..4 {
        for (before, limit) in (0..).zip(zones) {
            for order in [0, 6, 2, 9, 1, 4, 0, 8, 3] {
                let count = (2048 >> order).min(900);
                let ranges: Vec<_> =
                    (0..count).map(|_| alloc(&space, &platform, 1 << order, limit).unwrap()).collect();
                // Taken in blocks, of which the rest is kept.
                ranges.iter().for_each(|range| free(&space, &platform, *range).unwrap());
                let most = if round == 0 { before + 1 } else { zones.len() as u64 } * CACHE;
                assert!(space.usage().cached <= most, "{order} {:?}", space.usage());
                assert!(ranges.iter().all(|range| free(&space, &platform, *range).is_err()), "twice");
            }
        }
        // After a spill or without, nothing is handed out twice.
        let mut again: Vec<_> = (0..900)
            .map(|n| alloc(&space, &platform, 1 << (n % 7), zones[n % zones.len()]).unwrap())
            .collect();
        again.sort_unstable_by_key(|range| range.start());
        assert!(again.windows(2).all(|pair| pair[0].last() < pair[1].start()));
        again.into_iter().for_each(|range| free(&space, &platform, range).unwrap());
    }
    space.drain_all(&platform);
    assert_eq!((space.usage().taken, space.usage().cached), (0, 0));
}

/// All CPUs together keep an eighth of a zone, however little that is.
#[test]
fn a_small_zone_is_not_hoarded() {
    for cpus in [1, 4] {
        let (platform, pages) = (Chosen::new(cpus), 4096);
        let space = IovaSpace::new(&config(0, pages, cpus)).unwrap();
        for cpu in 0..cpus {
            platform.be(cpu);
            let ranges: Vec<_> =
                (0..pages / 8).map(|_| alloc(&space, &platform, 1, ANYWHERE).unwrap()).collect();
            ranges.into_iter().for_each(|range| free(&space, &platform, range).unwrap());
            assert!(space.usage().cached <= (cpu as u64 + 1) * (pages / 8 / cpus as u64) * PAGE);
        }
    }
}

/// A zone is small by its own bounds, wherever the other one ends.
#[test]
fn a_small_zone_beside_a_large_one_is_not_hoarded() {
    let pages = |cpu: u64, zone: u64| (cpu + 1) * (zone / 8 / 2) * PAGE;
    for (low, high) in [(1 << 20, 1024), (1024, 1 << 20), (2048, 2048)] {
        let platform = Chosen::new(2);
        let low_end = Iova::new(((1 << 20) + low) * PAGE);
        let config = SpaceConfig { low_end, ..config(1 << 20, low + high, 2) };
        let space = IovaSpace::new(&config).unwrap();
        let (zone, limit) = if low > high { (high, ANYWHERE) } else { (low, Iova::new(low_end.get() - 1)) };
        for cpu in 0..2 {
            platform.be(cpu);
            let ranges: Vec<_> =
                (0..zone * 3 / 8).map(|_| alloc(&space, &platform, 1, limit).unwrap()).collect();
            ranges.into_iter().for_each(|range| free(&space, &platform, range).unwrap());
            assert!(space.usage().cached <= pages(cpu as u64, zone), "{low} {high}: {:?}", space.usage());
        }
    }
}

/// The room on the way back to a CPU does not wear out: not as it receives, nor as all is taken back.
#[test]
fn a_remote_free_queue_does_not_wear_out() {
    for flush in [false, true] {
        let platform = Chosen::new(2);
        let config = SpaceConfig { cache_bytes: 512 * PAGE, ..config(1, (1 << 20) - 1, 2) };
        let space = IovaSpace::new(&config).unwrap();
        for round in 0..40 {
            let mine: Vec<_> = (0..64).map(|_| alloc(&space, platform.be(0), 1, ANYWHERE).unwrap()).collect();
            mine.iter().for_each(|range| free(&space, platform.be(1), *range).unwrap());
            let usage = space.usage();
            // Nothing went to the bitmap: 64 and what else the first CPU fetched.
            assert!(usage.cached >= 64 * PAGE, "round {round}: {usage:?}");
            if flush {
                space.drain_all(&platform);
            }
        }
    }
}
