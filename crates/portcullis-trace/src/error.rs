//! Errors, which end the reading of a trace, and warnings, which do not.
//!
//! Both carry the numbers that locate the place. Text from the file is shortened, and it and file names are [`Printable`], so neither can
//! send control sequences to the terminal through a message.

use std::fmt::{self, Write};
use std::io;
use std::path::PathBuf;

use crate::budget::Over;
use crate::figures::number_of;
use crate::input::Format;
use crate::printable::{Printable, is_plain};

/// The most characters of the file's text in a message.
const EXCERPT_CHARS: usize = 60;

/// The readable formats, and how to get them.
const EXPECTED: &str = "Expected is the text of Linux's tracefs, `perf script` or `trace-cmd report`, plain, gzip or zstd: \
    docs/replay.md#recording-a-trace says how to record it";

/// Why a recording may have no event.
const WHY_EMPTY: &str = "Nothing was mapped meanwhile, or none of the events dma:* and iommu:* was switched on, or the IOMMU was off and \
    this kernel, before Linux 6.12, records nothing then";

/// Why a trace cannot be read, or not to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The operating system could not open or read the file.
    #[error("cannot read {}: {source}", Printable(path.display()))]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// It is a directory.
    #[error("{} is a directory: name the recording itself", Printable(path.display()))]
    Directory {
        /// Its path.
        path: PathBuf,
    },
    /// The file needs conversion to text by another program.
    #[error("{} is {what}, which is not read: {instead} makes the text that is", Printable(name))]
    Binary {
        /// The file.
        name: String,
        /// Its format.
        what: &'static str,
        /// The command that converts it to text.
        instead: &'static str,
    },
    /// The file holds nothing but blank lines and comments.
    #[error("{} is empty: it has no trace event in {}. {WHY_EMPTY}. {EXPECTED}", Printable(name), number_of(*lines, "line"))]
    Empty {
        /// The file.
        name: String,
        /// How many lines it has.
        lines: u64,
    },
    /// The file is text, but no line of it is a trace event.
    #[error(
        "{} is not a trace: no line is an event (\"TASK-PID [CPU] TIME: EVENT: ...\"), and line {line} is \
         \"{found}\". {EXPECTED}",
        Printable(name)
    )]
    NotATrace {
        /// The file.
        name: String,
        /// The first line that is neither blank nor a comment.
        line: u64,
        /// That line, shortened.
        found: String,
    },
    /// The compressed file is truncated.
    #[error(
        "{}: truncated {format} archive: it ends after {}, in line {line} of its text, where \
         more must follow",
        Printable(name),
        number_of(*after_bytes, "byte")
    )]
    TruncatedArchive {
        /// The file.
        name: String,
        /// The kind of archive.
        format: Format,
        /// Compressed bytes read.
        after_bytes: u64,
        /// The line at which the text breaks off.
        line: u64,
        /// The decompressor's error.
        source: io::Error,
    },
    /// The compressed file is damaged.
    #[error(
        "{}: damaged {format} archive within its first {}, line {line} of its text: {source}",
        Printable(name),
        number_of(*after_bytes, "byte")
    )]
    CorruptArchive {
        /// The file.
        name: String,
        /// The kind of archive.
        format: Format,
        /// Compressed bytes read.
        after_bytes: u64,
        /// The line at which the text breaks off.
        line: u64,
        /// The decompressor's error.
        source: io::Error,
    },
    /// The times are not in seconds.
    #[error(
        "{}: line {line}: the time \"{found}\" is a count without a unit, as of the trace clocks counter and \
         x86-tsc: choose one that counts seconds before recording (echo mono > /sys/kernel/tracing/trace_clock)",
        Printable(name)
    )]
    Clock {
        /// The file.
        name: String,
        /// The line.
        line: u64,
        /// The text in place of the time.
        found: String,
    },
    /// Events of several CPUs are out of timestamp order, and too far to be sorted.
    #[error(
        "{}: line {line}: an event of CPU {cpu} is {:.3} ms older than one of CPU {before} that stands above it: \
         events must stand in the order of time, as /sys/kernel/tracing/trace has them, but for 1 ms (and 16 MiB of \
         lines); in the files of per_cpu, one behind the other, they do not",
        Printable(name),
        *back_ns as f64 / 1e6
    )]
    Disorder {
        /// The file.
        name: String,
        /// The line.
        line: u64,
        /// The CPU of the late event.
        cpu: u32,
        /// The CPU of the event with the latest time so far.
        before: u32,
        /// How much earlier it is, in nanoseconds.
        back_ns: u64,
    },
    /// The recording needs more memory than the limit.
    #[error("{}: line {line}: {over}", Printable(name))]
    Memory {
        /// The file.
        name: String,
        /// The line.
        line: u64,
        /// The numbers.
        over: Over,
    },
    /// A decompression bomb.
    #[error(
        "{}: {} of this {format} archive make more than {} of text, by line {line}, as no \
         recording's do: what it holds can be read from a file that is not packed",
        Printable(name),
        number_of(*after_bytes, "byte"),
        number_of(*text_bytes, "byte")
    )]
    Bomb {
        /// The file.
        name: String,
        /// The kind of archive.
        format: Format,
        /// Compressed bytes read.
        after_bytes: u64,
        /// Bytes of text.
        text_bytes: u64,
        /// The line of the text.
        line: u64,
    },
    /// A warning, in strict mode.
    #[error("{}: {warning}", Printable(name))]
    Strict {
        /// The file.
        name: String,
        /// The first warning.
        warning: Warning,
    },
}

/// Something in the file that was skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The line, counted from 1.
    pub line: u64,
    /// What was expected.
    pub expected: String,
    /// What was found, shortened and escaped.
    pub found: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: expected {}, found {}", self.line, self.expected, self.found)
    }
}

/// `text` shortened for a message, [`Printable`] and with broken UTF-8 made visible.
pub(crate) fn excerpt(text: &[u8]) -> String {
    // A character has at most four bytes, so no more of a long line can show.
    let head = text.get(..EXCERPT_CHARS * 4).unwrap_or(text);
    let mut out = String::new();
    let mut shown = 0;
    for c in String::from_utf8_lossy(head).chars() {
        // An escape counts with its printed width.
        let width = if is_plain(c) { 1 } else { c.escape_unicode().count() };
        if shown + width > EXCERPT_CHARS {
            out.push_str("...");
            return out;
        }
        shown += width;
        // Writing to a string cannot fail.
        let _ = write!(out, "{}", Printable(c));
    }
    if head.len() < text.len() {
        out.push_str("...");
    }
    out
}
