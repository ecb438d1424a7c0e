//! VT-d second stage. `tests/translation.rs` has the rest; here the constants are literal.

use super::*;

#[test]
fn a_page_of_each_size() {
    for levels in 3..=5 {
        let rig = Rig::new(TableFormat::VtdSecondStage { levels }, 1);
        let mut table = rig.root;
        let iova = 0x12_3456_7000_u64;
        // R (bit 0) and W (bit 1) on the way: 3.
        for level in (2..=levels).rev() {
            let below = rig.table(1);
            rig.set(table, iova >> (3 + 9 * level) & 0x1ff, below | 3);
            table = below;
        }
        // R alone, SNP (bit 11): 0x801.
        rig.set(table, iova >> 12 & 0x1ff, 0x7_7777_7801);
        assert_eq!(rig.page(iova), Ok((0x7_7777_7000, 12, without(Rights::WRITE))));
        assert_eq!(rig.leaf(iova).unwrap().attributes, 1);
        assert_eq!(rig.walk(iova).table_reads, levels);
        assert_eq!(rig.go(iova + 0x123, R), Ok(0x7_7777_7123));
        assert_eq!(rig.go(iova, W), Err(FaultReason::Permission));
    }
    let rig = Rig::new(TableFormat::VtdSecondStage { levels: 3 }, 1);
    let below = rig.table(1);
    rig.set(rig.root, 0, below | 3);
    // R, W and PS (bit 7): 0x83.
    rig.set(rig.root, 1, 0x8_4000_0083);
    rig.set(below, 1, 0x8_4020_0083);
    assert_eq!(rig.page(1 << 30), Ok((0x8_4000_0000, 30, ALL)));
    assert_eq!(rig.page(1 << 21), Ok((0x8_4020_0000, 21, ALL)));
    rig.set(rig.root, 1, 0x8_4020_0083);
    assert_eq!(rig.reason(1 << 30), Some(FaultReason::ReservedBit));
}
