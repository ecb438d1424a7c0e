//! A device that reads every byte it can reach, in memory where everything that is not meant for it is painted.

use crate::common::{SHIPPED, run};
use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, Options, Paint, Painted, PolicyReport, Profile, Retry, replay};
use portcullis_trace::{ReadOptions, Trace};

const STRICT: Mode = Mode::Each(Policy::Strict);

fn options(policies: &[Mode], every_ops: u64) -> Options {
    Options {
        policies: policies.to_vec(),
        paint: Some(Paint { every_ops }),
        ..Options::new(Profile::load("none").unwrap())
    }
}

fn found(report: &PolicyReport) -> Painted {
    report.painted.unwrap()
}

#[test]
fn no_paint_shows_through_bounce_buffers_and_it_does_beside_strict_mappings() {
    let report = run("shipped", SHIPPED, &options(&[Mode::Bounce, Mode::Adaptive, STRICT], 500));
    let [bounce, adaptive, strict] = &report.policies[..] else { panic!("three policies") };
    for policy in &report.policies {
        assert_eq!((policy.violations, policy.faults, policy.failures), (0, 0, 0), "{}", policy.policy);
    }
    // It looked, saw what was meant for it, and nothing else.
    for policy in [bounce, adaptive] {
        let closed = found(policy);
        assert!(closed.pool_pages > 1000 && closed.own > 1_000_000, "{}: {closed:?}", policy.policy);
        assert_eq!(closed.shown(), 0, "{}: {closed:?}", policy.policy);
    }
    let open = found(strict);
    // The page is the unit of strict protection: what shares one is seen, and could be changed.
    assert!(open.paint > 0 && open.writable > 0 && open.own > 0, "{open:?}");
    assert_eq!((open.pool_pages, open.others, open.spoiled), (0, 0, 0), "{open:?}");
}

#[test]
fn buffers_for_writing_show_no_paint_where_they_can_be_read() {
    // First-stage tables have no pages that are for writing alone.
    let options =
        Options { format: "x86-4".into(), ..options(&[Mode::Bounce, STRICT, Mode::Adaptive], 1000) };
    let report = run("shipped", SHIPPED, &options);
    let [bounce, strict, adaptive] = &report.policies[..] else { panic!("three policies") };
    assert_eq!((adaptive.violations, found(adaptive).shown()), (0, 0));
    assert_eq!((bounce.violations, found(bounce).shown()), (0, 0));
    assert!(found(bounce).pool_pages > 1000, "{:?}", found(bounce));
    assert!(found(strict).paint > 1_000_000, "{:?}", found(strict));
}

/// Two devices with buffers in one page: 700 bytes of one, which it may write, and of the other 1,024 bytes, which it may read, and 512
/// bytes for both across the page's end.
fn neighbours() -> String {
    crate::common::on_cpu0(&[
        "dma_map_page: nvme dir=FROM_DEVICE dma_addr=f100 size=700 phys_addr=5100 attrs=",
        "dma_map_page: eth dir=TO_DEVICE dma_addr=e800 size=1024 phys_addr=5800 attrs=",
        "dma_map_page: eth dir=BIDIRECTIONAL dma_addr=ef00 size=512 phys_addr=5f00 attrs=",
        "dma_sync_single_for_cpu: eth dir=BIDIRECTIONAL dma_addr=efc8 size=100",
        "dma_sync_single_for_device: eth dir=BIDIRECTIONAL dma_addr=ef64 size=200",
        "dma_sync_single_for_device: eth dir=TO_DEVICE dma_addr=e801 size=3",
        "dma_sync_single_for_cpu: nvme dir=FROM_DEVICE dma_addr=f1c8 size=99",
        "dma_unmap_page: nvme dir=FROM_DEVICE dma_addr=f100 size=700 attrs=",
        "dma_unmap_page: eth dir=TO_DEVICE dma_addr=e800 size=1024 attrs=",
        "dma_unmap_page: eth dir=BIDIRECTIONAL dma_addr=ef00 size=512 attrs=",
    ])
}

#[test]
fn another_device_s_bytes_are_seen_by_the_page_and_not_by_the_byte() {
    let text = neighbours();
    let report = run("neighbours", text.as_bytes(), &options(&[Mode::Bounce, STRICT, Mode::Adaptive], 1));
    let [bounce, _, adaptive] = &report.policies[..] else { panic!("three policies") };
    assert_eq!((adaptive.violations, found(adaptive).shown()), (0, 0));
    assert_eq!((bounce.operations, bounce.violations, bounce.faults, bounce.failures), (3, 0, 0, 0));
    assert_eq!(found(bounce).shown(), 0);
    assert_eq!(bounce.exposure.neighbour_byte_s + bounce.exposure.stale_byte_s, 0.0);
}

/// Looks come before each operation (or each third), and at the end.
#[test]
fn what_shows_of_a_page_is_counted_to_the_byte() {
    let of = |mode: Mode, every_ops: u64| {
        let report = run("neighbours", neighbours().as_bytes(), &options(&[mode], every_ops));
        found(&report.policies[0])
    };
    // With one buffer: the first device may write to its page, and not read it.
    let one = Painted { writable: 4096 - 700, ..Painted::default() };
    // With two: the other device reads its own bytes, those of the first, and paint.
    let two = Painted { pages: 1, own: 1024, others: 700, paint: 4096 - 1724, ..one };
    // With three: it reads the page by two addresses, and the next page; both but the one for reading alone it may write.
    let three = Painted {
        pages: 3,
        own: 2 * (1024 + 256) + 256,
        others: 2 * 700,
        paint: 2 * (4096 - 1024 - 700 - 256) + 4096 - 256,
        writable: (4096 - 700) + (4096 - 1024 - 256) + (4096 - 256),
        ..Painted::default()
    };
    // Without the first device's, which is paint again.
    let without =
        Painted { others: 0, paint: three.paint + 2 * 700, writable: three.writable - (4096 - 700), ..three };
    // With the last alone.
    let last = Painted {
        pages: 2,
        own: 2 * 256,
        paint: 2 * (4096 - 256),
        writable: 2 * (4096 - 256),
        ..Painted::default()
    };
    let sum = |all: &[(u64, Painted)]| {
        all.iter().fold(Painted::default(), |sum, (times, one)| Painted {
            pages: sum.pages + times * one.pages,
            own: sum.own + times * one.own,
            paint: sum.paint + times * one.paint,
            others: sum.others + times * one.others,
            writable: sum.writable + times * one.writable,
            ..sum
        })
    };
    assert_eq!(of(STRICT, 1), sum(&[(1, one), (1, two), (5, three), (1, without), (1, last)]));
    assert_eq!(of(STRICT, 3), sum(&[(1, two), (1, three), (1, without)]));
    assert_eq!(of(STRICT, u64::MAX), Painted::default(), "at the end nothing is mapped");
    // Through bounce buffers: a page to be read from its first mapping on, with 1,024 bytes in it; and one that the device fills
    // with its own bytes when it first looks, beside the 512 that it has there.
    let bounced =
        Painted { pages: 9 + 8, pool_pages: 9 + 8, own: 9 * 1024 + 512 + 7 * 4096, ..Painted::default() };
    assert_eq!(of(Mode::Bounce, 1), bounced);
}

#[test]
fn large_mappings_are_seen_to_the_byte_too() {
    // Above the threshold: whole pages, mapped directly; not whole ones, with their ends bounced; and a list.
    let mut events = Vec::new();
    for (n, dir) in ["FROM_DEVICE", "TO_DEVICE", "BIDIRECTIONAL"].iter().enumerate() {
        for (at, (offset, size)) in [(0, 0x40000), (0x123, 0x40123), (0, 0x30001)].iter().enumerate() {
            let iova = ((n * 3 + at) << 24) + offset;
            let phys = (1 << 33) + iova;
            events.push(format!(
                "dma_map_page: nvme dir={dir} dma_addr={iova:x} size={size} phys_addr={phys:x} attrs="
            ));
        }
        let list = format!("{:#x},{:#x}", (0x100 + n) << 24 | 0x800, (0x200 + n) << 24);
        events.push(format!(
            "dma_map_sg: nvme dir={dir} nents=2/2 ents=2/2 dma_addrs={{{:#x},{:#x}}} sizes={{0x30800,0x1801}} \
             phys_addrs={{{list}}} attrs=",
            (0x80 + n) << 28 | 0x800,
            (0x80 + n) << 28 | 0x31000
        ));
        events.push(format!("dma_unmap_sg: nvme dir={dir} phys_addrs={{{list}}} attrs="));
        for (at, (offset, size)) in [(0, 0x40000), (0x123, 0x40123), (0, 0x30001)].iter().enumerate() {
            let iova = ((n * 3 + at) << 24) + offset;
            events.push(format!("dma_unmap_page: nvme dir={dir} dma_addr={iova:x} size={size} attrs="));
        }
    }
    let events: Vec<&str> = events.iter().map(String::as_str).collect();
    for format in ["vtd-ss", "arm-s1-64k"] {
        let options = Options {
            format: format.into(),
            ..options(&[Mode::Bounce, STRICT, Mode::Swiotlb, Mode::Adaptive], 1)
        };
        let report = run("large", crate::common::on_cpu0(&events).as_bytes(), &options);
        for policy in &report.policies {
            assert_eq!(policy.operations, 12);
            assert_eq!((policy.violations, policy.faults, policy.failures), (0, 0, 0), "{}", policy.policy);
        }
        let bounce = found(&report.policies[0]);
        assert_eq!(bounce.shown(), 0, "{bounce:?}");
        // The middles, which the device has itself.
        assert!(bounce.pages > bounce.pool_pages && bounce.pool_pages > 0, "{bounce:?}");
        assert!(found(&report.policies[1]).paint > 0);
        assert!(report.policies[2].painted.is_none(), "everything is open");
        assert_eq!(found(&report.policies[3]).shown(), 0, "{:?}", report.policies[3].painted);
    }
}

/// All traces in the folder that `PORTCULLIS_TRACES` names; `cargo xtask test` runs this where it names one.
#[test]
#[ignore = "needs a folder of traces in PORTCULLIS_TRACES"]
fn no_paint_shows_in_any_trace() {
    let Some(paths) = crate::common::traces() else { return };
    let mut broken = Vec::new();
    for path in &paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // The second has no pages that are for writing alone.
        for format in ["vtd-ss", "x86-4"] {
            let options = Options {
                retry: Some(Retry { every_ops: 2_000, change_policies: None }),
                format: format.into(),
                ..options(&[Mode::Bounce, Mode::Adaptive, STRICT], 5_000)
            };
            let mut trace = Trace::open(path, ReadOptions::default()).unwrap();
            let report = replay(&mut trace, &options, |_| ()).unwrap();
            println!("{name}, {format}: {} maps, {} unmaps", report.trace.maps, report.trace.unmaps);
            for policy in &report.policies {
                let found = found(policy);
                println!(
                    "  {:<8} violations {} faults {} failures {} {:?} {found:?}",
                    policy.policy, policy.violations, policy.faults, policy.failures, policy.first_failure
                );
                let shown = policy.policy != STRICT.name() && found.shown() > 0;
                if shown || (policy.violations, policy.faults, policy.failures) != (0, 0, 0) {
                    broken.push((name.clone(), policy.policy));
                }
            }
        }
    }
    println!("{} traces", paths.len());
    assert!(broken.is_empty(), "{broken:?}");
}
