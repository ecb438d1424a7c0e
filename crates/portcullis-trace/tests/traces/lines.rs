//! Single lines: prefixes, fields, comments and lines that are no event.

use portcullis_trace::event::{Direction, EventKind};
use portcullis_trace::parse::{Line, Lists, parse_line};

const EVENT: &str =
    "dma_map_page: 0000:00:03.0 dir=FROM_DEVICE dma_addr=ff89c000 size=12288 phys_addr=113063000 attrs=";

/// The CPU and time of a line that must be a map.
fn head(line: &str) -> (u32, u64) {
    let mut lists = Lists::default();
    match parse_line(7, line.as_bytes(), &mut lists) {
        Ok(Line::Event(event)) => {
            assert_eq!(event.line, 7);
            assert!(matches!(event.kind, EventKind::Map { .. }), "{event:?}");
            (event.cpu, event.time_ns)
        }
        other => panic!("{line:?} gave {other:?}"),
    }
}

#[test]
fn prefixes_of_all_shapes() {
    for (prefix, expected) in [
        ("             fio-350     [000] .....    38.815994: ", (0, 38_815_994_000)),
        ("          <idle>-0       [001] d.H1.    38.824651: ", (1, 38_824_651_000)),
        ("    kworker/u8:1-31      [000] ..s1.     6.5: ", (0, 6_500_000_000)),
        ("     Web Content-123     [012] d.h1     1.000000001: ", (12, 1_000_000_001)),
        ("     a [b] c-12     [003]   2.25: ", (3, 2_250_000_000)),
        ("     a [7] c-12     [003] .....   2.25: ", (3, 2_250_000_000)),
        ("     fio-350   (    349) [001] .....   3.: ", (1, 3_000_000_000)),
        ("     fio-350   (-----) [001]  1.123456: ", (1, 1_123_456_000)),
        ("fio  350 [001]  1.123456: ", (1, 1_123_456_000)),
        ("fio-350 [8191]  1.5: ", (8191, 1_500_000_000)),
    ] {
        assert_eq!(head(&format!("{prefix}{EVENT}")), expected, "{prefix}");
        assert_eq!(head(&format!("{prefix}{EVENT}\r")), expected, "CRLF {prefix}");
    }
    // As perf and trace-cmd print it.
    assert_eq!(head(&format!("fio-1 [000] 1.5:     dma:{EVENT}")).1, 1_500_000_000);
    assert_eq!(
        head(&format!("fio-1 [000] 1.5: {}", EVENT.replace("page: ", "page:       "))).1,
        1_500_000_000
    );
}

#[test]
fn fields_may_be_missing_added_and_reordered() {
    let mut lists = Lists::default();
    let line = "t-1 [000] 1.0: dma_map_phys: Fixed MDIO bus.0 dir=BIDIRECTIONAL cookie=x size=5 new={0x1} \
                phys_addr=1000 dma_addr=ABC";
    let Ok(Line::Event(event)) = parse_line(1, line.as_bytes(), &mut lists) else { panic!("not an event") };
    let EventKind::Map { region, phys, resource } = event.kind else { panic!("{event:?}") };
    assert_eq!(region.device, b"Fixed MDIO bus.0");
    assert_eq!((region.dir, region.dma_addr, region.size), (Direction::Bidirectional, 0xabc, 5));
    assert_eq!((phys, resource), (0x1000, false));
}

#[test]
fn lists_and_their_cut_mark() {
    for mark in [" [TRUNCATED]", "[TRUNCATED]"] {
        let mut lists = Lists::default();
        let line = format!(
            "t-1 [000] 1.0: dma_map_sg: d dir=TO_DEVICE nents=2/300 ents=1/2{mark} dma_addrs={{0x10}} sizes={{0x20}} \
             phys_addrs={{0x1,0x2}} attrs=NO_WARN"
        );
        let Ok(Line::Event(event)) = parse_line(1, line.as_bytes(), &mut lists) else {
            panic!("not an event")
        };
        let EventKind::MapSg(sg) = event.kind else { panic!("{event:?}") };
        assert!(sg.truncated);
        assert_eq!((sg.nents, sg.full_nents, sg.ents, sg.full_ents), (2, 300, 1, 2));
        assert_eq!((sg.dma_addrs, sg.sizes, sg.phys_addrs), (&[0x10][..], &[0x20][..], &[1, 2][..]));
        assert_eq!(sg.attrs, b"NO_WARN");
    }
}

/// Output of libtraceevent 1.7.1 with the formats of Linux 6.12 (fields that it cannot parse are bare), and lists as it prints those that
/// it can.
#[test]
fn lists_as_perf_and_trace_cmd_print_them() {
    let (map, phys) = ([0xff89_c000], [0x1_1306_3000, 0x1_1306_5200]);
    let bytes = "phys_addrs=ARRAY[00, 30, 06, 13, 01, 00, 00, 00, 00, 52, 06, 13, 01, 00, 00, 00]";
    let lengths = "dma_addrs=ARRAY[00, c0, 89, ff, 00, 00, 00, 00] lengths=ARRAY[00, 20, 00, 00]";
    let mut lists = Lists::default();
    let mut kind = |text: &str, see: &dyn Fn(EventKind<'_>)| {
        let line = format!("fio-350   [001]    38.815994: {text}");
        match parse_line(1, line.as_bytes(), &mut lists) {
            Ok(Line::Event(event)) => see(event.kind),
            other => panic!("{text} gave {other:?}"),
        }
    };
    let maps = [
        format!(
            "dma_map_sg: [FAILED TO PARSE] device=0000:00:03.0 full_nents=2 full_ents=1 truncated=0 {bytes} {lengths} dir=2 \
             attrs=0x0"
        ),
        "dma_map_sg: 0000:00:03.0 dir=FROM_DEVICE nents=2/2 ents=1/1 dma_addrs=4287217664 sizes=8192 \
         phys_addrs=4614139904 4614148608 attrs="
            .to_owned(),
    ];
    for text in &maps {
        kind(text, &|kind| {
            let EventKind::MapSg(sg) = kind else { panic!("{kind:?}") };
            assert_eq!((sg.device, sg.dir), (&b"0000:00:03.0"[..], Direction::FromDevice), "{text}");
            assert_eq!((sg.dma_addrs, sg.sizes, sg.phys_addrs), (&map[..], &[8192][..], &phys[..]), "{text}");
            assert_eq!((sg.full_nents, sg.full_ents, sg.truncated), (2, 1, false), "{text}");
        });
    }
    let cut = maps[0].replace("full_nents=2", "full_nents=200").replace("truncated=0", "truncated=1");
    kind(&cut, &|kind| {
        let EventKind::MapSg(sg) = kind else { panic!("{kind:?}") };
        assert_eq!((sg.full_nents, sg.full_ents, sg.truncated), (200, 1, true));
    });
    let unmaps = [
        format!(
            "dma_unmap_sg: [FAILED TO PARSE] device=Fixed MDIO bus.0 {} dir=2 attrs=0x0",
            bytes.replace("phys_addrs", "addrs")
        ),
        "dma_unmap_sg: Fixed MDIO bus.0 dir=FROM_DEVICE phys_addrs=4614139904 4614148608 attrs=".to_owned(),
    ];
    for text in &unmaps {
        kind(text, &|kind| {
            let EventKind::UnmapSg { device, dir, phys_addrs } = kind else { panic!("{kind:?}") };
            assert_eq!((device, dir), (&b"Fixed MDIO bus.0"[..], Direction::FromDevice), "{text}");
            assert_eq!(phys_addrs, phys, "{text}");
        });
    }
    let alloc = format!(
        "dma_alloc_sgt: [FAILED TO PARSE] device=0000:00:03.0 {bytes} dma_addr=4287217664 size=12288 dir=0 flags=0 attrs=0x0"
    );
    kind(&alloc, &|kind| {
        let EventKind::Alloc { region, phys_addrs, .. } = kind else { panic!("{kind:?}") };
        assert_eq!((region.dma_addr, region.size, phys_addrs), (map[0], 12288, &phys[..]));
        assert_eq!(region.dir, Direction::Bidirectional);
    });
    let sync = format!("dma_sync_sg_for_cpu: [FAILED TO PARSE] device=0000:00:03.0 {lengths} dir=1");
    kind(&sync, &|kind| {
        let EventKind::SyncSg { dir, dma_addrs, sizes, .. } = kind else { panic!("{kind:?}") };
        assert_eq!((dir, dma_addrs, sizes), (Direction::ToDevice, &map[..], &[8192][..]));
    });
    for wrong in ["dir=7", "dir=2 addrs=ARRAY[00, 30]", "dir=2 addrs=ARRAY[00, 300", "size=1"] {
        let line = format!("fio-350 [001] 38.8: dma_unmap_sg: [FAILED TO PARSE] device=d {wrong}");
        assert!(parse_line(1, line.as_bytes(), &mut lists).is_err(), "{wrong}");
    }
}

/// The mark, or either number, says that a list is truncated.
#[test]
fn any_of_three_signs_tells_that_a_list_is_cut() {
    for (counts, truncated) in [
        ("nents=2/2 ents=1/1", false),
        ("nents=2/2 ents=1/1[TRUNCATED]", true),
        ("nents=2/2 ents=1/1 [TRUNCATED]", true),
        ("nents=2/3 ents=1/1", true),
        ("nents=2/2 ents=1/2", true),
    ] {
        let mut lists = Lists::default();
        let line = format!(
            "t-1 [000] 1.0: dma_map_sg: d dir=TO_DEVICE {counts} dma_addrs={{0x9}} dma_addrs={{0x10}} sizes={{0x20}} \
             phys_addrs={{0x1,0x2}}"
        );
        let Ok(Line::Event(event)) = parse_line(1, line.as_bytes(), &mut lists) else {
            panic!("not an event")
        };
        let EventKind::MapSg(sg) = event.kind else { panic!("{event:?}") };
        assert_eq!(sg.truncated, truncated, "{counts}");
        assert_eq!(sg.dma_addrs, [0x10], "the last of a name");
    }
}

#[test]
fn everything_that_unmaps_or_frees_is_known() {
    for (name, frees) in [
        ("dma_unmap_page", false),
        ("dma_unmap_phys", false),
        ("dma_unmap_resource", false),
        ("dma_free", true),
        ("dma_free_pages", true),
        ("dma_free_sgt", true),
    ] {
        let mut lists = Lists::default();
        let line = format!("t-1 [000] 1.0: {name}: d dir=TO_DEVICE dma_addr=1000 size=5 attrs=");
        let Ok(Line::Event(event)) = parse_line(1, line.as_bytes(), &mut lists) else { panic!("{name}") };
        let (EventKind::Unmap { region } | EventKind::Free { region }) = &event.kind else {
            panic!("{event:?}")
        };
        assert_eq!((region.dma_addr, region.size), (0x1000, 5));
        assert_eq!(matches!(event.kind, EventKind::Free { .. }), frees);
    }
}

#[test]
fn lines_that_are_no_events() {
    let mut lists = Lists::default();
    for (line, expected) in [
        ("", Line::Nothing),
        ("  \r", Line::Nothing),
        ("# tracer: nop", Line::Nothing),
        ("##### CPU 1 buffer started ####", Line::Nothing),
        ("# entries-in-buffer/entries-written: 96162/100000   #P:2", Line::Promise(96162)),
        ("CPU:1 [LOST 12 EVENTS]", Line::Lost(12)),
        ("[LOST 3 EVENTS]", Line::Lost(3)),
        ("CPU:0 [LOST EVENTS]", Line::Lost(1)),
        ("CPU:7 [204600 EVENTS DROPPED]", Line::Lost(204_600)),
        ("CPU:7 [EVENTS DROPPED]", Line::Lost(1)),
        ("cpus=2", Line::Nothing),
        ("version = 7", Line::Nothing),
        ("CPU 0 is empty", Line::Nothing),
    ] {
        assert_eq!(parse_line(1, line.as_bytes(), &mut lists), Ok(expected), "{line}");
    }
}

#[test]
fn a_count_without_a_decimal_point_is_no_time() {
    let mut lists = Lists::default();
    for (line, ticks) in [
        ("t-1 [000] ..... 48193310551234: map: x", &b"48193310551234"[..]),
        ("t-1 (  349) [001] .....   3: dma_map_page: x", b"3"),
        ("t-1 [001] 7: foo", b"7"),
    ] {
        assert_eq!(parse_line(1, line.as_bytes(), &mut lists), Ok(Line::Ticks(ticks)), "{line}");
    }
}

#[test]
fn events_of_other_kinds() {
    let mut lists = Lists::default();
    for (event, mapping) in [
        ("sched_switch: prev_comm=x", false),
        ("vfs_read <-ksys_read", false),
        ("detach_device_from_domain: IOMMU: device=x", true),
        ("qi_submit: iotlb_inv dmar0: 0x1", true),
        ("cache_tag_flush_all: dmar0/dmar0 type iotlb did 6 pasid 0 ref 1", true),
        ("swiotlb_bounced: dev_name: d dma_mask=ffffffff dev_addr=1f000 size=4 FORCE", true),
        ("io_page_fault: IOMMU:x y iova=0x1 flags=0x1", true),
    ] {
        let line = format!("t-1 [000] ..... 1.0: {event}");
        let Ok(Line::Event(found)) = parse_line(1, line.as_bytes(), &mut lists) else { panic!("{line}") };
        assert_eq!(found.kind, if mapping { EventKind::NotMapping } else { EventKind::Other });
    }
}

/// An event without a required field is refused; others are optional.
#[test]
fn each_field_that_must_be_there_is_missed() {
    let region = "dir=TO_DEVICE dma_addr=1000 size=512";
    let spans = "dma_addrs={0x1000} sizes={0x200}";
    let (of_dma, all) = (["dir=", "dma_addr=", "size="], ["dir=", "dma_addr=", "size=", "phys_addr="]);
    let lists = ["dir=", "dma_addrs=", "sizes=", "phys_addrs="];
    let events: [(String, &[&str]); 12] = [
        (format!("dma_map_page: d {region} phys_addr=1000 attrs=NO_WARN"), &all),
        (format!("dma_map_resource: d {region} phys_addr=1000 attrs=NO_WARN"), &all),
        (format!("dma_unmap_page: d {region} attrs=NO_WARN"), &of_dma),
        (format!("dma_sync_single_for_cpu: d {region}"), &of_dma),
        (format!("dma_sync_single_for_device: d {region}"), &of_dma),
        (format!("dma_alloc: d {region} virt_addr=1 flags=X attrs=NO_WARN"), &of_dma[1..]),
        (format!("dma_free: d {region} virt_addr=1 attrs=NO_WARN"), &of_dma[1..]),
        (
            format!(
                "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 {spans} phys_addrs={{0x1000}} attrs=NO_WARN"
            ),
            &lists,
        ),
        ("dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x1000} attrs=NO_WARN".into(), &["dir=", "phys_addrs="]),
        (format!("dma_sync_sg_for_cpu: d dir=TO_DEVICE {spans}"), &lists[..3]),
        ("map: IOMMU: iova=0x1000 paddr=0x1000 size=512".into(), &["iova=", "paddr=", "size="]),
        ("unmap: IOMMU: iova=0x1000 size=512 unmapped_size=512".into(), &["iova=", "size="]),
    ];
    for (event, needed) in events {
        let words: Vec<&str> = event.split(' ').collect();
        let missed = words.iter().filter(|word| {
            let others: Vec<&str> = words.iter().copied().filter(|other| other != *word).collect();
            let line = format!("t-1 [000] ..... 1.0: {}", others.join(" "));
            word.contains('=') && parse_line(1, line.as_bytes(), &mut Lists::default()).is_err()
        });
        let missed: Vec<&str> = missed.map(|word| &word[..=word.find('=').unwrap()]).collect();
        assert_eq!(missed, needed, "{event}");
    }
}

#[test]
fn what_cannot_be_read_says_why() {
    let mut lists = Lists::default();
    let mut fails = |line: &str, is_event: bool, expected: &str| {
        let error = parse_line(1, line.as_bytes(), &mut lists).expect_err(line);
        assert_eq!(error.is_event, is_event, "{line}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    fails("hello world", false, "TASK-PID [CPU] TIME");
    fails("t-1 [000] ..... 1.0000000000: map: x", false, "TASK-PID");
    fails("t-1 [99999999999999999999] ..... 1.0: map: x", false, "TASK-PID");
    fails("t-1 [8192] ..... 1.0: map: x", false, "TASK-PID");
    fails("t-1 [000] ..... 99999999999999999.0: map: x", false, "TASK-PID");
    let event = |text: &str| format!("t-1 [000] ..... 1.0: {text}");
    fails(&event("map: x"), true, "IOMMU: iova=");
    fails(&event("map: IOMMU: iova=0x1 size=4096"), true, "paddr=");
    fails(&event("dma_map_page: d dir=NONE dma_addr=1 size=1 phys_addr=1"), true, "a direction");
    fails(&event("dma_map_page: d dir=TO_DEVICE dma_addr=-1 size=1 phys_addr=1"), true, "hexadecimal");
    fails(
        &event("dma_map_page: d dir=TO_DEVICE dma_addr=11112222333344445 size=1 phys_addr=1"),
        true,
        "64 bits",
    );
    fails(
        &event("dma_map_page: d dir=TO_DEVICE dma_addr=1 size=18446744073709551616 phys_addr=1"),
        true,
        "decimal",
    );
    fails(&event("dma_map_page: d dir=TO_DEVICE dma_addr=1 size=1"), true, "phys_addr=");
    fails(&event("dma_map_page: d"), true, "dir=");
    fails(&event("dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x1,}"), true, "braces");
    fails(&event("dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x1"), true, "braces");
    let uneven = "dma_map_sg: d dir=TO_DEVICE dma_addrs={0x1} sizes={} phys_addrs={0x1}";
    fails(&event(uneven), true, "as many sizes=");
    // Shortened and harmless to a terminal.
    let long = format!("\u{1b}[2J{}", "x".repeat(500));
    let error = parse_line(1, long.as_bytes(), &mut lists).expect_err("no event").to_string();
    assert!(error.len() < 150 && error.contains("\\u{1b}[2J") && error.ends_with("...\""), "{error}");
}
