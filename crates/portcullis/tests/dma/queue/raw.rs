//! The half that deals in numbers, also behind a pointer.

use portcullis::addr::{Direction, DmaSegment, PhysAddr, PhysSegment};
use portcullis::dma::{AnyQueue, DmaBuffer, DmaUnmapError, Ended, Queue, QueueConfig, Strategy};
use portcullis::domain::Policy;

use crate::queue::world::{BATCH, Machine, PAGE, STRATEGIES, World};

/// A driver that was compiled once: the device fills `count` buffers in turn.
fn drive(world: &World, queue: &mut dyn AnyQueue, memory: PhysAddr, count: u64) -> [usize; 3] {
    let mut ends = [0; 3];
    let mut late = Vec::new();
    let mut waiting = Vec::new();
    for number in 0..count {
        let phys = PhysAddr::new(memory.get() + number * PAGE);
        let list = [PhysSegment { phys, len: PAGE }];
        let mut out = [DmaSegment::default()];
        // SAFETY: the memory is the test's, all of it atomics, and no mapping is ended by others.
        let (mapping, used) = unsafe { queue.map_raw(&list, Direction::FromDevice, &mut out) }.unwrap();
        assert_eq!((used, out[0].iova, out[0].len), (1, mapping.iova(), PAGE));
        world.fill(out.into_iter(), number as u8);
        queue.sync_raw_for_cpu(&mapping, 0, 8).unwrap();
        let mut bytes = [0xff; 8];
        world.memory.read(phys, &mut bytes).unwrap();
        assert_eq!(bytes, [number as u8; 8]);
        queue.sync_raw_for_device(&mapping, 0, 8).unwrap();
        let ended = queue.unmap_raw(mapping).unwrap();
        let kind = match ended {
            Ended::Done(()) => 0,
            Ended::Pending => 1,
            Ended::Flushed(()) => 2,
        };
        ends[kind] += 1;
        waiting.push((out[0].iova, phys, number as u8));
        match ended {
            Ended::Done(()) => late.extend(waiting.pop()),
            Ended::Pending => assert_eq!(queue.waiting(), waiting.len()),
            Ended::Flushed(()) => late.append(&mut waiting),
        }
        for (iova, phys, byte) in &late {
            // Another mapping may have the address by now.
            if waiting.iter().all(|(other, ..)| other != iova) {
                let _ = world.writes(*iova, b"too late");
            }
            world.memory.read(*phys, &mut bytes).unwrap();
            assert_eq!(bytes, [*byte; 8], "what is the driver's is out of reach");
        }
    }
    assert_eq!(queue.commit_raw().unwrap(), waiting.len());
    assert_eq!((queue.waiting(), queue.commit_raw().unwrap()), (0, 0));
    ends
}

#[test]
fn a_driver_by_number_is_protected_as_one_with_buffers() {
    for config in STRATEGIES {
        let world = World::new(Policy::Strict);
        let memory = world.memory.buffer(10 * PAGE).unwrap();
        let mut queue: Queue<Machine> = world.nic.queue(config).unwrap();
        let ends = drive(&world, &mut queue, memory.phys(), 10);
        match queue.strategy() {
            Strategy::Direct | Strategy::Bounce => assert_eq!(ends, [10, 0, 0]),
            Strategy::Batch | Strategy::Ring => assert_eq!(ends, [0, 10 - 10 / BATCH, 10 / BATCH]),
            Strategy::Auto => assert_eq!(ends.iter().sum::<usize>(), 10),
        }
    }
}

/// A sync copies the bytes from its offset on, as many as its length says, and no others. A `dyn AnyQueue` does the same.
#[test]
fn a_part_of_a_copy_is_synced_by_its_offset_and_its_length() {
    let world = World::new(Policy::Strict);
    let memory = world.memory.buffer(PAGE).unwrap();
    let mut bounce: Queue<Machine> = world.nic.queue(QueueConfig::bounce()).unwrap();
    let queue: &mut dyn AnyQueue = &mut bounce;
    let (list, mut out) = ([PhysSegment { phys: memory.phys(), len: PAGE }], [DmaSegment::default()]);
    // SAFETY: the memory is the test's, all of it atomics, and the mapping is not ended by others.
    let (mapping, _) = unsafe { queue.map_raw(&list, Direction::Bidirectional, &mut out) }.unwrap();
    let at = |offset: u64| out[0].iova.checked_add(offset).unwrap();
    let kept = |offset: u64| {
        let mut bytes = [0xff; 8];
        memory.read(offset, &mut bytes).unwrap();
        bytes
    };
    memory.write(0, &[1; 64]).unwrap();
    queue.sync_raw_for_device(&mapping, 24, 8).unwrap();
    let seen = [16, 24, 32, 8].map(|offset| world.reads(at(offset)).unwrap()[0]);
    assert_eq!(seen, [0, 1, 0, 0]);
    assert!(world.writes(at(0), &[2; 64]));
    queue.sync_raw_for_cpu(&mapping, 24, 8).unwrap();
    assert_eq!([16, 24, 32, 8].map(|offset| kept(offset)[0]), [1, 2, 1, 1]);
    let beyond = DmaUnmapError::OutOfRange { iova: at(0), offset: 8, len: PAGE, mapped: PAGE };
    assert_eq!(queue.sync_raw_for_cpu(&mapping, 8, PAGE), Err(beyond));
    assert_eq!(queue.sync_raw_for_device(&mapping, 8, PAGE), Err(beyond));
    assert_eq!(queue.sync_raw_for_cpu(&mapping, 8, PAGE - 8), Ok(()));
    let _ = queue.unmap_raw(mapping).unwrap();
}

/// Raw and typed mappings of one queue end with the same commits.
#[test]
fn what_is_unmapped_by_number_and_by_buffer_waits_together() {
    let world = World::new(Policy::Strict);
    let mut queue = world.nic.queue(STRATEGIES[2]).unwrap();
    let memory = world.memory.buffer(PAGE).unwrap();
    let list = [PhysSegment { phys: memory.phys(), len: PAGE }];
    let typed = queue.map(world.frame(), Direction::FromDevice).unwrap();
    let mut out = [DmaSegment::default()];
    let iova = typed.iova();
    assert!(world.writes(iova, b"a packet"));
    assert!(matches!(queue.unmap(typed), Ok(portcullis::dma::Ended::Pending)));
    for turn in 1..BATCH {
        // SAFETY: the memory is the test's, all of it atomics, and no mapping is ended by others.
        let (mapping, _) = unsafe { queue.map_raw(&list, Direction::FromDevice, &mut out) }.unwrap();
        let ended = queue.unmap_raw(mapping).unwrap();
        assert_eq!(ended == Ended::Flushed(()), turn + 1 == BATCH);
    }
    assert!(!world.writes(iova, b"too late"), "the typed one is unreachable");
    assert_eq!(queue.waiting(), 0);
    assert_eq!(queue.commit().unwrap().len(), 1, "and comes with the next commit");
}

/// Some devices want the low bits of an address to be those of the buffer, translated or not.
#[test]
fn copies_keep_the_low_bits_that_a_device_asks_for() {
    for policy in [Policy::Strict, Policy::Passthrough] {
        let world = World::new(policy);
        let nic = world.nic.clone().keeping_offsets(0xfff);
        let mut queue: Queue<Machine> = nic.queue(QueueConfig::bounce()).unwrap();
        let memory = world.memory.buffer(PAGE).unwrap();
        let list = [PhysSegment { phys: PhysAddr::new(memory.phys().get() + 0x764), len: 100 }];
        let mut out = [DmaSegment::default()];
        // SAFETY: the memory is the test's, all of it atomics.
        let (mapping, _) = unsafe { queue.map_raw(&list, Direction::ToDevice, &mut out) }.unwrap();
        assert_ne!(out[0].iova.get(), list[0].phys.get(), "it is a copy");
        assert_eq!(out[0].iova.get() & 0xfff, 0x764, "{policy:?}");
        assert!(matches!(queue.unmap_raw(mapping), Ok(Ended::Done(()))));
    }
}

/// A list of which a piece cannot be copied leaves nothing in the pool.
#[test]
fn a_list_that_is_refused_takes_no_copies() {
    let world = World::new(Policy::Passthrough);
    let mut queue: Queue<Machine> = world.nic.queue(QueueConfig::bounce()).unwrap();
    let pool = world.swiotlb.as_ref().unwrap();
    let memory = world.memory.buffer(PAGE).unwrap();
    let (piece, none) = (memory.segments()[0], PhysSegment { phys: memory.phys(), len: 0 });
    let mut out = [DmaSegment::default(); 3];
    // SAFETY: the memory is the test's, all of it atomics.
    let mut map = |list: &[PhysSegment]| unsafe { queue.map_raw(list, Direction::ToDevice, &mut out) };
    assert!(map(&[piece, piece, none]).is_err());
    assert_eq!(pool.usage().mapped, 0);
    let (mapping, _) = map(&[piece, piece]).unwrap();
    assert!(pool.usage().mapped >= 2 * PAGE);
    assert!(matches!(queue.unmap_raw(mapping), Ok(Ended::Done(()))));
    assert_eq!(pool.usage().mapped, 0);
}
