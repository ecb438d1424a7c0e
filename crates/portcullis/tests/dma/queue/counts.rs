//! What waits, what a commit counts, and whom it tells: each mapping that a driver has unmapped is told to be over once,
//! whichever commit ended it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, PhysAddr, PhysSegment};
use portcullis::bounce::pool::PoolConfig;
use portcullis::dma::{Device, DmaMask, DmaUnmapError, Ended, Machine, Queue, QueueConfig, RawMapping};
use portcullis::domain::{Domain, Policy};
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Buffer, Context, Iommu, IommuConfig, Memory};

use crate::queue::world::{BATCH, BROKEN, CARD, PAGE, STRATEGIES, World};
use crate::rig::Hooked;

/// More than is copied.
const LARGE: u64 = 16 * PAGE;

fn world() -> World {
    World::with_pool(Policy::Strict, PoolConfig { threshold: 4 * PAGE, ..PoolConfig::default() })
}

/// Queues whose mappings wait for a batch, of a device that is coherent and of one that is not.
fn queues(world: &World, mut f: impl FnMut(&mut Queue<super::world::Machine>, &str)) {
    for coherent in [true, false] {
        let of_ring = |config: QueueConfig| config.batch(BATCH);
        let (ring, auto) = (QueueConfig::ring(128, PAGE), QueueConfig::auto(128, PAGE));
        for config in [QueueConfig::batched(BATCH), of_ring(ring), of_ring(auto)] {
            let device = if coherent { world.nic.clone() } else { world.nic.clone().not_coherent().unwrap() };
            let mut queue = device.queue(config).unwrap();
            let what = format!("{:?}, coherent: {coherent}", queue.strategy());
            f(&mut queue, &what);
        }
    }
}

fn map<X: Machine>(queue: &mut Queue<X>, buffer: &Buffer) -> RawMapping {
    let list = [PhysSegment { phys: buffer.phys(), len: buffer.len() }];
    // SAFETY: the memory is the test's, all of it atomics, and outlives the queue.
    unsafe { queue.map_raw(&list, Direction::FromDevice, &mut [DmaSegment::default()]) }.unwrap().0
}

/// A batch whose commit failed is committed by the unmap after it. That one cannot say so, so the next commit does.
#[test]
fn a_batch_that_failed_is_counted_when_it_is_told_of() {
    let world = world();
    let buffer = world.memory.buffer(LARGE).unwrap();
    queues(&world, |queue, what| {
        for ends_by in ["commit", "batch"] {
            for _ in 1..BATCH {
                let mapping = map(queue, &buffer);
                assert_eq!(queue.unmap_raw(mapping).unwrap(), Ended::Pending, "{what}");
            }
            let last = map(queue, &buffer);
            world.iommu.queue().fail_next(1, BROKEN);
            let failed = queue.unmap_raw(last).unwrap_err();
            assert!(failed.waits && failed.mapping.is_none(), "{what}");
            assert_eq!(queue.waiting(), BATCH, "{what}");
            // Commits, for there is no room.
            let more = map(queue, &buffer);
            assert_eq!(queue.unmap_raw(more).unwrap(), Ended::Pending, "{what}");
            assert_eq!(queue.waiting(), BATCH + 1, "{what}: nobody was told");
            if ends_by == "commit" {
                assert_eq!(queue.commit_raw(), Ok(BATCH + 1), "{what}");
            } else {
                for turn in 2..=BATCH {
                    let mapping = map(queue, &buffer);
                    let ended = queue.unmap_raw(mapping).unwrap();
                    assert_eq!(ended == Ended::Flushed(()), turn == BATCH, "{what}");
                }
            }
            assert_eq!((queue.waiting(), queue.commit_raw()), (0, Ok(0)), "{what}");
        }
    });
}

/// A queue that has measured on hardware that confirms nothing has nothing of its driver's, and counts nothing else.
#[test]
fn what_a_measurement_leaves_is_no_mapping_of_the_driver_s() {
    for coherent in [true, false] {
        let world = world();
        let device = if coherent { world.nic.clone() } else { world.nic.clone().not_coherent().unwrap() };
        world.iommu.queue().fail_next(1000, BROKEN);
        let mut queue: Queue<_> = device.queue(STRATEGIES[4]).unwrap();
        assert_eq!((queue.waiting(), queue.commit_raw()), (0, Ok(0)));
        let buffer = world.memory.buffer(LARGE).unwrap();
        let mapping = map(&mut queue, &buffer);
        let late = mapping.iova();
        assert!(world.writes(late, b"a packet"));
        assert_eq!(queue.unmap_raw(mapping).unwrap(), Ended::Pending);
        assert!(queue.commit_raw().is_err());
        assert_eq!(queue.waiting(), 1);
        world.iommu.queue().fail_next(0, BROKEN);
        assert_eq!(queue.commit_raw(), Ok(1));
        assert!(!world.writes(late, b"too late"));
        assert_eq!((queue.waiting(), queue.commit_raw()), (0, Ok(0)));
        // Measured or not, all of it was mapped and unmapped.
        drop(queue);
        let stats = world.nic.domain().space().stats();
        assert_eq!(stats.maps, stats.unmaps, "{coherent}");
    }
}

/// A list of which a part was entered, and removed again, is refused; the hardware has not confirmed that. No mapping waits,
/// and all the same a commit fails until it has.
#[test]
fn a_commit_fails_while_the_device_may_reach_what_was_refused() {
    // The first invalidation alone fails, or all: what was refused is told at once, and not tried in another way.
    for (config, failures) in [(STRATEGIES[2], 1000), (STRATEGIES[4], 1000), (STRATEGIES[4], 1)] {
        let world = world();
        let mut queue: Queue<_> = world.nic.queue(config).unwrap();
        let buffer = world.memory.buffer(6 * PAGE).unwrap();
        let list = [
            PhysSegment { phys: buffer.phys(), len: 6 * PAGE },
            PhysSegment { phys: PhysAddr::new(1 << 52), len: PAGE },
        ];
        world.iommu.queue().fail_next(failures, BROKEN);
        // SAFETY: what the model's memory does not have is counted, not touched; all access to it is by atomics.
        let mapped = unsafe { queue.map_raw(&list, Direction::FromDevice, &mut [DmaSegment::default(); 2]) };
        assert!(mapped.unwrap_err().may_be_reached(), "{config:?}, {failures}");
        assert_eq!(queue.waiting(), 0);
        // Once the hardware answers again, the next commit takes the device off.
        if failures > 1 {
            assert_eq!(queue.commit_raw(), Err(DmaUnmapError::Unconfirmed { error: BROKEN }), "{config:?}");
        }
        world.iommu.queue().fail_next(0, BROKEN);
        assert_eq!(queue.commit_raw(), Ok(0));
    }
}

/// The commit of a batch succeeds, and the flush behind it, which something beside the batch is owed, does not.
#[test]
fn a_batch_whose_commit_is_followed_by_a_failure_waits_on() {
    let memory = Memory::new(64 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level()).unwrap();
    iommu.attach(CARD, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
    let hardware = Arc::new(Hooked::new(iommu.queue()));
    let builder = Domain::builder(table, Arc::clone(&hardware), DomainId(1));
    let nic: Device<_> =
        builder.build(StdPlatform::new()).unwrap().attach(DeviceId(7), DmaMask::BITS_64).unwrap();
    let (small, large) = (memory.buffer(PAGE).unwrap(), memory.buffer(8 << 20).unwrap());
    for ends_by in ["commit", "batch"] {
        let mut queue: Queue<_> = nic.queue(QueueConfig::ring(4, PAGE).batch(2)).unwrap();
        let alone = map(&mut queue, &large);
        iommu.queue().fail_next(1, BROKEN);
        assert!(queue.unmap_raw(alone).unwrap_err().waits);
        let (first, second) = (map(&mut queue, &small), map(&mut queue, &small));
        let late = first.iova();
        iommu.dma_write(CARD, late, b"a packet").unwrap();
        assert_eq!(queue.unmap_raw(first).unwrap(), Ended::Pending);
        // The second submission from now on fails.
        let (seen, queue_of) = (AtomicU64::new(0), iommu.queue());
        hardware.set(move || {
            if seen.fetch_add(1, Ordering::Relaxed) == 1 {
                queue_of.fail_next(1, BROKEN);
            }
        });
        if ends_by == "commit" {
            assert!(queue.commit_raw().is_err());
            assert_eq!(queue.waiting(), 2);
            assert_eq!(queue.unmap_raw(second).unwrap(), Ended::Pending);
        } else {
            assert!(queue.unmap_raw(second).unwrap_err().waits);
        }
        hardware.clear();
        assert_eq!((queue.waiting(), queue.commit_raw(), queue.waiting()), (3, Ok(3), 0), "{ends_by}");
        assert!(iommu.dma_write(CARD, late, b"too late").is_err());
    }
}
