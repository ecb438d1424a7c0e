//! The replay's checks, and its counts: it detects a library or a driver that omits something, and counts each cost once.

use crate::common::{SHIPPED, policy, run};
use portcullis::domain::Policy;
use portcullis_trace::replay::{COMMIT_WITHIN_NS, Mode, Options, PolicyReport, Profile};

fn options(profile: &str, mode: Mode) -> Options {
    Options { policies: vec![mode], ..Options::new(Profile::load(profile).unwrap()) }
}

#[test]
fn leaving_out_the_invalidation_in_strict_mode_is_seen() {
    let mut options = options("none", Policy::Strict.into());
    options.break_invalidation = true;
    let broken = run("shipped", SHIPPED, &options);
    let strict = policy(&broken, "strict");
    // The device had just used each page, so its translation was cached at nearly every unmap; reused addresses hit stale entries.
    assert!(strict.violations > 10_000, "{} violations", strict.violations);
    assert!(strict.exposure.stale_byte_s > 0.0);
}

#[test]
fn leaving_out_the_copies_is_seen() {
    for mode in [Mode::Bounce, Mode::Adaptive, Mode::Swiotlb] {
        let mut options = options("none", mode);
        options.break_copies = true;
        let broken = run("shipped", SHIPPED, &options);
        assert!(policy(&broken, mode.name()).violations > 10_000, "{}", mode.name());
    }
}

#[test]
fn leaving_out_the_flush_in_lazy_mode_is_seen() {
    let mut options = options("none", Policy::LAZY.into());
    options.break_invalidation = true;
    let broken = run("shipped", SHIPPED, &options);
    assert!(policy(&broken, "lazy").violations > 0);
}

#[test]
fn leaving_out_the_invalidation_of_a_commit_is_seen() {
    for mode in [Mode::StrictBatch, Mode::StrictRing] {
        let mut options = options("none", mode);
        options.break_invalidation = true;
        let broken = run("shipped", SHIPPED, &options);
        assert!(policy(&broken, mode.name()).violations > 10_000, "{}", mode.name());
    }
}

/// Events on one CPU, with the microsecond of each.
type Events = Vec<(u64, String)>;

fn replayed(events: &Events, options: &Options) -> PolicyReport {
    let events: Vec<_> = events.iter().map(|(us, event)| (0, *us, event.as_str())).collect();
    let report = run("by hand", crate::common::trace(&events).as_bytes(), options);
    let [policy] = &report.policies[..] else { panic!("one policy") };
    assert_eq!((policy.faults, policy.failures), (0, 0), "{:?}", policy.first_failure);
    policy.clone()
}

fn map(us: u64, dir: &str, iova: u64, phys: u64, size: u64) -> (u64, String) {
    (us, format!("dma_map_page: nvme dir={dir} dma_addr={iova:x} size={size} phys_addr={phys:x} attrs="))
}

fn unmap(us: u64, dir: &str, iova: u64, size: u64) -> (u64, String) {
    (us, format!("dma_unmap_page: nvme dir={dir} dma_addr={iova:x} size={size} attrs="))
}

fn sync(us: u64, dir: &str, side: &str, iova: u64, size: u64) -> (u64, String) {
    (us, format!("dma_sync_single_for_{side}: nvme dir={dir} dma_addr={iova:x} size={size}"))
}

/// Nanoseconds that a CPU waited in total.
fn waited(policy: &PolicyReport) -> f64 {
    (policy.wait_ns_per_op * policy.operations as f64).round()
}

#[test]
fn each_descriptor_of_one_submission_is_paid_for() {
    let mut options = options("vtd", Mode::StrictBatch);
    options.profile.waits.descriptor.ns = 30.0;
    let page = |n: u64| 0x10_0000 + n * 4096;
    // Every fourth page: too far from the others for a request of several.
    let maps = (0..20).map(|n| map(n, "FROM_DEVICE", page(n), 0x5000 + n * 8192, 4096));
    let unmaps = (0..5).map(|n| unmap(20 + n, "FROM_DEVICE", page(4 * n), 4096));
    let policy = replayed(&maps.chain(unmaps).collect(), &options);
    assert_eq!((policy.invalidations, waited(&policy)), (5, 710.0 + 5.0 * 30.0));
}

/// An adaptive ring measures both ways when it is made, and waits for hardware then; a trace of copies does not.
#[test]
fn what_a_driver_waits_for_when_it_starts_is_in_no_figure() {
    let events = vec![map(0, "FROM_DEVICE", 0x1000, 0x5100, 300), unmap(1, "FROM_DEVICE", 0x1000, 300)];
    let policy = replayed(&events, &options("vtd", Mode::Adaptive));
    assert_eq!((policy.operations, policy.invalidations, waited(&policy)), (1, 0, 0.0));
}

#[test]
fn a_full_ring_is_committed_and_goes_on() {
    let mib = 1_u64 << 20;
    let burst = |first: u64, count: u64, us: u64| {
        let maps = (0..count).map(move |n| {
            map(us + n, "FROM_DEVICE", (first + n) * mib, (1 << 32) + (first + n) * 2 * mib, mib)
        });
        maps.chain((0..count).map(move |n| unmap(us + count + n, "FROM_DEVICE", (first + n) * mib, mib)))
    };
    // Sixteen of 1 MiB are all that a ring of 4,096 pages holds: pending unmaps are committed for new maps.
    let events: Events = burst(0, 16, 0).chain(burst(16, 5, 100)).collect();
    assert!(events.last().unwrap().0 < COMMIT_WITHIN_NS / 1000);
    let policy = replayed(&events, &options("vtd", Mode::StrictRing));
    assert_eq!((policy.operations, policy.violations), (21, 0));
    // One commit when the ring is full, one at the end of the trace. Individual mappings are unmapped individually, and wait.
    assert_eq!(waited(&policy), 2.0 * 710.0);
}

/// Every reader detects copies that do nothing: once for each run of eight bytes, at either end of a transfer. (A driver puts such runs
/// only at the ends of a whole page: a synced part has one of them.)
#[test]
fn bytes_that_do_not_arrive_are_seen_by_who_reads_them() {
    let (to, from) = ("TO_DEVICE", "FROM_DEVICE");
    let both = "BIDIRECTIONAL";
    let mapped = |dir| map(0, dir, 0x1000, 0x5000, 4096);
    let cases: [(&str, Events, u64); 5] = [
        ("the device, at the end", vec![mapped(to), unmap(1, to, 0x1000, 4096)], 2),
        ("the driver, at the end", vec![mapped(from), unmap(1, from, 0x1000, 4096)], 2),
        ("the device, after a sync for it", vec![mapped(to), sync(1, to, "device", 0x1000, 512)], 2),
        ("the driver, after a sync for it", vec![mapped(from), sync(1, from, "cpu", 0x1000, 512)], 2),
        ("both, after a sync for the driver", vec![mapped(both), sync(1, both, "cpu", 0x1000, 512)], 3),
    ];
    for mode in [Mode::Bounce, Mode::Swiotlb] {
        for (who, events, wrong) in &cases {
            let mut options = options("none", mode);
            assert_eq!(replayed(events, &options).violations, 0, "{who}, {}", mode.name());
            options.break_copies = true;
            assert_eq!(replayed(events, &options).violations, *wrong, "{who}, {}", mode.name());
        }
    }
}

/// With missing invalidations, reused addresses lead to their old memory.
#[test]
fn a_device_that_is_led_elsewhere_is_seen() {
    let (dir, size) = ("TO_DEVICE", 64 << 12);
    // The pool of bounce buffers maps this size itself, too.
    for mode in [Mode::Each(Policy::Strict), Mode::Bounce] {
        let both = [0x1000_0000, 0x2000_0000].into_iter().enumerate();
        let events: Events = both
            .flat_map(|(n, iova)| {
                let us = 2 * n as u64;
                [map(us, dir, iova, (1 << 32) + iova, size), unmap(us + 1, dir, iova, size)]
            })
            .collect();
        let mut options = options("none", mode);
        assert_eq!(replayed(&events, &options).violations, 0, "{}", mode.name());
        options.break_invalidation = true;
        // Every page of the second, besides those reached after an unmap.
        assert!(replayed(&events, &options).violations > 64, "{}", mode.name());
    }
}
