//! What the corpora of `acpi` and `units` begin with: tables that are right, of every kind of
//! structure that is read; and lives of drivers over units that are well.
//!
//! After a change, `cargo test -p portcullis-fuzz --test fuzz -- --ignored write_the_seeds` writes
//! the files anew.

use std::path::{Path, PathBuf};

use portcullis_hw::acpi::{Dmar, Iort, Ivrs};

/// The step of a life that reads the log of faults.
const FAULTS: u8 = 11;

fn le(words: &[u64], bytes: usize) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()[..bytes].to_vec()).collect()
}

/// A table with a right length and checksum.
fn table(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let mut table = [&name[..], &le(&[36 + body.len() as u64], 4), &[1, 0], &[0; 26], body].concat();
    table[9] = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    table
}

/// Kinds 0 and 1 (units, reserved memory) and two that are passed over; scopes of devices, bridges,
/// interrupt controllers.
fn dmar() -> Vec<u8> {
    let scope = |kind: u8, path: &[u8]| [&[kind, 6 + path.len() as u8, 0, 0, 7, 0x80][..], path].concat();
    let named = scope(5, &[0x15, 2]);
    let structure = |kind: u64, head: &[u8], rest: &[u8]| {
        [&le(&[kind, 4 + (head.len() + rest.len()) as u64], 2), head, rest].concat()
    };
    let unit = |flags: u8, at: u64, scopes: &[u8]| {
        structure(0, &[&[flags, 0, 0, 0][..], &le(&[at], 8)].concat(), scopes)
    };
    let devices =
        [scope(1, &[2, 0]), scope(2, &[0x1c, 4, 0, 1]), scope(3, &[0x1e, 7]), named.clone()].concat();
    let reserved = |first: u64, last: u64, scopes: &[u8]| {
        structure(1, &[&[0, 0, 0, 0][..], &le(&[first, last], 8)].concat(), scopes)
    };
    let body = [
        vec![38, 1],
        vec![0; 10],
        unit(0, 0xfed9_0000, &devices),
        unit(1, 0xfed9_1000, &[]),
        reserved(0x8b00_0000, 0x8f7f_ffff, &scope(1, &[2, 0])),
        reserved(0x8f70_0000, 0x8f8f_ffff, &[scope(1, &[2, 0]), named].concat()),
        structure(2, &[0, 0, 0, 0], &scope(2, &[1, 0])),
        structure(4, &[0, 0, 0, 7], b"\\_SB.UAR0\0\0\0"),
    ];
    table(b"DMAR", &body.concat())
}

/// The three generations of units with every length of entry, and the three kinds of memory.
fn ivrs() -> Vec<u8> {
    let block = |kind: u8, flags: u8, data: &[u8]| {
        [&[kind, flags][..], &le(&[4 + data.len() as u64], 2), data].concat()
    };
    let entries = [
        &[1, 0, 0, 0][..],
        &[2, 0x10, 0, 0],
        &[3, 0x20, 0, 0, 4, 0x2f, 0, 0],
        &[0x42, 0x30, 0, 0, 0, 0x31, 0, 0],
        &[0x43, 0x40, 0, 0, 0, 0x41, 0, 0, 4, 0x4f, 0, 0],
        &[0x46, 0x50, 0, 0, 0, 0, 0, 0],
        &[0x48, 0, 0, 0, 7, 0xa0, 0, 1],
    ];
    let named = [&[0xf0_u8, 0x60, 0, 0][..], &[b'h'; 16], &[0, 2, b'u', b'i']].concat();
    let unit = |kind: u8, number: u64, at: u64, extra: usize, named: &[u8]| {
        let head = [le(&[number, 0x40], 2), le(&[at], 8), le(&[0, 0x13], 2), le(&[0x800], 4)].concat();
        block(kind, 0xb0, &[&head, &vec![0; extra], &entries.concat(), named].concat())
    };
    let memory = |kind: u8, flags: u8, first: u64, last: u64| {
        let range = le(&[0x9000_0000, 0x2000], 8);
        block(kind, flags, &[le(&[first, last], 2), vec![0; 8], range].concat())
    };
    let body = [
        vec![0; 12],
        unit(0x10, 2, 0xfeb8_0000, 0, &[]),
        unit(0x11, 2, 0xfeb8_0000, 16, &[]),
        unit(0x40, 0x4002, 0xfec8_0000, 16, &named),
        memory(0x20, 0b0111, 0, 0),
        memory(0x21, 0b1000, 0x10, 0),
        memory(0x22, 0b0011, 0x20, 0x2f),
    ];
    table(b"IVRS", &body.concat())
}

/// A group for interrupts, an SMMUv3, one of two root complexes behind it, a device, and reserved
/// memory.
fn iort() -> Vec<u8> {
    fn node(kind: u8, mappings: &[[u64; 5]], data: &[u8]) -> Vec<u8> {
        let offset = 16 + data.len();
        let len = offset + mappings.len() * 20;
        let rest: Vec<u8> = mappings.iter().flat_map(|mapping| le(mapping, 4)).collect();
        [
            &[kind][..],
            &le(&[len as u64], 2),
            &[1],
            &le(&[0, mappings.len() as u64, offset as u64], 4),
            data,
            &rest,
        ]
        .concat()
    }
    let its = node(0, &[], &le(&[1, 0], 4));
    let smmu_at = 48 + its.len() as u64;
    let smmu = node(4, &[[0, 0xffff, 0, 48, 0]], &[le(&[0x2b40_0000], 8), le(&[1], 4), vec![0; 40]].concat());
    let root = |segment: u64, mappings: &[[u64; 5]]| {
        node(2, mappings, &[le(&[0], 8), le(&[1, segment, 64, 0], 4)].concat())
    };
    let nodes = [
        its,
        smmu,
        root(0, &[[0, 0xffff, 0, smmu_at, 0]]),
        root(2, &[[0x100, 0xff, 0x1100, smmu_at, 0], [0x200, 0, 0x2000, smmu_at, 0]]),
        root(3, &[[0, 0, 0x3000, smmu_at, 1]]),
        node(1, &[[0, 0, 5, smmu_at, 1]], &[le(&[0, 0, 0], 4), b"\0\\DEV\0\0\0".to_vec()].concat()),
        node(
            6,
            &[[0, 7, 3, smmu_at, 1]],
            &[le(&[0, 1, 28], 4), le(&[0x8000_0000, 0x1_0000], 8), le(&[0], 4)].concat(),
        ),
    ];
    table(b"IORT", &[le(&[nodes.len() as u64, 48, 0], 4), nodes.concat()].concat())
}

/// Reserved memory whose regions and runs of streams are the same bytes.
fn iort_of_many() -> Vec<u8> {
    let (mut smmu, mut memory) = (vec![4, 68, 0], vec![6]);
    smmu.resize(68, 0);
    smmu[16..24].copy_from_slice(&le(&[0x905_0000], 8));
    memory.extend(le(&[28 + 20 * 100], 2));
    memory.extend([[0; 5].to_vec(), le(&[100, 28, 0, 100, 28], 4)].concat());
    (0..100).for_each(|_| memory.extend(le(&[0x1000, 0, 0x1000, 48, 0], 4)));
    table(b"IORT", &[le(&[2, 48, 0], 4), smmu, memory].concat())
}

/// The life of a unit of a kind that begins, goes on, and ends well: each call once, then faults of
/// several kinds.
fn life(kind: u8, records: &[&[u8]]) -> Vec<u8> {
    // A kind, how; no lies, and no changes.
    let mut life = vec![kind, 0, 0, 0];
    // Enable; a device to a table at 4 MiB, and another that passes through; two requests, and one.
    let small = |number: u8| [0, number];
    life.push(0);
    life.extend([&[1][..], &small(8), &small(1), &[22 << 2 | 1, 0], &[1]].concat());
    life.extend([&[1][..], &small(16), &small(2), &small(0), &[0]].concat());
    life.extend(
        [
            &[3, 2][..],
            &[2],
            &[14 << 2 | 1, 0],
            &[12 << 2 | 1, 0],
            &[1],
            &[1],
            &small(8),
            &small(0),
            &small(0),
            &[1],
        ]
        .concat(),
    );
    life.extend([4, 1]);
    for record in records {
        life.extend_from_slice(record);
    }
    life.extend([FAULTS, 8]);
    life.extend([&[2][..], &small(8)].concat());
    life
}

/// Any number, of 8 bytes.
fn whole(number: u64) -> Vec<u8> {
    [&[3][..], &number.to_be_bytes()].concat()
}

/// Records of three words from the first on.
fn record(index: u8, words: [u64; 3]) -> Vec<u8> {
    [vec![8, index], words.into_iter().flat_map(whole).collect()].concat()
}

/// Register `index` of the kind's says this from now on; one that reads as a lie does, for ever.
fn register(index: u8, value: u64) -> Vec<u8> {
    [vec![5, index], whole(value)].concat()
}

fn lie(index: u8, set: u64) -> Vec<u8> {
    [vec![6, index], whole(u64::MAX), whole(set), vec![0xff]].concat()
}

/// The life of a unit that lies from the beginning on.
fn liar(kind: u8, lies: &[(u8, u64)]) -> Vec<u8> {
    let mut life = vec![kind, 0, lies.len() as u8];
    lies.iter().for_each(|(index, set)| life.extend(&lie(*index, *set)[1..]));
    life.extend([&[0, 0, FAULTS, 200][..], &[0, FAULTS, 200]].concat());
    life
}

/// The life of a unit of a kind that reports each code.
fn reports(kind: u8, codes: &[u16]) -> Vec<u8> {
    let report =
        |code: &u16| [&[9, (code >> 8) as u8, *code as u8][..], &[0, 7, 0, 9, 0, 5], &[FAULTS, 1]].concat();
    let reports: Vec<Vec<u8>> = codes.iter().map(report).collect();
    life(kind, &reports.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// The first byte of a table of the kind `which` whose length and checksum follow its changes.
fn sealed(which: u8) -> u8 {
    (0..=255_u8).find(|head| head % 3 == which && head & 28 == 28).unwrap_or(28)
}

/// Where tables are that have something odd.
fn cases_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../portcullis-hw/src/acpi/tests/cases")
}

fn as_is(head: u8, table: Vec<u8>) -> Vec<u8> {
    [vec![head], table].concat()
}

/// Tables that firmware was seen to write, of which each has something odd.
fn cases() -> impl Iterator<Item = (&'static str, String, Vec<u8>)> {
    let cases = std::fs::read_dir(cases_path()).unwrap().map(|case| case.unwrap().path());
    cases.map(|case| {
        let [name, kind] = [case.file_stem(), case.extension()].map(|part| part.unwrap().to_str().unwrap());
        let which = ["dmar", "ivrs", "iort"].iter().position(|known| *known == kind).unwrap() as u8;
        ("acpi", format!("case-{name}"), as_is(sealed(which), std::fs::read(&case).unwrap()))
    })
}

/// All seeds but those: the target, the name, the bytes.
fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    // A table as it is, and one whose length and checksum follow its changes.
    let mut all = Vec::new();
    for (which, name, made) in [(0, "dmar", dmar()), (1, "ivrs", ivrs()), (2, "iort", iort())] {
        all.push(("acpi", name, as_is(which, made.clone())));
        all.push((
            "acpi",
            ["dmar-sealed", "ivrs-sealed", "iort-sealed"][usize::from(which)],
            as_is(sealed(which), made),
        ));
    }
    all.push(("acpi", "iort-many", as_is(2, iort_of_many())));
    let vtd_fault = [register(14, 0x8000_0000), register(17, 1 << 31 | 1 << 30 | 6), register(7, 2)];
    all.push(("units", "vtd", life(0, &vtd_fault.each_ref().map(Vec::as_slice))));
    all.push(("units", "vtd-stops", life(0, &[&register(7, 1 << 4), &[4, 1], &lie(7, 1 << 6), &[4, 1]])));
    // Faults that no write clears.
    all.push(("units", "vtd-faults-for-ever", liar(0, &[(7, 1 << 1), (16, 1 << 63)])));
    let amd_fault = [record(0, [2 << 60 | 1 << 52 | 7 << 32 | 0x28, 0x80_0010, 0]), register(7, 16)];
    all.push(("units", "amdvi", life(1, &amd_fault.each_ref().map(Vec::as_slice))));
    all.push((
        "units",
        "amdvi-stops",
        life(1, &[&register(9, 0), &[4, 1], &register(9, 1 | 1 << 4), &[FAULTS, 8]]),
    ));
    all.push(("units", "amdvi-faults-for-ever", liar(1, &[(7, 0xff0)])));
    let riscv_fault = [record(0, [0x28 << 40 | 3 << 34 | 15, 0, 0x80_0123]), register(7, 1)];
    all.push(("units", "riscv", life(2, &riscv_fault.each_ref().map(Vec::as_slice))));
    all.push(("units", "riscv-stops", life(2, &[&register(8, 1 << 16 | 1 << 10 | 1), &[4, 1]])));
    let smmu_fault = [record(0, [0x28 << 32 | 0x10, 1 << 35, 0x80_0123]), register(16, 1)];
    all.push(("units", "smmuv3", life(3, &smmu_fault.each_ref().map(Vec::as_slice))));
    all.push(("units", "smmuv3-stops", life(3, &[&register(11, 1), &[4, 1], &lie(15, 1 << 24)])));
    // Of each kind's codes those that are told apart.
    let codes: [&[u16]; 4] = [
        &[1, 2, 3, 4, 5, 6, 7, 0x0b, 0x0c, 0x30, 0x39, 0x50, 0x59, 0x71, 0x79, 0x80, 0x81, 0xff],
        &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 15],
        &[1, 4, 5, 6, 7, 12, 13, 15, 20, 21, 23, 256, 257, 258, 259, 262, 263, 266, 267, 271],
        &[1, 2, 3, 4, 5, 6, 7, 8, 9, 0x0a, 0x0b, 0x10, 0x11, 0x12, 0x13, 0x20, 0x21, 0x24, 0x25],
    ];
    let names = ["vtd-reports", "amdvi-reports", "riscv-reports", "smmuv3-reports"];
    for ((kind, codes), name) in (0..).zip(codes).zip(names) {
        all.push(("units", name, reports(kind, codes)));
    }
    // A configuration as it is, no script, a domain, attach, map, unmap, an event, and detach.
    let mut virtio = vec![4, 0, 0, 0, 0];
    // There is no mapper to choose before the first is made.
    virtio.extend([vec![1, 1], whole(1), vec![1, 0, 2], vec![1, 0, 5], whole(0x1_0000), vec![3]].concat());
    virtio.extend(
        [vec![1, 0, 7], whole(0), whole(0x102 << 32 | 2), whole(1), whole(0x8_0000), vec![1, 0, 8, 4]]
            .concat(),
    );
    virtio.extend([vec![1, 0, 6], whole(0x1_0000), vec![3], vec![1, 0, 4], vec![1, 0, 3]].concat());
    // The same with a device that answers what was not asked, with an error, and not at all.
    let mut liar = virtio.clone();
    let script = [0, 0, 0, 0, 0xd4, 0, 5, 0xc0, 0, 0xe0, 3, 0, 0xff, 0];
    liar.splice(4..5, [&[script.len() as u8][..], &script].concat());
    all.push(("units", "virtio-liar", liar));
    all.push(("units", "virtio", virtio));
    all
}

fn all() -> impl Iterator<Item = (&'static str, String, Vec<u8>)> {
    seeds().into_iter().map(|(target, name, bytes)| (target, name.to_owned(), bytes)).chain(cases())
}

fn path(target: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target).join(name)
}

#[test]
fn tables_of_the_corpus_are_right_and_say_what_they_are_to() {
    let dmar = Dmar::parse(&dmar()).unwrap();
    assert_eq!((dmar.units.len(), dmar.reserved.len(), dmar.units[0].scopes.len()), (2, 3, 3));
    let ivrs = Ivrs::parse(&ivrs()).unwrap();
    assert_eq!((ivrs.units.len(), ivrs.reserved.len()), (2, 3));
    let [unit, newest] = ivrs.units.as_slice() else { panic!("two units") };
    assert_eq!((unit.devices.len(), unit.aliases.len(), newest.named.len()), (8, 2, 1));
    let iort = Iort::parse(&iort()).unwrap();
    assert_eq!((iort.units.len(), iort.roots.len(), iort.reserved.len()), (1, 3, 1));
    assert_eq!((iort.components.len(), iort.components[0].streams.len()), (1, 1));
    assert_eq!(iort.stream(3, 0x77).map(|led| led.1), Some(0x3000));
    assert_eq!([&dmar.flaws, &ivrs.flaws, &iort.flaws], [&[]; 3]);
    assert_eq!(iort.stream(2, 0x128).map(|led| led.1), Some(0x1128));
    assert_eq!(iort.stream(2, 0x200).map(|led| led.1), Some(0x2000));
}

#[test]
fn the_seeds_are_in_the_corpus() {
    for (target, name, bytes) in all() {
        let found = std::fs::read(path(target, &name)).unwrap_or_default();
        assert_eq!(found, bytes, "{target}/{name}: write_the_seeds");
    }
}

#[test]
#[ignore = "writes files"]
fn write_the_seeds() {
    for (target, name, bytes) in all() {
        std::fs::write(path(target, &name), bytes).unwrap();
    }
}
