//! The contiguous hint, bit 52.

use portcullis_model::ArmTables;
use portcullis_model::Granule::{Size4K, Size16K, Size64K};

use super::arm::{BLOCK, PAGE, PAGE2, chain};
use super::*;

const HINT: u64 = 1 << 52;
const INCONSISTENT: Option<FaultReason> = Some(FaultReason::InconsistentRun);

#[test]
fn a_run_is_as_many_entries_as_its_level_has() {
    // Granule and bits, the level, the size of an entry, the entries of a run.
    for (tables, level, shift, count) in [
        (ArmTables::stage1(Size4K, 48), 1, 12, 16_u64),
        (ArmTables::stage1(Size4K, 48), 2, 21, 16),
        (ArmTables::stage1(Size4K, 48), 3, 30, 16),
        (ArmTables::stage2(Size4K, 40, 3), 1, 12, 16),
        (ArmTables::stage1(Size16K, 47), 1, 14, 128),
        (ArmTables::stage1(Size16K, 47), 2, 25, 32),
        (ArmTables::stage1(Size64K, 48), 1, 16, 32),
        (ArmTables::stage1(Size64K, 48), 2, 29, 32),
    ] {
        let stage2 = tables == ArmTables::stage2(Size4K, 40, 3);
        let frames = 1 << (tables.granule.shift() - 12);
        let rig = Rig::new(TableFormat::Arm(tables), frames * if stage2 { 2 } else { 1 });
        let table = chain(&rig, 0, frames)[level as usize];
        let bits = if stage2 {
            PAGE2
        } else if level == 1 {
            PAGE
        } else {
            BLOCK
        };
        // The second run, at the second multiple of its size. Tables are in the first entries.
        let entry = |place: u64| (place + count) << shift | bits | HINT;
        let at = |place: u64| place << shift;
        (count..2 * count).for_each(|place| rig.set(table, place, entry(place)));
        for place in [count, count + 3, 2 * count - 1] {
            let found = rig.page(at(place));
            assert_eq!(found, Ok(((place + count) << shift, shift, ALL)), "{tables:?} {level}");
        }
        assert_eq!(rig.walk(at(count)).table_reads, tables.levels - level + 1);

        // Another attribute, no hint, no page, another place, another right: whichever entry is read.
        let last = 2 * count - 1;
        let right = entry(last);
        for wrong in
            [right ^ 1 << 2, right ^ HINT, right & !1, 0, right ^ 1 << 47, right ^ 1 << 7, right ^ 1 << 10]
        {
            rig.set(table, last, wrong);
            assert_eq!(rig.reason(at(count)), INCONSISTENT);
            assert_eq!(rig.go(at(count), R), Err(FaultReason::InconsistentRun));
            assert_eq!(rig.probe(at(count)), Some((2 * count) << shift), "its own entry leads there");
        }
        // Software's bits may differ.
        rig.set(table, last, right ^ 0xf << 55);
        assert_eq!(rig.page(at(count)).unwrap().1, shift);

        // Consecutive, but not aligned to the run's size.
        (count..2 * count).for_each(|place| rig.set(table, place, entry(place + 1)));
        assert_eq!(rig.reason(at(count)), INCONSISTENT);
        // Aligned, but all the same page.
        (count..2 * count).for_each(|place| rig.set(table, place, entry(count)));
        assert_eq!(rig.reason(at(count)), INCONSISTENT);
        // Without the hint the neighbours do not matter.
        rig.set(table, count, entry(count + 1) & !HINT);
        assert_eq!(rig.page(at(count)).unwrap().0, (2 * count + 1) << shift);
    }
}

#[test]
fn the_high_address_bits_of_a_run_in_64_kib() {
    let tables = ArmTables::stage1(Size64K, 48).with_output_bits(52);
    let rig = Rig::new(TableFormat::Arm(tables), 16);
    let table = chain(&rig, 0, 16)[1];
    (0..32).for_each(|place| rig.set(table, place, place << 16 | 0x3000 | PAGE | HINT));
    assert_eq!(rig.page(0), Ok((0x3_0000_0000_0000, 16, ALL)));
    rig.set(table, 31, 31 << 16 | 0x2000 | PAGE | HINT);
    assert_eq!(rig.reason(0), INCONSISTENT);
}

#[test]
fn a_run_that_the_table_has_no_room_for() {
    // A root of two entries has no run of 16, whatever follows it in memory.
    let rig = Rig::new(TableFormat::Arm(ArmTables::stage1(Size4K, 31)), 1);
    (0..16).for_each(|place| rig.set(rig.root, place, place << 30 | BLOCK | HINT));
    assert_eq!(rig.reason(0), INCONSISTENT);
}
