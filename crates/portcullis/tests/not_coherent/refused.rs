//! What a device that is not coherent cannot have, and why it is told so.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::Direction::{Bidirectional, FromDevice, ToDevice};
use portcullis::addr::{DeviceId, DmaSegment, DomainId, Iova};
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::dma::{
    CoherentMemory, DmaMapError, DmaMask, Queue, QueueConfig, StrictRing, StrictRingConfig,
};
use portcullis::domain::{Domain, MapListError, Policy};
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{CacheMaintenance, Platform};
use portcullis::std_platform::StdPlatform;

use crate::cache::{Cache, LINE, Ram, Uncached};
use crate::world::{CARD, MAPPING, Machine, PAGE, STRATEGIES, World, map, segment};

#[test]
fn a_queue_that_copies_nothing_refuses_a_part_of_a_line() {
    for config in MAPPING {
        let world = World::new(Policy::Strict);
        let mut queue: Queue<Machine> = world.card().queue(config).unwrap();
        let first = world.pages(4);
        for direction in [FromDevice, Bidirectional] {
            for (offset, len) in [(0, 60), (64, LINE), (LINE, LINE + 1), (1, 2 * LINE - 1)] {
                let lists = [
                    vec![segment(first, offset, len)],
                    vec![segment(first, PAGE, PAGE), segment(first, offset, len)],
                ];
                for list in lists {
                    let error = map(&mut queue, &list, direction).unwrap_err();
                    assert_eq!(error, DmaMapError::SharesLine { line: LINE });
                    assert!(!error.is_full() && !error.may_be_reached());
                }
            }
        }
        // What a device reads may share its lines with anything.
        let (mapping, _) = map(&mut queue, &[segment(first, 1, 60)], ToDevice).unwrap();
        let _ = queue.unmap_raw(mapping).unwrap();
        queue.commit_raw().unwrap();
    }
}

/// `auto` of a domain that has nothing to copy through, which is a ring.
#[test]
fn auto_without_memory_refuses_a_part_of_a_line() {
    let world = World::new(Policy::Strict);
    let platform = Arc::new(StdPlatform::new());
    let format = VtdSecondStage::new(4, 3, 48).unwrap();
    let table = PageTable::for_cpus(Arc::clone(&world.memory), format, platform.cpus()).unwrap();
    let builder = Domain::builder(table, world.iommu.queue(), DomainId(2));
    let domain = builder.cache_maintenance(Arc::clone(&world.cache) as Arc<_>).build(platform).unwrap();
    let card = domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap().not_coherent().unwrap();
    let mut queue: Queue<_> = card.queue(QueueConfig::auto(8, PAGE)).unwrap();
    let first = world.pages(1);
    let refused = map(&mut queue, &[segment(first, 0, 60)], FromDevice).unwrap_err();
    assert_eq!(refused, DmaMapError::SharesLine { line: LINE });
    let (mapping, _) = map(&mut queue, &[segment(first, 0, LINE)], FromDevice).unwrap();
    let _ = queue.unmap_raw(mapping).unwrap();
    let refused = card.queue::<std::convert::Infallible>(QueueConfig::bounce()).unwrap_err();
    assert_eq!(refused, SetupError::NoCopyMemory);
}

/// Nothing is mapped around the queues, which know when to clean.
#[test]
fn the_device_by_itself_maps_nothing() {
    for policy in [Policy::Strict, Policy::Passthrough] {
        let world = World::new(policy);
        let card = world.card();
        let first = world.pages(1);
        let (list, mut out) = ([segment(first, 0, PAGE)], [DmaSegment { iova: Iova::new(0), len: 0 }]);
        for own in [None, Some(policy)] {
            let dma = card.dma();
            dma.set_policy(own).unwrap();
            assert_eq!(dma.mask(), u64::MAX);
            // SAFETY: simulated memory.
            let single = unsafe { dma.map_single(first, PAGE, FromDevice) };
            assert_eq!(single, Err(MapListError::NotCoherent));
            // SAFETY: as above.
            let listed = unsafe { dma.map_sg(&list, FromDevice, &mut out) };
            assert_eq!(listed, Err(MapListError::NotCoherent));
            let ring = StrictRing::new(dma, StrictRingConfig::new(8, PAGE, 2));
            assert!(matches!(ring, Err(SetupError::NotCoherent)));
            let shared = CoherentMemory::new(dma, Ram(Arc::clone(&world.cache)), 4096);
            assert_eq!(shared.map(drop).unwrap_err(), MapListError::NotCoherent);
        }
        // The device and the CPU share memory that is in no cache.
        let before = world.cache.calls();
        let shared = CoherentMemory::new(card.dma(), Uncached(Arc::clone(&world.memory)), 4096).unwrap();
        shared.write(0, b"commands").unwrap();
        let mut bytes = [0; 8];
        world.iommu.dma_read(CARD, shared.iova(), &mut bytes).unwrap();
        assert_eq!(&bytes, b"commands");
        world.iommu.dma_write(CARD, shared.iova(), b"complete").unwrap();
        shared.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"complete");
        // A few bytes of a word, or of two, and none beside them.
        for (offset, len) in [(4, 4), (0, 3), (5, 3), (7, 3), (2, 1), (12, 4), (6, 13)] {
            world.iommu.dma_write(CARD, shared.iova(), &[0xee; 24]).unwrap();
            let mut expected = [0xee; 24];
            for (byte, number) in expected[offset..offset + len].iter_mut().zip(1..) {
                *byte = number;
            }
            shared.write(offset, &expected[offset..offset + len]).unwrap();
            let mut found = [0; 24];
            world.iommu.dma_read(CARD, shared.iova(), &mut found).unwrap();
            assert_eq!(found, expected, "{len} bytes at {offset}");
        }
        // One byte that does not exist, and none is written, however many come before it.
        let (mut found, all) = (vec![0; 4096], vec![0xdd; 4097]);
        shared.read(0, &mut found).unwrap();
        for (offset, len) in [(0, 4097), (1, 4096), (4096, 1), (usize::MAX, 2)] {
            assert_eq!(shared.write(offset, &all[..len]), None);
        }
        let mut now = vec![0; 4096];
        shared.read(0, &mut now).unwrap();
        assert_eq!(now, found);
        shared.free().unwrap();
        assert_eq!(world.cache.calls(), before);
    }
}

/// An implementation may say what the CPU says that it runs on, and CPUs differ: the first answer
/// counts for a device.
#[test]
fn the_size_of_a_line_is_asked_for_once() {
    for policy in [Policy::Strict, Policy::Passthrough] {
        let world = World::new(policy);
        let card = world.card();
        for config in STRATEGIES {
            if policy == Policy::Passthrough && config == STRATEGIES[2] {
                continue;
            }
            let mut queue: Queue<Machine> = card.queue(config).unwrap();
            let (mapping, _) = map(&mut queue, &[segment(world.pages(1), 0, PAGE)], FromDevice).unwrap();
            let _ = queue.unmap_raw(mapping).unwrap();
        }
        assert_eq!(world.cache.asked.load(std::sync::atomic::Ordering::Relaxed), 1);
    }
}

#[test]
fn lines_are_no_larger_than_what_is_kept_apart() {
    let memory = portcullis_model::Memory::new(16 << 20);
    let build = |line: Option<u64>, slot_bytes: u64| {
        let iommu = portcullis_model::Iommu::new(portcullis_model::IommuConfig::new(Arc::clone(&memory)));
        let platform = Arc::new(StdPlatform::new());
        let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level()).unwrap();
        let ram = Ram(Cache::new(&memory, 64, 1));
        let config =
            SwiotlbConfig { slot_bytes, area_bytes: 1 << 20, min_bytes: 1 << 20, ..SwiotlbConfig::default() };
        let pool = Swiotlb::new(Arc::clone(&platform), ram, &config).unwrap();
        let builder = Domain::builder(table, iommu.queue(), DomainId(1)).policy(Policy::Passthrough);
        let builder = match line {
            Some(line) => {
                builder.cache_maintenance(Cache::new(&memory, line, 1) as Arc<dyn CacheMaintenance>)
            }
            None => builder,
        };
        builder.swiotlb(pool).build(platform).unwrap().attach(DeviceId(7), DmaMask::BITS_64).unwrap()
    };
    assert_eq!(build(None, 2048).not_coherent().unwrap_err(), SetupError::NoCacheMaintenance);
    for line in [0, 96, 8192] {
        let refused = build(Some(line), 2048).not_coherent().unwrap_err();
        assert_eq!(refused, SetupError::CacheLine { line, most: PAGE });
    }
    let queue = |line, slot| {
        let card = build(Some(line), slot).not_coherent().unwrap();
        card.queue::<std::convert::Infallible>(QueueConfig::bounce()).map(drop)
    };
    assert_eq!(queue(128, 64).unwrap_err(), SetupError::CacheLine { line: 128, most: 64 });
    assert_eq!(queue(128, 128), Ok(()));
}
