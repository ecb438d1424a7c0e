//! Firmware's tables: the parser takes any bytes as a table or refuses them with an error that can be
//! printed. It reads inside the table alone, reports no more entries than there is room for, and tells what is wrong in sentences that
//! can be printed. No unit is where none can be, no device is behind another unit than its own, which may be refused, and reserved
//! regions can be mapped together.
//!
//! The first byte says which table the rest is, and whether its length and its checksum are made
//! right, without which changed bytes would never be looked at.

use std::fmt::Debug;

use portcullis::addr::{Iova, PageSize};
use portcullis_hw::acpi::{AcpiError, Dmar, DmarUnit, Flaw, Iort, IortReserved, Ivrs, IvrsUnit, Reserved};

use crate::reached::{note, noted};

/// The names of the tables.
const NAMES: [[u8; 4]; 3] = [*b"DMAR", *b"IVRS", *b"IORT"];

/// What the first byte says besides: the name, the length, the checksum are made right.
const NAMED: u8 = 4;
const MEASURED: u8 = 8;
const SUMMED: u8 = 16;

/// Reads `bytes` as a table.
pub fn run(bytes: &[u8]) {
    let Some((head, table)) = bytes.split_first() else { return };
    let which = usize::from(head % 3);
    let mut table = table.to_vec();
    if head & NAMED != 0 && table.len() >= 4 {
        table[..4].copy_from_slice(&NAMES[which]);
    }
    if head & MEASURED != 0 && table.len() >= 8 {
        let len = table.len() as u32;
        table[4..8].copy_from_slice(&len.to_le_bytes());
    }
    let told =
        table.get(4..8).map_or(0, |len| u32::from_le_bytes(len.try_into().unwrap_or_default())) as usize;
    if head & SUMMED != 0 && table.len() >= 10 {
        let end = told.clamp(10, table.len());
        let sum = table[..end].iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        table[9] = table[9].wrapping_sub(sum);
    }
    match which {
        0 => read(&table, Dmar::parse, |dmar| &dmar.flaws, dmar),
        1 => read(&table, Ivrs::parse, |ivrs| &ivrs.flaws, ivrs),
        _ => read(&table, Iort::parse, |iort| &iort.flaws, iort),
    }
}

fn read<T: Debug + PartialEq>(
    table: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, AcpiError>,
    flaws: impl Fn(&T) -> &[Flaw],
    check: impl Fn(&T, usize),
) {
    // As it is, so that a read beyond it is one of no memory.
    let exact: Box<[u8]> = table.into();
    let parsed = noted("table", parse(&exact));
    match &parsed {
        Ok(said) => {
            let told = flaws(said);
            // No more than three for the smallest structure (a scope), and three for the table.
            assert!(told.len() <= table.len() / 2 + 3, "{} flaws in {} bytes", told.len(), table.len());
            for flaw in told {
                let sentence = flaw.to_string();
                note(&sentence);
                assert!(sentence.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' '), "{sentence:?}");
            }
            let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
            let whole =
                table.len() == u32::from_le_bytes(table[4..8].try_into().unwrap_or_default()) as usize;
            assert!(!whole || (sum != 0) == matches!(told, [Flaw::Checksum { .. }, ..]), "{told:?}");
            check(said, table.len());
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    // What follows a table is none of it.
    if parsed.is_ok() {
        let more: Vec<u8> = table.iter().copied().chain([0xff; 64]).collect();
        assert_eq!(parse(&more), parsed, "bytes behind the table matter");
    }
}

/// The devices that are asked for: of the corpus, and the ends.
const DEVICES: [u16; 8] = [0, 0x10, 0x28, 0x7e, 0xa8, 0x100, 0x128, u16::MAX];

fn registers(at: u64) {
    assert!(at != 0 && at.is_multiple_of(4096), "{at:#x} is where no registers begin");
}

/// No region lies in page 0 alone. Merged, regions become whole pages, each once, which cover all of them.
fn regions(all: &[Reserved]) {
    for granule in [12, 14, 16].into_iter().filter_map(PageSize::from_shift) {
        let Ok(merged) = Reserved::merged(all.iter().copied(), granule) else { return };
        for region in all {
            assert!(region.range.last().get() >= 4096, "{region:?}");
            let within = |at: Iova| {
                let mut all = merged.iter().filter(|merged| merged.range.contains(at));
                all.any(|merged| merged.permissions.allows(region.permissions))
            };
            assert!(within(region.range.start()) && within(region.range.last()), "{region:?} in {merged:?}");
        }
        for pair in merged.windows(2) {
            assert!(pair[0].range.last() < pair[1].range.start(), "{pair:?}");
        }
        assert!(merged.len() <= 2 * all.len());
        assert!(merged.iter().all(|one| {
            let end = one.range.last().get().wrapping_add(1);
            one.range.start().is_aligned(granule) && Iova::new(end).is_aligned(granule)
        }));
    }
}

fn dmar(dmar: &Dmar, len: usize) {
    assert!((1..=256).contains(&dmar.address_bits));
    assert!((dmar.units.len() + dmar.refused.len()) * 4 <= len && dmar.reserved.len() * 6 <= len);
    assert!(dmar.names.iter().map(|(_, name)| name.len() + 9).sum::<usize>() <= len);
    assert!(dmar.names.iter().all(|(_, name)| name.bytes().all(|byte| byte.is_ascii_graphic())));
    let units = dmar.units.iter().chain(&dmar.refused);
    let scopes = units.flat_map(|unit| &unit.scopes).chain(dmar.reserved.iter().map(|(_, scope, _)| scope));
    let mut steps = 0;
    for scope in scopes {
        steps += scope.path.len();
        assert!(
            !scope.path.is_empty() && scope.path.iter().all(|step| step.0 < 32 && step.1 < 8),
            "{scope:?}"
        );
        let found = scope.device(|bridge| Some((bridge as u8, 0)));
        assert!(found.is_some_and(|device| scope.covers(device, |bridge| Some((bridge as u8, 0)))));
        assert!(scope.path.len() < 2 || scope.device(|_| None).is_none());
    }
    assert!(steps * 2 <= len);
    for unit in &dmar.units {
        registers(unit.registers);
        assert!(unit.registers_len.is_power_of_two() && unit.registers_len <= 4096 << 15);
        let same = |other: &&DmarUnit| (other.registers, other.segment) == (unit.registers, unit.segment);
        assert_eq!(dmar.units.iter().filter(same).count(), 1, "a unit is there once");
        let others = |other: &&DmarUnit| other.others && other.segment == unit.segment;
        assert!(dmar.units.iter().filter(others).count() <= 1, "one unit is in front of all others");
    }
    for device in DEVICES {
        let buses = |bridge: u16| (bridge & 0xff00 == 0).then_some((1, 2));
        let covers = |unit: &&DmarUnit| {
            unit.segment == 0 && unit.scopes.iter().any(|scope| scope.covers(device, buses))
        };
        if dmar.refused.iter().any(|unit| covers(&unit)) {
            assert_eq!(dmar.unit_of(0, device, buses), None);
        } else if let Some(unit) = dmar.unit_of(0, device, buses) {
            assert!(unit.others || covers(&unit), "{unit:?} of {device:#x}");
        }
        regions(&dmar.reserved_for(0, device, buses).collect::<Vec<_>>());
    }
}

fn ivrs(ivrs: &Ivrs, len: usize) {
    assert!(ivrs.reserved.len() * 32 <= len && (ivrs.units.len() + ivrs.refused.len()) * 24 <= len);
    for unit in &ivrs.units {
        registers(unit.registers);
        assert!(
            unit.devices.len() * 4 <= len && unit.aliases.len() * 4 <= len && unit.named.len() * 22 <= len
        );
        for named in &unit.named {
            let text = named.unique_id.iter().chain([&named.hardware_id]);
            assert!(text.flat_map(|text| text.bytes()).all(|byte| byte.is_ascii_graphic()), "{named:?}");
        }
        let aliased = unit.aliases.iter().map(|(run, _)| run);
        assert!(unit.devices.iter().chain(aliased).all(|(first, last)| first <= last), "{unit:?}");
        let has = |device: &u16| unit.devices.iter().any(|(first, last)| (first..=last).contains(&device));
        assert!(unit.aliases.iter().all(|(_, alias)| has(alias)), "{unit:?}");
        let same = |other: &&IvrsUnit| (other.registers, other.segment) == (unit.registers, unit.segment);
        assert_eq!(ivrs.units.iter().filter(same).count(), 1, "a unit is there once");
    }
    assert!(ivrs.reserved.iter().all(|(_, (first, last), _)| first <= last));
    for device in DEVICES {
        let names = |unit: &IvrsUnit| {
            unit.segment == 0 && unit.devices.iter().any(|(first, last)| (*first..=*last).contains(&device))
        };
        match ivrs.unit_of(0, device) {
            Some(unit) => assert!(names(unit) && !ivrs.refused.iter().any(names), "{unit:?} of {device:#x}"),
            None => assert!(ivrs.refused.iter().any(names) || !ivrs.units.iter().any(names)),
        }
        let seen = ivrs.alias(0, device);
        let all: Vec<_> = ivrs.reserved_for(0, device).collect();
        assert!(ivrs.alias(0, seen) != seen || ivrs.reserved_for(0, seen).count() >= all.len());
        regions(&all);
    }
}

fn iort(iort: &Iort, len: usize) {
    assert!((iort.units.len() + iort.refused.len()) * 28 <= len && iort.roots.len() * 32 <= len);
    for unit in &iort.units {
        registers(unit.registers);
        assert_eq!(iort.units.iter().filter(|other| other.registers == unit.registers).count(), 1);
    }
    assert!(iort.roots.iter().all(|root| root.address_bits.is_none_or(|bits| (1..=64).contains(&bits))));
    let count = |reserved: &IortReserved| (reserved.regions.len().max(reserved.streams.len())) * 20;
    assert!(iort.reserved.iter().map(count).sum::<usize>() <= len);
    for component in &iort.components {
        assert!(component.name.bytes().all(|byte| byte.is_ascii_graphic()), "{component:?}");
        let within = |(unit, (first, last)): &(_, (u32, u32))| first <= last && iort.units.contains(unit);
        assert!(component.streams.iter().all(within), "{component:?}");
    }
    for (unit, (first, last)) in iort.reserved.iter().flat_map(|reserved| &reserved.streams) {
        assert!(first <= last && iort.units.contains(unit));
        for stream in [*first, *last] {
            let all: Vec<_> = iort.reserved_for(unit, stream).take(64).collect();
            assert!(!all.is_empty(), "{unit:?} {stream:#x}");
            regions(&all);
        }
    }
    for segment in [0, 2, u32::MAX] {
        for device in DEVICES {
            let led = iort.stream(segment, device);
            assert!(led.is_none_or(|(unit, _)| iort.units.contains(&unit)));
            assert!(led.is_none() || iort.roots.iter().any(|root| root.segment == segment));
        }
    }
}
