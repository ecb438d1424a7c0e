//! Files that were written to harm: no more memory than `--memory` allows, an end, and nothing of them that a terminal obeys.

use std::fmt::Write as _;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{file, portcullis, stderr, stdout};

/// What the program takes besides what it asks its allocator for: its code, its stacks, and freed memory that lies scattered.
const BESIDE: u64 = 40 << 20;

/// Longer than any of these files takes by far, so that what never ends fails, and says which it was.
const PATIENCE: Duration = Duration::from_secs(300);

/// A trace of these lines.
fn trace(lines: impl IntoIterator<Item = String>) -> Vec<u8> {
    let mut text = String::from("# tracer: nop\n");
    for (at, line) in lines.into_iter().enumerate() {
        let _ = writeln!(text, "x-1 [000] ..... 1.{at:09}: {line}");
    }
    text.into_bytes()
}

fn map(device: &str, at: u64, size: u64) -> String {
    format!("dma_map_page: {device} dir=BIDIRECTIONAL dma_addr={at:x} size={size} phys_addr={at:x} attrs=")
}

fn unmap(device: &str, at: u64, size: u64) -> String {
    format!("dma_unmap_page: {device} dir=BIDIRECTIONAL dma_addr={at:x} size={size} attrs=")
}

/// How a run ended, what it said, and the most memory that it had at once.
struct Ran {
    code: i32,
    said: String,
    peak: u64,
}

/// The most memory that a process had at once, as far as it still has any. (What `wait4` tells of a child may be its parent's.)
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    line.and_then(|kib| kib.parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}

/// Runs the command and measures it, as the operating system sees it: each millisecond, until it ends.
fn measured(arguments: &[&str]) -> Ran {
    let mut child = Command::new(env!("CARGO_BIN_EXE_portcullis"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut said = String::new();
        stderr.read_to_string(&mut said).map(|_| said)
    });
    let (mut most, start) = (0, Instant::now());
    let status = loop {
        most = peak(child.id()).max(most);
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("{arguments:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let said = reader.join().unwrap().unwrap();
    assert!(said.len() < 64 << 10, "{} bytes are said", said.len());
    Ran { code: status.code().unwrap_or(-1), said: super::flat(&said), peak: most }
}

/// Checks that the command takes no more than it may, and ends in good order: with a result, or with an error in words.
fn stays_within(mib: u64, name: &str, arguments: &[&str]) -> Ran {
    let memory = format!("{mib}M");
    let ran = measured(&[arguments, &["--memory", &memory]].concat());
    let most = (mib << 20) + BESIDE;
    assert!(ran.peak <= most, "{name}: {} MiB of {mib}: {}", ran.peak >> 20, ran.said);
    assert!((0..=1).contains(&ran.code), "{name}: {}: {}", ran.code, ran.said);
    if ran.code == 1 {
        assert!(ran.said.contains("portcullis: "), "{name}: {}", ran.said);
    }
    ran
}

/// The error that says what to leave out.
fn is_refused(ran: &Ran, wants: &str) {
    let options = ["--device", "--limit", "--policy"];
    assert!(ran.code == 1 && ran.said.contains(wants), "{}", ran.said);
    assert!(options.iter().all(|option| ran.said.contains(option)), "{}", ran.said);
}

const GIB: u64 = 1 << 30;

/// A list of `n` pieces of `size` bytes.
fn list(n: u64, size: u64) -> String {
    let all =
        |of: &dyn Fn(u64) -> u64| (0..n).map(|at| format!("{:#x}", of(at))).collect::<Vec<_>>().join(",");
    let (addrs, sizes) = (all(&|at| at * size), all(&|_| size));
    let numbers = format!("nents={n}/{n} ents={n}/{n}");
    format!(
        "dma_map_sg: d dir=TO_DEVICE {numbers} dma_addrs={{{addrs}}} sizes={{{sizes}}} phys_addrs={{{addrs}}} attrs="
    )
}

fn iommu_map(at: u64) -> String {
    format!("map: IOMMU: iova={0:#x} paddr={0:#x} size=1073741824", at << 30)
}

/// A name, what makes a hostile recording of its kind, and whether 384 MiB must be too little for it.
type Recording = (&'static str, fn() -> Vec<u8>, bool);

fn recordings() -> [Recording; 17] {
    [
        ("one32g", || trace([map("d", 0, 32 * GIB)]), true),
        ("eight3g", || trace((1..9).map(|at| map("d", at << 32, 3 * GIB))), true),
        ("devices", || trace((0..4000).map(|at| map(&format!("d{at}"), at << 12, 512))), true),
        (
            "long-names",
            || trace((0..300).map(|at| map(&format!("{at}{}", "n".repeat(900_000)), at << 12, 512))),
            true,
        ),
        ("live", || trace((0..60_000).map(|at| map("d", at << 13, 64))), true),
        ("far", || trace((0..30_000).map(|at| map("d", at << 21, 64))), true),
        ("farther", || trace((0..4000).map(|at| map("d", at << 36, 64))), true),
        ("sizes", || trace((1..3000).map(|at| map("d", at << 24, at * 4099))), true),
        ("huge-list", || trace((0..2).map(|_| list(128, GIB))), true),
        ("long-list", || trace([list(30_000, 4096)]), false),
        ("same", || trace((0..60_000).map(|_| map("d", 1 << 20, 512))), true),
        ("runs", || trace((0..64).map(iommu_map)), true),
        ("unpaired", || trace((0..100_000).map(|at| unmap("d", at << 14, 4096))), false),
        ("names", || trace((0..50_000).map(|at| format!("event{at}: whatever"))), false),
        ("bytes", || (0..4_000_000_u64).map(|at| ((at * 2_654_435_761) >> 11) as u8).collect(), false),
        ("endless", || vec![b'['; 64 << 20], false),
        ("brackets", || trace((0..8).map(|_| "[0".repeat(500_000))), false),
    ]
}

#[test]
fn a_recording_takes_no_more_memory_than_it_may() {
    for (name, make, refused) in recordings() {
        let path = file(&format!("hostile-{name}.trace"), &make());
        let path = path.to_str().unwrap();
        let ran = stays_within(384, name, &["replay", path, "--repeat", "1"]);
        assert!(ran.code == 1 || !refused, "{name} fits: {}", ran.said);
        if refused {
            is_refused(&ran, "limit");
        }
        let out = format!("{path}.public");
        let _ = std::fs::remove_file(&out);
        stays_within(96, name, &["anonymize", path, &out]);
        stays_within(160, name, &["scale", "--workload", path, "--cpus", "1", "--policy", "strict-ring"]);
    }
}

#[test]
fn what_a_recording_wants_is_told_and_what_to_leave_out_helps() {
    let path = file("hostile-wants.trace", &trace((0..2000).map(|at| map(&format!("d{at}"), at << 12, 512))));
    let path = path.to_str().unwrap();
    let few =
        |more: &[&str]| stays_within(256, "wants", &[&["replay", path, "--repeat", "1"], more].concat());
    let ran = few(&[]);
    is_refused(&ran, "devices and");
    assert!(
        ran.said.contains("hostile-wants.trace: line ") && ran.said.contains("--memory allows 268.4 MB"),
        "{}",
        ran.said
    );
    for more in [&["--device", "d1999"][..], &["--limit", "20"], &["--policy", "passthrough"]] {
        assert_eq!(few(more).code, 0, "{more:?}");
    }
    assert_eq!(stays_within(8192, "wants", &["replay", path, "--repeat", "1", "--limit", "1000"]).code, 0);
}

/// What is packed to next to nothing, once and again.
#[test]
fn an_archive_without_end_is_given_up() {
    // A frame of 128 KiB blocks, each of one byte that is repeated: RFC 8878, 3.1.1.2.
    let mut zstd = vec![0x28, 0xb5, 0x2f, 0xfd, 0, 0x58];
    for _ in 0..10_000 {
        let block: u32 = (128 << 10) << 3 | 1 << 1;
        zstd.extend_from_slice(&block.to_le_bytes()[..3]);
        zstd.push(b'\n');
    }
    // The largest window: 3.1.1.1.2.
    let window = [0x28, 0xb5, 0x2f, 0xfd, 0, 0xff, 1, 0, 0];
    for (name, bytes) in [("bomb.zst", &zstd[..]), ("window.zst", &window)] {
        let path = file(name, bytes);
        let path = path.to_str().unwrap();
        for arguments in [&["replay", path][..], &["anonymize", path, "-"], &["scale", "--workload", path]] {
            let ran = stays_within(128, name, arguments);
            assert!(ran.code == 1 && ran.said.contains(name), "{}", ran.said);
        }
    }
}

#[test]
fn times_at_the_end_and_leaps_end() {
    let line = |time: &str, event: String| format!("x-1 [000] ..... {time}: {event}\n");
    let (first, second) = ("0.000000001", "18446744073.709551615");
    for (name, times) in [
        ("end", [second; 4]),
        ("leap", [first, first, second, second]),
        ("year", [first, first, "31536000.0", "93312000.5"]),
    ] {
        // Under every policy a buffer lives, and one ends, while time leaps.
        let [a, b, c, d] = times;
        let text = ["d", "e"].map(|device| {
            [
                line(a, map(device, 0x1000, 4096)),
                line(a, map(device, 0x8000, 4096)),
                line(b, unmap(device, 0x8000, 4096)),
            ]
            .concat()
        });
        let end = line(c, unmap("d", 0x1000, 4096)) + &line(d, map("d", 0x3000, 4096));
        let path = file(&format!("time-{name}.trace"), (text.concat() + &end).as_bytes());
        let ran = stays_within(256, name, &["replay", path.to_str().unwrap(), "--repeat", "1"]);
        assert_eq!(
            (ran.code, ran.said.contains("expected a time up to")),
            (0, name != "year"),
            "{name}: {}",
            ran.said
        );
    }
}

/// What a few events ask to be done page by page is bounded by how many they are.
#[test]
fn a_few_events_do_not_keep_a_replay_busy() {
    let huge = 2_u64 << 30;
    let sync = format!("dma_sync_single_for_cpu: d dir=BIDIRECTIONAL dma_addr=0 size={huge} attrs=");
    let syncs = trace(std::iter::once(map("d", 0, huge)).chain((0..2000).map(|_| sync.clone())));
    let pairs = trace((0..2000).flat_map(|_| [map("d", 0, huge), unmap("d", 0, huge)]));
    for (name, bytes) in [("syncs", syncs), ("pairs", pairs)] {
        let path = file(&format!("busy-{name}.trace"), &bytes);
        let ran = stays_within(
            512,
            name,
            &["replay", path.to_str().unwrap(), "--repeat", "1", "--policy", "strict"],
        );
        is_refused(&ran, "followed one by one");
    }
}

/// All that a terminal or a page could take for its own.
const CODES: &str = "\u{1b}]0;pwn\u{7}\u{1b}[2J\u{9b}31m\r\u{8}\u{7f}\u{202e}\u{2066}<img src=x onerror=alert(1)>\u{200b}\"'&";

/// `text` without the styles of the program's own and of clap's: bold, underlined, and the sixteen colours.
fn unstyled(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once('m') {
            Some((style, rest)) if style.len() <= 2 && style.bytes().all(|byte| byte.is_ascii_digit()) => {
                plain.push_str(rest)
            }
            _ => plain += &format!("\u{1b}[{part}"),
        }
    }
    plain
}

/// Whether something reached the output that should have been made visible.
fn is_clean(what: &str, text: &str) {
    let raw = text.chars().find(|c| {
        c.is_control() && *c != '\n'
            || matches!(c, '\u{200b}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    });
    assert!(raw.is_none(), "{what}: {raw:?} in {text:?}");
}

#[test]
fn nothing_of_a_file_is_a_command_to_a_terminal_or_a_page() {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("codes");
    let _ = std::fs::create_dir(&folder);
    // Names of files may hold all but a slash.
    let at = |name: &str, contents: &[u8]| {
        let path = folder.join(format!("{CODES}{name}"));
        std::fs::write(&path, contents).unwrap();
        path.to_str().unwrap().to_owned()
    };
    // The name of a device ends at a blank.
    let device = CODES.replace([' ', '\r'], "\u{a0}");
    let pairs = (0..200).flat_map(|_| [map(&device, 0x1000, 4096), unmap(&device, 0x1000, 4096)]);
    let recording = at("a.trace", &trace(pairs));
    let odd = at(
        "odd.trace",
        &trace([
            format!("dma_map_page: {device} dir={device}"),
            format!("{device}: x"),
            unmap(&device, 0, 1),
        ]),
    );
    let none = at("none.trace", format!("{CODES}\n").as_bytes());
    let escaped: String = CODES.chars().map(|c| format!("\\u{:04x}", u32::from(c))).collect();
    let vtd = include_str!("../../../portcullis-trace/profiles/vtd.toml");
    let said = vtd.lines().map(|line| match line.split_once(" = \"") {
        Some((name, _)) if name.contains('{') => format!("{name} = \"{escaped}\" }}"),
        Some((name, _)) if name != "format" => format!("{name} = \"{escaped}\""),
        _ => line.to_owned(),
    });
    let profile = at("profile.toml", said.collect::<Vec<_>>().join("\n").as_bytes());
    let bad_profile = at("bad.toml", format!("{vtd}\n# {CODES}\nx{CODES}").as_bytes());
    let unknown = at("unknown.toml", format!("\"{escaped}\" = 1\n{vtd}").as_bytes());
    let figure = format!("{{\"value\": 10.0, \"source\": \"{escaped}\"}}");
    let figures = [
        "near_ns",
        "far_ns",
        "atomic_ns",
        "pause_ns",
        "copy_hot_ns",
        "copy_cold_ns",
        "copy_remote_ns",
        "socket_copy_gb_per_s",
        "walk_read_ns",
    ];
    let figures: String = figures.iter().map(|name| format!(", \"{name}\": {figure}")).collect();
    let calibration = at("calibration.json", format!("{{\"machine\": \"{escaped}\"{figures}}}").as_bytes());
    let bad_calibration = at("bad.json", format!("{{\"machine\": \"\", \"{escaped}\": 1}}").as_bytes());
    let replayed = portcullis(&["replay", &recording, "--json", "--profile", &profile, "--device", &device]);
    let json = stdout(&replayed);
    assert_eq!(replayed.status.code(), Some(0), "{}", stderr(&replayed));
    is_clean("json", &json);
    // What the file said is in it all the same.
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(value["trace"]["devices"][0], device);
    assert_eq!(value["profiles"][0]["about"], CODES);
    let result = at("result.json", json.as_bytes());
    let scaled = stdout(&portcullis(&[
        "scale",
        "--workload",
        &recording,
        "--profile",
        &profile,
        "--calibration",
        &calibration,
        "--cpus",
        "2",
        "--json",
    ]));
    is_clean("scale's json", &scaled);
    let scale = at("scale.json", scaled.as_bytes());
    // As another program may write them.
    let raw_result = at("raw.json", serde_json::to_string(&value).unwrap().as_bytes());
    let wrong = at(
        "wrong.json",
        json.replace("\"policy\": \"strict\"", &format!("\"policy\": \"{escaped}\"")).as_bytes(),
    );
    let public = at("public.trace", b"");
    std::fs::remove_file(&public).unwrap();
    let page = at("page.html", b"");
    let absent = at("absent", b"");
    std::fs::remove_file(&absent).unwrap();
    let out_of = format!("{absent}/no-folder");
    for arguments in [
        &[
            "replay",
            &recording,
            "--explain",
            "--legend",
            "--profile",
            &profile,
            "--calibration",
            &calibration,
        ][..],
        &["replay", &recording, "--full"],
        &["replay", &recording, "--csv"],
        &["replay", &recording, "--device", CODES],
        &["replay", &recording, "--profile", &bad_profile],
        &["replay", &recording, "--profile", &unknown],
        &["replay", &recording, "--profile", &absent],
        &["replay", &recording, "--profile", CODES],
        &["replay", &recording, "--policy", CODES],
        &["replay", &recording, "--work", CODES],
        &["replay", &recording, CODES],
        &["replay", &odd],
        &["replay", &odd, "--json"],
        &["replay", &odd, "--strict-parse"],
        &["replay", &none],
        &["replay", &absent],
        &["replay", folder.to_str().unwrap()],
        &["anonymize", &recording, "-"],
        &["anonymize", &recording, &public],
        &["anonymize", &recording, &out_of],
        &["anonymize", &none, "-"],
        &[
            "scale",
            "--workload",
            &recording,
            "--profile",
            &profile,
            "--calibration",
            &calibration,
            "--cpus",
            "2",
            "--explain",
        ],
        &["scale", "--calibration", &bad_calibration],
        &["scale", "--calibration", &absent],
        &["scale", "--workload", &absent],
        &["scale", "--workload", &odd],
        &["report", &result, &scale, &raw_result],
        &["report", &result, &raw_result, "--compare"],
        &["report", &result, &scale, "--compare"],
        &["report", &result, "--out", &page],
        &["report", &result, "--out", &out_of],
        &["report", &wrong],
        &["report", &recording],
        &["report", &absent],
        &["bench", CODES],
        &["calibrate", CODES],
        &[CODES],
    ] {
        // As to a terminal: into a pipe, some would be left out that reach it.
        let output = Command::new(env!("CARGO_BIN_EXE_portcullis"))
            .args(arguments)
            .env("CLICOLOR_FORCE", "1")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let what = format!("{arguments:?}");
        let said = unstyled(&String::from_utf8(output.stderr).unwrap());
        is_clean(&what, &said);
        let printed = unstyled(&String::from_utf8(output.stdout).unwrap());
        is_clean(&what, &printed);
        if arguments[0] == "report" {
            assert!(!printed.contains("<img"), "{what}: {printed}");
        }
        assert!(
            !(said.is_empty() && printed.is_empty()) || arguments.contains(&"--csv"),
            "{what} says nothing"
        );
        assert!(!said.contains("panicked"), "{what}: {said}");
    }
    is_clean("page", &std::fs::read_to_string(&page).unwrap());
    is_clean("public", &std::fs::read_to_string(&public).unwrap());
    assert!(!unstyled(CODES).is_empty() && unstyled(CODES).contains("\u{1b}[2J"), "that is no style");
    let explained = stdout(&portcullis(&["replay", &recording, "--explain"]));
    assert!(explained.contains(r"\u{1b}]0;pwn\u{7}"), "{explained}");
}

#[test]
fn settings_and_results_have_limits() {
    let deep = "[".repeat(200_000);
    let wide = format!("about = \"{}\"", "x".repeat(300 << 10));
    let vtd = include_str!("../../../portcullis-trace/profiles/vtd.toml");
    let ways = |ways: &str| {
        vtd.replace("iotlb_ways = 8", ways).replace("iotlb_entries = 128", "iotlb_entries = 65536")
    };
    let trace = file("settings.trace", super::GOOD.as_bytes());
    for (name, text, expected) in [
        ("deep.toml", format!("name = {deep}"), "is not a profile"),
        ("wide.toml", wide, "more than 262,144 bytes"),
        ("ways.toml", ways("iotlb_ways = 1000000"), "caches.iotlb_ways is 1000000, expected 1 to 256"),
        ("sets.toml", vtd.replace("iotlb_entries = 128", "iotlb_entries = 1000000"), "expected 1 to 65,536"),
        (
            "walks.toml",
            vtd.replace("walk_cache_entries = 64", "walk_cache_entries = 1000000"),
            "expected 1 to 65,536",
        ),
    ] {
        let path = file(name, text.as_bytes());
        let ran = stays_within(
            128,
            name,
            &["replay", trace.to_str().unwrap(), "--profile", path.to_str().unwrap()],
        );
        assert!(ran.code == 1 && ran.said.contains(expected), "{name}: {}", ran.said);
    }
    for endless in ["/dev/zero", "/dev/urandom"] {
        for arguments in [
            &["replay", trace.to_str().unwrap(), "--profile", endless][..],
            &["scale", "--calibration", endless],
            &["report", endless],
        ] {
            let ran = stays_within(128, endless, arguments);
            assert!(ran.code == 1 && ran.said.contains(endless), "{arguments:?}: {}", ran.said);
        }
    }
    let path = file("deep.json", format!("{{\"machine\": {deep}").as_bytes());
    for arguments in
        [&["scale", "--calibration", path.to_str().unwrap()][..], &["report", path.to_str().unwrap()]]
    {
        let output = portcullis(arguments);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("deep.json"), "{}", stderr(&output));
    }
}
