//! One thing at a time.

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{Direction, DmaSegment, Iova, Permissions, PhysAddr};
use portcullis::bounce::pool::{Attributes, BounceDevice, DeviceProfile, PoolConfig, Way};
use portcullis::domain::Policy;
use portcullis::platform::Platform;
use portcullis_model::open::OpenPool;

use crate::pool::support::{Bench, DEVICE, PAGE, Ticking, map, piece, small};

const NONE: Attributes = Attributes { copy_in: false };

#[test]
fn a_reused_buffer_costs_no_mapping_and_no_invalidation() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 100, 2000)];
    let first = map(&bench.device, &list, Direction::FromDevice, NONE).unwrap();
    assert_eq!((first.way(), first.len()), (Way::Slot, 2000));
    bench.pool.close(first.iova(), 2000).unwrap();
    let (stats, before) = (bench.domain.stats(), bench.iommu.stats());
    for n in 0..100 {
        let mapping = map(&bench.device, &list, Direction::FromDevice, NONE).unwrap();
        assert_eq!(mapping.iova(), first.iova(), "the newest slot first");
        bench.iommu.dma_write(DEVICE, mapping.iova(), &[n; 2000]).unwrap();
        bench.pool.close(mapping.iova(), 2000).unwrap();
        assert_eq!(bench.bytes(list[0].phys, 2000), [n; 2000]);
    }
    assert_eq!(bench.bytes(buffer.phys(), 100), [0; 100]);
    assert_eq!(bench.domain.stats(), stats);
    assert_eq!(bench.iommu.stats().submissions, before.submissions);
    assert_eq!(bench.domain.exposure(), Default::default());
    let usage = bench.pool.usage();
    assert_eq!((usage.buffer_bytes, usage.cached_bytes, usage.bounced, usage.reused), (PAGE, PAGE, 101, 100));
    assert_eq!(bench.pool.trim(0), Ok(PAGE));
    let usage = bench.pool.usage();
    assert_eq!((usage.buffer_bytes, usage.peak_buffer_bytes), (0, PAGE));
    drop(buffer);
    bench.finish();
}

#[test]
fn what_a_cpu_without_a_slot_maps_is_counted_too() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    bench.platform.be(bench.platform.cpus());
    for bounced in 1..4 {
        let mapping = map(&bench.device, &list, Direction::ToDevice, NONE).unwrap();
        bench.pool.close(mapping.iova(), PAGE).unwrap();
        let usage = bench.pool.usage();
        assert_eq!((usage.bounced, usage.buffer_bytes, usage.cached_bytes), (bounced, PAGE, PAGE));
    }
    drop(buffer);
    bench.finish();
}

#[test]
fn buffers_are_kept_apart_by_permission() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let all = Direction::ALL;
    let mut iovas = Vec::new();
    for _ in 0..2 {
        for direction in all {
            let mapping = map(&bench.device, &list, direction, NONE).unwrap();
            for access in [Permissions::READ, Permissions::WRITE] {
                let allowed = direction.permissions().allows(access);
                assert_eq!(bench.reaches(mapping.iova(), access).is_some(), allowed);
            }
            bench.pool.close(mapping.iova(), PAGE).unwrap();
            iovas.push(mapping.iova());
        }
    }
    assert_eq!(iovas[..3], iovas[3..]);
    assert_eq!(bench.pool.usage().buffer_bytes, 3 * PAGE);
    drop(buffer);
    bench.finish();
}

#[test]
fn a_list_goes_through_one_buffer_and_comes_back_piece_by_piece() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(8 * PAGE).unwrap();
    let list: Vec<_> = (0..8).map(|n| piece(buffer.phys(), n * PAGE + 10 * n, 100 + n)).collect();
    let len = list.iter().map(|piece| piece.len).sum();
    for n in 0..3_u8 {
        let mapping = map(&bench.device, &list, Direction::Bidirectional, NONE).unwrap();
        assert_eq!(mapping.segments().collect::<Vec<_>>(), [DmaSegment { iova: mapping.iova(), len }]);
        let mut seen = bench.seen(mapping.iova(), len).unwrap();
        assert!(seen.iter().all(|byte| *byte == n));
        seen.fill(n + 1);
        bench.iommu.dma_write(DEVICE, mapping.iova(), &seen).unwrap();
        bench.pool.sync_cpu(mapping.iova(), 99, 2).unwrap();
        let edges = |index: usize, at: u64| bench.bytes(piece(list[index].phys, at, 1).phys, 1)[0];
        assert_eq!([edges(0, 98), edges(0, 99), edges(1, 0), edges(1, 1)], [n, n + 1, n + 1, n]);
        bench.pool.close(mapping.iova(), len).unwrap();
        assert!(
            list.iter().all(|piece| bench.bytes(piece.phys, piece.len).iter().all(|byte| *byte == n + 1))
        );
    }
    assert_eq!(bench.pool.usage().buffer_bytes, PAGE);
    drop(buffer);
    bench.finish();
}

#[test]
fn what_the_device_leaves_unwritten_is_zero_its_own_or_kept() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    let keep = Attributes { copy_in: true };
    let receive = |attributes, bytes: &[u8]| {
        buffer.fill(0xcc);
        let mapping = map(&bench.device, &list, Direction::FromDevice, attributes).unwrap();
        bench.iommu.dma_write(DEVICE, mapping.iova(), bytes).unwrap();
        bench.pool.close(mapping.iova(), PAGE).unwrap();
        bench.bytes(buffer.phys(), 4)
    };
    assert_eq!(receive(NONE, &[1, 1]), [1, 1, 0, 0]);
    assert_eq!(receive(NONE, &[2]), [2, 1, 0, 0]);
    assert_eq!(receive(keep, &[3]), [3, 0xcc, 0xcc, 0xcc]);
    // The CPU's bytes were in the buffer: the next driver sees none of them.
    assert_eq!(receive(NONE, &[4]), [4, 0, 0, 0]);
    assert_eq!(receive(NONE, &[5, 5]), [5, 5, 0, 0]);
    assert_eq!(receive(NONE, &[6]), [6, 5, 0, 0]);
    // A sync for the device undoes nothing that the device has written; of a device that only writes it gets no change of the CPU's.
    let mapping = map(&bench.device, &list, Direction::FromDevice, keep).unwrap();
    bench.iommu.dma_write(DEVICE, mapping.iova(), &[7]).unwrap();
    bench.write(buffer.phys(), &[9, 9]);
    bench.pool.sync_device(mapping.iova(), 0, 2).unwrap();
    bench.pool.close(mapping.iova(), PAGE).unwrap();
    assert_eq!(bench.bytes(buffer.phys(), 3), [7, 5, 0]);
    drop(buffer);
    bench.finish();
    // A pool that wipes leaves nothing of its own either.
    let bench = Bench::new(PoolConfig { wipe: true, ..small() });
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    for (bytes, seen) in [(&[1, 1][..], [1, 1, 0]), (&[2], [2, 0, 0])] {
        let mapping = map(&bench.device, &list, Direction::FromDevice, NONE).unwrap();
        bench.iommu.dma_write(DEVICE, mapping.iova(), bytes).unwrap();
        bench.pool.close(mapping.iova(), PAGE).unwrap();
        assert_eq!(bench.bytes(buffer.phys(), 3), seen);
    }
    drop(buffer);
    bench.finish();
}

#[test]
fn bits_of_the_original_address_are_kept() {
    let bench = Bench::new(small());
    let profile = DeviceProfile { offset_mask: 0xfff, ..DeviceProfile::default() };
    let device = BounceDevice::new(bench.pool.clone(), profile).unwrap();
    let buffer = bench.memory.buffer(20 * PAGE).unwrap();
    // The last of them needs more than the largest slot for its offset.
    for (offset, len, way) in [(3000, 100, Way::Slot), (4000, 200, Way::Slot), (8, 16 * PAGE, Way::SingleUse)]
    {
        let list = [piece(buffer.phys(), offset, len)];
        buffer.fill(0x77);
        let mapping = map(&device, &list, Direction::ToDevice, NONE).unwrap();
        assert_eq!((mapping.iova().get() & 0xfff, mapping.way()), (offset, way));
        assert_eq!(bench.seen(mapping.iova(), len).unwrap(), vec![0x77; len as usize]);
        bench.pool.close(mapping.iova(), len).unwrap();
    }
    for mask in [0x1000, 0x1fff, 0xff0] {
        let profile = DeviceProfile { offset_mask: mask, ..DeviceProfile::default() };
        let refused = BounceDevice::new(bench.pool.clone(), profile).err();
        assert_eq!(refused, Some(SetupError::OffsetMask { mask }));
    }
    drop((buffer, device));
    bench.finish();
}

#[test]
fn large_mappings_are_direct_and_their_neighbours_are_counted_exactly() {
    // Far enough from one step to the next that the account reads the clock at each.
    const STEP_NS: u64 = 1 << 20;
    let bench = Bench::on(Arc::new(Ticking::new(1)), Policy::Strict, small());
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let touching = [piece(buffer.phys(), 0, 17 * PAGE - 9)];
    let mut expected = 0;
    // Pieces with gaps inside their pages.
    let gaps = [piece(buffer.phys(), 5, 17 * PAGE), piece(buffer.phys(), 30 * PAGE + 1, 6)];
    for (list, segments) in [(&touching[..], 1), (&gaps[..], 2)] {
        bench.platform.advance(STEP_NS);
        let mapping = map(&bench.device, list, Direction::ToDevice, NONE).unwrap();
        assert_eq!(mapping.way(), Way::Direct);
        let view: Vec<_> = mapping.segments().collect();
        assert_eq!(view.len(), segments);
        bench.platform.advance(STEP_NS);
        let used: u64 = list.iter().map(|piece| piece.len).sum();
        let pages = if segments == 1 { 17 } else { 19 };
        expected += u128::from((pages * PAGE - used) * STEP_NS);
        for (segment, piece) in view.iter().zip(list) {
            assert_eq!(bench.reaches(segment.iova, Permissions::READ), Some(piece.phys));
            assert_eq!(segment.len, piece.len);
        }
        let last = view.last().unwrap();
        assert_eq!(last.iova.get() + last.len, mapping.iova().get() + mapping.len());
        bench.pool.sync_cpu(mapping.iova(), 0, 1).unwrap();
        bench.pool.close(mapping.iova(), mapping.len()).unwrap();
        assert_eq!(bench.reaches(mapping.iova(), Permissions::READ), None);
        assert_eq!(bench.domain.exposure().neighbour_byte_ns, expected);
        bench.platform.advance(STEP_NS);
        assert!(bench.pool.close(mapping.iova(), mapping.len()).is_err());
        assert_eq!(bench.domain.exposure().neighbour_byte_ns, expected);
    }
    drop(buffer);
    bench.finish();
}

#[test]
fn an_untrusted_device_gets_the_middle_of_a_large_mapping_and_copies_of_its_ends() {
    for split in [true, false] {
        let bench = Bench::new(PoolConfig { split, ..small() });
        let device = bench.device(1, true);
        let buffer = bench.memory.buffer(40 * PAGE).unwrap();
        buffer.fill(0xee);
        let (offset, len) = (PAGE - 3, 20 * PAGE);
        let list = [piece(buffer.phys(), offset, len)];
        bench.write(list[0].phys, &vec![0x11; len as usize]);
        let mapping = map(&device, &list, Direction::Bidirectional, NONE).unwrap();
        assert_eq!(mapping.way(), if split { Way::Split } else { Way::SingleUse });
        assert_eq!(bench.seen(mapping.iova(), len).unwrap(), vec![0x11; len as usize]);
        // Nothing beside it.
        let (first, last) =
            (mapping.iova().get() & !(PAGE - 1), (mapping.iova().get() + len - 1) | (PAGE - 1));
        let around = bench.seen(Iova::new(first), last - first + 1).unwrap();
        assert!(around.iter().all(|byte| *byte == 0x11 || *byte == 0));
        let middle = bench.reaches(Iova::new(first + PAGE), Permissions::WRITE).unwrap();
        assert_eq!(middle == PhysAddr::new(buffer.phys().get() + PAGE), split);
        bench.iommu.dma_write(DEVICE, mapping.iova(), &vec![0x22; len as usize]).unwrap();
        assert_eq!(bench.bytes(list[0].phys, 1), [0x11]);
        bench.pool.sync_cpu(mapping.iova(), 2, len - 2).unwrap();
        assert_eq!(bench.bytes(list[0].phys, 4), [0x11, 0x11, 0x22, 0x22]);
        bench.pool.close(mapping.iova(), len).unwrap();
        assert_eq!(bench.bytes(list[0].phys, len), vec![0x22; len as usize]);
        assert_eq!(bench.bytes(piece(list[0].phys, len, 0).phys, 100), [0xee; 100]);
        assert_eq!(bench.bytes(buffer.phys(), offset), vec![0xee; offset as usize]);
        for at in (first..=last).step_by(PAGE as usize) {
            assert_eq!(bench.reaches(Iova::new(at), Permissions::WRITE), None);
        }
        drop((buffer, device));
        bench.finish();
    }
}

#[test]
fn what_must_not_be_bounced_is_not() {
    let bench = Bench::new(small());
    let (trusted, untrusted) = (&bench.device, bench.device(1, true));
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    // Large ones: all of a trusted device's, and an untrusted one's of whole granules.
    let whole = [piece(buffer.phys(), 0, 20 * PAGE)];
    let part = [piece(buffer.phys(), 0, 20 * PAGE + 100)];
    for (device, list, way) in [
        (trusted, &whole, Way::Direct),
        (trusted, &part, Way::Direct),
        (&untrusted, &whole, Way::Direct),
        (&untrusted, &part, Way::Split),
    ] {
        let mapping = map(device, list, Direction::Bidirectional, NONE).unwrap();
        assert_eq!(mapping.way(), way);
        assert_eq!(bench.reaches(mapping.iova(), Permissions::WRITE), Some(list[0].phys));
        bench.pool.close(mapping.iova(), mapping.len()).unwrap();
    }
    // A list with a gap.
    let large = [piece(buffer.phys(), PAGE, 20 * PAGE), piece(buffer.phys(), 30 * PAGE, PAGE)];
    let mapping = map(&untrusted, &large, Direction::FromDevice, NONE).unwrap();
    assert_eq!((mapping.way(), mapping.len()), (Way::Direct, 21 * PAGE));
    bench.pool.close(mapping.iova(), mapping.len()).unwrap();
    drop((buffer, untrusted));
    bench.finish();
}

/// With gaps or without.
#[test]
fn what_the_domain_maps_is_counted_once_and_so_is_its_end() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(40 * PAGE).unwrap();
    let at = |offset, len| piece(buffer.phys(), offset, len);
    for list in [
        &[at(0, 17 * PAGE)][..],
        &[at(9, 30 * PAGE)],
        &[at(0, 20 * PAGE), at(22 * PAGE, PAGE)],
        &[at(9, 20 * PAGE), at(22 * PAGE, 100), at(24 * PAGE + 8, 9)],
    ] {
        let counted = || (bench.domain.stats().maps, bench.domain.stats().unmaps);
        let (maps, unmaps) = counted();
        let mapping = map(&bench.device, list, Direction::FromDevice, NONE).unwrap();
        assert_eq!((mapping.way(), counted()), (Way::Direct, (maps + 1, unmaps)), "{list:?}");
        bench.pool.close(mapping.iova(), mapping.len()).unwrap();
        assert_eq!(counted(), (maps + 1, unmaps + 1), "{list:?}");
    }
    drop(buffer);
    bench.finish();
}

#[test]
fn a_class_without_a_slot_left_falls_back_to_single_use_buffers_and_comes_back() {
    let bench = Bench::new(small());
    let buffer = bench.memory.buffer(20 * PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, 16 * PAGE)];
    let make = |n: usize, direction| {
        let ways: Vec<_> = (0..n).map(|_| map(&bench.device, &list, direction, NONE).unwrap()).collect();
        ways
    };
    let live = make(6, Direction::ToDevice);
    let ways: Vec<_> = live.iter().map(|mapping| mapping.way()).collect();
    assert_eq!(ways, [[Way::Slot; 4].as_slice(), &[Way::SingleUse; 2]].concat());
    assert_eq!(bench.pool.usage().singles, 2);
    // Ended by another CPU than it was made on, and one without a CPU.
    for (n, mapping) in live.iter().enumerate() {
        bench.platform.be(1 + n % 3);
        bench.pool.close(mapping.iova(), mapping.len()).unwrap();
        let gone = bench.reaches(mapping.iova(), Permissions::READ).is_none();
        assert_eq!(gone, mapping.way() == Way::SingleUse);
    }
    // All slots are free, on other CPUs and for another direction: that is no reason for single-use buffers.
    bench.platform.be(0);
    for direction in [Direction::ToDevice, Direction::FromDevice] {
        let live = make(4, direction);
        assert!(live.iter().all(|mapping| mapping.way() == Way::Slot), "{direction:?}");
        live.iter().for_each(|mapping| bench.pool.close(mapping.iova(), mapping.len()).unwrap());
    }
    drop(buffer);
    bench.finish();
}

#[test]
fn slots_travel_between_cpus_in_chains_and_each_is_lent_once() {
    const LIVE: u64 = 500;
    let bench = Bench::new(PoolConfig { class_bytes: 4 << 20, ..small() });
    let buffer = bench.memory.buffer(PAGE).unwrap();
    let list = [piece(buffer.phys(), 0, PAGE)];
    for round in 0..4 {
        // Mapped by one CPU and unmapped by others, of which each keeps less than it gets.
        bench.platform.be(0);
        let live: Vec<_> = (0..LIVE)
            .map(|_| map(&bench.device, &list, Direction::ToDevice, NONE).unwrap())
            .inspect(|mapping| assert_eq!(mapping.way(), Way::Slot))
            .map(|mapping| mapping.iova())
            .collect();
        let mut sorted = live.clone();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), live.len(), "lent twice");
        let cpu = |n: usize| if round < 2 { 1 } else { n % 4 };
        for (n, iova) in live.into_iter().enumerate() {
            bench.platform.be(cpu(n));
            bench.pool.close(iova, PAGE).unwrap();
        }
        let usage = bench.pool.usage();
        assert_eq!(usage.cached_bytes, usage.buffer_bytes);
        // Two chains of 64 at the most stay with each CPU that frees.
        let most = LIVE + if round < 2 { 128 } else { 3 * 128 };
        assert!(usage.buffer_bytes <= most * PAGE, "{usage:?}");
        if round % 2 == 1 {
            assert_eq!(bench.pool.trim(100 * PAGE).unwrap(), usage.buffer_bytes - 100 * PAGE);
        }
    }
    drop(buffer);
    bench.finish();
}

#[test]
fn a_device_that_does_not_reach_the_slots_gets_buffers_it_reaches() {
    let bench = Bench::new(small());
    let profile = DeviceProfile { mask: 0xffff_ffff, ..DeviceProfile::default() };
    let device = BounceDevice::new(bench.pool.clone(), profile).unwrap();
    let buffer = bench.memory.buffer(20 * PAGE).unwrap();
    buffer.fill(5);
    for len in [10, 20 * PAGE] {
        let list = [piece(buffer.phys(), 0, len)];
        let mapping = map(&device, &list, Direction::ToDevice, NONE).unwrap();
        assert!(mapping.iova().get() + len <= 1 << 32);
        assert_eq!(bench.seen(mapping.iova(), len).unwrap(), vec![5; len as usize]);
        bench.pool.close(mapping.iova(), len).unwrap();
        assert_eq!(bench.reaches(mapping.iova(), Permissions::READ), None);
    }
    drop((buffer, device));
    bench.finish();
}
