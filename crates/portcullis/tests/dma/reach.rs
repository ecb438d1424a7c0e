//! A device is given a buffer if it reaches the last byte of it, and else an error. Without translation the buffer's own addresses
//! count, and with translation the addresses that the domain hands out.

use portcullis::addr::{DeviceId, Direction, DmaSegment, Iova, IovaRange, PhysAddr, PhysSegment};
use portcullis::dma::{DmaDevice, DmaMapError, DmaMask, MapAttributes, OpsConfig, Queue, QueueConfig};
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

/// What is mapped at an address of the caller's choice lies in what the domain keeps free, and where the device reaches it.
#[test]
fn a_chosen_address_is_taken_up_to_the_last_page_that_is_kept_free_and_reached() {
    let kept = IovaRange::new(Iova::new(0x1000_0000), 4 * PAGE).unwrap();
    let last = kept.last().get();
    for (mask, page, pages, fits) in [
        (u64::MAX, 0, 4, true),
        (u64::MAX, 1, 4, false),
        (last, 0, 4, true),
        (last, 3, 1, true),
        (last - 1, 0, 4, false),
        (last - 1, 3, 1, false),
        (last - 1, 0, 3, true),
    ] {
        let world = World::with(Policy::Strict, |builder| builder.reserve(kept));
        let ops = world.nic.ops(OpsConfig::Strict).unwrap();
        ops.set_limits(mask, 0).unwrap();
        let (memory, len) = (world.memory.buffer(4 * PAGE).unwrap(), pages * PAGE);
        let iova = kept.start().checked_add(page * PAGE).unwrap();
        // SAFETY: the memory is the test's, all of it atomics.
        let mapped =
            unsafe { ops.map_at(iova, (memory.phys(), len), Direction::ToDevice, MapAttributes::default()) };
        let expected = if fits { Ok(()) } else { Err(DmaMapError::Address { iova }) };
        assert_eq!(mapped, expected, "{pages} pages from {page} on of {mask:#x}");
        assert_eq!(world.reads(iova).is_some(), fits);
    }
}
