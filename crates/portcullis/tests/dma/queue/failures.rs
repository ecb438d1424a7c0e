//! Hardware that does not confirm: buffers wait, and nobody has them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use portcullis::addr::{DeviceId, Direction, DmaSegment, PhysSegment};
use portcullis::dma::{DmaDomain, DmaMask, DmaUnmapError, Ended, Mapping, Queue, QueueConfig};
use portcullis::domain::{Policy, UnmapError};
use portcullis::std_platform::StdPlatform;
use portcullis_model::Memory;

use crate::played::Played;
use crate::rig::{self, Hooked, Rig, page};

use crate::queue::world::{BATCH, BATCHES, BROKEN, Frame, Machine, PAGE, STRATEGIES, World};

fn mapped(world: &World, queue: &mut Queue<Machine, Frame>) -> Mapping<Frame> {
    let mapping = queue.map(world.frame(), Direction::FromDevice).unwrap();
    assert!(world.writes(mapping.iova(), b"a packet"));
    mapping
}

#[test]
fn a_commit_that_fails_keeps_all_buffers() {
    for &config in BATCHES {
        let world = World::new(Policy::Strict);
        let mut queue = world.nic.queue(config).unwrap();
        let mut late = Vec::new();
        for _ in 1..BATCH {
            let mapping = mapped(&world, &mut queue);
            late.push(mapping.iova());
            assert!(matches!(queue.unmap(mapping), Ok(Ended::Pending)));
        }
        for _ in 0..2 {
            world.iommu.queue().fail_next(1, BROKEN);
            let failed = queue.commit().map(drop).unwrap_err();
            assert_eq!(failed, DmaUnmapError::Unconfirmed { error: BROKEN });
            assert_eq!(queue.waiting(), BATCH - 1);
        }
        // The batch becomes complete, and that commit fails, too: the last one waits with the others.
        world.iommu.queue().fail_next(1, BROKEN);
        let mapping = mapped(&world, &mut queue);
        late.push(mapping.iova());
        let failed = queue.unmap(mapping).map(drop).unwrap_err();
        assert!(failed.mapping.is_none(), "{failed}");
        assert_eq!(failed.error, DmaUnmapError::Unconfirmed { error: BROKEN });
        assert_eq!(queue.waiting(), BATCH);
        // There is no room for more before a commit, which fails again: this one comes back.
        world.iommu.queue().fail_next(1, BROKEN);
        let mapping = mapped(&world, &mut queue);
        let failed = queue.unmap(mapping).map(drop).unwrap_err();
        let mapping = failed.mapping.unwrap();
        assert!(world.writes(mapping.iova(), b"a packet"), "it is as it was");
        // Now it commits before, and this one waits for the next.
        late.push(mapping.iova());
        assert!(matches!(queue.unmap(mapping), Ok(Ended::Pending)));
        let back: Vec<Frame> = queue.commit().unwrap().collect();
        assert_eq!(back.len(), BATCH + 1, "{config:?}");
        assert!(late.iter().all(|iova| !world.writes(*iova, b"too late")));
        assert!(back.iter().all(|frame| frame.get() == *b"a packet"));
    }
}

#[test]
fn a_mapping_by_itself_that_is_not_confirmed_waits_for_a_commit() {
    let world = World::new(Policy::Strict);
    let ring = QueueConfig::ring(4, PAGE).batch(4);
    for (config, len) in [(QueueConfig::direct(), PAGE), (ring, 8 << 20)] {
        let mut queue = world.nic.queue(config).unwrap();
        let mapping = queue.map(world.frames(&[len], &Arc::default()), Direction::FromDevice).unwrap();
        let late = mapping.iova();
        assert!(world.writes(late, b"a packet"));
        world.iommu.queue().fail_next(1, BROKEN);
        let failed = queue.unmap(mapping).map(drop).unwrap_err();
        assert!(failed.mapping.is_none());
        assert!(matches!(failed.error, DmaUnmapError::Unmap(UnmapError::Unconfirmed { .. })), "{failed}");
        assert_eq!(queue.waiting(), 1);
        world.iommu.queue().fail_next(1, BROKEN);
        assert!(queue.commit().is_err());
        let back: Vec<Frame> = queue.commit().unwrap().collect();
        assert_eq!((back.len(), queue.waiting()), (1, 0));
        assert!(!world.writes(late, b"too late"));
        assert_eq!(back[0].get(), *b"a packet");
    }
}

/// A queue that copies maps the whole pages of a large buffer in place, and copies the bytes beside them. Hardware that has not confirmed
/// the end may still write to the pages in place: the driver has them back after a flush, and not before.
#[test]
fn a_large_buffer_beside_copies_that_is_not_confirmed_waits_for_a_flush() {
    let world = World::new(Policy::Strict);
    for config in [QueueConfig::bounce(), QueueConfig::auto(16, PAGE).batch(BATCH)] {
        let mut queue = world.nic.queue(config).unwrap();
        let large = world.frames(&[(4 << 20) + 100], &Arc::default());
        let mapping = queue.map(large, Direction::FromDevice).unwrap();
        let late = mapping.iova();
        assert!(world.writes(late, b"a packet"));
        // Each time, as the domain's timer tries, too.
        world.iommu.queue().fail_next(u64::MAX, BROKEN);
        let failed = queue.unmap(mapping).map(drop).unwrap_err();
        assert!(failed.mapping.is_none(), "{failed}");
        assert_eq!(failed.error, DmaUnmapError::Unconfirmed { error: BROKEN });
        assert_eq!(queue.waiting(), 1);
        assert!(queue.commit().is_err());
        assert!(world.writes(late, b"in time!"), "the hardware has not forgotten it");
        world.iommu.queue().fail_next(0, BROKEN);
        let back: Vec<Frame> = queue.commit().unwrap().collect();
        assert_eq!((back.len(), queue.waiting()), (1, 0), "{config:?}");
        assert!(!world.writes(late, b"too late"));
        assert_eq!(back[0].get(), *b"in time!");
    }
}

/// What is owed for one mapping is paid before a batch of others is said to be over.
#[test]
fn a_batch_is_not_over_while_one_beside_it_is_not_confirmed() {
    let world = World::new(Policy::Strict);
    let mut queue = world.nic.queue(QueueConfig::ring(4, PAGE).batch(2)).unwrap();
    let large = queue.map(world.frames(&[8 << 20], &Arc::default()), Direction::FromDevice).unwrap();
    let late = large.iova();
    assert!(world.writes(late, b"a packet"));
    world.iommu.queue().fail_next(1, BROKEN);
    assert!(queue.unmap(large).is_err());
    let first = mapped(&world, &mut queue);
    assert!(matches!(queue.unmap(first), Ok(Ended::Pending)));
    let second = mapped(&world, &mut queue);
    let Ok(Ended::Flushed(all)) = queue.unmap(second) else { panic!("two are a batch") };
    assert_eq!(all.len(), 3);
    assert!(!world.writes(late, b"too late"));
}

/// A batch is confirmed, and what is owed beside it is not: the buffer that made the batch complete waits as well.
#[test]
fn a_batch_that_is_confirmed_waits_for_what_is_owed_beside_it() {
    let rig = Rig::new(Arc::new(StdPlatform::with_cpus(1)), Policy::Strict, Hooked::new);
    type Numbers = (rig::Mapper, Played, Arc<Memory>);
    let domain = DmaDomain::<Numbers>::over(rig.domain.clone(), None).unwrap();
    let nic = domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap();
    let mut queue: Queue<Numbers> = nic.queue(QueueConfig::ring(4, PAGE).batch(2)).unwrap();
    let map = |queue: &mut Queue<Numbers>, len| {
        let (list, mut out) = ([PhysSegment { len, ..page(0) }], [DmaSegment::default()]);
        // SAFETY: no test reads or writes there.
        unsafe { queue.map_raw(&list, Direction::FromDevice, &mut out) }.unwrap().0
    };
    let large = map(&mut queue, 8 << 20);
    rig.iommu.queue().fail_next(1, BROKEN);
    assert!(queue.unmap_raw(large).is_err());
    assert_eq!(queue.waiting(), 1);
    let [first, second] = [(); 2].map(|()| map(&mut queue, PAGE));
    assert!(matches!(queue.unmap_raw(first), Ok(Ended::Pending)));
    let (iommu, calls) = (Arc::clone(&rig.iommu), AtomicUsize::new(0));
    rig.queue.set(move || {
        if calls.fetch_add(1, Ordering::Relaxed) == 1 {
            iommu.queue().fail_next(1, BROKEN);
        }
    });
    let failed = queue.unmap_raw(second).unwrap_err();
    assert!(failed.mapping.is_none() && failed.waits, "{failed}");
    assert!(queue.waiting() > 1, "not for the first alone");
    queue.commit_raw().unwrap();
    assert_eq!(queue.waiting(), 0);
}

/// Somebody has unmapped it by number, and not waited: the flush of the next commit is its end.
#[test]
fn a_mapping_that_somebody_ended_costs_its_owner_a_flush() {
    let world = World::new(Policy::Lazy { window_ns: u64::MAX });
    let mut queue = world.nic.queue(QueueConfig::direct()).unwrap();
    let mapping = mapped(&world, &mut queue);
    let late = mapping.iova();
    world.nic.dma().unmap_single(late, PAGE).unwrap();
    let failed = queue.unmap(mapping).map(drop).unwrap_err();
    assert!(matches!(failed.error, DmaUnmapError::Unmap(UnmapError::NotMapped { .. })), "{failed}");
    let back: Vec<Frame> = queue.commit().unwrap().collect();
    assert_eq!(back.len(), 1);
    assert!(!world.writes(late, b"too late"));
}

/// A device that is gone: one call ends all that its driver had mapped, and what waited before comes back with it.
#[test]
fn all_mappings_end_in_one_call_though_the_hardware_fails_for_a_while() {
    for config in STRATEGIES {
        let world = World::new(Policy::Strict);
        let mut queue = world.nic.queue(config).unwrap();
        let before = mapped(&world, &mut queue);
        let mut back: Vec<Frame> = Vec::new();
        queue.unmap(before).unwrap().for_each(|frame| back.push(frame));
        let mappings: Vec<_> = (0..2 * BATCH + 1).map(|_| mapped(&world, &mut queue)).collect();
        let late: Vec<_> = mappings.iter().map(Mapping::iova).collect();
        // A whole batch is not confirmed, and not by the commit for the next mapping either.
        world.iommu.queue().fail_next(2, BROKEN);
        queue.unmap_all(mappings, |ended| back.push(ended.unwrap())).unwrap();
        assert_eq!((back.len(), queue.waiting()), (2 * BATCH + 2, 0), "{config:?}");
        // A copy that is no longer in use may be written, what the driver has may not.
        late.iter().for_each(|iova| _ = world.writes(*iova, b"too late"));
        assert!(back.iter().all(|frame| frame.get() == *b"a packet"), "{config:?}");
    }
}

#[test]
fn a_call_that_ends_all_gives_back_or_counts_each_mapping_where_the_hardware_is_dead() {
    for config in STRATEGIES {
        let world = World::new(Policy::Strict);
        let mut queue = world.nic.queue(config).unwrap();
        let all = 2 * BATCH + 1;
        let mappings: Vec<_> = (0..all).map(|_| mapped(&world, &mut queue)).collect();
        let mut back: Vec<Frame> = Vec::new();
        // Each time, as the domain's timer tries, too.
        world.iommu.queue().fail_next(u64::MAX, BROKEN);
        let mut again = Vec::new();
        let ended = queue.unmap_all(mappings, |ended| match ended {
            Ok(frame) => back.push(frame),
            Err(failed) => again.push(failed.mapping.expect("nothing is leaked")),
        });
        match ended {
            // Copies end without the hardware, and `auto` copies where waits have taken long.
            Ok(()) => {
                assert_eq!(back.len(), all);
                assert!(
                    [QueueConfig::bounce(), QueueConfig::auto(16, PAGE).batch(BATCH)].contains(&config),
                    "{config:?}"
                );
            }
            Err(error) => {
                assert!(error.is_of_commit(), "{config:?}");
                assert_eq!(back.len() + queue.waiting() + again.len(), all, "{config:?}");
                if config == QueueConfig::direct() {
                    assert_eq!(queue.waiting(), all);
                } else {
                    assert!(queue.waiting() >= BATCH && !again.is_empty(), "{config:?}");
                    assert!(world.writes(again[0].iova(), b"a packet"), "it is as it was");
                }
                world.iommu.queue().fail_next(0, BROKEN);
                queue.unmap_all(again, |ended| back.push(ended.unwrap())).unwrap();
                assert_eq!((back.len(), queue.waiting()), (all, 0), "{config:?}");
            }
        }
    }
}

#[test]
fn a_call_that_ends_all_gives_back_the_mapping_of_another_queue_and_ends_the_rest() {
    for config in STRATEGIES {
        let world = World::new(Policy::Strict);
        let (mut queue, mut other) = (world.nic.queue(config).unwrap(), world.nic.queue(config).unwrap());
        let mappings = [mapped(&world, &mut queue), mapped(&world, &mut other), mapped(&world, &mut queue)];
        let mut back: Vec<Frame> = Vec::new();
        let mut again = Vec::new();
        let ended = queue.unmap_all(mappings, |ended| match ended {
            Ok(frame) => back.push(frame),
            Err(failed) => {
                let said = failed.to_string();
                assert!(said.ends_with("; the mapping is as it was, and can be unmapped again"), "{said}");
                again.extend(failed.mapping);
            }
        });
        assert_eq!((back.len(), ended), (2, Err(DmaUnmapError::OtherQueue)));
        other.unmap_all(again, |ended| back.push(ended.unwrap())).unwrap();
        assert_eq!(back.len(), 3);
    }
}
