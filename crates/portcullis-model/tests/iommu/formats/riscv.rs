//! RISC-V. V is bit 0, R 1, W 2, X 3, U 4, G 5, A 6, D 7, the page number 53:10.

use portcullis_model::RiscvMode::{self, Sv39, Sv39x4, Sv48, Sv48x4, Sv57};

use super::*;

/// V, R, W, X, U, A and D.
const PAGE: u64 = 0xdf;

/// The page number of an address, in its place: bits 55:12 go to 53:10.
fn ppn(address: u64) -> u64 {
    address >> 12 << 10
}

/// Tables from the root down to level 1, all by entry `index` of the root and 0 below; by level.
fn chain(rig: &Rig, index: u64) -> Vec<u64> {
    let mut tables = vec![rig.root];
    for level in 1..rig.format.levels() {
        let below = rig.table(1);
        rig.set(*tables.last().unwrap(), if level == 1 { index } else { 0 }, ppn(below) | 1);
        tables.push(below);
    }
    tables.push(0);
    tables.reverse();
    tables
}

fn rig(mode: RiscvMode) -> Rig {
    Rig::new(TableFormat::RiscV(mode), if matches!(mode, Sv39x4 | Sv48x4) { 4 } else { 1 })
}

#[test]
fn every_size_in_every_mode() {
    // The mode, its levels, and bits of address (of the positive half).
    for (mode, levels, width) in
        [(Sv39, 3, 38), (Sv48, 4, 47), (Sv57, 5, 56), (Sv39x4, 3, 41), (Sv48x4, 4, 50)]
    {
        let rig = rig(mode);
        assert_eq!(rig.format.levels(), levels);
        // The root's last index: with 16 KiB of root it lies in the fourth frame.
        let last = (1_u64 << (width - (3 + 9 * levels))) - 1;
        let tables = chain(&rig, last);
        let base = last << (3 + 9 * levels);
        for level in 1..levels {
            let shift = 3 + 9 * level;
            let page = 3_u64 << shift & 0xff_ffff_ffff_f000;
            rig.set(tables[level as usize], 5, ppn(page) | PAGE);
            let iova = base | 5 << shift;
            assert_eq!(rig.page(iova + 9), Ok((page, shift, ALL)), "{mode:?}");
            assert_eq!(rig.walk(iova).table_reads, levels - level + 1);
            assert_eq!(rig.go(iova + 9, RW), Ok(page + 9));
            // Every bit of the page number that must be 0 in a superpage.
            for bit in 12..shift {
                rig.set(tables[level as usize], 6, ppn(page | 1 << bit) | PAGE);
                assert_eq!(rig.reason(base | 6 << shift), Some(FaultReason::ReservedBit));
            }
        }
        // A page of the root's size, and all 44 bits of a page number.
        let shift = 3 + 9 * levels;
        rig.set(rig.root, 0, ppn(1 << shift) | PAGE);
        assert_eq!(rig.page(1), Ok((1 << shift, shift, ALL)));
        rig.set(tables[1], 7, 0x3f_ffff_ffff_fc00 | PAGE);
        assert_eq!(rig.page(base | 7 << 12), Ok((0xff_ffff_ffff_f000, 12, ALL)));
        for beyond in [1 << width, u64::MAX] {
            assert_eq!(rig.go(beyond, R), Err(FaultReason::BeyondWidth));
        }
    }
}

#[test]
fn reserved_encodings_fault() {
    let rig = rig(Sv39);
    let tables = chain(&rig, 0);
    let (two, one) = (tables[2], tables[1]);
    let reserved = Some(FaultReason::ReservedBit);
    rig.set(one, 0, ppn(0x9000) | PAGE);
    assert_eq!(rig.page(0), Ok((0x9000, 12, ALL)));
    rig.set(one, 0, ppn(0x9000) | PAGE & !1);
    assert_eq!(rig.reason(0), missing(1));
    // W, and W with X, without R.
    for bits in [0xd5, 0xdd] {
        rig.set(one, 0, ppn(0x9000) | bits);
        assert_eq!(rig.reason(0), reserved);
    }
    // 60:54 and N in leaves, and in pointers PBMT, too.
    for bit in 54..64 {
        rig.set(one, 0, ppn(0x9000) | PAGE | 1 << bit);
        assert_eq!(rig.reason(0), reserved.filter(|_| !(61..63).contains(&bit)));
        rig.set(two, 0, ppn(one) | 1 | 1 << bit);
        rig.set(one, 0, ppn(0x9000) | PAGE);
        assert_eq!(rig.reason(0), reserved);
        rig.set(two, 0, ppn(one) | 1);
    }
    // PBMT has no fourth type.
    rig.set(one, 0, ppn(0x9000) | PAGE | 3 << 61);
    assert_eq!(rig.reason(0), reserved);
    rig.set(one, 0, ppn(0x9000) | PAGE);
    // A pointer with U, A or D; the walker ignores G and software's bits.
    for bit in [4, 6, 7] {
        rig.set(two, 0, ppn(one) | 1 | 1 << bit);
        assert_eq!(rig.reason(0), reserved);
    }
    rig.set(two, 0, ppn(one) | 1 | 1 << 5 | 3 << 8);
    assert_eq!(rig.page(0), Ok((0x9000, 12, ALL)));
    // A pointer without a level below.
    rig.set(one, 0, ppn(0x9000) | 1);
    assert_eq!(rig.reason(0), reserved);
    rig.set(two, 0, ppn(0x5000) | 1);
    assert_eq!(rig.reason(0), Some(FaultReason::BadTable(PhysAddr::new(0x5000))));
    rig.set(two, 0, 0);
    assert_eq!(rig.reason(0), missing(2));
}

#[test]
fn accessed_dirty_and_rights() {
    for mode in [Sv39, Sv48x4] {
        let rig = rig(mode);
        let one = chain(&rig, 0)[1];
        let set = |bits: u64| {
            rig.set(one, 0, ppn(0x9000) | bits);
            rig.invalidate(0, 0x1000, true);
        };
        // V, R, W, U, D; A is clear.
        set(0x97);
        assert_eq!(
            (rig.go(0, R), rig.go(0, W)),
            (Err(FaultReason::AccessFlag), Err(FaultReason::AccessFlag))
        );
        // V, R, W, U, A; D is clear: reads only.
        set(0x57);
        assert_eq!(rig.go(0, W), Err(FaultReason::Permission));
        assert_eq!(rig.go(0, R), Ok(0x9000));
        assert_eq!(rig.go(0, W), Err(FaultReason::Permission));
        // V, R, U, A, D.
        set(0xd3);
        assert_eq!(rig.page(0), Ok((0x9000, 12, Rights::READ | Rights::USER)));
        assert_eq!((rig.go(0, R), rig.go(0, W)), (Ok(0x9000), Err(FaultReason::Permission)));
        // V, X, U, A, D: no data access.
        set(0xd9);
        assert_eq!(rig.go(0, R), Err(FaultReason::Permission));
        // Without U: privileged in the first stage, refused in the G-stage.
        set(PAGE & !0x10);
        assert_eq!(rig.go(0, R), Err(FaultReason::Permission));
        match mode {
            Sv39 => assert_eq!(rig.page(0), Ok((0x9000, 12, without(Rights::USER)))),
            _ => assert_eq!(rig.reason(0), Some(FaultReason::Permission)),
        }
    }
}

#[test]
fn a_guest_root_is_aligned_to_its_16_kib() {
    for mode in [Sv39x4, Sv48x4] {
        let rig = rig(mode);
        rig.set(rig.root, 0, PAGE);
        assert_eq!(rig.go(5, R), Ok(5));
        rig.attach(rig.format, rig.root + 0x1000);
        assert_eq!(rig.go(5, R), Err(FaultReason::BadContext));
        rig.attach(TableFormat::RiscV(Sv39), rig.root + 0x1000);
        rig.invalidate(0, 1 << 40, false);
        assert_eq!(rig.go(5, R), Err(FaultReason::NotPresent { level: 3 }));
    }
}
