//! The widths of tables, by identification registers; and the unit's behaviour while the driver waits.

use portcullis::pgtable::Format;

use super::*;

/// The second stage translates the physical address width, and at least 40 bits with AArch32 tables (IHI 0070, section 3.4.1).
#[test]
fn the_second_stage_is_as_wide_as_addresses_are() {
    for (code, bits) in [(0, 32), (1, 36), (2, 40), (3, 42), (4, 44), (5, 48)] {
        for (more, wide) in [(0, bits), (idr0::TTF_AARCH32, bits.max(40))] {
            let ids = [IDR0 & !idr0::S1P | more, IDR1, IDR3, IDR5 & !7 | code];
            let unit = started(ids, |_| {}).unwrap();
            let layout = unit.layout().unwrap();
            assert_eq!((layout.input_bits(), layout.last_phys().get()), (wide, (1 << bits) - 1), "{more:#x}");
            assert_eq!(unit.last_iova().get(), (1 << wide) - 1, "{more:#x}");
        }
    }
}

/// IDR5.VAX and IDR5.OAS (section 6.3.6): the first stage translates 48 bits, or 52 with VAX and 64 KiB pages. Its output has the physical
/// address width, at most 48 bits except with 64 KiB pages.
#[test]
fn the_first_stage_is_as_wide_as_the_unit_says_of_its_granule() {
    fn bits<const GRANULE: u32>(idr5: u32) -> (u32, u64) {
        let unit = Fake::<GRANULE>::start(host_with(&Memory::new(64), [IDR0, IDR1, IDR3, idr5], |_| {}));
        let layout = unit.unwrap().capabilities().layout::<GRANULE>(Stage::One).unwrap();
        (layout.input_bits(), layout.last_phys().get())
    }
    for (code, output) in [(0, 32), (1, 36), (2, 40), (3, 42), (4, 44), (5, 48), (6, 52)] {
        for (vax, input) in [(0, 48), (1, 52)] {
            let idr5 = IDR5 & !(7 | 3 << 10) | code | vax << 10;
            let last = |most: u32| (1 << output.min(most)) - 1;
            let usual = (48, last(48));
            assert_eq!(
                [bits::<12>(idr5), bits::<14>(idr5), bits::<16>(idr5)],
                [usual, usual, (input, last(52))]
            );
        }
    }
}

/// IDR5.GRAN4K, GRAN16K and GRAN64K (section 6.3.6) are independent.
#[test]
fn a_granule_that_the_unit_has_not_is_refused_whatever_others_it_has() {
    fn walks<const GRANULE: u32>(has: u32) -> bool {
        let ids = [IDR0, IDR1, IDR3, IDR5 & !(7 << 4) | has << 4];
        let unit = Fake::<GRANULE>::start(host_with(&Memory::new(64), ids, |_| {}));
        unit.is_ok_and(|unit| unit.layout().is_ok())
    }
    for has in 0..8 {
        let walked = [walks::<12>(has), walks::<14>(has), walks::<16>(has)];
        assert_eq!(walked, [1, 2, 4].map(|granule| has & granule != 0), "{has:#b}");
    }
}

/// One width above the limit is enough.
#[test]
fn tables_that_are_wider_than_the_unit_are_refused() {
    let unit = on(ALL);
    let (input, output) = (44, 44);
    for (stage, format, fits) in [
        (Stage::One, Arm::stage_1(48, output), true),
        (Stage::One, Arm::stage_1(48, output + 4), false),
        (Stage::Two, Arm::stage_2(input, output), true),
        (Stage::Two, Arm::stage_2(input + 4, output + 4), false),
        (Stage::Two, Arm::stage_2(input - 4, output + 4), false),
    ] {
        let format = format.unwrap();
        let levels = format.levels();
        let to = Attachment::Table { domain: DomainId(7), root: PhysAddr::new(1 << 20), format };
        let expected = if fits { Ok(()) } else { Err(UnitError::NoSuchTables { levels }) };
        assert_eq!(attach(&unit, 8, to), expected, "{stage:?}: {format:?}");
        if fits {
            unit.detach(DeviceId(8)).unwrap();
        }
    }
}

#[test]
fn a_cpu_that_waits_lets_others_go_on() {
    let unit = on(ALL);
    let waited = |unit: &Fake| unit.host().relaxed() > 0;
    assert!(!waited(&unit), "it answers at once");
    change(&unit, |state| state.dead = true);
    assert!(attach(&unit, 8, Attachment::PassThrough).is_err() && waited(&unit), "for a command");
    let unit = started(ALL, |_| {}).unwrap();
    change(&unit, |state| state.deaf = Some(reg::CR0));
    let _ = unit.host().relaxed();
    assert!(matches!(unit.enable(), Err(UnitError::TimedOut { .. })) && waited(&unit), "for a register");
}

#[test]
fn pages_are_named_by_their_range_where_the_unit_knows_ranges() {
    for (idr3, commands) in [(IDR3, 1), (0, 16)] {
        let unit = on([IDR0, IDR1, idr3, IDR5]);
        attach(&unit, 8, table(Stage::One, 7, 1 << 20)).unwrap();
        let _ = done(&unit);
        let range = IovaRange::new(Iova::new(0x10_0000), 16 * 4096).unwrap();
        unit.invalidate(DomainId(7), Invalidation::Range { range, leaf_only: true }).unwrap();
        let told = done(&unit).iter().filter(|[low, _]| low & 0xff == 0x12).count();
        assert_eq!(told, commands, "{idr3:#x}");
    }
}
