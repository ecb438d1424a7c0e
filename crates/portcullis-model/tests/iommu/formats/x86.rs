//! x86-64 first stage. P is bit 0, R/W 1, U/S 2, PWT 3, PCD 4, PS 7, XD 63.

use super::*;

/// P, R/W, U/S.
const TABLE: u64 = 0x7;
/// P, R/W, U/S and PS.
const LARGE: u64 = 0x87;

#[test]
fn every_size_at_every_depth() {
    for levels in 4..=5 {
        let rig = Rig::new(TableFormat::X86FirstStage { levels }, 1);
        // The last gibibytes of the canonical lower half.
        let top = if levels == 4 { 1_u64 << 47 } else { 1 << 56 };
        let mut table = rig.root;
        for level in (4..=levels).rev() {
            let below = rig.table(1);
            // Only half of the root is used.
            let index = if level == levels { 0xff } else { 0x1ff };
            rig.set(table, index, below | TABLE);
            table = below;
        }
        // `table` is the one of 1 GiB entries.
        rig.set(table, 511, 0x12_4000_0000 | LARGE);
        let (middle, low) = (rig.table(1), rig.table(1));
        rig.set(table, 510, middle | TABLE);
        rig.set(middle, 511, 0x20_0020_0000 | LARGE);
        rig.set(middle, 510, low | TABLE);
        rig.set(low, 511, 0xf_ffff_ffff_f000 & !0xfff | TABLE);
        assert_eq!(rig.page(top - 5), Ok((0x12_4000_0000, 30, ALL)));
        assert_eq!(rig.page(top - (1 << 30) - 5), Ok((0x20_0020_0000, 21, ALL)));
        let small = top - (1 << 30) - (1 << 21) - 0x1000;
        assert_eq!(rig.page(small), Ok((0xf_ffff_ffff_f000, 12, ALL)));
        assert_eq!(rig.walk(small).table_reads, levels);
        assert_eq!(rig.go(top - 5, RW), Ok(0x12_7fff_fffb));
        // The upper half and what is not canonical.
        for beyond in [top, top * 2, u64::MAX, u64::MAX - (top - 1)] {
            assert_eq!(rig.go(beyond, R), Err(FaultReason::BeyondWidth));
        }
    }
    for levels in [0, 1, 3, 6, u32::MAX] {
        let rig = Rig::new(TableFormat::X86FirstStage { levels }, 1);
        assert_eq!(rig.go(0, R), Err(FaultReason::BadContext));
        assert_eq!(rig.reason(0), Some(FaultReason::BadContext));
    }
}

#[test]
fn rights_combine_and_bits_are_checked() {
    let rig = Rig::new(TableFormat::X86FirstStage { levels: 4 }, 1);
    let (three, two, one) = (rig.table(1), rig.table(1), rig.table(1));
    rig.set(rig.root, 0, three | TABLE);
    rig.set(three, 0, two | TABLE);
    rig.set(two, 0, one | TABLE);
    // P, U/S: read-only. P, R/W: privileged. PWT and PCD, and PAT, which is bit 7 here.
    rig.set(one, 0, 0x9005);
    rig.set(one, 1, 0x9003);
    rig.set(one, 2, 0x809f);
    rig.set(one, 3, 1 << 63 | 0x9007);
    assert_eq!(rig.page(0), Ok((0x9000, 12, without(Rights::WRITE))));
    assert_eq!(rig.go(0, W), Err(FaultReason::Permission));
    assert_eq!(rig.go(0, R), Ok(0x9000));
    assert_eq!(rig.page(0x1000), Ok((0x9000, 12, without(Rights::USER))));
    assert_eq!(rig.go(0x1000, R), Err(FaultReason::Permission), "a device has no privilege");
    assert_eq!(rig.probe(0x1000), None);
    assert_eq!(rig.leaf(0x2000).unwrap().attributes, 7);
    assert_eq!(rig.leaf(0).unwrap().attributes, 0);
    assert_eq!(rig.page(0x3000), Ok((0x9000, 12, without(Rights::EXECUTE))));
    assert_eq!(rig.reason(0x4000), missing(1));

    // A right that a table lacks is gone: no write above, no user, no execution.
    for (entry, right) in
        [(two | 5, Rights::WRITE), (two | 3, Rights::USER), (two | 7 | 1 << 63, Rights::EXECUTE)]
    {
        rig.set(three, 0, entry);
        assert_eq!(rig.page(0x2000), Ok((0x8000, 12, without(right))));
    }
    rig.set(three, 0, two | 6);
    assert_eq!(rig.reason(0x2000), missing(3), "without P the rest means nothing");

    // Large pages: bits 20:13 and 29:13 are reserved, bit 12 is PAT.
    rig.set(three, 0, two | TABLE);
    rig.set(two, 1, 0x4020_1000 | LARGE);
    assert_eq!(rig.page(0x20_0000), Ok((0x4020_0000, 21, ALL)));
    assert_eq!(rig.leaf(0x20_0000).unwrap().attributes, 4);
    for (table, at, bits) in [(two, 0x20_0000, 13..21), (three, 0x4000_0000, 13..30)] {
        for bit in bits {
            rig.set(table, 1, 1 << bit | LARGE);
            assert_eq!(rig.reason(at), Some(FaultReason::ReservedBit));
        }
    }
    rig.set(rig.root, 1, LARGE);
    assert_eq!(rig.reason(1 << 39), Some(FaultReason::ReservedBit), "no page of 512 GiB");
    rig.set(two, 2, 0x5000 | TABLE);
    assert_eq!(rig.reason(0x40_0000), Some(FaultReason::BadTable(PhysAddr::new(0x5000))));
}
