//! The command as its user meets it: output, messages, exit codes.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn portcullis(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_portcullis")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A file of this test run's own.
fn file(name: &str, contents: &[u8]) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, contents).unwrap();
    path
}

/// Runs `replay` on `contents` and expects it to fail with exit code 1 and one message.
fn fails(name: &str, contents: &[u8], arguments: &[&str]) -> String {
    let path = file(name, contents);
    let output = portcullis(&[&["replay", path.to_str().unwrap()], arguments].concat());
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.starts_with("portcullis: "), "{message}");
    assert!(message.contains(name), "the file is named: {message}");
    assert!(stdout(&output).is_empty());
    message
}

const GOOD: &str = "\
            fio-1 [000] ..... 1.000001: dma_map_page: 0000:00:03.0 dir=FROM_DEVICE dma_addr=f000 size=512 phys_addr=5000 attrs=
            fio-1 [001] ..... 1.000002: dma_unmap_page: 0000:00:03.0 dir=FROM_DEVICE dma_addr=f000 size=512 attrs=
";

#[test]
fn alone_it_prints_help() {
    let output = portcullis(&[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("Usage: portcullis"));
    assert!(stdout(&output).contains("replay"));
}

#[test]
fn wrong_usage_exits_with_2() {
    for arguments in [
        &["replay", "--policy", "lax"][..],
        &["replay", "--work", "-5"],
        &["replay", "--limit", "0"],
        &["replay", "a", "b"],
        &["replay", "--json", "--legend"],
        &["frobnicate"],
    ] {
        let output = portcullis(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!stderr(&output).is_empty());
    }
}

#[test]
fn without_a_trace_it_replays_the_one_that_ships() {
    let output = portcullis(&["replay"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    for part in [
        "60,000 events",
        "strict",
        "bounce",
        "adaptive",
        "lazy",
        "swiotlb",
        "passthrough",
        "stale exposure",
        "--legend",
    ] {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 160), "{text}");
    let legend = stdout(&portcullis(&["replay", "--legend"]));
    for part in ["What each line means", "a measurement of 2015", "byte-s"] {
        assert!(legend.contains(part), "{part} is not in:\n{legend}");
    }
}

#[test]
fn what_was_chosen_is_explained() {
    let text = stdout(&portcullis(&["replay", "--explain", "--policy", "adaptive", "--limit", "5000"]));
    for part in
        ["0000:00:03.0, adaptive: nanoseconds", "waits of vtd included", "cheaper", "4.00 KiB", "one in 64"]
    {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 160), "{text}");
    let nothing = stdout(&portcullis(&["replay", "--explain", "--policy", "strict", "--limit", "100"]));
    assert!(nothing.contains("Nothing to explain: "), "{nothing}");
    let output = portcullis(&["replay", "--explain", "--json"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

/// The documented shape: every field, in order, and nothing else.
#[test]
fn json_has_the_documented_fields() {
    let output = portcullis(&["replay", "--json", "--profile", "none", "--work", "250"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let keys = |value: &Value| {
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys.join(" ")
    };
    assert_eq!(keys(&json), "policies profile trace work_ns");
    assert_eq!(keys(&json["trace"]), "bytes_mapped cpus devices events maps name unmaps unpaired");
    assert_eq!(json["profile"], "none");
    assert_eq!(json["work_ns"], 250.0);
    assert_eq!(json["trace"]["events"], 60_000);
    assert_eq!(json["trace"]["devices"].as_array().unwrap().len(), 2);
    let policies = json["policies"].as_array().unwrap();
    let names: Vec<_> = policies.iter().map(|policy| policy["policy"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["strict", "strict-batch", "strict-ring", "bounce", "adaptive", "lazy", "swiotlb", "passthrough"]
    );
    for policy in policies {
        let choices = if policy["policy"] == "adaptive" { "choices " } else { "" };
        assert_eq!(
            keys(policy),
            choices.to_owned()
                + "exposure exposure_counted faults interrupted_calls invalidations iotlb_misses_per_access map_ns operations \
             ops_per_s peak_bounce_bytes peak_iova_bytes peak_table_bytes policy relative_to_passthrough unmap_ns violations \
             wait_ns_per_op walk_cache_misses_per_access"
        );
        assert_eq!(keys(&policy["map_ns"]), "mean p50 p99 p99_99");
        assert_eq!(keys(&policy["unmap_ns"]), "mean p50 p99 p99_99");
        assert_eq!(keys(&policy["exposure"]), "neighbour_byte_s stale_byte_s");
        assert_eq!((policy["faults"].as_u64(), policy["violations"].as_u64()), (Some(0), Some(0)));
        assert_eq!(policy["wait_ns_per_op"], 0.0);
    }
    assert_eq!(policies[7]["relative_to_passthrough"], 1.0);
    for policy in policies {
        let copies = ["bounce", "adaptive", "swiotlb"].contains(&policy["policy"].as_str().unwrap());
        assert_eq!(policy["peak_bounce_bytes"].as_u64().unwrap() > 0, copies, "{policy}");
    }
    for policy in &policies[3..5] {
        let exposure = &policy["exposure"];
        assert_eq!((&exposure["stale_byte_s"], &exposure["neighbour_byte_s"]), (&0.0.into(), &0.0.into()));
    }
    let choices = policies[4]["choices"].as_array().unwrap();
    assert_eq!(keys(&choices[0]), "device rows");
    let row = &choices[0]["rows"][0];
    assert_eq!(keys(row), "choice copied copy_ns direction map_ns mapped most_bytes switches");
    assert_eq!(policies[6]["exposure"], policies[7]["exposure"], "a swiotlb hides nothing from the device");
}

#[test]
fn policies_come_in_the_order_asked_for_and_once() {
    let output = portcullis(&["replay", "--json", "--policy", "lazy,strict-ring,lazy", "--limit", "1000"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<_> = json["policies"].as_array().unwrap().iter().map(|policy| &policy["policy"]).collect();
    assert_eq!(names, ["lazy", "strict-ring"]);
    assert_eq!(json["trace"]["events"], 1000);
    // Measured against passthrough, although that is not shown.
    assert!(json["policies"][0]["relative_to_passthrough"].as_f64().unwrap() > 0.0);
}

#[test]
fn one_device_can_be_chosen() {
    let whole: Value = serde_json::from_slice(&portcullis(&["replay", "--json"]).stdout).unwrap();
    let nvme = portcullis(&["replay", "--json", "--device", "0000:00:03.0"]);
    let nvme: Value = serde_json::from_slice(&nvme.stdout).unwrap();
    let maps = |json: &Value| json["trace"]["maps"].as_u64().unwrap();
    assert!(maps(&nvme) > 0 && maps(&nvme) < maps(&whole));
    let output = portcullis(&["replay", "--device", "0000:00:1f.0"]);
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    assert!(message.contains("no mapping of a device \"0000:00:1f.0\""), "{message}");
    assert!(message.contains("0000:00:03.0, 0000:00:05.0"), "it says which there are: {message}");
}

#[test]
fn standard_input_is_a_trace_too() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_portcullis"))
        .args(["replay", "-", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(GOOD.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((json["trace"]["maps"].as_u64(), json["trace"]["unmaps"].as_u64()), (Some(1), Some(1)));
}

#[test]
fn what_is_no_trace_is_an_error() {
    fails("empty.trace", b"", &[]);
    fails("blank.trace", b"\n\n# tracer: nop\n", &[]);
    let message = fails("prose.trace", b"Dear Sir or Madam,\n", &[]);
    assert!(message.contains("Dear Sir") && message.contains("line 1"), "{message}");
    fails("binary.trace", &[0, 159, 146, 150, 255, 10, 0], &[]);
    let escapes = fails("escape.trace", b"\x1b[31mred\n", &[]);
    assert!(!escapes.contains('\x1b'), "nothing of the file reaches the terminal raw: {escapes:?}");
    let output = portcullis(&["replay", "no-such-file.trace"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no-such-file.trace"));
    let output = portcullis(&["replay", env!("CARGO_TARGET_TMPDIR")]);
    assert_eq!(output.status.code(), Some(1), "a folder");
}

#[test]
fn a_truncated_archive_is_an_error() {
    let whole = include_bytes!("../traces/mixed-nvme-e1000e.trace.zst");
    for len in [5, 1000, whole.len() / 2, whole.len() - 1] {
        let message = fails("cut.trace.zst", &whole[..len], &[]);
        assert!(message.contains("truncated") || message.contains("damaged"), "{message}");
    }
}

#[test]
fn what_does_not_parse_is_counted_and_named_or_an_error_if_asked() {
    let text = format!("{GOOD}this is no event\n{GOOD}");
    let path = file("noise.trace", text.as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    let warning = stderr(&output);
    assert!(warning.contains("warning: ") && warning.contains("line 3"), "{warning}");
    assert!(warning.contains("expected") && warning.contains("this is no event"), "{warning}");
    let message = fails("noise.trace", text.as_bytes(), &["--strict-parse"]);
    assert!(message.contains("line 3"), "{message}");
}

#[test]
fn a_double_unmap_is_warned_of() {
    let unmap = GOOD.lines().nth(1).unwrap();
    let text = format!("{GOOD}{unmap}\n");
    let path = file("double.trace", text.as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("line 3"), "{}", stderr(&output));
    assert!(stdout(&output).contains("1 unmaps of buffers unmapped before"), "{}", stdout(&output));
    fails("double.trace", text.as_bytes(), &["--strict-parse"]);
}

#[test]
fn an_address_beyond_what_tables_hold_is_warned_of() {
    let text = GOOD.replace("phys_addr=5000", "phys_addr=10000000000000") + GOOD;
    let path = file("beyond.trace", text.as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("line 1"), "{}", stderr(&output));
    fails("beyond.trace", text.as_bytes(), &["--strict-parse"]);
}

#[test]
fn a_mapping_too_large_is_warned_of() {
    let text = GOOD.replace("size=512", "size=70368744177664");
    let path = file("huge.trace", text.as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("line 1: mapping"), "{}", stderr(&output));
    let output = portcullis(&["replay", path.to_str().unwrap(), "--strict-parse"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_map_without_end_is_noted() {
    let path = file("endless.trace", GOOD.lines().next().unwrap().as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap(), "--strict-parse"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("1 mappings never end in the file"), "{}", stdout(&output));
}

#[test]
fn a_profile_can_be_a_file_and_is_checked() {
    let trace = file("profiled.trace", GOOD.as_bytes());
    let run =
        |profile: &str| portcullis(&["replay", trace.to_str().unwrap(), "--json", "--profile", profile]);
    let vtd = include_str!("../../portcullis-trace/profiles/vtd.toml");
    let own = file("own.toml", vtd.replace("ns = 710", "ns = 50000").as_bytes());
    let output = run(own.to_str().unwrap());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["policies"][0]["wait_ns_per_op"], 50_000.0);
    let bad = [
        ("missing.toml", vtd.replace("completion", "compleshun"), "compleshun"),
        ("negative.toml", vtd.replace("ns = 710", "ns = -1"), "waits.completion is -1"),
        ("nan.toml", vtd.replace("ns = 710", "ns = nan"), "waits.completion is NaN"),
        ("ways.toml", vtd.replace("iotlb_ways = 8", "iotlb_ways = 0"), "caches.iotlb_ways is 0"),
        ("prose.toml", "what?".into(), "not a profile"),
    ];
    for (name, text, expected) in bad {
        let path = file(name, text.as_bytes());
        let output = run(path.to_str().unwrap());
        assert_eq!(output.status.code(), Some(1), "{name}");
        assert!(stderr(&output).contains(expected) && stderr(&output).contains(name), "{}", stderr(&output));
    }
    let output = run("nosuch");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("none, vtd, smmuv3, virtio-iommu"), "{}", stderr(&output));
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_portcullis"))
        .args(["replay", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).is_empty());
}

#[test]
fn a_shell_and_man_get_what_they_read() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = portcullis(&["completions", shell]);
        assert!(script.status.success());
        let script = String::from_utf8(script.stdout).unwrap();
        assert!(script.contains("replay") && script.contains("profile"), "{shell}");
    }
    let pages = portcullis(&["man"]);
    assert!(pages.status.success());
    let pages = String::from_utf8(pages.stdout).unwrap();
    // A page for the command, and one for each of its own.
    for page in [".TH portcullis 1", ".TH portcullis-replay 1", ".TH portcullis-bench-iova 1"] {
        assert!(pages.contains(page), "{page}");
    }
}
