//! What errors say, word for word.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use portcullis_bench::calibrate::CalibrateError;
use portcullis_bench::request::BenchError;
use portcullis_bench::rival::RivalError;
use portcullis_bench::runner::Failure;
use portcullis_bench::team::TeamError;
use portcullis_trace::replay::Profile;

use crate::said::{assert_said, pair};

fn error() -> io::Error {
    io::Error::other("no luck")
}

fn path() -> PathBuf {
    PathBuf::from("a/b.so")
}

#[test]
fn each_failure_of_a_subject_says_what_it_did() {
    let said = [
        pair(
            Failure::OverBudget { what: "a repetition".into(), limit: Duration::from_millis(1500) },
            "too slow: a repetition takes more than 1.5s",
        ),
        pair(Failure::Broken("it lies".into()), "broken: it lies"),
        pair(Failure::Refused("no room".into()), "refused: no room"),
        pair(Failure::Panicked("oh".into()), "panicked: oh"),
        pair(Failure::Unsupported("not here".into()), "not here"),
        pair(Failure::Over, "the run is over"),
        pair(Failure::Abandoned, "another thread failed"),
    ];
    assert_said(&said, &[include_str!("../../src/runner.rs")]);
}

#[test]
fn each_reason_why_nothing_is_measured_is_told() {
    let no_such =
        BenchError::NoSuch { kind: "workload", name: "raw-3".into(), names: vec!["raw-1", "raw-4"] };
    let profile = || Profile::load("vtx").unwrap_err();
    let said = [
        pair(no_such, r#"no workload "raw-3"; there are raw-1, raw-4"#),
        pair(BenchError::NoRival, "the subject `linux` needs the shared library that holds it"),
        pair(BenchError::Rival(RivalError::NoFile { path: path(), source: error() }), "a/b.so: no luck"),
        pair(BenchError::Profile(profile()), profile().to_string()),
        pair(BenchError::Team(TeamError::Pin { core: 7 }), "a thread cannot be bound to core 7"),
        pair(BenchError::Limits(Failure::Over), "the machine's limits cannot be measured: the run is over"),
    ];
    assert_said(&said, &[include_str!("../../src/request.rs")]);
    let said = [
        pair(TeamError::NoCores, "the system does not tell which cores this process may use"),
        pair(TeamError::Pin { core: 7 }, "a thread cannot be bound to core 7"),
        pair(TeamError::Spawn(error()), "a thread cannot be started: no luck"),
    ];
    assert_said(&said, &[include_str!("../../src/team.rs")]);
    let said = [
        pair(CalibrateError::Team(TeamError::Pin { core: 3 }), "a thread cannot be bound to core 3"),
        pair(CalibrateError::from(Failure::Abandoned), "cannot calibrate: another thread failed"),
    ];
    assert_said(&said, &[include_str!("../../src/calibrate.rs")]);
}

#[test]
fn each_fault_of_a_library_says_which_it_is_and_what_it_lacks() {
    // SAFETY: there is no such file, so no code of one is run.
    let source = || unsafe { libloading::Library::new("no/such/file.so") }.unwrap_err();
    let symbol = RivalError::Symbol { path: path(), what: "Linux's swiotlb", symbol: "peer_find_slots" };
    let said = [
        pair(RivalError::NoFile { path: path(), source: error() }, "a/b.so: no luck"),
        pair(
            RivalError::Load { path: path(), source: source() },
            format!("a/b.so is no shared library that can be loaded: {}", source()),
        ),
        pair(symbol, "a/b.so does not hold Linux's swiotlb: it has no `peer_find_slots`"),
    ];
    assert_said(&said, &[include_str!("../../src/rival.rs")]);
}
