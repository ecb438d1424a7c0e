//! Parses one line of text into one [`Event`].
//!
//! A line of tracefs is `TASK-PID [CPU] FLAGS TIME: EVENT: FIELDS`. The task's name may contain anything, so the line is not split at
//! blanks: the parser looks for the first bracketed number followed by a time stamp. The columns for the thread group and for the flags are
//! optional. `trace-cmd report` and `perf script` print similar lines, which it also parses: lists without braces, or, if their library
//! cannot parse an event's format, bare fields.
//!
//! Fields are found by name: unknown ones are ignored, and fields that some kernels omit are optional.
//!
//! Cost: one scan of the line, no allocation; every number is checked.

mod beside;
mod fields;
mod number;

use memchr::memchr;

use crate::event::{Event, EventKind};
use crate::measured::Measured;
use fields::Text;

/// Storage for the lists of one line, reused for all lines.
#[derive(Debug, Default)]
pub struct Lists {
    pub(crate) dma_addrs: Vec<u64>,
    pub(crate) sizes: Vec<u64>,
    pub(crate) phys_addrs: Vec<u64>,
}

/// A parsed line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line<'a> {
    /// Blank, or an irrelevant comment.
    Nothing,
    /// The header's count of entries in the kernel's buffer.
    Promise(u64),
    /// The CPU usage during the recording.
    Measured(Measured),
    /// The kernel's note that it dropped events, at least this many.
    Lost(u64),
    /// perf's note that it lost this many in total, or more.
    LostInAll(u64),
    /// An event.
    Event(Event<'a>),
    /// An event whose time is a number without a decimal point: the kernel prints clocks this way that are not in seconds, such as a
    /// processor's time stamp counter.
    Ticks(&'a [u8]),
}

/// Why a line cannot be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}, found \"{}\"", crate::error::excerpt(found))]
pub struct ParseError<'a> {
    /// Whether the line is an event, with invalid fields.
    pub is_event: bool,
    /// What was expected.
    pub expected: &'static str,
    /// What was found.
    pub found: &'a [u8],
}

/// The highest CPU number that is accepted: Linux can be built for 8192 CPUs.
pub const MAX_CPU: u32 = 8191;

/// The latest time that is accepted, in nanoseconds: 146 years after boot. Later ones are clamped, so that deadlines after an event do not
/// overflow.
pub const LATEST_NS: u64 = 1 << 62;

/// Parses line `number`, `line`, without its newline; stores its lists in `lists`.
///
/// # Errors
/// [`ParseError`] if it is no trace line, or a known event with invalid fields.
pub fn parse_line<'a>(number: u64, line: &'a [u8], lists: &'a mut Lists) -> Result<Line<'a>, ParseError<'a>> {
    let text = line.trim_ascii();
    match head(text) {
        Some(head) => parse_event(number, head, text, lists),
        None => parse_other(text),
    }
}

/// The prefix of an event, and the offset of the rest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) cpu: u32,
    pub(crate) time_ns: u64,
    event: usize,
}

/// The head of the event in `text`, a trimmed line; `None` if it is no event, or its time is a count.
pub(crate) fn head(text: &[u8]) -> Option<Head> {
    let prefix = prefix(text).filter(|_| !text.starts_with(b"#"))?;
    Some(Head {
        cpu: prefix.cpu,
        time_ns: prefix.time_ns?.min(LATEST_NS),
        event: text.len() - prefix.event.len(),
    })
}

/// Parses line `number`, `text`, whose head is known: an event, or perf's note of a loss, which has a head as well.
pub(crate) fn parse_event<'a>(
    number: u64,
    head: Head,
    text: &'a [u8],
    lists: &'a mut Lists,
) -> Result<Line<'a>, ParseError<'a>> {
    let event = text.get(head.event..).unwrap_or(&[]);
    if let Some(count) = beside::lost_by_perf(event.strip_prefix(b"unknown: ").unwrap_or(event)) {
        return Ok(Line::Lost(count));
    }
    let kind = kind(event, lists)?;
    Ok(Line::Event(Event { line: number, cpu: head.cpu, time_ns: head.time_ns, kind }))
}

/// Parses `text`, a line without an event's head.
pub(crate) fn parse_other(text: &[u8]) -> Result<Line<'_>, ParseError<'_>> {
    if let Some(line) = beside::read(text) {
        return Ok(line);
    }
    match prefix(text) {
        Some(prefix) => Ok(Line::Ticks(prefix.time)),
        None => {
            Err(ParseError { is_event: false, expected: "\"TASK-PID [CPU] TIME: EVENT: ...\"", found: text })
        }
    }
}

/// The name of the event in `line`; empty if it is no event.
pub(crate) fn event_name(line: &[u8]) -> &[u8] {
    prefix(line.trim_ascii()).map_or(&[], |prefix| name_of(prefix.event).0)
}

/// The prefix of an event.
struct Prefix<'a> {
    cpu: u32,
    time: &'a [u8],
    /// `None` for a whole number.
    time_ns: Option<u64>,
    event: &'a [u8],
}

fn prefix(text: &[u8]) -> Option<Prefix<'_>> {
    let mut from = 0;
    loop {
        let open = from + memchr(b'[', text.get(from..)?)?;
        from = open + 1;
        if let Some(found) = prefix_at(text.get(from..)?) {
            return Some(found);
        }
    }
}

/// Parses after the opening bracket, if that is the CPU number's.
fn prefix_at(text: &[u8]) -> Option<Prefix<'_>> {
    let (cpu, rest) = number::leading_decimal(text)?;
    let cpu = u32::try_from(cpu).ok().filter(|&cpu| cpu <= MAX_CPU)?;
    let rest = rest.strip_prefix(b"]")?;
    let (mut time, mut rest) = word(rest.strip_prefix(b" ")?);
    if !time.first()?.is_ascii_digit() {
        (time, rest) = word(rest);
    }
    let time = time.strip_suffix(b":")?;
    let time_ns = match number::decimal(time) {
        Some(_) => None,
        None => Some(number::seconds(time)?),
    };
    Some(Prefix { cpu, time, time_ns, event: rest.trim_ascii_start() })
}

/// The first word of `text`, and the rest.
fn word(text: &[u8]) -> (&[u8], &[u8]) {
    /// The widest column before the event's name: a long line without blanks is not searched to its end.
    const WIDEST: usize = 32;
    let text = text.trim_ascii_start();
    let end = text.iter().take(WIDEST).position(|b| b.is_ascii_whitespace()).unwrap_or(text.len());
    text.split_at(end)
}

fn kind<'a>(event: &'a [u8], lists: &'a mut Lists) -> Result<EventKind<'a>, ParseError<'a>> {
    match name_of(event) {
        // It comes from another tracer, such as the function tracer.
        ([], _) => Ok(EventKind::Other),
        (name, rest) => Text::new(rest.trim_ascii_start(), lists).event(name),
    }
}

/// An event's name, which is empty without a colon, and the rest.
fn name_of(event: &[u8]) -> (&[u8], &[u8]) {
    let end = memchr(b' ', event).unwrap_or(event.len());
    let (name, rest) = event.split_at(end);
    let name = name.strip_suffix(b":").unwrap_or(&[]);
    // `perf script` puts the event's system before its name.
    let name = match name.iter().rposition(|&b| b == b':') {
        Some(colon) => name.get(colon + 1..).unwrap_or(name),
        None => name,
    };
    (name, rest)
}
