//! What can go wrong with a trace: errors that end the reading, and warnings that do not.
//!
//! Both carry the numbers a person needs to find the place. Text taken from the file is shortened, and it and names of files
//! are [`Printable`], so neither can write to the terminal through a message.

use std::fmt::{self, Write};
use std::io;
use std::path::PathBuf;

use crate::budget::Over;
use crate::figures::number_of;
use crate::input::Format;
use crate::printable::{Printable, is_plain};

/// How many characters of the file's own text a message may hold.
const EXCERPT_CHARS: usize = 60;

/// What can be read, and where it says how to get it.
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
        /// What the operating system said.
        source: io::Error,
    },
    /// It is a directory.
    #[error("{} is a directory: name the recording itself", Printable(path.display()))]
    Directory {
        /// Where it is.
        path: PathBuf,
    },
    /// The file is in a form that another program turns into text.
    #[error("{} is {what}, which is not read: {instead} makes the text that is", Printable(name))]
    Binary {
        /// The file.
        name: String,
        /// What it is.
        what: &'static str,
        /// The command that makes text of it.
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
    /// The file holds text, but no line of it is a trace event.
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
    /// The compressed file ends before its contents do.
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
        /// The line in which the text breaks off.
        line: u64,
        /// What the decompressor said.
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
        /// The line in which the text breaks off.
        line: u64,
        /// What the decompressor said.
        source: io::Error,
    },
    /// The times are counts of a clock that does not count seconds.
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
        /// What stands where the time should be.
        found: String,
    },
    /// The events of several CPUs do not stand in the order of time, and are too far from it to be put there.
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
        /// The CPU whose event is late.
        cpu: u32,
        /// The CPU of the event with the latest time so far.
        before: u32,
        /// How much earlier it is, in nanoseconds.
        back_ns: u64,
    },
    /// The recording wants more memory than there may be.
    #[error("{}: line {line}: {over}", Printable(name))]
    Memory {
        /// The file.
        name: String,
        /// The line.
        line: u64,
        /// How much.
        over: Over,
    },
    /// An archive of next to nothing becomes text without end.
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
    /// A warning, where the options ask that none be passed over.
    #[error("{}: {warning}", Printable(name))]
    Strict {
        /// The file.
        name: String,
        /// The first warning.
        warning: Warning,
    },
}

/// Something in the file that had to be passed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The line, counted from 1.
    pub line: u64,
    /// What should have stood there.
    pub expected: String,
    /// What stood there instead, shortened and escaped.
    pub found: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: expected {}, found {}", self.line, self.expected, self.found)
    }
}

/// `text` shortened to what fits in a message, [`Printable`] and with broken UTF-8 made visible.
pub(crate) fn excerpt(text: &[u8]) -> String {
    // Four bytes make at most one character, so no more of a long line than this can show.
    let head = text.get(..EXCERPT_CHARS * 4).unwrap_or(text);
    let mut out = String::new();
    let mut shown = 0;
    for c in String::from_utf8_lossy(head).chars() {
        // An escape counts at its printed width: that is what the limit is about.
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
