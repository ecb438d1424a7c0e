//! Syncs of parts of a mapping.

use portcullis::addr::Direction::{Bidirectional, FromDevice};
use portcullis::addr::PhysAddr;
use portcullis::dma::{Queue, QueueConfig};
use portcullis::domain::Policy;

use crate::each::{POLICIES, bytes, each, ends, takes};
use crate::world::{CARD, Machine, PAGE, STRATEGIES, World, map, segment};

/// A sync of a part takes the lines of that part alone.
#[test]
fn a_part_is_synced_by_itself() {
    for policy in POLICIES {
        for config in STRATEGIES {
            for skip in [0, 64] {
                let is_ring = policy == Policy::Passthrough && config == STRATEGIES[2];
                if !is_ring && takes(config, skip, PAGE, FromDevice) {
                    sync_a_part(policy, config, skip);
                }
            }
        }
    }
}

fn sync_a_part(policy: Policy, config: QueueConfig, skip: u64) {
    let what = format!("{policy:?} {config:?} {skip}");
    let world = World::new(policy);
    let mut queue: Queue<Machine> = world.card().queue(config).unwrap();
    let first = world.pages(8);
    let list = [
        segment(first, skip, PAGE - skip),
        segment(first, 2 * PAGE, PAGE),
        segment(first, 4 * PAGE, PAGE - skip),
    ];
    let (mapping, view) = map(&mut queue, &list, Bidirectional).unwrap();
    let len = 3 * 4096 - 2 * skip as usize;
    // Half of the first page up to half of the last.
    let part = 2048 - skip as usize..2048 - skip as usize + 8192;
    let is = |found: &[u8], inside: u8, outside: u8| {
        assert!(found[part.clone()].iter().all(|byte| *byte == inside), "{what}");
        let mut others = found[..part.start].iter().chain(&found[part.end..]);
        assert!(others.all(|byte| *byte == outside), "{what}");
    };
    world.cpu_writes(&list, &vec![1; len]);
    world.cache.prefetch_all();
    assert!(world.card_writes(&view, &vec![2; len]));
    queue.sync_raw_for_cpu(&mapping, part.start as u64, 2 * PAGE).unwrap();
    is(&world.cpu(&list), 2, 1);
    world.cpu_writes(&list, &vec![3; len]);
    queue.sync_raw_for_device(&mapping, part.start as u64, 2 * PAGE).unwrap();
    is(&world.card_reads(&view), 3, 2);
    ends(&mut queue, mapping);
}

/// The device has the first bytes of a buffer that begins within a line, and the CPU the next line:
/// the two are two lines of a copy, too.
#[test]
fn a_part_that_is_synced_leaves_what_a_device_wrote_beside_it() {
    for policy in POLICIES {
        for config in &STRATEGIES[3..] {
            for others in 0..2 {
                let world = World::new(policy);
                let mut queue: Queue<Machine> = world.card().queue(*config).unwrap();
                let first = world.pages(4);
                let list = [segment(first, 64, PAGE - 64), segment(first, 2 * PAGE, 1000)];
                let list = &list[..1 + others];
                let (mapping, view) = map(&mut queue, list, Bidirectional).unwrap();
                world.iommu.dma_write(CARD, view[0].iova, &[9; 64]).unwrap();
                world.cache.write(PhysAddr::new(first.get() + 128), &[8; 128]);
                queue.sync_raw_for_device(&mapping, 64, 128).unwrap();
                ends(&mut queue, mapping);
                let found = world.cpu(list);
                assert!(found[..64].iter().all(|byte| *byte == 9), "{policy:?} {config:?}");
                assert!(found[64..192].iter().all(|byte| *byte == 8), "{policy:?} {config:?}");
                assert!(found[192..].iter().all(|byte| *byte == 0xcc), "{policy:?} {config:?}");
            }
        }
    }
}

/// Syncs of no byte, of more bytes than there are, and of a few bytes of a line.
#[test]
fn a_sync_takes_no_line_beside_the_mapping() {
    for direction in [FromDevice, Bidirectional] {
        each(direction, |world, queue, list, direction| {
            let (first, len) = (list[0].phys, list[0].len);
            let beside = [segment(PhysAddr::new(first.get() + len), 0, 300)];
            let (mapping, view) = map(queue, list, direction).unwrap();
            world.cpu_writes(&beside, &[0x55; 300]);
            world.cache.prefetch_all();
            assert!(world.card_writes(&view, &bytes(list, 1)));
            let parts =
                [(0, 0), (len, 0), (len, 9), (u64::MAX, u64::MAX), (5, 7), (len - 3, 100), (0, u64::MAX)];
            for (offset, count) in parts {
                // More than there is may be refused.
                let is_inside = offset.checked_add(count).is_some_and(|end| end <= len);
                let synced = queue.sync_raw_for_cpu(&mapping, offset, count);
                assert!(synced.is_ok() || !is_inside, "{synced:?}");
                if synced.is_ok() && offset < len {
                    let part = [segment(first, offset, count.min(len - offset))];
                    let expected = &bytes(list, 1)[offset as usize..][..part[0].len as usize];
                    assert_eq!(world.cpu(&part), expected, "{offset} {count} of {list:x?}");
                }
                let synced = queue.sync_raw_for_device(&mapping, offset, count);
                assert!(synced.is_ok() || !is_inside, "{synced:?}");
                assert_eq!(world.cpu(&beside), [0x55; 300]);
            }
            assert!(world.card_writes(&view, &bytes(list, 2)));
            ends(queue, mapping);
            assert!(world.cpu(list) == bytes(list, 2), "{list:x?} {direction:?}");
            assert_eq!(world.cpu(&beside), [0x55; 300]);
        });
    }
}
