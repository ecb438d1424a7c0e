//! Firmware's tables: the parser takes any bytes as a table or refuses them with an error that can be
//! printed. It reads inside the table alone, and reports no more entries than there is room for.
//!
//! The first byte says which table the rest is, and whether its length and its checksum are made
//! right, without which changed bytes would never be looked at.

use std::fmt::Debug;

use portcullis_hw::acpi::{AcpiError, Dmar, Iort, Ivrs};

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
        0 => read(&table, Dmar::parse, dmar),
        1 => read(&table, Ivrs::parse, ivrs),
        _ => read(&table, Iort::parse, iort),
    }
}

fn read<T: Debug + PartialEq>(
    table: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, AcpiError>,
    check: impl Fn(&T, usize),
) {
    // As it is, so that a read beyond it is one of no memory.
    let exact: Box<[u8]> = table.into();
    let parsed = parse(&exact);
    match &parsed {
        Ok(said) => check(said, table.len()),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            let at = match error {
                AcpiError::Length { offset, .. } | AcpiError::Region { offset, .. } => *offset,
                _ => 0,
            };
            assert!(at <= table.len(), "{error}");
        }
    }
    // What follows a table is none of it.
    if parsed.is_ok() {
        let more: Vec<u8> = table.iter().copied().chain([0xff; 64]).collect();
        assert_eq!(parse(&more), parsed, "bytes behind the table matter");
    }
}

fn dmar(dmar: &Dmar, len: usize) {
    assert!((1..=256).contains(&dmar.address_bits));
    assert!(dmar.units.len() * 16 <= len && dmar.reserved.len() * 8 <= len);
    let scopes = dmar.units.iter().flat_map(|unit| &unit.scopes);
    let mut steps = 0;
    for scope in scopes.chain(dmar.reserved.iter().map(|(_, scope, _)| scope)) {
        steps += scope.path.len();
        let found = scope.device(|bridge| Some((bridge as u8, 0)));
        assert_eq!(found.is_some(), !scope.path.is_empty());
        assert!(scope.path.len() < 2 || scope.device(|_| None).is_none());
    }
    assert!(steps * 2 <= len);
}

fn ivrs(ivrs: &Ivrs, len: usize) {
    assert!(ivrs.reserved.len() * 32 <= len && ivrs.units.len() * 24 <= len);
    for unit in &ivrs.units {
        assert!(unit.devices.len() * 4 <= len && unit.aliases.len() * 8 <= len);
        let aliased = unit.aliases.iter().map(|(run, _)| run);
        assert!(unit.devices.iter().chain(aliased).all(|(first, last)| first <= last), "{unit:?}");
        let same = |other: &&portcullis_hw::acpi::IvrsUnit| {
            (other.registers, other.segment) == (unit.registers, unit.segment)
        };
        assert_eq!(ivrs.units.iter().filter(same).count(), 1, "a unit is there once");
    }
    assert!(ivrs.reserved.iter().all(|(_, (first, last), _)| first <= last));
}

fn iort(iort: &Iort, len: usize) {
    assert!(iort.units.len() * 28 <= len);
    assert!(iort.reserved.len() <= len, "{} regions in {len} bytes", iort.reserved.len());
    assert!(iort.reserved.iter().all(|(unit, (first, last), _)| first <= last && iort.units.contains(unit)));
    for segment in [0, 2, u32::MAX] {
        for device in [0, 0x100, 0x128, 0x1ff, u16::MAX] {
            let led = iort.stream(segment, device);
            assert!(led.is_none_or(|(unit, _)| iort.units.contains(&unit)));
        }
    }
}
