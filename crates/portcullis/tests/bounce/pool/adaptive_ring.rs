//! A queue that copies or maps in its ring: what is chosen, and that data and protection are the same either way.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{Direction, DmaSegment, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, PoolConfig, Way};
use portcullis::dma::{
    AdaptiveRing, DmaDevice, DmaMapError, DmaUnmapError, Ended, Explained, RawMapping, StrictRingConfig,
};
use portcullis::domain::{MapListError, Policy};
use portcullis_model::Buffer;

use crate::chosen::Chosen;
use crate::pool::costs::{Clock, Costs, row};
use crate::pool::support::{Bench, DEVICE, Mapper, PAGE, Rationed, TIMEOUT, piece, small};

pub type Queue = AdaptiveRing<Mapper, Arc<Chosen>, Rationed, Clock>;

pub const BATCH: usize = 8;

/// A queue of an untrusted device with 256 pages of its own.
pub fn queue(bench: &Bench, direction: Direction, (wait_ns, copy_ns): (u64, u64)) -> (Costs, Queue) {
    let costs = Costs::new(wait_ns, copy_ns);
    let device = DmaDevice::new(bench.domain.clone(), u64::MAX).unwrap();
    let config = StrictRingConfig::new(256, PAGE, BATCH);
    let queue = AdaptiveRing::new(&device, bench.device(0, true), direction, config, costs.clock(bench));
    (costs, queue.unwrap())
}

/// Maps memory of the bench's, which only its devices and this thread use.
pub fn map(queue: &mut Queue, list: &[PhysSegment]) -> Result<RawMapping, DmaMapError> {
    let mut view = [DmaSegment::default(); 8];
    // SAFETY: the memory is simulated, every access to it atomic, and any address allowed.
    let (mapping, used) = unsafe { queue.map(list, Attributes::default(), &mut view) }?;
    assert_eq!(view[0].iova, mapping.iova());
    assert_eq!(
        view[..used].iter().map(|segment| segment.len).sum::<u64>(),
        list.iter().map(|piece| piece.len).sum::<u64>()
    );
    Ok(mapping)
}

pub fn page(bench: &Bench) -> (Buffer, [PhysSegment; 1]) {
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    (buffer, list)
}

pub fn rows(queue: &Queue) -> Vec<Explained> {
    queue.explain().collect()
}

/// Whether the device gets to this buffer at this address.
pub fn reaches(bench: &Bench, iova: Iova, buffer: &Buffer) -> bool {
    let reached = bench.reaches(iova, Permissions::READ).or(bench.reaches(iova, Permissions::WRITE));
    reached.is_some_and(|phys| (0..PAGE).contains(&phys.get().wrapping_sub(buffer.phys().get())))
}

#[test]
fn it_begins_with_the_cheaper_way_and_a_commit_is_shared() {
    // A wait of 800 ns is 100 ns for each of a batch.
    for (copy_ns, copies) in [(110, false), (90, true)] {
        let bench = Bench::new(small());
        let (_, mut queue) = queue(&bench, Direction::FromDevice, (800, copy_ns));
        let rows = rows(&queue);
        let of = |shared| rows.iter().filter(move |row| row.shared == shared);
        assert_eq!(
            (of(false).count(), of(true).count()),
            (5, 8),
            "4 to 64 KiB of pages, 512 bytes to 64 KiB"
        );
        for row in of(true) {
            let (small, copy) = (row.most_bytes <= PAGE, row.copy_ns.map(|(map_ns, _)| map_ns));
            assert_eq!(
                (row.map_ns.is_none(), copy),
                (small, Some(copy_ns)),
                "no untrusted device gets a part: {row:?}"
            );
            // Each end is one copy, by this clock, and so is the whole.
            assert!(row.copies && row.map_ns.is_none_or(|(map_ns, _)| map_ns == 2 * copy_ns), "{row:?}");
        }
        for row in of(false) {
            assert_eq!((row.copies, row.copied, row.mapped), (copies, 0, 0), "{row:?}");
            let (_, unmap_ns) = row.map_ns.unwrap();
            assert!((99..=100).contains(&unmap_ns), "{row:?}");
        }
        assert_eq!((queue.waiting(), bench.pool.usage().buffer_bytes), (0, 0));
        let (buffer, list) = page(&bench);
        let mapping = map(&mut queue, &list).unwrap();
        assert_eq!(mapping.way(), if copies { Some(Way::Slot) } else { None });
        let _ = queue.unmap(mapping).unwrap();
        drop((queue, buffer));
        bench.finish();
    }
}

#[test]
fn what_is_mapped_ends_with_its_batch_and_what_is_copied_at_once() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue(&bench, Direction::Bidirectional, (8, 1000));
    let (buffers, lists): (Vec<_>, Vec<_>) = (0..BATCH).map(|_| page(&bench)).unzip();
    let part = bench.memory.buffer(PAGE).unwrap();
    let mappings: Vec<_> = lists.iter().map(|list| map(&mut queue, list).unwrap()).collect();
    let mut seen = Vec::new();
    for (n, mapping) in mappings.into_iter().enumerate() {
        assert_eq!(mapping.way(), None);
        seen.push(mapping.iova());
        let expected = if n + 1 < BATCH { Ended::Pending } else { Ended::Flushed(()) };
        assert_eq!(queue.unmap(mapping).unwrap(), expected);
        if n == 2 {
            // Between them one that shares its page: it goes by itself, and never opens the original.
            let copied = map(&mut queue, &[piece(part.phys(), 5, 100)]).unwrap();
            assert_eq!(copied.way(), Some(Way::Slot));
            let iova = copied.iova();
            assert!(!reaches(&bench, iova, &part));
            assert_eq!(queue.unmap(copied).unwrap(), Ended::Done(()));
            assert_eq!(queue.waiting(), 3);
        }
        let open = seen.iter().zip(&buffers).filter(|(iova, buffer)| reaches(&bench, **iova, buffer)).count();
        assert_eq!(open, if n + 1 < BATCH { n + 1 } else { 0 });
    }
    // A queue that falls idle.
    let mapping = map(&mut queue, &lists[0]).unwrap();
    let iova = mapping.iova();
    assert_eq!(queue.unmap(mapping).unwrap(), Ended::Pending);
    assert!(reaches(&bench, iova, &buffers[0]));
    assert_eq!((queue.commit().unwrap(), queue.waiting()), (1, 0));
    assert!(!reaches(&bench, iova, &buffers[0]));
    drop((queue, buffers, part));
    bench.finish();
}

/// As in a ring: what waits makes room by a commit. Where nothing waits, no commit would help, and a wait alone is what it costs.
#[test]
fn a_full_ring_is_committed_before_anything_is_mapped_alone() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue(&bench, Direction::FromDevice, (8, 1_000_000));
    let large = bench.memory.buffer(16 * PAGE).unwrap();
    let list = [piece(large.phys(), 0, 16 * PAGE)];
    // The device has all that 256 pages hold.
    let mut mapped = Vec::new();
    let alone = loop {
        let mapping = map(&mut queue, &list).unwrap();
        match mapping.way() {
            None => mapped.push(mapping),
            Some(_) => break mapping,
        }
    };
    assert!((8..=16).contains(&mapped.len()), "{}", mapped.len());
    let iova = alone.iova();
    assert_eq!(alone.way(), Some(Way::Direct), "the wait is 8 ns, a copy takes a million");
    assert!(reaches(&bench, iova, &large));
    assert_eq!(queue.unmap(alone).unwrap(), Ended::Done(()));
    assert!(!reaches(&bench, iova, &large));
    assert_eq!(queue.unmap(mapped.remove(0)).unwrap(), Ended::Pending);
    let full = map(&mut queue, &list).unwrap_err();
    assert!(matches!(full, DmaMapError::Full), "{full}");
    assert_eq!(queue.commit().unwrap(), 1);
    let again = map(&mut queue, &list).unwrap();
    assert_eq!(again.way(), None);
    for mapping in mapped.into_iter().chain([again]) {
        let _ = queue.unmap(mapping).unwrap();
    }
    queue.commit().unwrap();
    drop((queue, large));
    bench.finish();
}

/// Where each unmap commits, its whole time is the commit's, and the commit's share is all that it costs.
#[test]
fn an_unmap_that_commits_costs_the_wait_once() {
    const WAIT_NS: u64 = 1000;
    let bench = Bench::new(small());
    let costs = Costs::new(WAIT_NS, 1_000_000);
    let device = DmaDevice::new(bench.domain.clone(), u64::MAX).unwrap();
    let config = StrictRingConfig::new(256, PAGE, 1);
    let pooled = bench.device(0, true);
    let mut queue =
        AdaptiveRing::new(&device, pooled, Direction::FromDevice, config, costs.clock(&bench)).unwrap();
    let (buffer, list) = page(&bench);
    for _ in 0..20_000 {
        let mapping = map(&mut queue, &list).unwrap();
        assert_eq!(queue.unmap(mapping).unwrap(), Ended::Flushed(()));
    }
    let made = row(&rows(&queue), PAGE, Direction::FromDevice);
    assert_eq!((made.copies, made.mapped, made.map_ns), (false, 20_000, Some((0, WAIT_NS))));
    drop((queue, buffer));
    bench.finish();
}

/// Nor is it copied where the caller must know that the device may still reach it.
#[test]
fn a_list_that_a_full_ring_leaves_alone_and_that_was_not_undone_for_sure_is_told_of() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue(&bench, Direction::FromDevice, (8, 1_000_000));
    let large = bench.memory.buffer(16 * PAGE).unwrap();
    let whole = [piece(large.phys(), 0, 16 * PAGE)];
    let mut mapped = Vec::new();
    while let mapping = map(&mut queue, &whole).unwrap()
        && mapping.way().is_none()
    {
        mapped.push(mapping);
    }
    // What no entry can point to.
    let list = [piece(large.phys(), 0, 8 * PAGE), piece(PhysAddr::new(1 << 52), 0, PAGE)];
    bench.iommu.queue().fail_next(1, TIMEOUT);
    let error = map(&mut queue, &list).unwrap_err();
    let unconfirmed = DmaMapError::List(MapListError::Unconfirmed { error: TIMEOUT });
    assert_eq!(error, unconfirmed);
    drop((queue, mapped, large));
}

#[test]
fn it_follows_costs_that_change() {
    let bench = Bench::new(small());
    let (costs, mut queue) = queue(&bench, Direction::FromDevice, (8000, 100));
    let (buffer, list) = page(&bench);
    let phases = [((8000, 100), true), ((80, 100), false), ((8000, 100), true)];
    let mut mapped = 0;
    let mut made = 0;
    for (phase, ((wait_ns, copy_ns), copies)) in phases.into_iter().enumerate() {
        costs.set(wait_ns, copy_ns);
        let mut cycles = 0;
        while row(&rows(&queue), PAGE, Direction::FromDevice).copies != copies || cycles == 0 {
            for _ in 0..61 * 64 {
                let mapping = map(&mut queue, &list).unwrap();
                mapped += u64::from(mapping.way().is_none());
                let _ = queue.unmap(mapping).unwrap();
            }
            made += 61 * 64;
            cycles += 1;
            assert!(cycles < 100, "phase {phase}: {:?}", row(&rows(&queue), PAGE, Direction::FromDevice));
        }
        let row = row(&rows(&queue), PAGE, Direction::FromDevice);
        assert_eq!((row.switches, row.copied, row.mapped), (phase as u64, made - mapped, mapped));
    }
    queue.commit().unwrap();
    drop((queue, buffer));
    bench.finish();
}

#[test]
fn data_arrives_either_way_and_no_original_is_reached_after_its_end() {
    for direction in Direction::ALL {
        let bench = Bench::new(small());
        let (costs, mut queue) = queue(&bench, direction, (800, 100));
        let memory = bench.memory.buffer(64 * PAGE).unwrap();
        let mut ways = [0_u64; 2];
        let mut waiting: Vec<Iova> = Vec::new();
        for round in 0..8_000_u64 {
            costs.set(800 + (round >> 10 & 1) * 8000, 100 + (round >> 11 & 1) * 4000);
            // A list of pages, or a piece of anything, up to beyond the threshold.
            let whole = round % 3 > 0;
            let (offset, len) = if whole {
                (PAGE * (round % 7), PAGE * (1 + round % 20))
            } else {
                (round * 13 % PAGE, 1 + round * 977 % (20 * PAGE))
            };
            let bytes = vec![(round % 251) as u8 + 1; len as usize];
            bench.memory.write(memory.phys(), &vec![0; 64 * PAGE as usize]).unwrap();
            let at = piece(memory.phys(), offset, len);
            bench.write(at.phys, &bytes);
            let halves = [
                piece(at.phys, 0, len / 2 / PAGE * PAGE),
                piece(at.phys, len / 2 / PAGE * PAGE, len - len / 2 / PAGE * PAGE),
            ];
            let list = if whole && round % 5 == 0 && halves[0].len > 0 { &halves[..] } else { &[at][..] };
            let mapping = map(&mut queue, list).unwrap();
            let iova = mapping.iova();
            ways[usize::from(mapping.way().is_none())] += 1;
            if direction != Direction::FromDevice {
                assert_eq!(bench.seen(iova, len).as_deref(), Some(&bytes[..]), "round {round}");
            }
            let (first, count) = (len / 3, len / 2);
            if direction != Direction::ToDevice {
                bench.iommu.dma_write(DEVICE, iova, &vec![254; len as usize]).unwrap();
                queue.sync_for_cpu(&mapping, first, count).unwrap();
                let part = piece(at.phys, first, count);
                assert_eq!(bench.bytes(part.phys, count), vec![254; count as usize], "round {round}");
            }
            if direction == Direction::ToDevice {
                let part = piece(at.phys, first, count);
                bench.write(part.phys, &vec![253; count as usize]);
                queue.sync_for_device(&mapping, first, count).unwrap();
                let seen = bench.seen(Iova::new(iova.get() + first), count).unwrap();
                assert_eq!(seen, vec![253; count as usize], "round {round}");
                bench.write(part.phys, &bytes[..count as usize]);
            }
            let copied = mapping.way().is_some_and(|way| matches!(way, Way::Slot | Way::SingleUse));
            let original = |iova: Iova| {
                let reached =
                    bench.reaches(iova, Permissions::READ).or(bench.reaches(iova, Permissions::WRITE));
                reached.is_some_and(|phys| {
                    (memory.phys().get()..memory.phys().get() + 64 * PAGE).contains(&phys.get())
                })
            };
            // Unless it is one of the two, the device has all of the original, or its middle.
            assert!(!(copied && original(iova)), "round {round}");
            match queue.unmap(mapping).unwrap() {
                Ended::Done(()) => assert!(!original(iova), "round {round}"),
                Ended::Pending => waiting.push(iova),
                Ended::Flushed(()) => {
                    assert!(
                        !original(iova) && waiting.drain(..).all(|iova| !original(iova)),
                        "round {round}"
                    );
                }
            }
            let left = if direction == Direction::ToDevice { bytes } else { vec![254; len as usize] };
            assert_eq!(bench.bytes(at.phys, len), left, "round {round}");
        }
        assert!(ways[0] > 2000 && ways[1] > 500, "{ways:?}");
        assert!(rows(&queue).iter().any(|row| row.switches > 0));
        queue.commit().unwrap();
        drop((queue, memory));
        bench.finish();
    }
}

#[test]
fn where_the_ring_is_full_it_copies_what_costs_less_than_a_wait_and_where_the_pool_is_too_it_says_so() {
    let bench = Bench::on(
        Arc::new(Chosen::new(1)),
        Policy::Strict,
        PoolConfig { limit: Iova::new((4 << 20) - 1), ..small() },
    );
    let (_, mut queue) = queue(&bench, Direction::ToDevice, (4000, 1000));
    let (buffer, list) = page(&bench);
    bench.frames.grant(40);
    let mut live = Vec::new();
    let error = loop {
        match map(&mut queue, &list) {
            Ok(mapping) => live.push(mapping),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, DmaMapError::NoBuffer { .. }), "{error}");
    let in_ring = live.iter().filter(|mapping| mapping.way().is_none()).count();
    assert!((256..=512).contains(&in_ring), "{in_ring}");
    assert!(live.len() - in_ring >= 30, "{} beside {in_ring}", live.len() - in_ring);
    live.drain(..).for_each(|mapping| _ = queue.unmap(mapping).unwrap());
    queue.commit().unwrap();
    assert_eq!(map(&mut queue, &list).unwrap().way(), None, "there is room again");
    drop((queue, buffer));
    let lost = bench.domain.stats().lost_iova_bytes;
    assert!(lost > 0, "a ring with a mapping in it keeps its addresses");
}

#[test]
fn a_commit_that_fails_leaves_everything_waiting() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue(&bench, Direction::ToDevice, (8, 1_000_000));
    let (buffer, list) = page(&bench);
    let mapping = map(&mut queue, &list).unwrap();
    let iova = mapping.iova();
    assert_eq!(queue.unmap(mapping).unwrap(), Ended::Pending);
    bench.iommu.queue().fail_next(1, TIMEOUT);
    let error = queue.commit().unwrap_err();
    assert_eq!(error, DmaUnmapError::Unconfirmed { error: TIMEOUT });
    assert_eq!(queue.waiting(), 1);
    assert_eq!(queue.commit().unwrap(), 1);
    assert!(!reaches(&bench, iova, &buffer));
    // The one that fills the batch: it waits, too.
    let mappings: Vec<_> = (0..BATCH).map(|_| map(&mut queue, &list).unwrap()).collect();
    for (n, mapping) in mappings.into_iter().enumerate() {
        if n + 1 == BATCH {
            bench.iommu.queue().fail_next(1, TIMEOUT);
            let failed = queue.unmap(mapping).unwrap_err();
            assert!(failed.mapping.is_none());
            assert!(matches!(failed.error, DmaUnmapError::Unconfirmed { .. }), "{failed}");
        } else {
            assert_eq!(queue.unmap(mapping).unwrap(), Ended::Pending);
        }
    }
    assert_eq!((queue.waiting(), queue.commit().unwrap(), queue.waiting()), (BATCH, BATCH, 0));
    drop((queue, buffer));
    bench.finish();
}

/// What the pool maps by itself ends strictly, too, whatever the domain's policy.
#[test]
fn what_is_for_neither_ring_nor_copy_is_out_of_reach_when_its_unmap_returns() {
    let bench = Bench::on(Arc::new(Chosen::new(1)), Policy::Lazy { window_ns: 1 << 62 }, small());
    let device = DmaDevice::new(bench.domain.clone(), u64::MAX).unwrap();
    let config = StrictRingConfig::new(256, PAGE, BATCH);
    let costs = Costs::new(8, 1_000_000);
    let clock = costs.clock(&bench);
    let direction = Direction::Bidirectional;
    let mut queue = AdaptiveRing::new(&device, bench.device(0, false), direction, config, clock).unwrap();
    let buffer = bench.memory.buffer(1000 * PAGE).unwrap();
    // Larger than the ring, in one piece and with a gap.
    for list in [
        &[piece(buffer.phys(), 0, 900 * PAGE)][..],
        &[piece(buffer.phys(), 0, 900 * PAGE + 64), piece(buffer.phys(), 902 * PAGE, 64)],
    ] {
        let mut view = [DmaSegment::default(); 2];
        // SAFETY: the memory is simulated, every access to it atomic.
        let mapped = unsafe { queue.map(list, Attributes::default(), &mut view) };
        let mapping = mapped.unwrap().0;
        assert_eq!(mapping.way(), Some(Way::Direct));
        let iova = mapping.iova();
        bench.iommu.dma_write(DEVICE, iova, &[1]).unwrap();
        assert_eq!(queue.unmap(mapping).unwrap(), Ended::Done(()));
        assert!(bench.iommu.dma_write(DEVICE, iova, &[2]).is_err(), "still in the IOTLB");
    }
}

/// A batch that is full, and whose commit fails again, takes no other descriptor: that comes back, and is still mapped.
#[test]
fn a_descriptor_that_a_full_batch_cannot_take_comes_back() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue(&bench, Direction::FromDevice, (8, 1_000_000));
    let (buffer, list) = page(&bench);
    let mut mappings: Vec<_> = (0..BATCH + 1).map(|_| map(&mut queue, &list).unwrap()).collect();
    let last = mappings.pop().unwrap();
    let iova = last.iova();
    bench.iommu.queue().fail_next(2, TIMEOUT);
    let failed = mappings.into_iter().filter_map(|mapping| queue.unmap(mapping).err());
    assert_eq!(failed.count(), 1);
    let failed = queue.unmap(last).unwrap_err();
    assert!(matches!(failed.error, DmaUnmapError::Unconfirmed { .. }), "{failed}");
    assert!(reaches(&bench, iova, &buffer));
    // That commits the full batch, which the next commit tells.
    assert_eq!(queue.unmap(failed.mapping.unwrap()).unwrap(), Ended::Pending);
    assert_eq!(queue.commit(), Ok(BATCH + 1));
    assert!(!reaches(&bench, iova, &buffer));
    drop((queue, buffer));
    bench.finish();
}

/// A list that was refused half-way in the ring, and may still be reached there: a copy would hide that.
#[test]
fn a_map_that_could_not_be_undone_for_sure_is_told_of_and_ends_with_a_commit() {
    let bench = Bench::new(small());
    let (_, mut queue) = queue(&bench, Direction::FromDevice, (8, 1_000_000));
    let (buffer, [first]) = page(&bench);
    // What no entry can point to.
    let list = [first, piece(PhysAddr::new(1 << 52), 0, PAGE)];
    let copied = map(&mut queue, &list).unwrap();
    assert_eq!(copied.way(), Some(Way::Slot), "what the hardware has confirmed to be gone may be copied");
    bench.iommu.queue().fail_next(1, TIMEOUT);
    let error = map(&mut queue, &list).unwrap_err();
    let unconfirmed = MapListError::Unconfirmed { error: TIMEOUT };
    assert_eq!(error, DmaMapError::List(unconfirmed));
    assert_eq!(queue.commit(), Ok(0));
    drop((queue, copied, buffer));
}

#[test]
fn another_ones_mapping_and_lists_that_are_none_are_errors() {
    let bench = Bench::new(small());
    let (_, mut first) = queue(&bench, Direction::ToDevice, (8, 1_000_000));
    let (_, mut second) = queue(&bench, Direction::ToDevice, (8, 1_000_000));
    let (buffer, list) = page(&bench);
    let mapping = map(&mut first, &list).unwrap();
    let failed = second.unmap(mapping).unwrap_err();
    assert!(matches!(failed.error, DmaUnmapError::OtherQueue), "{failed}");
    let _ = first.unmap(failed.mapping.unwrap()).unwrap();
    for list in [
        &[][..],
        &[piece(buffer.phys(), 0, 0)],
        &[piece(buffer.phys(), 0, u64::MAX), piece(buffer.phys(), 0, 2)],
    ] {
        map(&mut first, list).unwrap_err();
    }
    let pieces = [piece(buffer.phys(), 0, 8), piece(buffer.phys(), 16, 8)];
    // SAFETY: the memory is simulated, every access to it atomic.
    let result = unsafe { first.map(&pieces, Attributes::default(), &mut [DmaSegment::default()]) };
    let no_room = MapListError::NoRoom { needed: 2, room: 1 };
    assert_eq!(result.unwrap_err(), DmaMapError::List(no_room));
    let untranslated = DmaDevice::new(bench.domain.clone(), u64::MAX).unwrap();
    let config = StrictRingConfig::new(256, PAGE, 0);
    let refused = AdaptiveRing::new(&untranslated, bench.device(0, true), Direction::ToDevice, config, || 0);
    assert!(matches!(refused, Err(SetupError::Batch { .. })));
    drop((refused, untranslated));
    first.commit().unwrap();
    drop((first, second, buffer));
    bench.finish();
}
