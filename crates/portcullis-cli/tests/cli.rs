//! The command as its user meets it: output, messages, exit codes.

#[path = "cli/browser.rs"]
mod browser;
#[cfg(target_os = "linux")]
#[path = "cli/hostile.rs"]
mod hostile;
#[cfg(target_os = "linux")]
#[path = "cli/linux.rs"]
mod linux;
#[path = "cli/recorded.rs"]
mod recorded;
#[path = "cli/report.rs"]
mod report;
#[path = "cli/shape.rs"]
mod shape;
#[cfg(target_os = "linux")]
#[path = "cli/stopped.rs"]
mod stopped;
#[cfg(all(target_os = "linux", feature = "bench"))]
#[path = "cli/whole.rs"]
mod whole;

use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

fn portcullis(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_portcullis")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// What is said to people beside the output, in one line. None of its own is longer than a terminal is wide, but for a single word, and
/// for an excerpt of a file.
fn stderr(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    let is_whole = |line: &str| !line.trim().contains(' ') || line.contains(" | ");
    assert!(text.lines().all(|line| line.chars().count() <= 80 || is_whole(line)), "{text}");
    // A build for tests says of its figures that they are none.
    if cfg!(debug_assertions) { flat(&text).replace(UNOPTIMISED, "").trim().to_owned() } else { flat(&text) }
}

const UNOPTIMISED: &str = "warning: This program was built without optimisation, so its own code costs ten to twenty times what it does when it \
                           is built with `--release`.";

#[test]
fn a_build_without_optimisation_says_what_its_figures_are_worth() {
    let output = portcullis(&["replay", "--limit", "9", "--repeat", "1"]);
    let said = flat(&String::from_utf8(output.stderr).unwrap());
    assert_eq!(said.contains(UNOPTIMISED), cfg!(debug_assertions), "{said}");
}

/// `text` in one line: where lines end may depend on figures and names.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
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

/// All policies, in their order.
const POLICIES: [&str; 9] = [
    "strict",
    "strict-batch",
    "strict-ring",
    "bounce",
    "adaptive",
    "lazy",
    "registered",
    "swiotlb",
    "passthrough",
];

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
        &["replay", "--csv", "--json"],
        &["replay", "--csv", "--full"],
        &["replay", "--repeat", "0"],
        &["frobnicate"],
        &["protect", "eth0"],
        &["protect", "--policy", "strict"],
        &["protect", "eth0", "--policy", "passthrough"],
        &["protect", "eth0", "--policy", "strict", "--window-us", "5"],
        &["protect", "eth0", "--policy", "lazy", "--threshold", "4096"],
        &["protect", "eth0", "--policy", "lazy", "--window-us", "0"],
        &["unprotect"],
        &["status", "--policy", "strict"],
    ] {
        let output = portcullis(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!stderr(&output).is_empty());
    }
    for (arguments, expected) in [
        (["--limit", "0"], "expected a whole number from 1 For more"),
        (
            ["--work", "-5"],
            "expected a time from 1ns to 1000ms with its unit, ns, us or ms: such as 50us, 1.5ms or 96,482ns",
        ),
        (["--work", "5s"], "expected a time from 1ns to 1000ms"),
        (["--work", "0us"], "expected a time from 1ns to 1000ms"),
        (["--profile", "amd"], "portcullis replay TRACE --profile ./amd.toml --format amd-v1"),
        (["--profile", "AMD-Vi"], "docs/replay.md#an-amd-machine"),
        (["--repeat", "101"], "expected a whole number from 1 to 100"),
        (["--policy", "lzy"], "'lazy'"),
        (["--format", "x86"], "a similar value exists: 'x86-"),
        (["--profile", "vdt"], "[possible values: none, vtd, smmuv3, virtio-iommu, FILE.toml]"),
        (["--profile", "vtd2"], "a similar value exists: 'vtd'"),
    ] {
        let message = stderr(&portcullis(&[&["replay"], &arguments[..]].concat()));
        assert!(message.contains(expected), "{arguments:?}: {message}");
    }
}

#[test]
fn without_a_trace_it_replays_the_one_that_ships() {
    let output = portcullis(&["replay", "--full"]);
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
        "Choose ",
        "freed memory, byte-s",
        "--legend",
    ] {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 160), "{text}");
    // The verdict first, then the short table and its words, then those of the other.
    let legend = stdout(&portcullis(&["replay", "--legend", "--limit", "5000"]));
    let sentences = flat(&legend);
    let parts = ["Choose ", "policy ns", "What the table's words mean", "other data open for 1 s:"];
    let more = [
        "What each line of the full table means",
        "freed memory, byte-s: ",
        "a measurement of 2015",
        "other profiles: none, smmuv3, virtio-iommu, or a file of yours; for AMD's",
    ];
    let at = |part: &&str| sentences.find(part).unwrap_or_else(|| panic!("{part} is not in:\n{legend}"));
    assert!(parts.iter().chain(&more).map(at).is_sorted(), "{legend}");
    assert!(legend.lines().all(|line| line.chars().count() <= 80), "{legend}");
}

#[test]
fn what_was_chosen_is_explained() {
    let text = stdout(&portcullis(&["replay", "--explain", "--policy", "adaptive", "--limit", "5000"]));
    for part in [
        "0000:00:03.0, adaptive: what is cheaper, with the waits of vtd",
        "cheaper",
        "chosen",
        "4 KiB",
        "4 KiB+",
        "one in 64",
    ] {
        assert!(flat(&text).contains(part), "{part} is not in:\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let nothing = stdout(&portcullis(&["replay", "--explain", "--policy", "strict", "--limit", "100"]));
    assert!(nothing.contains("Nothing to explain: "), "{nothing}");
    let output = portcullis(&["replay", "--explain", "--json"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

#[test]
fn json_has_the_documented_fields() {
    let output = portcullis(&["replay", "--json", "--profile", "none", "--work", "0.25us"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shape::documented("replay.md").wrong_with(&json), [""; 0]);
    assert_eq!((&json["schema"], &json["tool"]["name"]), (&1.into(), &"portcullis".into()));
    assert_eq!((&json["options"]["work_ns"], &json["options"]["profile"]), (&250.into(), &"none".into()));
    let costs = json["costs"].as_array().unwrap();
    assert_eq!(costs.len(), json["policies"].as_array().unwrap().len());
    for cost in costs {
        let ns = |name: &str| cost[name].as_f64().unwrap();
        assert!(ns("least_ns") <= ns("median_ns") && ns("median_ns") <= ns("most_ns"), "{cost}");
    }
    assert_eq!((&json["profile"], &json["profiles"][0]["name"]), (&"none".into(), &"none".into()));
    assert_eq!(json["work_ns"], 250.0);
    assert_eq!(json["trace"]["events"], 60_000);
    assert_eq!(json["trace"]["devices"].as_array().unwrap().len(), 2);
    let policies = json["policies"].as_array().unwrap();
    let names: Vec<_> = policies.iter().map(|policy| policy["policy"].as_str().unwrap()).collect();
    assert_eq!(names, POLICIES);
    for policy in policies {
        assert_eq!(policy.get("choices").is_some(), policy["policy"] == "adaptive");
        assert_eq!((policy["faults"].as_u64(), policy["violations"].as_u64()), (Some(0), Some(0)));
        assert_eq!(policy["wait_ns_per_op"], 0.0);
    }
    assert_eq!([6, 8].map(|at| policies[at]["relative_to_passthrough"].as_f64()), [Some(1.0); 2]);
    assert_eq!(json["work"], "asked");
    for policy in policies {
        let copies = ["bounce", "adaptive", "swiotlb"].contains(&policy["policy"].as_str().unwrap());
        assert_eq!(policy["peak_bounce_bytes"].as_u64().unwrap() > 0, copies, "{policy}");
    }
    for policy in &policies[3..5] {
        let exposure = &policy["exposure"];
        assert_eq!((&exposure["stale_byte_s"], &exposure["neighbour_byte_s"]), (&0.0.into(), &0.0.into()));
    }
    assert!(!policies[4]["choices"][0]["rows"].as_array().unwrap().is_empty());
    // A swiotlb hides nothing from the device: all memory is open, and no figure says how much that is.
    for policy in &policies[7..] {
        let exposure = &policy["exposure"];
        assert!(exposure["stale_byte_s"].is_null() && exposure["neighbour_byte_s"].is_null(), "{policy}");
    }
}

#[test]
fn json_of_scale_has_the_documented_fields() {
    let output = portcullis(&["scale", "--json", "--cpus", "2,32", "--policy", "lazy,lazy-2015"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shape::documented("scaling.md").wrong_with(&json), [""; 0]);
    assert_eq!((&json["schema"], &json["tool"]["name"]), (&2.into(), &"portcullis".into()));
    assert_eq!((&json["options"]["cpus"], &json["options"]["work_ns"]), (&[2, 32].into(), &Value::Null));
    assert!(!json["results"][3]["lines"].as_array().unwrap().is_empty());
}

/// Buffers that fill their pages leave nothing beside them open, whether they are copied or not: then copies are not advised for
/// that.
#[test]
fn the_advice_of_scale_knows_whether_buffers_share_pages() {
    let advice = |workload: &str| {
        let output = portcullis(&["scale", "--cpus", "16", "--workload", workload]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let said = stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        said.split_once("Choose ").unwrap().1.to_owned()
    };
    assert!(
        advice("nvme").starts_with("strict (less than 0.1 %): no device reaches a buffer after"),
        "{}",
        advice("nvme")
    );
    assert!(advice("nvme").contains("it leaves nothing open"));
    assert!(!advice("memcached").contains("it leaves nothing open"), "{}", advice("memcached"));
}

/// A file may have a name that is not Unicode, and JSON has no bytes.
#[cfg(unix)]
#[test]
fn a_name_that_is_not_unicode_is_told_as_far_as_it_is() {
    use std::os::unix::ffi::OsStrExt;

    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(std::ffi::OsStr::from_bytes(b"a\xffz.trace"));
    std::fs::write(&path, GOOD).unwrap();
    let mut replay = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    let output = replay.args(["replay", "--json", "--repeat", "1"]).arg(&path).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(json["command"].as_str().unwrap().ends_with("a\u{fffd}z.trace'"), "{}", json["command"]);
}

/// A mapping of half a page that lies across a border takes two.
#[test]
fn scale_counts_the_pages_that_recorded_mappings_touch() {
    let costs = |name: &str, offset: u64| {
        let mut text = String::new();
        for n in 0..200_u64 {
            let (us, at) = (n * 10, 0x10_0000 + n * 0x10_000 + offset);
            for (us, what) in [(us, "map"), (us + 5, "unmap")] {
                let phys = if what == "map" { format!("phys_addr={at:x} ") } else { String::new() };
                text += &format!(
                    "t-1 [000] ..... 1.{us:06}: dma_{what}_page: d dir=TO_DEVICE dma_addr={at:x} size=2048 {phys}attrs=\n"
                );
            }
        }
        let path = file(name, text.as_bytes());
        let output = portcullis(&[
            "scale",
            "--workload",
            path.to_str().unwrap(),
            "--cpus",
            "2",
            "--work",
            "1ns",
            "--json",
        ]);
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        json["results"].clone()
    };
    let (inside, across) = (costs("inside.trace", 2048), costs("across.trace", 3000));
    assert_eq!(inside, costs("begins.trace", 0));
    assert_ne!(inside, across);
}

/// A shell makes of it what was typed.
#[cfg(unix)]
#[test]
fn the_command_in_the_json_can_be_given_to_a_shell() {
    for (name, quoted) in [
        ("plain-1.trace", "plain-1.trace"),
        ("two words.trace", "'two words.trace'"),
        ("it's one.trace", r"'it'\''s one.trace'"),
        ("$HOME\"`.trace", "'$HOME\"`.trace'"),
    ] {
        let path = file(name, GOOD.as_bytes());
        let mut replay = Command::new(env!("CARGO_BIN_EXE_portcullis"));
        replay.current_dir(path.parent().unwrap()).args(["replay", name, "--json", "--repeat", "1"]);
        let output = replay.stdin(Stdio::null()).output().unwrap();
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        let command = json["command"].as_str().unwrap();
        assert_eq!(command, format!("portcullis replay {quoted} --json --repeat 1"));
        let words = Command::new("sh").args(["-c", &format!("printf '%s\n' {command}")]).output().unwrap();
        assert_eq!(stdout(&words), format!("portcullis\nreplay\n{name}\n--json\n--repeat\n1\n"));
    }
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
fn no_other_device_than_the_chosen_one_is_named() {
    let [nvme, nic] = ["0000:00:03.0", "0000:00:05.0"];
    for (asked, device, other) in [("03.0", nvme, nic), ("05.0", nic, nvme)] {
        let replayed = |more: &[&str]| {
            let output = portcullis(&[&["replay", "--device", asked], more].concat());
            String::from_utf8(output.stdout).unwrap()
        };
        let text = replayed(&["--explain"]);
        assert!(text.contains(&format!("\ndevices: {device}\n")), "{text}");
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in
            [format!("/devices/{device}/iommu_group/type"), format!("{device}, adaptive: what is cheaper")]
        {
            assert!(words.replace("/ ", "/").contains(&part), "{part}: {text}");
        }
        assert!(!text.contains(other), "{text}");
        let json = replayed(&["--json", "--policy", "bounce", "--policy", "adaptive"]);
        assert!(
            json.contains(&format!("sudo portcullis protect {device} ")) && !json.contains(other),
            "{json}"
        );
        let value: Value = serde_json::from_str(&json).unwrap();
        let choices = &value["policies"].as_array().unwrap()[1]["choices"];
        assert_eq!(choices[0]["device"], 0, "{choices}");
    }
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
    // A pipe is over once it is read, and kept for as many runs as are asked for.
    let names: &[&str] = if cfg!(target_os = "linux") { &["-", "/dev/stdin"] } else { &["-"] };
    for (name, repeat, runs) in names.iter().flat_map(|name| [(name, None, 1), (name, Some("4"), 4)]) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_portcullis"))
            .args(["replay", name, "--json"])
            .args(repeat.iter().flat_map(|repeat| ["--repeat", repeat]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(GOOD.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&json["trace"]["maps"], &json["trace"]["unmaps"]), (&1.into(), &1.into()));
        assert_eq!(json["options"]["repeat"], runs, "{name}");
    }
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
fn a_recording_of_other_things_is_warned_of() {
    let other = "t-1 [000] ..... 1.000003: sched_switch: prev_comm=x\n";
    let path = file("other.trace", (GOOD.to_owned() + &other.repeat(3)).as_bytes());
    let warning = stderr(&portcullis(&["replay", path.to_str().unwrap(), "--csv"]));
    assert!(warning.contains("3 of its 5 events are not used (3 sched_switch)"), "{warning}");
    let path = file("half.trace", (GOOD.to_owned() + &other.repeat(2)).as_bytes());
    let warning = stderr(&portcullis(&["replay", path.to_str().unwrap()]));
    assert!(!warning.contains("not used"), "{warning}");
    let few = flat(&stdout(&portcullis(&["replay", "--limit", "100"])));
    assert!(few.contains("Too few mappings to time: 2"), "{few}");
}

#[test]
fn what_is_mistaken_for_a_trace_is_told() {
    for (name, magic, instead) in [
        ("perf.data", &b"PERFILE2\x68\0\0\0"[..], "`perf script -i FILE`"),
        ("trace.dat", b"\x17\x08\x44tracing6\0", "`trace-cmd report -i FILE`"),
        ("mine.trace.xz", b"\xfd7zXZ\0\0\0\0\0", "`xz -dc FILE`"),
    ] {
        let message = fails(name, magic, &[]);
        assert!(message.contains(instead), "{message}");
    }
    let folder = portcullis(&["replay", env!("CARGO_TARGET_TMPDIR")]);
    assert!(stderr(&folder).contains("is a directory"), "{}", stderr(&folder));
    let nothing = portcullis(&["scale", "--workload", "memcache"]);
    assert!(
        stderr(&nothing).contains("memcached, nvme, nvme-2026, nic, nic-page-pool, swiotlb"),
        "{}",
        stderr(&nothing)
    );
    for (name, contents) in [("empty.trace", &b""[..]), ("prose.trace", b"Dear Sir or Madam,\n")] {
        let message = fails(name, contents, &[]);
        assert!(message.contains("docs/replay.md#recording-a-trace"), "{message}");
    }
}

fn help_fits(command: &[&str]) {
    for help in ["-h", "--help"] {
        let text = stdout(&portcullis(&[command, &[help]].concat()));
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("Usage: portcullis"), "{text}");
    }
}

#[cfg(feature = "bench")]
#[test]
fn help_of_benchmarks_fits_the_terminal() {
    help_fits(&["bench"]);
    for what in ["iova", "pgtable", "invalidation", "bounce", "path"] {
        help_fits(&["bench", what]);
    }
    help_fits(&["calibrate"]);
}

/// What measures takes longer to compile than all the rest, so the first build has none of it.
#[cfg(not(feature = "bench"))]
#[test]
fn a_build_without_benchmarks_says_how_to_get_them() {
    for arguments in [&["bench"][..], &["bench", "path", "--quick"], &["bench", "--help"], &["calibrate"]] {
        let output = portcullis(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let command = format!("--features bench -- {}", arguments[0]);
        assert!(stderr(&output).contains(&command), "{output:?}");
    }
}

#[test]
fn help_fits_the_terminal() {
    for command in
        ["replay", "anonymize", "scale", "protect", "unprotect", "status", "report", "completions", "man"]
    {
        help_fits(&[command]);
    }
    help_fits(&[]);
    let text = flat(&stdout(&portcullis(&["replay", "-h"])));
    assert!(text.contains("[default: the profile's] [possible values: vtd-ss, x86-4,"), "{text}");
    assert!(text.contains("- lazy: The driver has a buffer back at once"), "{text}");
}

#[test]
fn a_double_unmap_is_warned_of() {
    let unmap = GOOD.lines().nth(1).unwrap();
    let text = format!("{GOOD}{unmap}\n");
    let path = file("double.trace", text.as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("line 3"), "{}", stderr(&output));
    assert!(stdout(&output).contains("1 unmap of buffers unmapped before"), "{}", stdout(&output));
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
fn a_mapping_too_large_to_follow_is_refused_and_its_line_named() {
    let text = GOOD.replace("size=512", "size=70368744177664");
    let path = file("huge.trace", text.as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap()]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(1), String::new()));
    for said in ["huge.trace: line 1: ", "--memory allows 2.1 GB: make it less by"] {
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
}

#[test]
fn a_map_without_end_is_noted() {
    let path = file("endless.trace", GOOD.lines().next().unwrap().as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap(), "--strict-parse"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("1 mapping without an end in the file"), "{}", stdout(&output));
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
    // A file of that name may be another one tomorrow.
    let waits = &json["profiles"][0]["waits"];
    assert_eq!((&json["options"]["profile"], &json["profile"]), (&own.to_str().into(), &"vtd".into()));
    assert_eq!((&waits["completion"]["ns"], &waits["doorbell"]["ns"]), (&50_000.0.into(), &0.0.into()));
    assert!(waits["completion"]["source"].as_str().unwrap().contains("a measurement of 2015"), "{waits}");
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
    let output = run("no/such");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no/such: No such file"), "{}", stderr(&output));
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_portcullis"))
        .args(["replay", "--json", "--repeat", "1"])
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
    for page in
        [".TH portcullis 1", ".TH portcullis-replay 1", ".TH portcullis-scale 1", ".TH portcullis-protect 1"]
    {
        assert!(pages.contains(page), "{page}");
    }
    assert_eq!(pages.contains(".TH portcullis-bench-iova 1"), cfg!(feature = "bench"));
}

#[test]
fn what_a_limit_leaves_out_is_no_loss() {
    let promised = format!("# entries-in-buffer/entries-written: 2/2\n{GOOD}");
    let path = file("limited.trace", promised.as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap(), "--limit", "1", "--repeat", "1"]);
    let text = stdout(&output);
    let warnings = stderr(&output);
    assert!(output.status.success() && warnings.is_empty(), "{warnings}");
    assert!(text.contains("Too few mappings to time: 1;"), "{text}");
    assert!(text.contains("stopped after 1 event, as --limit asks"), "{text}");
    assert!(text.contains("1 mapping without an end before the limit"), "{text}");
    assert!(!text.contains("header promises") && !text.contains("in the file"), "{text}");
}

const ATTACH: &str = "py-1 [000] ..... 1.000001: attach_device_to_domain: IOMMU: device=0000:00:04.0\n";

#[test]
fn a_recording_without_mappings_or_of_the_iommu_alone_says_so() {
    let path = file("nothing.trace", ATTACH.as_bytes());
    let output = portcullis(&["replay", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("nothing is mapped in this recording"), "{}", stdout(&output));
    let iommu = "IOMMU: iova=0x0000000000001000 - 0x0000000000002000";
    let text = format!(
        "{ATTACH}py-1 [000] ..... 1.1: map: {iommu} paddr=0x0000000000005000 size=4096\n\
         py-1 [000] ..... 1.2: unmap: {iommu} size=4096 unmapped_size=4096\n"
    );
    let path = file("alone.trace", text.as_bytes());
    let text = stdout(&portcullis(&["replay", path.to_str().unwrap()]));
    for part in ["1 map, 1 unmap", "devices: 0000:00:04.0", "the recording has events of the IOMMU alone"] {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
}

#[test]
fn times_that_are_none_and_events_out_of_order_are_errors() {
    let message = fails("ticks.trace", GOOD.replace("1.00000", "100000").as_bytes(), &[]);
    assert!(message.contains("trace_clock"), "{message}");
    let message = fails("disorder.trace", GOOD.replace("1.000001", "1.500001").as_bytes(), &[]);
    assert!(message.contains("line 2") && message.contains("499.999 ms older"), "{message}");
    // What can be put in order is.
    let path = file("swapped.trace", GOOD.lines().rev().collect::<Vec<_>>().join("\n").as_bytes());
    let text = stdout(&portcullis(&["replay", path.to_str().unwrap(), "--repeat", "1"]));
    assert!(flat(&text).contains("2 events, 1 map, 1 unmap"), "{text}");
    assert!(text.contains("note: 1 event put back in the order of time, by 1 ms at most"), "{text}");
}

/// Runs `replay` with these variables, of those that say how text looks, and no others.
fn looks(variables: &[(&str, &str)], arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    for name in ["LC_ALL", "LC_CTYPE", "LANG", "NO_COLOR", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    let output = command.arg("replay").args(arguments).envs(variables.to_vec()).stdin(Stdio::null()).output();
    stdout(&output.unwrap())
}

#[test]
fn the_verdict_comes_first_and_all_of_it_fits_the_terminal() {
    let text = looks(&[("LANG", "C.UTF-8")], &[]);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let sentences = flat(&text);
    let at = |part: &str| sentences.find(part).unwrap_or_else(|| panic!("{part} is not in:\n{text}"));
    let order = [
        "60,000 events",
        "At most 94us of other CPU work came with each mapping, if the recording's 2 CPUs never idled",
        "Choose ",
        "Under Linux a mapping takes about: strict ",
        "Linux's lazy would save ",
        "Of the strict policies, by the other CPU work for each mapping: ",
        "passthrough), a device reads and writes all memory",
        "On Linux, ",
        "policy ns ",
        "linux-bounce ",
        "The library's own code, for drivers that call it:",
        "linux-strict, linux-bounce and linux-lazy: the code of Linux 6.12",
        "--full",
    ];
    assert!(order.map(at).is_sorted(), "{text}");
    assert!(!looks(&[], &["--limit", "1000", "--work", "1us"]).contains("never idled"), "it was given");
    for policy in POLICIES {
        let mut rows = text.lines().skip_while(|line| !line.starts_with("───"));
        let line = rows.find(|line| line.starts_with(&format!("{policy} "))).unwrap();
        let open = ["lazy", "registered", "swiotlb", "passthrough"].contains(&policy);
        assert_eq!(!line.contains(" none "), open, "{line}");
    }
    // Where all cost next to nothing, the one to choose is the one that leaves nothing open.
    let cheap = flat(&looks(
        &[],
        &["--on", "library", "--policy", "strict-ring,bounce", "--repeat", "1", "--work", "100ms"],
    ));
    let advice =
        "Choose bounce (less than 0.1 %): no device reaches anything but the bytes that are meant for it. ";
    assert!(cheap.contains("If 100ms of other CPU work comes with each mapping (--work), protection from devices takes less than 0.1 % of"), "{cheap}");
    assert!(cheap.contains(advice), "{cheap}");
    // One policy alone has no other to be compared with.
    let alone = flat(&looks(&[], &["--policy", "bounce", "--repeat", "1"]));
    assert!(
        alone.contains(
            "), the only one here that protects, by our module, which has run in QEMU alone so far"
        ),
        "{alone}"
    );
    assert!(alone.contains("the bytes that are meant for it. "), "{alone}");
}

#[test]
fn colours_and_characters_are_those_that_a_terminal_has() {
    let short = ["--limit", "3000"];
    let ascii = looks(&[("LC_ALL", "C"), ("LANG", "de_DE.UTF-8")], &short);
    assert!(ascii.is_ascii() && ascii.contains("+-"), "{ascii}");
    assert!(looks(&[("LC_ALL", "C")], &["--limit", "3000", "--full", "--explain"]).is_ascii());
    let unicode = looks(&[("LC_ALL", ""), ("LC_CTYPE", "en_GB.utf8")], &short);
    assert!(unicode.contains('±') && !unicode.contains('\x1b'), "no terminal, no colours: {unicode}");
    let forced = looks(&[("CLICOLOR_FORCE", "1")], &short);
    assert!(forced.contains("\x1b["), "{forced:?}");
    assert!(!looks(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")], &short).contains('\x1b'));
}

#[test]
fn repetitions_have_a_spread() {
    let json = |arguments: &[&str]| -> Value {
        let fixed = ["replay", "--json", "--limit", "2000", "--policy", "strict"];
        serde_json::from_slice(&portcullis(&[&fixed, arguments].concat()).stdout).unwrap()
    };
    assert_eq!(json(&[])["options"]["repeat"], 3, "it is short");
    assert_eq!(json(&["--repeat", "5"])["options"]["repeat"], 5);
    let once = json(&["--repeat", "1"]);
    assert_eq!(once["costs"][0]["least_ns"], once["costs"][0]["most_ns"]);
}

#[test]
fn figures_come_as_csv() {
    let text = stdout(&portcullis(&["replay", "--csv", "--limit", "6000", "--policy", "strict,lazy"]));
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines.iter().map(Vec::len).collect::<Vec<_>>(), [15; 5], "{text}");
    let names: Vec<&str> = lines.iter().map(|line| line[0]).collect();
    assert_eq!(names, ["policy", "strict", "lazy", "linux-strict", "linux-lazy"]);
    let library =
        portcullis(&["replay", "--csv", "--limit", "6000", "--on", "library", "--policy", "strict"]);
    assert_eq!(stdout(&library).lines().count(), 2);
    assert!(lines[1][2].parse::<f64>().unwrap() > 0.0, "{text}");
    // What no clock of this machine has a part in, as the JSON has it.
    let json = portcullis(&["replay", "--json", "--limit", "6000", "--policy", "strict,lazy"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    for (line, policy) in lines[1..].iter().zip(json["policies"].as_array().unwrap()) {
        for name in
            ["operations", "invalidations", "stale_byte_s", "neighbour_byte_s", "faults", "violations"]
        {
            let column = lines[0].iter().position(|column| *column == name).unwrap();
            let value = policy.get(name).unwrap_or(&policy["exposure"][name]);
            assert_eq!(Some(line[column].parse().unwrap()), value.as_f64(), "{name}: {text}");
        }
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_that_nobody_asked_to_read_is_an_error() {
    let replay = |arguments: &[&str], input: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
        command.args(["replay", "--repeat", "1", "--policy", "strict", "--limit", "1000"]).args(arguments);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        // A writer that writes nothing keeps the pipe open until the program has ended.
        let mut writer = child.stdin.take();
        if let Some(text) = input {
            writer.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
            drop(writer.take());
        }
        let mut said = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
        (
            child.wait().unwrap().code(),
            flat(&said).contains("standard input is a pipe: `portcullis replay -` reads it"),
        )
    };
    assert_eq!(replay(&[], Some(GOOD)), (Some(1), true), "something came");
    assert_eq!(replay(&[], None), (Some(1), true), "something may come");
    assert_eq!(replay(&[], Some("")), (Some(0), false), "nothing can come any more");
    assert_eq!(replay(&["-"], Some(GOOD)), (Some(0), false));
}

#[test]
fn a_file_on_standard_input_is_the_trace() {
    let before = "read by somebody else\n";
    let path = file("redirected.trace", format!("{before}{GOOD}").as_bytes());
    for (arguments, runs) in
        [(&["--repeat", "1"][..], 1), (&["--repeat", "5"], 5), (&["-", "--repeat", "2"], 2)]
    {
        let mut input = std::fs::File::open(&path).unwrap();
        input.seek(SeekFrom::Start(before.len() as u64)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
        let output = command.args(["replay", "--json"]).args(arguments).stdin(input).output().unwrap();
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&json["trace"]["maps"], &json["options"]["repeat"]), (&1.into(), &runs.into()));
        assert!(!stderr(&output).contains("somebody"), "every run begins where the file stands: {output:?}");
    }
}

#[test]
fn a_profile_that_is_printed_can_be_given_back() {
    let waits = |profile: &str| -> Value {
        let arguments =
            ["replay", "--json", "--limit", "2000", "--policy", "strict", "--repeat", "1", "--profile"];
        let output = portcullis(&[&arguments[..], &[profile]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["policies"][0]["wait_ns_per_op"].clone()
    };
    let printed = stdout(&portcullis(&["replay", "--print-profile", "smmuv3"]));
    let path = file("printed.toml", printed.as_bytes());
    assert_eq!(waits(path.to_str().unwrap()), waits("smmuv3"));
    assert_ne!(waits("smmuv3"), waits("vtd"));
    let usual = stdout(&portcullis(&["replay", "--print-profile"]));
    assert!(usual.contains("name = \"vtd\""), "{usual}");
    assert_eq!(portcullis(&["replay", "--print-profile", "vtx"]).status.code(), Some(2));
}

#[test]
fn an_anonymized_recording_can_be_replayed() {
    let input = file("private.trace", GOOD.as_bytes());
    let output = input.with_file_name("public.trace");
    let _ = std::fs::remove_file(&output);
    let (from, to) = (input.to_str().unwrap(), output.to_str().unwrap());
    let done = portcullis(&["anonymize", from, to]);
    assert!(done.status.success(), "{}", stderr(&done));
    assert!(stderr(&done).contains("2 events of 1 device written, 0 lines left out."), "{done:?}");
    let written = std::fs::read_to_string(&output).unwrap();
    assert!(!written.contains("fio") && !written.contains("0000:00:03.0"), "{written}");
    assert_eq!(stdout(&portcullis(&["anonymize", from, "-"])), written);
    let again = portcullis(&["anonymize", from, to]);
    assert_eq!(again.status.code(), Some(1), "what is there is not written over");
    assert!(stderr(&again).starts_with(&format!("portcullis: cannot write {to}: ")), "{}", stderr(&again));
    let json = portcullis(&["replay", to, "--json", "--repeat", "1"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((&json["trace"]["maps"], &json["trace"]["devices"][0]), (&1.into(), &"device1".into()));
    let missing = portcullis(&["anonymize", "no-such-file.trace", "never.trace"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(stderr(&missing).starts_with("portcullis: cannot read no-such-file.trace: "), "{missing:?}");
    assert!(!std::path::Path::new("never.trace").exists());
}

/// A program that can be interrupted, even where a shell has the tests ignore SIGINT, as it does for its background jobs.
#[cfg(target_os = "linux")]
fn interruptible(arguments: &[&str], stdin: Stdio) -> Child {
    told_of_ctrl_c(libc::SIG_DFL, arguments, stdin)
}

/// A program that finds SIGINT handled so.
#[cfg(target_os = "linux")]
fn told_of_ctrl_c(handler: libc::sighandler_t, arguments: &[&str], stdin: Stdio) -> Child {
    use std::os::unix::process::CommandExt;

    let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    command.args(arguments).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: `signal` may be called between fork and exec.
    unsafe {
        command.pre_exec(move || match libc::signal(libc::SIGINT, handler) {
            libc::SIG_ERR => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        })
    };
    command.spawn().unwrap()
}

/// Sends SIGINT as soon as the program handles it, or no longer does, or has ended.
#[cfg(target_os = "linux")]
fn interrupt_once(child: &mut Child, handled: bool) {
    let status = format!("/proc/{}/status", child.id());
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(&status).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        // SIGINT is number 2, the second bit.
        if (u64::from_str_radix(caught.trim(), 16).unwrap() & 2 != 0) == handled {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let pid = child.id().to_string();
    assert!(Command::new("sh").args(["-c", &format!("kill -INT {pid}")]).status().unwrap().success());
}

#[cfg(target_os = "linux")]
fn interrupted(arguments: &[&str]) -> Output {
    let mut child = interruptible(arguments, Stdio::null());
    interrupt_once(&mut child, true);
    child.wait_with_output().unwrap()
}

/// A shell has its background jobs ignore it.
#[cfg(target_os = "linux")]
#[test]
fn where_ctrl_c_is_ignored_it_stays_so() {
    let mut child = told_of_ctrl_c(libc::SIG_IGN, &["replay", "-", "--repeat", "1"], Stdio::piped());
    let mut stdin = child.stdin.take().unwrap();
    // More than a pipe holds: once it is written, the program reads, and would handle the signal.
    let comments = "# nothing\n".repeat(20_000);
    stdin.write_all([GOOD, &comments].concat().as_bytes()).unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("sh").args(["-c", &format!("kill -INT {pid}")]).status().unwrap().success());
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[cfg(target_os = "linux")]
#[test]
fn a_second_ctrl_c_ends_the_program_at_once() {
    use std::os::unix::process::ExitStatusExt;

    // It waits for a recording that does not come.
    let mut child = interruptible(&["replay", "-"], Stdio::piped());
    interrupt_once(&mut child, true);
    interrupt_once(&mut child, false);
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGINT));
}

#[cfg(target_os = "linux")]
#[test]
fn ctrl_c_ends_with_the_results_so_far() {
    let output = interrupted(&["replay", "--repeat", "100"]);
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("stopped by Ctrl-C: these are the figures of 1 run"), "{output:?}");
    assert!(stdout(&output).contains("passthrough "), "{}", stdout(&output));
}

#[cfg(all(target_os = "linux", feature = "bench"))]
#[test]
fn ctrl_c_ends_a_benchmark_with_the_results_so_far() {
    let output = interrupted(&["bench", "iova", "--threads", "1"]);
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stdout(&output).contains("the run was stopped before"), "{}", stdout(&output));
}
