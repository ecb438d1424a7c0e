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

use crate::queue::world::{BATCH, BATCHES, BROKEN, Frame, Machine, PAGE, World};

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
