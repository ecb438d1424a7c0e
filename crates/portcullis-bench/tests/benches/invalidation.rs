//! The benchmark of invalidations as a library: every workload on every subject, on a tiny scale.
//!
//! No figure is looked at but for its being one: timing never decides whether a test passes. That each subject
//! keeps its promises is looked at by the benchmark itself, before and after it measures (`src/invalidation/tests.rs`
//! shows that it would find out).

use std::path::PathBuf;

use crate::common::{request, with_all_cores};
use portcullis_bench::invalidation::{self, BenchError, Request, SUBJECTS, THREADS, WORKLOADS, render};
use portcullis_bench::report::Report;
use portcullis_bench::runner::Options;

fn run(request: &Request, profile: &str) -> Result<Report, BenchError> {
    with_all_cores(|| invalidation::run(request, profile, |_| ()))
}

fn subjects_of(workload: &str) -> &'static [&'static str] {
    match workload {
        "lazy-unmap" => &["portcullis", "single-queue", "global-lock", "pgtable-only"],
        "strict-unmap" => {
            &["portcullis", "global-lock", "vtd", "vtd-shared", "amdvi", "riscv", "smmuv3", "at-once"]
        }
        _ => &["portcullis"],
    }
}

#[test]
fn every_workload_runs_on_every_subject_on_every_profile() {
    for profile in ["none", "vtd", "smmuv3", "virtio-iommu"] {
        // Much waiting of many threads says nothing new.
        let threads = if profile == "none" { THREADS.to_vec() } else { vec![1, 3] };
        let report = run(&Request { threads: threads.clone(), ..request() }, profile).unwrap();
        assert_eq!((report.bench, report.skipped.as_slice()), ("invalidation", &[][..]));
        let mut expected = 0;
        let cases = WORKLOADS.iter().flat_map(|w| threads.iter().map(|threads| (w.name, *threads)));
        for (workload, threads) in cases {
            for subject in subjects_of(workload) {
                expected += 1;
                let result = report.find(workload, threads, subject);
                let result = result.unwrap_or_else(|| panic!("{workload} {threads} {subject}"));
                assert!(result.min <= result.ns_per_op && result.ns_per_op <= result.max, "{result:?}");
                assert_eq!(result.profile.as_deref(), Some(profile));
                let split = result.split.unwrap();
                let parts = split.wait_ns + split.lock_ns + split.work_ns;
                // The parts are of the repetition that took the median; each is rounded by itself.
                assert!(parts >= result.ns_per_op - 0.1, "{result:?}");
                assert_eq!(split.no_flush.is_some(), *workload == *"lazy-unmap", "{result:?}");
                let asked = *subject != "pgtable-only" && *workload != *"lazy-unmap";
                assert!(!asked || split.submissions_per_op > 0.0, "{result:?}");
                assert!(split.requests_per_op >= split.submissions_per_op, "{result:?}");
                let waited = split.hardware_wait_ns_per_op > 0.0;
                // The units of drivers are of software, which takes no time by itself.
                let has_profile =
                    profile != "none" && ["portcullis", "global-lock", "single-queue"].contains(subject);
                assert_eq!(waited, has_profile && split.submissions_per_op > 0.0, "{result:?}");
            }
        }
        assert_eq!(report.results.len(), expected);
        let text = render(&report);
        let names = WORKLOADS.iter().map(|workload| workload.name).chain(SUBJECTS.map(|s| s.name));
        for name in names.chain([profile]) {
            assert!(text.contains(name), "{name} is in {text}");
        }
        assert!(text.contains("What it comes to\n  lazy, without a flush"), "{text}");
        assert_eq!(text.contains("times as long as for one"), profile != "none", "{text}");
    }
}

#[test]
fn what_is_asked_for_is_what_is_measured() {
    let request = Request {
        workloads: vec!["strict-unmap".into(), "lazy-unmap".into()],
        subjects: vec!["single-queue".into()],
        threads: vec![3],
        ..request()
    };
    let report = run(&request, "none").unwrap();
    let results: Vec<_> = report.results.iter().map(|r| (r.workload, r.threads, r.subject)).collect();
    assert_eq!(results, [("lazy-unmap", 3, "single-queue")]);
    let skipped: Vec<_> = report.skipped.iter().map(|s| (s.workload, s.threads, s.subject)).collect();
    assert_eq!(skipped, [("strict-unmap", 3, "single-queue")]);
    assert!(report.skipped[0].reason.contains("does not do the workload"));
    assert!(render(&report).contains("Not measured\n  single-queue, strict-unmap (3)"));
}

#[test]
fn more_threads_than_are_possible_are_skipped_with_a_reason() {
    let request = Request { workloads: vec!["strict-unmap".into()], threads: vec![49], ..request() };
    let report = run(&request, "none").unwrap();
    assert_eq!(report.results, []);
    assert!(report.skipped.iter().all(|s| s.reason.contains("48 threads")), "{:?}", report.skipped);
}

#[test]
fn single_operations_are_timed_where_there_are_enough() {
    let request = Request {
        subjects: vec!["portcullis".into()],
        threads: vec![1],
        options: Options { samples: 10_000, ..Options::tiny() },
        ..request()
    };
    let report = run(&request, "none").unwrap();
    assert_eq!(report.results.len(), WORKLOADS.len());
    assert!(report.results.iter().all(|result| result.p99_99.is_some_and(|ns| ns >= 0.0)));
}

#[test]
fn wrong_names_are_told_with_the_right_ones() {
    let error = run(&Request { workloads: vec!["strict".into()], ..request() }, "none").unwrap_err();
    assert!(error.to_string().contains("no workload \"strict\"; there are lazy-unmap, strict-unmap"));
    let error = run(&Request { subjects: vec!["linux".into()], ..request() }, "none").unwrap_err();
    assert!(error.to_string().contains("portcullis, single-queue, global-lock, pgtable-only"), "{error}");
    let error = run(&request(), "vtx").unwrap_err();
    assert!(error.to_string().contains("there are none, vtd, smmuv3, virtio-iommu"), "{error}");
    assert!(matches!(run(&request(), "no/such.toml"), Err(BenchError::Profile(_))));
}

#[test]
fn a_profile_can_be_a_file() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../portcullis-trace/profiles/smmuv3.toml");
    let request = Request {
        workloads: vec!["strict-unmap".into()],
        subjects: vec!["global-lock".into()],
        threads: vec![1],
        ..request()
    };
    let report = run(&request, path.to_str().unwrap()).unwrap();
    let result = &report.results[0];
    assert_eq!(result.profile.as_deref(), Some("smmuv3"));
    assert_eq!(result.split.unwrap().hardware_wait_ns_per_op, 240.0);
}

#[test]
fn the_json_has_the_shape_that_is_documented() {
    let request = Request {
        workloads: vec!["lazy-unmap".into(), "strict-ring-64".into()],
        subjects: vec!["portcullis".into(), "global-lock".into()],
        threads: vec![1],
        ..request()
    };
    let json = serde_json::to_value(run(&request, "vtd").unwrap()).unwrap();
    let keys = |value: &serde_json::Value| {
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys.join(" ")
    };
    assert_eq!(keys(&json), "bench limits results skipped timer");
    let strict = "hardware_wait_ns_per_op lock_ns max min ns_per_op p99_99 profile requests_per_op subject \
                  submissions_per_op threads wait_ns work_ns workload";
    assert_eq!(keys(&json["results"][0]), strict.replace("ns_per_op p99", "no_flush ns_per_op p99"));
    assert_eq!(keys(&json["results"][2]), strict);
    assert_eq!(keys(&json["skipped"][0]), "reason subject threads workload");
}
