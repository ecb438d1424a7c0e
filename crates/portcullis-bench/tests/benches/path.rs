//! The benchmark of the whole way as a library: every kind of mapping on every subject, on a tiny scale.
//!
//! The tests look at no figure but for its being one: timing never decides whether a test passes. The benchmark itself
//! looks before and after it measures that each address leads to its memory, and after an unmap to none.

use portcullis_bench::path::{self, Choice, Kind, Request, designs, workloads};

use crate::common::{cores, request, with_all_cores};

fn choice(profile: &str, own_domains: bool) -> Choice {
    Choice { profile: profile.into(), rival_pt: None, own_domains }
}

/// Workloads of one page and of sixteen, one live and many.
fn some() -> Vec<String> {
    let wanted =
        workloads().iter().filter(|workload| [1, 16].contains(&workload.pages) && workload.live < 4096);
    wanted.map(|workload| workload.name.to_owned()).collect()
}

#[test]
fn every_kind_of_mapping_is_measured() {
    for (profile, own_domains) in [("none", false), ("vtd", true)] {
        let threads: Vec<usize> = (1..=cores().min(2)).collect();
        let request = Request { workloads: some(), threads: threads.clone(), ..request() };
        let report = with_all_cores(|| path::run(&request, &choice(profile, own_domains), |_| ())).unwrap();
        assert_eq!(report.bench, "path");
        assert_eq!(report.skipped, []);
        for name in some() {
            let kind = workloads().iter().find(|workload| workload.name == name).unwrap().kind;
            let parts = matches!(kind, Kind::Raw | Kind::Typed | Kind::Lazy | Kind::Sg);
            for &threads in &threads {
                let ours = report.find(&name, threads, "portcullis").unwrap();
                assert!(ours.ns_per_op > 0.0 && ours.profile.as_deref() == Some(profile), "{ours:?}");
                assert_eq!(report.find(&name, threads, "parts").is_some(), parts, "{name}");
            }
        }
    }
}

#[test]
fn designs_of_the_past_map_what_they_say_and_unmap_it() {
    for (subject, design) in designs() {
        let kind = design.kind().name();
        let workloads: Vec<String> = ["1", "16", "1-live64"].map(|size| format!("{kind}-{size}")).into();
        let threads: Vec<usize> = (1..=cores().min(2)).collect();
        let request = Request { workloads, subjects: vec![subject.name.into()], threads, ..request() };
        let report = with_all_cores(|| path::run(&request, &choice("vtd", false), |_| ())).unwrap();
        assert_eq!(report.skipped, [], "{}", subject.name);
        assert!(report.find(&format!("{kind}-16"), 1, subject.name).unwrap().ns_per_op > 0.0);
    }
}

#[test]
fn what_is_not_there_is_an_error() {
    let unknown = Request { workloads: vec!["raw-3".into()], ..request() };
    let error = path::run(&unknown, &choice("none", false), |_| ()).unwrap_err();
    assert!(error.to_string().contains("raw-3"), "{error}");
    let linux = Request { subjects: vec!["linux".into()], workloads: some(), ..request() };
    assert!(path::run(&linux, &choice("none", false), |_| ()).is_err());
}

#[test]
fn names_tell_what_is_done() {
    for workload in workloads() {
        let mut parts = workload.name.split('-');
        let kind = format!("{:?}", workload.kind).to_lowercase();
        assert_eq!(parts.next(), Some(kind.as_str()));
        assert_eq!(parts.next(), Some(workload.pages.to_string().as_str()));
        let live = parts.next().map_or(1, |live| live.trim_start_matches("live").parse().unwrap());
        assert_eq!(live, workload.live);
    }
}
