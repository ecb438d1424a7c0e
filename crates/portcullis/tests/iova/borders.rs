//! Where zones and limits end, to the byte; and what is granted to a CPU's lists, sent to it and taken from it, to the range.

use crate::chosen::{ANYWHERE, Chosen, PAGE, alloc, config, free};
use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::iova::{ArenaError, IovaSpace, RingArena, RingConfig, SpaceConfig};

/// The page behind the spaces here, and the first that is not in the low zone: ranges of 4 pages and more lie across it.
const END: u64 = 256;
const LOW_END: u64 = 106;

#[test]
fn a_range_says_its_first_and_its_last_address() {
    let said = |start, len| IovaRange::new(Iova::new(start), len).unwrap().to_string();
    assert_eq!(said(0x1000, 0x2000), "[0x1000, 0x2fff]");
    assert_eq!(said(0, 1), "[0x0, 0x0]");
    assert_eq!(said(u64::MAX, 1), "[0xffffffffffffffff, 0xffffffffffffffff]");
}

/// Whatever the lists hold, a limit gets all that ends at or before it, and nothing that ends behind it.
#[test]
fn a_limit_holds_to_the_byte_wherever_it_lies() {
    for (pages, reversed) in [1, 2, 3, 4, 8].into_iter().flat_map(|pages| [(pages, false), (pages, true)]) {
        let platform = Chosen::new(1);
        let low_end = Iova::new(LOW_END * PAGE);
        let config = SpaceConfig { low_end, ..config(1, END - 1, 1) };
        let space = IovaSpace::new(&config).unwrap();
        let all = |limit| -> Vec<IovaRange> {
            std::iter::from_fn(|| alloc(&space, &platform, pages, limit).ok()).collect()
        };
        // The lists keep what is freed last.
        let refill = |mut ranges: Vec<IovaRange>| {
            ranges.sort_unstable_by_key(|range| range.start());
            if reversed {
                ranges.reverse();
            }
            ranges.into_iter().for_each(|range| free(&space, &platform, range).unwrap());
        };
        for end in [LOW_END, END].into_iter().flat_map(|end| (end - 9).max(pages)..=(end + 9)) {
            for (last, whole) in [(end * PAGE - 2, end - 1), (end * PAGE - 1, end), (end * PAGE, end)] {
                refill(all(ANYWHERE));
                let limit = Iova::new(last);
                let ranges = all(limit);
                let below = ranges.iter().all(|range| range.last() <= limit);
                assert!(below, "{ranges:?} up to {limit}");
                // All that begin at a multiple of their size, but for the first: page 0 is not in the space.
                let size = pages.next_power_of_two();
                let fits = |first: u64| first > 0 && first + pages <= whole.min(END);
                let most = (0..END).step_by(size as usize).filter(|first| fits(*first)).count();
                assert_eq!(ranges.len(), most, "{pages} pages up to {limit}");
                refill(ranges);
            }
        }
        space.drain_all(&platform);
        assert_eq!(space.usage().taken, 0);
    }
}

/// A limit above the low zone, however little, is served from above it first.
#[test]
fn only_its_own_limit_prefers_the_low_zone() {
    let low_end = Iova::new(LOW_END * PAGE);
    for above in [1, 2, 70, END - LOW_END - 1, END - LOW_END] {
        let platform = Chosen::new(1);
        let config = SpaceConfig { low_end, ..config(1, END - 1, 1) };
        let space = IovaSpace::new(&config).unwrap();
        let low = alloc(&space, &platform, 1, Iova::new(LOW_END * PAGE - 1)).unwrap();
        free(&space, &platform, low).unwrap();
        let range = alloc(&space, &platform, 1, Iova::new((LOW_END + above) * PAGE - 1)).unwrap();
        assert_eq!(range.start().get(), (LOW_END + above - 1) * PAGE, "{low} is kept");
    }
}

/// A device that reaches no more than the low zone is served from lists, whatever the lists of the other hold.
#[test]
fn the_low_zone_has_lists_while_the_other_is_in_use() {
    let platform = Chosen::new(1);
    let low_end = Iova::new(LOW_END * PAGE);
    let config = SpaceConfig { low_end, ..config(1, END - 1, 1) };
    let space = IovaSpace::new(&config).unwrap();
    let [high, low] = [ANYWHERE, Iova::new(LOW_END * PAGE - 1)].map(|limit| {
        let range = alloc(&space, &platform, 1, limit).unwrap();
        free(&space, &platform, range).unwrap();
        let taken = space.usage().taken;
        assert_eq!((alloc(&space, &platform, 1, limit), space.usage().taken), (Ok(range), taken));
        free(&space, &platform, range).unwrap();
        range
    });
    assert!(low.last() < low_end && low_end <= high.start());
    assert!(space.usage().cached >= 2 * PAGE);
}

/// At once a list fetches a sixteenth of what its CPU keeps at the most.
#[test]
fn a_list_fetches_a_sixteenth_at_once() {
    let platform = Chosen::new(1);
    let config = SpaceConfig { cache_bytes: 64 * PAGE, ..config(1, 1 << 22, 1) };
    let space = IovaSpace::new(&config).unwrap();
    for order in [0, 1, 2, 5] {
        let mut taken = space.usage().taken;
        for _ in 0..200 {
            alloc(&space, &platform, 1 << order, ANYWHERE).unwrap();
            let fetched = space.usage().taken - taken;
            assert!(fetched <= (4 * PAGE).max(PAGE << order), "{fetched} bytes at once");
            taken += fetched;
        }
    }
}

/// A zone's budget is its own: what comes back to the other does not depend on it.
#[test]
fn a_small_low_zone_does_not_keep_others_ranges_from_their_owner() {
    let platform = Chosen::new(2);
    let low_end = Iova::new(8 * PAGE);
    let config = SpaceConfig { low_end, ..config(1, 1 << 20, 2) };
    let space = IovaSpace::new(&config).unwrap();
    let mine: Vec<_> = (0..100).map(|_| alloc(&space, platform.be(0), 1, ANYWHERE).unwrap()).collect();
    let before = space.usage();
    mine.iter().for_each(|range| free(&space, platform.be(1), *range).unwrap());
    let after = space.usage();
    assert_eq!((after.taken, after.cached), (before.taken, before.cached + 100 * PAGE));
}

/// What a list was granted and does not use goes to another, and comes back to it as it is needed.
#[test]
fn a_list_whose_room_went_to_another_gets_room_again() {
    let platform = Chosen::new(1);
    // It ends with a whole line of range metadata, so that no fetch gives a part back.
    let config = SpaceConfig { cache_bytes: 256 * PAGE, ..config(1, (1 << 22) - 1, 1) };
    let space = IovaSpace::new(&config).unwrap();
    let take = |count: u32, pages| -> Vec<_> {
        (0..count).map(|_| alloc(&space, &platform, pages, ANYWHERE).unwrap()).collect()
    };
    let (singles, fours) = (take(250, 1), take(60, 4));
    singles.iter().for_each(|range| free(&space, &platform, *range).unwrap());
    let cached = space.usage().cached;
    assert!(cached >= 250 * PAGE, "{cached} bytes are kept of {}", 250 * PAGE);
    // The most that there may be, however it is shared out.
    fours.iter().for_each(|range| free(&space, &platform, *range).unwrap());
    assert!(space.usage().cached <= 256 * PAGE);
}

/// The last pages of a space, where no range of a rounded size fits any more: what is handed out there can be freed.
#[test]
fn exact_sizes_at_the_end_of_a_space_are_taken_back() {
    for (whole, rest) in [(8, 5), (8, 7), (64, 33), (64, 40), (512, 300)] {
        let platform = Chosen::new(1);
        let space = IovaSpace::new(&config(0, whole + rest, 1)).unwrap();
        for _ in 0..3 {
            let ranges = [whole, rest].map(|pages| alloc(&space, &platform, pages, ANYWHERE).unwrap());
            assert_eq!(ranges[1].start().get(), whole * PAGE);
            ranges.iter().for_each(|range| free(&space, &platform, *range).unwrap());
            assert!(free(&space, &platform, ranges[1]).is_err(), "twice");
        }
    }
}

/// The most that was ever taken is that, from the first call on.
#[test]
fn the_peak_is_what_was_taken_at_the_most() {
    let platform = Chosen::new(1);
    let space = IovaSpace::new(&config(1, 1 << 20, 1)).unwrap();
    assert_eq!(space.usage().peak_taken, 0);
    let mut peak = 0;
    for pages in [1, 600, 3, 5000, 1, 700] {
        let range = alloc(&space, &platform, pages, ANYWHERE).unwrap();
        peak = peak.max(space.usage().taken);
        assert_eq!(space.usage().peak_taken, peak);
        free(&space, &platform, range).unwrap();
        assert_eq!(space.usage().peak_taken, peak);
    }
}

/// What lies behind a ring, or across its end, was not reserved: also where its bits end there.
#[test]
fn nothing_behind_a_ring_is_freed_by_it() {
    for granules in [64, 512, 513] {
        let (platform, space) = (Chosen::new(1), IovaSpace::new(&config(0, 1 << 20, 1)).unwrap());
        let mut arena =
            RingArena::new(&space, &platform, &RingConfig::new(granules, PAGE, PageSize::SIZE_4K)).unwrap();
        let all = arena.reserve(u64::from(granules) * PAGE).unwrap();
        let end = Iova::new(all.last().get() + 1);
        for (start, pages) in [(end, 1), (end, 70), (Iova::new(end.get() - PAGE), 2), (all.start(), 1000)] {
            let range = IovaRange::new(start, pages * PAGE).unwrap();
            assert_eq!(arena.free(range), Err(ArenaError::NotReserved { range }));
        }
        arena.free(all).unwrap();
        arena.release(&space, &platform).unwrap();
    }
}

/// Where a space has no room for all the large pages that colours are spread over, rings of different colours still begin
/// at different pages of theirs.
#[test]
fn a_ring_in_a_small_space_keeps_the_pages_between_colours() {
    const LARGE: u64 = 512;
    for colour in 0..4 {
        let (platform, space) = (Chosen::new(1), IovaSpace::new(&config(0, 4 * LARGE, 1)).unwrap());
        let usual = RingConfig::new(16, 64 * PAGE, PageSize::SIZE_4K);
        let config = RingConfig { colour: Some(colour), ..usual };
        let mut arena = RingArena::new(&space, &platform, &config).unwrap();
        assert!(arena.range().len() <= 4 * LARGE * PAGE);
        let ranges: Vec<_> = (0..16).map(|_| arena.reserve(64 * PAGE).unwrap()).collect();
        let lowest = ranges.iter().map(|range| range.start().get()).min().unwrap();
        assert_eq!(lowest - arena.range().start().get(), u64::from(colour) * 5 * PAGE);
        assert!(ranges.iter().all(|range| arena.range().contains_range(*range)));
        ranges.into_iter().for_each(|range| arena.free(range).unwrap());
        arena.release(&space, &platform).unwrap();
    }
}
