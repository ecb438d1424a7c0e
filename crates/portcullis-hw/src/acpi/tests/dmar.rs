use alloc::string::String;

use portcullis::addr::{AddrError, Iova, IovaRange, Permissions};

use super::*;

/// A table with these structures, and 39 address bits.
fn dmar(structures: &[Vec<u8>]) -> Vec<u8> {
    table(b"DMAR", &[vec![38, 0], vec![0; 10], structures.concat()].concat())
}

fn structure(kind: u64, rest: &[Vec<u8>]) -> Vec<u8> {
    let rest = rest.concat();
    [le(&[kind, 4 + rest.len() as u64], 2), rest].concat()
}

fn unit(others: bool, segment: u64, registers: u64, scopes: &[Vec<u8>]) -> Vec<u8> {
    structure(0, &[vec![others.into(), 0], le(&[segment], 2), le(&[registers], 8), scopes.concat()])
}

fn reserved(first: u64, last: u64, scopes: &[Vec<u8>]) -> Vec<u8> {
    structure(1, &[vec![0; 4], le(&[first, last], 8), scopes.concat()])
}

fn scope(kind: u8, number: u8, bus: u8, path: &[u8]) -> Vec<u8> {
    [&[kind, 6 + path.len() as u8, 0, 0, number, bus][..], path].concat()
}

fn name(number: u8, name: &[u8]) -> Vec<u8> {
    structure(4, &[vec![0, 0, 0, number], name.to_vec()])
}

/// A unit for one device behind a bridge, one for all others, a reserved megabyte, and a device of the ACPI namespace.
fn example() -> Vec<u8> {
    dmar(&[
        unit(false, 0, 0xfed9_0000, &[scope(1, 0, 0, &[0x1c, 1, 2, 0]), scope(5, 1, 0, &[0x15, 2])]),
        unit(true, 0, 0xfed9_1000, &[scope(3, 2, 0xf0, &[0x1f, 7]), scope(4, 0, 0, &[0x1e, 6])]),
        reserved(0x7b00_0000, 0x7b0f_ffff, &[scope(1, 0, 0, &[0x14, 0])]),
        structure(2, &[vec![0; 4], scope(2, 0, 0, &[1, 0])]),
        structure(3, &[vec![0; 16]]),
        name(1, b"\\_SB.PCI0.I2C0\0\0\0"),
        structure(5, &[vec![0; 4], scope(1, 0, 0, &[2, 0])]),
        structure(6, &[vec![0; 4]]),
    ])
}

/// Parses a table with a flaw.
fn told(structures: &[Vec<u8>]) -> (Dmar, Vec<Flaw>) {
    let dmar = Dmar::parse(&dmar(structures)).unwrap();
    let flaws = dmar.flaws.clone();
    (dmar, flaws)
}

fn registers(dmar: &Dmar) -> Vec<u64> {
    dmar.units.iter().map(|unit| unit.registers).collect()
}

fn unit_of(dmar: &Dmar, device: u16) -> Option<u64> {
    dmar.unit_of(0, device, |_| None).map(|unit| unit.registers)
}

const FIRST: u64 = 0xfed9_0000;
const OTHERS: u64 = 0xfed9_1000;
const GPU: u16 = 2 << 3;

/// Offset of the first structure; its scopes begin 16 bytes behind.
const AT: usize = 48;

#[test]
fn units_scopes_names_and_reserved_memory() {
    let dmar = Dmar::parse(&example()).unwrap();
    assert_eq!((dmar.address_bits, dmar.units.len(), dmar.refused.len()), (39, 2, 0));
    let [first, second] = dmar.units.as_slice() else { panic!("two units") };
    assert_eq!((first.registers, first.others, first.scopes.len()), (FIRST, false, 2));
    assert_eq!((second.registers, second.others, second.scopes.len()), (OTHERS, true, 0));
    assert_eq!((first.segment, first.registers_len), (0, 4096));
    let buses = |bridge: u16| (bridge == 0x1c << 3 | 1).then_some((3, 4));
    assert_eq!(first.scopes[0].device(buses), Some(3 << 8 | 2 << 3));
    assert_eq!(first.scopes[0].device(|_| None), None);
    assert_eq!(first.scopes[1].kind, DmarScopeKind::Namespace(1));
    assert_eq!(first.scopes[1].device(|_| None), Some(0x15 << 3 | 2));
    assert_eq!(dmar.names, [(1, String::from("\\_SB.PCI0.I2C0"))]);
    let (segment, scope, region) = &dmar.reserved[0];
    assert_eq!((*segment, scope.device(|_| None)), (0, Some(0x14 << 3)));
    assert_eq!(region.range, IovaRange::new(Iova::new(0x7b00_0000), 1 << 20).unwrap());
    assert_eq!(region.permissions, Permissions::READ_WRITE);
    let of = |device| dmar.unit_of(0, device, buses).map(|unit| unit.registers);
    assert_eq!(
        [of(3 << 8 | 2 << 3), of(0x15 << 3 | 2), of(3 << 8), of(GPU)].map(Option::unwrap),
        [FIRST, FIRST, OTHERS, OTHERS]
    );
    assert_eq!(dmar.unit_of(1, GPU, buses), None);
}

#[test]
fn a_device_is_asked_for_by_its_number() {
    let dmar = Dmar::parse(&example()).unwrap();
    let of = |segment, device| dmar.reserved_for(segment, device, |_| None).count();
    assert_eq!((of(0, 0x14 << 3), of(0, 0x14 << 3 | 1), of(1, 0x14 << 3)), (1, 0, 0));
    // The bridge 00:1c.1 leads to the buses 3 and 4, and its scope covers all devices behind it.
    let buses = |bridge: u16| (bridge == 0x1c << 3 | 1).then_some((3, 4));
    let scope = DmarScope { kind: DmarScopeKind::Bridge, bus: 0, path: vec![(0x1c, 1)] };
    let covered = [0x1c << 3 | 1, 3 << 8, 4 << 8 | 0xff].map(|device| scope.covers(device, buses));
    assert_eq!(covered, [true; 3]);
    let beside = [0x1c << 3, 2 << 8, 5 << 8].map(|device| scope.covers(device, buses));
    assert_eq!(beside, [false; 3]);
    // A bridge that is not set up reports bus 0.
    assert!(!scope.covers(0, |_| Some((0, 0))));
    assert!(!DmarScope { kind: DmarScopeKind::Endpoint, ..scope }.covers(3 << 8, buses));
}

#[test]
fn whatever_firmware_writes_is_read_inside_its_bytes() {
    spoil(&example(), Dmar::parse, |dmar| &dmar.flaws);
}

#[test]
fn a_unit_says_how_many_registers_it_has() {
    let mut sized = unit(true, 0, OTHERS, &[]);
    sized[5] = 0x34;
    let (dmar, flaws) = told(&[sized]);
    assert_eq!((dmar.units[0].registers_len, flaws), (16 * 4096, vec![]), "the upper bits are reserved");
}

#[cfg(not(watched))]
#[test]
fn what_is_read_where_a_byte_is_another() {
    write_down("acpi-dmar", &example(), Dmar::parse);
}

#[test]
fn cases_of_firmware() {
    let read = |case: &[u8]| Dmar::parse(case).unwrap();
    let backwards = read(include_bytes!("cases/d01-rmrr-backwards.dmar"));
    assert_eq!((registers(&backwards).len(), backwards.reserved.len()), (1, 0));
    let region = Flaw::RegionBackwards { offset: 0x40, first: 0x7b00_0000, last: 0x7aff_ffff };
    assert_eq!(backwards.flaws, [region]);

    let ended = read(include_bytes!("cases/d03-zero-length-struct.dmar"));
    assert_eq!(unit_of(&ended, GPU), Some(0xfed4_0000));
    assert_eq!(ended.flaws, [Flaw::Length { offset: 0x40, len: 0, least: 4, left: 8 }]);

    let at_0 = read(include_bytes!("cases/d04-drhd-at-0.dmar"));
    assert_eq!((at_0.units.len(), at_0.refused.len(), unit_of(&at_0, GPU)), (0, 1, None));
    assert_eq!(at_0.flaws, [Flaw::Registers { offset: 0x30, registers: 0 }]);

    let namespace = read(include_bytes!("cases/d06-namespace-only.dmar"));
    let serial = 0x15 << 3;
    assert_eq!(namespace.flaws, []);
    assert_eq!(
        (unit_of(&namespace, serial), unit_of(&namespace, GPU)),
        (Some(0xfed4_1000), Some(0xfed4_0000))
    );
    assert_eq!(namespace.names, [(1, String::from("\\_SB.PCI0.I2C0"))]);
    let ranges: Vec<_> = namespace.reserved_for(0, serial, |_| None).map(|region| region.range).collect();
    assert_eq!(ranges, [IovaRange::new(Iova::new(0x7c00_0000), 1 << 20).unwrap()]);

    let overlap = read(include_bytes!("cases/d09-rmrr-overlap-same-device.dmar"));
    let regions = overlap.reserved_for(0, 0x1d << 3, |_| None);
    let merged = Reserved::merged(regions, portcullis::addr::PageSize::SIZE_4K).unwrap();
    assert_eq!(merged.iter().map(|region| region.range.len()).collect::<Vec<_>>(), [0x2000]);
    assert_eq!(overlap.flaws, []);
}

#[test]
fn regions_that_are_none_are_told_and_not_used() {
    let for_gpu = [scope(1, 0, 0, &[2, 0])];
    let (dmar, flaws) = told(&[
        unit(true, 0, OTHERS, &[]),
        reserved(0, 0, &for_gpu),
        reserved(0, 0xfff, &for_gpu),
        reserved(0, u64::MAX, &for_gpu),
        reserved(0x8000_0000, 0x8000_0fff, &[]),
        reserved(0x8000_0000, 0x8000_0fff, &[scope(3, 0, 0, &[2, 0])]),
    ]);
    assert_eq!((dmar.reserved.len(), registers(&dmar)), (0, vec![OTHERS]));
    let at = |index: usize| 64 + 32 * index;
    let error = AddrError::Wraps { start: 0, len: u64::MAX };
    assert_eq!(
        flaws,
        [
            Flaw::PageZero { offset: at(0) },
            Flaw::PageZero { offset: at(1) },
            Flaw::Region { offset: at(2), error },
            Flaw::ForNobody { offset: at(3) },
            Flaw::ForNobody { offset: at(3) + 24 },
        ]
    );
}

#[test]
fn a_region_of_parts_of_pages_is_used_and_told() {
    let (dmar, flaws) = told(&[reserved(0x8000_0800, 0x8000_0fff, &[scope(1, 0, 0, &[2, 0])])]);
    let range = dmar.reserved[0].2.range;
    assert_eq!((range.start().get(), range.len()), (0x8000_0800, 0x800));
    assert_eq!(flaws, [Flaw::Unaligned { offset: AT, range }]);
    // The low memory of a PC.
    let (dmar, flaws) = told(&[reserved(0, 0x9_ffff, &[scope(1, 0, 0, &[2, 0])])]);
    assert_eq!((dmar.reserved.len(), flaws), (1, vec![]));
}

#[test]
fn the_devices_of_a_unit_that_is_refused_are_behind_no_other() {
    for nowhere in [0, u64::MAX, 0xffff_ffff, 0xfed9_0800, u64::MAX - 0xfff] {
        let mut gone = unit(false, 0, nowhere, &[scope(1, 0, 0, &[2, 0])]);
        // The registers extend beyond the last address.
        gone[5] = 1;
        let (dmar, flaws) = told(&[gone, unit(true, 0, OTHERS, &[])]);
        assert_eq!(registers(&dmar), [OTHERS], "{nowhere:#x}");
        assert_eq!((unit_of(&dmar, GPU), unit_of(&dmar, 0)), (None, Some(OTHERS)));
        assert_eq!(flaws, [Flaw::Registers { offset: AT, registers: nowhere }]);
    }
    // Even if another structure names them, too.
    let gpu = [scope(1, 0, 0, &[2, 0])];
    let (dmar, _) = told(&[unit(false, 0, 0, &gpu), unit(true, 0, OTHERS, &gpu)]);
    assert_eq!(unit_of(&dmar, GPU), None);
}

#[test]
fn a_unit_whose_devices_are_not_known_is_refused_and_none_is_in_front_of_others() {
    let gpu = scope(1, 0, 0, &[2, 0]);
    let disk = scope(1, 0, 0, &[7, 0]);
    let zero = vec![1, 0, 0, 0, 0, 0];
    let long = vec![1, 9, 0, 0, 0, 0, 3, 0];
    for wrong in [zero, long, vec![1, 8], vec![1]] {
        let refused = unit(false, 0, FIRST, &[gpu.clone(), wrong.clone()]);
        let others = |segment, registers| unit(true, segment, registers, core::slice::from_ref(&disk));
        let (dmar, flaws) = told(&[refused.clone(), others(0, OTHERS), others(1, OTHERS + 0x1000)]);
        assert_eq!(registers(&dmar), [OTHERS, OTHERS + 0x1000]);
        // The unit of all others has the devices that it names.
        assert_eq!(
            [unit_of(&dmar, GPU), unit_of(&dmar, 3 << 3), unit_of(&dmar, 7 << 3)],
            [None, None, Some(OTHERS)]
        );
        assert!(dmar.unit_of(1, GPU, |_| None).is_some(), "another segment");
        let at = AT + refused.len();
        assert!(matches!(flaws[0], Flaw::Length { offset: 0x48, least: 6, .. }), "{flaws:?}");
        assert_eq!(flaws[1..], [Flaw::Devices { offset: AT }, Flaw::Others { offset: at, segment: 0 }]);
        // The unit of all others needs no scopes.
        let (dmar, flaws) = told(&[unit(true, 0, OTHERS, core::slice::from_ref(&wrong))]);
        assert_eq!((unit_of(&dmar, GPU), flaws.len()), (Some(OTHERS), 1), "{flaws:?}");
        // A region keeps the devices that could be read.
        let (dmar, flaws) = told(&[reserved(0x8000_0000, 0x8000_0fff, &[gpu.clone(), wrong])]);
        assert_eq!((dmar.reserved_for(0, GPU, |_| None).count(), flaws.len()), (1, 1), "{flaws:?}");
    }
    // In several segments, in any order.
    let refused = |segment| unit(false, segment, FIRST, &[vec![1]]);
    let all = |segment: u64| unit(true, segment, OTHERS + (segment << 16), &[]);
    let (dmar, _) = told(&[
        refused(5),
        refused(2),
        refused(9),
        all(9),
        all(1),
        all(2),
        refused(0),
        all(5),
        all(0),
        all(7),
    ]);
    let others: Vec<_> = dmar.units.iter().filter(|unit| unit.others).map(|unit| unit.segment).collect();
    assert_eq!((others, dmar.refused.len()), (vec![1, 7], 4));
    // Too short for the register address and the segment.
    for len in [4, 8, 15] {
        let mut short = unit(false, 0, FIRST, &[]);
        short.truncate(len);
        short[2] = len as u8;
        let (dmar, flaws) = told(&[short, unit(true, 2, OTHERS, &[])]);
        assert_eq!((registers(&dmar), dmar.refused.len()), (vec![OTHERS], 1));
        assert_eq!(dmar.unit_of(2, GPU, |_| None), None);
        let others = Flaw::Others { offset: AT + len, segment: 2 };
        assert_eq!(flaws, [Flaw::Devices { offset: AT }, Flaw::Short { offset: AT, len }, others]);
    }
}

#[test]
fn what_is_short_or_unknown_is_passed_over() {
    let gpu = scope(1, 0, 0, &[2, 0]);
    let (dmar, flaws) = told(&[
        structure(7, &[vec![1; 60]]),
        structure(1, &[vec![0; 19]]),
        structure(4, &[vec![0; 3]]),
        unit(true, 0, OTHERS, &[]),
        unit(
            false,
            1,
            FIRST,
            &[
                scope(6, 0, 0, &[3, 0]),
                scope(1, 0, 0, &[]),
                scope(1, 0, 0, &[32, 0]),
                scope(1, 0, 0, &[4, 8]),
                scope(1, 0, 0, &[4, 0, 5]),
                gpu,
            ],
        ),
    ]);
    let unit = dmar.unit_of(1, GPU, |_| None).unwrap();
    assert_eq!((registers(&dmar), unit.scopes.len()), (vec![OTHERS, FIRST], 1));
    let scopes = 48 + 64 + 23 + 7 + 16 + 16;
    assert_eq!(
        flaws,
        [
            Flaw::Kind { offset: AT, kind: 7 },
            Flaw::Short { offset: AT + 64, len: 23 },
            Flaw::Short { offset: AT + 64 + 23, len: 7 },
            Flaw::Kind { offset: scopes, kind: 6 },
            Flaw::Path { offset: scopes + 8 },
            Flaw::Path { offset: scopes + 14 },
            Flaw::Path { offset: scopes + 22 },
            Flaw::Path { offset: scopes + 30 },
        ]
    );
}

#[test]
fn what_goes_beyond_the_table_ends_the_walk_and_the_rest_is_kept() {
    let last = |len: u64| [le(&[1, len], 2), vec![0; 28]].concat();
    for len in [1, 3, 33, 0xffff] {
        let (dmar, flaws) = told(&[unit(true, 0, OTHERS, &[]), last(len)]);
        assert_eq!(unit_of(&dmar, GPU), Some(OTHERS));
        assert_eq!(flaws, [Flaw::Length { offset: AT + 16, len: len as usize, least: 4, left: 32 }]);
    }
}

#[test]
fn a_unit_that_is_there_twice_is_one() {
    let (dmar, flaws) = told(&[
        unit(false, 0, FIRST, &[scope(1, 0, 0, &[2, 0])]),
        unit(true, 0, OTHERS, &[]),
        unit(false, 0, FIRST, &[scope(1, 0, 0, &[3, 0])]),
        unit(true, 0, OTHERS + 0x1000, &[]),
        unit(true, 1, OTHERS + 0x2000, &[]),
    ]);
    assert_eq!(registers(&dmar), [FIRST, OTHERS, OTHERS + 0x1000, OTHERS + 0x2000]);
    assert_eq!(
        [unit_of(&dmar, GPU), unit_of(&dmar, 3 << 3), unit_of(&dmar, 4 << 3)].map(Option::unwrap),
        [FIRST, FIRST, OTHERS]
    );
    let at = [AT, AT + 24, AT + 40, AT + 64];
    let twice = |first: usize, second: usize| Flaw::Twice { offset: at[second], first: at[first] };
    assert_eq!(flaws, [twice(0, 2), twice(1, 3)]);
    assert!(dmar.unit_of(1, GPU, |_| None).is_some());
    // The merged unit has INCLUDE_PCI_ALL if one of the two has it.
    for others in [[false, true], [true, false]] {
        let (dmar, _) = told(&others.map(|others| unit(others, 0, FIRST, &[scope(1, 0, 0, &[2, 0])])));
        assert_eq!((registers(&dmar), unit_of(&dmar, 9 << 3)), (vec![FIRST], Some(FIRST)), "{others:?}");
    }
}

#[test]
fn names_are_text_or_none() {
    let serial = |number: u8| scope(5, number, 0, &[0x15, number]);
    let (dmar, flaws) = told(&[
        unit(true, 0, OTHERS, &[serial(1), serial(2), serial(2), serial(4)]),
        name(1, b"noend"),
        name(2, b"\\_SB.\x1b[31m\0"),
        name(3, b"\0"),
        name(4, b"\\_SB.UAR0\0\xff\xff"),
    ]);
    assert_eq!(dmar.names, [(4, String::from("\\_SB.UAR0"))]);
    assert_eq!(unit_of(&dmar, 0x15 << 3 | 1), Some(OTHERS), "the device is there");
    let at = AT + 16 + 4 * 8;
    let names = [at, at + 13, at + 13 + 19].map(|offset| Flaw::Name { offset });
    assert_eq!(flaws[..3], names);
    assert_eq!(flaws[3..], [1, 2].map(|number| Flaw::Nameless { number }));
}

#[test]
fn a_width_below_a_page_is_told() {
    let mut narrow = dmar(&[]);
    narrow[36] = 10;
    seal(&mut narrow);
    let dmar = Dmar::parse(&narrow).unwrap();
    assert_eq!((dmar.address_bits, dmar.flaws), (11, vec![Flaw::AddressBits { bits: 11 }]));
}

#[test]
fn a_device_without_a_name_is_told_wherever_it_stands() {
    let of = |number| scope(5, number, 0, &[0x15, 2]);
    // Of a unit, of a refused one, and of a region.
    let (_, flaws) = told(&[
        unit(false, 0, 0xfed9_0000, &[of(1)]),
        unit(false, 0, 0, &[of(2)]),
        reserved(0x7b00_0000, 0x7b0f_ffff, &[of(3)]),
    ]);
    let nameless = flaws.into_iter().filter(|flaw| matches!(flaw, Flaw::Nameless { .. }));
    assert_eq!(nameless.collect::<Vec<_>>(), [1, 2, 3].map(|number| Flaw::Nameless { number }));
}
