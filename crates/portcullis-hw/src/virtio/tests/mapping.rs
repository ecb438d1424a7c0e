//! Maps, unmaps and syncs.

use super::*;

#[test]
fn pieces_are_what_is_contiguous_and_go_with_one_doorbell() {
    let bench = Bench::new();
    bench.map(16, &[100, 101, 102, 200, 300, 301, 5]);
    assert_eq!(bench.mapped(), [bounds(16, 3), bounds(19, 1), bounds(20, 2), bounds(22, 1)]);
    assert_eq!((bench.requests(), bench.fake.device().doorbells), (alloc::vec![3; 4], 1));
    let mut gather = Gather::new();
    assert_eq!(bench.unmap(16, 7, &mut gather).bytes, 7 * PAGE);
    assert_eq!(bench.mapped().len(), 4, "an unmap sends nothing");
    bench.mapper.sync(&gather).unwrap();
    assert_eq!((bench.mapped(), bench.requests()), (Vec::new(), alloc::vec![4]));
    assert_eq!(bench.fake.device().doorbells, 2, "neighbours are one request");
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.requests(), [], "there is nothing more");
}

/// Requests name a first and a last address, so alignment does not enlarge a range.
#[test]
fn a_run_across_a_large_border_is_one_request_for_just_its_addresses() {
    let bench = Bench::new();
    for (page, pages) in [(453, 64), (511, 2), (512, 512), (700, 1000), ((1 << 18) - 1, 2)] {
        bench.map(page - 1, &[1]);
        bench.map(page + pages, &[9]);
        bench.map(page, &(10_000..10_000 + pages).collect::<Vec<_>>());
        bench.requests();
        let mut gather = Gather::new();
        assert_eq!(bench.unmap(page, pages, &mut gather).bytes, pages * PAGE);
        bench.mapper.sync(&gather).unwrap();
        assert_eq!(bench.requests(), [4], "{page}, {pages} pages");
        assert_eq!(bench.mapped(), [bounds(page - 1, 1), bounds(page + pages, 1)]);
        [page - 1, page + pages]
            .iter()
            .for_each(|page| assert_eq!(bench.unmap(*page, 1, &mut gather).bytes, PAGE));
        bench.mapper.sync(&Gather::everything()).unwrap();
    }
}

#[test]
fn a_flush_sends_together_what_unmaps_have_left_and_spares_what_is_mapped() {
    let bench = Bench::new();
    // A gather may cover gaps between its ranges.
    (0..100).for_each(|index| bench.map(16 + index * 2, &[index * 3]));
    bench.fake.device().doorbells = 0;
    let mut gather = Gather::new();
    (0..100).filter(|index| index % 2 == 0).for_each(|index| {
        assert_eq!(bench.unmap(16 + index * 2, 1, &mut gather).bytes, PAGE);
    });
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped().len(), 50);
    assert_eq!(bench.fake.device().doorbells, 1);
    (0..100).filter(|index| index % 2 == 1).for_each(|index| {
        let _ = bench.unmap(16 + index * 2, 1, &mut Gather::new());
    });
    bench.mapper.sync(&Gather::everything()).unwrap();
    assert_eq!((bench.mapped().len(), bench.fake.device().doorbells), (0, 2));
}

#[test]
fn a_sync_sends_what_its_ranges_have_and_leaves_the_rest() {
    let bench = Bench::new();
    for page in [16, 18, 20, 22] {
        bench.map(page, &[page]);
    }
    let [mut first, second, third] = [16, 18, 20].map(|page| {
        let mut gather = Gather::new();
        assert_eq!(bench.unmap(page, 1, &mut gather).bytes, PAGE);
        gather
    });
    first.merge(&third);
    bench.mapper.sync(&first).unwrap();
    assert_eq!(bench.mapped(), [bounds(18, 1), bounds(22, 1)]);
    bench.mapper.sync(&second).unwrap();
    assert_eq!(bench.mapped(), [bounds(22, 1)]);
}

#[test]
fn what_is_stale_is_removed_before_its_addresses_are_mapped_again() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    let _ = bench.unmap(16, 1, &mut Gather::new());
    bench.map(16, &[2, 3]);
    assert_eq!((bench.mapped(), bench.requests()), (alloc::vec![bounds(16, 2)], alloc::vec![3, 4, 3]));
    // A mapped address is in use, also for a list that runs into it.
    let mut gather = Gather::new();
    let twice = bench.map_in(15, &[7, 9, 11], &mut gather);
    assert_eq!(twice, Err(MapError::AlreadyMapped { at: Iova::new(16 * PAGE) }));
    // The error names the list's own address, even if the old piece begins before it.
    let within = bench.map_in(17, &[7], &mut gather);
    assert_eq!(within, Err(MapError::AlreadyMapped { at: Iova::new(17 * PAGE) }));
    assert!(gather.is_empty());
}

#[test]
fn a_list_that_is_refused_half_way_leaves_nothing_mapped() {
    type Refused = (u8, fn(MapError) -> bool);
    let refused: [Refused; 6] = [
        (answer::NOMEM, |error| error == MapError::OutOfMemory),
        (answer::RANGE, |error| matches!(error, MapError::BeyondAperture { .. })),
        (answer::INVAL, |error| matches!(error, MapError::AlreadyMapped { .. })),
        (answer::NOENT, |error| error == MapError::Unconfirmed),
        (3, |error| error == MapError::Unconfirmed),
        (0xff, |error| error == MapError::Unconfirmed),
    ];
    for (status, expected) in refused {
        // The last of a batch, one in the second, and another's mapping behind the list.
        for (pages, after) in [(4_u64, 3), (100, 80)] {
            let bench = Bench::new();
            bench.map(16 + pages, &[1]);
            bench.fake.device().refuses = Some((3, after, status));
            let memory: Vec<_> = (0..pages).map(|page| 100 + page * 2).collect();
            let mut gather = Gather::new();
            let error = bench.map_in(16, &memory, &mut gather).unwrap_err();
            assert!(expected(error), "{error}");
            assert!(!gather.is_empty());
            bench.mapper.sync(&gather).unwrap();
            assert_eq!(bench.mapped(), [bounds(16 + pages, 1)], "{status} {pages}");
            bench.fake.device().refuses = None;
            bench.map(16, &memory);
        }
    }
}

#[test]
fn a_second_batch_that_meets_another_mapping_takes_back_the_first_and_not_that() {
    let bench = Bench::new();
    bench.map(16 + 90, &[1]);
    let memory: Vec<_> = (0..100_u64).map(|page| 100 + page * 2).collect();
    let mut gather = Gather::new();
    let error = bench.map_in(16, &memory, &mut gather).unwrap_err();
    assert_eq!(error, MapError::AlreadyMapped { at: Iova::new((16 + 90) * PAGE) });
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), [bounds(16 + 90, 1)]);
}

#[test]
fn malformed_lists_change_nothing() {
    let bench = Bench::new();
    let try_map = |range: IovaRange, list: &[(u64, u64)]| {
        let list = list.iter().map(|(phys, len)| (PhysAddr::new(*phys), *len));
        let mut gather = Gather::new();
        // SAFETY: there is no memory.
        let mapped =
            unsafe { bench.mapper.map(&bench.platform, range, list, Permissions::READ.into(), &mut gather) };
        assert!(gather.is_empty());
        mapped.unwrap_err()
    };
    let wrong = |range, list| MapError::Length { range, list };
    assert_eq!(try_map(range(1, 3), &[(0, PAGE)]), wrong(range(1, 3), PAGE));
    assert_eq!(try_map(range(1, 1), &[]), wrong(range(1, 1), 0));
    assert_eq!(try_map(range(1, 1), &[(0, PAGE), (PAGE, PAGE)]), wrong(range(1, 1), 2 * PAGE));
    assert!(matches!(try_map(range(1, 1), &[(0x800, PAGE)]), MapError::Misaligned { .. }));
    assert!(matches!(try_map(range(1, 1), &[(0, 0x800), (0, 0x800)]), MapError::Misaligned { .. }));
    let last = u64::MAX - (PAGE - 1);
    assert!(matches!(try_map(range(1, 2), &[(last, 2 * PAGE)]), MapError::BeyondPhysical { .. }));
    assert!(matches!(try_map(range((1 << 27) - 1, 2), &[]), MapError::BeyondAperture { .. }));
    assert_eq!((bench.mapped(), bench.requests()), (Vec::new(), Vec::new()));
    // Memory up to the last address, and a list whose run would wrap.
    let mut gather = Gather::new();
    let list = [(PhysAddr::new(last), PAGE), (PhysAddr::new(0), PAGE)];
    // SAFETY: there is no memory.
    unsafe { bench.mapper.map(&bench.platform, range(1, 2), list, Permissions::READ.into(), &mut gather) }
        .unwrap();
    assert_eq!(bench.mapped(), [bounds(1, 1), bounds(2, 1)]);
}

#[test]
fn a_part_of_a_piece_is_kept_and_still_there() {
    let bench = Bench::new();
    bench.map(16, &[1, 2, 3, 4]);
    bench.map(20, &[9]);
    let mut gather = Gather::new();
    let unmapped = bench.unmap(18, 3, &mut gather);
    assert_eq!((unmapped.bytes, unmapped.kept), (PAGE, 2 * PAGE));
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), [bounds(16, 4)]);
    assert_eq!(bench.unmap(16, 5, &mut gather), Unmapped::of(range(16, 5), 4 * PAGE));
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), []);
}

#[test]
fn an_unmap_that_is_refused_stays_unconfirmed_until_it_is_not() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    bench.fake.device().refuses = Some((4, 0, 3));
    let mut gather = Gather::new();
    let _ = bench.unmap(16, 1, &mut gather);
    for _ in 0..2 {
        assert_eq!(bench.mapper.sync(&gather), Err(InvalidationError::Rejected { code: 3 }));
        assert_eq!(bench.map_in(16, &[2], &mut Gather::new()), Err(MapError::Unconfirmed));
    }
    bench.fake.device().refuses = None;
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), []);
}

#[test]
fn a_device_that_does_not_answer_is_an_error_and_late_answers_make_it_good() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    bench.requests();
    bench.fake.device().holds = true;
    // A map that may still take effect.
    let mut late = Gather::new();
    assert_eq!(bench.map_in(32, &[2, 4], &mut late), Err(MapError::Unconfirmed));
    let mut gather = Gather::new();
    let _ = bench.unmap(16, 1, &mut gather);
    for gather in [&gather, &late, &Gather::everything()] {
        assert!(matches!(bench.mapper.sync(gather), Err(InvalidationError::TimedOut { .. })));
    }
    assert!(matches!(bench.unit.detach(DeviceId(ENDPOINT)), Err(UnitError::TimedOut { .. })));
    assert!(matches!(bench.mapper.attach(DeviceId(OTHER)), Err(UnitError::TimedOut { .. })));
    // Nothing was sent that the late map could follow.
    assert_eq!(bench.requests(), []);
    bench.fake.catch_up();
    assert_eq!((bench.requests(), bench.mapped().len()), (alloc::vec![3, 3], 3));
    bench.fake.device().holds = false;
    bench.mapper.sync(&late).unwrap();
    assert_eq!(bench.mapped(), [bounds(16, 1)]);
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), []);
}

#[test]
fn a_late_unmap_takes_nothing_that_was_mapped_after_it() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    let mut gather = Gather::new();
    let _ = bench.unmap(16, 1, &mut gather);
    bench.fake.device().holds = true;
    assert!(matches!(bench.mapper.sync(&gather), Err(InvalidationError::TimedOut { .. })));
    bench.fake.device().holds = false;
    // At the doorbell of the next request the device would carry out both, in any order.
    assert!(matches!(bench.mapper.sync(&gather), Err(InvalidationError::TimedOut { .. })));
    bench.fake.catch_up();
    bench.mapper.sync(&gather).unwrap();
    bench.map(16, &[2]);
    assert_eq!(bench.mapped(), [bounds(16, 1)]);
}

#[test]
fn a_domain_that_the_device_has_lost_has_nothing_mapped() {
    let bench = Bench::new();
    bench.map(16, &[1]);
    let mut gather = Gather::new();
    let _ = bench.unmap(16, 1, &mut gather);
    bench.fake.device().domains.clear();
    bench.mapper.sync(&gather).unwrap();
}

#[test]
fn a_sync_waits_for_what_another_cpu_has_asked_for() {
    let bench = Arc::new(Bench::new());
    bench.map(16, &[1]);
    let _ = bench.unmap(16, 1, &mut Gather::new());
    bench.fake.device().holds = true;
    let other = Arc::clone(&bench);
    let other = spawn(move || other.mapper.sync(&Gather::everything()).unwrap());
    until_held(&bench.fake);
    let everything = Gather::everything();
    assert!(matches!(bench.mapper.sync(&everything), Err(InvalidationError::TimedOut { .. })));
    bench.fake.catch_up();
    other.join().unwrap();
    bench.mapper.sync(&everything).unwrap();
    assert_eq!(bench.requests(), [3, 4], "once");
}

#[test]
fn what_is_unmapped_while_it_is_being_mapped_is_removed_afterwards() {
    let bench = Arc::new(Bench::new());
    bench.fake.device().holds = true;
    let other = Arc::clone(&bench);
    let other = spawn(move || other.map(16, &[1]));
    until_held(&bench.fake);
    let mut gather = Gather::new();
    assert_eq!(bench.unmap(16, 1, &mut gather).bytes, PAGE);
    assert!(matches!(bench.mapper.sync(&gather), Err(InvalidationError::TimedOut { .. })));
    // The last endpoint is not detached, either: a late request would find its domain anew.
    let before = bench.fake.device().doorbells;
    assert!(matches!(bench.unit.detach(DeviceId(ENDPOINT)), Err(UnitError::TimedOut { .. })));
    // And nothing more is sent meanwhile.
    bench.map(40, &[2]);
    assert_eq!(bench.fake.device().doorbells, before);
    bench.fake.catch_up();
    other.join().unwrap();
    bench.fake.device().holds = false;
    bench.mapper.sync(&gather).unwrap();
    assert_eq!(bench.mapped(), []);
    bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
}

/// With one slot each request has its own doorbell, otherwise all share one; pieces behind a refused one are refused, too.
#[test]
fn the_address_of_the_first_refused_piece_is_told() {
    for (size, first) in [(4, 0), (4, 2), (4, 3), (256, 0), (256, 1), (256, 3)] {
        let fake = Fake::new();
        fake.device().queue_sizes[0] = size;
        let unit = Arc::new(start(&fake).unwrap());
        let mapper = unit.mapper(DomainId(1), Vec::new()).unwrap();
        mapper.attach(DeviceId(ENDPOINT)).unwrap();
        fake.device().refuses = Some((3, first, answer::INVAL));
        let list = [1, 3, 5, 7].map(|frame| (PhysAddr::new(frame * PAGE), PAGE));
        let (mut gather, platform) = (Gather::new(), StdPlatform::new());
        // SAFETY: there is no memory.
        let refused =
            unsafe { mapper.map(&platform, range(16, 4), list, Permissions::READ.into(), &mut gather) };
        let at = Iova::new((16 + u64::from(first)) * PAGE);
        assert_eq!(refused, Err(MapError::AlreadyMapped { at }), "{size}");
    }
}

/// A map request (VIRTIO 1.3, section 5.13.6.7): addresses, memory and rights, at the map or, in a domain without an endpoint, with the
/// first one; and again after the last has gone.
#[test]
fn a_mapping_has_its_memory_and_its_rights() {
    for is_live in [true, false] {
        let bench = if is_live { Bench::new() } else { Bench::detached() };
        let rights = [(Permissions::READ, 1), (Permissions::WRITE, 2), (Permissions::READ_WRITE, 3)];
        let mut wanted = Vec::new();
        for (permissions, flags) in rights {
            let page = 16 * u64::from(flags);
            let list = [(100 + page, 2), (300, 1), (301, 1), (page, 1)];
            let list = list.map(|(frame, pages)| (PhysAddr::new(frame * PAGE), pages * PAGE));
            let mut gather = Gather::new();
            // SAFETY: there is no memory.
            let mapped = unsafe {
                bench.mapper.map(&bench.platform, range(page, 5), list, permissions.into(), &mut gather)
            };
            assert_eq!(mapped, Ok(()));
            for (from, pages, frame) in [(page, 2, 100 + page), (page + 2, 2, 300), (page + 4, 1, page)] {
                let (first, last) = bounds(from, pages);
                wanted.push((first, (last, frame * PAGE, flags)));
            }
        }
        let told = || bench.fake.device().domains.get(&1).cloned().unwrap_or_default();
        if !is_live {
            assert_eq!(told(), [].into());
            bench.mapper.attach(DeviceId(ENDPOINT)).unwrap();
        }
        assert_eq!(told(), wanted.iter().copied().collect());
        bench.unit.detach(DeviceId(ENDPOINT)).unwrap();
        assert_eq!(told(), [].into());
        bench.mapper.attach(DeviceId(OTHER)).unwrap();
        assert_eq!(told(), wanted.iter().copied().collect());
    }
}

/// Four CPUs map, unmap and flush, and the device answers in any order: after each sync nothing of its range is mapped, and all else is.
#[test]
fn cpus_share_the_queue_and_no_mapping_is_lost_or_left() {
    let bench = Arc::new(Bench::new());
    bench.fake.device().backwards = true;
    let rounds = if cfg!(debug_assertions) || cfg!(miri) { 40 } else { 400 };
    let work = |number: u64| {
        let bench = Arc::clone(&bench);
        let work = move || {
            let platform = StdPlatform::new();
            for round in 0..rounds {
                let (page, pages) = (1000 * (number + 1) + round % 7 * 100, 1 + (round * 13 + number) % 90);
                let list = (0..pages).map(|frame| (PhysAddr::new(frame * 2 * PAGE), PAGE));
                let mut gather = Gather::new();
                let range = range(page, pages);
                // SAFETY: there is no memory.
                unsafe { bench.mapper.map(&platform, range, list, Permissions::READ.into(), &mut gather) }
                    .unwrap();
                let inside = || {
                    let inside = |(first, last): &(u64, u64)| {
                        range.contains(Iova::new(*first)) && range.contains(Iova::new(*last))
                    };
                    bench.mapped().iter().filter(|mapping| inside(mapping)).count() as u64
                };
                assert_eq!(inside(), pages);
                assert_eq!(bench.mapper.unmap(&platform, range, &mut gather).bytes, pages * PAGE);
                let everything = Gather::everything();
                bench.mapper.sync(if round % 3 == 0 { &everything } else { &gather }).unwrap();
                assert_eq!(inside(), 0);
            }
        };
        spawn(work)
    };
    let threads: Vec<_> = (0..4).map(work).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(bench.mapped(), []);
}
