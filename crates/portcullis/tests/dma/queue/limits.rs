//! A domain that is told up to which address its IOMMU translates hands out no address above it,
//! whatever its queues are made of: lists of CPUs, rings with their colours, pools.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange};
use portcullis::dma::{CoherentMemory, DmaMask, QueueConfig, RawMapping};
use portcullis::domain::{Domain, Policy};
use portcullis::iova::IovaError;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Iommu, IommuConfig, Memory};

use crate::queue::world::{BATCH, Frame, PAGE, STRATEGIES, World};

/// The ends of widths that IOMMUs have, and addresses that are no power of two less one, not even
/// the last of a page; the last of these leave no room for homes of CPUs, or none above 4 GiB.
const LAST: [u64; 7] =
    [(1 << 39) - 1, (1 << 46) - 1, (1 << 38) - 1, 0x55_5123_4567, 0x1_0000_0fff, 0x1_8421_0842, 0xc123_4567];

/// Takes addresses in each way that there is, and calls `seen` for all of them, from the first byte
/// to the last.
fn each(world: &World, mut seen: impl FnMut(Iova, u64, &str)) {
    let lens = [PAGE, 3 * PAGE, 8 * PAGE, 128 * PAGE];
    for config in STRATEGIES
        .into_iter()
        .chain((0..8).map(|colour| QueueConfig::ring(64, 2 * PAGE).batch(BATCH).colour(colour * 7)))
    {
        let mut queue = world.nic.queue::<Frame>(config).unwrap();
        let mut held = Vec::new();
        for round in 0..24 {
            let len = if round < 16 { PAGE } else { lens[round % lens.len()] };
            let frame = world.frames(&[len], &Arc::default());
            let Ok(mapping) = queue.map(frame, Direction::FromDevice) else {
                // A ring is full, or its descriptors are shorter.
                continue;
            };
            queue.segments(&mapping).for_each(|segment| seen(segment.iova, segment.len, "a queue"));
            held.push(mapping);
        }
        for mapping in held {
            queue.unmap(mapping).unwrap().for_each(drop);
        }
        queue.commit().unwrap().for_each(drop);
    }
    for _ in 0..4 {
        let ring = CoherentMemory::new(world.nic.dma(), Arc::clone(&world.memory), 16 << 10).unwrap();
        seen(ring.iova(), 16 << 10, "coherent memory");
    }
    // More CPUs than this one: each has lists, and a home, of its own.
    std::thread::scope(|scope| {
        let of_others: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut queue = world.nic.queue::<Frame>(QueueConfig::direct()).unwrap();
                    let mappings: Vec<(RawMapping, Iova)> = (0..64)
                        .map(|_| {
                            let (frame, mut view) = (world.frame(), [DmaSegment::default()]);
                            let list = portcullis::dma::DmaBuffer::segments(&frame);
                            // SAFETY: the frame is kept until the mapping has ended.
                            let mapped = unsafe { queue.map_raw(list, Direction::ToDevice, &mut view) };
                            std::mem::forget(frame);
                            (mapped.unwrap().0, view[0].iova)
                        })
                        .collect();
                    let all = mappings.iter().map(|(_, iova)| *iova).collect::<Vec<_>>();
                    mappings.into_iter().for_each(|(mapping, _)| {
                        let _ = queue.unmap_raw(mapping).unwrap();
                    });
                    all
                })
            })
            .collect();
        for thread in of_others {
            thread.join().unwrap().into_iter().for_each(|iova| seen(iova, PAGE, "another CPU"));
        }
    });
}

#[test]
fn no_address_is_above_the_last_that_the_unit_translates() {
    for last in LAST {
        let world = World::with(Policy::Strict, |builder| builder.last_iova(Iova::new(last)));
        let mut highest = 0;
        each(&world, |iova, len, what| {
            let end = iova.get() + (len - 1);
            assert!(end <= last, "{what}: {end:#x} of at most {last:#x}");
            highest = highest.max(end);
        });
        // From the top down, as without a limit: what is lost is less than an aligned block of homes.
        assert!(highest > last / 2, "{highest:#x} of {last:#x}");
    }
}

#[test]
fn of_several_limits_the_lowest_counts_and_all_reserved_ranges_do() {
    let (low, high) = (Iova::new((1 << 39) - 1), Iova::new((1 << 46) - 1));
    let window = IovaRange::from_bounds(Iova::new(0x40_0000_0000), low).unwrap();
    let other = IovaRange::from_bounds(Iova::new(0x3f_f000_1000), Iova::new(0x3f_ffff_f000)).unwrap();
    for (first, second) in [(low, high), (high, low)] {
        let world = World::with(Policy::Strict, |builder| {
            builder.last_iova(first).reserve(window).last_iova(second).reserve(other)
        });
        each(&world, |iova, len, what| {
            let used = IovaRange::new(iova, len).unwrap();
            assert!(used.last() <= low, "{what}: {used}");
            for kept in [window, other] {
                let (from, to) = (kept.start().align_down(page_size()), kept.last());
                assert!(used.last() < from || used.start() > to, "{what}: {used} in {kept}");
            }
        });
    }
}

fn page_size() -> portcullis::addr::PageSize {
    portcullis::addr::PageSize::SIZE_4K
}

#[test]
fn a_limit_that_leaves_nothing_is_an_error() {
    let memory = Memory::new(1 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    for last in [0, 1, 0xfff, 0x1ffe] {
        let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level()).unwrap();
        let builder = Domain::builder(table, iommu.queue(), DomainId(1)).last_iova(Iova::new(last));
        let built = builder.build(StdPlatform::new()).map(drop);
        assert_eq!(built, Err(SetupError::Space(IovaError::Empty)), "{last:#x}");
    }
    // One page is enough for a mapping, and for a device.
    let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level()).unwrap();
    let builder = Domain::builder(table, iommu.queue(), DomainId(1)).last_iova(Iova::new(0x1fff));
    let domain = builder.build(StdPlatform::new()).unwrap();
    assert_eq!(domain.space().stats().iova_bytes, PAGE);
    domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap();
}
