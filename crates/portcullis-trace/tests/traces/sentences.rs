//! The text of errors, with file contents made visible.

use std::io;

use portcullis::SetupError;
use portcullis::addr::PhysAddr;
use portcullis::dma::{DmaMapError, DmaUnmapError};
use portcullis_trace::anonymize::AnonymizeError;
use portcullis_trace::budget::Over;
use portcullis_trace::parse::ParseError;
use portcullis_trace::replay::{FORMATS, Profile, ProfileError, ReplayError};
use portcullis_trace::{Format, TraceError, Warning};

use crate::said::{assert_said, pair};

/// A name that would clear a terminal, and its escaped form.
const ODD: &str = "a\u{1b}[2J";

const EXPECTED: &str = "Expected is the text of Linux's tracefs, `perf script` or `trace-cmd report`, plain, gzip or zstd: \
    docs/replay.md#recording-a-trace says how to record it";

fn odd() -> String {
    ODD.to_owned()
}

fn source() -> io::Error {
    io::Error::other("no luck")
}

const OVER: Over = Over { used: (4 << 20) + 1, wanted: 3 << 20, limit: 7 << 20 };

#[test]
fn each_error_of_a_trace_says_where_it_is() {
    let (name, format) = (odd, Format::Gzip);
    let warning = Warning { line: 7, expected: "a time".into(), found: "\"x\"".into() };
    let of = |path: &str| path.into();
    let said = [
        pair(TraceError::Io { path: of(ODD), source: source() }, r"cannot read a\u{1b}[2J: no luck"),
        pair(TraceError::Directory { path: of(ODD) }, r"a\u{1b}[2J is a directory: name the recording itself"),
        pair(
            TraceError::Binary { name: name(), what: "a book", instead: "`cat`" },
            r"a\u{1b}[2J is a book, which is not read: `cat` makes the text that is",
        ),
        pair(
            TraceError::Empty { name: name(), lines: 1 },
            r"a\u{1b}[2J is empty: it has no trace event in 1 line. ".to_owned()
                + "Nothing was mapped meanwhile, or none of the events dma:* and iommu:* was switched on, or the IOMMU was off and this kernel, \
                   before Linux 6.12, records nothing then. "
                + EXPECTED,
        ),
        pair(
            TraceError::NotATrace { name: name(), line: 7, found: "x".into() },
            format!(
                r#"a\u{{1b}}[2J is not a trace: no line is an event ("TASK-PID [CPU] TIME: EVENT: ..."), and line 7 is "x". {EXPECTED}"#
            ),
        ),
        pair(
            TraceError::TruncatedArchive { name: name(), format, after_bytes: 8, line: 7, source: source() },
            r"a\u{1b}[2J: truncated gzip archive: it ends after 8 bytes, in line 7 of its text, where more must follow",
        ),
        pair(
            TraceError::CorruptArchive { name: name(), format, after_bytes: 1, line: 7, source: source() },
            r"a\u{1b}[2J: damaged gzip archive within its first 1 byte, line 7 of its text: no luck",
        ),
        pair(
            TraceError::Clock { name: name(), line: 7, found: "12".into() },
            r#"a\u{1b}[2J: line 7: the time "12" is a count without a unit, as of the trace clocks counter and x86-tsc: "#.to_owned()
                + "choose one that counts seconds before recording (echo mono > /sys/kernel/tracing/trace_clock)",
        ),
        pair(
            TraceError::Disorder { name: name(), line: 7, cpu: 3, before: 5, back_ns: 1_234_567 },
            r"a\u{1b}[2J: line 7: an event of CPU 3 is 1.235 ms older than one of CPU 5 that stands above it: ".to_owned()
                + "events must stand in the order of time, as /sys/kernel/tracing/trace has them, but for 1 ms (and 16 MiB of lines); in \
                   the files of per_cpu, one behind the other, they do not",
        ),
        pair(TraceError::Memory { name: name(), line: 7, over: OVER }, format!(r"a\u{{1b}}[2J: line 7: {OVER}")),
        pair(
            TraceError::Bomb { name: name(), format: Format::Zstd, after_bytes: 1, text_bytes: 9000, line: 7 },
            r"a\u{1b}[2J: 1 byte of this zstd archive make more than 9,000 bytes of text, by line 7, as no recording's do: what it "
                .to_owned()
                + "holds can be read from a file that is not packed",
        ),
        pair(
            TraceError::Strict { name: name(), warning },
            r#"a\u{1b}[2J: line 7: expected a time, found "x""#,
        ),
    ];
    assert_said(&said, &[include_str!("../../src/error.rs")]);
    let of_lines = ParseError { is_event: true, expected: "a time", found: b"\x1b\xff" };
    let parse = pair(of_lines, "expected a time, found \"\\u{1b}\u{fffd}\"");
    assert_said(&[parse], &[include_str!("../../src/parse/mod.rs")]);
    let anonymize = [
        pair(AnonymizeError::Write(source()), "no luck"),
        pair(
            AnonymizeError::Trace(TraceError::Directory { path: of("a") }),
            "a is a directory: name the recording itself",
        ),
    ];
    assert_said(&anonymize, &[include_str!("../../src/anonymize.rs")]);
}

#[test]
fn each_error_of_a_replay_says_where_it_is() {
    let (line, name, error) = (7, odd, DmaUnmapError::OtherQueue);
    let full = "the queue's ring is full: commit what was unmapped, and unmap its oldest mapping";
    let said = [
        pair(
            ReplayError::Trace(TraceError::Directory { path: "a".into() }),
            "a is a directory: name the recording itself",
        ),
        pair(ReplayError::Map { line, error: DmaMapError::Full }, format!("line 7: map failed: {full}")),
        pair(ReplayError::Unmap { line, error }, "line 7: unmap failed: a mapping of another queue"),
        pair(ReplayError::Commit { line, error }, "line 7: commit failed: a mapping of another queue"),
        pair(ReplayError::Sync { line, error }, "line 7: sync failed: a mapping of another queue"),
        pair(
            ReplayError::Queue { line, error: SetupError::LeafLevels { levels: 5, max: 3 } },
            "line 7: queue: the format has leaves at 1 to 3 levels, not at 5",
        ),
        pair(
            ReplayError::Memory { name: name(), line, devices: 1, mappings: 3000, over: OVER },
            format!(r"a\u{{1b}}[2J: line 7: with 1 device and 3,000 live mappings, {OVER}"),
        ),
        pair(
            ReplayError::TooManyPages { name: name(), line, pages: 9000, most: 8000 },
            r"a\u{1b}[2J: line 7: 9,000 pages and timers would be followed one by one by now, 8,000 are possible for a recording of so few "
                .to_owned()
                + "events: --device, --limit or --policy make it less",
        ),
        pair(
            ReplayError::TooManyBytes {
                name: name(),
                line,
                policy: "bounce",
                wanted: 110_592,
                most: 11 << 20,
                memory: Some(128 << 20),
            },
            r"a\u{1b}[2J: line 7: bounce keeps the bytes of what is mapped, and their copies: it needs 111 kB more, and may "
                .to_owned()
                + "have 11.5 MB in all (its part of half of --memory, 4.3 GB at the most): try --memory 128M, or make it less by \
                   --device, --limit or --policy",
        ),
        pair(
            ReplayError::PoolsMemory { line, phys: PhysAddr::new(0x5000) },
            "line 7: mapping: memory at 0x5000, where the replay has its bounce buffers",
        ),
        pair(
            ReplayError::Setup(SetupError::LeafLevels { levels: 5, max: 3 }),
            "the format has leaves at 1 to 3 levels, not at 5",
        ),
        pair(
            ReplayError::NoSuchFormat { name: name() },
            format!(r#"no page-table format is called "a\u{{1b}}[2J": there are {}"#, FORMATS.join(", ")),
        ),
        pair(
            ReplayError::TooManyDevices { number: 8 },
            "the trace names more than 8 devices: an IOMMU has 65,535 domains",
        ),
    ];
    assert_said(&said, &[include_str!("../../src/replay/mod.rs")]);
}

#[test]
fn each_error_of_a_profile_says_what_is_wrong() {
    let unreadable = Profile::parse(ODD, "\u{1b}").unwrap_err();
    let ProfileError::Parse { source: why, .. } = &unreadable else { panic!("{unreadable}") };
    let why = why.to_string().replace('\u{1b}', r"\u{1b}");
    let figure =
        ProfileError::Figure { path: odd(), what: "caches.iotlb_ways", value: 0.0, expected: "1 to 256" };
    let said = [
        pair(
            ProfileError::Unknown { name: odd() },
            r#"no profile "a\u{1b}[2J": there are none, vtd, smmuv3, virtio-iommu, or name a TOML file"#,
        ),
        pair(ProfileError::Io { path: odd(), source: source() }, r"profile a\u{1b}[2J: no luck"),
        pair(figure, r"profile a\u{1b}[2J: caches.iotlb_ways is 0, expected 1 to 256"),
        pair(unreadable, format!(r"profile a\u{{1b}}[2J is not a profile: {why}")),
    ];
    assert_said(&said, &[include_str!("../../src/replay/profile.rs")]);
}
