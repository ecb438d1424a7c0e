//! Whole outputs of made results, every figure of which differs from every other, against files in `tests/golden`: a figure in another's
//! place, another unit or another digit is a difference. Read the difference before you write a file anew.
//!
//! With `PORTCULLIS_WRITE_TABLES=1` the tests write the files.

#[path = "../../portcullis/tests/golden/mod.rs"]
pub mod files;

use std::path::PathBuf;

use portcullis_model::scale::{
    Copies, Device, Line, Machine, Mapping, Outcome, Policy, Request, Spent, Workload,
};
use portcullis_trace::Summary;
use portcullis_trace::replay::{Profile, Report, Work};
use serde_json::{Value, json};

use crate::args::{Arguments, Command};
use crate::calibration::Calibration;
use crate::choice::Besides;
use crate::counted::INSTRUCTION_NS;
use crate::on_linux::{Offer, Place};
use crate::report::{page, read};
use crate::runs::Runs;
use crate::scale::Told;
use crate::scale::report::{self as scaled, Row, Table};
use crate::{explain, machine, short, warnings};

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Compares `text` with the file of this name.
fn is_golden(name: &str, text: &str) {
    files::is_golden(path(name), text);
}

pub fn replayed() -> Value {
    serde_json::from_str(&std::fs::read_to_string(path("replay.json")).unwrap()).unwrap()
}

pub fn runs() -> Runs {
    match read::outcome(replayed()).unwrap() {
        read::Outcome::Replay(replayed) => replayed.runs,
        _ => panic!("no replay"),
    }
}

/// A page without its style, a line for each element.
pub fn body(outcomes: &[(&str, &Value)], compare: bool) -> String {
    let read = |value: &Value| read::outcome(value.clone()).unwrap();
    let outcomes: Vec<_> = outcomes.iter().map(|(name, value)| ((*name).to_owned(), read(value))).collect();
    let page = page(&outcomes, compare).unwrap();
    let (head, rest) = page.split_once("<style>").unwrap();
    let (_, rest) = rest.split_once("</style>").unwrap();
    format!("{head}{rest}").replace("><", ">\n<").replace(env!("CARGO_PKG_VERSION"), "VERSION")
}

/// The part of a page behind its verdict on what changed, up to the results by themselves.
pub fn changes(outcomes: [&Value; 2]) -> String {
    let page = body(&[("before", outcomes[0]), ("after", outcomes[1])], true);
    page.split_once("<section id=\"part-1\">").unwrap().0.to_owned()
}

/// What `name` leads to, of every number its own multiple.
fn times(value: &mut Value, name: &str, factor: f64) {
    value[name] = (value[name].as_f64().unwrap() * factor).into();
}

pub fn benched() -> Value {
    let mut results = Vec::new();
    for (workload, ns) in [("raw-1", 38.25), ("typed-1", 0.42), ("sg-64", 4450.5)] {
        for (subject, slower) in [("ours", 1.0), ("theirs", 2.5)] {
            for threads in [1, 2, 4] {
                let ns = ns * slower * (1.0 + f64::from(threads) / 10.0);
                let p99_99 = (threads < 4).then_some(ns * 8.0);
                results.push(json!({
                    "workload": workload, "threads": threads, "subject": subject, "format": "vtd-ss",
                    "direction": if threads == 4 { Some("to-device") } else { None },
                    "profile": if threads == 2 { "vtd" } else { "none" },
                    "ns_per_op": ns, "min": ns * 0.95, "max": ns * 1.1, "p99_99": p99_99
                }));
            }
        }
    }
    json!({
        "schema": 1, "bench": "path", "results": results, "machine": {"cpu": "B", "cpus": 1},
        "skipped": [{"workload": "pool-64", "threads": 2, "subject": "theirs", "reason": "it has no pool"}]
    })
}

pub fn scale() -> Value {
    let policies = ["strict", "bounce", "lazy-2015", "passthrough"];
    let mut results = Vec::new();
    for (at, policy) in policies.into_iter().enumerate() {
        for (n, cpus) in [1, 48, 128].into_iter().enumerate() {
            let share = (7.0 + at as f64 - n as f64) / 10.0;
            let parts = [1000.0, 210.5, 7.25, 433.0, 12_345.0, 61.0].map(|ns| ns * (1.0 + at as f64));
            results.push(json!({
                "policy": policy, "cpus": cpus, "sockets": 1, "requests_per_s": 123_456.7 * share * f64::from(cpus),
                "relative_to_passthrough": share, "work_ns": parts[0], "library_ns": parts[1], "shared_ns": parts[2],
                "queue_wait_ns": parts[3], "copy_ns": if at == 1 { parts[4] } else { 0.0 }, "idle_ns": parts[5],
                "hottest": if at == 1 { "copies" } else { "its own instructions" },
                "extrapolated": if (at, n) == (2, 2) { vec!["from 64"] } else { vec![] }
            }));
        }
    }
    json!({
        "schema": 2, "workload": "nic", "about": "links", "profile": "vtd", "verdict": ["Choose <bounce>."], "choice": "bounce",
        "calibration": {"machine": "a server"}, "results": results, "command": "portcullis scale --json"
    })
}

#[test]
fn pages_are_as_they_were() {
    let one = |name: &str, value: &Value| is_golden(name, &body(&[(name, value)], false));
    one("replay.html", &replayed());
    one("bench.html", &benched());
    // No figure is below 1 ns.
    let mut slow = benched();
    slow["results"].as_array_mut().unwrap().retain(|result| result["workload"] == "sg-64");
    one("bench-slow.html", &slow);
    one("scale.html", &scale());
    let mut alone = scale();
    alone["results"].as_array_mut().unwrap().retain(|result| result["cpus"] == 128);
    one("scale-alone.html", &alone);
    let all = body(&[("a", &json!(benched())), ("<b>", &alone)], false);
    let (contents, _) = all.split_once("<main>").unwrap();
    assert!(contents.contains("<a href=\"#part-0\">a</a> <a href=\"#part-1\">&lt;b&gt;</a>"), "{contents}");
    assert!(
        all.contains("<section id=\"part-0\">\n<h2>Benchmark path")
            && all.contains("<section id=\"part-1\">\n<h2>Scaling of nic")
    );
}

#[test]
fn pages_of_changes_are_as_they_were() {
    let mut after = replayed();
    // Faster, slower, within the noise; and the same.
    for (at, factor) in [0.5, 3.0, 1.2, 1.0].into_iter().enumerate() {
        for name in ["median_ns", "least_ns", "most_ns"] {
            times(&mut after["costs"][at], name, factor);
        }
        let policy = &mut after["policies"][at];
        times(policy, "relative_to_passthrough", 1.0 - at as f64 / 100.0);
        if !policy["exposure_counted"].is_null() {
            times(&mut policy["exposure"], "stale_byte_s", 2.0);
        }
        for bucket in policy["unmap_latency"].as_array_mut().unwrap() {
            bucket[0] = (bucket[0].as_f64().unwrap() * factor).into();
        }
    }
    after["trace"]["events"] = 12_346.into();
    after["machine"]["cpus"] = 3.into();
    is_golden("replay-changes.html", &changes([&replayed(), &after]));

    let mut after = benched();
    for (at, result) in after["results"].as_array_mut().unwrap().iter_mut().enumerate() {
        // By what the repetitions do not explain, by what they may, and by nothing.
        let factor = [0.5, 1.05, 1.0, 1.7, 0.9, 12.5][at % 6];
        for name in ["ns_per_op", "min", "max"] {
            times(result, name, factor);
        }
    }
    after["results"].as_array_mut().unwrap().remove(17);
    is_golden("bench-changes.html", &changes([&benched(), &after]));

    let mut after = scale();
    for (at, result) in after["results"].as_array_mut().unwrap().iter_mut().enumerate() {
        let factor = [0.5, 1.0, 1.000_4, 1.0006, 1.25, 0.9994][at % 6];
        for name in ["requests_per_s", "relative_to_passthrough"] {
            times(result, name, factor);
        }
    }
    after["results"].as_array_mut().unwrap().remove(0);
    after["calibration"]["machine"] = "another".into();
    is_golden("scale-changes.html", &changes([&scale(), &after]));
}

#[test]
fn results_of_different_commands_are_named_by_them() {
    let mut other = benched();
    other["bench"] = "iova".into();
    let said = |after: &Value| {
        let outcomes = [("before", &benched()), ("after", after)]
            .map(|(name, value)| (name.to_owned(), read::outcome(value.clone()).unwrap()));
        page(&outcomes, true).unwrap_err().to_string()
    };
    for (after, tool) in [(other, "bench iova"), (scale(), "scale"), (replayed(), "replay")] {
        assert_eq!(
            said(&after),
            format!(
                "--compare takes two results of the same command: before is of `portcullis bench path`, and after is of \
                 `portcullis {tool}`"
            )
        );
    }
}

/// A recording of which each count differs.
pub fn summary() -> Summary {
    let mut summary = Summary::default();
    summary.name = "golden.trace".into();
    (summary.events, summary.maps, summary.unmaps, summary.cpus) = (12_345, 1_201, 1_099, 3);
    summary.times_ns = Some((2_000_000_000, 4_650_000_000));
    for (unpaired, n) in [(&mut summary.unpaired, 11), (&mut summary.syncs_unpaired, 24)] {
        (unpaired.before_recording, unpaired.already_unmapped, unpaired.after_loss) = (n, n + 1, n + 3);
    }
    (summary.lost_events, summary.moved_events, summary.truncated_lists) = (31, 32, 33);
    (summary.guessed_lengths, summary.iommu_unclaimed, summary.filtered) = (34, 35, 36);
    (summary.skipped, summary.promised_entries) = (41, Some(12_345 + 51));
    summary.skipped_names = [("dma_map_sg".to_owned(), 40), ("xyz".to_owned(), 1)].into();
    (summary.direct_maps, summary.direct_unmaps) = (61, 3);
    (summary.other_events, summary.other_names) = (9_000, [("sched_switch".to_owned(), 8_999)].into());
    summary.warnings = 7;
    summary.devices = vec!["0000:03:00.0".into(), "0000:04:00.0".into()];
    summary
}

/// The short report, in ASCII.
pub fn parts(format: &str) -> short::Parts<'_> {
    let (offer, place) = (Offer::Module, Place::default());
    let (all_devices, sweep, full, legend, unicode) = (true, false, false, false, false);
    short::Parts { format, offer, place, all_devices, sweep, full, legend, unicode }
}

#[test]
fn what_replay_prints_is_as_it_was() {
    let (runs, summary) = (runs(), summary());
    let profile = Profile::load("vtd").unwrap();
    let mut text = String::new();
    let parts = parts("amd-v1");
    for parts in [
        parts.clone(),
        short::Parts {
            offer: Offer::Library,
            sweep: true,
            full: true,
            legend: true,
            unicode: true,
            ..parts.clone()
        },
    ] {
        text += &short::render(&runs, &profile, &summary, parts);
    }
    text += &explain::counts(&runs, Offer::Module);
    text += &explain::render(&runs.report);
    text += &machine::csv(&runs, Offer::Module);
    text += &(warnings::of(&runs, &summary).join("\n") + "\n");
    is_golden("replay.txt", &anstream::adapter::strip_str(&text).to_string());
}

#[test]
fn what_is_read_of_a_result_is_what_is_printed_of_it() {
    let arguments =
        Arguments::replay(&["--work", "1234ns", "--device", "d", "--limit", "77", "--strict-parse"]);
    let runs = runs();
    let printed = machine::json(&runs, &summary(), &arguments, "vtd-ss", &Profile::load("smmuv3").unwrap());
    let printed: Value = serde_json::from_str(&printed.unwrap()).unwrap();
    for part in ["schema", "trace", "profile", "work_ns", "policies", "costs"] {
        assert_eq!(printed[part], replayed()[part], "{part}");
    }
    assert_eq!(printed["profiles"][0]["name"], "smmuv3");
    let options = json!({
        "profile": "vtd", "format": "vtd-ss", "work_ns": 1234, "device": "d", "limit": 77, "repeat": 3,
        "strict_parse": true, "on": "linux"
    });
    assert_eq!(printed["options"], options);
    // The verdict is of what was asked for, in the result and on its page.
    assert_eq!((&printed["choice"], replayed_choice(&printed)), (&"strict".into(), "linux-strict".into()));
    let arguments = Arguments::replay(&["--on", "library"]);
    let printed = machine::json(&runs, &summary(), &arguments, "vtd-ss", &Profile::load("vtd").unwrap());
    let printed: Value = serde_json::from_str(&printed.unwrap()).unwrap();
    assert_eq!((&printed["choice"], replayed_choice(&printed)), (&"adaptive".into(), "adaptive".into()));
    let sentences = printed["verdict"].as_array().unwrap();
    assert!(sentences.iter().any(|said| said.as_str().unwrap().starts_with("Choose adaptive (")));
}

/// The policy that a result's page sets apart.
fn replayed_choice(result: &Value) -> String {
    let page = body(&[("a", result)], false);
    let (before, _) = page.split_once(" <i>the choice</i>").unwrap();
    before.rsplit('>').next().unwrap().to_owned()
}

#[test]
fn a_document_has_all_hardware_that_was_assumed() {
    let profiles = ["smmuv3", "vtd", "virtio-iommu"].map(|name| Profile::load(name).unwrap());
    let text = machine::document(7, json!({"a": 1}), &profiles, json!({"b": [2]})).unwrap();
    let printed: Value = serde_json::from_str(&text).unwrap();
    let names: Vec<&Value> = printed["profiles"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
    assert_eq!(names, ["smmuv3", "vtd", "virtio-iommu"]);
    assert_eq!(
        (&printed["schema"], &printed["options"]["a"], &printed["b"][0]),
        (&7.into(), &1.into(), &2.into())
    );
}

/// Of several runs the one in the middle, with how far they lie apart, and what is wrong in any.
#[test]
fn runs_are_joined_policy_by_policy() {
    let report = runs().report;
    let run = |factors: [f64; 4], wrong: u64| -> Report {
        let mut report = report.clone();
        for (at, policy) in report.policies.iter_mut().enumerate() {
            let cost = 100.0 * (at + 1) as f64 * factors[at];
            policy.ops_per_s = 1e9 / (report.work_ns + cost);
            policy.invalidations = cost as u64;
            (policy.faults, policy.violations) = (wrong * (at as u64 + 1), 10 - wrong);
        }
        report
    };
    let reports = vec![
        run([1.0, 4.0, 3.0, 0.0], 1),
        run([2.0, 3.0, 1.0, 0.0], 3),
        run([3.0, 2.0, 2.0, 1.0], 2),
        run([4.0, 1.0, 4.0, 1.0], 0),
    ];
    let joined = Runs::of(reports).unwrap();
    let costs =
        joined.costs.iter().map(|cost| (cost.least_ns.round(), cost.median_ns.round(), cost.most_ns.round()));
    let expected = [(100.0, 200.0, 400.0), (200.0, 400.0, 800.0), (300.0, 600.0, 1200.0), (0.0, 0.0, 400.0)];
    assert_eq!(costs.collect::<Vec<_>>(), expected);
    let of = |policy: &portcullis_trace::replay::PolicyReport| (policy.faults, policy.violations);
    assert_eq!(
        joined.report.policies.iter().map(of).collect::<Vec<_>>(),
        [(3, 10), (6, 10), (9, 10), (12, 10)]
    );
    let medians: Vec<u64> = joined.report.policies.iter().map(|policy| policy.invalidations).collect();
    assert!(
        medians.iter().zip([200u64, 400, 600, 0]).all(|(is, wanted)| is.abs_diff(wanted) <= 1),
        "{medians:?}"
    );
    assert_eq!((joined.number, joined.too_long), (4, false));
}

pub fn tables() -> Vec<Table> {
    let mapping =
        |pages, shared| Mapping { pages, pieces: 1, bytes: pages * 4096 - 96, shared, received: false };
    let workload = |count| Workload {
        name: "golden".into(),
        about: "requests of two kinds".into(),
        requests: vec![
            Request { work_ns: 1_111.0, mappings: vec![mapping(1, true)] },
            Request {
                work_ns: 2_222.0,
                mappings: vec![mapping(2, false), mapping(3, false), mapping(4, false)],
            },
        ],
        depth: 12,
        device: Device { count, requests_per_s: 345_678.0, gb_per_s: 6.25, latency_ns: 1.0, page_ns: 2.0 },
    };
    let machine = |cpus, sockets| Machine {
        cpus,
        sockets,
        iommus: 1,
        near_ns: 1.0,
        far_ns: 2.0,
        submission_ns: 3.0,
        request_ns: 4.0,
        in_flight: 1,
        map_request_ns: 5.0,
        map_page_ns: 6.0,
        unmap_page_ns: 7.0,
        walk_read_ns: 8.0,
        copies: Copies { hot_ns: 9.0, cold_ns: 10.0, remote_ns: 11.0, socket_gb_per_s: 12.0 },
        of_module: false,
    };
    let outcome = |per_s: f64, hot: usize| {
        let mut ns = [310.0, 320.0, 330.0, 340.0];
        ns[hot] += 4_000.0;
        Outcome {
            per_s,
            spent: Spent {
                work_ns: 3_010.0,
                own_ns: ns[0],
                shared_ns: ns[1],
                wait_ns: ns[2],
                copy_ns: ns[3],
                idle_ns: 350.0,
            },
            asked_ns: 0.0,
            queue_busy: 0.625,
            device_busy: if hot == 3 { 0.99 } else { 0.97 },
            copy_busy: if hot == 3 { 0.96 } else { 0.94 },
            lines: vec![
                Line { share: 0.375, source: "a.rs:1 < b.rs:2".into() },
                Line { share: 0.25, source: "c".into() },
            ],
            inferred: if hot == 1 { vec!["lines from 64 CPUs".into()] } else { Vec::new() },
        }
    };
    let named = |name: &str| Policy::named(name).unwrap();
    let table = |cpus, sockets, factor: f64| {
        let all = outcome(1e6 * factor, 0);
        let row = |(name, share, hot): (&str, f64, usize)| {
            Row::new(named(name), outcome(1e6 * factor * share, hot), &all)
        };
        Table {
            machine: machine(cpus, sockets),
            units: None,
            workload: workload(cpus + 1),
            rows: [
                ("passthrough", 1.0, 0),
                ("strict", 0.5021, 2),
                ("strict-ring", 0.9113, 1),
                ("bounce", 0.7031, 3),
                ("lazy-2015", 0.1234, 1),
            ]
            .map(row)
            .into(),
            by_units: Vec::new(),
            by_copies: None,
            more_memory: Vec::new(),
            by_waits: [Vec::new(), Vec::new()],
            unlocked: None,
            by_itself: Vec::new(),
            offer: Offer::Library,
            own: None,
            told: Told::default(),
        }
    };
    vec![table(1, 1, 1.0), table(96, 2, 80.0)]
}

#[test]
fn what_scale_prints_is_as_it_was() {
    let Some(Command::Scale(options)) =
        clap::Parser::try_parse_from::<_, _>(["portcullis", "scale", "--cpus", "1,96"])
            .map(|all: Arguments| all.command)
            .unwrap()
    else {
        panic!("another command")
    };
    let (profile, calibration) = (Profile::load("smmuv3").unwrap(), Calibration::default());
    let mut tables = tables();
    let mut text = scaled::render(&tables, &profile, &calibration, false);
    let json: Value =
        serde_json::from_str(&scaled::json(&tables, &profile, &calibration, &options).unwrap()).unwrap();
    for part in ["workload", "about", "profile", "options", "verdict", "results"] {
        text += &format!("{part}: {:#}\n", json[part]);
    }
    // Of a recording, and of what Linux has alone.
    let besides = Besides { ns: 1_667.0, work: Work::Most, cpus: 7 };
    tables[1].told =
        Told { besides: Some(besides), place: Place::named(&["0000:03:00.0".into()]), ..Told::default() };
    tables[1].offer = Offer::Module;
    let Table { rows, machine, workload, .. } = &mut tables[1];
    rows.iter_mut().for_each(|row| *row = row.priced(machine, workload, INSTRUCTION_NS));
    text += &scaled::render(&tables[1..], &profile, &calibration, false);
    let json: Value =
        serde_json::from_str(&scaled::json(&tables[1..], &profile, &calibration, &options).unwrap()).unwrap();
    for part in ["work_ns", "work", "choice", "verdict"] {
        text += &format!("{part}: {:#}\n", json[part]);
    }
    // The verdict where the policy to choose is the slowest, and where the recording says nothing of copies; then, where there is no figure.
    tables.truncate(1);
    tables[0].rows.retain(|row| ["passthrough", "strict"].contains(&row.policy.name));
    tables[0].told.directions = false;
    tables[0].workload.device.gb_per_s = 1e3;
    text += &scaled::render(&tables, &profile, &calibration, true);
    tables[0].workload.device.requests_per_s = 1e12;
    tables[0].told.nothing = Some("It tells nothing.".into());
    text += &scaled::render(&tables, &profile, &calibration, false);
    is_golden("scale.txt", &anstream::adapter::strip_str(&text).to_string());
}
