//! The benchmark of the IOVA allocators as a library: every workload on every subject, on a tiny scale.
//!
//! No figure is looked at but for its being one: timing never decides whether a test passes.

use std::path::PathBuf;

use crate::common::{cores, request, subjects, with_all_cores};
use crate::linux::{library, named};
use portcullis_bench::iova::{self, BenchError, Request, SUBJECTS, WORKLOADS};
use portcullis_bench::report::Report;
use portcullis_bench::runner::{Options, Progress};
use portcullis_bench::table::{self, Layout};

fn run_with(request: &Request, progress: impl FnMut(Progress)) -> Result<Report, BenchError> {
    with_all_cores(|| iova::run(request, progress))
}

fn run(request: &Request) -> Result<Report, BenchError> {
    run_with(request, |_| ())
}

fn layout<'a>(about: &'a [(&'a str, &'a str)]) -> Layout<'a> {
    Layout { ours: "portcullis", rival: "linux", limit: None, tails: &["full-32bit"], about }
}

/// Every workload with every number of threads that it is defined for and this machine has cores for is in
/// the results of every subject named; whatever is not, is skipped for want of cores.
fn assert_complete(report: &Report, subjects: &[&str]) {
    for workload in &WORKLOADS {
        for &threads in workload.threads {
            for subject in subjects {
                let skipped = report.skipped.iter().find(|skipped| {
                    (skipped.workload, skipped.threads, skipped.subject) == (workload.name, threads, *subject)
                });
                match report.find(workload.name, threads, subject) {
                    Some(result) => {
                        assert!(result.ns_per_op > 0.0, "{result:?}");
                        assert!(
                            result.min <= result.ns_per_op && result.ns_per_op <= result.max,
                            "{result:?}"
                        );
                        assert_eq!(result.p99_99, None, "so few samples say nothing of one in 10,000");
                        assert_eq!(skipped, None);
                    }
                    None => {
                        let reason = skipped.map(|skipped| skipped.reason.as_str());
                        assert!(threads > cores(), "{} {threads} {subject}: {reason:?}", workload.name);
                        assert!(reason.is_some_and(|reason| reason.contains("cores")), "{reason:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_workload_runs_on_every_subject() {
    let mut workloads = Vec::new();
    let report =
        run_with(&request(), |progress| workloads.push((progress.workload, progress.total))).unwrap();
    let subjects: Vec<_> =
        SUBJECTS.iter().map(|subject| subject.name).filter(|name| *name != "linux").collect();
    if cfg!(feature = "rivals") {
        assert_complete(&report, &subjects);
    } else {
        assert_complete(&report, &["portcullis", "portcullis-backing", "portcullis-tree"]);
        let missing = report.skipped.iter().find(|skipped| skipped.subject == "vmem").unwrap();
        assert!(missing.reason.contains("without the feature `rivals`"), "{missing:?}");
    }
    assert!(report.results.iter().all(|result| result.subject != "linux"), "it was not named");
    assert!(report.skipped.iter().all(|skipped| skipped.subject != "linux"), "nor asked for");
    assert_eq!(workloads.len(), workloads[0].1, "each step is told of");
    assert_eq!(workloads[0].0, "pair-1");

    let about = SUBJECTS.map(|subject| (subject.name, subject.about));
    let text = table::render(&report, &layout(&about));
    for name in WORKLOADS.iter().map(|workload| workload.name) {
        assert!(text.contains(name), "{name} is in {text}");
    }
    assert!(text.contains("an atomic read-modify-write"), "{text}");
}

/// As above, for Linux's allocator.
#[test]
#[ignore = "needs Linux's allocator: PORTCULLIS_RIVAL=path to the shared library"]
fn every_workload_runs_on_linux() {
    every_workload_runs_on(named("PORTCULLIS_RIVAL"));
}

#[test]
fn every_workload_runs_on_what_stands_in_for_linux() {
    every_workload_runs_on(library());
}

fn every_workload_runs_on(rival: PathBuf) {
    let rival = Some(rival);
    let request = Request { rival, subjects: subjects(&["portcullis", "linux"]), ..request() };
    let report = run(&request).unwrap();
    assert_complete(&report, &["portcullis", "linux"]);
    let about = SUBJECTS.map(|subject| (subject.name, subject.about));
    assert!(table::render(&report, &layout(&about)).contains("/ linux"));
    // It need not be named where its library is.
    let one = Request { workloads: vec!["pair-1".into()], threads: vec![1], subjects: Vec::new(), ..request };
    assert!(run(&one).unwrap().find("pair-1", 1, "linux").is_some());
}

#[test]
fn what_is_asked_for_is_what_is_measured() {
    let request = Request {
        workloads: vec!["random-1k".into(), "pair-1".into()],
        subjects: vec!["portcullis-backing".into()],
        threads: vec![1],
        ..request()
    };
    let report = run(&request).unwrap();
    let results: Vec<_> = report.results.iter().map(|r| (r.workload, r.threads, r.subject)).collect();
    assert_eq!(results, [("pair-1", 1, "portcullis-backing"), ("random-1k", 1, "portcullis-backing")]);
    assert_eq!(report.skipped, []);
}

#[test]
fn a_number_of_threads_that_a_workload_has_not_is_skipped_with_a_reason() {
    let request = Request {
        workloads: vec!["cross-cpu".into()],
        subjects: vec!["portcullis".into()],
        threads: vec![1],
        ..request()
    };
    let report = run(&request).unwrap();
    assert_eq!(report.results, []);
    assert_eq!(report.skipped.len(), 1);
    assert!(report.skipped[0].reason.contains("2 threads only"), "{:?}", report.skipped);
}

#[test]
fn more_threads_than_cores_are_skipped_with_a_reason() {
    let request = Request {
        workloads: vec!["pair-1".into()],
        subjects: vec!["portcullis".into()],
        threads: vec![2],
        ..request()
    };
    let report = run(&request).unwrap();
    match cores() {
        1 => assert!(report.skipped[0].reason.contains("needs 2 cores"), "{:?}", report.skipped),
        _ => assert_eq!(report.skipped, []),
    }
}

#[test]
fn single_operations_are_timed_where_there_are_enough() {
    let request = Request {
        workloads: vec!["pair-1".into(), "full-32bit".into(), "first-4096".into()],
        subjects: vec!["portcullis".into()],
        threads: vec![1],
        options: Options { samples: 10_000, ..Options::tiny() },
        ..request()
    };
    let report = run(&request).unwrap();
    let tail = |workload| report.find(workload, 1, "portcullis").unwrap().p99_99;
    assert!(tail("pair-1").is_some_and(|ns| ns >= 0.0));
    assert!(tail("full-32bit").is_some_and(|ns| ns > 0.0));
    assert_eq!(tail("first-4096"), None, "allocations alone are no operations");
}

#[test]
fn wrong_names_are_told_with_the_right_ones() {
    let error = run(&Request { workloads: vec!["pair-3".into()], ..request() }).unwrap_err();
    assert!(matches!(&error, BenchError::NoSuch { kind: "workload", name, .. } if name == "pair-3"));
    assert!(error.to_string().contains("pair-1, pair-2") && error.to_string().contains("full-32bit"));
    let error = run(&Request { subjects: vec!["windows".into()], ..request() }).unwrap_err();
    assert!(matches!(&error, BenchError::NoSuch { kind: "subject", name, .. } if name == "windows"));
    assert!(error.to_string().contains("portcullis-backing, portcullis-tree, linux, offset-allocator"));
}

#[test]
fn a_rival_that_is_not_there_is_an_error() {
    let open = |path: &str| run(&Request { rival: Some(path.into()), ..request() }).unwrap_err();
    let missing = open("no/such/library.so").to_string();
    assert!(missing.contains("no/such/library.so"), "{missing}");
    let text = open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).to_string();
    assert!(text.contains("no shared library") && text.contains("Cargo.toml"), "{text}");
    let request = Request { subjects: vec!["linux".into()], ..request() };
    assert!(matches!(run(&request), Err(BenchError::NoRival)));
}

#[test]
fn the_json_has_the_shape_that_is_documented() {
    let request = Request {
        workloads: vec!["pair-1".into(), "cross-cpu".into()],
        subjects: vec!["portcullis".into()],
        threads: vec![1],
        ..request()
    };
    let json = serde_json::to_value(run(&request).unwrap()).unwrap();
    let keys = |value: &serde_json::Value| {
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys.join(" ")
    };
    assert_eq!(keys(&json), "bench limits results skipped timer");
    assert_eq!(json["bench"], "iova");
    assert_eq!(keys(&json["limits"]), "atomic_ns load_store_ns lock_ns");
    assert_eq!(keys(&json["timer"]), "overhead_ns resolution_ns");
    assert_eq!(keys(&json["results"][0]), "max min ns_per_op p99_99 subject threads workload");
    assert_eq!(keys(&json["skipped"][0]), "reason subject threads workload");
    assert!(json["results"][0]["p99_99"].is_null());
}
