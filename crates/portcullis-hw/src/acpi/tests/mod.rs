//! Tables made by hand: valid ones, and ones with each kind of flaw. `cases` has small tables after public reports of wrong firmware, with
//! made-up names and addresses.

use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt::Debug;

use super::bytes::HEADER;
use super::*;

mod dmar;
mod iort;
mod ivrs;

fn le(words: &[u64], bytes: usize) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()[..bytes].to_vec()).collect()
}

fn table(signature: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let mut table = vec![0; HEADER];
    table[..4].copy_from_slice(signature);
    table.extend_from_slice(body);
    seal(&mut table);
    table
}

fn seal(table: &mut [u8]) {
    let len = table.len() as u32;
    table[4..8].copy_from_slice(&len.to_le_bytes());
    table[9] = 0;
    let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    table[9] = 0_u8.wrapping_sub(sum);
}

/// Runs `parse` on `table` with every byte changed in several ways, and cut at every length: it returns, and its flaws are sentences. A
/// wrong checksum is the first flaw.
fn spoil<T: Debug>(
    table: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, AcpiError>,
    flaws: impl Fn(&T) -> &[Flaw],
) {
    assert_eq!(flaws(&parse(table).expect("the table as it is")), [], "nothing is wrong with it");
    let tell = |bytes: &[u8]| {
        let read = parse(bytes);
        for flaw in read.iter().flat_map(&flaws) {
            let sentence = flaw.to_string();
            assert!(sentence.len() > 20 && !sentence.contains('\n'), "{sentence}");
        }
        read
    };
    for len in 0..table.len() {
        tell(&table[..len]).expect_err("a table that is cut");
        let mut cut = table[..len.max(HEADER)].to_vec();
        seal(&mut cut);
        let _ = tell(&cut);
    }
    for at in 0..table.len() {
        for value in [0, 1, 2, 4, 0x7f, 0x80, 0xfe, 0xff] {
            let mut changed = table.to_vec();
            changed[at] = value;
            if let Ok(read) = tell(&changed)
                && changed != table
            {
                assert!(matches!(flaws(&read), [Flaw::Checksum { .. }, ..]), "{at}: {value}");
            }
            let len = u32::from_le_bytes([changed[4], changed[5], changed[6], changed[7]]);
            if len as usize == changed.len() {
                seal(&mut changed);
            }
            let _ = tell(&changed);
        }
    }
}

/// Records the parse of `table`, and its difference with each single byte changed: lines that are gone or new, and a hash of all of them.
#[cfg(not(watched))]
fn write_down<T: Debug>(name: &str, table: &[u8], parse: impl Fn(&[u8]) -> Result<T, AcpiError>) {
    use alloc::string::String;

    const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/portcullis-hw/tests/transcripts");
    let read = |table: &[u8]| -> Vec<String> {
        let read = alloc::format!("{:#x?}", parse(table));
        read.lines().map(|line| line.trim_end_matches(',').into()).collect()
    };
    let usual = read(table);
    let mut said = crate::transcript::Transcript::new(name, Vec::new);
    usual.iter().filter(|line| line.contains(':')).for_each(|line| said.line(line));
    for at in HEADER..table.len() {
        for change in [1, 0x80] {
            let mut changed = table.to_vec();
            changed[at] ^= change;
            seal(&mut changed);
            let lines = read(&changed);
            let gone = usual
                .iter()
                .filter(|line| !lines.contains(line))
                .map(|line| alloc::format!("- {}", line.trim()));
            let come = lines
                .iter()
                .filter(|line| !usual.contains(line))
                .map(|line| alloc::format!("+ {}", line.trim()));
            let differs: Vec<String> = gone.chain(come).collect();
            if lines != usual {
                let sum = crate::transcript::sum(lines.iter().flat_map(|line| line.bytes()));
                said.line(format_args!("{at:#x} ^ {change:#x} ({sum:016x}): {}", differs.join(", ")));
            }
        }
    }
    said.assert_is(FOLDER, name);
}

#[test]
fn a_table_of_another_name_or_length_is_none() {
    let made = table(b"DMAR", &[0; 12]);
    assert_eq!(Ivrs::parse(&made), Err(AcpiError::Signature { found: *b"DMAR", wanted: *b"IVRS" }));
    assert_eq!(Dmar::parse(&made[..20]), Err(AcpiError::Cut { bytes: 20, wanted: 48 }));
    assert_eq!(Dmar::parse(&made[..3]), Err(AcpiError::Cut { bytes: 3, wanted: 36 }));
    assert_eq!(Dmar::parse(&table(b"DMAR", &[0; 11])), Err(AcpiError::Cut { bytes: 47, wanted: 48 }));
    assert_eq!(Iort::parse(&table(b"IORT", &[0; 11])), Err(AcpiError::Cut { bytes: 47, wanted: 48 }));
    assert_eq!(Ivrs::parse(&table(b"IVRS", &[0; 11])), Err(AcpiError::Cut { bytes: 47, wanted: 48 }));
}

#[test]
fn a_checksum_that_is_off_is_told_and_the_caller_decides() {
    let mut made = include_bytes!("cases/d09-rmrr-overlap-same-device.dmar").to_vec();
    let right = Dmar::parse(&made).unwrap();
    // A letter of the vendor's name.
    made[12] = made[12].wrapping_add(3);
    let wrong = Dmar::parse(&made).unwrap();
    assert_eq!(wrong.flaws, [Flaw::Checksum { sum: 3 }]);
    assert_eq!(Dmar { flaws: vec![], ..wrong }, right);
}
