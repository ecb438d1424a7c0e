//! `portcullis bench` as its user meets it.

#[path = "cli/shape.rs"]
mod shape;

use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    bench_of("iova", arguments)
}

fn bench_of(what: &str, arguments: &[&str]) -> Output {
    let arguments = [&["bench", what, "--quick"], arguments].concat();
    Command::new(env!("CARGO_BIN_EXE_portcullis")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// In one line: where lines end may depend on names.
fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What was printed for machines, of the shape that is documented.
fn documented(output: &Output) -> Value {
    let json = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shape::documented("bench.md").wrong_with(&json), [""; 0]);
    json
}

fn keys(value: &Value) -> String {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys.join(" ")
}

#[test]
fn a_page_is_made_of_its_json() {
    let output = bench(&["--json", "--workload", "pair-1", "--subject", "portcullis", "--threads", "1"]);
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("page.json");
    std::fs::write(&path, &output.stdout).unwrap();
    let path = path.to_str().unwrap();
    let page = |arguments: &[&str]| {
        let page =
            Command::new(env!("CARGO_BIN_EXE_portcullis")).arg("report").args(arguments).output().unwrap();
        assert_eq!(page.status.code(), Some(0), "{}", stderr(&page));
        stdout(&page)
    };
    let one = page(&[path]);
    for part in ["Benchmark iova", "bench iova --quick --json", "An operation of portcullis takes "] {
        assert!(one.contains(part), "{part}");
    }
    assert!(page(&["--compare", path, path]).contains("1 measurement did not change."));
}

#[test]
fn json_is_what_is_documented() {
    let output = bench(&[
        "--json",
        "--workload",
        "pair-1,first-4096",
        "--subject",
        "portcullis,portcullis-backing",
        "--threads",
        "1",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).is_empty(), "{}", stderr(&output));
    let json = documented(&output);
    assert_eq!((&json["schema"], &json["tool"]["name"]), (&1.into(), &"portcullis".into()));
    assert_eq!(keys(&json["options"]), "quick rival subject threads workload");
    assert_eq!(json["options"]["subject"], serde_json::json!(["portcullis", "portcullis-backing"]));
    assert_eq!((&json["bench"], &json["profiles"]), (&"iova".into(), &serde_json::json!([])));
    assert!(json["machine"]["cpus"].as_u64().unwrap() >= 1);
    let results = json["results"].as_array().unwrap();
    let names: Vec<_> = results
        .iter()
        .map(|result| {
            assert_eq!(keys(result), "max min ns_per_op p99_99 subject threads workload");
            let ns = |key: &str| result[key].as_f64().unwrap();
            assert!(ns("min") <= ns("ns_per_op") && ns("ns_per_op") <= ns("max"));
            assert_eq!(result["threads"], 1);
            (result["workload"].as_str().unwrap(), result["subject"].as_str().unwrap())
        })
        .collect();
    let expected = [
        ("pair-1", "portcullis"),
        ("pair-1", "portcullis-backing"),
        ("first-4096", "portcullis"),
        ("first-4096", "portcullis-backing"),
    ];
    assert_eq!(names, expected);
    assert!(results[0]["p99_99"].is_number(), "single operations are timed");
    assert!(results[2]["p99_99"].is_null(), "but not of this workload");
    assert_eq!(json["skipped"].as_array().unwrap().len(), 0);
}

#[test]
fn the_table_has_the_limits_and_says_what_was_not_measured() {
    let output = bench(&["--workload", "cross-cpu", "--subject", "portcullis", "--threads", "1"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("Not measured\n  portcullis, cross-cpu (1): "), "{text}");
    assert!(text.contains("Limits, measured on one core in this run"), "{text}");
    assert!(text.contains("IovaSpace"), "the subjects are explained: {text}");
}

#[test]
fn wrong_usage_exits_with_2_and_names_what_there_is() {
    let cases: [(&[&str], &str); 6] = [
        (&["--workload", "pair-3"], "pair-1, pair-2, pair-8"),
        (&["--workload", "pair-1,", "--json"], "full-32bit"),
        (&["--subject", "windows"], "offset-allocator"),
        (&["--subject", "linux"], "--rival"),
        (&["--threads", "0"], "0 is not in 1..=2"),
        (&["--threads", "3"], "3 is not in 1..=2"),
    ];
    for (arguments, expected) in cases {
        let output = bench(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
        assert!(stdout(&output).is_empty());
    }
    let output = Command::new(env!("CARGO_BIN_EXE_portcullis")).arg("bench").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "which benchmark?");
    assert!(stderr(&output).contains("iova"), "{}", stderr(&output));
}

#[test]
fn a_rival_that_cannot_be_used_is_an_error() {
    let failure = |path: &str| {
        let output = bench(&["--rival", path]);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stdout(&output).is_empty());
        stderr(&output)
    };
    let message = failure("no/such/librival.so");
    assert!(message.starts_with("portcullis: no/such/librival.so: "), "{message}");
    let message = failure(env!("CARGO_BIN_EXE_portcullis"));
    assert!(message.starts_with("portcullis: ") && message.contains("shared library"), "{message}");
}

#[test]
fn page_tables_are_told_by_format() {
    let arguments = [
        "--json",
        "--format",
        "amd-v1,vtd-ss",
        "--workload",
        "map-4k",
        "--subject",
        "portcullis",
        "--threads",
        "1",
    ];
    let output = bench_of("pgtable", &arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json = documented(&output);
    assert_eq!(json["bench"], "pgtable");
    let results = json["results"].as_array().unwrap();
    let formats: Vec<_> = results.iter().map(|result| result["format"].as_str().unwrap()).collect();
    assert_eq!(formats, ["vtd-ss", "amd-v1"]);
    assert_eq!(keys(&results[0]), "format max min ns_per_op p99_99 subject threads workload");

    let output = bench_of("pgtable", &["--format", "vtd-ss", "--workload", "unmap-2m", "--threads", "1"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("unmap-2m") && text.contains("the figure of `stores` fits into ours"), "{text}");
    assert!(text.contains("PageTable behind one lock"), "the subjects are explained: {text}");
}

#[test]
fn wrong_usage_of_page_tables_exits_with_2() {
    let cases: [(&[&str], &str); 4] = [
        (&["--format", "ppc64"], "riscv-sv48"),
        (&["--workload", "map-8k"], "map-sg-64k"),
        (&["--subject", "linux-nc"], "--rival"),
        (&["--subject", "stores", "--incoherent"], "cannot be used with"),
    ];
    for (arguments, expected) in cases {
        let output = bench_of("pgtable", arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
        assert!(stdout(&output).is_empty());
    }
}

#[test]
fn invalidations_are_told_with_their_profile() {
    let common = ["--workload", "lazy-unmap", "--subject", "portcullis", "--threads", "1,3"];
    let output = bench_of("invalidation", &[&common[..], &["--json", "--profile", "smmuv3"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).is_empty(), "{}", stderr(&output));
    let json = documented(&output);
    assert_eq!(json["bench"], "invalidation");
    let results = json["results"].as_array().unwrap();
    let threads: Vec<_> = results.iter().map(|result| result["threads"].as_u64().unwrap()).collect();
    assert_eq!(threads, [1, 3], "more threads than some machines have cores");
    assert!(results.iter().all(|result| result["profile"] == "smmuv3"));
    assert_eq!(json["options"]["profile"], "smmuv3");
    assert_eq!(json["profiles"][0]["waits"]["completion"]["ns"], 240.0);
    assert!(results.iter().all(|result| result["no_flush"].is_number()));
    assert_eq!(json["skipped"].as_array().unwrap().len(), 0);

    let output = bench_of("invalidation", &common);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("Profile: vtd") && text.contains("lazy-unmap"), "{text}");
    assert!(text.contains("strict waits shared by SharedQueue"), "the subjects are explained: {text}");
}

#[test]
fn wrong_usage_of_invalidations_is_told() {
    let cases: [(&[&str], i32, &str); 5] = [
        (&["--workload", "strict"], 2, "strict-batch-32"),
        (&["--subject", "linux"], 2, "global-lock"),
        (&["--threads", "49"], 2, "49 is not in 1..=48"),
        (&["--rival", "librival.so"], 2, "unexpected argument"),
        (&["--profile", "vtx"], 2, "none, vtd, smmuv3, virtio-iommu, FILE.toml"),
    ];
    for (arguments, code, expected) in cases {
        let output = bench_of("invalidation", arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
        assert!(stdout(&output).is_empty());
    }
}

#[test]
fn bounce_buffers_are_told_by_direction() {
    let common = ["--workload", "pool-4k", "--threads", "1,3", "--profile", "smmuv3,none"];
    let output = bench_of("bounce", &[&common[..], &["--json", "--depth", "8"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).is_empty(), "{}", stderr(&output));
    let json = documented(&output);
    assert_eq!(json["bench"], "bounce");
    let profiles: Vec<_> = json["profiles"].as_array().unwrap().iter().map(|of| &of["name"]).collect();
    assert_eq!(profiles, ["smmuv3", "none"]);
    // Where other programs have the cores, three threads that wait for hardware may take longer than
    // the run gives them, and the report then says so. So time decides in which list a subject
    // stands, but not that it stands in one.
    let mut told: Vec<_> =
        ["results", "skipped"].iter().flat_map(|list| json[*list].as_array().unwrap()).collect();
    let place = |of: &Value| {
        let text = |key: &str| of[key].as_str().unwrap_or("").to_owned();
        let directions = ["to-device", "from-device", "both"];
        let direction = directions.iter().position(|name| of["direction"] == *name).expect("a direction");
        let subject = ["portcullis", "copy", "strict"].iter().position(|name| of["subject"] == *name);
        (direction, of["threads"].as_u64().unwrap(), subject.expect("a subject"), text("profile") != "smmuv3")
    };
    told.sort_by_key(|of| place(of));
    let places: Vec<_> = told.iter().map(|of| place(of)).collect();
    let subjects = [(0, true), (1, true), (2, false), (2, true)];
    let expected = (0..3).flat_map(|direction| {
        let of = move |threads| subjects.map(|(subject, other)| (direction, threads, subject, other));
        [1, 3].into_iter().flat_map(of)
    });
    assert_eq!(places, expected.collect::<Vec<_>>());
    for result in json["results"].as_array().unwrap() {
        let of_all = "depth direction map_ns max min ns_per_op p99_99 subject threads unmap_ns workload";
        let profile = result["subject"] == "strict";
        let keys = keys(result);
        assert_eq!(keys.replace(" profile", ""), of_all);
        assert_eq!(keys.contains(" profile"), profile);
    }
    for skipped in json["skipped"].as_array().unwrap() {
        assert!(skipped["reason"].as_str().unwrap().starts_with("too slow: "), "{skipped}");
    }

    let output = bench_of("bounce", &common);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("pool-4k both (3): a bare copy ") || text.contains("too slow: "), "{text}");
    assert!(text.contains("BounceDevice of a trusted device"), "the subjects are explained: {text}");
}

#[test]
fn wrong_usage_of_bounce_buffers_is_told() {
    let cases: [(&[&str], i32, &str); 6] = [
        (&["--workload", "pool"], 2, "swiotlb-128k"),
        (&["--subject", "xen"], 2, "rotating"),
        (&["--subject", "linux"], 2, "--rival"),
        (&["--threads", "49"], 2, "49 is not in 1..=48"),
        (&["--depth", "0"], 2, "0 is not in 1..=256"),
        (&["--profile", "vtx"], 2, "none, vtd, smmuv3, virtio-iommu, FILE.toml"),
    ];
    for (arguments, code, expected) in cases {
        let output = bench_of("bounce", arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
        assert!(stdout(&output).is_empty());
    }
}

#[test]
fn the_whole_way_is_told_with_its_profile() {
    let output =
        bench_of("path", &["--json", "--workload", "raw-1", "--subject", "portcullis", "--threads", "1"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json = documented(&output);
    assert_eq!(json["bench"], "path");
    assert_eq!(keys(&json["options"]), "own_domains profile quick rival rival_pt subject threads workload");
    assert_eq!(json["profiles"][0]["name"], "none");
    assert_eq!(json["results"][0]["workload"], "raw-1");
}
