//! What a driver leaves; hardware that does not confirm.

use portcullis::addr::{Direction, Iova};
use portcullis::dma::{DmaAttributes, DmaUnmapError, Ended, OpsConfig, QueueConfig};
use portcullis::domain::UnmapError;

use super::support::{CONFIGS, Calls, Ops, THRESHOLD, buffer, contents, machine, part, whole};
use crate::queue::world::{BROKEN, PAGE};

/// One mapping of each kind, each of a different part of the buffer, which begins with 0x77. Returns their addresses and lengths.
fn one_of_each(ops: &Ops, memory: &portcullis_model::Buffer) -> Vec<(Iova, u64)> {
    let at = |page: u64, offset, len| part(memory, page * PAGE + offset, len);
    let mut all: Vec<_> = [(0, 16, 64), (2, 0, THRESHOLD), (20, 8, 3 * THRESHOLD), (70, 0, 2 * THRESHOLD)]
        .map(|(page, offset, len)| (ops.maps(at(page, offset, len), Direction::Bidirectional).unwrap(), len))
        .into();
    let lists = [[at(110, 0, PAGE), at(113, 0, PAGE)], [at(120, 8, 64), at(122, 16, 65)]];
    all.extend(lists.map(|list| whole(&ops.maps_list(&list, Direction::Bidirectional).unwrap())));
    let lasting = DmaAttributes { lasting: true, ..DmaAttributes::default() };
    all.push((ops.maps_as(at(130, 0, PAGE), Direction::Bidirectional, lasting).unwrap(), PAGE));
    all
}

/// A queue's mappings have tokens, which are ended once: not by their addresses, and not with what a handle leaves.
#[test]
fn a_handle_ends_nothing_of_a_queue_of_its_device() {
    for config in CONFIGS {
        for (len, drops) in
            [(100, false), (100, true), (2 * THRESHOLD + 50, false), (2 * THRESHOLD + 50, true)]
        {
            let (world, ops) = machine(config);
            let mut queue = world.nic.queue::<portcullis_model::Buffer>(QueueConfig::bounce()).unwrap();
            let mapping = queue.map(buffer(&world, len, 7), Direction::FromDevice).unwrap();
            let iova = mapping.iova();
            assert!(world.writes(iova, b"from it!"));
            assert!(matches!(ops.ends(iova, len), Err(DmaUnmapError::NotMapped { .. })), "{config:?} {len}");
            assert!(ops.syncs_for_cpu(iova, len).is_err() && ops.syncs_for_device(iova, len).is_err());
            let own = buffer(&world, 64, 1);
            let left = ops.maps(part(&own, 0, 64), Direction::FromDevice).unwrap();
            if drops {
                drop(ops);
            } else {
                // SAFETY: nothing else runs for the handle's mappings.
                assert_eq!(unsafe { ops.unmap_all() }, Ok((1, 64)));
            }
            assert!(!world.writes(left, b"too late") || contents(&own) == [1; 64]);
            // What takes the place of the handle's is no concern of the queue's.
            let mut other = world.nic.queue::<portcullis_model::Buffer>(QueueConfig::bounce()).unwrap();
            let others = other.map(buffer(&world, len, 2), Direction::FromDevice).unwrap();
            assert_ne!(others.iova(), iova);
            let Ended::Done(back) = queue.unmap(mapping).unwrap() else { panic!("a copy ends at once") };
            assert_eq!(contents(&back)[..8], *b"from it!");
            other.unmap(others).unwrap().for_each(drop);
        }
    }
}

#[test]
fn what_a_driver_leaves_ends_without_a_copy() {
    for config in CONFIGS {
        for drops in [false, true] {
            let (world, ops) = machine(config);
            let memory = buffer(&world, 144 * PAGE, 7);
            let all = one_of_each(&ops, &memory);
            let domain = ops.domain().clone();
            all.iter().for_each(|(iova, _)| assert!(world.writes(*iova, b"from it!")));
            let before = contents(&memory);
            if drops {
                drop(ops);
            } else {
                // SAFETY: nothing else runs.
                let left = unsafe { ops.unmap_all() }.unwrap();
                let bytes = 64 + 6 * THRESHOLD + 2 * PAGE + 64 + 65 + PAGE;
                assert_eq!(left, (7, bytes), "{config:?}");
                let usage = ops.usage();
                assert_eq!(
                    (usage.open_mappings(), usage.open_bytes, usage.exposed_bytes, usage.errors),
                    (0, 0, 0, 0)
                );
                for (iova, len) in &all {
                    assert!(matches!(ops.ends(*iova, *len), Err(DmaUnmapError::NotMapped { .. })));
                }
                // SAFETY: as above.
                assert_eq!(unsafe { ops.unmap_all() }, Ok((0, 0)));
            }
            all.iter().for_each(|(iova, _)| _ = world.writes(*iova, b"too late"));
            assert!(contents(&memory) == before, "nothing is copied, and nothing is reached");
            domain.flush().unwrap();
            let stats = domain.stats();
            assert_eq!(stats.lost_iova_bytes, 0, "{config:?}");
            let pool = world.nic.domain().pool_usage().unwrap();
            assert_eq!(
                stats.taken_iova_bytes - stats.cached_iova_bytes,
                pool.iova_bytes,
                "all addresses are back"
            );
            assert_eq!(pool.singles, 0);
        }
    }
}

/// The hardware stops to answer in the middle: what it did not confirm is out of use until it has.
#[test]
fn what_is_not_confirmed_is_said_and_nobody_gets_its_addresses() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        let memory = buffer(&world, 144 * PAGE, 7);
        let all = one_of_each(&ops, &memory);
        // The device has translations of all.
        all.iter().for_each(|(iova, _)| assert!(world.writes(*iova, b"from it!")));
        let is_lazy = matches!(config, OpsConfig::Lazy { .. });
        for (iova, len) in &all {
            // The domain's timer tries again, and comes when it will.
            world.iommu.queue().fail_next(u64::MAX, BROKEN);
            let ended = ops.ends(*iova, *len);
            let is_open = world.writes(*iova, b"too late");
            match ended {
                Ok(()) => assert!(is_lazy || config == CONFIGS[2], "{config:?} {len:#x}"),
                Err(DmaUnmapError::Unmap(UnmapError::Unconfirmed { error, .. }))
                | Err(DmaUnmapError::Unconfirmed { error }) => assert!(error == BROKEN && is_open),
                Err(error) => panic!("{error}"),
            }
            // A second time it is no mapping.
            assert!(matches!(ops.ends(*iova, *len), Err(DmaUnmapError::NotMapped { .. })));
            world.iommu.queue().fail_next(0, BROKEN);
        }
        // Addresses that devices may reach are nobody's.
        let other = buffer(&world, PAGE, 9);
        let fresh: Vec<_> = (0..64)
            .map(|_| {
                ops.maps_as(
                    part(&other, 0, PAGE),
                    Direction::ToDevice,
                    DmaAttributes { lasting: true, ..DmaAttributes::default() },
                )
                .unwrap()
            })
            .collect();
        assert!(fresh.iter().all(|iova| world.reads(*iova) == Some([9; 8])), "{config:?}");
        ops.domain().flush().unwrap();
        if let Some(pool) = &ops.usage().pool {
            assert!(pool.singles <= 2);
        }
        fresh.into_iter().for_each(|iova| ops.ends(iova, PAGE).unwrap());
        ops.domain().flush().unwrap();
        let usage = ops.usage();
        assert_eq!((usage.open_mappings(), usage.open_bytes, usage.exposed_bytes), (0, 0, 0));
        assert_eq!(ops.domain().stats().lost_iova_bytes, 0, "{config:?}");
        all.iter().for_each(|(iova, _)| _ = world.writes(*iova, b"too late"));
    }
}

#[test]
fn all_that_is_left_is_not_confirmed_and_then_is() {
    let (world, ops) = machine(OpsConfig::Strict);
    let memory = buffer(&world, 144 * PAGE, 7);
    let all = one_of_each(&ops, &memory);
    all.iter().for_each(|(iova, _)| assert!(world.writes(*iova, b"from it!")));
    // Until the device is seen to reach it: the domain's timer tries again, and comes when it will.
    world.iommu.queue().fail_next(u64::MAX, BROKEN);
    // SAFETY: nothing else runs.
    assert_eq!(unsafe { ops.unmap_all() }, Err(DmaUnmapError::Unconfirmed { error: BROKEN }));
    assert!(world.writes(all[0].0, b"too late"));
    // Nobody gets these addresses: a device would reach the old memory through them.
    let other = buffer(&world, PAGE, 9);
    let fresh: Vec<_> =
        (0..64).map(|_| ops.maps(part(&other, 0, PAGE), Direction::ToDevice).unwrap()).collect();
    assert!(fresh.iter().all(|iova| world.reads(*iova) == Some([9; 8])));
    world.iommu.queue().fail_next(0, BROKEN);
    fresh.into_iter().for_each(|iova| ops.ends(iova, PAGE).unwrap());
    ops.domain().flush().unwrap();
    assert!(all.iter().all(|(iova, _)| !world.writes(*iova, b"too late")));
    assert_eq!((ops.usage().open_mappings(), ops.domain().stats().lost_iova_bytes), (0, 0));
}
