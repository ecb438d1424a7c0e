//! Which unmap belongs to which map, one hazard at a time.

use crate::common::{Played, on_cpu0, read, read_in, trace};
use portcullis_trace::event::Direction;
use portcullis_trace::{OpKind, Origin, ReadOptions, Segment, TraceError};

pub(super) const NVME: &str = "0000:00:03.0";

pub(super) fn map(addr: u64, size: u64, phys: u64) -> String {
    format!("dma_map_page: {NVME} dir=TO_DEVICE dma_addr={addr:x} size={size} phys_addr={phys:x} attrs=")
}

pub(super) fn unmap(addr: u64, size: u64) -> String {
    format!("dma_unmap_page: {NVME} dir=TO_DEVICE dma_addr={addr:x} size={size} attrs=")
}

pub(super) fn iommu_map(iova: u64, phys: u64, size: u64) -> String {
    format!("map: IOMMU: iova=0x{iova:016x} - 0x{:016x} paddr=0x{phys:016x} size={size}", iova + size)
}

pub(super) fn iommu_unmap(iova: u64, size: u64) -> String {
    format!("unmap: IOMMU: iova=0x{iova:016x} - 0x{:016x} size={size} unmapped_size={size}", iova + size)
}

pub(super) fn lines(events: &[String]) -> String {
    on_cpu0(&events.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The operations without times: `M3`, `U3`, `C3+64:10` for map, unmap and sync of number 3.
pub(super) fn shape(ops: &[Played]) -> Vec<String> {
    let one = |(op, _): &Played| match &op.kind {
        OpKind::Map { id, .. } => format!("M{id}"),
        OpKind::Unmap { id } => format!("U{id}"),
        OpKind::SyncForCpu { id, offset, len } => format!("C{id}+{offset}:{len}"),
        OpKind::SyncForDevice { id, offset, len } => format!("D{id}+{offset}:{len}"),
    };
    ops.iter().map(one).collect()
}

#[test]
fn one_address_mapped_twice_pairs_by_size() {
    let text = lines(&[
        map(0x1000, 512, 0x1000),
        map(0x1000, 4096, 0x1000),
        unmap(0x1000, 512),
        map(0x1000, 64, 0x1000),
        unmap(0x1000, 4096),
        unmap(0x1000, 64),
    ]);
    let (ops, summary) = read(&text);
    assert_eq!(shape(&ops), ["M0", "M1", "U0", "M0", "U1", "U0"]);
    assert_eq!((summary.maps, summary.unmaps, summary.still_mapped(), summary.warnings), (3, 3, 0, 0));
    assert_eq!(summary.bytes_mapped, 512 + 4096 + 64);
}

#[test]
fn an_address_given_out_again_before_its_unmap_is_recorded() {
    // CPU 1 maps the address that CPU 0 has freed, but not yet recorded as unmapped.
    let events = [
        (0, 0, unmap(0x5000, 1)),
        (0, 1, iommu_unmap(0xf000, 4096)),
        (1, 2, iommu_map(0xf000, 0x9000, 4096)),
        (1, 3, map(0xf000, 4096, 0x9000)),
        (0, 4, unmap(0xf000, 4096)),
        (1, 5, iommu_unmap(0xf000, 4096)),
        (1, 6, unmap(0xf000, 4096)),
    ];
    let all: Vec<_> = events.iter().map(|(c, t, e)| (*c, *t, e.as_str())).collect();
    let (ops, summary) = read(&trace(&all));
    assert_eq!(shape(&ops), ["M0", "U0"]);
    assert_eq!(ops[1].0.line, 9, "the later unmap is the one");
    assert_eq!((summary.unpaired.before_recording, summary.unpaired.already_unmapped), (2, 0));
    assert_eq!(summary.iommu_claimed, 3);
}

/// Of several mappings at one address: the oldest that matches size and direction; without a match, the newest.
#[test]
fn an_unmap_takes_the_oldest_that_fits_or_the_newest() {
    let from = |event: String| event.replace("TO_DEVICE", "FROM_DEVICE");
    let (ops, _) = read(&lines(&[
        map(0x1000, 512, 0x1000),
        from(map(0x1000, 512, 0x2000)),
        map(0x1000, 512, 0x3000),
        from(unmap(0x1000, 512)),
        unmap(0x1000, 512),
        unmap(0x1000, 512),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "M2", "U1", "U0", "U2"]);
    let (ops, _) = read(&lines(&[
        map(0x1000, 512, 0x1000),
        map(0x1000, 64, 0x2000),
        unmap(0x1000, 32),
        unmap(0x1000, 32),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "U1", "U0"]);
}

/// An interrupt between an `iommu:unmap` and its `dma_unmap_page` may allocate the same address and free it.
#[test]
fn an_interrupt_s_unmap_of_the_same_address_is_claimed_by_its_own_event() {
    let (ops, summary) = read(&lines(&[
        map(0xf000, 4096, 0x1000),
        iommu_unmap(0xf000, 4096),
        map(0xf000, 4096, 0x2000),
        iommu_unmap(0xf000, 4096),
        unmap(0xf000, 4096),
        unmap(0xf000, 4096),
    ]));
    // The first recorded one belongs to the newest `iommu:unmap`: both maps were made before it. The second belongs to the older one,
    // before which there was one map, and that is gone.
    assert_eq!(shape(&ops), ["M0", "M1", "U0"]);
    assert_eq!((summary.iommu_claimed, summary.unpaired.already_unmapped), (2, 1));
}

/// Expected `iommu:unmap`s: of a list, of any address, and of at most eight at once.
#[test]
fn frees_expect_their_unmaps_up_to_a_bound() {
    let sg = |dma: u64, phys: u64| {
        format!(
            "dma_map_sg: {NVME} dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={{{dma:#x}}} sizes={{0x1000}} \
             phys_addrs={{{phys:#x}}} attrs="
        )
    };
    let end = |phys: u64| format!("dma_unmap_sg: {NVME} dir=TO_DEVICE phys_addrs={{{phys:#x}}} attrs=");
    // Two are expected, and either ends first.
    for order in [[0x1_0000, 0x2_0000], [0x2_0000, 0x1_0000]] {
        let mut nested = vec![sg(0x1_0000, 0x1000), sg(0x2_0000, 0x2000), end(0x1000), end(0x2000)];
        nested.extend(order.map(|iova| iommu_unmap(iova, 0x1000)));
        let (_, summary) = read(&lines(&nested));
        assert_eq!((summary.iommu_claimed, summary.iommu_unclaimed), (2, 0));
    }
    // Nine are: the first is no longer expected.
    let mut many: Vec<String> = (1..=9).map(|n| sg(n << 16, n << 12)).collect();
    many.extend((1..=9).map(|n| end(n << 12)));
    many.extend((1..=9).map(|n| iommu_unmap(n << 16, 0x1000)));
    let (_, summary) = read(&lines(&many));
    assert_eq!((summary.iommu_claimed, summary.iommu_unclaimed), (8, 1));
}

/// The first and the last byte of the unmapped range belong to it, and the bytes beside them do not.
#[test]
fn a_free_of_one_byte_expects_the_unmap_of_its_page() {
    for (byte, claimed) in [(0xffff, 0), (0x1_0000, 1), (0x1_0fff, 1), (0x1_1000, 0)] {
        let (ops, summary) = read(&lines(&[
            format!(
                "dma_map_sg: {NVME} dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={{{byte:#x}}} sizes={{0x1}} \
                 phys_addrs={{0x3000}} attrs="
            ),
            format!("dma_unmap_sg: {NVME} dir=TO_DEVICE phys_addrs={{0x3000}} attrs="),
            iommu_unmap(0x1_0000, 0x1000),
        ]));
        assert_eq!(shape(&ops), ["M0", "U0"]);
        assert_eq!((summary.iommu_claimed, summary.iommu_unclaimed), (claimed, 1 - claimed), "{byte:#x}");
    }
}

/// Maps of interrupts lie between a mapping's own, and leftovers of an older mapping at the same addresses before them.
#[test]
fn a_mapping_claims_its_own_runs_only() {
    let interrupted: Vec<String> = (0..5).map(|n| iommu_map(0xe_0000 + (n << 12), n << 12, 0x1000)).collect();
    let mut events = vec![iommu_map(0xf_0000, 0x7_0000, 0x2000), iommu_map(0xf_0000, 0x1_0000, 0x1000)];
    events.extend(interrupted);
    events.push(iommu_map(0xf_1000, 0x5_0000, 0x1000));
    events.push(format!(
        "dma_map_sg: {NVME} dir=TO_DEVICE nents=2/2 ents=1/1 dma_addrs={{0xf0000}} sizes={{0x1800}} \
         phys_addrs={{0x10000,0x50000}} attrs="
    ));
    let (ops, summary) = read(&lines(&events));
    assert_eq!(ops[0].1, [Segment { phys: 0x1_0000, len: 0x1000 }, Segment { phys: 0x5_0000, len: 0x800 }]);
    assert_eq!((summary.derived_lengths, summary.iommu_claimed, summary.iommu_unclaimed), (1, 2, 6));
    // Its first run is not in the recording: it is not searched among older ones.
    let (_, summary) = read(&lines(&[
        iommu_map(0xf_1000, 0x7_0000, 0x1000),
        iommu_map(0xf_1000, 0x5_0000, 0x1000),
        map(0xf_0000, 0x2000, 0x4_f000),
    ]));
    assert_eq!((summary.iommu_claimed, summary.iommu_unclaimed), (1, 1));
}

/// The run of the next page is a mapping's own if the mapping has one byte of that page.
#[test]
fn a_mapping_claims_the_runs_up_to_its_last_byte() {
    for (first, size, claimed) in
        [(0xf_0000, 0x1000, 1), (0xf_0000, 0x1001, 2), (0xf_0fff, 1, 1), (0xf_0fff, 2, 2)]
    {
        let runs = [0, 0x1000].map(|at| iommu_map(0xf_0000 + at, 0x1_0000 + at, 0x1000));
        let mapping = map(first, size, first - 0xf_0000 + 0x1_0000);
        let (_, summary) = read(&lines(&[&runs[..], &[mapping]].concat()));
        assert_eq!(
            (summary.iommu_claimed, summary.iommu_unclaimed),
            (claimed, 2 - claimed),
            "{first:x} {size}"
        );
    }
}

/// An unmap without a mapping settles earlier maps, and no later ones.
#[test]
fn what_is_mapped_after_an_unclaimed_unmap_still_waits_for_its_event() {
    let mut events = vec![map(0x1000, 1, 0x1000)];
    events.extend((0..8).map(|n| iommu_unmap(n << 20, 0x1000)));
    events.push(iommu_map(0xf000, 0x9000, 0x1000));
    // The ninth that waits: the first is given up.
    events.push(iommu_unmap(9 << 20, 0x1000));
    events.push(map(0xf000, 4096, 0x9000));
    let (_, summary) = read(&lines(&events));
    assert_eq!((summary.iommu_claimed, summary.iommu_unclaimed), (1, 9));
}

#[test]
fn ends_without_a_beginning_have_a_reason() {
    let (ops, summary) = read(&lines(&[
        unmap(0x1000, 512),
        unmap(0x1000, 512),
        map(0x2000, 512, 0x2000),
        unmap(0x2000, 512),
        unmap(0x2000, 512),
    ]));
    assert_eq!(shape(&ops), ["M0", "U0"]);
    assert_eq!((summary.unpaired.before_recording, summary.unpaired.already_unmapped), (1, 2));
    assert_eq!(summary.warnings, 2);
    assert_eq!(
        summary.kept_warnings[0].to_string(),
        "line 4: expected an unmap of something mapped, found a second unmap of 0x1000 on 0000:00:03.0 with no map since"
    );
    let lost = lines(&[unmap(0x1000, 512)]) + "CPU:1 [LOST 12 EVENTS]\n" + &lines(&[unmap(0x1000, 512)]);
    let (_, summary) = read(&lost);
    assert_eq!((summary.lost_events, summary.unpaired.after_loss, summary.warnings), (12, 1, 0));
    let lost = "CPU:1 [LOST 0 EVENTS]\n".to_string() + &lines(&[unmap(0x1000, 512)]);
    let (_, summary) = read(&lost);
    assert_eq!((summary.lost_events, summary.unpaired.after_loss), (1, 1), "it says that some are");
}

#[test]
fn lists_pair_by_their_physical_addresses() {
    let sg = |dma: u64, phys: &str| {
        format!(
            "dma_map_sg: {NVME} dir=TO_DEVICE nents=2/2 ents=2/2 dma_addrs={{{dma:#x},0x9000}} sizes={{0x200,0x300}} \
             phys_addrs={phys} attrs="
        )
    };
    let end = |phys: &str| format!("dma_unmap_sg: {NVME} dir=TO_DEVICE phys_addrs={phys} attrs=");
    let (a, b) = ("{0x1000,0x2000}", "{0x1000,0x3000}");
    let (ops, summary) = read(&lines(&[
        sg(0x100, a),
        sg(0x200, b),
        sg(0x300, a),
        end(a),
        end(b),
        end(a),
        end(a),
        end("{0x7}"),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "M2", "U0", "U1", "U2"]);
    assert_eq!(ops[0].1, [Segment { phys: 0x1000, len: 0x200 }, Segment { phys: 0x2000, len: 0x300 }]);
    assert_eq!((summary.unpaired.before_recording, summary.unpaired.already_unmapped), (1, 1));
    assert_eq!((summary.derived_lengths, summary.guessed_lengths), (0, 0));
}

/// Two lists are distinguished by the printed entries, at most 128: by the last of them, and by none after it.
#[test]
fn long_lists_pair_by_all_entries_that_are_printed() {
    for (differs, order) in [(0, ["U1", "U0"]), (127, ["U1", "U0"]), (128, ["U0", "U1"])] {
        let list = |other: u64| {
            let phys = (0..130).map(|n| n * 0x3000 + if n == differs { other } else { 0 });
            phys.map(|phys| format!("{phys:#x}")).collect::<Vec<_>>().join(",")
        };
        let sg = |dma: u64, other: u64| {
            format!(
                "dma_map_sg: {NVME} dir=TO_DEVICE nents=130/130 ents=1/1 dma_addrs={{{dma:#x}}} sizes={{0x82000}} \
                 phys_addrs={{{}}} attrs=",
                list(other)
            )
        };
        let end =
            |other: u64| format!("dma_unmap_sg: {NVME} dir=TO_DEVICE phys_addrs={{{}}} attrs=", list(other));
        let (ops, _) = read(&lines(&[sg(1 << 24, 0), sg(2 << 24, 0x1000), end(0x1000), end(0)]));
        assert_eq!(shape(&ops)[2..], order, "{differs}");
    }
}

/// A list longer than printed has no invented entries, and one is as long as it says.
#[test]
fn long_lists_keep_all_of_their_pieces() {
    let list = |of: fn(u64) -> u64| (0..1_000).map(|n| format!("{:#x}", of(n))).collect::<Vec<_>>().join(",");
    let (ops, summary) = read(&lines(&[
        map(0x100, 512, 0x7_0000),
        format!(
            "dma_map_sg: {NVME} dir=TO_DEVICE nents=1000/1000 ents=1000/1000 dma_addrs={{{}}} sizes={{{}}} phys_addrs={{{}}} attrs=",
            list(|n| 0x1000 + n * 0x2000),
            list(|n| n + 1),
            list(|n| 0x10_0000 + n * 0x3000)
        ),
    ]));
    let all: Vec<_> = (0..1_000).map(|n| Segment { phys: 0x10_0000 + n * 0x3000, len: n + 1 }).collect();
    assert_eq!((&ops[1].1, summary.bytes_mapped), (&all, 512 + 500 * 1_001));
}

#[test]
fn lists_of_the_same_memory_pair_by_direction() {
    let sg = |dir: &str, dma: u64| {
        format!(
            "dma_map_sg: {NVME} dir={dir} nents=1/1 ents=1/1 dma_addrs={{{dma:#x}}} sizes={{0x200}} phys_addrs={{0x1000}} \
             attrs="
        )
    };
    let end = |dir: &str| format!("dma_unmap_sg: {NVME} dir={dir} phys_addrs={{0x1000}} attrs=");
    let (ops, _) = read(&lines(&[
        sg("TO_DEVICE", 0x100),
        sg("FROM_DEVICE", 0x200),
        end("FROM_DEVICE"),
        end("TO_DEVICE"),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "U1", "U0"]);
}

#[test]
fn merged_lists_take_their_lengths_from_the_iommu() {
    let sg = format!(
        "dma_map_sg: {NVME} dir=FROM_DEVICE nents=3/3 ents=1/1 dma_addrs={{0xf0000}} sizes={{0x4000}} \
         phys_addrs={{0x10000,0x11000,0x50000}} attrs="
    );
    // An interrupt's own pair lies between.
    let (ops, summary) = read(&lines(&[
        iommu_map(0xf0000, 0x10000, 0x3000),
        iommu_map(0xe0000, 0x70000, 0x1000),
        map(0xe0000, 64, 0x70000),
        iommu_map(0xf3000, 0x50000, 0x1000),
        sg.clone(),
    ]));
    let lens: Vec<u64> = ops[1].1.iter().map(|s| s.len).collect();
    assert_eq!(lens, [0x1000, 0x2000, 0x1000]);
    assert_eq!((summary.derived_lengths, summary.iommu_claimed), (1, 3));
    // Without IOMMU events they are guessed, or refused if no guess adds up.
    let (ops, summary) = read(&lines(&[sg.clone(), sg.replace("0x4000", "0x1800")]));
    assert_eq!(ops[0].1.iter().map(|s| s.len).sum::<u64>(), 0x4000);
    assert_eq!((ops.len(), summary.guessed_lengths, summary.skipped), (1, 1, 1));
    assert!(summary.kept_warnings[0].found.starts_with("3 entries for 6,144 bytes"));
}

#[test]
fn cut_lists_keep_what_is_named() {
    let list = |n: u64| (0..n).map(|i| format!("{:#x}", i * 0x2000)).collect::<Vec<_>>().join(",");
    let (ops, summary) = read(&lines(&[
        format!(
            "dma_map_sg: {NVME} dir=TO_DEVICE nents=128/200 ents=1/1 [TRUNCATED] dma_addrs={{0xf0000}} sizes={{0xc8000}} \
             phys_addrs={{{}}} attrs=",
            list(128)
        ),
        // Whether the kernel truncates the unmap's list too or not.
        format!("dma_unmap_sg: {NVME} dir=TO_DEVICE phys_addrs={{{}}} attrs=", list(200)),
    ]));
    assert_eq!(shape(&ops), ["M0", "U0"]);
    assert_eq!((ops[0].1.len(), summary.truncated_lists), (128, 1));
    assert!(ops[0].1.iter().all(|s| s.len == 4096));
    // The IOMMU's runs have the truncated rest.
    let cut = format!(
        "dma_map_sg: {NVME} dir=TO_DEVICE nents=2/4 ents=1/1 [TRUNCATED] dma_addrs={{0xf0000}} sizes={{0x4000}} \
         phys_addrs={{0x10000,0x11000}} attrs="
    );
    let (ops, summary) = read(&lines(&[iommu_map(0xf0000, 0x10000, 0x4000), cut.clone()]));
    assert_eq!(ops[0].1, [Segment { phys: 0x10000, len: 0x4000 }]);
    assert_eq!((summary.derived_lengths, summary.bytes_mapped), (1, 0x4000));
    // DMA segments that are not printed follow in the same range of addresses: up to the next range.
    let cut = format!(
        "dma_map_sg: {NVME} dir=TO_DEVICE nents=2/4 ents=2/4 [TRUNCATED] dma_addrs={{0xf0200,0xf1000}} \
         sizes={{0xe00,0x800}} phys_addrs={{0x10200,0x21000}} attrs="
    );
    let (ops, summary) = read(&lines(&[
        iommu_map(0xf0000, 0x10000, 0x1000),
        iommu_map(0xf1000, 0x21000, 0x1000),
        iommu_map(0xf2000, 0x32000, 0x2000),
        // After a gap: another range's.
        iommu_map(0xf5000, 0x45000, 0x1000),
        cut,
        iommu_unmap(0xf0000, 0x4000),
    ]));
    let all = [(0x10200, 0xe00), (0x21000, 0x800), (0x32000, 0x2000)];
    assert_eq!(ops[0].1, all.map(|(phys, len)| Segment { phys, len }));
    // The last still belongs to the call: it was made for it.
    assert_eq!((summary.iommu_claimed, summary.truncated_lists), (4, 1));
    let cut = format!(
        "dma_map_sg: {NVME} dir=TO_DEVICE nents=2/4 ents=1/1 [TRUNCATED] dma_addrs={{0xf0000}} sizes={{0x4000}} \
         phys_addrs={{0x10000,0x11000}} attrs="
    );
    // A list that is not truncated must be complete.
    let whole = cut.replace("2/4", "2/2").replace(" [TRUNCATED]", "");
    let runs = [iommu_map(0xf0000, 0x10000, 0x1000), iommu_map(0xf1000, 0x11000, 0x1000), whole];
    let (ops, summary) = read(&lines(&runs));
    assert_eq!((ops[0].1.iter().map(|s| s.len).sum::<u64>(), summary.guessed_lengths), (0x4000, 1));
}

#[test]
fn coherent_memory() {
    let alloc = |addr: u64, size: u64| {
        format!(
            "dma_alloc: {NVME} dir=BIDIRECTIONAL dma_addr={addr:x} size={size} virt_addr=c0ffee00 flags=X|Y attrs="
        )
    };
    let free = |addr: u64, size: u64| {
        format!("dma_free: {NVME} dir=BIDIRECTIONAL dma_addr={addr:x} size={size} virt_addr=c0ffee00 attrs=")
    };
    let (ops, summary) = read(&lines(&[
        iommu_map(0xc000, 0x28000, 0x1000),
        iommu_map(0xd000, 0x27000, 0x1000),
        alloc(0xc000, 8000),
        alloc(0x7000, 512),
        free(0, 0),
        free(0xc000, 8000),
        iommu_unmap(0xc000, 0x2000),
        free(0x7000, 512),
        format!(
            "dma_alloc_sgt: {NVME} dir=TO_DEVICE dma_addr=1000 size=8192 phys_addrs={{0x4000,0x8000}} flags=X attrs="
        ),
        format!("dma_free_sgt: {NVME} dir=TO_DEVICE dma_addr=1000 size=8192 phys_addrs={{0x4000,0x8000}}"),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "U0", "U1", "M1", "U1"]);
    assert_eq!(ops[0].1, [Segment { phys: 0x28000, len: 4096 }, Segment { phys: 0x27000, len: 3904 }]);
    assert_eq!(ops[1].1, [Segment { phys: 0x7000, len: 512 }]);
    let (neighbours, _) = read(&lines(&[
        iommu_map(0xc000, 0x28000, 0x1000),
        iommu_map(0xd000, 0x29000, 0x1000),
        alloc(0xc000, 8000),
    ]));
    assert_eq!(neighbours[0].1, [Segment { phys: 0x28000, len: 8000 }], "side by side in memory");
    assert_eq!(ops[4].1, [Segment { phys: 0x4000, len: 4096 }, Segment { phys: 0x8000, len: 4096 }]);
    assert!(matches!(
        ops[0].0.kind,
        OpKind::Map { origin: Origin::Coherent, dir: Direction::Bidirectional, .. }
    ));
    assert_eq!((summary.ignored, summary.iommu_claimed, summary.warnings), (1, 3, 0));
}

#[test]
fn syncs_find_the_mapping_from_its_middle() {
    let sync = |who: &str, addr: u64, len: u64| {
        format!("dma_sync_single_for_{who}: {NVME} dir=FROM_DEVICE dma_addr={addr:x} size={len}")
    };
    let sg = format!(
        "dma_map_sg: {NVME} dir=TO_DEVICE nents=2/2 ents=2/2 dma_addrs={{0x20000,0x40000}} sizes={{0x200,0x300}} \
         phys_addrs={{0x1000,0x2000}} attrs="
    );
    let (ops, summary) = read(&lines(&[
        map(0x1000, 4096, 0x1000),
        map(0x1800, 64, 0x1800),
        sync("cpu", 0x10c0, 64),
        sync("device", 0x18c0, 1536),
        sync("cpu", 0x5000, 64),
        sync("cpu", 0x1fff, 2),
        sg,
        format!(
            "dma_sync_sg_for_cpu: {NVME} dir=TO_DEVICE dma_addrs={{0x20000,0x40010}} sizes={{0x200,0x20}}"
        ),
        unmap(0x1000, 4096),
        sync("cpu", 0x1000, 64),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "C0+192:64", "D0+2240:1536", "M2", "C2+0:512", "C2+528:32", "U0"]);
    assert_eq!((summary.syncs, summary.skipped), (3, 1));
    assert_eq!((summary.syncs_unpaired.before_recording, summary.syncs_unpaired.already_unmapped), (1, 1));
    assert_eq!(summary.kept_warnings[0].expected, "a sync of at most 1 byte at 0x1fff");
}

#[test]
fn syncs_find_the_newest_mapping_and_count_by_their_worst_part() {
    let sync = |addrs: &str| {
        format!("dma_sync_sg_for_cpu: {NVME} dir=TO_DEVICE dma_addrs={{{addrs}}} sizes={{0x40,0x40}}")
    };
    let (ops, summary) = read(&lines(&[
        map(0x1000, 4096, 0x1000),
        map(0x1000, 4096, 0x8000),
        sync("0x1000,0x1040"),
        // One part is too long, and another is outside.
        sync("0x1fff,0x9000"),
        sync("0x9000,0x1fff"),
        // Up to the mapping's end, and from there on.
        sync("0x1f80,0x1fc0"),
        sync("0x2000,0x2040"),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1", "C1+0:64", "C1+64:64", "C1+3968:64", "C1+4032:64"]);
    assert_eq!((summary.syncs, summary.skipped, summary.syncs_unpaired.total()), (2, 2, 1));
}

#[test]
fn maps_that_cannot_be() {
    let (ops, summary) = read(&lines(&[
        map(0x1000, 0, 0x1000),
        map(0x1000, 4096, 1 << 52),
        map(0x1000, 4096, u64::MAX - 5),
        map(u64::MAX - 5, 4096, 0x1000),
        map(u64::MAX, 4096, 0x1000),
        map(0x1000, 4096, (1 << 52) - 4096),
    ]));
    assert_eq!(ops.len(), 1);
    assert_eq!((summary.skipped, summary.ignored, summary.warnings), (4, 1, 4));
    let said =
        summary.kept_warnings.iter().map(|warning| (warning.expected.as_str(), warning.found.as_str()));
    let (phys, dma) = ("physical addresses below 2^52", "DMA addresses below 2^64");
    let expected = [
        ("a size of 1 byte or more", "0 bytes"),
        (phys, "4,096 bytes at 0x10000000000000"),
        (phys, "4,096 bytes at 0xfffffffffffffffa"),
        (dma, "4,096 bytes at 0xfffffffffffffffa"),
    ];
    assert_eq!(said.collect::<Vec<_>>(), expected);
}

/// Once there are `dma_*` events, an `iommu:unmap` waits for its own instead of ending a direct mapping.
#[test]
fn unmaps_wait_where_dma_events_are_recorded() {
    let (ops, summary) = read(&lines(&[
        map(0x1000, 512, 0x1000),
        iommu_map(0xf000, 0x9000, 4096),
        iommu_unmap(0xf000, 4096),
        map(0xf000, 4096, 0x9000),
        unmap(0xf000, 4096),
    ]));
    assert_eq!(shape(&ops), ["M0", "M1"]);
    assert_eq!((summary.iommu_claimed, summary.unpaired.before_recording), (2, 1));
}

#[test]
fn options() {
    let other = map(0x1000, 512, 0x1000).replace(NVME, "nic");
    let text = lines(&[map(0x1000, 512, 0x1000), other.clone(), unmap(0x1000, 512), "nonsense".into()])
        + "nonsense\n";
    let only = ReadOptions { device: Some("nic".into()), ..ReadOptions::default() };
    let (ops, summary) = read_in(text.as_bytes(), only, 10).expect("a trace");
    assert_eq!((ops.len(), summary.filtered, summary.devices.len()), (1, 2, 2));
    // A name must match whole parts.
    for name in ["ni", "nic0", "NIC", ""] {
        let only = ReadOptions { device: Some(name.into()), ..ReadOptions::default() };
        let (ops, summary) = read_in(text.as_bytes(), only, 10).expect("a trace");
        assert_eq!((ops.len(), summary.filtered), (0, 3), "{name}");
    }
    for limit in [1, 2] {
        let limited = ReadOptions { limit: Some(limit), ..ReadOptions::default() };
        let (ops, summary) = read_in(text.as_bytes(), limited, 10).expect("a trace");
        assert_eq!((ops.len() as u64, summary.events, summary.limited), (limit, limit, true));
    }
    let strict = ReadOptions { strict: true, ..ReadOptions::default() };
    let error = read_in(text.as_bytes(), strict, 10).expect_err("strict");
    assert!(matches!(error, TraceError::Strict { .. }));
    assert_eq!(
        error.to_string(),
        "test: line 7: expected \"TASK-PID [CPU] TIME: EVENT: ...\", found \"nonsense\""
    );
}

#[test]
fn the_header_tells_what_is_missing() {
    let text = format!("# entries-in-buffer/entries-written: 5/9   #P:2\n{}", lines(&[map(1, 1, 1)]));
    let (_, summary) = read(&text);
    assert_eq!((summary.promised_entries, summary.cut()), (Some(5), Some(4)));
}

#[test]
fn a_sync_after_the_unmap_is_told_from_one_of_a_mapping_made_before() {
    let sync = |addr: u64| format!("dma_sync_single_for_cpu: {NVME} dir=TO_DEVICE dma_addr={addr:x} size=8");
    let list = "phys_addrs={0x9000} attrs=";
    let sg = format!(
        "dma_map_sg: {NVME} dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={{0x9000}} sizes={{0x800}} {list}"
    );
    let events = [
        map(0x1000, 512, 0x1000),
        unmap(0x1000, 512),
        sg,
        format!("dma_unmap_sg: {NVME} dir=TO_DEVICE {list}"),
        sync(0x1000),
        sync(0x11f8),
        sync(0x9400),
        sync(0x1200),
        sync(0x800),
    ];
    let (_, summary) = read(&lines(&events));
    assert_eq!((summary.syncs_unpaired.already_unmapped, summary.syncs_unpaired.before_recording), (3, 2));
}

/// However many smaller mappings have ended in it since.
#[test]
fn a_late_sync_finds_the_large_mapping_that_ended_behind_small_ones() {
    let sync = |addr: u64| format!("dma_sync_single_for_cpu: {NVME} dir=TO_DEVICE dma_addr={addr:x} size=8");
    let pair = |addr: u64, size: u64| [map(addr, size, addr), unmap(addr, size)];
    for smaller in [1, 100] {
        let mut events = pair(0x10_0000, 0x10_0000).to_vec();
        events.extend((0..smaller).flat_map(|n| pair(0x10_1000 + n * 0x1000, 512)));
        events.extend([
            sync(0x10_0000 + (smaller + 1) * 0x1000),
            sync(0x1f_fff8),
            sync(0x20_0000),
            sync(0xf_fff8),
        ]);
        let (_, summary) = read(&lines(&events));
        let syncs = &summary.syncs_unpaired;
        assert_eq!((syncs.already_unmapped, syncs.before_recording), (2, 2), "behind {smaller}");
    }
}

#[test]
fn what_is_passed_over_is_named() {
    let bad = "dma_map_page: d dir=TO_DEVICE dma_addr=x size=1 phys_addr=1 attrs=".to_owned();
    let wraps = "unmap: IOMMU: iova=0xfffffffffffff000 size=8192 unmapped_size=8192".to_owned();
    let (_, summary) = read(&lines(&[bad.clone(), bad, map(0x1000, 0, 0x1000), wraps]));
    let names: Vec<_> = summary.skipped_names.iter().map(|(name, n)| (name.as_str(), *n)).collect();
    assert_eq!((names, summary.skipped), (vec![("dma_map_page", 3), ("unmap", 1)], 4));
}

#[test]
fn a_clock_that_counts_no_seconds_is_refused() {
    let text = "t-1 [000] ..... 1.0: sched_switch: x\nt-1 [000] d..1. 48193310551234: dma_free: x\n";
    let error = read_in(text.as_bytes(), ReadOptions::default(), 10).unwrap_err();
    assert!(matches!(&error, TraceError::Clock { line: 2, .. }), "{error}");
    assert!(
        error.to_string().contains("48193310551234") && error.to_string().contains("trace_clock"),
        "{error}"
    );
}

#[test]
fn a_limit_is_no_loss() {
    let text = "# entries-in-buffer/entries-written: 2/2\n".to_owned()
        + &lines(&[map(0x1000, 8, 0), unmap(0x1000, 8)]);
    let read = |limit| {
        let options = ReadOptions { limit, ..ReadOptions::default() };
        read_in(text.as_bytes(), options, 10).unwrap().1
    };
    assert_eq!((read(Some(1)).cut(), read(Some(1)).limited), (None, true));
    assert_eq!((read(None).cut(), read(None).limited), (None, false));
}
