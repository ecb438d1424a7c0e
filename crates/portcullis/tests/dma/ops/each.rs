//! One driver under each configuration.

use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, PhysSegment};
use portcullis::bounce::pool::PoolConfig;
use portcullis::dma::{DmaAttributes, DmaMask, Ended, OpsConfig, Queue, QueueConfig};
use portcullis::domain::Domain;
use portcullis::pgtable::{Arm, Memory as CacheKind, PageTable};
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Iommu, IommuConfig, Memory};

use super::support::{CONFIGS, Calls, THRESHOLD, buffer, contents, machine, part, whole};
use crate::queue::world::{CARD, Machine, PAGE};

/// Buffers of any length at any offset: the device finds the driver's bytes, the driver the device's, and afterwards
/// the device changes nothing of what is strict.
#[test]
fn what_a_device_reads_and_writes_between_map_and_unmap_is_the_buffer() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        for (offset, len) in
            [(0, PAGE), (100, 60), (PAGE - 8, 16), (0, THRESHOLD), (8, THRESHOLD + 8), (0, 3 * THRESHOLD)]
        {
            let memory = buffer(&world, len + 2 * PAGE, 7);
            let piece = part(&memory, offset, len);
            for direction in Direction::ALL {
                memory.write(offset, b"for card").unwrap();
                let iova = ops.maps(piece, direction).unwrap();
                let last = Iova::new(iova.get() + len - 8);
                if direction != Direction::FromDevice {
                    assert_eq!(
                        world.reads(iova).as_ref(),
                        Some(b"for card"),
                        "{config:?} {len:#x} {direction:?}"
                    );
                }
                let may_write = direction != Direction::ToDevice;
                assert_eq!(world.writes(iova, b"from it!"), may_write);
                assert_eq!(world.writes(last, b"the last"), may_write);
                ops.ends(iova, len).unwrap();
                if may_write {
                    let bytes = contents(&memory);
                    let (first, end) = (offset as usize, (offset + len) as usize);
                    let begins = if len >= 16 { &b"from it!"[..] } else { &b"the last"[..] };
                    assert_eq!(&bytes[first..first + 8], begins, "{config:?} {len:#x} {direction:?}");
                    assert_eq!(&bytes[end - 8..end], b"the last");
                    assert!(
                        bytes[..first].iter().chain(&bytes[end..]).all(|byte| *byte == 7),
                        "and nothing beside it"
                    );
                }
                let before = contents(&memory);
                let _ = world.writes(iova, b"too late");
                assert_eq!(
                    contents(&memory) == before,
                    !matches!(config, OpsConfig::Lazy { .. }) || !may_write
                );
                memory.write(offset, &[7; 8]).unwrap();
                memory.write(offset + len - 8, &[7; 8]).unwrap();
            }
        }
        let usage = ops.usage();
        assert_eq!((usage.maps, usage.unmaps, usage.open_mappings(), usage.errors), (18, 18, 0, 0));
        assert_eq!((usage.open_bytes, usage.exposed_bytes), (0, 0), "{config:?}");
        let is_bounced = matches!(config, OpsConfig::Bounce { .. });
        let (copies, copied) =
            if is_bounced { (15, 3 * (PAGE + 60 + 16 + THRESHOLD + THRESHOLD + 8)) } else { (0, 0) };
        assert_eq!(usage.copies, copies, "of whole granules above the threshold there is none");
        assert_eq!(usage.copied_bytes, copied, "{config:?}");
        ops.domain().flush().unwrap();
        assert_eq!(ops.domain().stats().lost_iova_bytes, 0);
    }
}

/// A sync for the CPU copies nothing from a buffer that the device only reads: the copy would undo the driver's later writes.
#[test]
fn a_sync_leaves_what_the_driver_has_written_for_a_device() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        for len in [64, 3 * THRESHOLD] {
            let memory = buffer(&world, len + PAGE, 7);
            let iova = ops.maps(part(&memory, 8, len), Direction::ToDevice).unwrap();
            memory.write(8, b"the next").unwrap();
            ops.syncs_for_cpu(iova, len).unwrap();
            assert_eq!(contents(&memory)[8..16], *b"the next", "{config:?} {len:#x}");
            ops.ends(iova, len).unwrap();
        }
    }
}

/// Pieces of a list that fill their pages are one segment; others are segments of their own. The list ends at once.
#[test]
fn a_list_has_one_range_and_its_end_one_wait() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        let memory = buffer(&world, 64 * PAGE, 7);
        let pages = |first: u64, count: u64| part(&memory, first * PAGE, count * PAGE);
        let lists: [&[PhysSegment]; 3] = [
            &[pages(3, 1), pages(9, 2), pages(1, 1)],
            &[part(&memory, 5 * PAGE + 512, PAGE - 512), pages(20, 1), part(&memory, 30 * PAGE, 100)],
            &[
                part(&memory, 12 * PAGE + 8, 64),
                part(&memory, 14 * PAGE + 16, 64),
                part(&memory, 16 * PAGE + 24, 64),
            ],
        ];
        for (number, list) in lists.into_iter().enumerate() {
            let segments = ops.maps_list(list, Direction::FromDevice).unwrap();
            let is_copied = ops.config() == CONFIGS[2];
            assert_eq!(
                segments.len(),
                if number < 2 || is_copied { 1 } else { 3 },
                "{config:?} {segments:?}"
            );
            let total: u64 = segments.iter().map(|segment| segment.len).sum();
            assert_eq!(total, list.iter().map(|piece| piece.len).sum::<u64>());
            for segment in &segments {
                assert!(world.writes(segment.iova, &vec![0x55; segment.len as usize]));
            }
            if !is_copied {
                assert!(
                    ops.usage().open_bytes == total
                        && ops.usage().exposed_bytes % PAGE == (PAGE - total % PAGE) % PAGE
                );
            }
            let waits = world.iommu.stats().waits;
            let (iova, len) = whole(&segments);
            ops.ends(iova, len).unwrap();
            let waits = world.iommu.stats().waits - waits;
            assert_eq!(waits, u64::from(config == CONFIGS[0]), "{config:?}");
            for piece in list {
                let mut bytes = vec![0; piece.len as usize];
                memory.read(piece.phys.get() - memory.phys().get(), &mut bytes).unwrap();
                assert!(bytes.iter().all(|byte| *byte == 0x55));
            }
            let usage = ops.usage();
            assert_eq!((usage.open_bytes, usage.exposed_bytes, usage.open_mappings()), (0, 0, 0));
        }
    }
}

/// A sync names any part of a mapping by its address.
#[test]
fn any_part_of_a_mapping_is_synced_by_its_address() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        // Through a slot, and with copies of its ends.
        for (offset, len) in [(24, 4 * PAGE), (24, 3 * THRESHOLD)] {
            let memory = buffer(&world, len + 2 * PAGE, 7);
            let iova = ops.maps(part(&memory, offset, len), Direction::Bidirectional).unwrap();
            for at in [0, 8, 4080 - 24, 4096 - 24, len / 2, len - 8] {
                let there = Iova::new(iova.get() + at);
                assert!(world.writes(there, b"from it!"));
                ops.syncs_for_cpu(there, 8).unwrap();
                assert_eq!(
                    &contents(&memory)[(offset + at) as usize..][..8],
                    b"from it!",
                    "{config:?} {at:#x}"
                );
                memory.write(offset + at, b"for card").unwrap();
                ops.syncs_for_device(there, 8).unwrap();
                assert_eq!(world.reads(there).as_ref(), Some(b"for card"), "{config:?} {at:#x}");
            }
            ops.ends(iova, len).unwrap();
        }
        assert_eq!((ops.usage().syncs, ops.usage().errors), (24, 0));
    }
}

/// What a device leaves alone of a buffer that it may write to is as it was, and nothing of what others had in its place.
#[test]
fn what_a_device_does_not_write_stays() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        for (value, wrote) in [(7, false), (9, true), (5, false)] {
            let memory = buffer(&world, PAGE, value);
            let iova = ops.maps(part(&memory, 0, 64), Direction::FromDevice).unwrap();
            assert!(!wrote || world.writes(iova, b"from it!"));
            ops.ends(iova, 64).unwrap();
            let begins = if wrote { b"from it!" } else { &[value; 8] };
            let bytes = contents(&memory);
            assert_eq!((&bytes[..8], &bytes[8..64]), (&begins[..], &[value; 56][..]), "{config:?}");
        }
    }
}

/// Nothing is copied where the driver says so: a sync does it, or nobody wants it. Through a slot, and with copies of the ends.
#[test]
fn a_driver_may_say_that_nothing_is_to_be_copied() {
    for config in CONFIGS {
        for (offset, len) in [(0, 64), (8, 3 * THRESHOLD)] {
            let (world, ops) = machine(config);
            let is_copied = config == CONFIGS[2];
            let memory = buffer(&world, len + 2 * PAGE, 7);
            let attributes = DmaAttributes { skip_copy: true, ..DmaAttributes::default() };
            let iova = ops.maps_as(part(&memory, offset, len), Direction::Bidirectional, attributes).unwrap();
            let last = Iova::new(iova.get() + len - 8);
            for at in [iova, last] {
                assert_eq!(
                    world.reads(at),
                    Some(if is_copied { [0; 8] } else { [7; 8] }),
                    "{config:?} {len:#x}"
                );
            }
            ops.syncs_for_device(iova, len).unwrap();
            for at in [iova, last] {
                assert_eq!(world.reads(at), Some([7; 8]));
                assert!(world.writes(at, b"unwanted"));
            }
            ops.ends_uncopied(iova, len).unwrap();
            for at in [offset, offset + len - 8] {
                let found = &contents(&memory)[at as usize..][..8];
                assert_eq!(found, if is_copied { &[7; 8][..] } else { b"unwanted" });
            }
            // What was not copied in at first was noted, and is gone from the buffer when another group has it.
            assert_eq!((ops.usage().errors, ops.usage().open_mappings()), (0, 0));
        }
    }
}

/// Longer than a slot, of pieces that fill no granules: in a buffer of its own.
#[test]
fn a_long_list_whose_pieces_end_inside_granules_is_copied_whole() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        let memory = buffer(&world, 3 * THRESHOLD, 7);
        let pieces = [(8, THRESHOLD + 100), (THRESHOLD + 2 * PAGE + 16, 60), (2 * THRESHOLD, 5 * PAGE + 1)];
        let list = pieces.map(|(offset, len)| part(&memory, offset, len));
        let places: Vec<_> = pieces.iter().flat_map(|(offset, len)| *offset..offset + len).collect();
        let byte = |number: usize| ((number as u64 * 0x9e37_79b9) >> 13) as u8;
        for (number, at) in places.iter().enumerate() {
            memory.write(*at, &[byte(number)]).unwrap();
        }
        let segments = ops.maps_list(&list, Direction::Bidirectional).unwrap();
        let mut first = 0;
        for segment in &segments {
            let end = first + segment.len as usize;
            let mut found = vec![0; segment.len as usize];
            world.iommu.dma_read(CARD, segment.iova, &mut found).unwrap();
            assert!(found.iter().enumerate().all(|(at, found)| *found == byte(first + at)), "{config:?}");
            let new: Vec<_> = (first..end).map(|number| !byte(number)).collect();
            assert!(world.writes(segment.iova, &new));
            first = end;
        }
        assert_eq!(first, places.len());
        let (iova, len) = whole(&segments);
        ops.ends(iova, len).unwrap();
        let mut all = contents(&memory);
        for (number, at) in places.iter().enumerate() {
            assert_eq!(std::mem::replace(&mut all[*at as usize], 7), !byte(number), "{config:?} {at:#x}");
        }
        assert!(all.iter().all(|byte| *byte == 7), "and nothing beside it");
        assert_eq!(ops.usage().copies, u64::from(config == CONFIGS[2]));
    }
}

/// What a device leaves unwritten is the driver's own. A driver that asks for no copy-in finds nobody's bytes there.
#[test]
fn a_buffer_that_was_filled_shows_the_next_driver_none_of_its_bytes() {
    let (world, ops) = machine(CONFIGS[2]);
    let memory = buffer(&world, PAGE, 7);
    let mut queue: Queue<Machine> = world.nic.queue(QueueConfig::bounce()).unwrap();
    for round in 0..3 {
        // By the short way, and as a list and without a copy first, by the long one.
        memory.write(0, b"a secret").unwrap();
        let first = ops.maps(part(&memory, 0, 64), Direction::FromDevice).unwrap();
        ops.ends(first, 64).unwrap();
        assert_eq!(&contents(&memory)[..8], b"a secret", "the device has written nothing");
        if round > 0 {
            let list = [part(&memory, 0, 32), part(&memory, 1024, 32)];
            let (iova, len) = whole(&ops.maps_list(&list, Direction::FromDevice).unwrap());
            ops.ends(iova, len).unwrap();
            let attributes = DmaAttributes { skip_copy: true, ..DmaAttributes::default() };
            let iova = ops.maps_as(part(&memory, 0, 64), Direction::FromDevice, attributes).unwrap();
            ops.ends(iova, 64).unwrap();
            assert_eq!(&contents(&memory)[..8], b"a secret");
        }
        // Of the same group, in the same buffer.
        let other = buffer(&world, PAGE, 1);
        let mut out = [DmaSegment::default()];
        // SAFETY: the memory is the test's, all of it atomics.
        let mapped = unsafe { queue.map_raw(&[part(&other, 0, 64)], Direction::FromDevice, &mut out) };
        let (mapping, _) = mapped.unwrap();
        assert_eq!(out[0].iova, first, "round {round}");
        assert!(matches!(queue.unmap_raw(mapping), Ok(Ended::Done(()))));
        assert_eq!(contents(&other)[..64], [0; 64], "round {round}");
    }
}

/// Registers and shared memory are mapped whatever their size, and shared memory ends strictly under every policy.
#[test]
fn registers_and_shared_memory_are_never_copied() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        let memory = buffer(&world, PAGE, 7);
        for lasting in [false, true] {
            let attributes = DmaAttributes { mmio: !lasting, lasting, ..DmaAttributes::default() };
            let iova = ops.maps_as(part(&memory, 0, PAGE), Direction::Bidirectional, attributes).unwrap();
            assert!(world.writes(iova, b"at once!"));
            assert_eq!(&contents(&memory)[..8], b"at once!", "{config:?}");
            assert_eq!((ops.usage().copies, ops.usage().open_bytes), (0, PAGE));
            ops.ends(iova, PAGE).unwrap();
            let is_lazy = matches!(config, OpsConfig::Lazy { .. }) && !lasting;
            assert_eq!(world.writes(iova, b"too late"), is_lazy, "{config:?} {lasting}");
            ops.domain().flush().unwrap();
            assert!(!world.writes(iova, b"too late"));
        }
    }
}

/// What a driver asks for is what the page table says, where its format has bits for it.
#[test]
fn attributes_reach_the_page_table() {
    let memory = Memory::new(16 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let table = PageTable::new(Arc::clone(&memory), Arm::<12>::stage_1(48, 48).unwrap()).unwrap();
    let builder =
        Domain::builder(table, iommu.queue(), DomainId(1)).bounce(Arc::clone(&memory), PoolConfig::default());
    let domain = builder.build(Arc::new(StdPlatform::new())).unwrap();
    let card = domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap();
    let buffer = memory.buffer(4 * PAGE).unwrap();
    for config in CONFIGS {
        let ops = card.ops(config).unwrap();
        let plain = DmaAttributes::default();
        for (attributes, kind) in [
            (DmaAttributes { mmio: true, ..plain }, CacheKind::Device),
            (DmaAttributes { uncached: true, lasting: true, ..plain }, CacheKind::Uncached),
            (DmaAttributes { privileged: true, ..plain }, CacheKind::WriteBack),
            (DmaAttributes { lasting: true, ..plain }, CacheKind::WriteBack),
        ] {
            // One page by the short way, and a list by the long one.
            let iova = ops.maps_as(part(&buffer, 0, PAGE), Direction::Bidirectional, attributes).unwrap();
            let mut out = [DmaSegment::default(); 2];
            let list = [part(&buffer, PAGE, PAGE), part(&buffer, 3 * PAGE, PAGE)];
            // SAFETY: the memory is the test's, all of it atomics.
            let count = unsafe { ops.map_sg(&list, Direction::Bidirectional, attributes, &mut out) };
            assert_eq!(count, Ok(1), "the pieces touch for the device");
            for (iova, len) in [(iova, PAGE), (out[0].iova, 2 * PAGE)] {
                let (_, found) =
                    ops.domain().mapper().table().translate(ops.domain().platform(), iova).unwrap();
                assert_eq!((found.memory, found.privileged), (kind, attributes.privileged), "{config:?}");
                ops.ends(iova, len).unwrap();
            }
        }
        assert_eq!((ops.usage().copies, ops.usage().open_mappings()), (0, 0));
    }
}

/// The configuration and the limits change beside mappings, which end by what they are.
#[test]
fn mappings_end_by_what_they_are_whatever_is_configured_now() {
    let (world, ops) = machine(OpsConfig::Strict);
    let memory = buffer(&world, 64 * PAGE, 7);
    for before in CONFIGS {
        for after in CONFIGS {
            for len in [64, THRESHOLD, 2 * THRESHOLD + 8] {
                ops.set_config(before).unwrap();
                assert_eq!(ops.config(), before);
                let iova = ops.maps(part(&memory, 8, len), Direction::FromDevice).unwrap();
                assert!(world.writes(iova, b"from it!"));
                ops.set_config(after).unwrap();
                let other = ops.maps(part(&memory, 50 * PAGE, 64), Direction::FromDevice).unwrap();
                ops.ends(iova, len).unwrap();
                ops.ends(other, 64).unwrap();
                assert_eq!(&contents(&memory)[8..16], b"from it!", "{before:?} {after:?} {len:#x}");
                if after != CONFIGS[1] {
                    let _ = world.writes(iova, b"too late");
                    assert_eq!(&contents(&memory)[8..16], b"from it!");
                }
            }
        }
    }
    let usage = ops.usage();
    assert_eq!((usage.open_mappings(), usage.open_bytes, usage.exposed_bytes, usage.errors), (0, 0, 0, 0));
}

#[test]
fn later_mappings_keep_to_limits_that_have_changed() {
    for config in CONFIGS {
        let (world, ops) = machine(config);
        let memory = buffer(&world, 4 * PAGE, 7);
        let early = ops.maps(part(&memory, 0x764, 64), Direction::ToDevice).unwrap();
        ops.set_limits(u32::MAX.into(), 0xfff).unwrap();
        assert_eq!(ops.limits(), (u32::MAX.into(), 0xfff));
        let late = ops.maps(part(&memory, 0x764, 64), Direction::ToDevice).unwrap();
        assert!(late.get() <= u32::MAX.into() && late.get() & 0xfff == 0x764, "{config:?} {late}");
        assert_eq!((world.reads(early), world.reads(late)), (Some([7; 8]), Some([7; 8])));
        // They end by their addresses, whatever the limits are now.
        ops.ends(early, 64).unwrap();
        ops.ends(late, 64).unwrap();
        assert!(ops.set_limits(0xfff, 0).is_err() && ops.set_limits(u64::MAX, 0x1000).is_err());
    }
}
