//! A text stream to a stream of events in timestamp order, with line numbers and warnings.
//!
//! Accepts bytes that are not UTF-8. Nothing is allocated per line in the steady state.

mod lines;
mod order;

use crate::budget;
use crate::error::{TraceError, excerpt};
use crate::event::{Event, EventKind};
use crate::figures::number_of;
use crate::input::Input;
use crate::parse::{Head, LATEST_NS, Line, Lists, ParseError, event_name, parse_event, parse_other};
use crate::summary::Summary;
pub use lines::MAX_LINE;
use order::Ordered;

/// Reads events one by one.
#[derive(Debug)]
pub struct EventReader<'a> {
    lines: Ordered<'a>,
    lists: Lists,
    summary: Summary,
    /// The first line that is no event but should be.
    stray: Option<(u64, String)>,
    strict: bool,
    /// The warning about late events was given.
    told_late: bool,
}

impl<'a> EventReader<'a> {
    /// Reads from `input`; with `strict`, the first warning is an error.
    pub fn new(input: Input<'a>, strict: bool) -> Self {
        let summary = Summary { name: input.name().to_owned(), ..Summary::default() };
        Self {
            lines: Ordered::new(input),
            lists: Lists::default(),
            summary,
            stray: None,
            strict,
            told_late: false,
        }
    }

    /// The source of the text.
    pub fn input(&self) -> &Input<'a> {
        self.lines.input()
    }

    /// The counts so far.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    pub(crate) fn summary_mut(&mut self) -> &mut Summary {
        &mut self.summary
    }

    /// Reads the next event and passes it to `visit`, with the summary to count it in; `false` at the end. An event that cannot be parsed
    /// is passed, too, and already counted as skipped.
    ///
    /// An event borrows from the reader's buffer, hence the closure.
    ///
    /// # Errors
    /// [`TraceError`] for an input that cannot be read to its end, has no event, or has some that cannot be sorted by timestamp, and, in
    /// strict mode, for the first warning. Everything before it is read first.
    pub fn read_event(
        &mut self,
        mut visit: impl FnMut(&Event<'_>, &mut Summary),
    ) -> Result<bool, TraceError> {
        loop {
            let Some(line) = self.lines.next()? else { return self.end() };
            let (number, text) = (line.number, line.text.as_slice());
            budget::at_line(number);
            if let Err(over) = budget::check() {
                return Err(TraceError::Memory { name: self.summary.name.clone(), line: number, over });
            }
            self.summary.lines += 1;
            self.summary.text_bytes += line.length + 1;
            if line.length > MAX_LINE as u64 {
                self.summary.unrecognised_lines += 1;
                let found = number_of(line.length, "byte");
                self.stray.get_or_insert_with(|| (number, found.clone()));
                self.summary.warn(number, || {
                    (format!("a line of at most {}", number_of(MAX_LINE as u64, "byte")), found)
                });
                self.check()?;
                continue;
            }
            let head = line.head;
            let parsed = match head {
                Some(head) => parse_event(number, head, text, &mut self.lists),
                None => parse_other(text),
            };
            let (event, error) = match parsed {
                Ok(Line::Nothing) => continue,
                Ok(Line::Promise(entries)) => {
                    self.summary.promised_entries = Some(entries);
                    continue;
                }
                Ok(Line::Measured(measured)) => {
                    self.summary.measured = Some(measured);
                    continue;
                }
                Ok(Line::Lost(count)) => {
                    self.summary.lost_events = self.summary.lost_events.saturating_add(count.max(1));
                    continue;
                }
                Ok(Line::LostInAll(count)) => {
                    self.summary.lost_events = self.summary.lost_events.max(count);
                    continue;
                }
                Ok(Line::Ticks(time)) => {
                    let (name, found) = (self.summary.name.clone(), excerpt(time));
                    return Err(TraceError::Clock { name, line: number, found });
                }
                Ok(Line::Event(event)) => (event, None),
                Err(error) => match head {
                    Some(Head { cpu, time_ns, .. }) => {
                        (Event { line: number, cpu, time_ns, kind: EventKind::Unreadable }, Some(error))
                    }
                    None => {
                        self.stray.get_or_insert_with(|| (number, excerpt(error.found)));
                        self.summary.unrecognised_lines += 1;
                        self.summary.warn(number, || warning(error));
                        self.check()?;
                        continue;
                    }
                },
            };
            self.summary.events += 1;
            self.summary.moved_events += u64::from(line.moved);
            self.summary.seen_at(event.time_ns);
            if event.time_ns == LATEST_NS && !std::mem::replace(&mut self.told_late, true) {
                self.summary.warn(number, || {
                    let found = "a later one, which counts as that, as do all such times after it";
                    (format!("a time up to {} s", LATEST_NS / 1_000_000_000), found.into())
                });
            }
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

    /// In strict mode, turns the first warning into an error.
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

/// What was expected, and what was found.
fn warning(error: ParseError<'_>) -> (String, String) {
    (error.expected.to_owned(), format!("\"{}\"", excerpt(error.found)))
}
