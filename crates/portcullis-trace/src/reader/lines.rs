//! Splits text into lines, in one buffer that grows to the longest line, at most 1 MiB: a longer one is skipped, in bounded memory.

use std::io::{self, Read};
use std::ops::Range;

use memchr::memchr;

use crate::input::Input;

/// The longest line that is read, in bytes; the kernel's own are below 12 KiB.
pub const MAX_LINE: usize = 1 << 20;

/// Initial size of the buffer.
const BUFFER: usize = 256 << 10;

/// A line in the buffer.
pub(super) enum Raw {
    Text(Range<usize>),
    TooLong(u64),
}

/// Splits text into lines.
#[derive(Debug)]
pub(super) struct Lines<'a> {
    pub(super) input: Input<'a>,
    buffer: Vec<u8>,
    start: usize,
    /// No newline between `start` and this.
    searched: usize,
    end: usize,
    /// Bytes of an overlong line dropped so far.
    dropped: u64,
    ended: bool,
}

impl<'a> Lines<'a> {
    pub(super) fn new(input: Input<'a>) -> Self {
        Self { input, buffer: vec![0; BUFFER], start: 0, searched: 0, end: 0, dropped: 0, ended: false }
    }

    /// The next line, valid until the next call; `None` at the end.
    pub(super) fn next(&mut self) -> io::Result<Option<Raw>> {
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

    /// A line's text, without its end.
    pub(super) fn text(&self, line: Range<usize>) -> &[u8] {
        self.buffer.get(line).unwrap_or(&[])
    }

    fn finish(&mut self, line: Range<usize>) -> Raw {
        let length = self.dropped + line.len() as u64;
        self.dropped = 0;
        if length > MAX_LINE as u64 { Raw::TooLong(length) } else { Raw::Text(line) }
    }

    /// Reads more behind the existing text.
    fn fill(&mut self) -> io::Result<()> {
        if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.searched = self.end;
            self.start = 0;
            // The line fills more than half: reads would be small.
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
