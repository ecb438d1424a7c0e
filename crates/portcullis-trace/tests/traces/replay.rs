//! The replay: its promises for every trace.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{SHIPPED, policy, run};
use portcullis::domain::Policy;
use portcullis::heap::Shared;
use portcullis::platform::{Platform, PlatformEvents, events_of};
use portcullis_trace::replay::{
    BATCH_UNMAPS, COMMIT_WITHIN_NS, Mode, Options, PolicyReport, Profile, RING_BATCH, ReplayPlatform, Report,
    Samples, Timer, built_in_names, replay,
};
use portcullis_trace::{ReadOptions, Trace};

fn options(profile: &str) -> Options {
    Options::new(Profile::load(profile).unwrap())
}

/// One line of a trace at `ns` on `cpu`.
fn line(cpu: u32, us: u64, event: &str) -> String {
    format!("t-1 [{cpu:03}] ..... {}.{:06}: {event}\n", us / 1_000_000, us % 1_000_000)
}

fn map(cpu: u32, us: u64, iova: u64, phys: u64, size: u64) -> String {
    let event =
        format!("dma_map_page: nvme dir=FROM_DEVICE dma_addr={iova:x} size={size} phys_addr={phys:x} attrs=");
    line(cpu, us, &event)
}

fn unmap(cpu: u32, us: u64, iova: u64, size: u64) -> String {
    line(cpu, us, &format!("dma_unmap_page: nvme dir=FROM_DEVICE dma_addr={iova:x} size={size} attrs="))
}

#[test]
fn a_well_behaved_device_meets_no_fault_and_no_violation_under_any_policy() {
    let report = run("shipped", SHIPPED, &options("vtd"));
    assert_eq!(report.trace.events, 60_000);
    assert_eq!(report.trace.devices.len(), 2);
    for policy in &report.policies {
        assert_eq!((policy.faults, policy.violations, policy.failures), (0, 0, 0), "{}", policy.policy);
        assert_eq!(policy.operations, report.trace.maps);
    }
    let (strict, lazy, passthrough) =
        (policy(&report, "strict"), policy(&report, "lazy"), policy(&report, "passthrough"));
    // Each strict unmap waits once; lazy ones share; passthrough never does.
    assert_eq!(strict.invalidations, report.trace.unmaps);
    assert!(lazy.invalidations > 0 && lazy.invalidations < strict.invalidations / 50);
    assert_eq!(passthrough.invalidations, 0);
    // Observed by the software IOMMU: nothing stale, some, all.
    assert_eq!(strict.exposure.stale_byte_s, 0.0);
    assert!(lazy.exposure.stale_byte_s > 0.0);
    assert!(passthrough.exposure.stale_byte_s > lazy.exposure.stale_byte_s);
    assert!(strict.exposure.neighbour_byte_s > 0.0, "network buffers share their pages");
    // Ten milliseconds, because the timer runs exactly on time here.
    assert!(lazy.longest_stale_ns > 0 && lazy.longest_stale_ns <= 10_000_000);
    // The modelled wait, which is deterministic: one completion for each of the unmaps.
    let expected = 710.0 * report.trace.unmaps as f64 / report.trace.maps as f64;
    assert!((strict.wait_ns_per_op - expected).abs() < 1e-6);
    assert!(lazy.wait_ns_per_op < expected / 50.0);
}

#[test]
fn bounce_buffers_expose_nothing_and_a_swiotlb_hides_nothing() {
    let report = run("shipped", SHIPPED, &options("vtd"));
    let (bounce, swiotlb) = (policy(&report, "bounce"), policy(&report, "swiotlb"));
    assert_eq!((bounce.exposure.stale_byte_s, bounce.exposure.neighbour_byte_s), (0.0, 0.0));
    assert_eq!(bounce.exposure_counted, Some(bounce.exposure));
    assert_eq!((bounce.longest_stale_ns, bounce.invalidations, bounce.wait_ns_per_op), (0, 0, 0.0));
    assert!(bounce.peak_bounce_bytes > 0);
    assert_eq!(swiotlb.exposure, policy(&report, "passthrough").exposure);
    assert!(swiotlb.exposure_counted.is_none() && swiotlb.peak_bounce_bytes > 0);
}

#[test]
fn what_is_cheaper_exposes_nothing_and_says_why_it_was_chosen() {
    for profile in ["virtio-iommu", "none"] {
        let report = run("shipped", SHIPPED, &options(profile));
        let adaptive = policy(&report, "adaptive");
        assert_eq!((adaptive.exposure.stale_byte_s, adaptive.exposure.neighbour_byte_s), (0.0, 0.0));
        assert_eq!(adaptive.exposure_counted, Some(adaptive.exposure));
        let rows: Vec<_> = adaptive.choices.iter().flat_map(|choices| &choices.rows).collect();
        assert!(rows.len() >= 5, "{rows:?}");
        let explained: u64 = rows.iter().map(|row| row.copied + row.mapped).sum();
        // Except mappings too large for the pool, and those that live as long as their driver.
        assert!(explained <= adaptive.operations && explained > adaptive.operations / 2, "{explained}");
        for row in &rows {
            let (copy, map) = (row.copy_ns.unwrap(), row.map_ns);
            assert!(copy.0 + copy.1 > 0, "{row:?}");
            assert_eq!(
                map.is_none(),
                row.shared && row.most_bytes <= 4096,
                "an untrusted device gets no part of a page: {row:?}"
            );
        }
        for other in report.policies.iter().filter(|other| other.policy != "adaptive") {
            assert!(other.choices.is_empty());
        }
    }
}

#[test]
fn coherent_and_user_mapped_memory_is_never_copied() {
    let coherent = "nvme dir=BIDIRECTIONAL dma_addr=f000 size=512 virt_addr=c0ffee00";
    let runs = |what: &str, rest: &str| {
        format!("{what}: IOMMU: iova=0x{:016x} - 0x{:016x} {rest}", 0xfee1_0000_u64, 0xfee1_1000_u64)
    };
    let text = line(
        0,
        1,
        "map: IOMMU: iova=0x000000000000f000 - 0x0000000000010000 paddr=0x0000000000005000 size=4096",
    ) + &line(0, 2, &format!("dma_alloc: {coherent} flags=GFP_KERNEL attrs="))
        + &line(0, 3, &runs("map", "paddr=0x0000000000009000 size=4096"))
        + &line(0, 4, &format!("dma_free: {coherent} attrs="))
        + &line(0, 5, &runs("unmap", "size=4096 unmapped_size=4096"));
    let report = run("coherent", text.as_bytes(), &options("vtd"));
    let bounce = policy(&report, "bounce");
    assert_eq!((bounce.operations, bounce.faults, bounce.violations, bounce.failures), (2, 0, 0, 0));
    assert_eq!((bounce.invalidations, bounce.peak_bounce_bytes), (2, 0));
    // An allocator returns whole pages.
    assert_eq!(policy(&report, "strict").exposure.neighbour_byte_s, 0.0);
}

#[test]
fn a_pool_asks_an_iommu_that_maps_by_request_once_for_a_buffer() {
    let text: String =
        (0..50).map(|n| map(0, 2 * n, 0x1000, 0x5100, 300) + &unmap(0, 2 * n + 1, 0x1000, 300)).collect();
    let profile = options("virtio-iommu");
    let report = run("request", text.as_bytes(), &profile);
    let waits = &profile.profile.waits;
    let once = waits.map_request.ns + waits.map_page.ns;
    assert!((policy(&report, "bounce").wait_ns_per_op * 50.0 - once).abs() < 1e-6);
    assert!(policy(&report, "strict").wait_ns_per_op > once);
    assert_eq!(policy(&report, "swiotlb").wait_ns_per_op, 0.0);
}

#[test]
fn bytes_that_cannot_be_kept_are_an_error_with_the_limit() {
    let text = map(0, 1, 0x1000, 0x5000, 5 << 30);
    for mode in [Mode::Bounce, Mode::Swiotlb, Mode::Adaptive] {
        let options = Options { policies: vec![mode], ..options("none") };
        let mut trace = Trace::from_bytes("much", text.as_bytes(), ReadOptions::default()).unwrap();
        let error = replay(&mut trace, &options, |_| ()).unwrap_err().to_string();
        let expected = format!(
            "much: line 1: {} keeps the bytes of what is mapped, and their copies: it needs 5.4 GB more, and may have 4.3 GB in all (its \
             part of half of --memory, 4.3 GB at the most): make it less by --device, --limit or --policy",
            mode.name()
        );
        assert_eq!(error, expected);
    }
}

#[test]
fn memory_where_bounce_buffers_are_is_refused_and_counted() {
    let text =
        map(0, 2, 0x2000, 0xff00_0000_0000, 64) + &map(0, 3, 0x3000, 0x5000, 64) + &unmap(0, 4, 0x3000, 64);
    let report = run("much", text.as_bytes(), &options("none"));
    for name in ["bounce", "swiotlb"] {
        let policy = policy(&report, name);
        assert_eq!((policy.failures, policy.operations, policy.faults, policy.violations), (1, 1, 0, 0));
        let first = policy.first_failure.as_deref().unwrap();
        assert_eq!(
            first,
            "line 1: mapping: memory at 0xff0000000000, where the replay has its bounce buffers"
        );
    }
    assert_eq!(policy(&report, "strict").failures, 0);
}

#[test]
fn shared_waits_are_fewer_and_leave_nothing_stale() {
    let report = run("shipped", SHIPPED, &options("vtd"));
    let strict = policy(&report, "strict");
    for (name, per_commit) in [("strict-batch", BATCH_UNMAPS), ("strict-ring", RING_BATCH)] {
        let shared = policy(&report, name);
        assert_eq!((shared.faults, shared.violations, shared.failures), (0, 0, 0), "{name}");
        assert_eq!((shared.exposure.stale_byte_s, shared.longest_stale_ns), (0.0, 0), "{name}");
        // Until its commit a mapping exists: so does the data that shares its page.
        assert!(shared.exposure.neighbour_byte_s > strict.exposure.neighbour_byte_s);
        assert!(shared.wait_ns_per_op >= strict.wait_ns_per_op / per_commit as f64);
        assert!(shared.wait_ns_per_op < strict.wait_ns_per_op / 16.0, "{name}: {}", shared.wait_ns_per_op);
    }
    let ring = policy(&report, "strict-ring");
    assert!(ring.invalidations < ring.operations / 10, "{}", ring.invalidations);
    assert!(ring.walk_cache_misses_per_access < 0.01, "{}", ring.walk_cache_misses_per_access);
}

/// `n` mappings of a page each that all end at `us`, one microsecond after another, out of order.
fn burst(n: u64, us: u64) -> String {
    let iova = |n: u64| 0x10_0000 + n * 4096;
    let maps: String = (0..n).map(|n| map(0, us + n, iova(n), 0x5000 + n * 8192, 100)).collect();
    let unmaps = (0..n).map(|at| unmap(0, us + n + at, iova(at * 7 % n), 100));
    maps + &unmaps.collect::<String>()
}

#[test]
fn batches_are_committed_when_they_are_full_and_when_time_is_up() {
    let waits = |report: &Report, name: &str| {
        let policy = policy(report, name);
        assert_eq!((policy.faults, policy.violations, policy.failures), (0, 0, 0));
        (policy.wait_ns_per_op * policy.operations as f64 / 710.0).round() as u64
    };
    let full = run("full", burst(128, 0).as_bytes(), &options("vtd"));
    assert_eq!(waits(&full, "strict-batch"), 128 / BATCH_UNMAPS as u64);
    assert_eq!(waits(&full, "strict-ring"), 128 / RING_BATCH as u64);
    // Five, a pause, and five again: a timer ends the first batch, the end of the trace the second.
    let text = burst(5, 0) + &burst(5, 2 * COMMIT_WITHIN_NS / 1000);
    let slow = run("slow", text.as_bytes(), &options("vtd"));
    assert_eq!((waits(&slow, "strict-batch"), waits(&slow, "strict-ring")), (2, 2));
    let neighbours = |name| policy(&slow, name).exposure.neighbour_byte_s;
    let longest = 10.0 * 4096.0 * (COMMIT_WITHIN_NS as f64 + 20_000.0) / 1e9;
    assert!(neighbours("strict-batch") > neighbours("strict") && neighbours("strict-batch") <= longest);
    assert_eq!(neighbours("strict-batch"), neighbours("strict-ring"));
}

#[test]
fn a_ring_that_is_full_or_too_small_costs_time_and_nothing_else() {
    // Lists of 1 MiB each: sixteen fill a ring of 4,096 pages, and one of 32 MiB never fits.
    let mut text = String::new();
    let mib = 1u64 << 20;
    for n in 0..40 {
        text += &map(0, n, n * mib, 0x1_0000_0000 + n * 2 * mib, mib);
    }
    text += &map(0, 50, 1 << 40, 0x9_0000_0000, 32 * mib);
    text += &unmap(0, 60, 1 << 40, 32 * mib);
    for n in (0..40).rev() {
        text += &unmap(0, 100 + n % 2, n * mib, mib);
    }
    text += &burst(70, 300);
    let report = run("large", text.as_bytes(), &options("vtd"));
    let ring = policy(&report, "strict-ring");
    assert_eq!((ring.operations, ring.faults, ring.violations, ring.failures), (111, 0, 0, 0));
    assert_eq!(ring.exposure.stale_byte_s, 0.0);
}

#[test]
fn exposure_is_exact_on_a_trace_made_by_hand() {
    // 1,500 bytes at offset 0x100 of a page: mapped for 1 ms; lazy protection flushes 10 ms later.
    let text = map(0, 0, 0xf100, 0x5100, 1500)
        + &unmap(0, 1_000, 0xf100, 1500)
        + &map(0, 21_000, 0xf000, 0x9000, 4096)
        + &unmap(0, 22_000, 0xf000, 4096);
    let report = run("by hand", text.as_bytes(), &options("none"));
    let close =
        |value: f64, expected: f64| assert!((value - expected).abs() < 1e-9, "{value}, not {expected}");
    let strict = policy(&report, "strict").exposure;
    close(strict.stale_byte_s, 0.0);
    close(strict.neighbour_byte_s, 2596.0 * 0.001);
    let lazy = policy(&report, "lazy").exposure;
    close(lazy.stale_byte_s, 1500.0 * 0.010);
    close(lazy.neighbour_byte_s, 2596.0 * 0.011);
    // Until the trace ends: 21 ms of the first buffer after its unmap.
    let passthrough = policy(&report, "passthrough").exposure;
    close(passthrough.stale_byte_s, 1500.0 * 0.021);
    close(passthrough.neighbour_byte_s, 2596.0 * 0.022);
    assert_eq!(policy(&report, "lazy").longest_stale_ns, 10_000_000);
}

#[test]
fn lazy_flushes_when_the_queue_of_one_cpu_is_full() {
    let mut text = String::new();
    for n in 0..300 {
        text += &map(n % 2, u64::from(n), 0x10_0000 + u64::from(n) * 4096, 0x5000, 100);
        text += &unmap(0, u64::from(n), 0x10_0000 + u64::from(n) * 4096, 100);
    }
    let report = run("full", text.as_bytes(), &options("none"));
    // 300 us in all, so no timer: the 257th unmap on CPU 0 is the only reason for a flush.
    assert_eq!(policy(&report, "lazy").invalidations, 1);
}

#[test]
fn a_list_is_mapped_as_one_range_and_unmapped_with_one_invalidation() {
    let sg = "nvme dir=TO_DEVICE nents=3/3 ents=3/3 dma_addrs={0x1800,0x9000,0x7000} \
              sizes={0x800,0x1000,0x10} phys_addrs={0x1800,0x9000,0x7000} attrs=";
    let text = line(0, 1, &format!("dma_map_sg: {sg}"))
        + &line(1, 2, "dma_unmap_sg: nvme dir=TO_DEVICE phys_addrs={0x1800,0x9000,0x7000} attrs=");
    let report = run("list", text.as_bytes(), &options("vtd"));
    let strict = policy(&report, "strict");
    assert_eq!((strict.operations, strict.invalidations), (1, 1));
    assert_eq!((strict.faults, strict.violations), (0, 0));
    // Three pages were accessed, once each.
    assert_eq!(strict.iotlb_misses_per_access, 1.0);
}

#[test]
fn more_pages_than_can_be_followed_are_an_error_with_its_line() {
    // The library would take some of these; none is tracked page by page.
    for (size, pages) in [(1_u64 << 46, 17_179_869_185_u64), (1 << 50, 274_877_906_945)] {
        refused_for_its_pages(size, pages);
    }
}

fn refused_for_its_pages(size: u64, pages: u64) {
    let text = map(0, 1, 0x1000, 0x5000, 64) + &map(0, 2, 0x9000, 0x5000, size);
    let mut trace = Trace::from_bytes("large", text.as_bytes(), ReadOptions::default()).unwrap();
    let error = replay(&mut trace, &options("none"), |_| ()).unwrap_err().to_string();
    let expected = format!(
        "large: line 2: {} pages and timers would be followed one by one by now, 4,196,352 are possible for a recording of \
         so few events: --device, --limit or --policy make it less",
        portcullis_trace::figures::count(pages)
    );
    assert_eq!(error, expected);
}

#[test]
fn every_profile_states_a_source_for_every_figure() {
    for name in built_in_names() {
        let profile = Profile::load(name).unwrap();
        assert_eq!(profile.name, name);
        for (_, _, cost) in profile.waits.named() {
            assert!(cost.source.len() > 10, "{name}: a figure of {} ns without a source", cost.ns);
        }
        assert!(profile.caches.source.len() > 10);
    }
}

/// An adaptive queue and lazy protection choose by it.
#[test]
fn a_policy_is_told_all_that_a_submission_waits_for() {
    for name in built_in_names() {
        let waits = Profile::load(name).unwrap().waits;
        let costs = waits.costs();
        assert_eq!(
            f64::from(costs.submission_ns),
            (waits.doorbell.ns + waits.completion.ns).ceil(),
            "{name}"
        );
        assert_eq!(f64::from(costs.request_ns), waits.descriptor.ns.ceil(), "{name}");
    }
}

#[test]
fn requests_cost_what_the_profile_says() {
    let text = map(0, 1, 0x1000, 0x5000, 8192) + &unmap(0, 2, 0x1000, 8192);
    let profile = options("virtio-iommu");
    let report = run("request", text.as_bytes(), &profile);
    let waits = &profile.profile.waits;
    let expected = waits.map_request.ns
        + waits.completion.ns
        + waits.doorbell.ns
        + waits.descriptor.ns
        + 2.0 * (waits.map_page.ns + waits.unmap_page.ns);
    assert!((policy(&report, "strict").wait_ns_per_op - expected).abs() < 1e-6);
    assert_eq!(policy(&report, "passthrough").wait_ns_per_op, 0.0);
}

#[test]
fn what_waits_longest_says_when_a_batch_is_committed() {
    // The second unmap comes shortly before the first's deadline, and does not defer it.
    let half = COMMIT_WITHIN_NS / 2000;
    let text = map(0, 0, 0x1000, 0x5000, 100)
        + &map(0, 0, 0x3000, 0x9000, 100)
        + &unmap(0, 1, 0x1000, 100)
        + &unmap(0, 1 + half, 0x3000, 100)
        + &map(0, 1 + 10 * half, 0x1000, 0x5000, 4096);
    let report = run("waits", text.as_bytes(), &options("vtd"));
    let open_ns = COMMIT_WITHIN_NS + 1000;
    for name in ["strict-batch", "strict-ring"] {
        let exposure = policy(&report, name).exposure.neighbour_byte_s;
        let expected = 2.0 * 3996.0 * open_ns as f64 / 1e9;
        assert!((exposure - expected).abs() < 1e-9, "{name}: {exposure}, not {expected}");
    }
}

/// Whether only the map or the whole mapping is missing.
#[test]
fn what_has_no_map_in_the_recording_is_reported_whatever_it_is() {
    let sync = |us, iova: u64| {
        line(0, us, &format!("dma_sync_single_for_cpu: nvme dir=FROM_DEVICE dma_addr={iova:x} size=64"))
    };
    let text = map(0, 1, 0x1000, 0x5000, 4096)
        + &sync(2, 0x9000)
        + &sync(3, 0x1000)
        + &sync(4, 0xa000)
        + &unmap(0, 5, 0xb000, 4096)
        + &unmap(0, 6, 0x1000, 4096);
    let report = run("unpaired", text.as_bytes(), &options("vtd"));
    assert_eq!((report.trace.maps, report.trace.unmaps, report.trace.unpaired), (1, 1, 3));
}

/// Whatever a pool has freed since, and allocated again.
#[test]
fn the_peak_of_bounce_memory_stays_the_most_that_there_was() {
    let burst = |start: u64, count: u64| -> String {
        let at = |n: u64| (0x100_0000 + n * 0x1_0000, 0x4000_0100 + n * 0x1_0000);
        let maps = (0..count).map(|n| map(0, start + n, at(n).0 + 0x100, at(n).1, 16_000));
        let unmaps = (0..count).map(|n| unmap(0, start + count + n, at(n).0 + 0x100, 16_000));
        maps.chain(unmaps).collect()
    };
    // A pool frees memory that was not needed for some seconds.
    let later = |us: u64| burst(us, 1);
    let rest: String = (1..20).map(|second| later(second * 1_000_000 + 10_000)).collect();
    let (once, whole) = (burst(0, 2000), burst(0, 2000) + &rest + &burst(20_000_000, 40));
    let [once, whole] = [once, whole].map(|text| run("burst", text.as_bytes(), &options("vtd")));
    for name in ["bounce", "swiotlb"] {
        let [once, whole] = [&once, &whole].map(|report| policy(report, name).peak_bounce_bytes);
        assert!(once >= 2000 * 16_000, "{name}: {once}");
        assert_eq!(whole, once, "{name}");
    }
}

#[test]
fn a_profile_has_no_more_ways_than_entries() {
    let text = include_str!("../../profiles/vtd.toml");
    let with = |ways: &str| Profile::parse("ways", &text.replace("iotlb_ways = 8", ways));
    assert!(with("iotlb_ways = 128").is_ok());
    let error = with("iotlb_ways = 129").unwrap_err().to_string();
    assert!(error.contains("caches.iotlb_ways is 129"), "{error}");
    let large = text.replace("iotlb_entries = 128", "iotlb_entries = 65536");
    let with = |ways: &str| Profile::parse("ways", &large.replace("iotlb_ways = 8", ways));
    assert!(with("iotlb_ways = 256").is_ok());
    let error = with("iotlb_ways = 257").unwrap_err().to_string();
    assert!(error.contains("caches.iotlb_ways is 257, expected 1 to 256"), "{error}");
}

#[test]
fn a_timer_runs_at_its_very_time_before_what_comes_then() {
    struct Nothing(AtomicU64);
    impl PlatformEvents for Nothing {
        fn timer(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn cpu_released(&self, _: usize) {}
    }
    let (platform, listener) = (ReplayPlatform::new(1), Shared::new(Nothing(AtomicU64::new(0))).unwrap());
    platform.register(events_of(&listener)).unwrap();
    platform.wake_at(100);
    platform.at(0, 99, |_| panic!("too early"));
    let mut times = Vec::new();
    platform.at(0, 100, |time| times.push(time));
    assert_eq!((times, listener.0.load(Ordering::Relaxed)), (vec![100], 1));
}

#[test]
fn the_share_of_passthrough_is_there_without_passthrough_being_shown() {
    let mut options = options("vtd");
    (options.policies, options.work_ns) = (vec![Policy::Strict.into()], Some(1_000.0));
    let report = run("shipped", SHIPPED, &options);
    assert_eq!(report.policies.len(), 1);
    let share = policy(&report, "strict").relative_to_passthrough.unwrap();
    // 710 ns of wait beside 1,000 ns of work: whatever the machine, about three fifths at the most.
    assert!(share > 0.0 && share < 0.7, "{share}");
}

/// A buffer of 100 bytes in a page of 4, 16 or 64 KiB.
#[test]
fn neighbours_are_those_in_the_page_of_the_format() {
    let text = map(0, 0, 0xf100, 0x5100, 100) + &unmap(0, 1_000_000, 0xf100, 100);
    for (format, page) in [("vtd-ss", 4096.0), ("arm-s1-16k", 16384.0), ("arm-s2-64k", 65536.0)] {
        let report = run(format, text.as_bytes(), &Options { format: format.into(), ..options("none") });
        for name in ["strict", "strict-batch", "strict-ring", "lazy", "passthrough"] {
            let found = policy(&report, name).exposure.neighbour_byte_s;
            assert!((found - (page - 100.0)).abs() < 1e-6, "{format}, {name}: {found}");
        }
        let kept = |policy: &PolicyReport| policy.violations == 0;
        assert!(report.policies.iter().all(kept), "{format}");
    }
}

/// A domain's count is an upper bound, however long nothing happens between two events.
#[test]
fn two_events_a_second_apart_are_no_violation() {
    let pair = |us: u64| map(0, us, 0xf100, 0x5100, 100) + &unmap(0, us + 1_000_000, 0xf100, 100);
    let busy: String = (0..200).map(|n| map(0, n, 0xf100, 0x5100, 100) + &unmap(0, n, 0xf100, 100)).collect();
    // A mapping that never ends, and less than a batch, count as well.
    let open = map(0, 1_000_000, 0xf100, 0x5100, 100) + &line(0, 3_000_000, "sched_switch: x");
    let some: String =
        (0..70).map(|n| map(0, n, 0x1_0000 * n + 0x100, 0x10_0000 + 0x1_0000 * n + 0x100, 100)).collect();
    let some = some + &line(0, 5_000_000, "sched_switch: x");
    for text in [pair(1_000_000), busy + &pair(1_000_000) + &pair(3_000_000), open, some] {
        let report = run("idle", text.as_bytes(), &options("vtd"));
        for policy in &report.policies {
            assert_eq!(
                policy.violations, 0,
                "{}: {:?} {:?}",
                policy.policy, policy.exposure, policy.exposure_counted
            );
            if let Some(counted) = policy.exposure_counted {
                assert!(
                    counted.neighbour_byte_s >= policy.exposure.neighbour_byte_s - 1e-6,
                    "{}",
                    policy.policy
                );
            }
        }
    }
}

/// The last event is an invalidation, half a second after the last unmap.
#[test]
fn a_trace_ends_with_its_last_event_for_all_devices_and_batches() {
    let pair = |device: &str, us: u64| {
        (map(0, us, 0xf100, 0x5100, 100) + &unmap(0, us + 1, 0xf100, 100)).replace("nvme", device)
    };
    let text = pair("nvme", 0) + &pair("nic", 100_000) + &map(0, 200_000, 0x7000, 0x8000, 100);
    let late = line(1, 203_000, "qi_submit: iotlb_inv dmar0: 0x600f2 0x1 0x0 0x0");
    let text = text + &unmap(0, 200_000, 0x7000, 100) + &late;
    let replay = |device: Option<&str>| {
        let read = portcullis_trace::ReadOptions { device: device.map(Into::into), ..Default::default() };
        let mut trace = portcullis_trace::Trace::from_bytes("end", text.as_bytes(), read).unwrap();
        portcullis_trace::replay::replay(&mut trace, &options("none"), |_| ()).unwrap()
    };
    let (all, nvme, nic) = (replay(None), replay(Some("nvme")), replay(Some("nic")));
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} and {b}");
    let stale = |report: &Report| policy(report, "passthrough").exposure.stale_byte_s;
    close(stale(&nic), 100.0 * 0.102_999);
    close(stale(&all), stale(&nvme) + stale(&nic));
    for name in ["strict", "strict-ring", "lazy"] {
        let neighbour = |report: &Report| policy(report, name).exposure.neighbour_byte_s;
        close(neighbour(&all), neighbour(&nvme) + neighbour(&nic));
    }
    // The last unmap waits 3 ms, and is committed at the end of the trace; the others wait 10 ms.
    close(policy(&all, "strict-ring").exposure.neighbour_byte_s, 3996.0 * (0.010_001 * 2.0 + 0.003));
}

/// An unparsable event has a time like any other: devices keep their access until then.
#[test]
fn a_trace_ends_with_its_last_event_also_where_that_cannot_be_read() {
    let text = map(0, 1_000, 0x7000, 0x8000, 100) + &unmap(0, 2_000, 0x7000, 100);
    for last in [
        "dma_map_page: nvme dir=NONE dma_addr=f000 size=64 phys_addr=9000 attrs=",
        "dma_map_page: nvme dir=TO_DEVICE dma_addr=x size=64 phys_addr=9000 attrs=",
        "map: IOMMU: iova=0x1 size=4096",
    ] {
        let text = text.clone() + &line(1, 502_000, last);
        let report = run("end", text.as_bytes(), &options("none"));
        let stale = policy(&report, "passthrough").exposure.stale_byte_s;
        assert!((stale - 100.0 * 0.5).abs() < 1e-9, "{stale} after {last}");
        assert_eq!((report.trace.events, report.trace.cpus), (3, 2));
    }
}

#[test]
fn a_list_whose_parts_overlap_is_no_violation() {
    for dir in ["TO_DEVICE", "FROM_DEVICE", "BIDIRECTIONAL"] {
        let list = "phys_addrs={0x5000,0x5800,0x5000} attrs=";
        let sg = "dma_addrs={0x1000,0x2800,0x3000} sizes={0x1000,0x800,0x1000}";
        let text = line(0, 1, &format!("dma_map_sg: nvme dir={dir} nents=3/3 ents=3/3 {sg} {list}"))
            + &line(0, 2, &format!("dma_unmap_sg: nvme dir={dir} {list}"));
        let report = run("overlap", text.as_bytes(), &options("vtd"));
        for policy in &report.policies {
            assert_eq!(
                (policy.operations, policy.violations, policy.failures),
                (1, 0, 0),
                "{dir}, {}",
                policy.policy
            );
        }
    }
}

#[test]
fn what_is_cheaper_is_said_beside_what_is_chosen() {
    let report = run("shipped", SHIPPED, &options("virtio-iommu"));
    for row in policy(&report, "adaptive").choices.iter().flat_map(|choices| &choices.rows) {
        let cheaper = row.copy_ns.zip(row.map_ns).map(|(copy, map)| copy.0 + copy.1 <= map.0 + map.1);
        assert_eq!(row.cheaper, cheaper.map(|copy| if copy { "copy" } else { "map" }), "{row:?}");
    }
}

/// The timer costs more between other work than in a tight loop.
#[test]
fn the_timer_s_cost_is_what_measurements_of_nothing_found() {
    let timer = Timer::calibrated();
    let (mut empty, mut calls) = (Samples::new(&timer), Samples::new(&timer));
    let tick = 1_000;
    (0..200).for_each(|_| empty.record(tick));
    (0..2).for_each(|_| empty.record(50 * tick));
    (0..1000).for_each(|_| calls.record(tick + 200));
    let less = timer.less(&empty);
    assert!(less.overhead_ns() > timer.overhead_ns());
    assert!(calls.figures(&less).mean < calls.figures(&timer).mean / 3.0);
    let few = Samples::new(&timer);
    assert_eq!(timer.less(&few).overhead_ns(), timer.overhead_ns());
}
