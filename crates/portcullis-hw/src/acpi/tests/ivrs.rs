use portcullis::addr::{AddrError, Permissions};

use super::*;

fn ivrs(blocks: &[Vec<u8>]) -> Vec<u8> {
    table(b"IVRS", &[vec![0; 12], blocks.concat()].concat())
}

/// A unit's block.
fn unit(kind: u8, device: u64, registers: u64, entries: &[&[u8]]) -> Vec<u8> {
    let extra = if kind == 0x10 { 0 } else { 16 };
    let head = [le(&[device, 0x40], 2), le(&[registers], 8), le(&[0, 0], 2), vec![0; 4 + extra]].concat();
    let len = 4 + head.len() + entries.concat().len();
    [vec![kind, 0xb0], le(&[len as u64], 2), head, entries.concat()].concat()
}

fn in_segment(mut block: Vec<u8>, segment: u8) -> Vec<u8> {
    let at = if block[0] < 0x20 { 16 } else { 8 };
    block[at] = segment;
    block
}

fn memory(kind: u8, flags: u8, first: u64, last: u64, (start, len): (u64, u64)) -> Vec<u8> {
    [vec![kind, flags, 32, 0], le(&[first, last], 2), vec![0; 8], le(&[start, len], 8)].concat()
}

/// A device of the ACPI namespace: its number, hardware ID, and unique ID.
fn named(device: u8, id: &[u8; 8], unique: &[u8]) -> Vec<u8> {
    [&[0xf0, device, 0, 0][..], id, &[0; 8], &[2, unique.len() as u8], unique].concat()
}

/// All devices except the unit, as firmware writes them; the last bus has the SMBus as its alias.
const USUAL: [&[u8]; 3] =
    [&[3, 8, 0, 0, 4, 0xfe, 0xff, 0], &[0x43, 0, 0xff, 0, 0, 0xa5, 0, 0], &[4, 0xff, 0xff, 0]];

const REGISTERS: u64 = 0xfd10_0000;
/// Offset of the first block.
const AT: usize = 48;

/// A unit in three generations of blocks, and a reserved page.
fn example() -> Vec<u8> {
    let uart = named(0x90, b"AMDI0020", b"ID00");
    let usual = USUAL.concat();
    let special = [0x48, 0, 0, 0, 0x21, 0xa0, 0, 1];
    ivrs(&[
        unit(0x10, 2, REGISTERS, &[&usual, &[0, 0, 0, 0], &special, &[0x40; 8]]),
        unit(0x11, 2, REGISTERS, &[&usual, &special]),
        unit(0x40, 2, REGISTERS, &[&usual, &uart, &[2, 0x91, 0, 0], &[0x46, 0x92, 0, 0, 0, 0, 0, 0]]),
        memory(0x21, 0b0111, 0x28, 0, (0x10_0000, 0x1000)),
    ])
}

fn told(blocks: &[Vec<u8>]) -> (Ivrs, Vec<Flaw>) {
    let ivrs = Ivrs::parse(&ivrs(blocks)).unwrap();
    let flaws = ivrs.flaws.clone();
    (ivrs, flaws)
}

fn unit_of(ivrs: &Ivrs, device: u16) -> Option<u64> {
    ivrs.unit_of(0, device).map(|unit| unit.registers)
}

#[test]
fn units_devices_and_reserved_memory() {
    let ivrs = Ivrs::parse(&example()).unwrap();
    let [unit] = ivrs.units.as_slice() else { panic!("one unit") };
    assert_eq!((unit.registers, unit.segment, unit.device, unit.capability), (REGISTERS, 0, 2, 0x40));
    let ranges = [(8, 0xfffe), (0xff00, 0xffff), (0xa5, 0xa5)];
    assert_eq!(unit.devices, [&ranges[..], &[(0x90, 0x90), (0x91, 0x91), (0x92, 0x92)]].concat());
    assert_eq!(unit.aliases, [((0xff00, 0xffff), 0xa5)]);
    let uart = IvrsNamed { device: 0x90, hardware_id: "AMDI0020".into(), unique_id: Some("ID00".into()) };
    assert_eq!(unit.named, [uart], "the newest generation has them");
    let [(segment, devices, region)] = ivrs.reserved.as_slice() else { panic!("one region") };
    assert_eq!((*segment, *devices, region.range.len()), (0, (0x28, 0x28), 4096));
    assert_eq!(region.permissions, Permissions::READ_WRITE);
    assert_eq!(
        (unit_of(&ivrs, 0x28), unit_of(&ivrs, 2), ivrs.unit_of(1, 0x28)),
        (Some(REGISTERS), None, None)
    );
}

#[test]
fn whatever_firmware_writes_is_read_inside_its_bytes() {
    spoil(&example(), Ivrs::parse, |ivrs| &ivrs.flaws);
}

#[cfg(not(watched))]
#[test]
fn what_is_read_where_a_byte_is_another() {
    write_down("acpi-ivrs", &example(), Ivrs::parse);
}

#[test]
fn cases_of_firmware() {
    let segments = Ivrs::parse(include_bytes!("cases/v01-ivmd-of-segment-1.ivrs")).unwrap();
    let of = |segment| segments.reserved_for(segment, 0x128).count();
    assert_eq!((of(0), of(1), segments.flaws.len()), (0, 1, 0));
    assert_eq!(
        [0, 1].map(|segment| segments.unit_of(segment, 0x128).unwrap().registers),
        [0xfd10_0000, 0xfd90_0000]
    );

    let empty = Ivrs::parse(include_bytes!("cases/v02-ivmd-length-0.ivrs")).unwrap();
    assert_eq!((empty.units.len(), empty.reserved.len()), (1, 0));
    let error = AddrError::EmptyRange { start: 0x9a00_0000 };
    assert_eq!(empty.flaws, [Flaw::Region { offset: 0x60, error }]);
}

#[test]
fn what_devices_do_in_memory_is_what_the_flags_say() {
    // Bit 0: identity mapping. Bit 1: read. Bit 2: write. Bit 3: excluded, with all permissions.
    let all = [
        (0b0011, Some(Permissions::READ)),
        (0b0101, Some(Permissions::WRITE)),
        (0b0111, Some(Permissions::READ_WRITE)),
        (0b1000, Some(Permissions::READ_WRITE)),
        (0b1011, Some(Permissions::READ_WRITE)),
        (0b0001, None),
        (0b0110, None),
        (0b0000, None),
        (0b1111_0000, None),
    ];
    for (flags, permissions) in all {
        let (ivrs, flaws) = told(&[memory(0x21, flags, 8, 0, (0x10_0000, 0x1000))]);
        let found: Vec<_> = ivrs.reserved_for(0, 8).map(|region| region.permissions).collect();
        assert_eq!(found, permissions.into_iter().collect::<Vec<_>>(), "{flags:#b}");
        let none = Flaw::ReservesNothing { offset: AT, flags };
        assert_eq!(flaws, if permissions.is_some() { vec![] } else { vec![none] });
    }
}

#[test]
fn memory_is_of_all_devices_of_one_or_of_a_run() {
    let at = |page: u64| (0x10_0000 + page * 0x1000, 0x1000);
    let (ivrs, flaws) = told(&[
        in_segment(memory(0x20, 7, 0x10, 0x20, at(0)), 1),
        memory(0x21, 7, 0x10, 0x20, at(1)),
        memory(0x22, 7, 0x10, 0x20, at(2)),
        memory(0x22, 7, 0x20, 0x10, at(3)),
        // All lengths that firmware uses, also for no region.
        memory(0x22, 8, 0, 0xfff, (0x9618_e000, 1)),
        memory(0x21, 7, 0x60, 0, (0, 1)),
        memory(0x21, 7, 0x60, 0, (0, 0x1000)),
        memory(0x21, 7, 0x60, 0, (u64::MAX - 0xfff, 0x2000)),
    ]);
    let pages = |segment, device| {
        let regions = ivrs.reserved_for(segment, device);
        regions.map(|region| (region.range.start().get() - 0x10_0000) >> 12).collect::<Vec<_>>()
    };
    assert_eq!((pages(1, 0), pages(1, 0xffff)), (vec![0], vec![0]));
    assert_eq!((pages(0, 0xf), pages(0, 0x21)), (vec![0x9608e], vec![0x9608e]));
    assert_eq!((pages(0, 0x10), pages(0, 0x20)), (vec![1, 2, 0x9608e], vec![2, 0x9608e]));
    let offset = |block: usize| AT + 32 * block;
    let error = AddrError::Wraps { start: u64::MAX - 0xfff, len: 0x2000 };
    assert_eq!(
        flaws,
        [
            Flaw::Backwards { offset: offset(3), first: 0x20, last: 0x10 },
            Flaw::Unaligned { offset: offset(4), range: ivrs.reserved[3].2.range },
            Flaw::PageZero { offset: offset(5) },
            Flaw::PageZero { offset: offset(6) },
            Flaw::Region { offset: offset(7), error },
        ]
    );
}

#[test]
fn what_the_unit_cannot_tell_apart_has_all_regions() {
    let (ivrs, flaws) = told(&[
        unit(0x11, 2, REGISTERS, &USUAL),
        memory(0x21, 7, 0xff08, 0, (0x10_0000, 0x1000)),
        memory(0x21, 7, 0xa5, 0, (0x20_0000, 0x1000)),
    ]);
    assert_eq!([0xff08, 0xff10, 0xa5].map(|device| ivrs.alias(0, device)), [0xa5; 3]);
    assert_eq!([0xff08, 0xff10, 0xa5, 8].map(|device| ivrs.reserved_for(0, device).count()), [2, 2, 2, 0]);
    assert_eq!((ivrs.alias(1, 0xff08), flaws), (0xff08, vec![]));
    // The last one wins.
    let one: &[u8] = &[0x42, 8, 0xff, 0, 0, 0xa0, 0, 0];
    let (ivrs, _) = told(&[unit(0x11, 2, REGISTERS, &[USUAL[0], USUAL[1], USUAL[2], one])]);
    assert_eq!([0xff07, 0xff08].map(|device| ivrs.alias(0, device)), [0xa5, 0xa0]);
}

/// A range with the alias 0xa0, and a range with a region: 0xa0 gets the region if a device is in both.
#[test]
fn regions_of_one_device_of_an_alias_are_of_the_alias() {
    let run: &[&[u8]] = &[&[0x43, 0x10, 1, 0, 0, 0xa0, 0, 0], &[4, 0x20, 1, 0]];
    for (first, last, is_met) in [
        (0x100, 0x10f, false),
        (0x100, 0x110, true),
        (0x110, 0x110, true),
        (0x114, 0x115, true),
        (0x120, 0x120, true),
        (0x120, 0x130, true),
        (0x121, 0x130, false),
        (0x100, 0x130, true),
    ] {
        for (of_unit, of_memory) in [(0, 0), (2, 2), (0, 2), (2, 0)] {
            let (ivrs, flaws) = told(&[
                in_segment(unit(0x11, 2, REGISTERS, run), of_unit),
                in_segment(memory(0x22, 7, first, last, (0x10_0000, 0x1000)), of_memory),
            ]);
            assert_eq!(flaws, []);
            let counts = [0xa0, 0xa1].map(|device| ivrs.reserved_for(of_memory.into(), device).count());
            let is_of = usize::from(is_met && of_unit == of_memory);
            assert_eq!(
                counts,
                [is_of, 0],
                "{first:#x} to {last:#x} of segment {of_memory}, unit of {of_unit}"
            );
        }
    }
}

#[test]
fn the_newest_block_that_can_be_read_is_the_units() {
    let entry = |kind: u8, device: u8| [kind, device, 0, 0];
    let blocks = [0x40, 0x10, 0x11].map(|kind| unit(kind, 2, REGISTERS, &[&entry(2, kind)]));
    let chosen = |ivrs: &Ivrs| ivrs.units.iter().map(|unit| unit.devices.clone()).collect::<Vec<_>>();
    let (ivrs, flaws) = told(&blocks);
    assert_eq!((chosen(&ivrs), flaws), (vec![vec![(0x40, 0x40)]], vec![]));
    // An entry of unknown length: the rest of the block cannot be read.
    let unreadable = unit(0x40, 2, REGISTERS, &[&entry(2, 0x40), &entry(0xf1, 0)]);
    let at = AT + 44;
    let length = Flaw::Length { offset: at, len: 0, least: 4, left: 4 };
    let (ivrs, flaws) = told(&[unreadable.clone(), blocks[1].clone(), blocks[2].clone()]);
    assert_eq!((chosen(&ivrs), flaws), (vec![vec![(0x11, 0x11)]], vec![length]));
    let (ivrs, flaws) = told(&[unreadable, unit(0x11, 10, REGISTERS + 0x8_0000, &[&[1, 0, 0, 0]])]);
    assert_eq!((ivrs.units.len(), unit_of(&ivrs, 0x40)), (1, None), "nor behind the unit of all devices");
    assert_eq!(unit_of(&ivrs, 0x41), Some(REGISTERS + 0x8_0000));
    assert_eq!(flaws, [length, Flaw::Devices { offset: AT }]);
}

#[test]
fn blocks_for_one_unit_that_disagree() {
    let one = |kind, device: u64, registers, of| unit(kind, device, registers, &[&[2, of, 0, 0]]);
    // Two blocks of the same generation are merged.
    let (ivrs, flaws) = told(&[one(0x10, 2, REGISTERS, 8), one(0x10, 2, REGISTERS, 16)]);
    assert_eq!((unit_of(&ivrs, 8), unit_of(&ivrs, 16)), (Some(REGISTERS), Some(REGISTERS)));
    let twice = Flaw::Twice { offset: AT + 28, first: AT };
    assert_eq!((ivrs.units.len(), flaws), (1, vec![twice]));
    // If two generations give different registers, the newer one wins.
    let (ivrs, flaws) = told(&[one(0x10, 2, 0xfeb8_0000, 8), one(0x11, 2, REGISTERS, 8)]);
    assert_eq!((ivrs.units.len(), unit_of(&ivrs, 8), flaws), (1, Some(REGISTERS), vec![twice]));
    let (ivrs, flaws) = told(&[one(0x11, 2, REGISTERS, 8), in_segment(one(0x11, 2, 0xfd90_0000, 8), 1)]);
    assert_eq!((ivrs.units.len(), flaws.len()), (2, 0));
}

#[test]
fn a_unit_without_a_place_is_refused() {
    for nowhere in [0, u64::MAX, 0xfeb8_0004] {
        let (ivrs, flaws) =
            told(&[unit(0x11, 2, nowhere, &[&[2, 8, 0, 0]]), unit(0x11, 10, REGISTERS, &[&[1, 0, 0, 0]])]);
        assert_eq!((ivrs.units.len(), ivrs.refused.len()), (1, 1));
        assert_eq!((unit_of(&ivrs, 8), unit_of(&ivrs, 16)), (None, Some(REGISTERS)));
        assert_eq!(flaws, [Flaw::Registers { offset: AT, registers: nowhere }]);
    }
}

#[test]
fn entries_that_are_odd_are_told() {
    let (ivrs, flaws) = told(&[unit(
        0x11,
        2,
        REGISTERS,
        &[
            // No start; a start without an end, twice; one with an alias; backwards.
            &[4, 0x10, 0, 0],
            &[3, 0x20, 0, 0],
            &[0x43, 0x30, 0, 0, 0, 0x31, 0, 0],
            &[3, 0x40, 0, 0, 4, 0x3f, 0, 0],
            // Unknown types of all lengths, and one of a newer generation.
            &[5, 0x50, 0, 0],
            &[0x41, 0x51, 0, 0, 0, 0, 0, 0],
            &[0x80; 16],
            &[0xc0; 32],
            &named(0x52, b"AMDI0020", b""),
            &[0x42, 0x60, 0, 0, 0, 0x61, 0, 0],
            &[3, 0x70, 0, 0],
        ],
    )]);
    let [unit] = ivrs.units.as_slice() else { panic!("one unit") };
    let one = |device: u16| (device, device);
    assert_eq!(unit.devices, [0x10, 0x20, 0x30, 0x31, 0x60, 0x61, 0x70].map(one));
    assert_eq!(unit.aliases, [(one(0x30), 0x31), (one(0x60), 0x61)]);
    let at = AT + 40;
    assert_eq!(
        flaws,
        [
            Flaw::OneEnd { offset: at, device: 0x10 },
            Flaw::OneEnd { offset: at + 4, device: 0x20 },
            Flaw::OneEnd { offset: at + 8, device: 0x30 },
            Flaw::Backwards { offset: at + 20, first: 0x40, last: 0x3f },
            Flaw::Kind { offset: at + 24, kind: 5 },
            Flaw::Kind { offset: at + 28, kind: 0x41 },
            Flaw::Kind { offset: at + 36, kind: 0x80 },
            Flaw::Kind { offset: at + 52, kind: 0xc0 },
            Flaw::Kind { offset: at + 84, kind: 0xf0 },
            Flaw::OneEnd { offset: at + 114, device: 0x70 },
        ]
    );
}

#[test]
fn devices_of_the_namespace_have_names_of_text() {
    let id = |format: u8, id: &[u8]| {
        [&[0xf0, 0x90, 0, 0][..], b"PNP0D40\0", &[0; 8], &[format, id.len() as u8], id].concat()
    };
    let (ivrs, flaws) = told(&[unit(
        0x40,
        2,
        REGISTERS,
        &[
            &id(0, b""),
            &id(1, &[]),
            &id(1, &[7]),
            &id(1, &[0xff; 8]),
            &id(1, &[0; 9]),
            &id(2, b"ID01"),
            &id(2, b"ID01\0"),
            &id(2, b"\x1b[31m"),
            &id(3, b"ID01"),
            &named(0x90, b"\x1b[31m\0\0\0", b""),
        ],
    )]);
    let unique: Vec<_> = ivrs.units[0].named.iter().map(|named| named.unique_id.as_deref()).collect();
    let largest = u64::MAX.to_string();
    let ids =
        [None, Some("0"), Some("7"), Some(largest.as_str()), None, Some("ID01"), Some("ID01"), None, None];
    assert_eq!(unique, ids);
    assert!(ivrs.units[0].named.iter().all(|named| named.hardware_id == "PNP0D40" && named.device == 0x90));
    assert_eq!(ivrs.units[0].devices, [(0x90, 0x90); 10], "all of them are behind the unit");
    assert!(matches!(flaws[..], [Flaw::Name { .. }]), "{flaws:?}");
}

#[test]
fn blocks_that_are_odd_are_told() {
    let (ivrs, flaws) = told(&[
        vec![0x51, 0, 8, 0, 1, 2, 3, 4],
        memory(0x21, 7, 8, 0, (0x10_0000, 0x1000))[..4].iter().copied().chain([0; 28]).collect(),
        vec![0x10, 0, 23, 0].into_iter().chain([0; 19]).collect(),
        unit(0x40, 2, REGISTERS, &[&named(0x90, &[0; 8], b"")]),
        vec![0x10, 0, 0, 0],
    ]);
    assert_eq!((ivrs.units.len(), ivrs.units[0].named.len(), ivrs.reserved.len()), (1, 0, 0));
    let at = AT + 8 + 32 + 23;
    let error = AddrError::EmptyRange { start: 0 };
    assert_eq!(
        flaws,
        [
            Flaw::Kind { offset: AT, kind: 0x51 },
            Flaw::Region { offset: AT + 8, error },
            Flaw::Short { offset: AT + 40, len: 23 },
            Flaw::Name { offset: at + 40 },
            Flaw::Length { offset: at + 62, len: 0, least: 4, left: 4 },
        ]
    );
}

/// Linux records each device's unit block by block, and the last record wins.
#[test]
fn a_device_that_two_units_name_is_behind_the_last() {
    let (ivrs, flaws) = told(&[
        unit(0x11, 2, REGISTERS, &[&[1, 0, 0, 0]]),
        unit(0x11, 0x4002, REGISTERS + 0x8_0000, &[&[3, 0, 0x40, 0, 4, 0xff, 0x7f, 0]]),
    ]);
    assert_eq!((ivrs.units.len(), flaws), (2, vec![]));
    let units = [0x28, 0x4028, 0x8028].map(|device| unit_of(&ivrs, device));
    assert_eq!(units, [REGISTERS, REGISTERS + 0x8_0000, REGISTERS].map(Some));
}

#[test]
fn a_run_of_one_device_is_one() {
    let (ivrs, flaws) = told(&[unit(0x10, 2, REGISTERS, &[&[3, 8, 0, 0, 4, 8, 0, 0]])]);
    assert_eq!((ivrs.units[0].devices.as_slice(), flaws.as_slice()), (&[(8, 8)][..], &[][..]));
}

/// The unreadable entry may name any device.
#[test]
fn a_unit_one_of_whose_blocks_cannot_be_read_is_refused() {
    let whole = unit(0x40, 2, REGISTERS, &[&[2, 8, 0, 0]]);
    // An entry of 8 bytes, cut to 4; one of the namespace, too short for its length.
    let half: &[u8] = &[0x46, 9, 0, 0];
    let short = [0xf0, 9, 0, 0, b'A', b'M', b'D', b'I', b'0', b'0'];
    for (rest, len, left) in [(half, 8, 4), (&short, 3, 10)] {
        let cut = unit(0x40, 2, REGISTERS, &[&[2, 10, 0, 0], rest]);
        for blocks in [[&whole, &cut], [&cut, &whole]] {
            let first = AT + if blocks[0] == &whole { whole.len() } else { 0 };
            let (ivrs, flaws) = told(&blocks.map(Clone::clone));
            assert_eq!((ivrs.units.len(), ivrs.refused.len()), (0, 1));
            assert_eq!([8, 9, 10].map(|device| unit_of(&ivrs, device)), [None; 3]);
            let mut devices = ivrs.refused[0].devices.clone();
            devices.sort_unstable();
            assert_eq!(devices, [(8, 8), (10, 10)]);
            assert!(flaws.contains(&Flaw::Length { offset: first + 44, len, least: 4, left }), "{flaws:?}");
            assert!(flaws.contains(&Flaw::Devices { offset: AT }), "{flaws:?}");
        }
    }
}
