//! A recording without private data replays to the same figures.

use std::collections::BTreeSet;

use portcullis_trace::anonymize::{AnonymizeError, anonymize};
use portcullis_trace::replay::{Mode, Options, Profile, Report, replay};
use portcullis_trace::{Chunk, Input, ReadOptions, Trace};

use super::common::{SHIPPED, on_cpu0, read_in, sample, traces};

pub fn anonymized(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    anonymize(|| Input::from_bytes("private", bytes), &mut out).unwrap();
    out
}

/// The figures of a replay that do not depend on this machine's clock. (`adaptive` does depend on measured times.)
fn figures(bytes: &[u8]) -> String {
    let mut options = Options::new(Profile::load("vtd").unwrap());
    options.policies.retain(|mode| *mode != Mode::Adaptive);
    let limit = if cfg!(debug_assertions) { Some(10_000) } else { None };
    let mut trace =
        Trace::from_bytes("test", bytes, ReadOptions { limit, ..ReadOptions::default() }).unwrap();
    figures_of(&replay(&mut trace, &options, |_| ()).unwrap())
}

/// The figures of `report` that do not depend on this machine's clock.
pub fn figures_of(report: &Report) -> String {
    let (t, mut text) = (&report.trace, String::new());
    text +=
        &format!("{:?}\n", (t.events, t.maps, t.unmaps, t.unpaired, t.devices.len(), t.cpus, t.bytes_mapped));
    for p in &report.policies {
        let counts = (p.operations, p.invalidations, p.faults, p.violations, p.failures);
        let rates = (p.wait_ns_per_op, p.iotlb_misses_per_access, p.walk_cache_misses_per_access);
        let peaks = (p.peak_iova_bytes, p.peak_table_bytes, p.peak_bounce_bytes);
        let open = (p.exposure, p.exposure_counted, p.longest_stale_ns);
        text += &format!("{} {counts:?} {rates:?} {peaks:?} {open:?}\n", p.policy);
    }
    text
}

#[test]
fn an_anonymized_recording_replays_to_the_same_figures() {
    let own = traces().unwrap_or_default().into_iter().map(|path| std::fs::read(path).unwrap());
    let of_iommu = sample().lines().filter(|line| !line.contains(": dma_")).collect::<Vec<_>>().join("\n");
    let recordings = [SHIPPED.to_vec(), sample().into_bytes(), of_iommu.into_bytes()];
    for recording in recordings.into_iter().chain(own) {
        let written = anonymized(&recording);
        assert_eq!(figures(&written), figures(&recording));
        assert_eq!(anonymized(&written), written, "there is nothing more to take out");
    }
}

/// The kernel's names stay, because a replay needs some of them; other text is removed.
#[test]
fn attributes_are_names_of_the_kernel_or_nothing() {
    let map = |attrs: &str| {
        format!("dma_map_page: d dir=TO_DEVICE dma_addr=c0200000 size=4096 phys_addr=140200000 attrs={attrs}")
    };
    for (attrs, written) in [
        ("NO_WARN", Some("NO_WARN")),
        ("SKIP_CPU_SYNC|NO_WARN", Some("SKIP_CPU_SYNC|NO_WARN")),
        ("secret", None),
        ("NO_WARN|secret", None),
        ("NO_WARN,root", None),
        ("", None),
    ] {
        let text = String::from_utf8(anonymized(on_cpu0(&[&map(attrs)]).as_bytes())).unwrap();
        assert_eq!(text.split_once(" attrs=").map(|(_, rest)| rest.trim_end()), written, "{attrs}: {text}");
        assert!(!text.contains("secret") && !text.contains("root"), "{text}");
    }
}

#[test]
fn nothing_private_remains() {
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut Input::from_bytes("private", SHIPPED).unwrap(), &mut text).unwrap();
    let words = |text: &[u8]| -> BTreeSet<String> {
        let text = String::from_utf8(text.to_vec()).unwrap();
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && !":.-_/<>".contains(c));
        words.filter(|word| word.len() > 3).map(str::to_owned).collect()
    };
    let written = anonymized(SHIPPED);
    let (before, after) = (words(&text), words(&written));
    let mut kept: Vec<&String> = before.intersection(&after).collect();
    // Sizes and counts stay, and so do the names of events and fields.
    kept.retain(|word| word.chars().any(|c| !c.is_ascii_digit() && c != '/'));
    let format = |word: &str| {
        let fields = ["size", "sizes", "attrs", "nents", "ents", "iova", "paddr", "phys_addr", "phys_addrs"];
        let more = ["dma_addr", "dma_addrs", "unmapped_size", "IOMMU:", "unmap:", "map:", "TO_DEVICE"];
        let last = ["FROM_DEVICE", "BIDIRECTIONAL", "tracer:", "entries-in-buffer/entries-written:"];
        [&fields[..], &more, &last].concat().contains(&word)
            || word.starts_with("dma_") && word.ends_with(':')
    };
    kept.retain(|word| !format(word));
    let is_size = |word: &str| word.starts_with("0x") && word.len() <= 8;
    kept.retain(|word| !is_size(word));
    assert!(kept.is_empty(), "{kept:?}");
    for private in ["fio", "iperf", "<idle>", "0000:00:0"] {
        assert!(!String::from_utf8_lossy(&written).contains(private), "{private}");
    }
    assert!(before.iter().any(|word| word.starts_with("0000:00:03.0")), "it was there");
}

#[test]
fn what_a_reader_passes_over_keeps_its_place() {
    let text = on_cpu0(&[
        "secret_probe: password=hunter2",
        "dma_map_page: d dir=NONE dma_addr=1 size=1 phys_addr=1",
        "dma_map_page: My Card dir=TO_DEVICE dma_addr=ff000100 size=512 phys_addr=fffffffffffff000 attrs=",
        "dma_map_page: My Card dir=TO_DEVICE dma_addr=fffffffffff00100 size=512 phys_addr=ff0004000100 attrs=",
        "dma_unmap_page: My Card dir=TO_DEVICE dma_addr=fffffffffff00100 size=512 attrs=",
        "qi_submit: iotlb_inv dmar0: 0x600f2",
        "dma_map_page: d dir=TO_DEVICE dma_addr=hunter2 size=1 phys_addr=1",
    ]) + "CPU:1 [LOST 12 EVENTS]\nDear Sir,\n";
    let written = String::from_utf8(anonymized(text.as_bytes())).unwrap();
    for private in ["hunter2", "secret", "Card", "dmar0", "Sir", "ff0004", "fff", "fio"] {
        assert!(!written.contains(private), "{private} in {written}");
    }
    let read = |text: &str| read_in(text.as_bytes(), ReadOptions::default(), 10).unwrap().1;
    let (before, after) = (read(&text), read(&written));
    assert_eq!((after.events, after.maps, after.unmaps), (before.events, 1, 1));
    assert_eq!((after.lost_events, after.not_mapping_events), (12, 1));
    assert_eq!(after.devices, ["device1"]);
    assert!(after.times_ns.unwrap().0 < 1 << 20);
    assert_eq!(after.duration_ns(), before.duration_ns());
}

/// An event at the last possible byte, of memory or of device addresses, stays; one that ends a byte beyond keeps only its place.
#[test]
fn what_ends_where_addresses_end_stays() {
    let page = |size: u64, dma: u64, phys: u64| {
        format!("dma_map_phys: d dir=TO_DEVICE dma_addr={dma:x} size={size} phys_addr={phys:x} attrs=")
    };
    let of =
        |event: &str, size: u64, dma: u64| format!("{event}: d dir=TO_DEVICE dma_addr={dma:x} size={size}");
    let list = |size: u64, dma: u64, phys: u64| {
        format!(
            "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={{{dma:#x}}} sizes={{{size:#x}}} phys_addrs={{{phys:#x}}} attrs="
        )
    };
    let iommu =
        |size: u64, dma: u64, phys: u64| format!("map: IOMMU: iova={dma:#x} paddr={phys:#x} size={size}");
    let (dma, phys) = (u64::MAX - 511, (1 << 52) - 512);
    let kept = |event: &str| {
        let text = String::from_utf8(anonymized(on_cpu0(&[event]).as_bytes())).unwrap();
        let name = event.split_once(':').unwrap().0;
        let line = text.lines().last().unwrap();
        assert!([name, "other"].iter().any(|name| line.contains(&format!(" {name}:"))), "{event}: {line}");
        !line.ends_with(" other:")
    };
    for (size, fits) in [(512, true), (513, false)] {
        for event in [
            page(size, dma, 0x1000),
            page(size, 0x1000, phys),
            list(size, dma, 0x1000),
            list(size, 0x1000, phys),
        ] {
            assert_eq!(kept(&event), fits, "{event}");
        }
        for event in [iommu(size, dma, 0x1000), iommu(size, 0x1000, phys)] {
            assert_eq!(kept(&event), fits, "{event}");
        }
        for event in [
            "dma_unmap_phys",
            "dma_alloc_pages",
            "dma_free",
            "dma_sync_single_for_cpu",
            "dma_sync_single_for_device",
        ] {
            assert_eq!(kept(&of(event, size, dma)), fits, "{event}");
        }
        let sync = format!("dma_sync_sg_for_cpu: d dir=TO_DEVICE dma_addrs={{{dma:#x}}} sizes={{{size:#x}}}");
        assert_eq!(kept(&sync), fits, "{sync}");
        let unmap = format!("unmap: IOMMU: iova={dma:#x} size=512 unmapped_size={size}");
        assert_eq!(kept(&unmap), fits, "{unmap}");
    }
    for (phys, fits) in [((1u64 << 52) - 1, true), (1 << 52, false)] {
        assert_eq!(kept(&format!("dma_unmap_sg: d dir=TO_DEVICE phys_addrs={{{phys:#x}}} attrs=")), fits);
    }
}

/// A large page stays one: memory aligned to 2 MiB, and as long, stays so.
#[test]
fn what_is_aligned_stays_so() {
    let text = on_cpu0(&[
        "dma_map_page: d dir=TO_DEVICE dma_addr=ff000100 size=512 phys_addr=7000100 attrs=",
        "dma_map_page: d dir=TO_DEVICE dma_addr=c0200000 size=2097152 phys_addr=140200000 attrs=",
        "dma_map_page: d dir=TO_DEVICE dma_addr=d0010000 size=65536 phys_addr=150010000 attrs=",
    ]);
    let written = String::from_utf8(anonymized(text.as_bytes())).unwrap();
    let of = |line: &str, name: &str| {
        let (_, rest) = line.split_once(name).unwrap();
        u64::from_str_radix(rest.split(' ').next().unwrap(), 16).unwrap()
    };
    let maps: Vec<[u64; 2]> = written
        .lines()
        .filter(|line| line.contains("dma_map_phys"))
        .map(|line| ["dma_addr=", " phys_addr="].map(|name| of(line, name)))
        .collect();
    assert_eq!(maps.len(), 3, "{written}");
    assert!(maps[0].iter().all(|address| address % 0x1000 == 0x100), "{maps:x?}");
    assert!(maps[1].iter().all(|address| address % (2 << 20) == 0), "{maps:x?}");
    assert!(!written.contains("140200000") && !written.contains("c0200000"), "{written}");
}

#[test]
fn how_busy_the_machine_was_is_kept() {
    let measured = "# portcullis: cpus=2 wall_ns=10 busy_ns=7 own_ns=1";
    let text = format!(
        "# tracer: nop\n{measured}\nt-1 [000] 1.5: dma_map_page: nvme dir=TO_DEVICE dma_addr=f000 size=512 phys_addr=1000 attrs=\n"
    );
    let mut out = Vec::new();
    anonymize(|| Input::from_bytes("r", text.as_bytes()), &mut out).unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(out.lines().any(|line| line == measured), "{out}");
    for text in [text, out] {
        let mut trace = Trace::from_bytes("r", text.as_bytes(), ReadOptions::default()).unwrap();
        while trace.next_chunk(&mut Chunk::default(), 100).unwrap() {}
        assert_eq!(trace.summary().measured.unwrap().to_string(), measured);
        assert_eq!(trace.summary().unrecognised_lines, 0);
    }
}

/// A writer whose calls succeed except one.
struct FailsOnce {
    call: usize,
    calls: usize,
}

impl FailsOnce {
    fn next(&mut self) -> std::io::Result<()> {
        self.calls += 1;
        if self.calls == self.call { Err(std::io::Error::other("the disk is full")) } else { Ok(()) }
    }
}

impl std::io::Write for FailsOnce {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.next().map(|()| bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.next()
    }
}

/// At any place, in the header or in an event of any kind.
#[test]
fn a_write_that_fails_is_told() {
    let events = on_cpu0(&[
        "map: IOMMU: iova=0xff000000 paddr=0x7000000 size=4096",
        "dma_map_phys: d dir=TO_DEVICE dma_addr=ff000100 size=512 phys_addr=7000100 attrs=NO_WARN",
        "dma_sync_single_for_cpu: d dir=TO_DEVICE dma_addr=ff000100 size=512",
        "dma_unmap_phys: d dir=TO_DEVICE dma_addr=ff000100 size=512 attrs=",
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0xff000000} sizes={0x200} phys_addrs={0x7000000} attrs=",
        "dma_sync_sg_for_device: d dir=TO_DEVICE dma_addrs={0xff000000} sizes={0x200}",
        "dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x7000000} attrs=",
        "dma_alloc_sgt: d dir=TO_DEVICE dma_addr=ff000000 size=4096 phys_addrs={0x7000000} attrs=",
        "dma_alloc: d dma_addr=ff000000 size=4096 attrs=",
        "dma_free: d dma_addr=ff000000 size=4096 attrs=",
        "unmap: IOMMU: iova=0xff000000 size=4096 unmapped_size=4096",
        "attach_device_to_domain: IOMMU: device=d",
        "secret_probe: password=hunter2",
    ]);
    let text = format!(
        "# tracer: nop\n# portcullis: cpus=2 wall_ns=10 busy_ns=7 own_ns=1\n\
         # entries-in-buffer/entries-written: 13/13   #P:2\n{events}CPU:1 [LOST 12 EVENTS]\n"
    );
    let written = |call| {
        let mut out = FailsOnce { call, calls: 0 };
        anonymize(|| Input::from_bytes("private", text.as_bytes()), &mut out).map(|_| out.calls)
    };
    let calls = written(0).unwrap();
    assert!(calls > 100, "{calls}");
    for call in 1..=calls {
        assert!(matches!(written(call), Err(AnonymizeError::Write(_))), "call {call} of {calls}");
    }
}
