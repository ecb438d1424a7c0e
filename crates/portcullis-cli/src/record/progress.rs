//! One line that tells how it goes: refreshed on a terminal, now and then elsewhere.

use std::fmt::Write;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use crate::look::{bytes, count, number_of};

/// How often the line is written on a terminal, and elsewhere.
const OFTEN: Duration = Duration::from_millis(500);
const SELDOM: Duration = Duration::from_secs(10);

/// What has been recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct So {
    pub events: u64,
    pub lost: u64,
    pub bytes: u64,
}

/// The line, on standard error.
#[derive(Debug)]
pub struct Progress {
    start: Instant,
    /// When it was written last, and what had been recorded by then.
    last: (Instant, So),
    terminal: bool,
}

impl Progress {
    pub fn new() -> Self {
        let start = Instant::now();
        Self { start, last: (start, So::default()), terminal: std::io::stderr().is_terminal() }
    }

    /// Writes the line, if it is time.
    pub fn show(&mut self, so: So) {
        let (at, before) = self.last;
        let since = at.elapsed();
        if since < if self.terminal { OFTEN } else { SELDOM } {
            return;
        }
        self.last = (Instant::now(), so);
        let text = line(self.start.elapsed(), so, rate(so.events - before.events, since));
        // Back to the line's beginning, and nothing behind it.
        let text = if self.terminal { format!("\r{text}\x1b[K") } else { text + "\n" };
        let _ = std::io::stderr().write_all(text.as_bytes());
    }

    /// Takes the line away.
    pub fn clear(&self) {
        if self.terminal {
            let _ = std::io::stderr().write_all(b"\r\x1b[K");
        }
    }
}

pub fn rate(events: u64, time: Duration) -> u64 {
    (events as f64 / time.as_secs_f64().max(1e-9)).round() as u64
}

fn line(time: Duration, so: So, rate: u64) -> String {
    let mut text = format!(
        "{:>3} s  {}  {}/s  {}",
        time.as_secs(),
        number_of(so.events, "event"),
        count(rate),
        bytes(so.bytes as f64)
    );
    match so.lost {
        0 => text.push_str("  none lost"),
        // Writing to a string cannot fail.
        lost => drop(write!(text, "  {} LOST", count(lost))),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_has_rate_size_and_losses() {
        let so = So { events: 1_234_567, lost: 0, bytes: 89_000_000 };
        let of = |so| line(Duration::from_millis(7_900), so, rate(50_000, Duration::from_millis(500)));
        assert_eq!(of(so), "  7 s  1,234,567 events  100,000/s  89.0 MB  none lost");
        assert_eq!(of(So { lost: 1_200, ..so }), "  7 s  1,234,567 events  100,000/s  89.0 MB  1,200 LOST");
    }
}
