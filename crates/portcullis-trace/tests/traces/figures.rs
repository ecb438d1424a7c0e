//! Whole outputs and counts, of recordings in which no two figures are the same.

use std::fmt::Write;

use portcullis::domain::Policy;
use portcullis_trace::anonymize::anonymize;
use portcullis_trace::replay::{FORMATS, Options, Profile};
use portcullis_trace::{Chunk, Input, ReadOptions, Trace};

use crate::common::{on_cpu0, policy, read, read_in, run, trace};
use crate::pairing::{iommu_map, lines, map, shape, unmap};

/// The `k`-th stretch of addresses, and its new place: gaps stay gaps, and nothing more.
fn stretch(k: u64, offset: u64) -> [u64; 2] {
    [k << 28 | offset, (k - 1) << 17 | offset]
}

#[test]
fn each_event_is_written_with_its_own_fields() {
    let [from, to] = [0, 1].map(|at| move |k: u64, offset: u64| format!("{:x}", stretch(k, offset)[at]));
    // Each event, and its rewritten form, with the addresses of either.
    type Of<'a> = &'a dyn Fn(u64, u64) -> String;
    let events: [fn(Of<'_>) -> [String; 2]; 17] = [
        |a| {
            let rest = format!("dir=TO_DEVICE dma_addr={} size=16 phys_addr={}", a(1, 0x11), a(2, 0x22));
            [format!("dma_map_page: card A {rest} attrs="), format!("dma_map_phys: device1 {rest}")]
        },
        |a| {
            let rest = format!(
                "dir=BIDIRECTIONAL dma_addr={} size=32 phys_addr={} attrs=NO_WARN",
                a(3, 0x33),
                a(4, 0x44)
            );
            [format!("dma_map_resource: B {rest}"), format!("dma_map_resource: device2 {rest}")]
        },
        |a| {
            let rest = format!("dir=TO_DEVICE dma_addr={} size=16 attrs=SKIP_CPU_SYNC", a(1, 0x11));
            [format!("dma_unmap_page: card A {rest}"), format!("dma_unmap_phys: device1 {rest}")]
        },
        |a| {
            let rest = format!("dir=BIDIRECTIONAL dma_addr={} size=64", a(5, 0));
            [
                format!("dma_alloc: B {rest} virt_addr=ffff flags=GFP attrs="),
                format!("dma_alloc: device2 {rest}"),
            ]
        },
        |a| {
            let rest = format!(
                "dir=FROM_DEVICE dma_addr={} size=8192 phys_addrs={{0x{},0x{}}}",
                a(6, 0x1000),
                a(7, 0x2000),
                a(8, 0x3000)
            );
            [format!("dma_alloc_sgt: card A {rest} attrs="), format!("dma_alloc_pages: device1 {rest}")]
        },
        |a| {
            let rest = format!("dir=BIDIRECTIONAL dma_addr={} size=64", a(5, 0));
            [format!("dma_free: B {rest} virt_addr=ffff attrs="), format!("dma_free: device2 {rest}")]
        },
        |a| {
            let rest = format!("dir=TO_DEVICE dma_addr={} size=8", a(1, 0x13));
            [
                format!("dma_sync_single_for_cpu: card A {rest}"),
                format!("dma_sync_single_for_cpu: device1 {rest}"),
            ]
        },
        |a| {
            let rest = format!("dir=BIDIRECTIONAL dma_addr={} size=9", a(3, 0x34));
            [
                format!("dma_sync_single_for_device: B {rest}"),
                format!("dma_sync_single_for_device: device2 {rest}"),
            ]
        },
        |a| {
            let rest = format!(
                "dir=FROM_DEVICE nents=2/300 ents=1/2 [TRUNCATED] dma_addrs={{0x{}}} sizes={{0x30}} phys_addrs={{0x{},0x{}}}",
                a(9, 0x99),
                a(10, 0xaa),
                a(11, 0xbb)
            );
            [format!("dma_map_sg: B {rest} attrs=NO_WARN"), format!("dma_map_sg: device2 {rest}")]
        },
        |a| {
            let rest = format!("dir=FROM_DEVICE phys_addrs={{0x{},0x{}}}", a(10, 0xaa), a(11, 0xbb));
            [format!("dma_unmap_sg: B {rest} attrs="), format!("dma_unmap_sg: device2 {rest}")]
        },
        |a| {
            let rest = format!(
                "dir=FROM_DEVICE dma_addrs={{0x{},0x{}}} sizes={{0x10,0x20}}",
                a(9, 0x99),
                a(12, 0xcc)
            );
            [format!("dma_sync_sg_for_device: B {rest}"), format!("dma_sync_sg_for_device: device2 {rest}")]
        },
        |a| {
            let rest = format!("dir=TO_DEVICE dma_addrs={{0x{}}} sizes={{0x7}}", a(12, 0xdd));
            [format!("dma_sync_sg_for_cpu: card A {rest}"), format!("dma_sync_sg_for_cpu: device1 {rest}")]
        },
        |a| {
            let rest = format!("iova=0x{} paddr=0x{} size=12288", a(13, 0x1000), a(14, 0x2000));
            [format!("map: IOMMU: dev=C {rest}"), format!("map: IOMMU: dev=device3 {rest}")]
        },
        |a| {
            let rest = format!("iova=0x{} size=12288 unmapped_size=8192", a(13, 0x1000));
            [format!("unmap: IOMMU: {rest}"), format!("unmap: IOMMU: {rest}")]
        },
        |_| {
            [
                "attach_device_to_domain: IOMMU: device=D".into(),
                "attach_device_to_domain: IOMMU: device=device4".into(),
            ]
        },
        |_| ["dma_map_sg_err: B".into(), "dma_other_err:".into()],
        |_| ["io_page_fault: secret".into(), "swiotlb_bounced:".into()],
    ];
    let recorded = events.map(|event| event(&from)[0].clone());
    let text = on_cpu0(&recorded.each_ref().map(String::as_str)).replacen(
        "# tracer",
        "# entries-in-buffer/entries-written: 77/99\n# tracer",
        1,
    ) + "CPU:1 [LOST 12 EVENTS]\n";
    let mut written = Vec::new();
    let told = anonymize(|| Input::from_bytes("private", text.as_bytes()), &mut written).unwrap();
    assert_eq!((told.events, told.devices, told.left_out), (17, 4, 0));
    let mut expected = String::from(
        "# tracer: nop\n#\n# Written by portcullis anonymize\n# entries-in-buffer/entries-written: 77/77\n",
    );
    for (at, event) in events.iter().enumerate() {
        // Times begin within a millisecond: the clock's steps of 2^20 ns are unchanged.
        let ns = 38_000_000_000 % (1 << 20) + 1_000 * at;
        writeln!(expected, "t-0 [000] 0.{ns:09}: {}", event(&to)[1]).unwrap();
    }
    expected += "[LOST 12 EVENTS]\n";
    let written = String::from_utf8(written).unwrap();
    for (written, expected) in written.lines().zip(expected.lines()) {
        assert_eq!(written, expected);
    }
    assert_eq!(written, expected);
}

/// All events of one device have one count, of any kind, and no figure includes another's operations.
#[test]
fn events_of_others_are_counted_once_each() {
    let other = |text: &str| text.replace("0000:00:03.0", "other");
    let list = "dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0x9000} sizes={0x100} phys_addrs={0x8000} attrs=";
    let events = [
        map(0x1000, 512, 0x5000),
        other(&map(0x2000, 512, 0x6000)),
        format!("dma_map_sg: other {list}"),
        "dma_sync_single_for_cpu: other dir=TO_DEVICE dma_addr=2000 size=8".into(),
        "dma_sync_sg_for_cpu: other dir=TO_DEVICE dma_addrs={0x9000} sizes={0x8}".into(),
        "dma_unmap_sg: other dir=TO_DEVICE phys_addrs={0x8000} attrs=".into(),
        "dma_alloc: other dma_addr=a000 size=64 virt_addr=ffff attrs=".into(),
        "dma_free: other dma_addr=a000 size=64 virt_addr=ffff attrs=".into(),
        other(&unmap(0x2000, 512)),
        unmap(0x1000, 512),
    ];
    let text = lines(&events);
    let of = |device: Option<&str>| {
        let options = ReadOptions { device: device.map(str::to_owned), ..ReadOptions::default() };
        let (ops, summary) = read_in(text.as_bytes(), options, 3).unwrap();
        (shape(&ops).len(), summary.filtered, summary.maps, summary.unmaps, summary.syncs, summary.unused())
    };
    assert_eq!(of(None), (10, 0, 4, 4, 2, 0));
    assert_eq!(of(Some("0000:00:03.0")), (2, 8, 1, 1, 0, 0));
    assert_eq!(of(Some("other")), (8, 2, 3, 3, 2, 0));
    assert_eq!(of(Some("nobody")), (0, 10, 0, 0, 0, 0));
}

/// The part read until then stays, and nothing more is read.
#[test]
fn a_trace_that_is_stopped_ends_with_what_it_has() {
    let text = lines(&[
        map(0x1000, 512, 0x5000),
        iommu_map(0x7000, 0x9000, 4096),
        unmap(0x1000, 512),
        map(0x3000, 8, 0x6000),
    ]);
    for (chunks, events, ops) in [(0, 0, 0), (1, 1, 1), (2, 2, 1), (3, 3, 2)] {
        let mut trace = Trace::from_bytes("test", text.as_bytes(), ReadOptions::default()).unwrap();
        let (mut chunk, mut seen) = (Chunk::default(), 0);
        for _ in 0..chunks {
            assert!(trace.next_chunk(&mut chunk, 1).unwrap());
            seen += chunk.ops.len();
        }
        trace.stop();
        while trace.next_chunk(&mut chunk, 100).unwrap() {
            assert!(!chunk.ops.is_empty());
            seen += chunk.ops.len();
        }
        let summary = trace.summary();
        assert!(summary.stopped && !summary.limited && summary.cut().is_none());
        assert_eq!((summary.events, seen, summary.accounted()), (events, ops, events), "{chunks}");
    }
}

#[test]
fn what_cannot_be_is_named_and_late_times_are_told_of_once() {
    let wraps = iommu_map(0x1000, 0x2000, 4096).replace("iova=0x0000000000001000", "iova=0xfffffffffffff000");
    let wraps = wraps.replace("size=4096", "size=8192");
    let (_, summary) = read(&on_cpu0(&[&wraps]));
    let said = summary.kept_warnings[0].to_string();
    assert_eq!((summary.skipped, summary.iommu_maps), (1, 0));
    assert!(
        said.contains("0xfffffffffffff000") && (said.contains("8192") || said.contains("8,192")),
        "{said}"
    );
    let line = |time: &str| format!("t-1 [000] {time}: {}\n", map(0x1000, 512, 0x5000));
    let (_, summary) =
        read(&(line("1.0") + &line("4611686018.5") + &line("4611686019.5") + &line("9999999999.0")));
    assert_eq!((summary.warnings, summary.times_ns), (1, Some((1_000_000_000, 1 << 62))));
    assert!(summary.kept_warnings[0].to_string().contains("4611686018"), "{:?}", summary.kept_warnings);
    assert_eq!(summary.kept_warnings[0].line, 2);
    let (_, summary) = read(&(line("1.25") + &line("3.75")));
    assert_eq!((summary.seconds(), summary.duration_ns()), (2.5, 2_500_000_000));
}

/// Bytes of page tables of one mapped page, in each format: its levels, with the size of its tables.
#[test]
fn each_format_has_its_own_tables_and_protects_as_well() {
    let text = lines(&[map(0x1000, 512, 0x5000), unmap(0x1000, 512), map(0x1000, 8192, 0x7000)]);
    let tables = FORMATS.map(|format| {
        let mut options = Options::new(Profile::load("vtd").unwrap());
        options.policies = vec![Policy::Strict.into()];
        options.format = format.to_owned();
        let report = run(format, text.as_bytes(), &options);
        let strict = policy(&report, "strict");
        assert_eq!((strict.faults, strict.violations, strict.failures), (0, 0, 0), "{format}");
        assert_eq!((strict.operations, strict.invalidations), (2, 1), "{format}");
        strict.peak_table_bytes >> 10
    });
    // In KiB. Arm's formats are of 48 bits: the root only takes its entries, and a second stage of 16 KiB begins with two concatenated
    // tables.
    let expected: [u64; 15] = [16, 16, 20, 16, 16, 52, 132, 16, 64, 132, 12, 16, 20, 24, 28];
    assert_eq!(tables, expected);
}

/// Of two lists of the same memory an unmap ends the one with its direction, or else the newer one; and one without a match is reported.
#[test]
fn an_end_of_a_list_ends_the_one_that_it_is_like() {
    let list = |dir: &str, at: u64| {
        format!(
            "dma_map_sg: d dir={dir} nents=2/2 ents=1/1 dma_addrs={{{at:#x}}} sizes={{0x2000}} phys_addrs={{0x8000,0xa000}} attrs="
        )
    };
    let end = |dir: &str| format!("dma_unmap_sg: d dir={dir} phys_addrs={{0x8000,0xa000}} attrs=");
    let of = |ends: &[&str]| {
        let maps =
            [list("TO_DEVICE", 0x1_0000), list("FROM_DEVICE", 0x2_0000), list("FROM_DEVICE", 0x3_0000)];
        let events = maps.into_iter().chain(ends.iter().map(|dir| end(dir))).collect::<Vec<_>>();
        let (ops, summary) = read(&lines(&events));
        (shape(&ops)[3..].to_vec(), summary)
    };
    let (both, to, from) = ("BIDIRECTIONAL", "TO_DEVICE", "FROM_DEVICE");
    assert_eq!(of(&[from, from, to]).0, ["U1", "U2", "U0"]);
    assert_eq!(of(&[both, both, both]).0, ["U2", "U1", "U0"]);
    let (ended, summary) = of(&[to, to, both, from]);
    assert_eq!(ended, ["U0", "U2", "U1"]);
    assert_eq!((summary.unpaired.already_unmapped, summary.warnings), (1, 1));
    let said = summary.kept_warnings[0].to_string();
    assert!(said.contains("a second unmap of 2 entries from 0x8000 on d, no map since"), "{said}");
    assert_eq!(summary.kept_warnings[0].line, 9);
}

#[test]
fn names_are_counted_and_what_is_missing_is_told_to_the_event() {
    let text = |promised: u64| {
        let events = ["ant: x", "bee: x", "ant: y", "dma_map_page: d dir=NONE dma_addr=1 size=1 phys_addr=1"];
        on_cpu0(&events).replacen(
            "# tracer",
            &format!("# entries-in-buffer/entries-written: {promised}/9\n# tracer"),
            1,
        )
    };
    let (_, summary) = read(&text(4));
    let names = |names: &std::collections::BTreeMap<String, u64>| {
        names.iter().map(|(name, n)| format!("{n} {name}")).collect::<Vec<_>>().join(", ")
    };
    assert_eq!((names(&summary.other_names), summary.other_events), ("2 ant, 1 bee".into(), 3));
    assert_eq!((names(&summary.skipped_names), summary.skipped), ("1 dma_map_page".into(), 1));
    assert_eq!((summary.unused(), summary.cut()), (4, None));
    assert_eq!([3, 5, 77].map(|promised| read(&text(promised)).1.cut()), [None, Some(1), Some(73)]);
}

/// An empty chunk would never end a trace.
#[test]
fn a_chunk_is_of_one_event_at_least() {
    let text = lines(&[map(0x1000, 512, 0x5000), unmap(0x1000, 512)]);
    let of = |most| read_in(text.as_bytes(), ReadOptions::default(), most).unwrap().0;
    assert_eq!(shape(&of(0)), ["M0", "U0"]);
    assert_eq!(of(0), of(1));
}

/// Addresses that only an end names are moved, too, and a full disk is an error.
#[test]
fn what_is_ended_alone_is_moved_and_a_full_disk_is_told() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let text = lines(&[map(0x1000_0000, 512, 0x2000_0000), unmap(0x3000_0010, 16), unmap(0x1000_0000, 512)]);
    let mut written = Vec::new();
    let open = || Input::from_bytes("private", text.as_bytes());
    anonymize(open, &mut written).unwrap();
    let text_of = String::from_utf8(written.clone()).unwrap();
    assert!(text_of.contains("dma_unmap_phys: device1 dir=TO_DEVICE dma_addr=40010 size=16\n"), "{text_of}");
    assert!(anonymize(open, &mut Full(written.len())).is_ok());
    for room in 0..written.len() {
        let failed = anonymize(open, &mut Full(room)).unwrap_err();
        let portcullis_trace::anonymize::AnonymizeError::Write(error) = failed else { panic!("{failed}") };
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    }
}

#[test]
fn twenty_warnings_and_thirty_two_names_are_kept_and_all_are_counted() {
    let junk: String = (0..50).map(|n| format!("Dear Sir {n},\n")).collect();
    let (_, summary) = read(&junk.replacen("Dear", &(trace(&[(0, 1, "dma_map_page: x")]) + "Dear"), 1));
    assert_eq!((summary.kept_warnings.len(), summary.warnings >= 50), (20, true));
    let names: Vec<String> = (0..40).map(|n| format!("event_{n}: x")).collect();
    let events: Vec<(u32, u64, &str)> = names.iter().map(|name| (0, 1, name.as_str())).collect();
    let (_, summary) = read(&trace(&events));
    assert_eq!((summary.other_events, summary.other_names.len()), (40, 33));
    assert_eq!(summary.other_names["others"], 8);
}
