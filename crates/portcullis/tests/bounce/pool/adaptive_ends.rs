//! Buffers that share their first and last page: in the ring, their ends are copied and the pages between them mapped.

use std::sync::Arc;

use portcullis::addr::{Direction, DmaSegment, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, DeviceProfile, PoolConfig, Way};
use portcullis::dma::{AdaptiveRing, DmaDevice, Ended, RawMapping, StrictRingConfig};
use portcullis_model::Buffer;

use crate::pool::adaptive_ring::{BATCH, Queue, map, rows};
use crate::pool::costs::Clock;
use crate::pool::support::{Bench, DEVICE, PAGE, TIMEOUT, piece, small};

const HALF: u64 = PAGE / 2;

/// A queue of an untrusted device with 256 pages, by whose clock a byte that is copied takes a nanosecond, and a wait 80.
fn queue(bench: &Bench, direction: Direction) -> Queue {
    queue_of(bench, DeviceProfile { untrusted: true, ..DeviceProfile::default() }, direction)
}

fn queue_of(bench: &Bench, profile: DeviceProfile, direction: Direction) -> Queue {
    let device = DmaDevice::new(bench.domain.clone(), profile.mask).unwrap();
    let pooled = BounceDevice::new(bench.pool.clone(), profile).unwrap();
    let (iommu, frames) = (Arc::clone(&bench.iommu), bench.frames.clone());
    let clock: Clock = Box::new(move || frames.copied() + 80 * iommu.stats().submissions);
    let config = StrictRingConfig::new(256, PAGE, BATCH);
    AdaptiveRing::new(&device, pooled, direction, config, clock).unwrap()
}

/// Maps half a page, four pages and a half. The device has their middle only.
fn map_half(bench: &Bench, queue: &mut Queue, buffer: &Buffer) -> RawMapping {
    let mapping = map(queue, &[piece(buffer.phys(), HALF, 5 * PAGE)]).unwrap();
    assert_eq!(mapping.way(), Some(Way::Split));
    let open: Vec<_> = (0..6).map(|page| original_page(bench, mapping.iova(), buffer, page)).collect();
    assert_eq!(open, [None, Some(1), Some(2), Some(3), Some(4), None]);
    mapping
}

/// The page of `buffer` that the device gets to in page `page` of the mapping at `iova`.
fn original_page(bench: &Bench, iova: Iova, buffer: &Buffer, page: u64) -> Option<u64> {
    let at = Iova::new((iova.get() & !(PAGE - 1)) + page * PAGE);
    let reached = bench.reaches(at, Permissions::READ).or(bench.reaches(at, Permissions::WRITE))?;
    let page = reached.get().wrapping_sub(buffer.phys().get()) / PAGE;
    (page < buffer.len() / PAGE).then_some(page)
}

fn reaches_any(bench: &Bench, iova: Iova, buffer: &Buffer) -> bool {
    (0..6).any(|page| original_page(bench, iova, buffer, page).is_some())
}

#[test]
fn the_middle_is_mapped_where_that_is_cheaper_than_to_copy_all() {
    let bench = Bench::new(small());
    let mut queue = queue(&bench, Direction::ToDevice);
    for row in rows(&queue).iter().filter(|row| row.shared) {
        // At most two pages of ends, and a tenth of a wait.
        let cut = row.map_ns.map(|(map_ns, unmap_ns)| (map_ns, unmap_ns <= 80));
        let least = if row.most_bytes > PAGE { Some((PAGE, true)) } else { None };
        assert_eq!(cut, least, "{row:?}");
        assert_eq!(row.copies, row.most_bytes <= PAGE, "{row:?}");
    }
    let buffer = bench.memory.buffer(32 * PAGE).unwrap();
    let at = |offset, len| piece(buffer.phys(), offset, len);
    let copied_before = bench.frames.copied();
    let cut = map_half(&bench, &mut queue, &buffer);
    assert_eq!(bench.frames.copied() - copied_before, PAGE, "the ends, and nothing else");
    // Lists that touch, and one end alone; more than a copy may have, too.
    for list in [
        &[at(HALF, HALF), at(3 * PAGE, PAGE), at(7 * PAGE, 5)][..],
        &[at(0, 2 * PAGE), at(9 * PAGE, 5)],
        &[at(5 * PAGE - 5, 5 + 2 * PAGE)],
        &[at(1, 20 * PAGE)],
    ] {
        let mapping = map(&mut queue, list).unwrap();
        assert_eq!(mapping.way(), Some(Way::Split), "{list:?}");
        assert_eq!(queue.unmap(mapping).unwrap(), Ended::Pending);
    }
    // No page for itself, or a gap inside one: a copy of all.
    for list in [
        &[at(HALF, PAGE)][..],
        &[at(1, 2 * PAGE - 2)],
        &[at(0, PAGE), at(2 * PAGE, PAGE - 1), at(3 * PAGE, PAGE)],
        &[at(0, PAGE - 1)],
    ] {
        let mapping = map(&mut queue, list).unwrap();
        assert_eq!(mapping.way(), Some(Way::Slot), "{list:?}");
        assert_eq!(queue.unmap(mapping).unwrap(), Ended::Done(()));
    }
    let _ = queue.unmap(cut).unwrap();
    assert_eq!(queue.commit().unwrap(), 5);
    drop((queue, buffer));
    bench.finish();
}

#[test]
fn where_the_pool_is_not_to_split_all_is_copied() {
    let bench = Bench::new(PoolConfig { split: false, ..small() });
    let mut queue = queue(&bench, Direction::ToDevice);
    let buffer = bench.memory.buffer(6 * PAGE).unwrap();
    let mapping = map(&mut queue, &[piece(buffer.phys(), HALF, 5 * PAGE)]).unwrap();
    assert_eq!(mapping.way(), Some(Way::Slot));
    let _ = queue.unmap(mapping).unwrap();
    drop((queue, buffer));
    bench.finish();
}

#[test]
fn data_goes_both_ways_and_syncs_reach_ends_and_middle() {
    for direction in Direction::ALL {
        let bench = Bench::new(small());
        let mut queue = queue(&bench, direction);
        let buffer = bench.memory.buffer(6 * PAGE).unwrap();
        let (at, len) = (piece(buffer.phys(), HALF, 5 * PAGE).phys, 5 * PAGE);
        let (reads, writes) = (direction != Direction::FromDevice, direction != Direction::ToDevice);
        for round in 0..40_u64 {
            let bytes: Vec<u8> = (0..len).map(|n| (n * 7 + round) as u8).collect();
            bench.write(at, &bytes);
            let mapping = map_half(&bench, &mut queue, &buffer);
            let iova = mapping.iova();
            // Parts at either end, across both cuts, and of nothing but the middle.
            let (offset, count) =
                [(0, 9), (0, len), (HALF - 3, 6), (PAGE, PAGE), (len - HALF - 3, 9), (len - 1, 1)]
                    [round as usize % 6];
            if reads {
                assert!(bench.seen(iova, len).unwrap() == bytes, "round {round}");
                let changed = vec![200; count as usize];
                bench.write(piece(at, offset, count).phys, &changed);
                queue.sync_for_device(&mapping, offset, count).unwrap();
                assert!(
                    bench.seen(Iova::new(iova.get() + offset), count).unwrap() == changed,
                    "round {round}"
                );
            }
            let mut left = bench.bytes(at, len);
            if writes {
                let written = vec![201; count as usize];
                bench.iommu.dma_write(DEVICE, Iova::new(iova.get() + offset), &written).unwrap();
                queue.sync_for_cpu(&mapping, offset, count).unwrap();
                assert!(bench.bytes(piece(at, offset, count).phys, count) == written, "round {round}");
                bench.iommu.dma_write(DEVICE, iova, &vec![202; len as usize]).unwrap();
                left = vec![202; len as usize];
            }
            for (offset, count) in [(0, len + 1), (len, 1), (u64::MAX, 2)] {
                queue.sync_for_cpu(&mapping, offset, count).unwrap_err();
                queue.sync_for_device(&mapping, offset, count).unwrap_err();
            }
            let committed = queue.unmap(mapping).unwrap() == Ended::Flushed(());
            assert!(bench.bytes(at, len) == left, "round {round}");
            assert_eq!(committed, !reaches_any(&bench, iova, &buffer));
            if !committed && writes {
                // It has the copies yet, and changes nothing by them.
                bench.iommu.dma_write(DEVICE, iova, &[203; 9]).unwrap();
                bench.iommu.dma_write(DEVICE, Iova::new(iova.get() + len - 9), &[203; 9]).unwrap();
            }
            if round % 11 == 10 {
                queue.commit().unwrap();
            }
            assert!(bench.bytes(at, len) == left, "round {round}");
        }
        queue.commit().unwrap();
        drop((queue, buffer));
        bench.finish();
    }
}

/// A slot is not lent again before the commit: whoever had it then could be read, or written to, through the ring.
#[test]
fn no_other_mapping_has_a_slot_before_the_commit_that_ends_its_use() {
    let bench = Bench::new(small());
    let mut queue = queue(&bench, Direction::FromDevice);
    let buffers: Vec<_> = (0..BATCH).map(|_| bench.memory.buffer(6 * PAGE).unwrap()).collect();
    let other = bench.memory.buffer(PAGE).unwrap();
    let small = [piece(other.phys(), 8, 100)];
    let memory_at = |iova: Iova| bench.reaches(iova, Permissions::WRITE).map(|phys| phys.get() & !(PAGE - 1));
    let mut used = Vec::new();
    for (n, buffer) in buffers.iter().enumerate() {
        let mapping = map_half(&bench, &mut queue, buffer);
        used.push((mapping.iova(), Iova::new(mapping.iova().get() + 5 * PAGE - 1)));
        let expected = if n + 1 < BATCH { Ended::Pending } else { Ended::Flushed(()) };
        let slots =
            used.iter().flat_map(|(head, tail)| [memory_at(*head), memory_at(*tail)]).collect::<Vec<_>>();
        assert_eq!(queue.unmap(mapping).unwrap(), expected);
        // What others map through slots now.
        let mapped = map(&mut queue, &small).unwrap();
        let theirs = memory_at(mapped.iova());
        assert!(theirs.is_some());
        assert_eq!(slots.contains(&theirs), n + 1 == BATCH, "after {n}");
        assert_eq!(queue.unmap(mapped).unwrap(), Ended::Done(()));
    }
    assert!(used.iter().all(|(head, tail)| memory_at(*head).is_none() && memory_at(*tail).is_none()));
    drop((queue, buffers, other));
    bench.finish();
}

#[test]
fn a_commit_that_fails_keeps_the_slots_and_the_next_gives_them_back() {
    let bench = Bench::new(small());
    let mut queue = queue(&bench, Direction::FromDevice);
    let buffer = bench.memory.buffer(6 * PAGE).unwrap();
    let in_use = || bench.pool.usage().buffer_bytes - bench.pool.usage().cached_bytes;
    let mapping = map_half(&bench, &mut queue, &buffer);
    let iova = mapping.iova();
    assert_eq!(queue.unmap(mapping).unwrap(), Ended::Pending);
    bench.iommu.queue().fail_next(1, TIMEOUT);
    queue.commit().unwrap_err();
    assert_eq!(in_use(), 2 * PAGE, "devices may know the translation yet");
    queue.commit().unwrap();
    assert_eq!((in_use(), reaches_any(&bench, iova, &buffer)), (0, false));
    // A batch is full, and its commit fails twice: the one that finds no room comes back, and ends later, with its data.
    let mut mappings: Vec<_> = (0..BATCH + 1).map(|_| map_half(&bench, &mut queue, &buffer)).collect();
    let last = mappings.pop().unwrap();
    bench.iommu.queue().fail_next(2, TIMEOUT);
    assert_eq!(mappings.into_iter().filter_map(|mapping| queue.unmap(mapping).err()).count(), 1);
    let back = queue.unmap(last).unwrap_err().mapping.unwrap();
    assert_eq!((back.way(), in_use()), (Some(Way::Split), 2 * PAGE * (BATCH as u64 + 1)));
    bench.iommu.dma_write(DEVICE, back.iova(), &[9; 5]).unwrap();
    assert_eq!(queue.unmap(back).unwrap(), Ended::Pending);
    assert_eq!(bench.bytes(piece(buffer.phys(), HALF, 5).phys, 5), [9; 5]);
    queue.commit().unwrap();
    assert_eq!(in_use(), 0);
    drop((queue, buffer));
    bench.finish();
}

/// Whether the ring refuses it or only may have mapped it.
#[test]
fn what_the_ring_refuses_keeps_no_slot_longer_than_a_device_may_reach_it() {
    let bench = Bench::new(small());
    let mut queue = queue(&bench, Direction::FromDevice);
    let buffer = bench.memory.buffer(6 * PAGE).unwrap();
    let in_use = || bench.pool.usage().buffer_bytes - bench.pool.usage().cached_bytes;
    bench.write(buffer.phys(), &vec![77; 6 * PAGE as usize]);
    // What no entry can point to, between two pages that it may.
    let far = PhysAddr::new(1 << 52);
    let list = [piece(buffer.phys(), HALF, HALF), piece(buffer.phys(), PAGE, PAGE), piece(far, 0, PAGE + 5)];
    bench.iommu.queue().fail_next(1, TIMEOUT);
    assert!(map(&mut queue, &list).is_err());
    assert_eq!(in_use(), 2 * PAGE);
    queue.commit().unwrap();
    assert_eq!(in_use(), 0);
    // A full ring: a copy of all, and nothing else.
    let mut live: Vec<_> = (0..)
        .map_while(|_| {
            Some(map(&mut queue, &[piece(buffer.phys(), HALF, 5 * PAGE)]).unwrap())
                .filter(|mapping| mapping.way() == Some(Way::Split))
        })
        .collect();
    assert!((32..=128).contains(&live.len()), "{}", live.len());
    assert!(bench.bytes(buffer.phys(), 6 * PAGE).iter().all(|byte| *byte == 77), "nothing was copied out");
    live.drain(..).for_each(|mapping| _ = queue.unmap(mapping).unwrap());
    queue.commit().unwrap();
    // Where the hardware has confirmed that it forgot the middle, a copy of all has a slot, and no commit is waited for.
    let used = in_use();
    let copied = map(&mut queue, &list).unwrap();
    assert_eq!(copied.way(), Some(Way::Slot));
    assert_eq!(queue.unmap(copied).unwrap(), Ended::Done(()));
    assert_eq!((in_use(), queue.commit().unwrap()), (used, 0));
    drop((queue, buffer));
}

/// The ring leaves open what is mapped when it goes, and so the slots in it must not be anybody else's.
#[test]
fn a_slot_that_is_still_reached_when_the_ring_is_gone_is_never_freed() {
    for (ends, fails) in [(true, 0), (true, u64::MAX), (false, 0)] {
        let bench = Bench::new(small());
        let mut queue = queue(&bench, Direction::FromDevice);
        let buffer = bench.memory.buffer(6 * PAGE).unwrap();
        let mapping = map_half(&bench, &mut queue, &buffer);
        let iova = mapping.iova();
        let slot = bench.reaches(iova, Permissions::WRITE).unwrap();
        if ends {
            assert_eq!(queue.unmap(mapping).unwrap(), Ended::Pending);
        } else {
            let _ = mapping;
        }
        bench.iommu.queue().fail_next(fails, TIMEOUT);
        drop(queue);
        bench.iommu.queue().fail_next(0, TIMEOUT);
        if ends && fails == 0 {
            drop(buffer);
            bench.finish();
            continue;
        }
        let Bench { pool, device, iommu, memory, .. } = bench;
        drop((pool, device));
        // Whether or not the device gets there yet, nobody else does.
        let fresh: Vec<_> = std::iter::from_fn(|| memory.buffer(PAGE)).take(2000).collect();
        assert!(fresh.iter().all(|frame| frame.phys().get() != slot.get() & !(PAGE - 1)));
        if !ends {
            assert_eq!(iommu.probe(DEVICE, iova, Permissions::WRITE), Some(slot));
        }
    }
}

/// The notes and the slots are used again.
#[test]
fn in_the_long_run_nothing_is_allocated_and_what_the_cpu_wrote_stays_hidden() {
    let bench = Bench::new(small());
    let mut queue = queue(&bench, Direction::ToDevice);
    let buffer = bench.memory.buffer(6 * PAGE).unwrap();
    bench.write(buffer.phys(), &vec![55; 6 * PAGE as usize]);
    let list: [PhysSegment; 1] = [piece(buffer.phys(), HALF, 5 * PAGE)];
    let mut view = [DmaSegment::default()];
    let mut buffers = 0;
    for round in 0..500 {
        // SAFETY: the memory is simulated, every access to it atomic.
        let (mapping, used) = unsafe { queue.map(&list, Attributes::default(), &mut view) }.unwrap();
        assert_eq!((used, view[0]), (1, DmaSegment { iova: mapping.iova(), len: 5 * PAGE }));
        let page = Iova::new(mapping.iova().get() & !(PAGE - 1));
        // Before the data, in its page, nothing is shown of the original's.
        assert!(bench.seen(page, HALF).unwrap().iter().all(|byte| *byte == 0), "round {round}");
        let _ = queue.unmap(mapping).unwrap();
        if round == 100 {
            buffers = bench.pool.usage().buffer_bytes;
        }
    }
    assert_eq!(bench.pool.usage().buffer_bytes, buffers);
    queue.commit().unwrap();
    drop((queue, buffer));
    bench.finish();
}

/// The pages that a device is given in the place of the ends hold no bytes of another group's, and with `wipe` nothing
/// later. One of the devices does not reach the slots' own addresses, and needs not.
#[test]
fn a_slot_in_the_ring_shows_no_other_group_s_bytes() {
    for wipe in [false, true] {
        slots_show_no_other_group_s_bytes(wipe);
    }
}

fn slots_show_no_other_group_s_bytes(wipe: bool) {
    let bench = Bench::new(PoolConfig { wipe, ..small() });
    let profile = DeviceProfile { untrusted: true, ..DeviceProfile::default() };
    let near = DeviceProfile { group: 1, mask: u64::from(u32::MAX), ..profile };
    let mut queues = [profile, near].map(|profile| queue_of(&bench, profile, Direction::Bidirectional));
    let buffer = bench.memory.buffer(6 * PAGE).unwrap();
    bench.write(buffer.phys(), &vec![55; 6 * PAGE as usize]);
    let list = [piece(buffer.phys(), HALF, 5 * PAGE)];
    let mut had = [Vec::new(), Vec::new()];
    for round in 0..40 {
        let group = round / 3 % 2;
        let (queue, mut view) = (&mut queues[group], [DmaSegment::default()]);
        // SAFETY: the memory is simulated, every access to it atomic.
        let (mapping, _) = unsafe { queue.map(&list, Attributes::default(), &mut view) }.unwrap();
        assert_eq!(mapping.way(), Some(Way::Split));
        let (head, after) = (mapping.iova().get() - HALF, mapping.iova().get() + 5 * PAGE);
        let around = [head, after].map(Iova::new);
        let slots = around.map(|at| bench.reaches(at, Permissions::READ).unwrap().get() & !(PAGE - 1));
        for at in around {
            // Its own group's marks, or nothing.
            let seen = bench.seen(at, HALF).unwrap();
            assert!(seen.iter().all(|byte| [0, 100 + group as u8].contains(byte)), "round {round}");
            bench.iommu.dma_write(DEVICE, at, &vec![100 + group as u8; HALF as usize]).unwrap();
        }
        let _ = queue.unmap(mapping).unwrap();
        queue.commit().unwrap();
        for slot in slots {
            let bytes = bench.bytes(PhysAddr::new(slot), PAGE);
            assert_eq!(wipe, bytes.iter().all(|byte| *byte == 0), "round {round}");
        }
        had[group].extend(slots);
    }
    assert!(had[0].iter().any(|slot| had[1].contains(slot)), "they were the same slots");
    drop((queues, buffer));
    bench.finish();
}

/// What a device leaves unwritten stays with `copy_in`; without it the driver finds no CPU's bytes in it.
#[test]
fn ends_that_a_device_does_not_write_stay_or_hold_no_cpu_s_bytes() {
    let bench = Bench::new(small());
    let mut queue = queue(&bench, Direction::FromDevice);
    let buffer = bench.memory.buffer(6 * PAGE).unwrap();
    let list = [piece(buffer.phys(), HALF, 5 * PAGE)];
    for round in 0..40 {
        let copy_in = round % 3 == 0;
        bench.write(buffer.phys(), &vec![55; 6 * PAGE as usize]);
        let attributes = Attributes { copy_in };
        // SAFETY: as above.
        let (mapping, _) = unsafe { queue.map(&list, attributes, &mut [DmaSegment::default()]) }.unwrap();
        assert_eq!(mapping.way(), Some(Way::Split));
        let _ = queue.unmap(mapping).unwrap();
        let all = bench.bytes(buffer.phys(), 6 * PAGE);
        let at = |from: u64, to: u64| &all[from as usize..to as usize];
        let (around, middle) = ([at(0, HALF), at(5 * PAGE + HALF, 6 * PAGE)], at(PAGE, 5 * PAGE));
        assert!(around.iter().all(|part| part.iter().all(|byte| *byte == 55)), "round {round}");
        assert!(middle.iter().all(|byte| *byte == 55), "round {round}");
        let left = if copy_in { 55 } else { 0 };
        let ends = [at(HALF, PAGE), at(5 * PAGE, 5 * PAGE + HALF)];
        assert!(ends.iter().all(|part| part.iter().all(|byte| *byte == left)), "round {round}");
        if round % 4 == 3 {
            queue.commit().unwrap();
        }
    }
    queue.commit().unwrap();
    drop((queue, buffer));
    bench.finish();
}
