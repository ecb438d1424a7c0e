//! One line of text to one [`Event`].
//!
//! A line of tracefs is `TASK-PID [CPU] FLAGS TIME: EVENT: FIELDS`. The task's name may hold anything, so the line is
//! not split at blanks: what is looked for is the first bracketed number that a time stamp follows. The columns for
//! the thread group and for the flags may be there or not. `trace-cmd report` and `perf script` print close enough
//! to this to be read too: lists without braces, or, where their library cannot parse an event's format, bare fields.
//!
//! Fields are found by name: unknown ones are passed over, and those that some kernels leave out may be missing.
//!
//! Cost: one scan of the line, no allocation; every number is checked.

mod beside;
mod fields;
mod number;

use memchr::memchr;

use crate::event::{Event, EventKind};
use crate::measured::Measured;
use fields::Text;

/// Room for the lists of one line, kept from line to line so that none is allocated twice.
#[derive(Debug, Default)]
pub struct Lists {
    pub(crate) dma_addrs: Vec<u64>,
    pub(crate) sizes: Vec<u64>,
    pub(crate) phys_addrs: Vec<u64>,
}

/// What a line turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line<'a> {
    /// Blank, or a comment that says nothing of use.
    Nothing,
    /// The header that tells how many entries the kernel's buffer held.
    Promise(u64),
    /// What the machine's CPUs did while it was recorded.
    Measured(Measured),
    /// The kernel's note that it dropped events, at least this many.
    Lost(u64),
    /// perf's note that it has lost this much in all, or more.
    LostInAll(u64),
    /// An event.
    Event(Event<'a>),
    /// An event whose time is a number without a decimal point, this one: the kernel prints so what is no time, such
    /// as a processor's time stamp counter.
    Ticks(&'a [u8]),
}

/// Why a line cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}, found \"{}\"", crate::error::excerpt(found))]
pub struct ParseError<'a> {
    /// Whether the line is an event all the same, with fields that make no sense.
    pub is_event: bool,
    /// What should have stood there.
    pub expected: &'static str,
    /// What stood there.
    pub found: &'a [u8],
}

/// The highest CPU number that is believed: Linux can be built for 8192 CPUs.
pub const MAX_CPU: u32 = 8191;

/// The latest time that is believed, in nanoseconds: 146 years after the machine was started. A later one counts as that, so that what
/// is due some time after an event has a time, too.
pub const LATEST_NS: u64 = 1 << 62;

/// Reads line `number`, `line`, without its newline; what it lists goes into `lists`.
///
/// # Errors
/// [`ParseError`] where it is no trace line, or a known event with fields that make no sense.
pub fn parse_line<'a>(number: u64, line: &'a [u8], lists: &'a mut Lists) -> Result<Line<'a>, ParseError<'a>> {
    let text = line.trim_ascii();
    match head(text) {
        Some(head) => parse_event(number, head, text, lists),
        None => parse_other(text),
    }
}

/// What stands before an event's own text, and where that begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) cpu: u32,
    pub(crate) time_ns: u64,
    event: usize,
}

/// The head of the event on `text`, a line without blanks at its ends; `None` where it is none, or its time is a count.
pub(crate) fn head(text: &[u8]) -> Option<Head> {
    let prefix = prefix(text).filter(|_| !text.starts_with(b"#"))?;
    Some(Head {
        cpu: prefix.cpu,
        time_ns: prefix.time_ns?.min(LATEST_NS),
        event: text.len() - prefix.event.len(),
    })
}

/// Reads line `number`, `text`, whose head is known: an event, or perf's note of a loss, which has a head as well.
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

/// Reads `text`, a line that has no head of an event.
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

/// The name of the event on `line`; empty where it is none.
pub(crate) fn event_name(line: &[u8]) -> &[u8] {
    prefix(line.trim_ascii()).map_or(&[], |prefix| name_of(prefix.event).0)
}

/// Everything before the event's own text.
struct Prefix<'a> {
    cpu: u32,
    time: &'a [u8],
    /// `None` where that is a whole number.
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

/// What follows the opening bracket, if that is the one around the CPU's number.
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

/// The first word of `text`, and what follows it.
fn word(text: &[u8]) -> (&[u8], &[u8]) {
    /// No column before the event's name is as wide: a long line without blanks is not searched to its end.
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

/// An event's name, which is empty where no colon ends it, and what follows it.
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
