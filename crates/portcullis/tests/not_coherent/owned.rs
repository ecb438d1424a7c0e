//! Mappings that own their buffers.

use std::sync::{Arc, Mutex};

use portcullis::addr::Direction::FromDevice;
use portcullis::addr::PhysSegment;
use portcullis::dma::{DmaBuffer, Ended};
use portcullis::domain::Policy;

use crate::each::{POLICIES, bytes};
use crate::world::{BROKEN, MAPPING, PAGE, STRATEGIES, World, segment};

/// A buffer of the driver's.
struct Frame {
    world: Arc<World>,
    list: Vec<PhysSegment>,
}

// SAFETY: simulated memory, which is never given to others.
unsafe impl DmaBuffer for Frame {
    fn segments(&self) -> &[PhysSegment] {
        &self.list
    }
}

/// The typed calls are the same ones, and `segments` is what the device is given.
#[test]
fn mappings_own_their_buffers() {
    for policy in POLICIES {
        for config in STRATEGIES {
            if policy == Policy::Passthrough && config == STRATEGIES[2] {
                continue;
            }
            let world = Arc::new(World::new(policy));
            let first = world.pages(32);
            let mut queue = world.card().queue::<Frame>(config).unwrap();
            let mut back = Vec::new();
            for n in 0..7 {
                let list =
                    vec![segment(first, 4 * n * PAGE, PAGE), segment(first, (4 * n + 2) * PAGE, 2 * PAGE)];
                let frame = Frame { world: Arc::clone(&world), list };
                let mapping = queue.map(frame, FromDevice).unwrap();
                let view: Vec<_> = queue.segments(&mapping).collect();
                assert_eq!(view[0].iova, mapping.iova());
                world.cache.prefetch_all();
                assert!(world.card_writes(&view, &vec![n as u8; 3 * 4096]));
                queue.sync_for_cpu(&mapping, PAGE, 2 * PAGE).unwrap();
                assert_eq!(world.cpu(&mapping.buffer().list)[4096..], vec![n as u8; 2 * 4096]);
                queue.sync_for_device(&mapping, PAGE, 2 * PAGE).unwrap();
                queue.unmap(mapping).unwrap().for_each(|frame| back.push(frame));
            }
            back.extend(queue.commit().unwrap());
            assert_eq!(back.len(), 7, "{config:?}");
            for (n, frame) in back.iter().enumerate() {
                assert_eq!(frame.world.cpu(&frame.list), vec![n as u8; 3 * 4096], "{config:?}");
            }
        }
    }
}

/// A buffer that says what the CPU finds in it when it is dropped.
struct Told {
    world: Arc<World>,
    list: [PhysSegment; 1],
    found: Arc<Mutex<Vec<u8>>>,
}

// SAFETY: simulated memory, which is never given to others.
unsafe impl DmaBuffer for Told {
    fn segments(&self) -> &[PhysSegment] {
        &self.list
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.found.lock().unwrap().extend(self.world.cpu(&self.list));
    }
}

/// What waits in a queue that is dropped is invalidated and then dropped, or, where the hardware
/// does not confirm, neither.
#[test]
fn a_queue_that_ends_invalidates_what_waits() {
    for config in &MAPPING[1..] {
        for fails in [false, true] {
            let world = Arc::new(World::new(Policy::Strict));
            let mut queue = world.card().queue::<Told>(*config).unwrap();
            let found = Arc::default();
            let list = [segment(world.pages(1), 0, PAGE)];
            let buffer = Told { world: Arc::clone(&world), list, found: Arc::clone(&found) };
            let mapping = queue.map(buffer, FromDevice).unwrap();
            let view: Vec<_> = queue.segments(&mapping).collect();
            assert!(world.card_writes(&view, &bytes(&list, 1)));
            assert!(matches!(queue.unmap(mapping).unwrap(), Ended::Pending));
            world.cache.prefetch_all();
            assert!(world.card_writes(&view, &bytes(&list, 2)), "it waits, so the device reaches it");
            let before = world.cache.calls();
            world.iommu.queue().fail_next(u64::from(fails), BROKEN);
            drop(queue);
            let expected = if fails { Vec::new() } else { bytes(&list, 2) };
            assert!(*found.lock().unwrap() == expected, "{config:?} {fails}");
            assert_eq!(world.cache.calls().1 - before.1, usize::from(!fails));
        }
    }
}
