//! Whole conversations, against files in `tests/whole`: what was typed, all that was printed, standard error behind `!`, and the exit code.
//! What this machine's clock has a part in is `~`. With `PORTCULLIS_WRITE_TABLES=1` the tests write the files.

#[path = "../../../portcullis/tests/golden/mod.rs"]
mod golden;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use golden::is_golden;

/// Recordings, which commands name by their paths below it.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../portcullis-trace/tests")
}

/// Figures of JSON that are measured, or this machine's.
const MEASURED: [&str; 20] = [
    "arch",
    "cpu",
    "cpus",
    "date",
    "interrupted_calls",
    "kernel",
    "least_ns",
    "map_latency",
    "mean",
    "median_ns",
    "most_ns",
    "ops_per_s",
    "os",
    "p50",
    "p99",
    "p99_99",
    "relative_to_passthrough",
    "timer_ns",
    "unmap_latency",
    "version",
];

/// Rows of the wide table, and columns of the CSV, that are measured.
const ROWS: [&str; 8] = [
    "cost, ns",
    "map, mean ns",
    "p50",
    "p99",
    "p99.99",
    "unmap, mean ns",
    "calls interrupted",
    "mappings/s, one CPU",
];
const COLUMNS: std::ops::Range<usize> = 2..7;
const LATER_COLUMNS: std::ops::Range<usize> = 8..10;

const POLICIES: [&str; 10] = [
    "strict",
    "strict-batch",
    "strict-ring",
    "bounce",
    "lazy",
    "swiotlb",
    "passthrough",
    "linux-strict",
    "linux-bounce",
    "linux-lazy",
];

/// How sentences of a verdict begin that have measured figures, or say what would be chosen by these. They stand behind each other.
const SAID: [&str; 8] = [
    "By the times that were measured",
    "Under Linux a mapping takes",
    "Lazy would save",
    "Linux's lazy would save",
    "Of the strict policies",
    "The choice is the same",
    "If the IOMMU's waits",
    "If instructions of the kernel",
];

/// `line` without what is measured.
fn masked(line: &str) -> String {
    let json = line.trim_start().strip_prefix('"').and_then(|rest| rest.split_once("\": "));
    if let Some((name, value)) =
        json.filter(|(name, value)| MEASURED.contains(name) && !value.starts_with('{'))
    {
        let end = if value.ends_with(',') { "," } else { "" };
        return format!("{}\"{name}\": ~{end}", &line[..line.len() - line.trim_start().len()]);
    }
    if json.is_some_and(|(name, _)| name == "verdict") {
        let sentence = |text| if SAID.iter().any(|begin| str::starts_with(text, begin)) { "~" } else { text };
        return line.split("\",\"").map(sentence).collect::<Vec<_>>().join("\",\"");
    }
    // Where it wraps depends on its figures.
    if line.starts_with("The timer's own ") {
        return "The timer's own ~".into();
    }
    let is_policy = |word: &str| POLICIES.contains(&word);
    let cells: Vec<&str> = line.split(',').collect();
    if cells.len() == 15 && is_policy(cells[0]) {
        let is_measured = |at: &usize| COLUMNS.contains(at) || LATER_COLUMNS.contains(at);
        let cell = |(at, cell): (usize, &&str)| {
            if is_measured(&at) && !cell.is_empty() { "~".to_owned() } else { (*cell).to_owned() }
        };
        return cells.iter().enumerate().map(cell).collect::<Vec<_>>().join(",");
    }
    let plain: Vec<char> = anstream::adapter::strip_str(line).to_string().chars().collect();
    let first: String = plain.iter().take_while(|c| **c != ' ').collect();
    if plain.len() == 79 && is_policy(&first) {
        return masked_columns(line);
    }
    // A row of `--sweep`: what each policy costs at a rate.
    if ["ns", "us", "ms"].iter().any(|unit| first.ends_with(unit)) && line.ends_with(" %") {
        return format!("{first} ~");
    }
    // How wide columns are depends on the figures in them.
    if line.starts_with(['│', '┌', '╞', '└']) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let name = line.trim_start_matches('│').split('┆').next().unwrap_or_default().trim();
        let mut text = words.join(" ");
        if ROWS.contains(&name) {
            text = format!("│ {name} ~");
        }
        for run in ["──", "══"] {
            while text.contains(run) {
                text = text.replace(run, &run[..3]);
            }
        }
        return text;
    }
    line.to_owned()
}

/// A row of the short table without its measured columns, 12 to 27 and 45 to 52, not counting what styles take.
fn masked_columns(line: &str) -> String {
    let (mut column, mut in_style) = (0, false);
    let mask = |c: char| {
        in_style |= c == '\x1b';
        let masked =
            if !in_style && ((12..28).contains(&column) || (45..53).contains(&column)) { '~' } else { c };
        column += usize::from(!in_style);
        in_style &= c != 'm';
        masked
    };
    line.chars().map(mask).collect()
}

/// Types `line`: variables, `<FILE` or `|FILE` for standard input, and arguments, with blanks between them.
fn typed(line: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    command.current_dir(folder()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in ["LANG", "LC_CTYPE", "CLICOLOR", "CLICOLOR_FORCE", "NO_COLOR", "COLUMNS"] {
        command.env_remove(name);
    }
    command.env("LC_ALL", "C.UTF-8");
    let mut piped = None;
    for word in line.split(' ').filter(|word| !word.is_empty()) {
        match word.split_once('=') {
            Some((name, value)) if name.starts_with(|c: char| c.is_ascii_uppercase()) => {
                command.env(name, value);
            }
            _ if word == ">/dev/null" => {
                // It can be written, and not read.
                command.stdin(OpenOptions::new().write(true).open("/dev/null").unwrap());
            }
            _ if word.starts_with('<') => {
                command.stdin(File::open(folder().join(&word[1..])).unwrap());
            }
            _ if word.starts_with('|') => {
                piped = Some(std::fs::read(folder().join(&word[1..])).unwrap());
                command.stdin(Stdio::piped());
            }
            _ => {
                command.arg(word);
            }
        }
    }
    let mut child = command.spawn().unwrap();
    if let Some(bytes) = piped {
        let _ = child.stdin.take().unwrap().write_all(&bytes);
    }
    let output = child.wait_with_output().unwrap();
    let mut text = format!("$ {line}\n");
    let lines = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    // What was measured, up to the next sentence that was not; and where the rows of Linux's own modes come from.
    let (mut in_rates, mut in_linux) = (false, false);
    for line in lines(&output.stdout).lines() {
        let begins = |word: &&str| line.is_empty() || line.starts_with(word);
        // The others stand behind these; where they do not, as in `scale`, they are no measurement.
        let begins_rates = SAID[..5].iter().any(|begin| line.starts_with(begin));
        let begins_linux = ["linux-strict, linux-", "linux-strict and", "linux-strict:"]
            .iter()
            .any(|begin| line.starts_with(begin));
        in_rates &= !["With", "Policies", "On Linux"].iter().any(begins);
        in_linux &= !["± is", "+- is", "All figures", "What they mean"].iter().any(begins);
        let ends_timer = line.ends_with("off each call.") && !line.starts_with("The timer's own ");
        if !in_rates && !in_linux && !ends_timer {
            let line = match (begins_rates, begins_linux) {
                (true, _) => "(measured) ~".into(),
                (_, true) => "linux-strict, ~".into(),
                _ => masked(line),
            };
            text += &(line + "\n");
        }
        in_rates |= begins_rates;
        in_linux |= begins_linux;
    }
    lines(&output.stderr).lines().for_each(|line| text += &format!("! {line}\n"));
    if output.status.code() != Some(0) {
        text += &format!("exit {:?}\n", output.status.code());
    }
    text.replace('\x1b', "␛") + "\n"
}

/// Types each of the lines, and returns what was typed and printed.
fn is_said_again(name: &str, lines: &[&str]) -> String {
    let text: String = lines.iter().map(|line| typed(line)).collect();
    is_golden(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/whole").join(name), &text);
    text
}

#[test]
fn help_is_as_before() {
    is_said_again(
        "help.txt",
        &[
            "",
            "--version",
            "--help",
            "record --help",
            "watch --help",
            "replay --help",
            "anonymize -h",
            "scale --help",
            "report --help",
            "protect --help",
            "unprotect --help",
            "status --help",
            "doctor --help",
            "completions --help",
            "man --help",
            "calibrate --help",
            "bench",
            "bench iova --help",
            "bench pgtable --help",
            "bench invalidation --help",
            "bench bounce --help",
            "bench path --help",
            "help report",
            "replay --version",
            "man",
            "replay --print-profile",
            "replay --print-profile smmuv3",
            "replay --print-profile virtio-iommu",
            "replay --print-profile none",
        ],
    );
}

#[test]
fn wrong_arguments_are_refused_as_before() {
    is_said_again(
        "usage.txt",
        &[
            "frobnicate",
            "record --seconds 0",
            "record --device a*",
            "record --replay -o -",
            "record sleep 1",
            "watch --interval x",
            "replay --policy lax",
            "replay --policy",
            "replay --work -5",
            "replay --work 5s",
            "replay --work 1,00",
            "replay --work 1001ms",
            "replay --limit 0",
            "replay --limit x",
            "replay --repeat 0",
            "replay --repeat 101",
            "replay a b",
            "replay --json --legend",
            "replay --csv --json",
            "replay --csv --full",
            "replay --explain --json",
            "replay --memory 1",
            "replay --memory 5X",
            "replay --memory 99999999999G",
            "replay --profile amd",
            "replay --profile vdt",
            "replay --profile ./absent.toml",
            "replay --format x86",
            "replay --calibration absent.json",
            "replay --print-profile amd",
            "replay --print-profile vtd --json",
            "replay --jsn",
            "anonymize",
            "anonymize a",
            "scale --workload absent",
            "scale --workload nvme --work 5us",
            "scale --cpus 0",
            "scale --cpus 257",
            "scale --cpus 1,x",
            "scale --sockets 9",
            "scale --policy absent",
            "scale --calibration absent.json",
            "scale --calibration whole/odd.trace",
            "scale --workload eras",
            "report",
            "report absent.json",
            "report whole/odd.trace",
            "report --compare",
            "completions",
            "completions dsh",
            "protect",
            "protect eth0",
            "protect eth0 --policy passthrough",
            "protect eth0 --policy strict --window-us 5",
            "protect eth0 --policy lazy --threshold 4096",
            "protect eth0 --policy lazy --window-us 0",
            "protect eth0 --policy bounce --threshold 4095",
            "unprotect",
            "unprotect a b",
            "status a b",
            "status --policy strict",
            "doctor a",
            "doctor --seconds 3601",
            "doctor --root absent",
            "bench absent",
            "bench iova --threads 0",
            "bench iova --threads 1,x",
            "bench iova --workload absent",
            "bench iova --subject absent",
            "bench pgtable --format absent",
            "bench invalidation --profile absent",
            "bench path --depth 0",
            "calibrate x",
        ],
    );
}

const ALL: &str =
    "--policy strict,strict-batch,strict-ring,bounce,lazy,swiotlb,passthrough --repeat 1 --work 1000ms";

#[test]
fn replays_are_told_as_before() {
    let of = |lines: &[&str]| lines.iter().map(|line| line.replace("ALL", ALL)).collect::<Vec<_>>();
    let lines = of(&[
        "replay whole/odd.trace ALL",
        "LC_ALL=C replay whole/odd.trace ALL --full --legend --profile smmuv3 --format arm-s1-16k",
        "CLICOLOR_FORCE=1 replay eras/6.12-dma-and-iommu.trace ALL",
        "replay whole/odd.trace ALL --json",
        "replay whole/odd.trace ALL --csv",
        "replay whole/perf.trace ALL --device 0000:00:03.0 --profile virtio-iommu",
        "replay whole/trace-cmd.trace ALL --limit 4 --full",
        "replay whole/odd.trace ALL --device absent",
        "replay whole/odd.trace ALL --device absent --limit 2",
        "replay whole/perf.trace ALL --device 0000:00:03.0 --limit 1",
        "replay whole/odd.trace ALL --strict-parse",
        "replay eras/3.12-maps-without-size.trace ALL",
        "replay eras/7.0-unmaps-alone.trace --repeat 1 --policy strict --work 1s",
        "replay eras/7.0-unmaps-alone.trace --repeat 1 --policy strict --work 1000ms --explain",
        "replay absent.trace",
        "replay eras",
        "replay ../Cargo.toml",
        "replay /dev/null",
        "<whole/perf.trace replay --repeat 1 --policy lazy --work 1000ms",
        "<whole/perf.trace replay - --repeat 1 --policy bounce --work 1000ms",
        "|whole/trace-cmd.trace replay - --repeat 2 --policy bounce --work 1000ms --json",
        "|whole/trace-cmd.trace replay whole/perf.trace --repeat 1 --policy strict --work 1000ms --csv",
        ">/dev/null replay - --repeat 2",
        "replay whole/packed/perf.data",
        "replay whole/packed/trace.dat",
        "replay whole/packed/a.xz",
        "replay whole/packed/a.bz2",
        "replay whole/packed/a.zip",
        "replay whole/packed/whole.gz --repeat 1 --policy strict --work 1000ms --csv",
        "replay whole/packed/cut.gz",
        "|whole/packed/bad.gz replay -",
        "replay whole/packed/magic.zst",
        "replay whole/packed/bad.zst",
        "replay ÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄÄ",
        "<eras replay - --repeat 2",
        "<eras replay -",
    ]);
    is_said_again("replay.txt", &lines.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn eras_are_told_as_before() {
    let mut names: Vec<String> = folder()
        .join("eras")
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let replay =
        |name: &String| format!("replay eras/{name} --repeat 1 --work 1000ms --policy strict,bounce,lazy");
    let lines: Vec<String> = names.iter().map(replay).collect();
    is_said_again("eras.txt", &lines.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn recordings_are_anonymized_as_before() {
    is_said_again(
        "anonymize.txt",
        &[
            "anonymize whole/perf.trace -",
            "<whole/trace-cmd.trace anonymize - -",
            "|whole/trace-cmd.trace anonymize - -",
            "anonymize absent.trace -",
            "anonymize absent.trace whole/perf.trace",
            "anonymize whole/perf.trace whole/perf.trace",
            "anonymize whole/perf.trace absent/perf.trace",
            "anonymize eras -",
            ">/dev/null anonymize - -",
            "<eras anonymize - -",
            "anonymize /dev/null -",
            "<../Cargo.toml anonymize - -",
            "|../Cargo.toml anonymize - -",
        ],
    );
}

#[test]
fn scales_are_told_as_before() {
    is_said_again(
        "scale.txt",
        &[
            "scale --cpus 1,64",
            "scale --workload nvme --cpus 16 --profile smmuv3",
            "scale --workload nic --cpus 32 --sockets 4 --profile virtio-iommu",
            "scale --workload swiotlb --cpus 3 --profile none",
            "scale --workload disk-2008 --cpus 2,128 --policy strict,lazy,lazy-2015,bounce",
            "LC_ALL=C scale --workload nested --cpus 8",
            "scale --workload nic --cpus 2 --policy adaptive,bounce --json",
            "scale --workload whole/odd.trace --cpus 2",
            "scale --workload whole/odd.trace --cpus 4 --work 5us --policy bounce,swiotlb,strict",
            "scale --workload whole/perf.trace --cpus 2 --profile smmuv3",
            "scale --workload eras/6.17-nvme-linked.trace --cpus 96 --work 1ns",
            "scale --workload eras/3.12-maps-without-size.trace",
            "scale --workload /dev/null",
            "CLICOLOR_FORCE=1 scale --workload eras/7.0-network-card.trace --cpus 2 --policy strict",
        ],
    );
}

/// Sentences end at the terminal's edge. Tables are as wide as they are, and so is a word.
#[test]
fn narrow_terminals_get_narrow_sentences() {
    let lines = [
        "--help",
        "replay --help",
        "replay whole/odd.trace ALL --legend",
        "replay whole/perf.trace ALL --full",
        "replay whole/trace-cmd.trace --repeat 1 --policy strict --work 1000ms --explain --sweep",
        "replay whole/trace-cmd.trace --repeat 1 ALL --work 1000ms --sweep",
        "replay eras/3.12-maps-without-size.trace ALL",
        "replay --policy lax",
        "replay absent.trace",
        "scale --workload nic --cpus 1,16",
        "scale --workload absent",
        "report absent.json",
        "protect eth0 --policy bounce --threshold 4095",
        "doctor --root absent",
    ];
    let lines: Vec<String> =
        lines.iter().map(|line| format!("COLUMNS=40 {}", line.replace("ALL", ALL))).collect();
    let text = is_said_again("narrow.txt", &lines.iter().map(String::as_str).collect::<Vec<_>>());
    for printed in text.lines().filter(|line| !line.starts_with("$ ")) {
        // A message's margin is the test's.
        let printed = printed.strip_prefix("! ").unwrap_or(printed);
        // Of all figures, one policy beside its labels is the least.
        let is_drawn = printed.starts_with(['│', '┌', '╞', '└', '─']);
        assert!(!is_drawn || printed.chars().count() <= 43, "{printed}");
        let is_table = printed.trim_start().contains("  ") || is_drawn;
        // Clap's own words, and values that belong together.
        let is_usage = printed.contains(['[', '<']) || printed.contains("given subcommand(s)");
        let is_word = !printed.trim().contains(' ');
        let fits = printed.chars().count() <= 40;
        assert!(fits || is_table || is_usage || is_word, "{printed}");
    }
}

#[test]
fn pages_are_refused_as_before() {
    let golden = "../../portcullis-cli/tests/golden";
    let lines = [
        "report GOLDEN/replay.json GOLDEN/replay.json GOLDEN/replay.json --compare",
        "report GOLDEN/replay.json --compare",
        "report GOLDEN/replay.json --memory 1K",
        "report GOLDEN/replay.json --out eras",
        "|whole/odd.trace report -",
        "<whole/odd.trace report -",
        "report eras",
        "report - -",
    ];
    let lines: Vec<String> = lines.iter().map(|line| line.replace("GOLDEN", golden)).collect();
    is_said_again("report.txt", &lines.iter().map(String::as_str).collect::<Vec<_>>());
}
