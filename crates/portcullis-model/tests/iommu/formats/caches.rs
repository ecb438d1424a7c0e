//! The caches and the ledger with other granules, roots and levels than VT-d's.

use portcullis_model::Granule::{Size16K, Size64K};
use portcullis_model::{ArmTables, RiscvMode, Segment};

use super::arm::{PAGE, PAGE2, chain};
use super::*;

fn segment(iova: u64, phys: u64, len: u64) -> Segment {
    Segment { iova: Iova::new(iova), phys: PhysAddr::new(phys), len }
}

#[test]
fn one_entry_serves_a_page_of_64_kib_and_goes_with_any_part_of_it() {
    let rig = Rig::new(TableFormat::Arm(ArmTables::stage1(Size64K, 48)), 16);
    let table = chain(&rig, 0, 16)[1];
    rig.set(table, 0, 0x5_0000_0000 | PAGE);
    rig.set(table, 1, 0x6_0000_0000 | PAGE);
    rig.iommu.access(DEVICE, Iova::new(0), 2 << 16, RW).unwrap();
    let stats = rig.iommu.stats();
    // 32 pieces of 4 KiB, two pages; three tables for the first walk, one for the other.
    assert_eq!((stats.accesses, stats.iotlb_misses, stats.walk_cache_misses), (32, 2, 1));
    assert_eq!((stats.table_reads, stats.misses_by_level), (4, [1, 1, 0, 0]));

    rig.set(table, 0, 0);
    rig.set(table, 1, 0);
    rig.invalidate(0xf000, 0x1000, true);
    assert_eq!(rig.go(0x1234, R), Err(FaultReason::NotPresent { level: 1 }));
    assert_eq!(rig.go(0x1_1234, R), Ok(0x6_0000_1234), "the other is still cached");
}

#[test]
fn cached_tables_go_by_the_span_of_their_granule() {
    let rig = Rig::new(TableFormat::Arm(ArmTables::stage1(Size16K, 47)), 4);
    let tables = chain(&rig, 0, 4);
    let other = rig.table(4);
    // Each table of pages spans 32 MiB.
    rig.set(tables[2], 1, other | 3);
    rig.set(tables[1], 2047, 0x5_0000_0000 | PAGE);
    rig.set(other, 0, 0x6_0000_0000 | PAGE);
    let (first, second) = (2047 << 14, 1 << 25);
    assert_eq!(rig.go(first, R), Ok(0x5_0000_0000));
    assert_eq!(rig.go(second, R), Ok(0x6_0000_0000));

    // The first table is replaced; an invalidation elsewhere in its span drops it, the hint keeps it.
    let new = rig.table(4);
    rig.set(new, 2047, 0x7_0000_0000 | PAGE);
    rig.set(tables[2], 0, new | 3);
    rig.invalidate(first, 0x4000, true);
    assert_eq!(rig.go(first, R), Ok(0x5_0000_0000), "by the old table");
    rig.invalidate(second, 0x4000, false);
    rig.invalidate(first, 0x4000, true);
    assert_eq!(rig.go(first, R), Ok(0x5_0000_0000), "the neighbour's span is its own");
    rig.invalidate(first, 0x4000, true);
    rig.invalidate(0x4000, 0x1000, false);
    assert_eq!(rig.go(first, R), Ok(0x7_0000_0000));
}

#[test]
fn reads_of_freed_frames_count_in_whichever_frame_they_are() {
    let rig = Rig::new(TableFormat::Arm(ArmTables::stage1(Size16K, 47)), 4);
    let tables = chain(&rig, 0, 4);
    // A table of four frames that are allocated one by one: allocate until four aligned ones are contiguous.
    let mut row = rig.table(1);
    while !row.is_multiple_of(0x4000) || (1..4).any(|next| rig.table(1) != row + next * 0x1000) {
        row = rig.table(1);
    }
    rig.set(tables[2], 0, row | 3);
    // Entries 0, 512, 1024 and 1536 are the first of their frames.
    for frame in 0..4 {
        rig.set(row, 512 * frame, 0x5_0000_0000 | PAGE);
    }
    rig.memory.release(PhysAddr::new(row + 0x2000), 1);
    let freed = |entry: u64| rig.walk(entry << 14).freed_reads;
    assert_eq!([0, 512, 1024, 1536, 1535, 1023].map(freed), [0, 0, 1, 0, 1, 0]);
    rig.go(1024 << 14, R).unwrap();
    assert_eq!(rig.iommu.stats().walks_into_freed_frames, 1);
    rig.memory.release(PhysAddr::new(rig.root), 4);
    assert_eq!(rig.walk(1024 << 14).freed_reads, 2, "the root and the page's table");
}

#[test]
fn six_levels_are_cached_too() {
    let rig = Rig::new(TableFormat::AmdV1 { levels: 6 }, 1);
    let both = 1 | 3 << 61;
    let mut table = rig.root;
    let mut index = 127;
    for level in (1..6_u64).rev() {
        let below = rig.table(1);
        rig.set(table, index, below | level << 9 | both);
        (table, index) = (below, 511);
    }
    rig.set(table, 511, 0x9000 | both);
    rig.set(table, 510, 0xa000 | both);
    assert_eq!(rig.go(u64::MAX, RW), Ok(0x9fff));
    assert_eq!(rig.iommu.stats().table_reads, 6);
    assert_eq!(rig.go(u64::MAX - 0x1000, RW), Ok(0xafff));
    let stats = rig.iommu.stats();
    assert_eq!((stats.table_reads, stats.misses_by_level), (7, [1, 1, 1, 1]));
    // Another index only at level 5: its table is cached, too.
    assert_eq!(rig.go(u64::MAX - (1 << 48), R), Err(FaultReason::NotPresent { level: 5 }));
    assert_eq!(rig.iommu.stats().table_reads, 8);
    // The last page of all.
    rig.set(table, 511, 0);
    rig.invalidate(u64::MAX - 0xfff, 0x1000, true);
    assert_eq!(rig.go(u64::MAX, R), Err(FaultReason::NotPresent { level: 1 }));
}

#[test]
fn the_ledger_sees_stale_pages_of_any_format() {
    let cases = [
        (TableFormat::Arm(ArmTables::stage2(Size64K, 33, 1)), 256, PAGE2, 16),
        (TableFormat::Arm(ArmTables::stage1(Size16K, 25)), 4, PAGE, 14),
        // P, R/W, U/S would need four levels; one level of AMD-Vi, and a gigapage of the G-stage.
        (TableFormat::AmdV1 { levels: 1 }, 1, 1 | 3 << 61, 12),
        (TableFormat::RiscV(RiscvMode::Sv39x4), 4, 0xdf, 30),
    ];
    for (format, frames, bits, shift) in cases {
        let rig = Rig::new(format, frames);
        let page = 1_u64 << shift;
        let address = if shift == 30 { page >> 2 } else { page };
        rig.set(rig.root, 3, address | bits);
        let whole = segment(3 << shift, page, 0x1000);
        rig.go(3 << shift, RW).unwrap();
        rig.iommu.observe_map(DEVICE, 0, [whole]);
        // The entry is gone and the IOTLB still has it.
        rig.set(rig.root, 3, 0);
        assert_eq!(rig.iommu.observe_unmap(DEVICE, 10, [whole]), 1, "{format:?}");
        rig.iommu.set_time(30);
        rig.invalidate(3 << shift, 0x1000, true);
        rig.iommu.set_time(100);
        let exposed = rig.iommu.exposure(DEVICE);
        assert_eq!((exposed.stale_byte_ns, exposed.longest_stale_ns), (20 * 0x1000, 20), "{format:?}");

        // The tables themselves lead there until they do not and an invalidation follows.
        rig.set(rig.root, 3, address | bits);
        rig.iommu.observe_map(DEVICE, 200, [whole]);
        assert_eq!(rig.iommu.observe_unmap(DEVICE, 210, [whole]), 1);
        rig.set(rig.root, 3, 0);
        rig.iommu.set_time(250);
        rig.invalidate(3 << shift, 0x1000, true);
        rig.iommu.set_time(300);
        assert_eq!(rig.iommu.exposure(DEVICE).longest_stale_ns, 40);
    }
}
