use portcullis::addr::AddrError;

use super::*;

/// Offset of the first node.
const AT: u64 = 48;
/// Node types, and their lengths without mappings.
const SMMU: (u8, u64) = (4, 68);
const ROOT: (u8, u64) = (2, 36);
const ITS: (u8, u64) = (0, 24);

const FIRST: u64 = 0x0905_0000;
const SECOND: u64 = 0x0909_0000;

fn iort(nodes: &[Vec<u8>]) -> Vec<u8> {
    table(b"IORT", &[le(&[nodes.len() as u64, AT, 0], 4), nodes.concat()].concat())
}

/// Mappings: first, count minus one, output, target, flags.
type Mapping = [u64; 5];

fn node(kind: u8, data: &[u8], mappings: &[Mapping]) -> Vec<u8> {
    let at = 16 + data.len() as u64;
    let len = at + 20 * mappings.len() as u64;
    let counts = le(&[0, mappings.len() as u64, at], 4);
    [vec![kind], le(&[len], 2), vec![3], counts, data.to_vec(), le(&mappings.concat(), 4)].concat()
}

fn smmu(registers: u64) -> Vec<u8> {
    node(SMMU.0, &[le(&[registers], 8), le(&[1], 4), vec![0; 40]].concat(), &[])
}

fn root(segment: u64, mappings: &[Mapping]) -> Vec<u8> {
    node(ROOT.0, &[vec![0; 12], le(&[segment], 4), vec![48, 0, 0, 0]].concat(), mappings)
}

fn its() -> Vec<u8> {
    node(ITS.0, &le(&[1, 0], 4), &[])
}

/// Reserved memory: regions and their streams.
fn memory(regions: &[(u64, u64)], mappings: &[Mapping]) -> Vec<u8> {
    let regions: Vec<u8> =
        regions.iter().flat_map(|(start, len)| [le(&[*start, *len], 8), vec![0; 4]].concat()).collect();
    let count = regions.len() as u64 / 20;
    node(6, &[le(&[0, count, 28], 4), regions].concat(), mappings)
}

/// A device of the ACPI namespace.
fn component(name: &[u8], bits: u8, mappings: &[Mapping]) -> Vec<u8> {
    node(1, &[&[0; 12], &[bits][..], name].concat(), mappings)
}

/// An SMMU, a root complex whose devices 0x100 to 0x1ff go through it as streams from 0x1100 on, and a reserved page of stream 3.
fn example() -> Vec<u8> {
    iort(&[
        smmu(FIRST),
        root(2, &[[0x100, 0xff, 0x1100, AT, 0]]),
        memory(&[(0x8000_0000, 0x1_0000)], &[[0, 7, 3, AT, 1]]),
        its(),
        component(b"\\_SB.DPU0\0", 40, &[[0, 0, 9, AT, 1], [0, 1, 16, AT, 0]]),
    ])
}

fn told(nodes: &[Vec<u8>]) -> (Iort, Vec<Flaw>) {
    let iort = Iort::parse(&iort(nodes)).unwrap();
    let flaws = iort.flaws.clone();
    (iort, flaws)
}

/// The root complex of segment 0 with these mappings, whose fourth number is a unit or an ITS.
fn led(mappings: &[Mapping], devices: &[u16]) -> (Vec<Option<(u64, u32)>>, Vec<Flaw>) {
    let place = |mapping: &Mapping| {
        let [first, more, output, to, flags] = *mapping;
        [first, more, output, AT + SMMU.1 * to, flags]
    };
    let mappings: Vec<_> = mappings.iter().map(place).collect();
    let (iort, flaws) = told(&[smmu(FIRST), smmu(SECOND), its(), root(0, &mappings)]);
    let led = |device: &u16| iort.stream(0, *device).map(|(unit, stream)| (unit.registers, stream));
    (devices.iter().map(led).collect(), flaws)
}

/// Offsets of the mappings of `led`.
fn mapping(index: usize) -> usize {
    (AT + 2 * SMMU.1 + ITS.1 + ROOT.1) as usize + 20 * index
}

#[test]
fn units_streams_and_reserved_memory() {
    let iort = Iort::parse(&example()).unwrap();
    let [unit] = iort.units.as_slice() else { panic!("one unit") };
    assert_eq!((unit.registers, unit.coherent), (FIRST, true));
    assert_eq!(iort.stream(2, 0x128), Some((*unit, 0x1128)));
    assert_eq!((iort.stream(0, 0x128), iort.stream(2, 0x228)), (None, None));
    let [root] = iort.roots.as_slice() else { panic!("one root complex") };
    assert_eq!((root.segment, root.address_bits), (2, Some(48)));
    let [reserved] = iort.reserved.as_slice() else { panic!("one node") };
    assert_eq!(reserved.streams, [(*unit, (3, 3))], "a single one");
    let of =
        |stream| iort.reserved_for(unit, stream).map(|region| region.range.start().get()).collect::<Vec<_>>();
    assert_eq!((of(3), of(4)), (vec![0x8000_0000], vec![]));
}

#[test]
fn whatever_firmware_writes_is_read_inside_its_bytes() {
    spoil(&example(), Iort::parse, |iort| &iort.flaws);
}

#[cfg(not(watched))]
#[test]
fn what_is_read_where_a_byte_is_another() {
    write_down("acpi-iort", &example(), Iort::parse);
}

#[test]
fn cases_of_firmware() {
    let iort = Iort::parse(include_bytes!("cases/i01-count-not-minus-1.iort")).unwrap();
    let led = |device| iort.stream(0, device).map(|(unit, stream)| (unit.registers, stream));
    assert_eq!(
        [0xff, 0x100, 0x101].map(|device| led(device).unwrap()),
        [(0x0905_0000, 0xff), (0x0906_0000, 0x1_0000), (0x0906_0000, 0x1_0001)]
    );
    assert_eq!(iort.flaws, [Flaw::Overlap { first: 0xdc, second: 0xf0, id: 0x100 }]);

    let iort = Iort::parse(include_bytes!("cases/i03-rmr-zero-length.iort")).unwrap();
    let unit = iort.stream(0, 3).unwrap().0;
    let starts: Vec<_> = iort.reserved_for(&unit, 3).map(|region| region.range.start().get()).collect();
    assert_eq!(starts, [0x9b00_0000]);
    let error = AddrError::EmptyRange { start: 0x9a00_0000 };
    let range = iort.reserved[0].regions[0].range;
    assert_eq!(iort.flaws, [Flaw::Region { offset: 0xc8, error }, Flaw::Unaligned { offset: 0xdc, range }]);
}

#[test]
fn a_run_that_begins_with_a_device_wins_over_one_that_ends_with_it() {
    let lower = [0, 0x100, 0, 0, 0];
    let upper = [0x100, 0x100, 0x1_0000, 1, 0];
    let right = [Some((FIRST, 0xff)), Some((SECOND, 0x1_0000)), Some((SECOND, 0x1_0100))];
    let devices = [0xff, 0x100, 0x200];
    let at = |first: usize, second: usize, id| Flaw::Overlap {
        first: mapping(first),
        second: mapping(second),
        id,
    };
    assert_eq!(led(&[lower, upper], &devices), (right.to_vec(), vec![at(0, 1, 0x100)]));
    assert_eq!(led(&[upper, lower], &devices), (right.to_vec(), vec![at(1, 0, 0x100)]));
    // Three consecutive ones, in any order.
    let last = [0x200, 0x100, 0x2_0000, 0, 0];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let runs = order.map(|index| [lower, upper, last][index]);
        let (led, flaws) = led(&runs, &[0x100, 0x200, 0x300]);
        assert_eq!(led.iter().map(|led| led.unwrap().1).collect::<Vec<_>>(), [0x1_0000, 0x2_0000, 0x2_0100]);
        assert_eq!(flaws.len(), 2);
    }
    // A run of one device begins there.
    assert_eq!(led(&[lower, [0x100, 0, 5, 1, 0]], &[0x100]).0, [Some((SECOND, 5))]);
    // No range begins there: the first in the table wins.
    let upper = [0x100, 0xff, 0x1_0000, 0, 0];
    assert_eq!(
        led(&[[0x100, 0, 5, 1, 0], upper], &[0x100, 0x101]).0,
        [Some((SECOND, 5)), Some((FIRST, 0x1_0001))]
    );
    // A range that begins there may bypass the units.
    assert_eq!(led(&[lower, [0x100, 0xff, 0, 2, 0]], &[0xff, 0x100]).0, [Some((FIRST, 0xff)), None]);
    assert_eq!(led(&[lower], &[0x100, 0x101]), (vec![Some((FIRST, 0x100)), None], vec![]));
}

#[test]
fn of_runs_that_overlap_otherwise_the_first_in_the_table_wins() {
    let (one, other) = ([0, 0x1ff, 0, 0, 0], [0x100, 0xff, 0x1_0000, 1, 0]);
    let at = |first: usize, second: usize| Flaw::Overlap {
        first: mapping(first),
        second: mapping(second),
        id: 0x100,
    };
    let devices = [0x100, 0x180];
    assert_eq!(
        led(&[one, other], &devices),
        (vec![Some((FIRST, 0x100)), Some((FIRST, 0x180))], vec![at(0, 1)])
    );
    let second = vec![Some((SECOND, 0x1_0000)), Some((SECOND, 0x1_0080))];
    assert_eq!(led(&[other, one], &devices), (second, vec![at(1, 0)]));
    // Both end with the device, so neither has the count instead of the count minus one.
    assert_eq!(led(&[[0, 0xff, 0, 0, 0], [0x80, 0x7f, 0x1_0000, 1, 0]], &[0xff]).0, [Some((FIRST, 0xff))]);
}

#[test]
fn runs_of_two_root_complexes_of_one_segment_are_as_of_one() {
    let lower = [[0, 0x100, 0, AT, 0]];
    let upper = [[0x100, 0xff, 0x1_0000, AT, 0]];
    for roots in [[&lower, &upper], [&upper, &lower]] {
        let [one, other] = roots.map(|runs| root(0, runs));
        let (iort, flaws) = told(&[smmu(FIRST), one, other, root(1, &lower)]);
        let led = [0xff, 0x100].map(|device| iort.stream(0, device).map(|led| led.1));
        assert_eq!(led, [Some(0xff), Some(0x1_0000)]);
        assert!(matches!(flaws[..], [Flaw::Overlap { id: 0x100, .. }]), "{flaws:?}");
    }
}

#[test]
fn a_single_mapping_is_of_every_device() {
    let single = [0x42, 0, 0x77, 1, 1];
    let all = [0, 0x42, 0xffff];
    assert_eq!(led(&[single], &all), (vec![Some((SECOND, 0x77)); 3], vec![]));
    // The first in the table that has the device wins, unless it ends with it.
    let run = [0, 0x100, 0, 0, 0];
    let (led, flaws) = led(&[run, single], &[0xff, 0x100, 0x101]);
    assert_eq!(led, [Some((FIRST, 0xff)), Some((SECOND, 0x77)), Some((SECOND, 0x77))]);
    assert_eq!(flaws, [Flaw::Overlap { first: mapping(0), second: mapping(1), id: 0 }]);
}

#[test]
fn a_mapping_that_leads_to_no_unit_is_told() {
    let place = |to: u64| [[0, 0xff, 0, to, 0], [0x100, 0xff, 0x100, AT, 0]];
    let refers = AT + SMMU.1 + ROOT.1;
    // The header; inside a node; behind all nodes; the root complex itself; past the end.
    for to in [0, AT + 4, 0x1000, AT + SMMU.1, u64::from(u32::MAX)] {
        let (iort, flaws) = told(&[smmu(FIRST), root(0, &place(to))]);
        assert_eq!((iort.stream(0, 5), iort.stream(0, 0x105).map(|led| led.1)), (None, Some(0x105)));
        assert_eq!(flaws, [Flaw::Reference { offset: refers as usize, to: to as usize }]);
    }
    assert_eq!(led(&[[0, 0xff, 0xffff_fff0, 0, 0]], &[0xf, 0x10]).0, [Some((FIRST, 0xffff_ffff)), None]);
    assert_eq!(led(&[[0xff00, 0xffff_ffff, 0, 0, 0]], &[0xffff]).0, [Some((FIRST, 0xff))]);
}

#[test]
fn units_that_are_nowhere_or_twice() {
    for nowhere in [0, u64::MAX, 0x0905_0800, u64::MAX - 0xffff] {
        let runs = [[0, 0xff, 0, AT, 0], [0x100, 0xff, 0x100, AT + SMMU.1, 0]];
        let (iort, flaws) = told(&[smmu(nowhere), smmu(SECOND), root(0, &runs)]);
        assert_eq!((iort.units.len(), iort.refused.as_slice()), (1, &[nowhere][..]));
        assert_eq!(
            (iort.stream(0, 5), iort.stream(0, 0x105).map(|led| led.0.registers)),
            (None, Some(SECOND))
        );
        assert_eq!(flaws, [Flaw::Registers { offset: AT as usize, registers: nowhere }]);
    }
    let mut other = smmu(FIRST);
    other[24] = 0;
    for (one, other) in [(smmu(FIRST), other.clone()), (other, smmu(FIRST))] {
        let (iort, flaws) = told(&[one, other, root(0, &[[0, 0xff, 0, AT + SMMU.1, 0]])]);
        assert_eq!(
            iort.units,
            [IortUnit { registers: FIRST, coherent: false, model: 0 }],
            "what one of them does not say is not so"
        );
        assert_eq!(iort.stream(0, 5), Some((iort.units[0], 5)));
        assert_eq!(flaws, [Flaw::Twice { offset: (AT + SMMU.1) as usize, first: AT as usize }]);
    }
}

#[test]
fn smmus_of_other_versions_are_counted() {
    let other = node(3, &[0; 60], &[]);
    let (iort, flaws) = told(&[other.clone(), smmu(FIRST), other]);
    assert_eq!((iort.smmus, iort.units.len(), flaws), (2, 1, vec![]));
}

#[test]
fn a_model_without_the_second_page_of_registers_is_refused() {
    let of = |model: u8| {
        let mut unit = smmu(FIRST);
        unit[40] = model;
        let (iort, flaws) = told(&[unit, root(0, &[[0, 0xff, 0, AT, 0]])]);
        (iort.stream(0, 5).map(|(unit, _)| unit.model), iort.refused, flaws)
    };
    assert_eq!(of(0), (Some(0), vec![], vec![]));
    assert_eq!(of(1), (Some(1), vec![], vec![]));
    assert_eq!(of(2), (None, vec![FIRST], vec![Flaw::OnePage { offset: AT as usize, registers: FIRST }]));
}

#[test]
fn nodes_that_cannot_be_read_end_the_walk() {
    let good = [smmu(FIRST), root(0, &[[0, 0xff, 0, AT, 0]])];
    let at = good.concat().len() + AT as usize;
    for (len, least) in [(0_u64, 16), (15, 16), (24, 16), (0xffff, 16)] {
        let mut odd = its()[..20].to_vec();
        odd[1..3].copy_from_slice(&le(&[len], 2));
        let (iort, flaws) = told(&[good[0].clone(), good[1].clone(), odd]);
        assert_eq!(iort.stream(0, 5).map(|led| led.1), Some(5));
        let length = Flaw::Length { offset: at, len: len as usize, least, left: 20 };
        assert_eq!(flaws, [length, Flaw::Nodes { count: 3, held: 2 }]);
    }
    // More nodes than exist; nodes that begin in the header, or nowhere.
    let header =
        |count: u64, first: u64| table(b"IORT", &[le(&[count, first, 0], 4), good.concat()].concat());
    for (count, first, held) in
        [(9, AT, 2), (u32::MAX.into(), AT, 2), (2, 0, 0), (2, 0xffff, 0), (2, u32::MAX.into(), 0)]
    {
        let iort = Iort::parse(&header(count, first)).unwrap();
        assert_eq!(iort.units.len(), held / 2);
        assert_eq!(iort.flaws, [Flaw::Nodes { count: count as usize, held }]);
    }
    // Fewer are valid.
    assert_eq!(Iort::parse(&header(1, AT)).map(|iort| (iort.roots.len(), iort.flaws)), Ok((0, vec![])));
}

#[test]
fn mappings_and_regions_beyond_their_node_are_told() {
    let run = [0, 0xff, 0, AT, 0];
    let at = (AT + SMMU.1) as usize;
    // A count of two, or nodes that begin where none can.
    for (count, from, held) in [(2, 36, 1), (u32::MAX, 36, 1), (1, 37, 0), (1, 0, 0), (1, u32::MAX, 0)] {
        let mut odd = root(0, &[run]);
        odd[8..16].copy_from_slice(&le(&[count.into(), from.into()], 4));
        let (iort, flaws) = told(&[smmu(FIRST), odd]);
        assert_eq!(iort.stream(0, 5).is_some(), held == 1, "{count} at {from}");
        assert_eq!(flaws, [Flaw::Mappings { offset: at, count: count as usize, held }]);
        // The same for regions, followed by a mapping.
        let mut odd = memory(&[(0x8000_0000, 0x1_0000)], &[run]);
        odd[20..28].copy_from_slice(&le(&[u32::MAX.into(), from.into()], 4));
        let mappings =
            |flaw: &Flaw| matches!(flaw, Flaw::Mappings { count, .. } if *count == u32::MAX as usize);
        assert_eq!(told(&[smmu(FIRST), odd]).1.iter().filter(|flaw| mappings(flaw)).count(), 1);
    }
}

#[test]
fn regions_and_streams_that_are_the_same_bytes_take_no_more_memory_than_the_table() {
    // Each is a region, and a stream range: a product of the two would be 250,000.
    let count = 500_u64;
    let same: Vec<u8> = (0..count).flat_map(|_| le(&[0x1_0000, 0, 0x1_0000, AT, 0], 4)).collect();
    let mut many = node(6, &[le(&[0, count, 28], 4), same].concat(), &[]);
    many[8..16].copy_from_slice(&le(&[count, 28], 4));
    let (iort, _) = told(&[smmu(FIRST), many]);
    assert_eq!(
        (iort.reserved.len(), iort.reserved[0].regions.len(), iort.reserved[0].streams.len()),
        (1, 500, 500)
    );
}

#[test]
fn regions_for_nobody_are_told() {
    let region = [(0x8000_0000, 0x1_0000)];
    let at = (AT + SMMU.1) as usize;
    let (iort, flaws) = told(&[smmu(FIRST), memory(&region, &[])]);
    assert_eq!((iort.reserved.len(), flaws), (0, vec![Flaw::ForNobody { offset: at }]));
    let (iort, flaws) = told(&[smmu(FIRST), memory(&region, &[[0, 0, 3, 0, 0]])]);
    let refers = Flaw::Reference { offset: at + 48, to: 0 };
    assert_eq!((iort.reserved.len(), flaws), (0, vec![refers, Flaw::ForNobody { offset: at }]));
}

#[test]
fn nodes_that_are_short_or_unknown_are_passed_over() {
    let (iort, flaws) = told(&[
        node(7, &[0; 8], &[]),
        node(4, &[0; 8], &[]),
        node(2, &[0; 12], &[]),
        node(6, &[0; 8], &[]),
        smmu(FIRST),
    ]);
    assert_eq!((iort.units.len(), iort.roots.len()), (1, 0));
    let at = AT as usize;
    assert_eq!(
        flaws,
        [
            Flaw::Short { offset: at + 24, len: 24 },
            Flaw::Kind { offset: at, kind: 7 },
            Flaw::Short { offset: at + 48, len: 28 },
            Flaw::Short { offset: at + 76, len: 24 },
        ]
    );
}

#[test]
fn components_have_names_of_text() {
    let run = [[0, 0, 9, AT, 1]];
    let its_mapping = [[0, 0, 9, AT + SMMU.1, 1]];
    let (iort, flaws) = told(&[
        smmu(FIRST),
        its(),
        component(b"noend", 0, &[]),
        component(b"\x1b[31m\0", 0, &run),
        component(b"\0", 0, &run),
        component(b"\\_SB.GPU0\0\0\0", 65, &its_mapping),
    ]);
    let [graphics] = iort.components.as_slice() else { panic!("one component") };
    assert_eq!(
        (graphics.name.as_str(), graphics.address_bits, graphics.streams.len()),
        ("\\_SB.GPU0", None, 0)
    );
    let at = (AT + SMMU.1 + ITS.1) as usize;
    let names = [at, at + 34, at + 34 + 55].map(|offset| Flaw::Name { offset });
    assert_eq!(flaws, names);
}

#[test]
fn an_address_limit_is_stated_from_the_first_revision_on() {
    for (revision, byte, bits) in
        [(0, 48, None), (1, 48, Some(48)), (4, 64, Some(64)), (1, 0, None), (1, 65, None)]
    {
        let mut odd = root(0, &[]);
        (odd[3], odd[32]) = (revision, byte);
        assert_eq!(told(&[odd]).0.roots[0].address_bits, bits);
    }
    assert_eq!(told(&[node(2, &[0; 16], &[])]).0.roots[0].address_bits, None);
}

/// A range that contains several others overlaps each of them.
#[test]
fn each_run_inside_a_longer_one_is_told() {
    let runs = [
        [0, 0x3ff, 0, 0, 0],
        [0x100, 0xff, 0x1_0000, 1, 0],
        [0x200, 0xff, 0x2_0000, 1, 0],
        [0x400, 0, 0, 0, 0],
    ];
    let overlap = |second: usize, id| Flaw::Overlap { first: mapping(0), second: mapping(second), id };
    assert_eq!(led(&runs, &[]).1, [overlap(1, 0x100), overlap(2, 0x200)]);
}
