//! Merges the CPUs' pages into one text in timestamp order.
//!
//! A recorder reads the CPUs' buffers in *rounds*: in each it empties all, one after the other. Events read two rounds ago happened before
//! anything that the next round will read, whatever the clocks: so an event waits for one round more than its own, and no clock but the
//! events' is needed.
//!
//! # Cost
//! Memory for the text of two rounds.

use std::io::Write;

use super::format::Formats;
use crate::parse::MAX_CPU;

/// A waiting line, or two: with a loss in front.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    time_ns: u64,
    /// Its offset in the text.
    start: usize,
    end: usize,
}

/// Sorts lines by timestamp.
#[derive(Debug)]
pub struct Merge {
    formats: Formats,
    text: Vec<u8>,
    waiting: Vec<Waiting>,
    /// The latest time before this round.
    before_ns: Option<u64>,
    /// The latest time.
    latest_ns: Option<u64>,
    /// The latest time of each CPU.
    cpus: Vec<u64>,
    events: u64,
    lost: u64,
}

impl Merge {
    /// Reads pages that `formats` describes.
    pub fn new(formats: Formats) -> Self {
        Self {
            formats,
            text: Vec::new(),
            waiting: Vec::new(),
            before_ns: None,
            latest_ns: None,
            cpus: Vec::new(),
            events: 0,
            lost: 0,
        }
    }

    /// Events read so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Lost events, as far as the kernel says.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Adds a page of `cpu`, which comes behind its earlier ones.
    pub fn page(&mut self, cpu: u32, page: &[u8]) {
        let at = cpu.min(MAX_CPU) as usize;
        if at >= self.cpus.len() {
            self.cpus.resize(at + 1, 0);
        }
        let Self { formats, text, waiting, cpus, .. } = self;
        let Some(own_ns) = cpus.get_mut(at) else { return };
        let mut lost = formats.lost_before(page);
        self.lost = self.lost.saturating_add(lost);
        let read = formats.events(page, |entry| {
            let start = text.len();
            if lost > 0 {
                loss(cpu, std::mem::take(&mut lost), text);
            }
            // Time is monotonic on one CPU, and a reader sees a line's time.
            *own_ns = entry.time_ns.max(*own_ns);
            formats.write_line(cpu, super::Entry { time_ns: *own_ns, ..entry }, text);
            if text.len() > start {
                waiting.push(Waiting { time_ns: *own_ns, start, end: text.len() });
            }
        });
        self.events += read.events;
        if read.damaged {
            self.lost = self.lost.saturating_add(1);
            lost = lost.saturating_add(1);
        }
        if lost > 0 {
            let start = text.len();
            loss(cpu, lost, text);
            waiting.push(Waiting { time_ns: *own_ns, start, end: text.len() });
        }
        self.latest_ns = self.latest_ns.max(Some(*own_ns));
    }

    /// Counts events that were read and dropped.
    pub fn skip(&mut self, events: u64) {
        if events > 0 {
            self.lost = self.lost.saturating_add(events);
            let (time_ns, start) = (self.latest_ns.unwrap_or(0), self.text.len());
            loss(0, events, &mut self.text);
            self.waiting.push(Waiting { time_ns, start, end: self.text.len() });
        }
    }

    /// Adds a meaningless event at `time_ns` of the events' clock, which is now: so a reader sees time pass while nothing happens.
    pub fn tick(&mut self, time_ns: u64) {
        let start = self.text.len();
        let (s, ns) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000);
        // Writing to a vector cannot fail.
        let _ = writeln!(self.text, "<...>-0 [{MAX_CPU}] {s}.{ns:09}: tick:");
        self.waiting.push(Waiting { time_ns, start, end: self.text.len() });
        self.latest_ns = self.latest_ns.max(Some(time_ns));
    }

    /// All CPUs' buffers have been emptied once more: appends sorted events to `out`.
    pub fn round(&mut self, out: &mut Vec<u8>) {
        let due = self.before_ns;
        self.before_ns = self.latest_ns;
        self.give(due, out);
    }

    /// The end: appends the rest.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        self.give(Some(u64::MAX), out);
    }

    /// Emits events up to `due_ns`.
    fn give(&mut self, due_ns: Option<u64>, out: &mut Vec<u8>) {
        let Some(due_ns) = due_ns else { return };
        // Events of one time, and of one CPU, keep their order.
        self.waiting.sort_by_key(|line| line.time_ns);
        let due = self.waiting.partition_point(|line| line.time_ns <= due_ns);
        for line in self.waiting.drain(..due) {
            out.extend_from_slice(self.text.get(line.start..line.end).unwrap_or(&[]));
        }
        let mut kept = Vec::with_capacity(self.text.len().min(1 << 20));
        for line in &mut self.waiting {
            let start = kept.len();
            kept.extend_from_slice(self.text.get(line.start..line.end).unwrap_or(&[]));
            (line.start, line.end) = (start, kept.len());
        }
        self.text = kept;
    }
}

fn loss(cpu: u32, lost: u64, out: &mut Vec<u8>) {
    // Writing to a vector cannot fail.
    let _ = writeln!(out, "CPU:{cpu} [LOST {lost} EVENTS]");
}
