//! Figures of handmade recordings, each derived from the events.

use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, Options, PolicyReport, Profile, Report, Work, replay};
use portcullis_trace::{ReadOptions, Trace};

use crate::common::{on_cpu0, policy, replayed_modes, run, trace};

const STRICT: Mode = Mode::Each(Policy::Strict);

fn options(profile: &str, policies: &[Mode]) -> Options {
    Options { policies: policies.to_vec(), ..Options::new(Profile::load(profile).unwrap()) }
}

fn map(device: &str, dir: &str, iova: u64, phys: u64, size: u64) -> String {
    format!("dma_map_page: {device} dir={dir} dma_addr={iova:x} size={size} phys_addr={phys:x} attrs=")
}

fn unmap(device: &str, dir: &str, iova: u64, size: u64) -> String {
    format!("dma_unmap_page: {device} dir={dir} dma_addr={iova:x} size={size} attrs=")
}

fn sync(iova: u64, size: u64) -> String {
    format!("dma_sync_single_for_cpu: d dir=FROM_DEVICE dma_addr={iova:x} size={size}")
}

fn replayed(events: &[String], options: &Options) -> Report {
    let events: Vec<&str> = events.iter().map(String::as_str).collect();
    run("by hand", on_cpu0(&events).as_bytes(), options)
}

fn only(report: Report) -> PolicyReport {
    let [policy] = <[PolicyReport; 1]>::try_from(report.policies).unwrap();
    assert_eq!((policy.faults, policy.violations, policy.failures), (0, 0, 0), "{:?}", policy.first_failure);
    policy
}

/// There is nothing to compute a share of.
#[test]
fn a_recording_in_which_nothing_is_mapped_has_no_figures() {
    let report = run(
        "nothing",
        trace(&[(1, 0, "sched_switch: x"), (1, 5, "sched_switch: y")]).as_bytes(),
        &options("virtio-iommu", &replayed_modes()),
    );
    let traced = &report.trace;
    assert_eq!((traced.events, traced.maps, traced.unmaps, traced.cpus), (2, 0, 0, 1));
    assert!(!traced.iommu_only && traced.devices.is_empty());
    assert_eq!(report.policies.len(), 8);
    for policy in &report.policies {
        let name = policy.policy;
        assert_eq!((policy.relative_to_passthrough, policy.ops_per_s), (None, 0.0), "{name}");
        assert_eq!((policy.operations, policy.invalidations, policy.wait_ns_per_op), (0, 0, 0.0), "{name}");
        assert_eq!((policy.map_ns.mean, policy.unmap_ns.mean), (0.0, 0.0), "{name}");
        assert!(policy.map_latency.is_empty() && policy.unmap_latency.is_empty(), "{name}");
        let misses = (policy.iotlb_misses_per_access, policy.walk_cache_misses_per_access);
        assert_eq!(misses, (0.0, 0.0), "{name}");
        let peaks = (policy.peak_iova_bytes, policy.peak_table_bytes, policy.peak_bounce_bytes);
        assert_eq!(peaks, (0, 0, 0), "{name}");
        let exposed = (policy.exposure.stale_byte_s, policy.exposure.neighbour_byte_s);
        assert_eq!((exposed, policy.longest_stale_ns), ((0.0, 0.0), 0), "{name}");
        assert_eq!((policy.faults, policy.violations, policy.failures), (0, 0, 0), "{name}");
    }
}

/// A second for each map request: a queue that chooses by both costs must have seen it.
#[test]
fn what_hardware_makes_a_map_wait_is_in_what_an_adaptive_queue_knows() {
    let mut options = options("virtio-iommu", &[Mode::Adaptive]);
    let second = 1_000_000_000;
    options.profile.waits.map_request.ns = second as f64;
    let events = [map("d", "TO_DEVICE", 0x1000, 0x5000, 4096), unmap("d", "TO_DEVICE", 0x1000, 4096)];
    let adaptive = only(replayed(&events, &options));
    let [choices] = &adaptive.choices[..] else { panic!("one device") };
    let [row] = &choices.rows[..] else { panic!("one size: {choices:?}") };
    assert!(row.map_ns.is_some_and(|(map, _)| map >= second), "{row:?}");
    assert_eq!((row.choice, row.cheaper, row.copied, row.mapped), ("copy", Some("copy"), 1, 0));
    assert_eq!((row.most_bytes, row.direction, row.shared, row.switches), (4096, "to-device", false, 0));
}

/// A ring for each direction, each with its choices.
#[test]
fn what_was_chosen_is_told_of_each_direction() {
    let directions = ["TO_DEVICE", "FROM_DEVICE", "BIDIRECTIONAL"];
    let events: Vec<String> = directions
        .into_iter()
        .zip(1..)
        .flat_map(|(dir, n)| [map("d", dir, n << 16, n << 16, 512 << n), unmap("d", dir, n << 16, 512 << n)])
        .collect();
    let adaptive = only(replayed(&events, &options("vtd", &[Mode::Adaptive])));
    let [choices] = &adaptive.choices[..] else { panic!("one device") };
    let rows = choices.rows.iter().map(|row| (row.direction, row.most_bytes, row.copied + row.mapped));
    assert_eq!(
        rows.collect::<Vec<_>>(),
        [("to-device", 1024, 1), ("from-device", 2048, 1), ("both", 4096, 1)]
    );
}

/// Operations per second follow from the other figures of the report, whose numbers of maps and of unmaps differ.
#[test]
fn operations_per_second_are_those_of_work_calls_and_waits() {
    let events = [
        map("d", "TO_DEVICE", 0x1000, 0x5000, 4096),
        map("d", "TO_DEVICE", 0x2000, 0x6000, 4096),
        map("d", "TO_DEVICE", 0x3000, 0x7000, 4096),
        unmap("d", "TO_DEVICE", 0x1000, 4096),
    ];
    let mut options = options("virtio-iommu", &replayed_modes());
    assert_eq!(options.work_ns, None);
    options.work_ns = Some(700.0);
    let report = replayed(&events, &options);
    let passthrough = policy(&report, "passthrough").ops_per_s;
    for policy in &report.policies {
        let calls = 3.0 * policy.map_ns.mean + policy.unmap_ns.mean;
        let spent_ns = 3.0 * 700.0 + calls + 3.0 * policy.wait_ns_per_op;
        let expected = 3.0 * 1e9 / spent_ns;
        assert!((policy.ops_per_s / expected - 1.0).abs() < 1e-9, "{}: {policy:?}", policy.policy);
        let share = policy.relative_to_passthrough.unwrap();
        assert!((share - policy.ops_per_s / passthrough).abs() < 1e-9, "{}", policy.policy);
    }
    // A request for each map and its page; for the unmap the page and the wait.
    let strict = policy(&report, "strict");
    assert!((strict.wait_ns_per_op * 3.0 - (3.0 * 5315.0 + 57.0 + 4900.0)).abs() < 1e-6);
}

/// An evicted IOTLB entry cannot be reached any more, but counts until the flush.
#[test]
fn what_is_counted_as_open_may_be_more_than_what_was_reached() {
    let calls = |at: u64| [map("d", "TO_DEVICE", at, at, 4096), unmap("d", "TO_DEVICE", at, 4096)];
    let events: Vec<String> = (1..=3).flat_map(|n| calls(n << 12)).collect();
    let at = [0, 1, 5_000, 5_001, 50_000, 50_001];
    let timed: Vec<_> = at.iter().zip(&events).map(|(at, event)| (0, *at, event.as_str())).collect();
    let mut options = options("vtd", &[Mode::Each(Policy::LAZY)]);
    (options.profile.caches.iotlb_entries, options.profile.caches.iotlb_ways) = (1, 1);
    let lazy = only(run("by hand", trace(&timed).as_bytes(), &options));
    let counted = lazy.exposure_counted.unwrap();
    // All is flushed after 10 ms: the first has waited all that time, and could be reached until the second was mapped.
    assert_eq!((lazy.exposure.stale_byte_s, counted.stale_byte_s), (40.96, 61.44));
}

/// By the hardware's costs: if a flush costs microseconds, unmaps wait for it up to a second, and 10 ms otherwise.
#[test]
fn lazy_protection_has_the_window_of_the_hardware() {
    let calls = |at: u64| [map("d", "TO_DEVICE", at, at, 4096), unmap("d", "TO_DEVICE", at, 4096)];
    let events: Vec<String> = (1..=4).flat_map(|n| calls(n << 12)).collect();
    let at = [0, 1, 100_000, 100_001, 400_000, 400_001, 900_000, 900_001];
    let timed: Vec<_> = at.iter().zip(&events).map(|(at, event)| (0, *at, event.as_str())).collect();
    let waits = |profile: &str| {
        let policies = [Mode::Each(Policy::LAZY)];
        let lazy = only(run("by hand", trace(&timed).as_bytes(), &options(profile, &policies)));
        let counted = lazy.exposure_counted.unwrap();
        (lazy.longest_stale_ns, lazy.invalidations, lazy.exposure.stale_byte_s, counted.stale_byte_s)
    };
    // The fourth is unmapped at the end. By then the first has waited 0.9 s, the second 0.8 s, and the third 0.5 s.
    assert_eq!(waits("vtd"), (10_000_000, 3, 122.88, 122.88));
    assert_eq!(waits("virtio-iommu"), (900_000_000, 0, 9011.2, 9011.2));
}

/// Each device has a domain of its own.
#[test]
fn what_two_devices_take_is_what_each_takes() {
    let of = |device: &str, at: u64, size: u64| {
        [map(device, "TO_DEVICE", at, at, size), unmap(device, "TO_DEVICE", at, size)]
    };
    let [a, b] = [of("a", 0x10_0000, 5 << 12), of("b", 0x900_0000, 1 << 20)];
    let both = [a[0].clone(), b[0].clone(), b[1].clone(), a[1].clone()];
    let options = options("vtd", &replayed_modes());
    let [a, b, both] = [&a[..], &b[..], &both[..]].map(|events| replayed(events, &options));
    for (n, mode) in replayed_modes().into_iter().enumerate() {
        let of = |report: &Report| {
            let policy = &report.policies[n];
            (policy.peak_iova_bytes, policy.peak_table_bytes)
        };
        let ((iova_a, tables_a), (iova_b, tables_b)) = (of(&a), of(&b));
        assert_eq!(of(&both), (iova_a + iova_b, tables_a + tables_b), "{}", mode.name());
        let translated = !matches!(mode, Mode::PASSTHROUGH | Mode::Swiotlb);
        assert_eq!((iova_a > 0, tables_a > 0), (translated, translated), "{}", mode.name());
    }
}

/// The rest of a buffer's page is open while the buffer is mapped: for 100 ms with one device, and for 200 ms with another.
#[test]
fn what_two_devices_leave_open_is_the_sum() {
    let events = [
        (0, map("a", "TO_DEVICE", 0x1000, 0x1000, 96)),
        (0, map("b", "TO_DEVICE", 0x1000, 0x9000, 1096)),
        (100_000, unmap("a", "TO_DEVICE", 0x1000, 96)),
        (200_000, unmap("b", "TO_DEVICE", 0x1000, 1096)),
    ];
    let timed: Vec<_> = events.iter().map(|(at, event)| (0, *at, event.as_str())).collect();
    let strict = only(run("by hand", trace(&timed).as_bytes(), &options("vtd", &[STRICT])));
    let counted = strict.exposure_counted.unwrap();
    for open in [strict.exposure.neighbour_byte_s, counted.neighbour_byte_s] {
        assert!((open / 1000.0 - 1.0).abs() < 0.001, "{open}");
    }
}

/// The first named device maps last.
#[test]
fn choices_are_in_the_order_of_the_recording_s_devices() {
    let mut events = vec![unmap("first", "TO_DEVICE", 0x1000, 64)];
    for device in ["second", "first"] {
        let at = if device == "first" { 0x5000 } else { 0x9000 };
        events.extend([map(device, "FROM_DEVICE", at, at, 64), unmap(device, "FROM_DEVICE", at, 64)]);
    }
    let report = replayed(&events, &options("vtd", &[Mode::Adaptive]));
    assert_eq!(report.trace.devices, ["first", "second"]);
    let adaptive = only(report);
    let devices: Vec<_> =
        adaptive.choices.iter().map(|choices| (choices.device, choices.rows.len())).collect();
    assert_eq!(devices, [(0, 1), (1, 1)]);
}

/// Under strict protection a device uses what it is given; each page access looks in the IOTLB, whose size, ways and invalidations are the
/// profile's, and walks on a miss.
#[test]
fn misses_are_those_of_the_profile_s_caches() {
    let dir = "FROM_DEVICE";
    // Three pages of 24, eight apart, three times; then all of them, when they are unmapped.
    let mut strided = vec![map("d", dir, 0x10_0000, 0x50_0000, 24 << 12)];
    strided.extend([0, 8, 16].repeat(3).into_iter().map(|page| sync(0x10_0000 + (page << 12), 64)));
    strided.push(unmap("d", dir, 0x10_0000, 24 << 12));
    // Two pages 2 MiB apart, alternating: in different tables; only the memory's offset keeps them from being large pages.
    let mut apart = vec![map("d", dir, 0x1000_0000, 0x5000_1000, 4 << 20)];
    apart.extend([0, 0x20_0000].repeat(4).into_iter().map(|offset| sync(0x1000_0000 + offset, 64)));
    // A page that is used before and after others are unmapped.
    let between = |size: u64| {
        vec![
            map("d", dir, 0x10_0000, 0x50_0000, 4096),
            map("d", dir, 0x20_0000, 0x60_0000, size),
            sync(0x10_0000, 64),
            unmap("d", dir, 0x20_0000, size),
            sync(0x10_0000, 64),
            unmap("d", dir, 0x10_0000, 4096),
        ]
    };
    type Case = (&'static str, Vec<String>, fn(&mut portcullis_trace::replay::Caches), u64, u64, u64);
    let cases: [Case; 10] = [
        // Four pages of six in each of four sets.
        ("as large as all", strided.clone(), |c| (c.iotlb_entries, c.iotlb_ways) = (32, 8), 33, 24, 1),
        // One set of eight: of the synced pages, only page 0 is still there when it is used again.
        ("one set", strided.clone(), |c| (c.iotlb_entries, c.iotlb_ways) = (8, 8), 33, 26, 1),
        ("one way", strided, |c| (c.iotlb_entries, c.iotlb_ways) = (8, 1), 33, 33, 1),
        // Each table once, or each time after the other was used.
        ("tables", apart.clone(), |c| (c.iotlb_entries, c.iotlb_ways) = (1, 1), 8, 8, 2),
        ("one table", apart, |c| (c.iotlb_entries, c.iotlb_ways, c.walk_cache_entries) = (1, 1, 1), 8, 8, 8),
        // The page is still there, or was evicted by the other.
        ("range", between(8192), |_| (), 5, 3, 1),
        ("domain", between(8192), |c| c.max_address_mask = 0, 5, 4, 2),
        ("page", between(4096), |c| c.max_address_mask = 0, 4, 2, 1),
        ("leaves alone", between(4096), |c| (c.iotlb_entries, c.iotlb_ways) = (1, 1), 4, 3, 1),
        (
            "tables, too",
            between(4096),
            |c| (c.iotlb_entries, c.iotlb_ways, c.honours_leaf_only) = (1, 1, false),
            4,
            3,
            2,
        ),
    ];
    for (name, events, change, accesses, misses, walks) in cases {
        let mut options = options("vtd", &[STRICT]);
        change(&mut options.profile.caches);
        let strict = only(replayed(&events, &options));
        let found = (strict.iotlb_misses_per_access, strict.walk_cache_misses_per_access);
        let [misses, walks] = [misses, walks].map(|count| count as f64 / accesses as f64);
        assert_eq!(found, (misses, walks), "{name}: of {accesses} accesses");
    }
}

/// Registered memory stays open for the whole recording: buffers returned to the driver, and data that shares a page.
#[test]
fn registered_memory_is_open_all_the_time_but_for_what_is_in_use() {
    let events = [
        (0, map("d", "TO_DEVICE", 0x1000, 0x5000, 100)),
        (100_000, unmap("d", "TO_DEVICE", 0x1000, 100)),
        // It overlaps the first.
        (200_000, map("d", "TO_DEVICE", 0x2040, 0x5040, 100)),
        (300_000, unmap("d", "TO_DEVICE", 0x2040, 100)),
        (400_000, map("e", "TO_DEVICE", 0x9000, 0x5000, 4096)),
    ];
    let timed: Vec<_> = events.iter().map(|(at, event)| (0, *at, event.as_str())).collect();
    let mut options = options("vtd", &[STRICT, Mode::Registered]);
    options.work_ns = Some(2_000.0);
    let report = run("by hand", trace(&timed).as_bytes(), &options);
    let names: Vec<_> = report.policies.iter().map(|policy| policy.policy).collect();
    assert_eq!(names, ["strict", "registered"], "in the order that was asked for");
    let registered = policy(&report, "registered");
    assert_eq!((registered.exposure.stale_byte_s, registered.exposure.neighbour_byte_s), (1684.0, 1572.8));
    assert_eq!(registered.exposure_counted, Some(registered.exposure));
    assert_eq!((registered.operations, registered.peak_iova_bytes), (3, 8192));
    assert_eq!((registered.ops_per_s, registered.relative_to_passthrough), (500_000.0, Some(1.0)));
    // Rings are whole pages.
    let ring =
        ["dma_alloc: d dir=BIDIRECTIONAL dma_addr=f000 size=512 virt_addr=c0de flags=X attrs=".to_owned()];
    let registered = only(replayed(&ring, &self::options("vtd", &[Mode::Registered])));
    assert_eq!(
        (registered.operations, registered.peak_iova_bytes, registered.exposure.neighbour_byte_s),
        (1, 4096, 0.0)
    );
}

/// Without a given work, it is all time of the recording's CPUs: an upper bound for each mapping.
#[test]
fn the_work_of_a_recording_is_what_its_cpus_had() {
    let events = [map("d", "TO_DEVICE", 0x1000, 0x5000, 100), map("d", "TO_DEVICE", 0x2000, 0x6000, 100)];
    let of = |events: &[(u32, u64, &str)]| {
        let report = run("by hand", trace(events).as_bytes(), &options("vtd", &[STRICT]));
        (report.work_ns, report.work)
    };
    // Three CPUs for 200 us, and two mappings.
    let three = [(0, 0, events[0].as_str()), (1, 50, "sched_switch: x"), (4, 200, &events[1])];
    assert_eq!(of(&three), (300_000.0, Work::Most));
    // The recorder's measurement is better than a bound: 500 us in total, 100 of them its own. Half of it if half was read.
    let measured = "# portcullis: cpus=2 wall_ns=400000 busy_ns=500000 own_ns=100000\n";
    let text = format!("{measured}{}", trace(&three));
    let of_text = |limit| {
        let options = ReadOptions { limit, ..ReadOptions::default() };
        let mut trace = Trace::from_bytes("by hand", text.as_bytes(), options).unwrap();
        let report = replay(&mut trace, &self::options("vtd", &[STRICT]), |_| ()).unwrap();
        (report.work_ns, report.work)
    };
    assert_eq!(of_text(None), (200_000.0, Work::Measured));
    assert_eq!(of_text(Some(2)), (50_000.0, Work::Measured));
    let at_once = [(0, 7, events[0].as_str()), (1, 7, &events[1])];
    assert_eq!(of(&at_once), (1_000.0, Work::Assumed));
}

/// A driver uses an allocation when it is made, and when it is freed.
#[test]
fn allocations_are_used_at_both_ends() {
    let events = [
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=f000 size=512 virt_addr=c0de flags=X attrs=".to_owned(),
        "dma_free: d dir=BIDIRECTIONAL dma_addr=f000 size=512 virt_addr=c0de attrs=".to_owned(),
    ];
    for mode in replayed_modes() {
        // No policy copies it, and with translation only the first use misses.
        let policy = only(replayed(&events, &options("vtd", &[mode])));
        let translated = !matches!(mode, Mode::PASSTHROUGH | Mode::Swiotlb);
        assert_eq!(policy.iotlb_misses_per_access, if translated { 0.5 } else { 0.0 }, "{}", mode.name());
        // A machine's pool exists from the beginning.
        let pool = if mode == Mode::Swiotlb { 16 << 20 } else { 0 };
        assert_eq!(policy.peak_bounce_bytes, pool, "{}", mode.name());
    }
}

/// A second each: no call takes a visible part of that itself.
#[test]
fn calls_take_as_long_as_their_waits_at_least() {
    let mut options = options("virtio-iommu", &[STRICT, Mode::StrictBatch, Mode::PASSTHROUGH]);
    options.profile.waits.map_request.ns = 5e8;
    options.profile.waits.completion.ns = 1e9;
    let page = |n: u64| 0x10_0000 + (n << 12);
    let mut events: Vec<String> =
        (0..64).map(|n| map("d", "TO_DEVICE", page(n), page(2 * n), 4096)).collect();
    events.extend((0..64).map(|n| unmap("d", "TO_DEVICE", page(n), 4096)));
    let report = replayed(&events, &options);
    // Neither includes interrupted calls.
    let counts = |steps: &[(f64, u64)], ns: f64| {
        let of = |wanted: &dyn Fn(f64) -> bool| {
            steps.iter().filter(|(took, _)| wanted(*took)).map(|(_, calls)| calls).sum::<u64>()
        };
        (of(&|took| took > 0.97 * ns), of(&|took| took < 0.1 * ns))
    };
    for (name, [long_maps, long_unmaps]) in
        [("strict", [64, 64]), ("strict-batch", [64, 2]), ("passthrough", [0, 0])]
    {
        let policy = policy(&report, name);
        let (long, short) = counts(&policy.map_latency, 5e8);
        let left_out = policy.interrupted_calls;
        assert!(long <= long_maps && long + left_out >= long_maps, "{name}: {long} long maps");
        assert!(short <= 64 - long_maps && short + left_out >= 64 - long_maps, "{name}: {short} short maps");
        let (long, short) = counts(&policy.unmap_latency, 1e9);
        assert!(long <= long_unmaps && long + left_out >= long_unmaps, "{name}: {long} long unmaps");
        assert!(
            short <= 64 - long_unmaps && short + left_out >= 64 - long_unmaps,
            "{name}: {short} short unmaps"
        );
    }
}

/// A part of a nanosecond counts.
#[test]
fn waits_are_kept_to_the_picosecond() {
    let mut options = options("virtio-iommu", &[STRICT]);
    let waits = &mut options.profile.waits;
    waits.doorbell.ns = 0.25;
    waits.completion.ns = 2.125;
    waits.descriptor.ns = 16.5;
    waits.map_request.ns = 0.0;
    waits.map_page.ns = 0.0;
    waits.unmap_page.ns = 0.75;
    let events = [map("d", "TO_DEVICE", 0x1000, 0x5000, 3 << 12), unmap("d", "TO_DEVICE", 0x1000, 3 << 12)];
    assert_eq!(only(replayed(&events, &options)).wait_ns_per_op, 0.25 + 2.125 + 16.5 + 3.0 * 0.75);
    // Mappings by request are so even if only pages have a price.
    for (map_page, unmap_page) in [(1.5, 0.0), (0.0, 2.5)] {
        let waits = &mut options.profile.waits;
        (waits.map_page.ns, waits.unmap_page.ns) = (map_page, unmap_page);
        let expected = 0.25 + 2.125 + 16.5 + 3.0 * (map_page + unmap_page);
        assert_eq!(only(replayed(&events, &options)).wait_ns_per_op, expected);
    }
    // With larger granules there are fewer.
    options.format = "arm-s1-16k".into();
    options.profile.waits.map_page.ns = 1.5;
    let events = [map("d", "TO_DEVICE", 0x4000, 0x8000, 2 << 14), unmap("d", "TO_DEVICE", 0x4000, 2 << 14)];
    assert_eq!(only(replayed(&events, &options)).wait_ns_per_op, 0.25 + 2.125 + 16.5 + 2.0 * (1.5 + 2.5));
}

#[test]
fn memory_is_refused_by_its_first_and_by_its_last_page_and_the_first_reason_is_kept() {
    let events = [
        map("d", "TO_DEVICE", 0x1000, 0xfeff_ffff_f000, 2 << 12),
        map("d", "TO_DEVICE", 0x9000, 0xff00_0000_0000, 64),
        map("d", "TO_DEVICE", 0xa000, 0xff00_0000_0000 + (4 << 30) - 1, 1),
        map("d", "TO_DEVICE", 0xb000, 0xff00_0000_0000 + (4 << 30), 64),
        map("d", "TO_DEVICE", 0xcfc1, 0xfeff_ffff_ffc1, 64),
        map("d", "TO_DEVICE", 0xefc0, 0xfeff_ffff_ffc0, 64),
    ];
    let report = replayed(&events, &options("none", &[Mode::Bounce]));
    let [bounce] = &report.policies[..] else { panic!("one policy") };
    // The first touches the bounce buffers by its last page, the fifth by its last byte; the fourth lies behind them, and the last before
    // them.
    assert_eq!((bounce.operations, bounce.failures, bounce.violations), (2, 4, 0));
    assert_eq!(
        bounce.first_failure.as_deref(),
        Some("line 3: mapping: memory at 0xfefffffff000, where the replay has its bounce buffers")
    );
}

#[test]
fn progress_is_told_after_each_chunk() {
    let last = map("d", "TO_DEVICE", 0x1000, 0x5000, 64);
    let text = on_cpu0(&["sched_switch: x", "sched_switch: x", &last]);
    let mut trace = Trace::from_bytes("progress", text.as_bytes(), ReadOptions::default()).unwrap();
    let mut told = Vec::new();
    let options = options("none", &[STRICT]);
    replay(&mut trace, &options, |trace| told.push(trace.summary().events)).unwrap();
    assert_eq!(told, [3]);
}
