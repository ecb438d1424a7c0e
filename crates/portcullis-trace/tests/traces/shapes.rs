//! Lines from bug reports and guides, with changed names and addresses: each is parsed without a warning.

use super::pairing::{iommu_map, iommu_unmap, lines, map, shape, unmap};
use crate::common::{read, trace};
use portcullis_trace::parse::{Line, Lists, parse_line};
use portcullis_trace::{OpKind, Origin, Segment};

#[test]
fn lines_of_bug_reports_are_read() {
    let text = "\
        \x20    qemu-kvm-4500    [008] .......   400.300478: map: IOMMU: iova=0x0000000000000000 - 0x0000000000002000 paddr=0x0000000111000000 size=8192\n\
        \x20       igt-test-101   [004] .N...   400.300500: unmap: IOMMU: iova=0x0000000000000000 - 0x0000000000002000 size=8192 unmapped_size=8192\n\
        >>     gst-launch-1.0-606     [000] .....   400.400000: map: IOMMU: iova=0x00000000ebed0000 - 0x00000000ebed5000 paddr=0x0000000090000000 size=20480\n\
        >>     gst-launch-1.0-606     [000] .....   400.500000: unmap: IOMMU: iova=0x00000000ebed0000 - 0x00000000ebed5000 size=20480 unmapped_size=20480\n\
        irq/26-AMD-Vi-150     [006] .....   400.600000: io_page_fault: IOMMU:wlan_pci 0000:c1:00.0 iova=0x00000000fe980000 flags=0x0001\n\
        disp_share_-1400    [000] b..2.   400.700000: swiotlb_bounced: dev_name: d4280000.sdh dma_mask=ffffffff dev_addr=ffffffffffffffff size=4 NORMAL\n\
        \x20         dd-77      [001] .....   400.800000: <stack trace>\n\
        \x20=> iommu_map\n\
        \x20=> __iommu_dma_map+0x9c/0x100\n\
        CPU:3 [LOST 7 EVENTS]\n";
    let (ops, summary) = read(text);
    assert_eq!(shape(&ops), ["M0", "U0", "M0", "U0"]);
    assert_eq!(
        (summary.warnings, summary.skipped, summary.lost_events),
        (0, 0, 7),
        "{:?}",
        summary.kept_warnings
    );
    assert_eq!((summary.not_mapping_events, summary.other_events), (2, 1));
}

/// Phones' kernels have the device in IOMMU events; VT-d's own events had it, too, and buffer sizes.
#[test]
fn events_of_the_iommu_may_name_their_device() {
    let of = |map: &str, unmap: &str| {
        let (ops, summary) = read(&lines(&[map.to_owned(), unmap.to_owned()]));
        assert_eq!((shape(&ops), summary.warnings), (vec!["M0".to_owned(), "U0".into()], 0), "{map}");
        (summary.devices.clone(), ops[0].1.clone())
    };
    let phone = of(
        "map: IOMMU: dev=1d84000.disk iova=0x0000000fffa88000 paddr=0x00000001063db000 size=4096",
        "unmap: IOMMU: dev=1d84000.disk iova=0x0000000fffa88000 size=4096 unmapped_size=4096",
    );
    assert_eq!(phone, (vec!["1d84000.disk".into()], vec![Segment { phys: 0x1_063d_b000, len: 4096 }]));
    for kind in ["single", "sg"] {
        let vtd = of(
            &format!("map_{kind}: dev=0000:3b:00.0 dev_addr=0xffffe000 phys_addr=0x123456000 size=8192"),
            &format!("unmap_{kind}: dev=0000:3b:00.0 dev_addr=0xffffefff size=2"),
        );
        assert_eq!(
            vtd,
            (vec!["0000:3b:00.0".into()], vec![Segment { phys: 0x1_2345_6000, len: 8192 }]),
            "{kind}"
        );
    }
    // Two devices: the event does not tell which.
    let one = "map_single: dev=a dev_addr=0x1000 phys_addr=0x1000 size=4096".to_owned();
    let other = "map_single: dev=b dev_addr=0x9000 phys_addr=0x9000 size=4096".to_owned();
    let end = "unmap_single: dev=a dev_addr=0x1000 size=4096".to_owned();
    assert_eq!(read(&lines(&[one, other, end])).1.devices, ["iommu"]);
}

/// Linux 5.4 to 5.10 round the size of `map_single` to whole pages and leave the offset in the addresses; newer versions of `map_sg` have
/// one event for each entry and round neither; bounce buffers' events have an aligned device address only.
#[test]
fn mappings_by_vtd_s_own_events_are_whole_pages() {
    let of = |maps: &[&str], unmap: &str| {
        let events: Vec<String> = maps.iter().chain([&unmap]).map(|event| (*event).to_owned()).collect();
        let (ops, summary) = read(&lines(&events));
        assert_eq!((summary.warnings, summary.iommu_unclaimed, summary.other_events), (0, 0, 0));
        (shape(&ops), ops[0].1.iter().map(|piece| (piece.phys, piece.len)).collect::<Vec<_>>())
    };
    let ends = |pieces: &[(u64, u64)]| (vec!["M0".to_owned(), "U0".to_owned()], pieces.to_vec());
    assert_eq!(
        of(
            &["map_single: dev=d dev_addr=0xfffff200 phys_addr=0x123456200 size=4096"],
            "unmap_single: dev=d dev_addr=0xfffff200 size=1500"
        ),
        ends(&[(0x1_2345_6000, 4096)])
    );
    assert_eq!(
        of(
            &[
                "map_sg: dev=d [1/2] dev_addr=0xffffc200 phys_addr=0x300000200 size=4096",
                "map_sg: dev=d [2/2] dev_addr=0xffffe000 phys_addr=0x310000000 size=512"
            ],
            "unmap_single: dev=d dev_addr=0xffffc000 size=12288"
        ),
        ends(&[(0x3_0000_0000, 8192), (0x3_1000_0000, 4096)])
    );
    // Such an unmap is reported twice, and so is each of a bounce buffer.
    assert_eq!(
        of(
            &[
                "map_sg: dev=d dev_addr=0xffffc000 phys_addr=0x300000200 size=8192",
                "unmap_single: dev=d dev_addr=0xffffc000 size=8192"
            ],
            "unmap_sg: dev=d dev_addr=0xffffc000 size=8192"
        ),
        ends(&[(0x3_0000_0000, 8192)])
    );
    assert_eq!(
        of(
            &[
                "bounce_map_single: dev=d dev_addr=0xffffa000 phys_addr=0x300000ff0 size=1500",
                "bounce_map_sg: dev=d [1/1] dev_addr=0xffffa000 phys_addr=0x300000ff0 size=1500"
            ],
            "bounce_unmap_single: dev=d dev_addr=0xffffa000 size=1500"
        ),
        ends(&[(0x3_0000_0000, 4096)])
    );
}

/// Since 6.13 the kernel records a `dma_free` of no memory, whose address may be another's by now.
#[test]
fn a_free_of_nothing_ends_nothing() {
    for nowhere in ["0000000000000000", "(nil)"] {
        let events = [
            "dma_alloc: d dir=BIDIRECTIONAL dma_addr=100000 size=4096 virt_addr=c0de flags=X attrs="
                .to_owned(),
            format!("dma_free: d dir=BIDIRECTIONAL dma_addr=100000 size=4096 virt_addr={nowhere} attrs="),
            "dma_free: d dir=BIDIRECTIONAL dma_addr=900000 size=4096 virt_addr=0 attrs=".to_owned(),
            "dma_free: d dir=BIDIRECTIONAL dma_addr=100000 size=4096 virt_addr=c0de attrs=".to_owned(),
        ];
        let (ops, summary) = read(&lines(&events));
        assert_eq!(
            (shape(&ops), summary.ignored, summary.unpaired.total()),
            (vec!["M0".into(), "U0".into()], 2, 0)
        );
        assert_eq!(ops[1].0.line, 6, "the last of them");
    }
}

/// Also beside other attributes, and if a library prints these as a number.
#[test]
fn registers_are_known_by_their_attribute() {
    let words = |attrs: &str| {
        format!(
            "dma_map_phys: d dir=BIDIRECTIONAL dma_addr=e0000000 size=4096 phys_addr=e0000000 attrs={attrs}"
        )
    };
    let number = |attrs: &str| {
        format!(
            "dma_map_phys: [FAILED TO PARSE] device=d phys_addr=3758096384 dma_addr=3758096384 size=4096 dir=0 attrs={attrs}"
        )
    };
    for (event, registers) in [
        (words("MMIO|SKIP_CPU_SYNC"), true),
        (words("SKIP_CPU_SYNC|MMIO|0x8000"), true),
        (words("MMIO_OF_ANOTHER_KIND"), false),
        (words(""), false),
        (number("0x420"), true),
        (number("1056"), true),
        (number("0x20"), false),
    ] {
        let (ops, summary) = read(&lines(std::slice::from_ref(&event)));
        assert_eq!(summary.warnings, 0, "{event}");
        let OpKind::Map { origin, .. } = &ops[0].0.kind else { panic!("{event}") };
        assert_eq!(*origin == Origin::Resource, registers, "{event}");
    }
}

#[test]
fn an_unmap_ends_what_it_has_unmapped() {
    let end = |size: u64, unmapped: u64| {
        format!(
            "unmap: IOMMU: iova=0x0000000000001000 - 0x0000000000003000 size={size} unmapped_size={unmapped}"
        )
    };
    let maps = [iommu_map(0x1000, 0x50_0000, 0x1000), iommu_map(0x2000, 0x90_0000, 0x1000)];
    let of = |end: String| {
        let (ops, summary) = read(&lines(&[maps[0].clone(), maps[1].clone(), end]));
        assert_eq!(summary.warnings, 0);
        (shape(&ops), summary.ignored)
    };
    let said = |shape: &[&str]| shape.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    assert_eq!(of(end(0x2000, 0)), (said(&["M0", "M1"]), 1), "nothing went");
    assert_eq!(of(end(0x2000, 0x1000)), (said(&["M0", "M1", "U0"]), 0), "the second is mapped yet");
    assert_eq!(of(end(0x1000, 0x2000)), (said(&["M0", "U0"]), 0), "a large page went as a whole");
    assert_eq!(of(end(0, 0)), (said(&["M0", "M1"]), 1));
}

/// The kernel's error value has as many bits as its addresses.
#[test]
fn maps_that_failed_are_none() {
    for error in ["ffffffffffffffff", "ffffffff"] {
        let failed =
            format!("dma_map_phys: d dir=TO_DEVICE dma_addr={error} size=4096 phys_addr=7000 attrs=NO_WARN");
        let (ops, summary) = read(&lines(&[failed]));
        assert_eq!((ops.len(), summary.ignored, summary.maps), (0, 1, 0), "{error}");
    }
    for nowhere in ["0000000000000000", "0", "0x0", "(nil)", "(null)"] {
        for name in ["dma_alloc", "dma_alloc_pages"] {
            let failed =
                format!("{name}: d dma_addr=9d000 size=4096 virt_addr={nowhere} flags=GFP_KERNEL attrs=");
            let (ops, summary) = read(&lines(&[failed]));
            assert_eq!((ops.len(), summary.ignored), (0, 1), "{name} at {nowhere}");
        }
    }
    let failed =
        "dma_alloc_sgt_err: d dir=NONE dma_addr=0 size=4096 virt_addr=0000000000000000 flags=X attrs=";
    assert_eq!(read(&lines(&[failed.to_owned()])).1.ignored, 1);
}

#[test]
fn the_direction_of_allocations_is_read_where_it_is_one() {
    use portcullis_trace::event::Direction::{Bidirectional, FromDevice};
    for (event, expected) in [
        ("dma_alloc: d dma_addr=1000 size=64 virt_addr=c0de flags=X attrs=", Bidirectional),
        ("dma_alloc: d dir=FROM_DEVICE dma_addr=1000 size=64 virt_addr=c0de flags=X attrs=", Bidirectional),
        ("dma_alloc: d dir=0x8a2f dma_addr=1000 size=64 virt_addr=c0de flags=X attrs=", Bidirectional),
        (
            "dma_alloc_pages: d dir=FROM_DEVICE dma_addr=1000 size=64 virt_addr=c0de flags=X attrs=",
            FromDevice,
        ),
        ("dma_alloc_pages: d dir=0x5a dma_addr=1000 size=64 virt_addr=c0de flags=X attrs=", Bidirectional),
        (
            "dma_alloc: [FAILED TO PARSE] device=d virt_addr=0xffff8881 dma_addr=4096 size=64 flags=1 dir=77 attrs=0",
            Bidirectional,
        ),
    ] {
        let free = "dma_free: d dir=0x77 dma_addr=1000 size=64 virt_addr=c0de attrs=".to_owned();
        let (ops, summary) = read(&lines(&[event.to_owned(), free]));
        assert_eq!((shape(&ops), summary.warnings), (vec!["M0".to_owned(), "U0".into()], 0), "{event}");
        assert!(matches!(ops[0].0.kind, OpKind::Map { dir, .. } if dir == expected), "{event}: {:?}", ops[0]);
    }
    // A map must have one.
    let (_, summary) = read(&lines(&[map(0x1000, 8, 0x1000).replace("TO_DEVICE", "0x8a2f")]));
    assert_eq!(summary.skipped, 1);
}

#[test]
fn what_perf_lost_is_counted_in_all_its_words() {
    let mut lists = Lists::default();
    for (line, expected) in [
        ("iob   126 [001]  6.820000: PERF_RECORD_LOST lost 12", Line::Lost(12)),
        ("iob 12/13 [001]  6.820000: unknown: PERF_RECORD_LOST lost 9", Line::Lost(9)),
        ("iob   126 [001]  6.820000: PERF_RECORD_LOST_SAMPLES lost 3", Line::Lost(3)),
        ("PERF_RECORD_LOST lost 7", Line::Lost(7)),
        ("PERF_RECORD_LOST: lost=5", Line::Lost(5)),
        ("PERF_RECORD_LOST of another form", Line::Lost(1)),
        ("Processed 7378132 events and lost 2 chunks!", Line::LostInAll(2)),
        ("Processed 0 events and LOST 1175296!", Line::LostInAll(1_175_296)),
        ("Check IO/CPU overload!", Line::Nothing),
        ("ffffffff8118d2a5 dma_map_page_attrs+0x35 ([kernel.kallsyms])", Line::Nothing),
    ] {
        assert_eq!(parse_line(1, line.as_bytes(), &mut lists), Ok(expected), "{line}");
    }
    assert!(parse_line(1, b"Processed food", &mut lists).is_err());
    let text = "iob 1 [001]  6.82: PERF_RECORD_LOST lost 12\nProcessed 3 events and lost 1 chunks!\n"
        .to_owned()
        + &lines(&[map(0x1000, 8, 0x1000)]);
    assert_eq!(read(&text).1.lost_events, 12, "one loss is counted once");
}

/// A mapping with only IOMMU events ends at its unmap, although that may be a `dma_*` event's until its CPU does something else.
#[test]
fn what_no_dma_event_claims_ends_in_time() {
    let first = [(0, 1, map(0x9_0000, 64, 0x9_0000)), (0, 2, unmap(0x9_0000, 64))];
    let linked = [(0, 10, iommu_map(0x1000, 0x50_0000, 0x1000)), (0, 20, iommu_unmap(0x1000, 0x1000))];
    let of = |then: &[(u32, u64, String)]| {
        let events: Vec<_> = first.iter().chain(&linked).chain(then).cloned().collect();
        let events: Vec<_> = events.iter().map(|(cpu, us, event)| (*cpu, *us, event.as_str())).collect();
        let (ops, summary) = read(&trace(&events));
        let ends = ops.iter().filter(|(op, _)| matches!(op.kind, OpKind::Unmap { .. }));
        let ends: Vec<u64> = ends.map(|(op, _)| (op.time_ns - 38_000_000_000) / 1000).collect();
        (ends, summary.direct_unmaps)
    };
    let other = |cpu, us| (cpu, us, map(0x7_0000, 64, 0x7_0000));
    assert_eq!(of(&[(0, 900, "sched_switch: x".into()), other(1, 901)]), (vec![2, 20], 1), "its CPU goes on");
    assert_eq!(of(&[other(1, 900)]), (vec![2, 20], 1), "another does, later");
    assert_eq!(of(&[other(1, 30), other(1, 900)]), (vec![2, 30], 1), "and no earlier than the grace allows");
    assert_eq!(of(&[]), (vec![2, 20], 1), "the recording ends");
    // Then it was a `dma_*` event's, of an earlier mapping.
    assert_eq!(of(&[(0, 21, unmap(0x1000, 0x1000)), other(0, 900)]), (vec![2], 0));
}
