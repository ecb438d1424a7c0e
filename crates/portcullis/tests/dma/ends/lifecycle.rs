//! The life of addresses step by step: reserve, link, unlink, confirm, free.

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::domain::{Linked, MapListError, Policy, Reserved, Unlinked};
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::mapper::Mapper;
use portcullis::pgtable::MapError;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::{OpenDomain, OpenMapper, OpenReserved};

use crate::ends::bench::{Bench, PAGE, page};

const ANYWHERE: Iova = Iova::new(u64::MAX);
const BOTH: Permissions = Permissions::READ_WRITE;
const TIMED_OUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 5 };

fn at(range: IovaRange, number: u64) -> IovaRange {
    IovaRange::new(Iova::new(range.start().get() + number * PAGE), PAGE).unwrap()
}

fn lost(bench: &Bench) -> u64 {
    bench.domain.stats().lost_iova_bytes
}

/// Whether a list of as many pages as `range` has gets the addresses of `range` within `tries` maps, all of which stay mapped.
fn comes_back(bench: &Bench, range: IovaRange, tries: usize) -> bool {
    let list: Vec<_> = (0..range.len() / PAGE).map(|number| page(100 + 2 * number)).collect();
    (0..tries).any(|_| bench.domain.open(&list, BOTH, ANYWHERE).unwrap() == range)
}

#[test]
fn a_device_reaches_what_is_linked_until_its_unlink_is_confirmed() {
    let bench = Bench::new(Policy::Strict);
    let list = [page(0), page(2)];
    let len = bench.domain.pages_of(&list).unwrap();
    let reserved = bench.domain.reserve(len, ANYWHERE).unwrap();
    let range = reserved.range();
    assert!(!bench.reaches(range.start()), "nothing is mapped there yet");
    let mut gather = Gather::new();
    let linked = reserved.open(&list, BOTH, &mut gather).map_err(|refused| refused.error).unwrap();
    assert!((0..2).all(|number| bench.reaches(at(range, number).start())));
    // Kept by number for a time.
    let linked = Linked::from_range(&bench.domain, linked.into_range());
    let unlinked = linked.unlink(&mut gather).map_err(|still| still.kept()).unwrap();
    assert_eq!((unlinked.range(), unlinked.is_lost()), (range, false));
    let unlinked = Unlinked::from_range(&bench.domain, unlinked.into_range());
    assert!(bench.reaches(range.start()), "what is cached stays until it is confirmed");
    bench.domain.confirm(&gather).unwrap();
    assert!((0..2).all(|number| !bench.reaches(at(range, number).start())));
    assert!(!comes_back(&bench, range, 4), "they are not free yet");
    unlinked.free();
    assert!(comes_back(&bench, range, 1));
    let stats = bench.domain.stats();
    assert_eq!((stats.maps, stats.unmaps, stats.lost_iova_bytes), (6, 1, 0));
}

#[test]
fn what_was_reserved_is_free_again_without_a_mapping() {
    let bench = Bench::new(Policy::Strict);
    let range = bench.domain.reserve(PAGE, ANYWHERE).unwrap().into_range();
    Reserved::from_range(&bench.domain, range).free();
    assert!(comes_back(&bench, range, 1));
    let stats = bench.domain.stats();
    assert_eq!((stats.maps, stats.unmaps, stats.lost_iova_bytes), (1, 0, 0));
}

#[test]
fn a_token_that_is_dropped_loses_its_addresses_and_says_so() {
    let bench = Bench::new(Policy::Strict);
    let list = [page(0), page(2)];
    let reserve = || bench.domain.reserve(2 * PAGE, ANYWHERE).unwrap();
    let link = || reserve().open(&list, BOTH, &mut Gather::new()).map_err(|refused| refused.error).unwrap();
    let mut ranges = Vec::new();
    let reserved = reserve();
    ranges.push(reserved.range());
    drop(reserved);
    let linked = link();
    ranges.push(linked.range());
    drop(linked);
    assert!(bench.reaches(ranges[1].start()), "it stays mapped");
    let mut gather = Gather::new();
    let unlinked = link().unlink(&mut gather).map_err(|still| still.kept()).unwrap();
    bench.domain.confirm(&gather).unwrap();
    ranges.push(unlinked.range());
    drop(unlinked);
    assert_eq!(lost(&bench), 6 * PAGE);
    assert!(ranges.iter().all(|range| !comes_back(&bench, *range, 8)));
}

/// A caller that keeps addresses by number comes back to what a dropped token has left mapped, also
/// twice.
#[test]
fn what_a_dropped_token_has_left_mapped_is_unlinked_and_its_addresses_stay_lost() {
    let bench = Bench::new(Policy::Strict);
    let linked = bench.domain.reserve(2 * PAGE, ANYWHERE).unwrap();
    let linked = linked.open(&[page(0), page(2)], BOTH, &mut Gather::new());
    let linked = linked.map_err(|refused| refused.error).unwrap();
    let range = linked.range();
    drop(linked);
    assert!(bench.reaches(range.start()), "it stays mapped");
    for _ in 0..2 {
        let mut gather = Gather::new();
        let linked = Linked::from_lost(&bench.domain, range);
        assert_eq!(linked.range(), range);
        let unlinked = linked.unlink(&mut gather).map_err(|still| still.kept()).unwrap();
        assert!(unlinked.is_lost());
        bench.domain.confirm(&gather).unwrap();
        assert!((0..2).all(|number| !bench.reaches(at(range, number).start())));
        unlinked.free();
        drop(Linked::from_lost(&bench.domain, range));
        assert_eq!(lost(&bench), 2 * PAGE, "counted once");
    }
    assert!(!comes_back(&bench, range, 8));
}

#[test]
fn a_list_that_does_not_fit_is_refused_and_its_addresses_are_free() {
    let bench = Bench::new(Policy::Strict);
    let wraps = PhysSegment { len: u64::MAX, ..page(1) };
    let lists: [&[PhysSegment]; 4] = [&[], &[page(0)], &[page(0), page(2), page(4)], &[wraps]];
    for list in lists {
        let reserved = bench.domain.reserve(2 * PAGE, ANYWHERE).unwrap();
        let range = reserved.range();
        let refused = reserved.open(list, BOTH, &mut Gather::new()).expect_err("it does not fit");
        assert!(refused.is_confirmed && !refused.unlinked.is_lost(), "{}", refused.error);
        refused.end();
        assert!(!bench.reaches(range.start()), "nothing of it is mapped");
        let again = bench.domain.reserve(2 * PAGE, ANYWHERE).unwrap();
        assert_eq!(again.range(), range);
        again.free();
    }
    assert_eq!((lost(&bench), bench.domain.stats().maps), (0, 0));
}

/// Why the second piece of a list is refused, after the first was entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// No entry can point to its memory.
    Beyond,
    /// Another's translation is there.
    Occupied,
    /// There is no memory for its table.
    NoTable,
}

#[test]
fn what_was_refused_is_free_or_held_or_lost() {
    // How many invalidations fail, and whether what was entered is confirmed to be gone.
    let cases = [
        (Why::Beyond, 0, true),
        (Why::Occupied, 0, true),
        (Why::Occupied, 1, false),
        // The first is that of a reclaim, which would make room.
        (Why::NoTable, 2, false),
    ];
    for (why, fails, is_confirmed) in cases {
        let bench = Bench::new(Policy::Strict);
        // Two tables' worth.
        let half = 512 * PAGE;
        let reserved = bench.domain.reserve(2 * half, ANYWHERE).unwrap();
        let range = reserved.range();
        let first = PhysSegment { len: half, ..page(1) };
        let second = match why {
            Why::Beyond => PhysSegment { phys: PhysAddr::new(1 << 60), len: half },
            _ => PhysSegment { len: half, ..page(1001) },
        };
        let platform = StdPlatform::new();
        match why {
            Why::Beyond => {}
            Why::Occupied => {
                let stranger = [(page(9).phys, PAGE)];
                bench
                    .domain
                    .mapper()
                    .open(&platform, at(range, 600), stranger, BOTH, &mut Gather::new())
                    .unwrap();
            }
            Why::NoTable => bench.memory.fail_after(4),
        }
        bench.iommu.queue().fail_next(fails, TIMED_OUT);
        let mut gather = Gather::new();
        let refused = reserved.open(&[first, second], BOTH, &mut gather).expect_err("it is refused");
        let is_why = match refused.error {
            MapListError::Map(MapError::BeyondPhysical { .. }) => why == Why::Beyond,
            MapListError::Map(MapError::AlreadyMapped { .. }) => why == Why::Occupied && is_confirmed,
            MapListError::Unconfirmed { error } => error == TIMED_OUT && !is_confirmed,
            _ => false,
        };
        assert!(is_why, "{why:?}: {}", refused.error);
        let is_lost = why == Why::Occupied;
        assert_eq!((refused.is_confirmed, refused.unlinked.is_lost()), (is_confirmed, is_lost), "{why:?}");
        assert_eq!(lost(&bench), if is_lost { 2 * half } else { 0 }, "it is counted at once");
        if is_confirmed {
            refused.end();
        } else {
            // By hand: confirmed later, and freed then.
            assert!(!gather.is_empty());
            bench.domain.confirm(&gather).unwrap();
            refused.unlinked.free();
        }
        assert_eq!(bench.reaches(at(range, 600).start()), is_lost, "the stranger's");
        let again = bench.domain.reserve(2 * half, ANYWHERE).unwrap();
        assert_eq!(again.range() == range, !is_lost, "{why:?}");
        again.free();
        assert_eq!(lost(&bench), if is_lost { 2 * half } else { 0 });
    }
}

#[test]
fn what_is_not_confirmed_is_kept_out_of_use_until_a_flush_is() {
    for is_lost in [false, true] {
        let bench = Bench::new(Policy::Strict);
        let list = [page(0), page(2)];
        let reserved = bench.domain.reserve(2 * PAGE, ANYWHERE).unwrap();
        let linked = reserved.open(&list, BOTH, &mut Gather::new()).map_err(|refused| refused.error).unwrap();
        let range = linked.range();
        assert!((0..2).all(|number| bench.reaches(at(range, number).start())));
        if is_lost {
            // Another removes one of its pages by number, below the domain.
            let platform = StdPlatform::new();
            let unmapped = bench.domain.mapper().unmap(&platform, at(range, 1), &mut Gather::new());
            assert_eq!(unmapped.bytes, PAGE);
        }
        let mut gather = Gather::new();
        let unlinked = linked.unlink(&mut gather).map_err(|still| still.kept()).unwrap();
        assert_eq!(unlinked.is_lost(), is_lost);
        // The domain's timer asks again, too: it fails as long as this looks.
        bench.iommu.queue().fail_next(u64::MAX, TIMED_OUT);
        assert_eq!(bench.domain.confirm(&gather), Err(TIMED_OUT));
        unlinked.quarantine();
        assert!(bench.reaches(range.start()) && bench.reaches(at(range, 1).start()));
        assert!(!comes_back(&bench, range, 4), "not before a flush");
        assert!(bench.domain.exposure().stale_byte_ns > 0, "it counts meanwhile");
        bench.iommu.queue().fail_next(0, TIMED_OUT);
        bench.domain.flush().unwrap();
        assert!(!bench.reaches(range.start()) && !bench.reaches(at(range, 1).start()));
        // It comes back with the CPU's next unmaps, in the order of its free list.
        let again = bench.domain.open(&[page(40)], BOTH, ANYWHERE).unwrap();
        bench.domain.unmap(again).unwrap();
        // The other page went with the one who removed it.
        assert_eq!(lost(&bench), if is_lost { PAGE } else { 0 });
        if is_lost {
            assert!(!comes_back(&bench, range, 8));
        }
    }
}

/// Another caller unmaps a part of a mapping by number, or all of it. The addresses that are lost then are those that the
/// domain's own unmap loses.
#[test]
fn what_another_has_ended_is_counted_as_lost_where_it_is() {
    // A part and the rest are all of it, where the rest is confirmed by then, as it is in a call of the domain's.
    for (pages_ended, by_number, by_tokens) in [(1, 0, 2 * PAGE), (2, 0, 0)] {
        for (by_tokens, expected) in [(false, by_number), (true, by_tokens)] {
            let bench = Bench::new(Policy::Strict);
            let list = [page(0), page(2)];
            let range = bench.domain.open(&list, BOTH, ANYWHERE).unwrap();
            let ended = IovaRange::new(range.start(), pages_ended * PAGE).unwrap();
            bench.domain.unmap(ended).unwrap();
            if by_tokens {
                let mut gather = Gather::new();
                let unlinked = Linked::from_range(&bench.domain, range).unlink(&mut gather).unwrap();
                assert!(unlinked.is_lost());
                bench.domain.confirm(&gather).unwrap();
                unlinked.free();
            } else {
                bench.domain.unmap(range).unwrap_err();
            }
            assert_eq!(lost(&bench), expected, "{pages_ended} of 2, by tokens: {by_tokens}");
        }
    }
}

#[test]
fn a_refused_list_that_is_kept_by_number_is_no_unmap() {
    let bench = Bench::new(Policy::Strict);
    let half = 512 * PAGE;
    let reserved = bench.domain.reserve(2 * half, ANYWHERE).unwrap();
    let list = [PhysSegment { len: half, ..page(1) }, PhysSegment { len: half, ..page(1001) }];
    bench.memory.fail_after(4);
    bench.iommu.queue().fail_next(2, TIMED_OUT);
    let mut gather = Gather::new();
    let refused = reserved.open(&list, BOTH, &mut gather).expect_err("there is no table");
    assert!(!refused.is_confirmed);
    bench.domain.confirm(&gather).unwrap();
    Unlinked::from_range(&bench.domain, refused.unlinked.into_range()).free();
    let stats = bench.domain.stats();
    assert_eq!((stats.maps, stats.unmaps, stats.lost_iova_bytes), (0, 0, 0));
}

/// A part of a large page, for whose split there is no memory at first.
#[test]
fn what_was_still_mapped_is_not_lost_when_it_is_unlinked_again() {
    let bench = Bench::new(Policy::Strict);
    let reserved = bench.domain.reserve(1024 * PAGE, ANYWHERE).unwrap();
    let piece = |phys| PhysSegment { phys: PhysAddr::new(phys), len: 512 * PAGE };
    let list = [piece(0x9_0000_1000), piece(0x9_0040_0000)];
    let linked = reserved.open(&list, BOTH, &mut Gather::new()).unwrap();
    let part = IovaRange::new(linked.into_range().start(), 600 * PAGE).unwrap();
    let mut gather = Gather::new();
    bench.memory.fail_after(1);
    let still = Linked::from_range(&bench.domain, part).unlink(&mut gather).unwrap_err();
    assert_eq!(still.kept(), 88 * PAGE, "{still:?}");
    let unlinked = still.unlink(&mut gather).unwrap();
    assert!(!unlinked.is_lost());
    bench.domain.confirm(&gather).unwrap();
    assert!(!bench.reaches(part.start()) && !bench.reaches(at(part, 599).start()));
    assert_eq!((bench.domain.stats().unmaps, lost(&bench)), (1, 0));
    // A part of what one call took is never free by itself: it waits for the rest.
    unlinked.free();
    let taken = || bench.domain.stats().taken_iova_bytes - bench.domain.stats().cached_iova_bytes;
    assert_eq!((lost(&bench), taken()), (0, 1024 * PAGE));
    let rest = IovaRange::from_bounds(at(part, 600).start(), at(part, 1023).last()).unwrap();
    bench.domain.unmap(rest).unwrap();
    assert_eq!((lost(&bench), taken()), (0, 0));
}
