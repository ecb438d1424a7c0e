//! AMD-Vi version 1. PR is bit 0, Next Level 11:9, U 59, FC 60, IR 61, IW 62.

use super::*;

const IR: u64 = 1 << 61;
const IW: u64 = 1 << 62;
const BOTH: u64 = 1 | IR | IW;

fn next(level: u64) -> u64 {
    level << 9
}

/// A chain of tables from the root at `level` down to level 1, all by entry 0.
fn chain(rig: &Rig, levels: u32) -> Vec<u64> {
    let mut tables = vec![rig.root];
    for level in (1..u64::from(levels)).rev() {
        let below = rig.table(1);
        rig.set(*tables.last().unwrap(), 0, below | next(level) | BOTH);
        tables.push(below);
    }
    // By level: index 1 is the lowest.
    tables.push(0);
    tables.reverse();
    tables
}

#[test]
fn default_sizes_at_every_level() {
    for levels in 1..=6 {
        let rig = Rig::new(TableFormat::AmdV1 { levels }, 1);
        let tables = chain(&rig, levels);
        for level in 1..=levels.min(5) {
            let shift = 3 + 9 * level;
            let page = 3_u64 << shift & 0xf_ffff_ffff_f000;
            rig.set(tables[level as usize], 7, page | BOTH);
            let iova = 7_u64 << shift;
            assert_eq!(rig.page(iova + 5), Ok((page, shift, ALL)));
            assert_eq!(rig.walk(iova).table_reads, levels - level + 1);
            if level > 1 {
                rig.set(tables[level as usize], 7, page | 0x1000 | BOTH);
                assert_eq!(rig.reason(iova), Some(FaultReason::ReservedBit), "not aligned");
            }
        }
        if levels < 6 {
            assert_eq!(rig.go(1 << (12 + 9 * levels), R), Err(FaultReason::BeyondWidth));
        }
    }
    // Six levels take all 64 bits: 7 are left for the root, which has no page of its own.
    let rig = Rig::new(TableFormat::AmdV1 { levels: 6 }, 1);
    rig.set(rig.root, 127, BOTH);
    assert_eq!(rig.go(u64::MAX, R), Err(FaultReason::ReservedBit));
    for levels in [0, 7, u32::MAX] {
        let rig = Rig::new(TableFormat::AmdV1 { levels }, 1);
        assert_eq!(rig.go(0, R), Err(FaultReason::BadContext));
    }
}

#[test]
fn sizes_written_in_the_address() {
    for shift in 13..=52_u32 {
        let level = (shift - 3) / 9;
        let base = 3 + 9 * level;
        if shift == base {
            continue;
        }
        let rig = Rig::new(TableFormat::AmdV1 { levels: level }, 1);
        // The highest offset bit is 0 and those below are 1: 16 KiB is 01 from bit 12 on, 32 KiB 011.
        let size = (1_u64 << (shift - 1)) - 0x1000;
        let page = 5_u64 << shift & 0xf_ffff_ffff_f000;
        let entry = page | size | next(7) | BOTH;
        // The number of entries, which is their alignment.
        let count = 1_u64 << (shift - base);
        let places = count..2 * count;
        places.clone().for_each(|place| rig.set(rig.root, place, entry));
        for place in [count, count + count / 2, 2 * count - 1] {
            assert_eq!(rig.page(place << base | 0x123), Ok((page, shift, ALL)), "2^{shift}");
        }
        assert_eq!(rig.go((count << base) + (1 << (shift - 1)), R), Ok(page + (1 << (shift - 1))));
        assert_eq!(rig.walk(count << base).table_reads, 1);
        // One that differs: not present, in its rights, its place, its attributes. Bits 8:1 and 63 may.
        let last = 2 * count - 1;
        for wrong in [0, entry & !IW, entry ^ 1 << 51, entry ^ 1 << 60] {
            rig.set(rig.root, last, wrong);
            assert_eq!(rig.reason(count << base), Some(FaultReason::InconsistentRun));
        }
        rig.set(rig.root, last, entry | 0x1fe | 1 << 63);
        assert_eq!(rig.page(count << base), Ok((page, shift, ALL)));
    }
}

#[test]
fn sizes_of_other_levels_are_reserved() {
    let sized = |shift: u32| ((1_u64 << (shift - 1)) - 0x1000) | next(7) | BOTH;
    for (levels, wrong) in [(1, [21, 22, 52]), (2, [13, 21, 30]), (3, [20, 30, 39]), (5, [47, 48, 21])] {
        let rig = Rig::new(TableFormat::AmdV1 { levels }, 1);
        for shift in wrong {
            rig.set(rig.root, 0, sized(shift));
            assert_eq!(rig.reason(0), Some(FaultReason::ReservedBit), "{levels} 2^{shift}");
        }
        // No bit of 51:12 is 0.
        rig.set(rig.root, 0, 0xf_ffff_ffff_f000 | next(7) | BOTH);
        assert_eq!(rig.reason(0), Some(FaultReason::ReservedBit));
    }
}

#[test]
fn levels_are_skipped() {
    let rig = Rig::new(TableFormat::AmdV1 { levels: 5 }, 1);
    let (three, one) = (rig.table(1), rig.table(1));
    rig.set(rig.root, 2, three | next(3) | BOTH);
    rig.set(three, 4, one | next(1) | BOTH);
    rig.set(one, 6, 0x9000 | BOTH);
    // Index 2 at level 5 (bit 48), 0 at level 4, 4 at level 3 (bit 30), 0 at level 2, 6 at level 1.
    let iova = 2 << 48 | 4 << 30 | 6 << 12;
    assert_eq!(rig.page(iova), Ok((0x9000, 12, ALL)));
    let walk = rig.walk(iova);
    assert_eq!((walk.table_reads, walk.tables.iter().map(|table| table.level).collect()), (3, vec![3, 1]));
    assert_eq!(rig.go(iova + 1, RW), Ok(0x9001));
    // With cached tables as from the root, a skipped index must be 0.
    for skipped in [1 << 39, 1 << 47, 1 << 21, 1 << 29] {
        assert_eq!(rig.reason(iova | skipped), Some(FaultReason::BeyondWidth));
        assert_eq!(rig.go(iova | skipped, R), Err(FaultReason::BeyondWidth));
    }
    // Up, or to the same level, is nowhere.
    for level in 3..=6 {
        rig.set(three, 4, one | next(level) | BOTH);
        assert_eq!(rig.reason(iova), Some(FaultReason::ReservedBit));
    }
}

#[test]
fn rights_combine_and_bits_are_checked() {
    let rig = Rig::new(TableFormat::AmdV1 { levels: 3 }, 1);
    let tables = chain(&rig, 3);
    let (two, one) = (tables[2], tables[1]);
    rig.set(one, 0, 0x9000 | BOTH);
    assert_eq!(rig.page(0), Ok((0x9000, 12, ALL)));
    for (entry, left) in [(1 | IR, without(Rights::WRITE)), (1 | IW, without(Rights::READ))] {
        rig.set(one, 0, 0x9000 | entry);
        assert_eq!(rig.page(0), Ok((0x9000, 12, left)));
        rig.set(one, 0, 0x9000 | BOTH);
        rig.set(two, 0, one | next(1) | entry);
        assert_eq!(rig.page(0), Ok((0x9000, 12, left)));
        rig.set(two, 0, one | next(1) | BOTH);
    }
    rig.set(two, 0, one | next(1) | 1 | IR);
    rig.set(one, 0, 0x9000 | 1 | IW);
    assert_eq!(rig.reason(0), Some(FaultReason::Permission), "read above, write below");
    rig.set(two, 0, one | next(1) | 1);
    assert_eq!(rig.reason(0), Some(FaultReason::Permission));
    rig.set(two, 0, one | next(1) | IR | IW);
    assert_eq!(rig.reason(0), missing(2));
    rig.set(two, 0, one | next(1) | BOTH);
    rig.set(one, 0, 0x9000 | IR | IW);
    assert_eq!(rig.reason(0), missing(1));

    rig.set(one, 0, 0x9000 | 3 << 59 | BOTH);
    assert_eq!(rig.leaf(0).unwrap().attributes, 3, "FC and U");
    for bit in 52..=58 {
        rig.set(one, 0, 0x9000 | 1 << bit | BOTH);
        assert_eq!(rig.reason(0), Some(FaultReason::ReservedBit));
    }
    rig.set(one, 0, 0x9000 | BOTH | 0x1fe | 1 << 63);
    assert_eq!(rig.page(0), Ok((0x9000, 12, ALL)), "ignored bits");
    for bit in 52..=60 {
        rig.set(two, 0, one | next(1) | 1 << bit | BOTH);
        assert_eq!(rig.reason(0), Some(FaultReason::ReservedBit));
    }
}
