//! Reports of made measurements, of which no two figures are the same, against files in `tests/golden`: a figure in another's place, or
//! in relation to another's, is a difference. With `PORTCULLIS_WRITE_TABLES=1` the test writes the files.

#[path = "../../../portcullis/tests/golden/mod.rs"]
pub mod golden;

use std::path::PathBuf;

use portcullis_bench::limits::Limits;
use portcullis_bench::machine::Machine;
use portcullis_bench::report::{Halves, Measurement, Report, Skipped, Split};
use portcullis_bench::table::{self, Layout};
use portcullis_bench::timer::TimerFigures;
use portcullis_bench::{bounce, invalidation};

fn is_golden(name: &str, text: &str) {
    golden::is_golden(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name), text);
}

fn report(results: Vec<Measurement>, skipped: Vec<Skipped>) -> Report {
    Report {
        bench: "made",
        machine: Machine { cpus: 3, model: "A processor".into(), os: "linux 6.1".into(), arch: "x86_64" },
        profiles: Vec::new(),
        limits: Limits { load_store_ns: 1.25, atomic_ns: 6.5, lock_ns: 17.75 },
        timer: TimerFigures { overhead_ns: 9.3, resolution_ns: 0.4 },
        results,
        skipped,
    }
}

/// Its least repetition is a tenth below, its greatest two fifths above.
fn measured(workload: &'static str, threads: usize, subject: &'static str, ns_per_op: f64) -> Measurement {
    Measurement {
        format: None,
        direction: None,
        workload,
        threads,
        subject,
        ns_per_op,
        min: ns_per_op * 0.9,
        max: ns_per_op * 1.4,
        p99_99: (threads < 4).then_some(ns_per_op * 33.0),
        profile: None,
        split: None,
        halves: None,
    }
}

fn skipped(
    workload: &'static str,
    threads: usize,
    subject: &'static str,
    format: Option<&'static str>,
) -> Skipped {
    let reason = if threads > 1 { "one thread alone" } else { "it has none" };
    Skipped { format, direction: None, workload, threads, subject, profile: None, reason: reason.into() }
}

#[test]
fn a_table_of_subjects_has_each_figure_in_its_place() {
    let results = || {
        let mut results = Vec::new();
        for (at, workload) in ["one", "tail", "last"].into_iter().enumerate() {
            for threads in [1, 2, 4] {
                for (place, subject) in ["ours", "theirs", "best"].into_iter().enumerate() {
                    let ns = [2.0, 11.5, 456.0][at] * threads as f64 * [1.5, 4.0, 1.0][place];
                    results.push(measured(workload, threads, subject, ns));
                }
            }
        }
        results
    };
    let about = [
        ("ours", "what it is about"),
        ("best", "the limit"),
        ("theirs", "the rival"),
        ("nobody", "not asked for"),
        ("failed_one", "fails"),
    ];
    let layout = |limit| Layout { ours: "ours", rival: "theirs", limit, tails: &["tail"], about: &about };
    let failed = vec![
        skipped("one", 1, "failed_one", None),
        skipped("tail", 2, "failed_one", None),
        skipped("last", 2, "failed_one", None),
    ];
    let mut text = table::render(&report(results(), failed), &layout(None));
    text += &table::render(&report(results(), Vec::new()), &layout(Some("best")));
    // Formats, directions and profiles are told apart where there are several; and what none has is told below only.
    let mut several = Vec::new();
    for (at, mut result) in results().into_iter().take(12).enumerate() {
        result.format = Some(["vtd-ss", "amd-v1"][at / 6]);
        result.direction = (at % 2 == 0).then_some("to-device");
        result.profile = Some(["vtd", "smmuv3"][at / 3 % 2].into());
        several.push(result);
    }
    let all = several
        .iter()
        .map(|result| (result.workload, result.threads))
        .collect::<std::collections::BTreeSet<_>>();
    let failed = all.into_iter().flat_map(|(workload, threads)| {
        ["x86-4", "x86-5"].map(|format| Skipped {
            reason: "no such table".into(),
            ..skipped(workload, threads, "failed_one", Some(format))
        })
    });
    text += &table::render(&report(several, failed.collect()), &layout(Some("best")));
    is_golden("subjects.txt", &text);
}

#[test]
fn what_invalidations_come_to_is_of_the_right_figures() {
    let mut results = Vec::new();
    let mut number = 1.0;
    for workload in ["lazy-unmap", "strict-unmap", "strict-batch"] {
        for threads in [1, 2, 8] {
            for (place, subject) in ["portcullis", "global-lock", "pgtable-only", "at-once", "vtd", "riscv"]
                .into_iter()
                .enumerate()
            {
                number += 1.0;
                let ns = 100.0 * threads as f64 + 37.0 * place as f64 + number;
                let split = Split {
                    wait_ns: ns * 0.41,
                    lock_ns: ns * 0.23,
                    work_ns: ns * 0.36,
                    submissions_per_op: 1.0 / number,
                    requests_per_op: 3.0 / number,
                    hardware_wait_ns_per_op: if place == 3 { 0.0 } else { 710.0 / (number + 1.0) },
                    no_flush: (workload == "lazy-unmap").then_some(ns * 0.77),
                };
                let profile = Some("vtd".to_owned());
                results.push(Measurement {
                    profile,
                    split: Some(split),
                    ..measured(workload, threads, subject, ns)
                });
            }
        }
    }
    let failed = vec![skipped("lazy-unmap", 1, "single-queue", None)];
    is_golden("invalidation.txt", &invalidation::render(&report(results, failed)));
}

#[test]
fn what_bouncing_comes_to_is_of_the_right_figures() {
    let mut results = Vec::new();
    for (at, (workload, direction)) in
        [("4k", "to-device"), ("4k", "from-device"), ("64k", "to-device")].into_iter().enumerate()
    {
        for threads in [1, 3] {
            for (place, subject) in
                ["portcullis", "copy", "linux", "rotating", "strict"].into_iter().enumerate()
            {
                let ns = (200.0 + 1000.0 * at as f64) * threads as f64 * (1.0 + place as f64 / 7.0)
                    + 5.0 * place as f64;
                let halves = Halves {
                    depth: 16,
                    map_ns: ns * (0.5 + place as f64 / 50.0),
                    unmap_ns: ns * (0.4 - place as f64 / 90.0),
                };
                results.push(Measurement {
                    direction: Some(direction),
                    profile: (subject == "strict").then(|| "smmuv3".into()),
                    halves: (at > 0).then_some(halves),
                    ..measured(workload, threads, subject, ns)
                });
            }
        }
    }
    is_golden("bounce.txt", &bounce::render(&report(results, Vec::new())));
}

#[test]
fn the_nearest_limit_is_the_largest_that_is_not_above() {
    let limits = report(Vec::new(), Vec::new()).limits;
    for (ns, name, times) in [
        (0.625, "load+store", 0.5),
        (1.25, "load+store", 1.0),
        (6.25, "load+store", 5.0),
        (6.5, "atomic", 1.0),
        (13.0, "atomic", 2.0),
        (17.75, "lock", 1.0),
        (1775.0, "lock", 100.0),
    ] {
        assert_eq!(limits.nearest(ns), (name, times));
    }
    let other = Limits { load_store_ns: 9.0, atomic_ns: 3.0, lock_ns: 5.0 };
    assert_eq!(other.named(), [("atomic", 3.0), ("lock", 5.0), ("load+store", 9.0)]);
}

#[test]
fn what_was_not_measured_is_told_once_for_each_subject_and_reason() {
    let layout = Layout {
        ours: "ours",
        rival: "theirs",
        limit: None,
        tails: &[],
        about: &[("ours", "o"), ("theirs", "t")],
    };
    let all = |formats: [Option<&'static str>; 2]| {
        let results = vec![measured("a", 1, "ours", 99.9), measured("b", 1, "ours", 100.0)];
        let of = |subject| {
            let each = formats.iter().flat_map(move |format| ["a", "b"].map(|workload| (workload, *format)));
            each.map(move |(workload, format)| skipped(workload, 1, subject, format))
        };
        table::render(&report(results, of("theirs").chain(of("others")).collect()), &layout)
    };
    let text = all([None, None]);
    let lines = "\nNot measured\n  theirs, a (1), b (1): it has none\n  others, a (1), b (1): it has none\n";
    assert!(text.contains(lines), "{text}");
    let text = all([Some("x86-4"), Some("vtd-ss")]);
    let lines = "\n  theirs, x86-4, vtd-ss, every workload: it has none\n  others, x86-4, vtd-ss, every workload: it has none\n";
    assert!(text.contains(lines), "{text}");
    // Figures of three digits have no fraction; and where no slowest operations are shown, nothing is said of a second line.
    assert!(text.contains("99.9 ±25%") && text.contains(" 100 ±25%"), "{text}");
    assert!(!text.contains("A second line"), "{text}");
    let fewer = report(vec![measured("a", 1, "ours", 1.0)], vec![skipped("b", 1, "theirs", Some("x86-4"))]);
    let text = table::render(&fewer, &layout);
    assert!(text.contains("\n  theirs, x86-4, b (1): it has none\n"), "{text}");
}
