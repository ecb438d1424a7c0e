//! Arm VMSAv8-64. Valid is bit 0, table or page bit 1, AF bit 10; the rest by stage.

use portcullis_model::Granule::{self, Size4K, Size16K, Size64K};
use portcullis_model::{ArmStage, ArmTables};

use super::*;

/// Valid and table.
pub const TABLE: u64 = 0x3;
/// Valid, AF, and AP[1] (bit 6: unprivileged too). For stage 2 it says reads only.
pub const BLOCK: u64 = 0x441;
/// The same with bit 1.
pub const PAGE: u64 = 0x443;
/// Stage 2: S2AP (bits 7:6) of reads and writes.
pub const PAGE2: u64 = 0x4c3;

/// Tables from the root down, by the highest index of the root and 0 below; by level.
pub fn chain(rig: &Rig, root_index: u64, frames: usize) -> Vec<u64> {
    let mut tables = vec![rig.root];
    for level in 1..rig.format.levels() {
        let below = rig.table(frames);
        rig.set(*tables.last().unwrap(), if level == 1 { root_index } else { 0 }, below | TABLE);
        tables.push(below);
    }
    tables.push(0);
    tables.reverse();
    tables
}

fn frames(granule: Granule) -> usize {
    1 << (granule.shift() - 12)
}

/// Entries at level n cover 2^(granule + n * (granule - 3)) bytes, n from 0.
fn shift(granule: Granule, level: u32) -> u32 {
    granule.shift() + (granule.shift() - 3) * (level - 1)
}

#[test]
fn stage_1_of_every_granule() {
    // Granule, bits of address, levels; the highest level with blocks (level 1 is pages).
    for (granule, width, levels, highest_block) in [
        (Size4K, 48, 4, 3),
        (Size4K, 39, 3, 3),
        (Size4K, 30, 2, 2),
        (Size16K, 48, 4, 2),
        (Size16K, 47, 3, 2),
        (Size16K, 36, 2, 2),
        (Size16K, 25, 1, 1),
        (Size64K, 48, 3, 2),
        (Size64K, 42, 2, 2),
        (Size64K, 29, 1, 1),
    ] {
        let tables = ArmTables::stage1(granule, width);
        assert_eq!(tables.levels, levels, "{granule:?} {width}");
        let rig = Rig::new(TableFormat::Arm(tables), frames(granule));
        let last = (1_u64 << (width - shift(granule, levels))) - 1;
        let chain = chain(&rig, if levels > 1 { last } else { 0 }, frames(granule));
        let base = if levels > 1 { last << shift(granule, levels) } else { 0 };
        // The highest index below the root, in the last frame of its table.
        let high = if levels > 1 { (1_u64 << (granule.shift() - 3)) - 1 } else { last };
        let page = 0x5_4321_0000_u64 & !0xffff;
        rig.set(chain[1], high, page | PAGE);
        let iova = base | high << granule.shift();
        // AP[2] is clear: writes too. UXN is clear: execution too.
        assert_eq!(rig.page(iova + 7), Ok((page, granule.shift(), ALL)), "{granule:?} {width}");
        assert_eq!(rig.walk(iova).table_reads, levels);
        assert_eq!(rig.go(iova + 7, RW), Ok(page + 7));
        for level in 2..=levels {
            let index = if level == levels { last - 1 } else { 3 };
            let shift = shift(granule, level);
            let iova = if level == levels { index << shift } else { base | index << shift };
            let page = 1_u64 << shift & 0xffff_ffff_ffff;
            rig.set(chain[level as usize], index, page | BLOCK);
            if level <= highest_block {
                assert_eq!(rig.page(iova + 7), Ok((page, shift, ALL)), "{granule:?} {width} {level}");
            } else {
                assert_eq!(rig.reason(iova), missing(level), "no block here: as if invalid");
            }
        }
        // In the lowest level a block's encoding is reserved.
        rig.set(chain[1], high, page | BLOCK);
        assert_eq!(rig.reason(iova), missing(1));
        rig.set(chain[1], high, page | PAGE & !1);
        assert_eq!(rig.reason(iova), missing(1));
        assert_eq!(rig.go(1 << width, R), Err(FaultReason::BeyondWidth));
    }
}

#[test]
fn stage_2_roots_are_up_to_16_tables_in_a_row() {
    // Granule, bits, levels, frames of 4 KiB in the root.
    for (granule, width, levels, root) in [
        (Size4K, 48, 4, 1),
        (Size4K, 43, 3, 16),
        (Size4K, 40, 3, 2),
        (Size4K, 39, 3, 1),
        (Size4K, 34, 2, 16),
        (Size16K, 48, 3, 2 * 4),
        (Size16K, 40, 2, 16 * 4),
        (Size16K, 29, 1, 16 * 4),
        (Size64K, 46, 2, 16 * 16),
        (Size64K, 48, 3, 1),
        (Size64K, 33, 1, 16 * 16),
    ] {
        let rig = Rig::new(TableFormat::Arm(ArmTables::stage2(granule, width, levels)), root);
        let last = (1_u64 << (width - shift(granule, levels))) - 1;
        let tables = chain(&rig, last, frames(granule));
        let base = last << shift(granule, levels);
        rig.set(tables[1], if levels == 1 { last } else { 0 }, 0x7777_0000 | PAGE2);
        assert_eq!(rig.go(base + 5, RW), Ok(0x7777_0005), "{granule:?} {width}");
        assert_eq!(rig.page(base), Ok((0x7777_0000, granule.shift(), ALL)));
        assert_eq!(rig.walk(base).table_reads, levels);
        assert_eq!(rig.go(1 << width, R), Err(FaultReason::BeyondWidth));
        // The root is aligned to all of its tables.
        if root > 1 {
            rig.attach(rig.format, rig.root + 0x1000);
            assert_eq!(rig.go(base, R), Err(FaultReason::BadContext));
        }
    }
}

/// A root of few entries is aligned to 64 bytes, a larger one to its size.
#[test]
fn small_roots_are_aligned_to_64_bytes() {
    for (width, align) in [(31, 64), (33, 64), (34, 128), (39, 4096)] {
        let format = TableFormat::Arm(ArmTables::stage1(Size4K, width));
        assert!(format.is_root(PhysAddr::new(0x1_0000 + align)), "{width}");
        assert!(!format.is_root(PhysAddr::new(0x1_0000 + align / 2)), "{width}");
    }
}

#[test]
fn dimensions_that_do_not_exist() {
    let good = ArmTables::stage1(Size4K, 48);
    let two = ArmTables::stage2;
    for bad in [
        ArmTables { levels: 3, ..good },
        ArmTables { levels: 5, ..good },
        ArmTables { levels: 0, ..good },
        ArmTables { levels: u32::MAX, ..good },
        ArmTables { input_bits: 24, levels: 2, ..good },
        ArmTables { input_bits: 49, ..good },
        ArmTables { input_bits: u32::MAX, ..good },
        good.with_output_bits(52),
        good.with_output_bits(64),
        ArmTables { stage: ArmStage::One, ..two(Size4K, 40, 3) },
        two(Size4K, 44, 3),
        two(Size4K, 39, 4),
        two(Size4K, 25, 1),
        two(Size16K, 48, 4),
        two(Size64K, 47, 2),
        two(Size64K, 53, 3),
    ] {
        let rig = Rig::new(TableFormat::Arm(bad), 1);
        assert_eq!(rig.go(0, R), Err(FaultReason::BadContext), "{bad:?}");
        assert_eq!(rig.reason(0), Some(FaultReason::BadContext));
    }
}

#[test]
fn addresses_of_52_bits_and_those_that_are_too_wide() {
    let tables = ArmTables::stage1(Size64K, 52).with_output_bits(52);
    assert_eq!(tables.levels, 3);
    let rig = Rig::new(TableFormat::Arm(tables), 16);
    let chain = chain(&rig, 1023, 16);
    let base = 1023_u64 << 42;
    // PA[51:48] are in bits 15:12; 47:16 in their places.
    rig.set(chain[1], 1, 0x1234_5678_0000 | 0xa000 | PAGE);
    assert_eq!(rig.page(base | 1 << 16), Ok((0xa_1234_5678_0000, 16, ALL)));
    rig.set(chain[2], 1, 0x2000_0000 | 0xf000 | BLOCK);
    assert_eq!(rig.page(base | 1 << 29), Ok((0xf_0000_2000_0000, 29, ALL)));
    // With 52 bits there are blocks of 4 TiB.
    rig.set(chain[3], 1, 0x400_0000_0000 | 0x1000 | BLOCK);
    assert_eq!(rig.page(1 << 42), Ok((0x1_0400_0000_0000, 42, ALL)));
    rig.set(chain[2], 2, 0x1000_0000 | 0x1000 | TABLE);
    let far = FaultReason::BadTable(PhysAddr::new(0x1_0000_1000_0000));
    assert_eq!(rig.reason(base | 2 << 29), Some(far));

    // The same tables with 48-bit addresses: blocks of 4 TiB are invalid, and wide addresses fault.
    let narrow = Rig { format: TableFormat::Arm(tables.with_output_bits(48)), ..rig };
    assert_eq!(narrow.reason(1 << 42), missing(3));
    for iova in [1 << 16, 1 << 29, 2 << 29] {
        assert_eq!(narrow.reason(base | iova), Some(FaultReason::AddressSize));
    }
    let narrow = Rig::new(TableFormat::Arm(ArmTables::stage1(Size4K, 39).with_output_bits(32)), 1);
    narrow.set(narrow.root, 0, 0x1_0000_0000 | BLOCK & !(1 << 10));
    assert_eq!(narrow.reason(0), Some(FaultReason::AddressSize), "before the access flag");
    narrow.set(narrow.root, 0, 0xc000_0000 | BLOCK);
    assert_eq!(narrow.page(0), Ok((0xc000_0000, 30, ALL)));
    // With 4 KiB bits 51:48 are RES0, and ignored.
    narrow.set(narrow.root, 0, 0xf_0000_c000_0000 | BLOCK);
    assert_eq!(narrow.page(0), Ok((0xc000_0000, 30, ALL)));
}

#[test]
fn stage_1_rights() {
    let rig = Rig::new(TableFormat::Arm(ArmTables::stage1(Size4K, 39)), 1);
    let tables = chain(&rig, 0, 1);
    // AttrIndx 5 (bits 4:2), SH 3 (bits 9:8).
    rig.set(tables[1], 0, 0x9000 | PAGE | 5 << 2 | 3 << 8);
    assert_eq!(rig.leaf(0).unwrap().attributes, 3 << 3 | 5);
    // AF is bit 10.
    rig.set(tables[1], 0, 0x9000 | PAGE & !(1 << 10));
    assert_eq!(rig.reason(0), Some(FaultReason::AccessFlag));
    for (change, right) in [(1_u64 << 6, Rights::USER), (1 << 7, Rights::WRITE), (1 << 54, Rights::EXECUTE)] {
        rig.set(tables[1], 0, 0x9000 | PAGE ^ change);
        assert_eq!(rig.page(0), Ok((0x9000, 12, without(right))));
    }
    rig.set(tables[1], 0, 0x9003 | 1 << 10);
    assert_eq!(rig.go(0, R), Err(FaultReason::Permission), "a device has no privilege");
    rig.set(tables[1], 0, 0x9000 | PAGE | 1 << 7);
    assert_eq!((rig.go(0, R), rig.go(0, W)), (Ok(0x9000), Err(FaultReason::Permission)));
    // UXNTable, APTable[0], APTable[1].
    rig.set(tables[1], 0, 0x9000 | PAGE);
    for (bit, right) in [(60, Rights::EXECUTE), (61, Rights::USER), (62, Rights::WRITE)] {
        rig.set(tables[2], 0, tables[1] | TABLE | 1 << bit);
        assert_eq!(rig.page(0), Ok((0x9000, 12, without(right))));
    }
    rig.set(tables[2], 0, 0x5000 | TABLE);
    assert_eq!(rig.reason(0), Some(FaultReason::BadTable(PhysAddr::new(0x5000))));
}

#[test]
fn stage_2_rights() {
    let rig = Rig::new(TableFormat::Arm(ArmTables::stage2(Size4K, 40, 3)), 2);
    let tables = chain(&rig, 0, 1);
    // S2AP 0 to 3.
    for (s2ap, rights) in
        [(0, None), (1, Some(without(Rights::WRITE))), (2, Some(without(Rights::READ))), (3, Some(ALL))]
    {
        rig.set(tables[1], 0, 0x9403 | s2ap << 6);
        let expected = rights.map(|rights| (0x9000, 12, rights)).ok_or(FaultReason::Permission);
        assert_eq!(rig.page(0), expected);
    }
    // XN; MemAttr 15 (bits 5:2), SH 2 (bits 9:8).
    rig.set(tables[1], 0, 0x9000 | PAGE2 | 1 << 54 | 15 << 2 | 2 << 8);
    assert_eq!(rig.page(0), Ok((0x9000, 12, without(Rights::EXECUTE))));
    assert_eq!(rig.leaf(0).unwrap().attributes, 2 << 4 | 15);
    rig.set(tables[1], 0, 0x9000 | PAGE2 & !(1 << 10));
    assert_eq!(rig.reason(0), Some(FaultReason::AccessFlag));
    // Stage 1's table attributes that remove rights mean nothing here.
    rig.set(tables[1], 0, 0x9000 | PAGE2);
    rig.set(tables[2], 0, tables[1] | TABLE | 0xf << 59);
    assert_eq!(rig.page(0), Ok((0x9000, 12, ALL)));
}
