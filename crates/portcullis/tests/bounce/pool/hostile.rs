//! A device that looks at every address it can name.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, DeviceProfile, PoolConfig};
use portcullis_model::open::OpenPool;

use crate::chosen::Chosen;
use crate::pool::support::{Bench, DEVICE, Device, PAGE, map, piece, small};

const SECRET: u8 = 0xee;

/// Every byte that the device can read in the pool's addresses, and where it is.
fn readable(bench: &Bench, region: (u64, u64)) -> Vec<(u64, u8)> {
    let pages = (region.0..region.0 + region.1).step_by(PAGE as usize);
    let open = pages.filter_map(|page| {
        let phys = bench.reaches(Iova::new(page), Permissions::READ)?;
        Some((page, bench.bytes(phys, PAGE)))
    });
    open.flat_map(|(page, bytes)| (page..).zip(bytes)).filter(|(_, byte)| *byte != 0).collect()
}

/// Where the slots are, found by a mapping of each class.
fn region(bench: &Bench) -> (u64, u64) {
    let usage = bench.pool.usage();
    // Naturally aligned; its own first slot is in the first class.
    let buffer = bench.memory.buffer(1).unwrap();
    let list = [piece(buffer.phys(), 0, 1)];
    let mapping = map(&bench.device, &list, Direction::ToDevice, Attributes::default());
    let iova = mapping.unwrap().iova();
    bench.pool.close(iova, 1).unwrap();
    (iova.get() & !(usage.iova_bytes.next_power_of_two() - 1), usage.iova_bytes)
}

fn send(device: &Device<Arc<Chosen>>, list: &[PhysSegment]) -> (Iova, u64) {
    let mapping = map(device, list, Direction::ToDevice, Attributes::default()).unwrap();
    (mapping.iova(), mapping.len())
}

#[test]
fn it_sees_the_live_mappings_and_nothing_else_where_buffers_are_wiped() {
    let bench = Bench::new(PoolConfig { wipe: true, ..small() });
    let untrusted = bench.device(1, true);
    let profile = DeviceProfile { offset_mask: 0xfff, untrusted: true, ..DeviceProfile::default() };
    let aligned = BounceDevice::new(bench.pool.clone(), profile).unwrap();
    let region = region(&bench);
    let buffer = bench.memory.buffer(64 * PAGE).unwrap();
    buffer.fill(SECRET);
    let mut live = Vec::new();
    for n in 0..60_u64 {
        // Parts of pages with secrets on both sides.
        let (at, len) = (n * PAGE + 17 * n + 1, 1 + n * n * 3);
        let list = [piece(buffer.phys(), at, len)];
        bench.write(list[0].phys, &vec![0x11; len as usize]);
        live.push(send(if n % 2 == 0 { &untrusted } else { &aligned }, &list));
        bench.write(list[0].phys, &vec![SECRET; len as usize]);
        if n % 3 == 2 {
            let (iova, len) = live.swap_remove((n * 7 % live.len() as u64) as usize);
            bench.pool.close(iova, len).unwrap();
        }
        let seen = readable(&bench, region);
        assert!(seen.iter().all(|(_, byte)| *byte == 0x11));
        let inside = |at: u64| live.iter().any(|(iova, len)| (iova.get()..iova.get() + len).contains(&at));
        assert!(seen.iter().all(|(at, _)| inside(*at)), "what is unmapped is still to be seen");
        let live_bytes: u64 = live.iter().map(|(_, len)| len).sum();
        assert_eq!(seen.len() as u64, live_bytes);
    }
    live.into_iter().for_each(|(iova, len)| bench.pool.close(iova, len).unwrap());
    assert_eq!(readable(&bench, region), []);
    drop((buffer, untrusted, aligned));
    bench.finish();
}

#[test]
fn another_group_s_bytes_are_gone_before_it_gets_the_buffer() {
    let bench = Bench::new(small());
    let (first, second) = (bench.device(1, true), bench.device(2, true));
    let buffer = bench.memory.buffer(2 * PAGE).unwrap();
    let whole = [piece(buffer.phys(), 0, PAGE)];
    let part = [piece(buffer.phys(), PAGE + 100, 40)];
    for direction in Direction::ALL {
        buffer.fill(SECRET);
        let mapping = map(&first, &whole, direction, Attributes::default()).unwrap();
        let iova = mapping.iova();
        if direction != Direction::ToDevice {
            bench.iommu.dma_write(DEVICE, iova, &[SECRET; PAGE as usize]).unwrap();
        }
        bench.pool.close(iova, PAGE).unwrap();
        bench.write(part[0].phys, &[0x22; 40]);
        let mapping = map(&second, &part, direction, Attributes::default()).unwrap();
        assert_eq!(mapping.iova(), iova, "the same slot");
        let phys = bench.reaches(iova, direction.permissions()).unwrap();
        assert!(bench.bytes(phys, PAGE).iter().all(|byte| *byte == 0 || *byte == 0x22), "{direction:?}");
        bench.pool.close(iova, 40).unwrap();
        // Nor does the second one's driver find them, where its device writes nothing.
        let expected = if direction == Direction::FromDevice { 0 } else { 0x22 };
        assert_eq!(bench.bytes(part[0].phys, 40), [expected; 40]);
    }
    drop((buffer, first, second));
    bench.finish();
}

#[test]
fn it_finds_the_last_of_its_own_group_at_the_most_and_never_a_neighbour() {
    let bench = Bench::new(small());
    let untrusted = bench.device(1, true);
    let region = region(&bench);
    let buffer = bench.memory.buffer(8 * PAGE).unwrap();
    buffer.fill(SECRET);
    for (n, len) in [(1, 3000), (2, 500), (3, 1), (4, 4096), (5, 20)] {
        let list = [piece(buffer.phys(), 777 * n, len)];
        bench.write(list[0].phys, &vec![n as u8; len as usize]);
        let (iova, len) = send(&untrusted, &list);
        let seen = readable(&bench, region);
        assert!(seen.iter().all(|(_, byte)| (1..=n as u8).contains(byte)));
        bench.pool.close(iova, len).unwrap();
    }
    drop((buffer, untrusted));
    bench.finish();
}

#[test]
fn what_it_writes_too_late_reaches_no_original() {
    let bench = Bench::new(small());
    let untrusted = bench.device(1, true);
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    buffer.fill(SECRET);
    for (offset, len) in [(5, 100), (3, 30 * PAGE), (0, 20 * PAGE)] {
        let list = [piece(buffer.phys(), offset, len)];
        let mapping = map(&untrusted, &list, Direction::Bidirectional, Attributes::default()).unwrap();
        let (iova, len) = (mapping.iova(), mapping.len());
        bench.iommu.dma_write(DEVICE, iova, &vec![1; len as usize]).unwrap();
        // Into the rest of its pages, too.
        let (first, end) = (iova.get() & !(PAGE - 1), (iova.get() + len).next_multiple_of(PAGE));
        bench.iommu.dma_write(DEVICE, Iova::new(first), &vec![2; (end - first) as usize]).unwrap();
        bench.pool.close(iova, len).unwrap();
        for page in (first..end).step_by(PAGE as usize) {
            let _ = bench.iommu.dma_write(DEVICE, Iova::new(page), &[3; PAGE as usize]);
        }
        assert_eq!(bench.bytes(list[0].phys, len), vec![2; len as usize]);
        assert_eq!(bench.bytes(buffer.phys(), offset), vec![SECRET; offset as usize]);
        let after = PhysAddr::new(list[0].phys.get() + len);
        assert_eq!(bench.bytes(after, PAGE), vec![SECRET; PAGE as usize]);
        buffer.fill(SECRET);
    }
    drop((buffer, untrusted));
    bench.finish();
}
