//! Many CPUs: the ranking of designs, and their collapses; by the repository's measurements.

use crate::golden::is_golden;
use portcullis_model::scale::{
    Copies, Device, Machine, Mapping, Operations, Outcome, Policy, Request, Workload, run,
};

fn machine(cpus: u32, sockets: u32) -> Machine {
    let copies = Copies { hot_ns: 7.7, cold_ns: 142.0, remote_ns: 16.9, socket_gb_per_s: 68.0 };
    Machine {
        cpus,
        sockets,
        iommus: 1,
        near_ns: 60.0,
        far_ns: 120.0,
        submission_ns: 710.0,
        request_ns: 0.0,
        in_flight: 1,
        map_request_ns: 0.0,
        map_page_ns: 0.0,
        unmap_page_ns: 0.0,
        walk_read_ns: 197.0,
        copies,
        of_module: false,
    }
}

fn simulate(machine: &Machine, workload: &str, policy: &str) -> Outcome {
    let workload = Workload::named(workload, machine.cpus).unwrap();
    run(machine, &workload, Policy::named(policy).unwrap(), &Operations::measured().unwrap()).unwrap()
}

/// The share of the throughput without protection.
fn share(cpus: u32, sockets: u32, workload: &str, policy: &str) -> f64 {
    let machine = machine(cpus, sockets);
    simulate(&machine, workload, policy).per_s / simulate(&machine, workload, "passthrough").per_s
}

/// Peleg and Morrison (2016): 22 % before, 97 % after, on 16 cores of two sockets.
#[test]
fn memcached_collapses_under_the_lazy_design_of_2015_and_not_under_ours() {
    let old = share(16, 2, "memcached", "lazy-2015");
    assert!((0.22 / 1.5..=0.22 * 1.5).contains(&old), "{old}");
    for (cpus, sockets, least) in [(16, 2, 0.97), (64, 1, 0.95), (256, 4, 0.90)] {
        for policy in ["strict-ring", "bounce"] {
            let share = share(cpus, sockets, "memcached", policy);
            assert!(share >= least, "{policy} on {cpus}: {share}");
        }
        let lazy = share(cpus, sockets, "memcached", "lazy");
        assert!(lazy >= 0.97, "lazy on {cpus}: {lazy}");
    }
    let per_s = |cpus| simulate(&machine(cpus, 1), "memcached", "lazy-2015").per_s;
    assert!(per_s(64) < per_s(32) && per_s(4) > 1.5 * per_s(2), "it grows first, and then shrinks");
}

/// A strict unmap with a confirmed invalidation for each of three mappings of a request: waits alone would allow 83 %.
#[test]
fn plain_strict_unmaps_scale_where_cpus_share_their_waits() {
    for (cpus, sockets, least) in [(16, 1, 0.79), (64, 1, 0.70), (256, 4, 0.55)] {
        let share = share(cpus, sockets, "memcached", "strict");
        assert!((least..0.83).contains(&share), "{cpus}: {share}");
    }
    let smmu = |iommus| {
        let machine = Machine { submission_ns: 240.0, iommus, ..machine(72, 1) };
        let per_s = |policy| simulate(&machine, "nvme-2026", policy).per_s;
        ["strict", "strict-ecmdq", "smmu-2026"].map(|policy| per_s(policy) / per_s("passthrough"))
    };
    let ([one, queues, linux], [three, ..]) = (smmu(1), smmu(3));
    assert!(three >= 0.95 && one > 2.5 * linux, "{three} {one} {linux}");
    assert!(queues >= 0.95, "a queue for each CPU: {queues}");
}

/// Kovvuri (2017): 69,579 of 410,392 IOPS, which is 17 %.
#[test]
fn a_lock_across_each_wait_costs_disks_what_ours_does_not() {
    let (old, ours) = (share(32, 2, "nvme", "smmu-2017"), share(32, 2, "nvme", "strict"));
    assert!((0.12..=0.25).contains(&old) && ours >= 0.97, "{old} {ours}");
}

/// A guest with a nested VT-d (2025): 43, 165 and 229 Gb/s on 1, 4 and 8 cores.
#[test]
fn a_lock_around_each_submission_holds_a_guest_up_as_it_was_measured_to() {
    let gb_per_s = |cpus, policy| {
        let machine = Machine { submission_ns: 7_000.0, ..machine(cpus, 1) };
        simulate(&machine, "nested", policy).per_s * 8.0 * 262_144.0 / 1e9
    };
    for (cpus, published) in [(1, 43.0), (4, 165.0), (8, 229.0)] {
        let ours = gb_per_s(cpus, "vtd-2024");
        assert!((published / 1.5..published * 1.5).contains(&ours), "{cpus}: {ours}");
    }
    assert!(gb_per_s(16, "vtd-2024") < 1.3 * gb_per_s(8, "vtd-2024"), "the lock is all that there is");
    assert!(gb_per_s(16, "strict") > 1.8 * gb_per_s(8, "strict"), "ours is shared");
}

/// Tomonori, Grundler and Ben-Yehuda (2008): 0.814 with a tree, 0.887 with a bitmap.
#[test]
fn tables_that_are_written_back_cost_one_thread_what_they_did() {
    for (policy, published) in [("tree-2008", 0.814), ("bitmap-2008", 0.887)] {
        let share = share(1, 1, "disk-2008", policy);
        assert!((published / 1.5..1.0).contains(&share) && share < 0.95, "{policy}: {share}");
    }
}

#[test]
fn swiotlb_doubles_with_the_cpus_and_one_lock_does_not() {
    let per_s = |policy, cpus: u32| simulate(&machine(cpus, cpus.div_ceil(64)), "swiotlb", policy).per_s;
    for cpus in [1, 2, 4, 8, 16, 32, 64, 128] {
        let doubled = per_s("swiotlb", 2 * cpus) / per_s("swiotlb", cpus);
        assert!(doubled >= 1.9, "{cpus}: {doubled}");
    }
    for old in ["swiotlb-2021", "swiotlb-lifo"] {
        assert!(per_s(old, 64) < 1.1 * per_s(old, 32), "{old}");
    }
    assert!(per_s("swiotlb-lifo", 1) > per_s("swiotlb-2021", 1), "what was used last is hot");
}

/// One request without work and device: only shared state is left.
fn bare(work_ns: f64) -> Workload {
    Workload {
        name: "bare".into(),
        about: String::new(),
        requests: vec![Request {
            work_ns,
            mappings: vec![Mapping { pages: 1, pieces: 1, bytes: 1, shared: false, received: false }],
        }],
        depth: 4,
        device: Device { count: 1, requests_per_s: 1e12, gb_per_s: 1e9, latency_ns: 0.0, page_ns: 0.0 },
    }
}

/// Invented figures, in which a lock takes 100 ns of each operation.
const LOCKED: &str = "op lazy-2015-1 1 64 100 0 0 0\nop lazy-2015-1 2 64 200 4 0 0\nop lazy-2015-1 8 64 800 9 0 0\nline 0.5 a.rs:1\n";

#[test]
fn what_was_measured_comes_back_where_cpus_do_nothing_else() {
    let operations = Operations::parse(LOCKED).unwrap();
    let policy = Policy::named("lazy-2015").unwrap();
    for cpus in [1, 2, 4, 8] {
        let machine = Machine { submission_ns: 0.0, walk_read_ns: 0.0, ..machine(cpus, 1) };
        let outcome = run(&machine, &bare(0.0), policy, &operations).unwrap();
        // One each 100 ns, for any number of CPUs.
        assert!((outcome.per_s / 1e7 - 1.0).abs() < 0.02, "{cpus}: {}", outcome.per_s);
        assert_eq!(outcome.lines[0].source, "a.rs:1");
        // Eight that come every two microseconds hardly wait.
        let outcome = run(&machine, &bare(2_000.0), policy, &operations).unwrap();
        assert!(outcome.spent.shared_ns < 100.0, "{:?}", outcome.spent);
        assert!(
            run(&machine, &bare(0.0), policy, &operations).unwrap()
                == run(&machine, &bare(0.0), policy, &operations).unwrap()
        );
    }
    let outcome = run(&machine(16, 1), &bare(0.0), policy, &operations).unwrap();
    assert_eq!(outcome.inferred.len(), 1, "more CPUs than were measured: {:?}", outcome.inferred);
    let slower = Machine { near_ns: 120.0, submission_ns: 0.0, walk_read_ns: 0.0, ..machine(8, 1) };
    let outcome = run(&slower, &bare(0.0), policy, &operations).unwrap();
    // All but the 100 ns of a single CPU are transfers, which take twice as long.
    assert!((outcome.per_s * 1500.0 / 8e9 - 1.0).abs() < 0.02 && outcome.inferred.len() == 1, "{outcome:?}");
}

#[test]
fn hardware_that_is_waited_for_together_keeps_up_and_one_by_one_it_does_not() {
    let both = |name: &str, ns: [u32; 2]| {
        format!("op {name} 1 64 {} 0 0 0\nop {name} 8 64 {} 0 0 0\n", ns[0], ns[1])
    };
    let ring = |ns| both("vtd-shared-raw-1@vtd", ns);
    let text = both("raw-1", [1, 1]) + LOCKED;
    let slow = Operations::parse(&(text.clone() + &ring([811, 9421]))).unwrap();
    let text = text + &ring([711, 1421]);
    let operations = Operations::parse(&text).unwrap();
    let machine = Machine { walk_read_ns: 0.0, ..machine(8, 1) };
    let per_s =
        |policy: &str| run(&machine, &bare(0.0), Policy::named(policy).unwrap(), &operations).unwrap().per_s;
    // All eight are in each second submission at the latest.
    assert!(per_s("strict") > 8e9 / 1_430.0 && per_s("strict") < 8e9 / 710.0, "{}", per_s("strict"));
    assert!(run(&machine, &bare(0.0), Policy::named("bounce").unwrap(), &operations).is_err());
    // Lines of the ring that all eight fill cost their measured 1,000 ns of each operation.
    let strict = run(&machine, &bare(0.0), Policy::named("strict").unwrap(), &slow).unwrap();
    assert!(strict.spent.shared_ns > 1_000.0 && strict.per_s < 0.8 * per_s("strict"), "{strict:?}");
}

/// A buffer that shares a page is copied; otherwise the ring or a copy, whichever is cheaper.
#[test]
fn adaptive_leaves_nothing_open_and_takes_the_cheaper_way() {
    let operations = Operations::measured().unwrap();
    let spent = |machine: &Machine, (pages, bytes, shared)| {
        let mapping = Mapping { pages, pieces: 1, bytes, shared, received: false };
        let requests = vec![Request { work_ns: 1_000.0, mappings: vec![mapping] }];
        let workload = Workload { requests, ..bare(0.0) };
        run(machine, &workload, Policy::named("adaptive").unwrap(), &operations).unwrap().spent
    };
    let here = machine(4, 1);
    let (whole, part) = (spent(&here, (1, 4096, false)), spent(&here, (1, 2048, true)));
    assert!(whole.copy_ns == 0.0 && whole.wait_ns > 0.0, "{whole:?}");
    assert!(part.copy_ns > 100.0 && part.wait_ns == 0.0, "{part:?}");
    // A large mapping's ends are copied. One that is hardly longer than its ends is copied as a whole.
    let (large, small) = (spent(&here, (64, 260_000, true)), spent(&here, (3, 4_200, true)));
    assert!(large.copy_ns < 1_000.0 && large.wait_ns > 0.0, "{large:?}");
    assert!(small.copy_ns > 300.0 && small.wait_ns == 0.0, "{small:?}");
    // If waits are long and copies cheap, whole pages are copied, too.
    let slow = Machine { submission_ns: 100_000.0, ..here };
    let copied = spent(&slow, (1, 4096, false));
    assert!(copied.copy_ns > 100.0 && copied.wait_ns == 0.0, "{copied:?}");
}

#[test]
fn a_file_that_is_none_is_refused_with_its_line() {
    for wrong in ["op", "op raw-1 1 64", "op raw 1 64 1 0 0", "line 0.5 a.rs", "x", "op raw-1 1 64 nan 0 0"] {
        assert!(Operations::parse(&format!("# head\n{wrong}\n")).unwrap_err().contains("line 2"), "{wrong}");
    }
}

/// Each figure of each policy in each workload, against a file: with one CPU more than a link serves, with two sockets, and with each cost
/// of the machine changed. With `PORTCULLIS_WRITE_TABLES=1` the test writes the file.
#[test]
fn the_simulation_comes_to_these_figures() {
    use std::fmt::Write;

    use portcullis_model::scale::{NAMES, POLICIES};

    let operations = Operations::measured().unwrap();
    let mut text = String::new();
    for (cpus, sockets) in [(1, 1), (11, 2), (33, 1)] {
        let machine = Machine {
            request_ns: 25.0,
            in_flight: sockets,
            map_request_ns: 130.0,
            map_page_ns: 11.0,
            unmap_page_ns: 7.0,
            ..machine(cpus, sockets)
        };
        for name in NAMES {
            let workload = Workload::named(name, cpus).unwrap();
            let Device { count, requests_per_s, gb_per_s, latency_ns, page_ns } = workload.device;
            let requests = &workload.requests;
            let device = (count, requests_per_s, gb_per_s, latency_ns, page_ns);
            writeln!(text, "{name} on {cpus}: {} under way of {device:?}, {requests:?}", workload.depth)
                .unwrap();
            // A run of 33 CPUs takes long: there, only the devices' figures are compared.
            for policy in POLICIES.iter().filter(|_| cpus < 32) {
                let Outcome { per_s, spent, queue_busy, device_busy, .. } =
                    run(&machine, &workload, policy, &operations).unwrap();
                let spent = [
                    spent.work_ns,
                    spent.own_ns,
                    spent.shared_ns,
                    spent.wait_ns,
                    spent.copy_ns,
                    spent.idle_ns,
                ];
                let spent = spent.map(|ns| format!("{ns:.2}")).join(" ");
                writeln!(text, "  {}: {per_s:.1}, {spent}, {queue_busy:.5} {device_busy:.5}", policy.name)
                    .unwrap();
            }
        }
    }
    is_golden(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/scale.txt"), &text);
    assert_eq!(Workload::named("nobody", 1), None);
}

/// Invented operations: `raw` shares much, `quiet` little; a filled ring shares more.
fn made() -> Operations {
    let text = "op raw-1 1 1 100 0 0\nop raw-1 4 4 400 6 0\nline 1 here.rs:1\nop raw-1 16 8 900 6 1\nline 1 here.rs:1\n\
                op quiet-1 1 1 100 0 0\nop quiet-1 4 4 150 1 0\nop quiet-1 16 8 160 1 1\n\
                op adaptive-1 1 1 10 0 0\nop pool-1 1 1 10 0 0\nop batch-1 1 1 100 0 0\nop batch-1 16 16 900 6 0\nline 1 batch.rs:1\n\
                op vtd-shared-raw-1@vtd 1 1 1000 0 0\nop vtd-shared-raw-1@vtd 16 16 9000 12 0\nline 1 ring.rs:1\n";
    Operations::parse(text).unwrap()
}

/// One transfer in six was to another socket: with 60 and 120 ns the mean is 70 ns.
#[test]
fn what_cpus_share_takes_as_long_as_the_machine_s_transfers() {
    for (near_ns, far_ns, mean) in
        [(60.0, 120.0, 70.0), (120.0, 120.0, 120.0), (60.0, 600.0, 150.0), (6.0, 0.0, 5.0)]
    {
        let machine = Machine { near_ns, far_ns, ..machine(16, 2) };
        let ns = made().curve("raw", &machine).unwrap().ns[16];
        assert!((ns - (100.0 + 800.0 * mean / 70.0)).abs() < 1e-6, "{near_ns} {far_ns}: {ns}");
    }
}

#[test]
fn what_is_inferred_of_a_machine_is_said_where_it_matters() {
    let inferred = |name: &str, machine: &Machine| made().curve(name, machine).unwrap().inferred.join("; ");
    assert_eq!(inferred("raw", &machine(4, 1)), "");
    assert_eq!(
        inferred("raw", &machine(16, 2)),
        "raw: measured on another number of sockets for some numbers of CPUs"
    );
    let other = |name, cpus| inferred(name, &Machine { near_ns: 120.0, ..machine(cpus, 1) });
    assert!(
        other("raw", 4).starts_with("raw: measured with transfers of 60 and 120 ns, taken to"),
        "{}",
        other("raw", 4)
    );
    assert_eq!(other("quiet", 4), "", "most of it is its own");
    assert_eq!(inferred("quiet", &machine(17, 2)), "quiet: more than 16 CPUs at once");
    let at_4 = |near_ns| made().curve("raw", &Machine { near_ns, ..machine(4, 1) }).unwrap().ns[4];
    assert!((at_4(120.0) - 700.0).abs() < 1e-9 && (at_4(60.0) - 400.0).abs() < 1e-9, "{}", at_4(120.0));
}

/// Submitting each unmap shares mostly the ring, and submitting 32 together mostly the operation's own lines.
#[test]
fn what_cpus_share_is_where_most_transfers_come_from() {
    for (policy, line, machine) in
        [("strict", "ring.rs:1", machine(16, 1)), ("strict-batch", "batch.rs:1", machine(16, 1))]
    {
        let outcome = run(&machine, &bare(0.0), Policy::named(policy).unwrap(), &made()).unwrap();
        assert_eq!(outcome.lines[0].source, line, "{policy}");
        // What is inferred for the ring is inferred for its users.
        let far = Machine { near_ns: 200.0, ..machine };
        let outcome = run(&far, &bare(0.0), Policy::named(policy).unwrap(), &made()).unwrap();
        assert!(
            outcome.inferred.iter().any(|inferred| inferred.starts_with("vtd-shared-raw@vtd: ")),
            "{policy}"
        );
    }
}

#[test]
fn adaptive_copies_all_of_what_has_no_page_of_its_own_and_no_more_than_it_may() {
    let copies = Copies { hot_ns: 1_000.0, cold_ns: 1_000.0, remote_ns: 1_000.0, socket_gb_per_s: 68.0 };
    let copied = |pages: u64, shared: bool, submission_ns: f64| {
        let machine = Machine { copies, submission_ns, ..machine(1, 1) };
        let mappings = vec![Mapping { pages, pieces: 1, bytes: pages * 4096, shared, received: false }];
        let workload = Workload { requests: vec![Request { work_ns: 0.0, mappings }], ..bare(0.0) };
        let outcome = run(&machine, &workload, Policy::named("adaptive").unwrap(), &made()).unwrap();
        (outcome.spent.copy_ns / 1_000.0).round() as u64
    };
    // KiB. If copies are expensive, whole pages between the ends are mapped, if there are any.
    assert_eq!([1, 2, 3, 9].map(|pages| copied(pages, true, 1.0)), [4, 8, 4, 4]);
    assert_eq!([1, 9].map(|pages| copied(pages, false, 1.0)), [0, 0]);
    // If waits are expensive, everything that may be copied is.
    assert_eq!([1, 32, 33].map(|pages| copied(pages, false, 1e9)), [4, 128, 0]);
}

/// A socket's memory bandwidth is limited, and a copying CPU takes a part of it.
#[test]
fn copies_take_a_share_of_what_memory_can_copy() {
    let operations = Operations::measured().unwrap();
    let of = |policy: &str, cpus, sockets| {
        let workload = Workload::named("nic", cpus).unwrap();
        run(&machine(cpus, sockets), &workload, Policy::named(policy).unwrap(), &operations).unwrap()
    };
    for (cpus, sockets) in [(2, 1), (64, 1), (64, 2)] {
        let outcome = of("bounce", cpus, sockets);
        let share = outcome.per_s * 4096.0 / 1e9 / (68.0 * f64::from(sockets));
        assert!((outcome.copy_busy - share).abs() < 1e-9, "{outcome:?}");
        assert_eq!(outcome.copy_busy > 0.98, (cpus, sockets) == (64, 1), "{outcome:?}");
    }
    assert_eq!(of("strict", 2, 1).copy_busy, 0.0);
}

/// Of the module a bounced buffer is copied twice if a device writes it, and once if a device reads it.
#[test]
fn what_is_received_is_copied_twice_where_slots_are_filled_first() {
    let copies = Copies { hot_ns: 1_000.0, cold_ns: 1_000.0, remote_ns: 1_000.0, socket_gb_per_s: 68.0 };
    let copied = |policy: &str, received: bool, of_module: bool| {
        let machine = Machine { copies, of_module, ..machine(1, 1) };
        let mappings = vec![Mapping { pages: 1, pieces: 1, bytes: 4096, shared: true, received }];
        let workload = Workload { requests: vec![Request { work_ns: 0.0, mappings }], ..bare(0.0) };
        let outcome =
            run(&machine, &workload, Policy::named(policy).unwrap(), &Operations::measured().unwrap())
                .unwrap();
        (outcome.spent.copy_ns / 1_000.0).round() as u64
    };
    // A swiotlb always does so.
    for (policy, received) in [("bounce", [4, 8]), ("swiotlb", [8, 8])] {
        let of = |received| [false, true].map(|of_module| copied(policy, received, of_module));
        assert_eq!((of(true), of(false)), (received, [4, 4]), "{policy}");
    }
    // The library's queues do not, and the designs of the past are unchanged.
    assert_eq!(["adaptive", "swiotlb-2021"].map(|policy| copied(policy, true, true)), [4, 4]);
}

/// All requests of a workload are simulated, however many there are and wherever the large ones stand.
#[test]
fn each_request_of_a_workload_counts_the_same() {
    let request = |pages: u64| Request {
        work_ns: 4_000.0,
        mappings: vec![Mapping { pages, pieces: 1, bytes: pages * 4096, shared: false, received: false }],
    };
    let small_first = |large: usize| {
        let mut requests = vec![request(1); 3_000 - large];
        requests.extend(vec![request(17); large]);
        Workload { requests, ..bare(0.0) }
    };
    for cpus in [1, 3] {
        let copied = |large| {
            let outcome = run(
                &machine(cpus, 1),
                &small_first(large),
                Policy::named("bounce").unwrap(),
                &Operations::measured().unwrap(),
            );
            outcome.unwrap().spent.copy_ns
        };
        // A quarter has 17 pages each, so the mean is of five. (CPUs that have these are slower, and make fewer of them.)
        let times = copied(750) / copied(0);
        assert!((times - 5.0).abs() < 0.25, "{cpus}: {times}");
    }
}

/// Of the module's bounce only what is too large to be copied waits with a lock held.
#[test]
fn the_module_maps_what_it_does_not_copy_as_linux_does() {
    let of = |sizes: &[u64], policy: &str, of_module: bool| {
        let mapping = |pages: &u64| Mapping {
            pages: *pages,
            pieces: 1,
            bytes: pages * 4096,
            shared: false,
            received: false,
        };
        let request = Request { work_ns: 4_000.0, mappings: sizes.iter().map(mapping).collect() };
        let mut workload = Workload { requests: vec![request], ..bare(0.0) };
        workload.device.count = 32;
        let machine = Machine { of_module, ..machine(32, 1) };
        run(&machine, &workload, Policy::named(policy).unwrap(), &Operations::measured().unwrap()).unwrap()
    };
    let [large, small] = [33, 1];
    let strict = of(&[large], "vtd-2024", true);
    let bounce = of(&[large], "bounce", true);
    assert!((bounce.per_s / strict.per_s - 1.0).abs() < 0.02, "{bounce:?} {strict:?}");
    assert!((bounce.queue_busy / strict.queue_busy - 1.0).abs() < 0.02 && bounce.spent.copy_ns == 0.0);
    // One of three waits as one alone does, and the others are copied.
    let mixed = of(&[small, large, small], "bounce", true);
    assert!((mixed.per_s / strict.per_s - 1.0).abs() < 0.05, "{mixed:?} {strict:?}");
    let copied = of(&[small, small], "bounce", true);
    let copied_of_each = |outcome: &Outcome| outcome.copy_busy / outcome.per_s;
    assert!((copied_of_each(&mixed) / copied_of_each(&copied) - 1.0).abs() < 1e-9, "{mixed:?} {copied:?}");
    assert!(copied.spent.shared_ns < 0.1 && copied.queue_busy == 0.0, "{copied:?}");
    assert!(mixed.spent.own_ns > bounce.spent.own_ns && copied.per_s > 2.0 * mixed.per_s);
    // The library's waits in the queue, with others.
    let ours = of(&[large], "bounce", false);
    assert!(ours.spent.shared_ns < 0.1 && ours.spent.wait_ns > 700.0, "{ours:?}");
}

/// A lock holder's wait keeps the hardware busy, like a wait in the queue.
#[test]
fn the_hardware_is_busy_while_the_holder_of_a_lock_waits() {
    let workload = Workload::named("swiotlb", 4).unwrap();
    for policy in ["vtd-2024", "smmu-2026"] {
        let machine = machine(4, 1);
        let outcome =
            run(&machine, &workload, Policy::named(policy).unwrap(), &Operations::measured().unwrap())
                .unwrap();
        // A mapping for each request, and a wait for each unmap.
        let busy = outcome.per_s * machine.submission_ns / 1e9;
        assert!(
            busy > 0.05 && (outcome.queue_busy / busy - 1.0).abs() < 0.1,
            "{policy}: {} {busy}",
            outcome.queue_busy
        );
    }
}

/// Devices behind different IOMMUs do not wait for each other, and an IOMMU without a device does not count.
#[test]
fn each_iommu_is_for_some_of_the_devices() {
    let of = |policy: &str, iommus: u32, count: u32| {
        let mut workload = Workload::named("swiotlb", 32).unwrap();
        workload.device.count = count;
        workload.requests[0].work_ns = 1_000.0;
        let machine = Machine { iommus, ..machine(32, 1) };
        run(&machine, &workload, Policy::named(policy).unwrap(), &Operations::measured().unwrap())
            .unwrap()
            .per_s
    };
    // One wait at a time, of 710 ns, and the lock holder's other work.
    let one = of("vtd-2024", 1, 32);
    assert!((0.4e6..1.41e6).contains(&one), "{one}");
    for (iommus, devices) in [(2, 32), (2, 2), (9, 2)] {
        let two = of("vtd-2024", iommus, devices);
        assert!((1.9..2.6).contains(&(two / one)), "{iommus} {devices}: {one} {two}");
    }
    assert_eq!(of("vtd-2024", 9, 1), of("vtd-2024", 1, 1));
    // A machine has one swiotlb, whatever IOMMUs it has.
    assert_eq!(of("swiotlb-lifo", 2, 32), of("swiotlb-lifo", 1, 32));
    // Individual invalidations of each unmap, one after the other; but not if waiting CPUs are served together.
    let own = of("smmu-2026", 1, 32);
    assert!((1.3e6..1.41e6).contains(&own), "{own}");
    assert!((1.9..2.01).contains(&(of("smmu-2026", 2, 32) / own)));
    assert!(of("strict", 1, 32) > 1.2 * own);
}
