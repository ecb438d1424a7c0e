//! A stream of text to a stream of events, with line numbers and warnings.
//!
//! Lines are cut from one buffer that grows to hold the longest line, 1 MiB at most: a longer one is passed over
//! with a warning, in bounded memory. Bytes that are not UTF-8 are no obstacle. Nothing is allocated per line.

use std::io::{self, Read};
use std::ops::Range;

use memchr::memchr;

use crate::error::{TraceError, excerpt};
use crate::event::Event;
use crate::input::Input;
use crate::parse::{Line, Lists, ParseError, event_name, parse_line, unreadable};
use crate::summary::Summary;

/// The longest line that is read, in bytes; the kernel's own are below 12 KiB.
pub const MAX_LINE: usize = 1 << 20;

/// Room for text at first.
const BUFFER: usize = 256 << 10;

/// How much later than another CPU's an event's time may be that stands before it, in nanoseconds. CPUs' clocks differ by
/// microseconds.
const MOST_DISORDER_NS: u64 = 1_000_000;

/// A line in the buffer.
enum Raw {
    Text(Range<usize>),
    TooLong(u64),
}

/// Cuts text into lines.
#[derive(Debug)]
struct Lines<'a> {
    input: Input<'a>,
    buffer: Vec<u8>,
    start: usize,
    /// Up to here there is no newline after `start`.
    searched: usize,
    end: usize,
    /// Bytes of an overlong line thrown away so far.
    dropped: u64,
    ended: bool,
}

impl<'a> Lines<'a> {
    fn new(input: Input<'a>) -> Self {
        Self { input, buffer: vec![0; BUFFER], start: 0, searched: 0, end: 0, dropped: 0, ended: false }
    }

    fn next(&mut self) -> io::Result<Option<Raw>> {
        loop {
            let unseen = self.buffer.get(self.searched..self.end).unwrap_or(&[]);
            if let Some(at) = memchr(b'\n', unseen) {
                let line = self.start..self.searched + at;
                self.start = line.end + 1;
                self.searched = self.start;
                return Ok(Some(self.finish(line)));
            }
            self.searched = self.end;
            if self.end - self.start > MAX_LINE {
                self.dropped += (self.end - self.start) as u64;
                self.start = self.end;
            }
            if self.ended {
                let line = self.start..self.end;
                self.start = self.end;
                return Ok((!line.is_empty() || self.dropped > 0).then(|| self.finish(line)));
            }
            self.fill()?;
        }
    }

    fn finish(&mut self, line: Range<usize>) -> Raw {
        let length = self.dropped + line.len() as u64;
        self.dropped = 0;
        if length > MAX_LINE as u64 { Raw::TooLong(length) } else { Raw::Text(line) }
    }

    /// Reads more behind what is there.
    fn fill(&mut self) -> io::Result<()> {
        if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.searched = self.end;
            self.start = 0;
            // The line fills more than half: reading would go in small steps.
            if self.end > self.buffer.len() / 2 {
                self.buffer.resize(self.buffer.len() * 2, 0);
            }
        }
        let room = self.buffer.get_mut(self.end..).unwrap_or(&mut []);
        loop {
            match self.input.read(room) {
                Ok(0) => self.ended = true,
                Ok(n) => self.end += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            }
            return Ok(());
        }
    }
}

/// Reads events one after the other.
#[derive(Debug)]
pub struct EventReader<'a> {
    lines: Lines<'a>,
    lists: Lists,
    summary: Summary,
    /// The first line that should have been an event and was not.
    stray: Option<(u64, String)>,
    strict: bool,
    /// The latest time so far, and the CPU that it is of.
    latest: (u64, u32),
}

impl<'a> EventReader<'a> {
    /// Reads from `input`; with `strict`, the first warning is an error.
    pub fn new(input: Input<'a>, strict: bool) -> Self {
        let summary = Summary { name: input.name().to_owned(), ..Summary::default() };
        Self {
            lines: Lines::new(input),
            lists: Lists::default(),
            summary,
            stray: None,
            strict,
            latest: (0, 0),
        }
    }

    /// Where the text comes from.
    pub fn input(&self) -> &Input<'a> {
        &self.lines.input
    }

    /// What was counted so far.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    pub(crate) fn summary_mut(&mut self) -> &mut Summary {
        &mut self.summary
    }

    /// Reads on to the next event and shows it to `visit`, with the summary to count it in; `false` at the end. One that
    /// cannot be read is shown, too, and counted as skipped already.
    ///
    /// An event borrows from the reader's buffer, hence the closure.
    ///
    /// # Errors
    /// [`TraceError`] for an input that cannot be read to its end or holds no event, and, where the reader is
    /// strict, for the first warning.
    pub fn read_event(
        &mut self,
        mut visit: impl FnMut(&Event<'_>, &mut Summary),
    ) -> Result<bool, TraceError> {
        loop {
            let raw = match self.lines.next() {
                Ok(Some(raw)) => raw,
                Ok(None) => return self.end(),
                Err(error) => return Err(self.lines.input.explain(error, self.summary.lines + 1)),
            };
            self.summary.lines += 1;
            let number = self.summary.lines;
            let text = match raw {
                Raw::Text(range) => self.lines.buffer.get(range).unwrap_or(&[]),
                Raw::TooLong(length) => {
                    self.summary.text_bytes += length + 1;
                    self.summary.unrecognised_lines += 1;
                    let found = format!("{length} bytes");
                    self.stray.get_or_insert_with(|| (number, found.clone()));
                    self.summary.warn(number, || (format!("a line of at most {MAX_LINE} bytes"), found));
                    self.check()?;
                    continue;
                }
            };
            self.summary.text_bytes += text.len() as u64 + 1;
            let parsed = parse_line(number, text, &mut self.lists);
            let (event, error) = match parsed {
                Ok(Line::Nothing) => continue,
                Ok(Line::Promise(entries)) => {
                    self.summary.promised_entries = Some(entries);
                    continue;
                }
                Ok(Line::Lost(count)) => {
                    self.summary.lost_events = self.summary.lost_events.saturating_add(count.max(1));
                    continue;
                }
                Ok(Line::Ticks(time)) => {
                    let (name, found) = (self.summary.name.clone(), excerpt(time));
                    return Err(TraceError::Clock { name, line: number, found });
                }
                Ok(Line::Event(event)) => (event, None),
                Err(error) => match unreadable(number, text).filter(|_| error.is_event) {
                    Some(event) => (event, Some(error)),
                    None => {
                        self.stray.get_or_insert_with(|| (number, excerpt(error.found)));
                        self.summary.unrecognised_lines += 1;
                        self.summary.warn(number, || warning(error));
                        self.check()?;
                        continue;
                    }
                },
            };
            let (latest_ns, before) = self.latest;
            let back_ns = latest_ns.saturating_sub(event.time_ns);
            if back_ns > MOST_DISORDER_NS && event.cpu != before {
                let (name, cpu, back_ms) = (self.summary.name.clone(), event.cpu, back_ns / 1_000_000);
                return Err(TraceError::Disorder { name, line: number, cpu, before, back_ms });
            }
            self.latest = self.latest.max((event.time_ns, event.cpu));
            self.summary.events += 1;
            self.summary.seen_at(event.time_ns);
            let (skipped, other) = (self.summary.skipped, self.summary.other_events);
            if let Some(error) = error {
                self.summary.skip(number, || warning(error));
            }
            visit(&event, &mut self.summary);
            if self.summary.skipped > skipped {
                self.summary.name_skipped(event_name(text));
            } else if self.summary.other_events > other {
                self.summary.name_other(event_name(text));
            }
            self.check()?;
            return Ok(true);
        }
    }

    /// With `strict`, turns the first warning into an error.
    pub(crate) fn check(&self) -> Result<(), TraceError> {
        if self.strict { self.summary.strict_error() } else { Ok(()) }
    }

    fn end(&mut self) -> Result<bool, TraceError> {
        if self.summary.events > 0 {
            return Ok(false);
        }
        let name = self.summary.name.clone();
        Err(match self.stray.take() {
            Some((line, found)) => TraceError::NotATrace { name, line, found },
            None => TraceError::Empty { name, lines: self.summary.lines },
        })
    }
}

/// What was expected, and what stood there instead.
fn warning(error: ParseError<'_>) -> (String, String) {
    (error.expected.to_owned(), format!("\"{}\"", excerpt(error.found)))
}
