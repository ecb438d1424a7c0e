//! Whole outputs, compared with files in `tests/whole`: for recordings, each operation, each count and the replay's results; for lines, the
//! result after each small damage. With `PORTCULLIS_WRITE_TABLES=1` the tests write the files.

#[path = "../../../portcullis/tests/golden/mod.rs"]
mod golden;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use portcullis_trace::parse::{Line, Lists, ParseError, parse_line};
use portcullis_trace::replay::{FORMATS, Mode, Options, Paint, Profile, Retry, replay};
use portcullis_trace::{OpKind, ReadOptions, Summary, Trace};

use crate::anonymize::{anonymized, figures_of};
use golden::is_golden;

use crate::common::{Played, read_in};

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

/// All figures of a summary that are not the defaults.
fn counts(summary: &Summary) -> String {
    let usual = [": 0,", ": {},", ": [],", ": None,", ": false,"];
    let all = format!("{summary:#?}\n");
    let lines = all.lines().filter(|line| !usual.iter().any(|end| line.ends_with(end)));
    let lines: Vec<_> = lines.map(str::trim).filter(|line| !line.starts_with("name: ")).collect();
    let mut text = lines.join(" ").replace("Unpaired { }, ", "");
    for recorded in summary.recorded() {
        write!(text, "\n{recorded:?}").unwrap();
    }
    let known = (summary.copies_known(), summary.costs_known(), summary.hidden(), summary.unused());
    write!(text, "\n{known:?} {:?} {} ns", summary.cut(), summary.duration_ns()).unwrap();
    text
}

fn operations(ops: &[Played]) -> String {
    let mut text = String::new();
    for (op, segments) in ops {
        let what = match &op.kind {
            OpKind::Map { id, dir, origin, .. } => {
                let segments: Vec<_> =
                    segments.iter().map(|one| format!("{:x}+{:x}", one.phys, one.len)).collect();
                format!("map {id} {dir:?} {origin:?} {}", segments.join(" "))
            }
            OpKind::Unmap { id } => format!("unmap {id}"),
            OpKind::SyncForCpu { id, offset, len } => format!("sync {id} for the CPU {offset:x}+{len:x}"),
            OpKind::SyncForDevice { id, offset, len } => {
                format!("sync {id} for the device {offset:x}+{len:x}")
            }
        };
        writeln!(text, "{} {} cpu{} device{} {what}", op.line, op.time_ns, op.cpu, op.device.0).unwrap();
    }
    text
}

/// Everything read from a recording.
fn read(bytes: &[u8], options: ReadOptions) -> String {
    match read_in(bytes, options, 7) {
        Ok((ops, summary)) => format!("{}{}\n", operations(&ops), counts(&summary)),
        Err(error) => format!("{error}\n"),
    }
}

/// The results of every policy, except the measuring one, on this hardware.
fn replayed(bytes: &[u8], mut options: Options) -> String {
    options.policies.retain(|mode| *mode != Mode::Adaptive);
    let mut trace = Trace::from_bytes("test", bytes, ReadOptions::default()).unwrap();
    match replay(&mut trace, &options, |_| ()) {
        Ok(report) => {
            let mut text = figures_of(&report);
            for policy in &report.policies {
                for found in
                    [policy.in_force.map(|it| format!("{it:?}")), policy.painted.map(|it| format!("{it:?}"))]
                {
                    found.into_iter().for_each(|found| writeln!(text, "{} {found}", policy.policy).unwrap());
                }
            }
            text
        }
        Err(error) => format!("{error}\n"),
    }
}

fn options(profile: &str) -> Options {
    Options::new(Profile::load(profile).unwrap())
}

#[test]
fn of_each_era_all_is_read_as_before() {
    let eras = path("eras").read_dir().unwrap().map(|entry| entry.unwrap().path());
    let odd = ["odd", "perf", "trace-cmd"].map(|name| path("whole").join(name).with_extension("trace"));
    for file in eras.chain(odd) {
        let bytes = std::fs::read(&file).unwrap();
        let mut text = read(&bytes, ReadOptions::default());
        text += &format!("-- on vtd\n{}", replayed(&bytes, options("vtd")));
        text += &format!("-- without what is private\n{}", String::from_utf8(anonymized(&bytes)).unwrap());
        let name = file.file_stem().unwrap().to_str().unwrap();
        is_golden(path(&format!("whole/{name}.txt")), &text);
    }
}

#[test]
fn options_read_as_before() {
    let bytes = std::fs::read(path("whole/odd.trace")).unwrap();
    let mut text = String::new();
    let mut with = |about: &str, options| writeln!(text, "-- {about}\n{}", read(&bytes, options)).unwrap();
    with("strict", ReadOptions { strict: true, ..ReadOptions::default() });
    with("the first 17", ReadOptions { limit: Some(17), ..ReadOptions::default() });
    for device in ["0000:00:03.0", "0000:00:09.0", "iommu", "absent"] {
        with(device, ReadOptions { device: Some(device.into()), ..ReadOptions::default() });
    }
    is_golden(path("whole/options.txt"), &text);
}

/// On each hardware, with each format, and with a hostile device: the lines that differ from VT-d's.
#[test]
fn replays_come_to_what_they_did() {
    let bytes = std::fs::read(path("whole/odd.trace")).unwrap();
    let usual = replayed(&bytes, options("vtd"));
    let mut text = String::new();
    let mut with = |about: &str, options| {
        writeln!(text, "-- {about}").unwrap();
        let all = replayed(&bytes, options);
        let other = all.lines().filter(|line| !usual.lines().any(|usual| usual == *line));
        other.for_each(|line| writeln!(text, "{line}").unwrap());
    };
    for profile in ["none", "smmuv3", "virtio-iommu"] {
        with(profile, options(profile));
    }
    for format in FORMATS {
        with(format, Options { format: format.into(), ..options("vtd") });
    }
    with("broken", Options { break_invalidation: true, break_copies: true, ..options("vtd") });
    with("painted", Options { paint: Some(Paint { every_ops: 5 }), ..options("vtd") });
    for change_policies in [None, Some(7)] {
        let retry = Some(Retry { every_ops: 3, change_policies });
        with(&format!("retried {change_policies:?}"), Options { retry, ..options("vtd") });
    }
    is_golden(path("whole/replays.txt"), &text);
}

/// A line of each kind.
fn lines() -> Vec<String> {
    let mut seen = BTreeMap::new();
    for file in ["odd", "perf", "trace-cmd"] {
        let text = std::fs::read_to_string(path("whole").join(file).with_extension("trace")).unwrap();
        for line in text.lines() {
            let is_event = line.split_whitespace().any(|word| word.ends_with(':'));
            let raw = line.contains("[FAILED");
            let name = line.split(": ").nth(1).filter(|_| is_event).unwrap_or(line).trim();
            seen.entry((file, name.split(": ").next().unwrap().to_owned(), raw))
                .or_insert_with(|| line.to_owned());
        }
    }
    seen.into_values().collect()
}

fn parsed(line: &[u8]) -> Result<String, String> {
    let mut lists = Lists::default();
    match parse_line(1, line, &mut lists) {
        Ok(Line::Event(event)) => Ok(format!("cpu{} {} ns {:?}", event.cpu, event.time_ns, event.kind)),
        Ok(line) => Ok(format!("{line:?}")),
        Err(ParseError { is_event, expected, .. }) => {
            Err(format!("{} without {expected}", if is_event { "event" } else { "line" }))
        }
    }
}

#[test]
fn lines_are_read_as_before() {
    let mut text = String::new();
    for line in lines() {
        let whole = parsed(line.as_bytes());
        writeln!(text, "{}\n    {whole:?}", line.trim()).unwrap();
        // A missing byte, or a changed one: counts of each result.
        let mut comes_to = BTreeMap::<_, u64>::new();
        for at in 0..line.len() {
            for other in [None, Some(b'0'), Some(b'z'), Some(b' '), Some(b'=')] {
                let mut damaged = line.clone().into_bytes();
                damaged.splice(at..=at, other);
                let parsed = parsed(&damaged);
                let what = match parsed {
                    Ok(_) if parsed == whole => "the same".to_owned(),
                    Ok(other) => {
                        let words = other.split(|c: char| !c.is_ascii_alphabetic());
                        words
                            .clone()
                            .find(|word| word.starts_with(|c: char| c.is_ascii_uppercase()) && word.len() > 3)
                            .unwrap_or("another")
                            .to_owned()
                    }
                    Err(error) => error,
                };
                *comes_to.entry(what).or_default() += 1;
            }
        }
        comes_to.into_iter().for_each(|(what, times)| writeln!(text, "    {times} times {what}").unwrap());
    }
    is_golden(path("whole/lines.txt"), &text);
}
