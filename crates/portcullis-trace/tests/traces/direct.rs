//! Mappings with only IOMMU events.

use proptest::prelude::*;

use super::pairing::{NVME, iommu_map, iommu_unmap, lines, map, shape, unmap};
use crate::common::{Played, read, read_in, trace};
use portcullis_trace::{Chunk, OpKind, Origin, ReadOptions, Segment, Trace};

/// A line of each operation: its number from [`shape`], its microseconds and its CPU.
fn times(ops: &[Played]) -> Vec<(String, u64, u32)> {
    let time = |op: &portcullis_trace::Op| (op.time_ns - 38_000_000_000) / 1000;
    shape(ops).into_iter().zip(ops).map(|(name, (op, _))| (name, time(op), op.cpu)).collect()
}

fn at(name: &str, us: u64, cpu: u32) -> (String, u64, u32) {
    (name.into(), us, cpu)
}

fn timed(events: &[(u32, u64, String)]) -> String {
    trace(&events.iter().map(|(cpu, us, event)| (*cpu, *us, event.as_str())).collect::<Vec<_>>())
}

/// A scatter list: three maps, the second behind the third in memory, and one unmap.
#[test]
fn an_unmap_ends_one_mapping_of_all_runs_that_it_covers() {
    let list = [(0xf_0000, 0x50_0000, 0x1000), (0xf_1000, 0x80_0000, 0x3000), (0xf_4000, 0x60_0000, 0x1000)];
    let mut events: Vec<_> =
        (0..).zip(list).map(|(n, (iova, phys, size))| (0, 10 + n, iommu_map(iova, phys, size))).collect();
    events.extend([
        (1, 20, iommu_map(0xe_0000, 0x90_0000, 0x1000)),
        (1, 30, iommu_unmap(0xf_0000, 0x5000)),
        (0, 40, iommu_unmap(0xe_0000, 0x1000)),
    ]);
    let (ops, summary) = read(&timed(&events));
    assert_eq!(times(&ops), [at("M0", 10, 0), at("M1", 20, 1), at("U0", 30, 1), at("U1", 40, 0)]);
    assert_eq!(ops[0].1, list.map(|(_, phys, len)| Segment { phys, len }));
    assert_eq!((ops[0].0.line, ops[2].0.line), (3, 7));
    assert!(matches!(ops[0].0.kind, OpKind::Map { origin: Origin::Direct, .. }));
    assert_eq!((summary.direct_maps, summary.direct_unmaps, summary.bytes_mapped), (2, 2, 0x6000));
    assert_eq!((summary.iommu_direct, summary.iommu_unclaimed), (6, 0));
    // A gap, whose map is not in the recording, changes nothing.
    events.remove(1);
    assert_eq!(read(&timed(&events)).1.direct_maps, 2);
}

/// Then each is a mapping.
#[test]
fn runs_of_which_an_unmap_covers_a_part_are_mappings_each_for_itself() {
    let runs = [iommu_map(0x1000, 0x50_0000, 0x1000), iommu_map(0x2000, 0x60_0000, 0x2000)];
    let (ops, summary) = read(&lines(&[&runs[..], &[iommu_unmap(0x1000, 0x2000)]].concat()));
    assert_eq!(shape(&ops), ["M0", "M1", "M2", "U1", "U0"]);
    assert_eq!((summary.direct_maps, summary.direct_unmaps), (3, 2));
    // The rest of the second is mapped already, so the third is not part of a list with it.
    let more = [iommu_map(0x4000, 0x70_0000, 0x1000), iommu_unmap(0x3000, 0x2000)];
    let (ops, summary) = read(&lines(&[&runs[..], &[iommu_unmap(0x1000, 0x2000)], &more].concat()));
    assert_eq!(shape(&ops), ["M0", "M1", "M2", "U1", "U0", "M0", "U0", "U2"]);
    assert_eq!((summary.direct_maps, summary.direct_unmaps, summary.iommu_unclaimed), (4, 4, 0));
}

/// However long the first mapping lives: numbers are of concurrent mappings.
#[test]
fn mappings_are_made_when_their_runs_were() {
    let events = [
        (0, 1, iommu_map(0x1000, 0x1_0000, 0x1000)),
        (0, 2, iommu_map(0x2000, 0x2_0000, 0x1000)),
        (1, 3, iommu_map(0x3000, 0x3_0000, 0x1000)),
        (1, 4, iommu_unmap(0x3000, 0x1000)),
        (1, 5, iommu_map(0x3000, 0x4_0000, 0x1000)),
        (0, 6, iommu_unmap(0x3000, 0x1000)),
        (0, 7, iommu_unmap(0x1000, 0x1000)),
    ];
    let (ops, _) = read(&timed(&events));
    let expected =
        [("M0", 1, 0), ("M1", 2, 0), ("M2", 3, 1), ("U2", 4, 1), ("M2", 5, 1), ("U2", 6, 0), ("U0", 7, 0)];
    assert_eq!(times(&ops), expected.map(|(name, us, cpu)| at(name, us, cpu)));
}

/// Otherwise it would block a ring for the rest of the recording.
#[test]
fn what_no_unmap_ends_lives_as_long_as_its_driver() {
    let (ops, _) = read(&lines(&[
        iommu_map(0x1000, 0x1_0000, 0x1000),
        iommu_map(0x2000, 0x2_0000, 0x1000),
        iommu_unmap(0x2000, 0x1000),
    ]));
    let origins = ops.iter().filter_map(|(op, _)| match op.kind {
        OpKind::Map { origin, .. } => Some(origin),
        _ => None,
    });
    assert_eq!(origins.collect::<Vec<_>>(), [Origin::Coherent, Origin::Direct]);
}

/// A mapping older than the recording is unmapped without a map: that ends no later mapping there.
#[test]
fn an_unmap_ends_what_was_mapped_before_it() {
    let older = (0..20).map(|n| iommu_unmap(0x10_0000 + (n << 12), 0x1000));
    let mut events: Vec<_> = older.collect();
    events.insert(0, iommu_map(0xf_0000, 0x50_0000, 0x1000));
    events.insert(2, iommu_map(0x10_0000, 0x60_0000, 0x1000));
    events.push(iommu_unmap(0x10_0000, 0x1000));
    let (ops, summary) = read(&lines(&events));
    assert_eq!(shape(&ops), ["M0", "M1", "U1"]);
    assert_eq!((ops[1].0.line, ops[2].0.line), (5, 25));
    assert_eq!((summary.direct_maps, summary.direct_unmaps, summary.iommu_unclaimed), (2, 1, 20));
}

/// A run without an unmap holds back later ones, up to a bound.
#[test]
fn what_is_held_back_is_bounded() {
    let mut events = vec![iommu_map(0x1000, 0x1000, 0x1000)];
    events.extend((0..150_000).flat_map(|n| {
        let iova = 0x10_0000 + ((n % 1000) << 12);
        [iommu_map(iova, 0x70_0000, 0x1000), iommu_unmap(iova, 0x1000)]
    }));
    let text = lines(&events);
    let mut trace = Trace::from_bytes("long", text.as_bytes(), ReadOptions::default()).unwrap();
    let (mut chunk, mut first_at, mut ops) = (Chunk::default(), None, Vec::new());
    while trace.next_chunk(&mut chunk, 1000).unwrap() {
        first_at = first_at.or_else(|| chunk.ops.first().map(|_| trace.summary().events));
        ops.extend(chunk.ops.iter().map(|op| (op.time_ns, op.line)));
    }
    let first_at = first_at.unwrap();
    assert!(first_at > 200_000 && first_at < 299_000, "{first_at}");
    assert!(ops.is_sorted() && ops.len() == 300_001, "{}", ops.len());
    assert_eq!((trace.summary().direct_maps, trace.summary().direct_unmaps), (150_001, 150_000));
}

/// From the first `dma_*` event on, a run may belong to one, and their operations do not wait for it.
#[test]
fn where_dma_events_come_direct_mappings_are_made_when_they_end() {
    let mut events = vec![
        (0, 1, iommu_map(0x1000, 0x1_0000, 0x1000)),
        (0, 2, iommu_map(0x2000, 0x2_0000, 0x1000)),
        (0, 3, iommu_map(0x3000, 0x3_0000, 0x1000)),
        (0, 4, iommu_unmap(0x2000, 0x2000)),
        (1, 5, map(0x9000, 512, 0x9000)),
        (1, 6, unmap(0x9000, 512)),
        (0, 7, iommu_unmap(0x1000, 0x1000)),
    ];
    events.extend((0..8).map(|n| (0, 8 + n, iommu_unmap(n << 20, 0x1000))));
    let (ops, summary) = read(&timed(&events));
    let expected = [("M0", 2, 0), ("U0", 4, 0), ("M0", 5, 1), ("U0", 6, 1), ("M0", 7, 0), ("U0", 7, 0)];
    assert_eq!(times(&ops), expected.map(|(name, us, cpu)| at(name, us, cpu)));
    assert_eq!((summary.direct_maps, summary.direct_unmaps, summary.iommu_unclaimed), (2, 2, 8));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any events: numbers are unique, times do not decrease, and chunks do not matter.
    #[test]
    fn any_events_become_mappings_that_end_once(
        events in prop::collection::vec((0..5_u8, 0..12_u64, 1..5_u64, 0..3_u32), 1..80),
        dma in prop::option::of(0..80_usize),
        chunk in 1..20_usize,
    ) {
        let mut events: Vec<_> = (0..).zip(events).map(|(us, (kind, page, pages, cpu))| {
            let (iova, size) = (page << 12, pages << 12);
            (cpu, us, if kind > 1 { iommu_map(iova, us << 20, size) } else { iommu_unmap(iova, size) })
        }).collect();
        if let Some(event) = dma.and_then(|at| events.get_mut(at)) {
            event.2 = map(0x100_0000, 512, 0x9000);
        }
        let text = timed(&events);
        super::robustness::survives(text.as_bytes(), chunk);
        let (ops, _) = read(&text);
        let (parts, _) = read_in(text.as_bytes(), ReadOptions::default(), chunk).unwrap();
        prop_assert_eq!(ops, parts);
    }
}

/// A virtual machine's memory is mapped run by run, and waits for `dma_*` events that never come.
#[test]
fn what_waits_on_one_cpu_hides_nothing_of_another() {
    let mut events = vec![(0, 1, map(0x9_0000, 64, 0x9_0000)), (0, 2, unmap(0x9_0000, 64))];
    events.extend((0..20_000).map(|at| (0, 3, iommu_map(0x1_0000_0000 + at * 0x4000, at * 0x4000, 0x2000))));
    for at in 0..8 {
        let us = 10 + at * 1000;
        events.extend([
            (1, us, iommu_map(0x1000, 0x50_0000, 0x1000)),
            (1, us + 1, map(0x7_0000, 64, 0x7_0000)),
            (2, us + 500, iommu_unmap(0x1000, 0x1000)),
            (2, us + 501, unmap(0x7_0000, 64)),
        ]);
    }
    let (ops, summary) = read(&timed(&events));
    assert_eq!((summary.direct_maps, summary.direct_unmaps, summary.maps, summary.unmaps), (8, 8, 9, 9));
    let ends = times(&ops).into_iter().filter(|(name, ..)| name.starts_with('U')).map(|(_, us, _)| us);
    let expected = (0..8).flat_map(|at| [at * 1000 + 510, at * 1000 + 511]);
    assert_eq!(ends.collect::<Vec<_>>(), std::iter::once(2).chain(expected).collect::<Vec<_>>());
}

#[test]
fn iommu_events_on_their_own_are_direct_mappings() {
    let (ops, summary) = read(&lines(&[
        iommu_map(0, 0x10_0000, 8192),
        iommu_unmap(0, 4096),
        iommu_unmap(4096, 4096),
        iommu_map(0x10_0000, 0x20_0000, 65536),
        iommu_unmap(0x10_1000, 4096),
        iommu_unmap(0x10_0000, 65536),
        iommu_unmap(0x10_0000, 65536),
        iommu_map(0x30_0000, 0x20_0000, 65536),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "U0", "U1", "M1", "M0", "M2", "U0", "U2", "U1", "M1"]);
    assert_eq!(ops[1].1, [Segment { phys: 0x10_1000, len: 4096 }]);
    // The last was mapped when the recording ended.
    assert_eq!(summary.devices, ["iommu"]);
    assert_eq!((summary.iommu_direct, summary.iommu_unclaimed), (7, 1));
}

/// A part of a live mapping is unmapped: the parts before and behind it stay mapped, to their memory.
#[test]
fn a_direct_mapping_is_cut_at_the_ends_of_an_unmap() {
    let (ops, summary) = read(&lines(&[
        iommu_map(0x10_0000, 0x20_0000, 0x10000),
        iommu_unmap(0x10_0000, 0x1000),
        iommu_unmap(0x10_3000, 0x1000),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "U0", "U1", "M1", "M0"]);
    let segments: Vec<_> = ops.iter().flat_map(|(_, segments)| segments).copied().collect();
    let expected = [(0x20_0000, 0x1000), (0x20_1000, 0xf000), (0x20_1000, 0x2000), (0x20_4000, 0xc000)];
    assert_eq!(segments, expected.map(|(phys, len)| Segment { phys, len }));
    assert_eq!((summary.iommu_direct, summary.iommu_unclaimed), (3, 0));
}

#[test]
fn direct_mappings_that_cannot_be() {
    let (ops, summary) = read(&lines(&[
        iommu_map(0x10_0000, 0x20_0000, 0x4000),
        iommu_unmap(0x10_0000, 0x1000),
        // Another domain's, at mapped addresses, and impossible memory.
        iommu_map(0x10_2000, 0x90_0000, 0x1000),
        iommu_map(0x40_0000, (1 << 52) - 0x1000, 0x2000),
        iommu_unmap(0x10_2000, 0x1000),
        iommu_unmap(0x40_0000, 0x2000),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "U0", "U1", "M1", "M0"]);
    assert!(ops.iter().flat_map(|(_, segments)| segments).all(|piece| piece.phys < 0x20_4000));
    assert_eq!((summary.iommu_direct, summary.iommu_unclaimed), (3, 3));
}

fn attach(device: &str) -> String {
    format!("attach_device_to_domain: IOMMU: device={device}")
}

/// VFIO's mappings get their device from the attach event before them, and are counted as operations.
#[test]
fn direct_mappings_are_those_of_the_one_device_that_was_attached() {
    let uses = [
        iommu_map(0x1000, 0x50_0000, 0x2000),
        iommu_unmap(0x1000, 0x1000),
        iommu_unmap(0x2000, 0x1000),
        iommu_map(0x9000, 0x60_0000, 0x1000),
    ];
    let with = |attached: &[&str]| {
        let attached = attached.iter().map(|device| attach(device));
        read(&lines(&attached.chain(uses.iter().cloned()).collect::<Vec<_>>()))
    };
    let (ops, summary) = with(&[NVME, NVME]);
    assert_eq!(shape(&ops), ["M0", "M1", "U0", "U1", "M1"]);
    assert_eq!(summary.devices, [NVME]);
    assert_eq!((summary.mappings(), summary.mappings_ended(), summary.still_mapped()), (3, 2, 0));
    assert_eq!((summary.iommu_direct, summary.iommu_unclaimed), (4, 0));
    for attached in [&[][..], &[NVME, "0000:00:05.0"]] {
        assert_eq!(with(attached).1.devices, ["iommu"], "no event says whose they are");
    }
    let only = ReadOptions { device: Some(NVME.into()), ..ReadOptions::default() };
    let text = lines(&[&[attach(NVME)], &uses[..]].concat());
    assert_eq!(read_in(text.as_bytes(), only, 1000).unwrap().1.mappings(), 3);
}
