//! Reorders lines up to 1 ms out of timestamp order.
//!
//! A recording is nearly sorted: events copied while they came (`trace_pipe`), or different CPUs' clocks, disturb the order a little. So a
//! line waits until no other can precede it: until an event is read that is 1 ms later. The events of one CPU, and those of one time, keep
//! the file's order. A line that is no event stays behind the event above it.
//!
//! # Cost
//! One copy of each line, and memory for a millisecond of them, at most [`MOST_BYTES`]: if these do not suffice, lines are emitted early,
//! and an event that should have preceded them is an error.

use std::collections::{BTreeMap, VecDeque};

use super::lines::{Lines, Raw};
use crate::error::TraceError;
use crate::input::Input;
use crate::parse::{Head, head};

/// The largest disorder between CPUs, in nanoseconds.
const MOST_DISORDER_NS: u64 = 1_000_000;

/// The most memory of waiting lines, with their heads; spare buffers may take as much.
const MOST_BYTES: usize = 16 << 20;

/// A line of text.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Its number, counted from 1.
    pub(super) number: u64,
    /// Its trimmed text; empty if it is too long.
    pub(super) text: Vec<u8>,
    /// Its event's head, if it is an event.
    pub(super) head: Option<Head>,
    /// Its length in bytes.
    pub(super) length: u64,
    /// Whether a later event was above it.
    pub(super) moved: bool,
    /// Its event's time, or its CPU's latest time if that is later; for other lines, the last event's above it.
    time_ns: u64,
}

impl Line {
    fn bytes(&self) -> usize {
        self.text.capacity() + size_of::<Self>()
    }
}

/// Sorts lines by timestamp.
#[derive(Debug)]
pub(super) struct Ordered<'a> {
    lines: Lines<'a>,
    /// Lines read.
    number: u64,
    /// Sorted by time, and by the file's order.
    waiting: VecDeque<Line>,
    /// Lines below a later event, by time and number, so that none has to be inserted among many others.
    late: BTreeMap<(u64, u64), Line>,
    /// Bytes of all of these.
    bytes: usize,
    /// The last emitted line.
    current: Line,
    /// Spare buffers, and their size.
    spare: Vec<Vec<u8>>,
    spare_bytes: usize,
    /// The latest time of each CPU.
    cpus: Vec<u64>,
    /// The latest time, and its CPU.
    latest: (u64, u32),
    /// The time of the last event in the file's order.
    time_ns: u64,
    ended: bool,
    /// Why it ended before the text.
    error: Option<TraceError>,
}

impl<'a> Ordered<'a> {
    pub(super) fn new(input: Input<'a>) -> Self {
        Self {
            lines: Lines::new(input),
            number: 0,
            waiting: VecDeque::new(),
            late: BTreeMap::new(),
            bytes: 0,
            current: Line::default(),
            spare: Vec::new(),
            spare_bytes: 0,
            cpus: Vec::new(),
            latest: (0, 0),
            time_ns: 0,
            ended: false,
            error: None,
        }
    }

    pub(super) fn input(&self) -> &Input<'a> {
        &self.lines.input
    }

    /// The next line; `None` at the end. An error comes after all lines before it.
    pub(super) fn next(&mut self) -> Result<Option<&Line>, TraceError> {
        while !self.is_due() {
            if self.ended {
                return self.error.take().map_or(Ok(None), Err);
            }
            if let Err(error) = self.read() {
                (self.ended, self.error) = (true, Some(error));
            }
        }
        let line = if self.is_late_first() {
            self.late.pop_first().map(|(_, line)| line)
        } else {
            self.waiting.pop_front()
        };
        let Some(line) = line else { return Ok(None) };
        self.bytes -= line.bytes();
        let gone = std::mem::replace(&mut self.current, line).text;
        if self.spare_bytes + gone.capacity() <= MOST_BYTES {
            self.spare_bytes += gone.capacity();
            self.spare.push(gone);
        }
        Ok(Some(&self.current))
    }

    /// Whether no line can precede the first waiting one, or there is no room for more.
    fn is_due(&self) -> bool {
        let oldest_ns = self.latest.0.saturating_sub(MOST_DISORDER_NS);
        let due = |line: &Line| self.ended || line.time_ns <= oldest_ns || self.bytes >= MOST_BYTES;
        let first = if self.is_late_first() {
            self.late.first_key_value().map(|(_, line)| line)
        } else {
            self.waiting.front()
        };
        first.is_some_and(due)
    }

    /// Whether the first waiting line came late.
    fn is_late_first(&self) -> bool {
        match (self.late.first_key_value(), self.waiting.front()) {
            (Some((late, _)), Some(line)) => *late < (line.time_ns, line.number),
            (late, _) => late.is_some(),
        }
    }

    /// Reads a line and inserts it.
    fn read(&mut self) -> Result<(), TraceError> {
        let mut line = Line { number: self.number + 1, ..Line::default() };
        match self.lines.next() {
            Ok(Some(Raw::Text(at))) => {
                let text = self.lines.text(at);
                line.length = text.len() as u64;
                line.text = self.spare.pop().unwrap_or_default();
                self.spare_bytes -= line.text.capacity();
                line.text.clear();
                line.text.extend_from_slice(text.trim_ascii());
                line.head = head(&line.text);
            }
            Ok(Some(Raw::TooLong(length))) => line.length = length,
            Ok(None) => {
                self.ended = true;
                return Ok(());
            }
            Err(error) => return Err(self.lines.input.explain(error, line.number)),
        }
        self.number = line.number;
        if let Some(Head { cpu, time_ns, .. }) = line.head {
            let at = cpu as usize;
            if at >= self.cpus.len() {
                self.cpus.resize(at + 1, 0);
            }
            if let Some(own) = self.cpus.get_mut(at) {
                *own = time_ns.max(*own);
                self.time_ns = *own;
            }
            let (latest_ns, before) = self.latest;
            let back_ns = latest_ns.saturating_sub(self.time_ns);
            if back_ns > MOST_DISORDER_NS || self.time_ns < self.current.time_ns {
                let name = self.lines.input.name().to_owned();
                return Err(TraceError::Disorder { name, line: line.number, cpu, before, back_ns });
            }
            self.latest = self.latest.max((self.time_ns, cpu));
        }
        let late = self.time_ns < self.latest.0;
        line.moved = late && line.head.is_some();
        line.time_ns = self.time_ns.max(self.current.time_ns);
        self.bytes += line.bytes();
        if late {
            self.late.insert((line.time_ns, line.number), line);
        } else {
            self.waiting.push_back(line);
        }
        Ok(())
    }
}
