//! What errors say, word for word, with what stands in files made visible.

use std::io;

use crate::calibration::CalibrationError;
use crate::report::read::ReadError;
use crate::{anonymize, replay, report, scale};

#[path = "../../portcullis/tests/said/mod.rs"]
mod said;

/// A name that would wipe a terminal.
pub fn odd() -> String {
    "a\u{1b}[2J".to_owned()
}

fn error() -> io::Error {
    io::Error::other("no luck")
}

fn json() -> serde_json::Error {
    serde_json::from_str::<u8>("x").unwrap_err()
}

/// What an error says, and what it should say, in which `ODD` stands for the odd name.
pub fn pair(error: impl ToString, expected: &str) -> (String, String) {
    said::pair(error, expected.replace("ODD", r"a\u{1b}[2J"))
}

/// Each of `said` is as it should be, and of the `sources` no error is missing but `transparent` ones.
#[track_caller]
pub fn assert_said(said: &[(String, String)], sources: &[&str]) {
    said::assert_said(said, &[&*sources.concat().replace("#[error(transparent)]", "")]);
}

#[test]
fn each_error_of_a_report_says_which_file() {
    use report::CommandError;
    let (name, before, after) = (odd, odd, || "b".to_owned());
    let not_json = "ODD: this is no JSON (expected value at line 1 column 1); `portcullis replay --json` prints what a report is made of";
    let said = [
        pair(ReadError::Input { name: name(), error: error() }, "ODD: no luck"),
        pair(ReadError::Json { name: name(), error: json() }, not_json),
        pair(
            ReadError::Unknown { name: name() },
            "ODD: this is no result that a report is made of; it reads what `portcullis replay`, `portcullis bench` and `portcullis \
             scale` print with --json",
        ),
        pair(
            ReadError::Shape { name: name(), tool: "portcullis scale", error: "why".into() },
            "ODD: this looks like a result of portcullis scale, but why; print it again with this version's `portcullis scale --json`",
        ),
        pair(
            CommandError::NotTwo(3),
            "--compare takes two results, the one before and the one after, and not 3",
        ),
        pair(
            CommandError::Different { before: before(), after: after() },
            "--compare takes two results of the same command: ODD, and b",
        ),
        pair(
            CommandError::NothingCommon { before: before(), after: after() },
            "nothing that was measured is in both ODD and b, so there is nothing to compare",
        ),
        pair(
            CommandError::Exists,
            "report.html exists: `--out report.html` replaces it, and another name keeps it",
        ),
        pair(CommandError::Write { name: name(), error: error() }, "ODD: no luck"),
        pair(CommandError::Output(error()), "standard output: no luck"),
    ];
    assert_said(&said, &[include_str!("report/read.rs"), include_str!("report/mod.rs")]);
}

#[test]
fn each_error_of_a_replay_or_a_simulation_says_what_is_wrong() {
    let devices = || vec!["b".to_owned(), "c".to_owned()];
    let names = portcullis_model::scale::NAMES.join(", ");
    let no_workload = format!("ODD is neither a file nor a workload: name a recording, or {names}");
    let said = [
        pair(replay::CommandError::Output(error()), "standard output: no luck"),
        pair(
            replay::CommandError::NoSuchDevice {
                name: odd(),
                device: "d".into(),
                devices: devices(),
                limit: None,
            },
            "ODD: no mapping of a device \"d\"; the trace has b, c",
        ),
        pair(
            replay::CommandError::Pipe,
            "standard input is a pipe: `portcullis replay -` reads it, and `portcullis replay < /dev/null` does without it",
        ),
        pair(
            replay::CommandError::SeveralDevices { name: odd(), device: "d".into(), devices: devices() },
            "ODD: \"d\" is the end of several devices' names: b, c",
        ),
        pair(replay::CommandError::NoRun, "nothing was replayed"),
        pair(
            replay::CommandError::Strict { policy: "lazy", failures: 3, first: "line 7".into() },
            "lazy: 3 calls failed, the first at line 7",
        ),
        pair(
            replay::CommandError::Unprotected { policy: "lazy", violations: 3, faults: 4 },
            "lazy: 3 violations and 4 faults: protection did not hold",
        ),
        pair(
            scale::CommandError::OwnWork { workload: "raw-1".into() },
            "--work is for recordings: the workload raw-1 says by itself what its CPUs do besides",
        ),
        pair(scale::CommandError::NoWorkload { workload: odd() }, &no_workload),
        pair(scale::CommandError::Empty(odd()), "ODD: nothing is mapped in this recording"),
        pair(scale::CommandError::Simulation("why".into()), "why"),
        pair(scale::CommandError::Output(error()), "standard output: no luck"),
        pair(anonymize::CommandError::Input(error()), "cannot read standard input: no luck"),
        pair(anonymize::CommandError::Output { name: odd(), source: error() }, "cannot write ODD: no luck"),
        pair(CalibrationError::Read { path: odd().into(), source: error() }, "ODD: no luck"),
        pair(
            CalibrationError::Parse { path: odd().into(), source: json() },
            "ODD is no calibration: expected value at line 1 column 1",
        ),
        pair(
            CalibrationError::Figure { path: odd().into(), name: "near_ns", value: 0.5 },
            "ODD: near_ns is 0.5, expected more than 0, up to 1,000,000",
        ),
    ];
    let sources = [
        include_str!("replay.rs"),
        include_str!("scale.rs"),
        include_str!("anonymize.rs"),
        include_str!("calibration.rs"),
    ];
    assert_said(&said, &sources);
}
