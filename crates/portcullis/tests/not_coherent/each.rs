//! One case for each clean and each invalidate, in a cache that does nothing by itself but what the
//! case says.

use std::sync::Arc;

use portcullis::addr::Direction::{self, Bidirectional, FromDevice, ToDevice};
use portcullis::addr::{DeviceId, PhysAddr, PhysSegment};
use portcullis::dma::{AnyQueue, DmaMask, DmaUnmapError, Ended, Queue, QueueConfig};
use portcullis::domain::{Policy, UnmapError};

use crate::world::{BATCH, BROKEN, CARD, MAPPING, Machine, PAGE, STRATEGIES, World, map, segment};

pub const POLICIES: [Policy; 3] = [Policy::Strict, Policy::LAZY, Policy::Passthrough];

/// Runs `case` with a queue of each strategy and policy, for whole pages and for a few bytes of a
/// line, where the queue takes them, and with a cache of each kind.
pub fn each(direction: Direction, case: impl Fn(&World, &mut dyn AnyQueue, &[PhysSegment], Direction)) {
    for policy in POLICIES {
        for config in STRATEGIES {
            for (offset, len) in [(0, PAGE), (0, 4 * PAGE), (200, 100), (200, 3 * PAGE)] {
                let is_translated = policy != Policy::Passthrough;
                if !is_translated && config == STRATEGIES[2] || !takes(config, offset, len, direction) {
                    continue;
                }
                for does_both in [false, true] {
                    let world = World::new(policy);
                    world.cache.set_does_both(does_both);
                    let mut queue: Queue<Machine> = world.card().queue(config).unwrap();
                    let first = world.pages(5);
                    case(&world, &mut queue, &[segment(first, offset, len)], direction);
                }
            }
        }
    }
}

pub fn takes(config: QueueConfig, offset: u64, len: u64, direction: Direction) -> bool {
    direction == ToDevice || !MAPPING.contains(&config) || (offset | len) & 127 == 0
}

pub fn bytes(list: &[PhysSegment], seed: u8) -> Vec<u8> {
    (0..list[0].len).map(|index| (index as u8).wrapping_mul(7) ^ seed).collect()
}

pub fn ends(queue: &mut dyn AnyQueue, mapping: portcullis::dma::RawMapping) {
    if queue.unmap_raw(mapping).unwrap() == Ended::Pending {
        assert_eq!(queue.commit_raw().unwrap(), 1);
    }
    assert_eq!(queue.waiting(), 0);
}

#[test]
fn a_device_finds_what_the_cpu_wrote_before_the_map() {
    for direction in [ToDevice, Bidirectional] {
        each(direction, |world, queue, list, direction| {
            world.cpu_writes(list, &bytes(list, 1));
            let (mapping, view) = map(queue, list, direction).unwrap();
            assert!(world.card_reads(&view) == bytes(list, 1), "{list:x?} {direction:?}");
            ends(queue, mapping);
            assert!(world.cpu(list) == bytes(list, 1), "{list:x?} {direction:?}");
        });
    }
}

/// The buffer was dirty when it was mapped; its lines are written back at some time, if they still
/// are.
#[test]
fn no_line_is_written_back_over_what_a_device_wrote() {
    for direction in [FromDevice, Bidirectional] {
        each(direction, |world, queue, list, direction| {
            let (mapping, view) = map(queue, list, direction).unwrap();
            assert!(world.card_writes(&view, &bytes(list, 2)));
            world.cache.evict_all();
            ends(queue, mapping);
            assert!(world.cpu(list) == bytes(list, 2), "{list:x?} {direction:?}");
        });
    }
}

/// The CPU prefetches the buffer, and its copy, before the device writes.
#[test]
fn the_cpu_finds_what_a_device_wrote_after_the_unmap() {
    for direction in [FromDevice, Bidirectional] {
        each(direction, |world, queue, list, direction| {
            let (mapping, view) = map(queue, list, direction).unwrap();
            world.cache.prefetch_all();
            assert!(world.card_writes(&view, &bytes(list, 3)));
            ends(queue, mapping);
            assert!(world.cpu(list) == bytes(list, 3), "{list:x?} {direction:?}");
        });
    }
}

#[test]
fn the_cpu_finds_what_a_device_wrote_after_a_sync() {
    for direction in [FromDevice, Bidirectional] {
        each(direction, |world, queue, list, direction| {
            let (mapping, view) = map(queue, list, direction).unwrap();
            for seed in 4..6 {
                world.cache.prefetch_all();
                assert!(world.card_writes(&view, &bytes(list, seed)));
                queue.sync_raw_for_cpu(&mapping, 0, list[0].len).unwrap();
                assert_eq!(world.cpu(list), bytes(list, seed));
                queue.sync_raw_for_device(&mapping, 0, list[0].len).unwrap();
            }
            ends(queue, mapping);
            assert!(world.cpu(list) == bytes(list, 5), "{list:x?} {direction:?}");
        });
    }
}

#[test]
fn a_device_finds_what_the_cpu_wrote_after_a_sync() {
    for direction in [ToDevice, Bidirectional] {
        each(direction, |world, queue, list, direction| {
            let (mapping, view) = map(queue, list, direction).unwrap();
            queue.sync_raw_for_cpu(&mapping, 0, list[0].len).unwrap();
            world.cpu_writes(list, &bytes(list, 6));
            queue.sync_raw_for_device(&mapping, 0, list[0].len).unwrap();
            assert!(world.card_reads(&view) == bytes(list, 6), "{list:x?} {direction:?}");
            ends(queue, mapping);
            assert!(world.cpu(list) == bytes(list, 6), "{list:x?} {direction:?}");
        });
    }
}

/// The driver read its buffer between two uses, and a careless one left something in it: what is
/// given back to a device that only writes is cleaned, too.
#[test]
fn a_sync_for_a_device_that_writes_leaves_no_dirty_line() {
    each(FromDevice, |world, queue, list, direction| {
        let (mapping, view) = map(queue, list, direction).unwrap();
        queue.sync_raw_for_cpu(&mapping, 0, list[0].len).unwrap();
        world.cpu_writes(list, &bytes(list, 7));
        queue.sync_raw_for_device(&mapping, 0, list[0].len).unwrap();
        assert!(world.card_writes(&view, &bytes(list, 8)));
        world.cache.evict_all();
        ends(queue, mapping);
        assert!(world.cpu(list) == bytes(list, 8), "{list:x?} {direction:?}");
    });
}

/// What is unmapped and waits for its batch the device may write to until the commit. The owner
/// finds the last of it.
#[test]
fn a_batch_is_invalidated_when_it_is_over() {
    for config in &MAPPING[1..] {
        for fails in [false, true] {
            let world = World::new(Policy::Strict);
            let mut queue: Queue<Machine> = world.card().queue(*config).unwrap();
            let first = world.pages(4);
            let lists: Vec<_> = (0..BATCH as u64).map(|n| [segment(first, n * PAGE, PAGE)]).collect();
            let mut mapped: Vec<_> =
                lists.iter().map(|list| map(&mut queue, list, FromDevice).unwrap()).collect();
            for (_, view) in &mapped {
                assert!(world.card_writes(view, &bytes(&lists[0], 1)), "the IOTLB has it now");
            }
            let (last, last_view) = mapped.pop().unwrap();
            let mut views = Vec::new();
            for (mapping, view) in mapped {
                assert_eq!(queue.unmap_raw(mapping).unwrap(), Ended::Pending);
                views.push(view);
            }
            world.cache.prefetch_all();
            for view in &views {
                assert!(world.card_writes(view, &bytes(&lists[0], 9)), "it waits, so the device reaches it");
            }
            assert!(world.card_writes(&last_view, &bytes(&lists[0], 9)));
            if fails {
                // The domain's timer asks again, too: it fails as long as this looks.
                world.iommu.queue().fail_next(u64::MAX, BROKEN);
                let failed = queue.unmap_raw(last).unwrap_err();
                assert!(failed.waits && failed.mapping.is_none());
                assert_eq!(queue.waiting(), BATCH);
                world.cache.prefetch_all();
                for view in &views {
                    assert!(world.card_writes(view, &bytes(&lists[0], 10)), "the IOTLB has it still");
                }
                world.iommu.queue().fail_next(1, BROKEN);
                assert!(queue.commit_raw().is_err());
                assert_eq!(queue.commit_raw(), Ok(BATCH));
            } else {
                assert_eq!(queue.unmap_raw(last).unwrap(), Ended::Flushed(()));
            }
            assert_eq!(queue.waiting(), 0);
            for list in &lists {
                let mut memory = vec![0; PAGE as usize];
                world.memory.read(list[0].phys, &mut memory).unwrap();
                assert_eq!(world.cpu(list), memory, "{config:?}, fails: {fails}");
                assert_ne!(memory, bytes(list, 1));
            }
        }
    }
}

/// A mapping by itself that is not confirmed ends with a commit, and its invalidation with it.
#[test]
fn what_is_not_confirmed_is_invalidated_when_it_is() {
    let world = World::new(Policy::Strict);
    let mut queue: Queue<Machine> = world.card().queue(QueueConfig::direct()).unwrap();
    let list = [segment(world.pages(1), 0, PAGE)];
    let (mapping, view) = map(&mut queue, &list, FromDevice).unwrap();
    assert!(world.card_writes(&view, &bytes(&list, 1)));
    world.iommu.queue().fail_next(u64::MAX, BROKEN);
    let failed = queue.unmap_raw(mapping).unwrap_err();
    assert!(matches!(failed.error, DmaUnmapError::Unmap(UnmapError::Unconfirmed { .. })));
    assert!(failed.waits && queue.waiting() == 1);
    world.cache.prefetch_all();
    assert!(world.card_writes(&view, &bytes(&list, 2)), "the IOTLB has it still");
    world.iommu.queue().fail_next(0, BROKEN);
    assert_eq!(queue.commit_raw(), Ok(1));
    assert_eq!(world.cpu(&list), bytes(&list, 2));
}

/// Other data beside a buffer, in the pages that are mapped with it, is changed while the device
/// has the buffer.
#[test]
fn what_lies_beside_a_buffer_stays() {
    for direction in [FromDevice, Bidirectional] {
        each(direction, |world, queue, list, direction| {
            let piece = list[0];
            let before = [segment(piece.phys, 0, 0)].map(|_| {
                let skip = piece.phys.get() % PAGE;
                PhysSegment { phys: PhysAddr::new(piece.phys.get() - skip), len: skip }
            });
            let after = [segment(piece.phys, piece.len, 100)];
            let (mapping, view) = map(queue, list, direction).unwrap();
            let news: Vec<u8> = vec![0x33; before[0].len as usize];
            world.cpu_writes(&before, &news);
            world.cpu_writes(&after, &[0x44; 100]);
            assert!(world.card_writes(&view, &bytes(list, 1)));
            world.cpu_writes(&after, &[0x45; 100]);
            ends(queue, mapping);
            assert_eq!(world.cpu(&before), news);
            assert_eq!(world.cpu(&after), [0x45; 100]);
            assert!(world.cpu(list) == bytes(list, 1), "{list:x?} {direction:?}");
            world.cache.evict_all();
            assert_eq!(world.cpu(&before), news);
            assert_eq!(world.cpu(&after), [0x45; 100]);
            assert!(world.cpu(list) == bytes(list, 1), "{list:x?} {direction:?}");
        });
    }
}

/// The zeros with which a pool takes memory, hands a buffer to another group, and wipes one, are in
/// the memory when a device may look.
#[test]
fn a_device_finds_zeros_beside_a_copy() {
    let world = World::new(Policy::Strict);
    let zeros = |world: &World, skip: u64, view: portcullis::addr::DmaSegment| {
        let page = view.iova.get() & !(PAGE - 1);
        let mut found = vec![1; PAGE as usize];
        world.iommu.dma_read(CARD, portcullis::addr::Iova::new(page), &mut found).unwrap();
        assert!(found[skip as usize..].iter().all(|byte| *byte == 0), "{found:x?}");
    };
    let list = [segment(world.pages(1), 0, 1000)];
    let mut queue: Queue<Machine> = world.card().queue(QueueConfig::bounce()).unwrap();
    let (mapping, view) = map(&mut queue, &list, Bidirectional).unwrap();
    zeros(&world, 1000, view[0]);
    ends(&mut queue, mapping);
    // Another group, through the same buffer.
    let other = world.domain.attach(DeviceId(8), DmaMask::BITS_64).unwrap().not_coherent().unwrap();
    let mut queue: Queue<Machine> = other.queue(QueueConfig::bounce()).unwrap();
    let few = [segment(list[0].phys, 0, 10)];
    let (mapping, view_of_other) = map(&mut queue, &few, Bidirectional).unwrap();
    assert_eq!(view_of_other[0].iova, view[0].iova, "the case is for the same buffer");
    zeros(&world, 10, view_of_other[0]);
    ends(&mut queue, mapping);
    // And one that is wiped.
    let world = World::wiping();
    let mut queue: Queue<Machine> = world.card().queue(QueueConfig::bounce()).unwrap();
    let (mapping, view) = map(&mut queue, &[segment(world.pages(1), 0, 1000)], Bidirectional).unwrap();
    zeros(&world, 1000, view[0]);
    ends(&mut queue, mapping);
    zeros(&world, 0, view[0]);
}

/// The same in the pool of a machine without an IOMMU, for the slots that a mapping touches.
#[test]
fn a_device_finds_zeros_in_the_rest_of_a_slot() {
    let world = World::new(Policy::Passthrough);
    let mut queue: Queue<Machine> = world.card().queue(QueueConfig::bounce()).unwrap();
    let (mapping, view) = map(&mut queue, &[segment(world.pages(1), 0, 10)], ToDevice).unwrap();
    let mut slot = [1; 256];
    world.iommu.dma_read(CARD, view[0].iova, &mut slot).unwrap();
    assert!(
        slot[..10].iter().all(|byte| *byte == 0xcc) && slot[10..].iter().all(|byte| *byte == 0),
        "{slot:x?}"
    );
    ends(&mut queue, mapping);
}

/// Under a strict policy no device reaches memory while it is cleaned for its first map, when it
/// may hold what an earlier owner left there; nor while it is invalidated, when what the device
/// writes would be lost.
#[test]
fn a_device_does_not_reach_what_is_cleaned_or_invalidated() {
    for config in MAPPING {
        let world = World::new(Policy::Strict);
        let mut queue: Queue<Machine> = world.card().queue(config).unwrap();
        let list = [segment(world.pages(1), 0, PAGE)];
        // The addresses that the queue uses, and uses again.
        let mut known = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let (mapping, view) = map(&mut queue, &list, Bidirectional).unwrap();
            known.insert(view[0].iova);
            ends(&mut queue, mapping);
        }
        let met = Arc::new(std::sync::Mutex::new([0; 2]));
        let (iommu, seen) = (Arc::clone(&world.iommu), Arc::clone(&met));
        let addresses: Vec<_> = known.iter().copied().collect();
        world.cache.watch(move |cleans| {
            seen.lock().unwrap()[usize::from(cleans)] += 1;
            let reached = addresses.iter().any(|iova| iommu.dma_write(CARD, *iova, b"now").is_ok());
            assert!(!reached, "cleans: {cleans}");
        });
        for _ in 0..10 {
            let (mapping, view) = map(&mut queue, &list, Bidirectional).unwrap();
            assert!(known.contains(&view[0].iova), "{config:?}");
            assert!(world.card_writes(&view, &bytes(&list, 1)));
            ends(&mut queue, mapping);
        }
        assert_eq!(*met.lock().unwrap(), [10, 10]);
    }
}

/// A device that is coherent pays for nothing, also in a domain with another that is not.
#[test]
fn a_coherent_device_is_left_alone() {
    let world = World::new(Policy::Strict);
    drop(world.card().queue::<std::convert::Infallible>(QueueConfig::bounce()).unwrap());
    let first = world.pages(1);
    let coherent = world.domain.attach(DeviceId(9), DmaMask::BITS_64).unwrap();
    let before = world.cache.calls();
    for config in STRATEGIES {
        let mut queue: Queue<Machine> = coherent.queue(config).unwrap();
        let (mapping, _) = map(&mut queue, &[segment(first, 0, 64)], Bidirectional).unwrap();
        queue.sync_raw_for_cpu(&mapping, 0, 64).unwrap();
        queue.sync_raw_for_device(&mapping, 0, 64).unwrap();
        ends(&mut queue, mapping);
    }
    assert_eq!(world.cache.calls(), before);
    assert!(coherent.dma().is_coherent() && !world.card().dma().is_coherent());
}

/// A ring without room: what the pool copies goes through the pool, which maps nothing, so what is
/// longer has to wait.
#[test]
fn auto_copies_what_a_full_ring_has_no_room_for() {
    let world = World::new(Policy::Strict);
    let config = QueueConfig::auto(16, PAGE).batch(1);
    let mut queue: Queue<Machine> = world.card().queue(config).unwrap();
    let first = world.pages(16);
    let is_mapped = |view: &[portcullis::addr::DmaSegment], list: &[PhysSegment]| {
        let reached = world.iommu.probe(CARD, view[0].iova, portcullis::addr::Permissions::WRITE);
        reached == Some(list[0].phys)
    };
    let mut mapped = Vec::new();
    let list = [segment(first, 0, PAGE)];
    while mapped.len() < 1000 {
        let (mapping, view) = map(&mut queue, &list, FromDevice).unwrap();
        let in_ring = is_mapped(&view, &list);
        mapped.push(mapping);
        if !in_ring {
            break;
        }
    }
    assert!((2..1000).contains(&mapped.len()), "the ring was never full");
    let full = map(&mut queue, &[segment(first, 0, 4 * PAGE)], FromDevice).unwrap_err();
    assert!(full.is_full(), "{full}");
    let last = mapped.pop().unwrap();
    ends(&mut queue, last);
    mapped.into_iter().for_each(|mapping| ends(&mut queue, mapping));
    let (mapping, view) = map(&mut queue, &[segment(first, 0, 4 * PAGE)], FromDevice).unwrap();
    assert!(is_mapped(&view, &list));
    ends(&mut queue, mapping);
}
