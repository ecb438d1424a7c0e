//! The CPUs' pages to one text in the order of time.
//!
//! A recorder reads the CPUs' buffers in *rounds*: in each it empties all, one after the other. What it has read two rounds ago happened
//! before anything that it will read in the next, whatever the clocks: so an event waits for one round more than its own, and no
//! clock but the events' is needed.
//!
//! # Cost
//! Memory for the text of two rounds.

use std::io::Write;

use super::format::Formats;
use crate::parse::MAX_CPU;

/// A line that waits, or two: the loss before it stands in front.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    time_ns: u64,
    /// Where in the text it is.
    start: usize,
    end: usize,
}

/// Puts lines in the order of time.
#[derive(Debug)]
pub struct Merge {
    formats: Formats,
    text: Vec<u8>,
    waiting: Vec<Waiting>,
    /// The latest time of what was read before this round.
    before_ns: Option<u64>,
    /// The latest time of all.
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

    /// Events that were lost, as far as the kernel says.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Adds a page of `cpu`, which comes behind those of this CPU that were added before.
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
            // Time does not run back on one CPU, and a line's time is what a reader sees.
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

    /// So many events were read and thrown away.
    pub fn skip(&mut self, events: u64) {
        if events > 0 {
            self.lost = self.lost.saturating_add(events);
            let (time_ns, start) = (self.latest_ns.unwrap_or(0), self.text.len());
            loss(0, events, &mut self.text);
            self.waiting.push(Waiting { time_ns, start, end: self.text.len() });
        }
    }

    /// Adds an event of no meaning, at `time_ns` of the events' clock, which is now: so that a reader learns that time goes on while
    /// nothing happens.
    pub fn tick(&mut self, time_ns: u64) {
        let start = self.text.len();
        let (s, ns) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000);
        // Writing to a vector cannot fail.
        let _ = writeln!(self.text, "<...>-0 [{MAX_CPU}] {s}.{ns:09}: tick:");
        self.waiting.push(Waiting { time_ns, start, end: self.text.len() });
        self.latest_ns = self.latest_ns.max(Some(time_ns));
    }

    /// All CPUs' buffers have been emptied once more: what is now in order goes to `out`.
    pub fn round(&mut self, out: &mut Vec<u8>) {
        let due = self.before_ns;
        self.before_ns = self.latest_ns;
        self.give(due, out);
    }

    /// Nothing more comes.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        self.give(Some(u64::MAX), out);
    }

    /// Gives out what happened until `due_ns`.
    fn give(&mut self, due_ns: Option<u64>, out: &mut Vec<u8>) {
        let Some(due_ns) = due_ns else { return };
        // Those of one time, and of one CPU, stay in their order.
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
