//! The benchmark of the page tables as a library: every workload on every subject and format, on a tiny scale.
//!
//! No figure is looked at but for its being one: timing never decides whether a test passes.

use std::path::PathBuf;

use crate::common::{cores, request, subjects, with_all_cores};
use crate::linux::{library, named};
use portcullis_bench::pgtable::work::{THREADS, WORKLOADS};
use portcullis_bench::pgtable::{self, BenchError, Choice, Request, SUBJECTS, formats};
use portcullis_bench::report::{Report, Skipped};
use portcullis_bench::runner::Options;
use portcullis_bench::table::{self, Layout};

fn run(request: &Request, choice: &Choice) -> Result<Report, BenchError> {
    with_all_cores(|| pgtable::run(request, choice, |_| ()))
}

fn only(format: &str) -> Choice {
    Choice { formats: vec![format.into()], incoherent: false }
}

fn render(report: &Report) -> String {
    let about = SUBJECTS.map(|subject| (subject.name, subject.about));
    let layout =
        Layout { ours: "portcullis", rival: "linux", limit: Some("stores"), tails: &[], about: &about };
    table::render(report, &layout)
}

/// Every workload is in the results of every subject named, in every format and with every number of threads,
/// or skipped for a reason that `excused` accepts.
fn assert_complete(report: &Report, subjects: &[&str], excused: impl Fn(&Skipped) -> bool) {
    for format in formats() {
        for (workload, threads) in WORKLOADS.iter().flat_map(|w| THREADS.map(|threads| (w.name, threads))) {
            for subject in subjects {
                let key = (Some(format), workload, threads, *subject);
                let skipped =
                    report.skipped.iter().find(|s| (s.format, s.workload, s.threads, s.subject) == key);
                match report.find_format(Some(format), workload, threads, subject) {
                    Some(result) => {
                        assert!(
                            result.min <= result.ns_per_op && result.ns_per_op <= result.max,
                            "{result:?}"
                        );
                        assert_eq!(skipped, None);
                    }
                    None => {
                        let skipped = skipped.unwrap_or_else(|| panic!("{key:?} is missing"));
                        let no_cores = threads > cores() && skipped.reason.contains("cores");
                        assert!(no_cores || excused(skipped), "{skipped:?}");
                    }
                }
            }
        }
    }
}

/// 16 and 64 KiB granules have no page two levels up within 48 bits.
fn has_no_such_page(skipped: &Skipped) -> bool {
    let granule = skipped.format.is_some_and(|format| format.ends_with("-16k") || format.ends_with("-64k"));
    granule && skipped.workload.ends_with("-1g") && skipped.reason.contains("no such page")
}

#[test]
fn every_workload_runs_on_every_subject_in_every_format() {
    let report = run(&request(), &Choice { incoherent: true, ..Choice::default() }).unwrap();
    assert_complete(&report, &["portcullis", "stores", "locked"], has_no_such_page);
    assert_complete(&report, &["portcullis-nc", "stores-nc"], |skipped| {
        has_no_such_page(skipped) || skipped.reason.contains("CLFLUSHOPT")
    });
    assert!(report.results.iter().all(|result| !result.subject.starts_with("linux")), "there is no library");
    let text = render(&report);
    for name in WORKLOADS.iter().map(|workload| workload.name).chain(formats()) {
        assert!(text.contains(name), "{name} is in {text}");
    }
    assert!(text.contains("fits into ours"), "{text}");
}

/// Whether this machine can write back single lines.
fn writes_back(report: &Report) -> bool {
    report.skipped.iter().all(|skipped| !skipped.reason.contains("CLFLUSHOPT"))
}

/// As above, for Linux's tables.
#[test]
#[ignore = "needs Linux's page tables: PORTCULLIS_RIVAL_PT=path to the shared library"]
fn every_workload_runs_on_linux() {
    every_workload_runs_on(named("PORTCULLIS_RIVAL_PT"));
}

#[test]
fn every_workload_runs_on_what_stands_in_for_linux() {
    every_workload_runs_on(library());
}

fn every_workload_runs_on(rival: PathBuf) {
    let rival = Some(rival);
    let all = ["portcullis", "linux", "linux-6.12", "linux-nc"];
    let request = Request { rival, subjects: subjects(&all), ..request() };
    let report = run(&request, &Choice::default()).unwrap();
    let alike = ["vtd-ss", "x86-4", "amd-v1", "arm-s1-4k", "arm-s2-4k", "riscv-sv48"];
    assert_complete(&report, &all, |skipped| {
        let unknown = skipped.format.is_none_or(|format| !alike.contains(&format));
        has_no_such_page(skipped)
            || (unknown && skipped.reason.contains("no such format"))
            || (skipped.subject == "linux-6.12" && skipped.reason.contains("6.12"))
            || (skipped.subject == "linux-nc" && skipped.reason.contains("coherent walkers only"))
            || skipped.reason.contains("CLFLUSHOPT")
    });
    for format in alike {
        assert!(report.find_format(Some(format), "map-4k", 1, "linux").is_some(), "{format}");
    }
    assert!(report.find_format(Some("arm-s1-4k"), "map-4k", 1, "linux-6.12").is_some());
    assert_eq!(report.find_format(Some("vtd-ss"), "map-4k", 1, "linux-nc").is_some(), writes_back(&report));
    assert!(render(&report).contains("/ linux"));
    // The newest kernel's need not be named where the library is.
    let one = Request { workloads: vec!["map-4k".into()], threads: vec![1], subjects: Vec::new(), ..request };
    let of = |choice: &Choice| -> Vec<&str> {
        run(&one, choice).unwrap().results.iter().map(|result| result.subject).collect()
    };
    assert_eq!(of(&only("vtd-ss")), ["portcullis", "stores", "locked", "linux"]);
}

#[test]
fn what_is_asked_for_is_what_is_measured() {
    let request = Request {
        workloads: vec!["unmap-2m".into(), "map-4k".into()],
        subjects: vec!["stores".into()],
        threads: vec![1],
        ..request()
    };
    let report = run(&request, &only("vtd-ss")).unwrap();
    let results: Vec<_> =
        report.results.iter().map(|r| (r.format, r.workload, r.threads, r.subject)).collect();
    let vtd = Some("vtd-ss");
    assert_eq!(results, [(vtd, "map-4k", 1, "stores"), (vtd, "unmap-2m", 1, "stores")]);
    assert_eq!(report.skipped, []);
    assert_eq!(report.bench, "pgtable");
}

#[test]
fn more_threads_than_there_are_parts_are_skipped_with_a_reason() {
    let request = Request {
        workloads: vec!["map-4k".into()],
        subjects: vec!["portcullis".into()],
        threads: vec![3],
        ..request()
    };
    let report = run(&request, &only("vtd-ss")).unwrap();
    assert_eq!(report.results, []);
    assert!(report.skipped[0].reason.contains("1 or 2 threads"), "{:?}", report.skipped);
}

#[test]
fn single_operations_are_timed_where_there_are_enough() {
    let request = Request {
        workloads: vec!["unmap-256x4k".into(), "iova-to-phys".into()],
        subjects: vec!["portcullis".into()],
        threads: vec![1],
        options: Options { samples: 10_000, ..Options::tiny() },
        ..request()
    };
    let report = run(&request, &only("x86-4")).unwrap();
    assert_eq!(report.results.len(), 2);
    assert!(report.results.iter().all(|result| result.p99_99.is_some_and(|ns| ns >= 0.0)));
}

#[test]
fn wrong_names_are_told_with_the_right_ones() {
    let error = run(&request(), &only("ppc64")).unwrap_err();
    assert!(matches!(&error, BenchError::NoSuch { kind: "format", name, .. } if name == "ppc64"));
    assert!(error.to_string().contains("vtd-ss") && error.to_string().contains("riscv-sv48x4"), "{error}");
    let error = run(&Request { workloads: vec!["map-8k".into()], ..request() }, &Choice::default());
    assert!(error.unwrap_err().to_string().contains("no workload \"map-8k\"; there are map-4k, unmap-4k"));
    let error = run(&Request { subjects: vec!["windows".into()], ..request() }, &Choice::default());
    assert!(error.unwrap_err().to_string().contains("portcullis, stores, locked, linux"));
}

#[test]
fn a_rival_that_is_not_there_is_an_error() {
    let open = |path: &str| {
        run(&Request { rival: Some(path.into()), ..request() }, &Choice::default()).unwrap_err().to_string()
    };
    assert!(open("no/such/library.so").contains("no/such/library.so"));
    let text = open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    assert!(text.contains("no shared library"), "{text}");
    for subject in ["linux", "linux-6.12", "linux-nc"] {
        let request = Request { subjects: vec![subject.into()], ..request() };
        assert!(matches!(run(&request, &Choice::default()), Err(BenchError::NoRival)));
    }
}

#[test]
fn the_json_has_the_shape_that_is_documented() {
    let request = Request {
        workloads: vec!["map-1g".into()],
        subjects: vec!["portcullis".into()],
        threads: vec![1],
        ..request()
    };
    let choice = Choice { formats: vec!["vtd-ss".into(), "arm-s1-64k".into()], incoherent: false };
    let json = serde_json::to_value(run(&request, &choice).unwrap()).unwrap();
    let keys = |value: &serde_json::Value| {
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys.join(" ")
    };
    assert_eq!(keys(&json), "bench limits results skipped timer");
    assert_eq!(keys(&json["results"][0]), "format max min ns_per_op p99_99 subject threads workload");
    assert_eq!(keys(&json["skipped"][0]), "format reason subject threads workload");
    assert_eq!(json["results"][0]["format"], "vtd-ss");
    assert_eq!(json["skipped"][0]["format"], "arm-s1-64k");
}
