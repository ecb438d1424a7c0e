//! The benchmark of bounce buffers as a library: every workload on every subject, on a tiny scale.
//!
//! No figure is looked at but for its being one: timing never decides whether a test passes. That each subject
//! keeps its promises is looked at by the benchmark itself, before and after it measures (`src/bounce/tests.rs` shows
//! that it would find out).

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use portcullis_bench::bounce::{self, BenchError, Choice, Request, SUBJECTS, Shape, WORKLOADS, render};
use portcullis_bench::report::{Measurement, Report};
use portcullis_bench::runner::Options;

use crate::linux::{library, named};

fn request() -> Request {
    Request {
        workloads: Vec::new(),
        subjects: Vec::new(),
        threads: vec![1, 3],
        rival: None,
        options: Options::tiny(),
    }
}

fn on(profiles: &[&str]) -> Choice {
    Choice { profiles: profiles.iter().map(ToString::to_string).collect(), ..Choice::default() }
}

/// One run at a time: threads of two would take turns at the same cores, and Linux has one pool.
fn run(request: &Request, choice: &Choice) -> Result<Report, BenchError> {
    static CORES: Mutex<()> = Mutex::new(());
    let _mine = CORES.lock().unwrap_or_else(PoisonError::into_inner);
    bounce::run(request, choice, |_| ())
}

type Line<'a> = (&'a str, Option<&'a str>, usize, &'a str, Option<&'a str>);

fn line(result: &Measurement) -> Line<'_> {
    (result.workload, result.direction, result.threads, result.subject, result.profile.as_deref())
}

/// All lines of a run without Linux, or of Linux alone.
fn expected<'a>(linux: bool, profiles: &[&'a str]) -> Vec<Line<'a>> {
    let mut lines = Vec::new();
    for workload in WORKLOADS {
        let subjects: &[&str] = match (linux, workload.shape) {
            (true, Shape::Pool(_)) => &[],
            (true, _) => &["linux"],
            (false, Shape::Slot) => &["portcullis", "rotating"],
            (false, Shape::Swiotlb(_)) => &["portcullis", "copy", "rotating"],
            (false, Shape::Pool(_)) => &["portcullis", "copy"],
        };
        let directions: &[Option<&str>] = match workload.shape {
            Shape::Slot => &[None],
            _ => &[Some("to-device"), Some("from-device"), Some("both")],
        };
        for direction in directions {
            for threads in [1, 3] {
                let of = |subject| (workload.name, *direction, threads, subject, None);
                lines.extend(subjects.iter().copied().map(of));
                if !linux && matches!(workload.shape, Shape::Pool(_)) {
                    let strict = |profile| (workload.name, *direction, threads, "strict", Some(profile));
                    lines.extend(profiles.iter().copied().map(strict));
                }
            }
        }
    }
    lines
}

#[test]
fn every_workload_runs_on_every_subject_in_every_direction() {
    let profiles = ["none", "virtio-iommu"];
    let report = run(&request(), &on(&profiles)).unwrap();
    assert_eq!((report.bench, report.skipped.as_slice()), ("bounce", &[][..]));
    assert_eq!(report.results.iter().map(line).collect::<Vec<_>>(), expected(false, &profiles));
    for result in &report.results {
        assert!(result.min <= result.ns_per_op && result.ns_per_op <= result.max, "{result:?}");
        assert_eq!(result.halves, None);
    }
    let text = render(&report);
    let names = WORKLOADS.iter().map(|workload| workload.name);
    let subjects = SUBJECTS.iter().map(|subject| subject.name).filter(|name| *name != "linux");
    for name in names.chain(subjects).chain(["to-device", "from-device", "both", "virtio-"]) {
        assert!(text.contains(name), "{name} is in {text}");
    }
    assert!(
        text.contains("What it comes to\n  slot (1): ") && text.contains("as fast as strict none"),
        "{text}"
    );
    assert!(text.contains("the throughput of 1 thread (a bare copy's: "), "{text}");
    assert!(!text.contains("linux:"), "it was not named: {text}");
}

#[test]
#[ignore = "needs Linux's swiotlb: PORTCULLIS_RIVAL=path to the shared library"]
fn every_workload_runs_on_linux() {
    every_workload_runs_on(named("PORTCULLIS_RIVAL"));
}

#[test]
fn every_workload_runs_on_what_stands_in_for_linux() {
    every_workload_runs_on(library());
}

fn every_workload_runs_on(rival: PathBuf) {
    let rival = Some(rival);
    let request = Request { rival, subjects: vec!["linux".into()], ..request() };
    let report = run(&request, &on(&["none"])).unwrap();
    assert_eq!(report.results.iter().map(line).collect::<Vec<_>>(), expected(true, &[]));
    // It was asked for, so it is told that it does no pool.
    assert!(
        report.skipped.iter().all(|skipped| skipped.workload.starts_with("pool-")),
        "{:?}",
        report.skipped
    );
    // It need not be named where its library is.
    let one = Request { workloads: vec!["slot".into()], threads: vec![1], subjects: Vec::new(), ..request };
    assert!(run(&one, &on(&["none"])).unwrap().find("slot", 1, "linux").is_some());
}

#[test]
fn all_profiles_are_measured_unless_some_are_named() {
    let request = Request {
        workloads: vec!["pool-4k".into()],
        subjects: vec!["strict".into()],
        threads: vec![1],
        ..request()
    };
    let profiles = |choice: &Choice| -> Vec<Option<String>> {
        let results = run(&request, choice).unwrap().results;
        results.into_iter().filter(|r| r.direction == Some("both")).map(|r| r.profile).collect()
    };
    let named = |names: &[&str]| names.iter().map(|name| Some(name.to_string())).collect::<Vec<_>>();
    assert_eq!(profiles(&Choice::default()), named(&["none", "vtd", "smmuv3", "virtio-iommu"]));
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../portcullis-trace/profiles/smmuv3.toml");
    assert_eq!(profiles(&on(&["vtd", path.to_str().unwrap()])), named(&["vtd", "smmuv3"]));
}

#[test]
fn the_json_has_the_shape_that_is_documented() {
    let request = Request {
        workloads: vec!["slot".into(), "pool-1k".into()],
        subjects: vec!["portcullis".into(), "strict".into()],
        threads: vec![1],
        options: Options { samples: 10_000, ..Options::tiny() },
        ..request()
    };
    let keys = |value: &serde_json::Value| {
        let mut keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort_unstable();
        keys.join(" ")
    };
    let json = |choice: &Choice| serde_json::to_value(run(&request, choice).unwrap()).unwrap();
    let hot = json(&on(&["none"]));
    assert_eq!(keys(&hot), "bench limits results skipped timer");
    assert_eq!(keys(&hot["results"][0]), "max min ns_per_op p99_99 subject threads workload");
    assert_eq!(keys(&hot["results"][1]), "direction max min ns_per_op p99_99 subject threads workload");
    assert_eq!(
        keys(&hot["results"][2]),
        "direction max min ns_per_op p99_99 profile subject threads workload"
    );
    assert!(hot["results"].as_array().unwrap().iter().all(|result| result["p99_99"].is_number()));
    assert_eq!(keys(&hot["skipped"][0]), "profile reason subject threads workload");
    let deep = json(&Choice { depth: 20, ..on(&["none"]) });
    let result = &deep["results"][1];
    assert_eq!(
        keys(result),
        "depth direction map_ns max min ns_per_op p99_99 subject threads unmap_ns workload"
    );
    assert_eq!(result["depth"], 20);
    let text = render(&run(&request, &Choice { depth: 20, ..on(&["none"]) }).unwrap());
    assert!(text.contains("as fast as strict none (map ") && text.contains(" ns, unmap "), "{text}");
}

#[test]
fn what_is_not_possible_is_told() {
    let one = Request { workloads: vec!["slot".into()], threads: vec![1], ..request() };
    let many = run(&Request { threads: vec![49], ..one.clone() }, &on(&["none"])).unwrap();
    assert_eq!(many.results, []);
    assert!(many.skipped.iter().all(|s| s.reason.contains("48 threads")), "{:?}", many.skipped);
    for depth in [0, 257] {
        let report = run(&one, &Choice { depth, ..on(&["none"]) }).unwrap();
        assert_eq!(report.results, []);
        assert!(report.skipped.iter().all(|s| s.reason.contains("256 mappings")), "{:?}", report.skipped);
    }
    let copy = run(&Request { subjects: vec!["copy".into()], ..one }, &on(&["none"])).unwrap();
    assert!(copy.skipped[0].reason.contains("does not do the workload"));
}

#[test]
fn wrong_names_are_told_with_the_right_ones() {
    let error = run(&Request { workloads: vec!["pool-2k".into()], ..request() }, &on(&[])).unwrap_err();
    assert!(error.to_string().contains("no workload \"pool-2k\"; there are slot, swiotlb-1k"), "{error}");
    let error = run(&Request { subjects: vec!["xen".into()], ..request() }, &on(&[])).unwrap_err();
    assert!(error.to_string().contains("portcullis, copy, linux, rotating, strict"), "{error}");
    let error = run(&Request { subjects: vec!["linux".into()], ..request() }, &on(&[])).unwrap_err();
    assert!(matches!(error, BenchError::NoRival), "{error}");
    let rival = Some(PathBuf::from("no/such/librival.so"));
    assert!(matches!(run(&Request { rival, ..request() }, &on(&[])), Err(BenchError::Rival(_))));
    assert!(matches!(run(&request(), &on(&["vtx"])), Err(BenchError::Profile(_))));
}
