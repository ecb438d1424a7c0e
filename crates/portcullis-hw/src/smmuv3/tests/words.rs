//! The exact words of structures and registers, by the manual (IHI 0070, sections 5.2 "Stream Table Entry", 5.4 "Context Descriptor" and
//! 6.3.9 "SMMU_CR0").

use portcullis::pgtable::ARM_MAIR;

use super::*;

const CR0_ATSCHK: u32 = 1 << 4;

fn entry(unit: &Fake, stream: u32) -> [u64; 8] {
    let memory = &unit.host().unit().memory;
    let (base, shape) =
        change(unit, |state| (state.base(reg::STRTAB_BASE), state.word(reg::STRTAB_BASE_CFG)));
    let split = shape >> 6 & 0x1f;
    let first = memory.word(base + u64::from(stream >> split) * 8).load(Ordering::Relaxed);
    words(unit, (first & !0x1f) + u64::from(stream & ((1 << split) - 1)) * 64)
}

fn words(unit: &Fake, at: u64) -> [u64; 8] {
    let memory = &unit.host().unit().memory;
    core::array::from_fn(|index| memory.word(at + index as u64 * 8).load(Ordering::Relaxed))
}

#[test]
fn entries_and_context_descriptors_are_as_the_manual_has_them() {
    for (idr1, shareable) in [(IDR1, 1 << 44), (IDR1 & !idr1::ATTR_TYPES_OVR, 0)] {
        let unit = on([IDR0, idr1, IDR3, IDR5]);
        let mut contexts = Vec::new();
        for (stream, asid) in [(0x128, 7_u16), (0x129, 0xfffe), (0x300, 8)] {
            attach(&unit, stream, table(Stage::One, asid, 0x12_3456_7000)).unwrap();
            let [first, rest @ ..] = entry(&unit, stream);
            assert_eq!(first & !0x000f_ffff_ffff_ffc0, 0xb, "valid, and the first stage alone");
            // Context descriptors are write-back cacheable, inner shareable.
            assert_eq!(rest, [3 << 6 | 1 << 4 | 1 << 2 | shareable, 0, 0, 0, 0, 0, 0]);
            // T0SZ of 40 bits; write-back, inner shareable; no second table; valid; 40 address bits; AArch64; faults are recorded and
            // abort; ASET.
            let flags = 1 << 30 | 1 << 31 | 1 << 41 | 1 << 45 | 1 << 46 | 1 << 47;
            let how = 24 | 1 << 8 | 1 << 10 | 3 << 12 | 2 << 32 | flags;
            let context = first & 0x000f_ffff_ffff_ffc0;
            let wanted = [how | u64::from(asid) << 48, 0x12_3456_7000, 0, ARM_MAIR, 0, 0, 0, 0];
            assert_eq!(words(&unit, context), wanted, "{stream:#x}");
            contexts.push(context);
        }
        contexts.dedup();
        assert_eq!(contexts.len(), 3);
        attach(&unit, 0x12a, table(Stage::Two, 0xfffe, 0x12_3456_6000)).unwrap();
        // T0SZ of 40 bits, start level 1; write-back, inner shareable; 40 address bits; AArch64; faults are recorded.
        let how = 24 << 32 | 1 << 38 | 1 << 40 | 1 << 42 | 3 << 44 | 2 << 48 | 1 << 51 | 1 << 58;
        assert_eq!(entry(&unit, 0x12a), [0xd, shareable, how | 0xfffe, 0x12_3456_6000, 0, 0, 0, 0]);
        attach(&unit, 0x12b, Attachment::PassThrough).unwrap();
        assert_eq!(entry(&unit, 0x12b), [9, shareable, 0, 0, 0, 0, 0, 0]);
        // Nothing remains of the stream's earlier stage.
        unit.detach(DeviceId(0x12a)).unwrap();
        attach(&unit, 0x12a, Attachment::PassThrough).unwrap();
        assert_eq!(entry(&unit, 0x12a), [9, shareable, 0, 0, 0, 0, 0, 0]);
    }
}

/// A unit whose CR0ACK has only these bits of CR0.
fn on_with(idr0: u32, acknowledged: u32) -> Result<u32, UnitError> {
    let unit = started([idr0, IDR1, IDR3, IDR5], |state| state.acknowledged = acknowledged)?;
    unit.enable().map(|()| change(&unit, |state| state.word(reg::CR0)))
}

#[test]
fn what_devices_translate_themselves_is_checked_where_the_unit_can() {
    let can = IDR0 | idr0::ATS;
    assert_eq!(on_with(can, u32::MAX).unwrap() & CR0_ATSCHK, CR0_ATSCHK);
    assert!(matches!(on_with(can, !CR0_ATSCHK), Err(UnitError::TimedOut { .. })), "it does not check yet");
    // A unit without ATS has no such bit, whatever it reads there.
    assert_eq!(on_with(IDR0, !CR0_ATSCHK).unwrap() & CR0_ATSCHK, 0);
}

/// A unit that also walks AArch32 tables has at least 40 bits of input (IHI 0070, section 3.4.1).
#[test]
fn a_unit_with_tables_of_aarch32_has_forty_bits_at_the_least() {
    for (code, bits) in [(0, 40), (1, 40), (2, 40), (4, 44), (5, 48)] {
        let unit = started([IDR0 | idr0::TTF_AARCH32, IDR1, IDR3, IDR5 & !7 | code], |_| {}).unwrap();
        let layout = unit.capabilities().layout::<12>(Stage::Two).unwrap();
        assert_eq!(64 - layout.t0sz(), bits, "{code}");
    }
}
