//! A device is given a buffer if it reaches the last byte of it, and else an error. Without translation the buffer's own addresses
//! count, and with translation the addresses that the domain hands out.

use portcullis::addr::{DeviceId, Direction, DmaSegment, Iova, PhysAddr, PhysSegment};
use portcullis::dma::{DmaDevice, DmaMapError, DmaMask, Queue, QueueConfig};
use portcullis::domain::{MapListError, Policy};
use portcullis_model::open::OpenDevice;

use crate::common::Bench;
use crate::queue::world::{BATCH, Machine, PAGE, World};

const LAST: u64 = u32::MAX as u64;

fn segment(phys: u64, len: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(phys), len }
}

/// Lists, and the last byte of each.
fn lists() -> Vec<(Vec<PhysSegment>, u64)> {
    let low = segment(0x5000, 0x10);
    let mut lists = Vec::new();
    for beyond in [0, 1, PAGE] {
        let last = LAST + beyond;
        for len in [1, 2, 0x10, PAGE, 3 * PAGE] {
            let high = segment(last - (len - 1), len);
            lists.extend(
                [vec![high], vec![low, high], vec![high, low], vec![low, high, low]].map(|list| (list, last)),
            );
        }
    }
    lists
}

#[test]
fn without_translation_memory_is_given_up_to_the_last_byte_that_the_device_reaches() {
    let world = World::new(Policy::Passthrough);
    let bench = Bench::new(Policy::Passthrough);
    let nic = world.nic.domain().attach(DeviceId(8), DmaMask::bits(32)).unwrap();
    let device = DmaDevice::new(bench.domain.clone(), LAST).unwrap();
    for (list, last) in lists() {
        let expected = if last <= LAST {
            Ok(list[0].phys.get())
        } else {
            Err(MapListError::BeyondMask { last: PhysAddr::new(last), mask: LAST })
        };
        let mut out = vec![DmaSegment::default(); list.len()];
        if let [PhysSegment { phys, len }] = list[..] {
            assert_eq!(
                device.open_single(phys, len, Direction::ToDevice).map(Iova::get),
                expected,
                "{list:x?}"
            );
        }
        let mapped = device.open_sg(&list, Direction::ToDevice, &mut out);
        assert_eq!(mapped.map(|_| out[0].iova.get()), expected, "{list:x?}");
        for config in [QueueConfig::direct(), QueueConfig::batched(BATCH), QueueConfig::ring(16, 4 * PAGE)] {
            let mut queue: Queue<Machine> = nic.queue(config).unwrap();
            // SAFETY: there is no device that would reach anything.
            let mapped = unsafe { queue.map_raw(&list, Direction::ToDevice, &mut out) };
            let mapped = mapped.map(|(mapping, _)| {
                let _ = queue.unmap_raw(mapping).unwrap();
                out[0].iova.get()
            });
            assert_eq!(mapped, expected.map_err(DmaMapError::List), "{config:?}: {list:x?}");
            let _ = queue.commit_raw().unwrap();
        }
    }
}

/// Nothing is mapped at page 0, so each of these widths leaves as many whole pages as it says.
#[test]
fn with_translation_a_page_is_handed_out_where_its_last_byte_is_reached() {
    for (mask, pages) in [(0x1ffe, 0), (0x1fff, 1), (0x2000, 1), (0x2ffe, 1), (0x2fff, 2), (0x3fff, 3)] {
        for len in [1, PAGE] {
            let bench = Bench::new(Policy::Strict);
            let device = DmaDevice::new(bench.domain.clone(), mask).unwrap();
            let mut found = Vec::new();
            while let Ok(iova) = device.open_single(PhysAddr::new(0x5000), len, Direction::ToDevice) {
                assert!(iova.get() + (PAGE - 1) <= mask, "{iova} of {mask:#x}");
                found.push(iova);
            }
            assert_eq!(found.len(), pages, "{mask:#x}: {found:?}");
            found.into_iter().for_each(|iova| device.unmap_single(iova, len).unwrap());
            let whole = |pages| device.open_single(PhysAddr::new(0x5000), pages * PAGE, Direction::ToDevice);
            assert!(whole(pages as u64 + 1).is_err(), "{mask:#x}");
        }
    }
}
