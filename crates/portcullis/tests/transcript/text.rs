//! A transcript: what was called, what was answered, and what went on below, line by line, against a file.
#![allow(dead_code, reason = "each test program uses a part")]

#[path = "../golden/mod.rs"]
mod golden;

// For crates without it.
extern crate std;

use std::boxed::Box;
use std::fmt::{Debug, Display};
use std::format;
use std::path::PathBuf;
use std::string::String;
use std::vec::Vec;

/// Events that a line shows.
const MOST: usize = 24;

/// The lines so far.
pub struct Transcript {
    text: String,
    /// What went on since it was asked last.
    below: Box<dyn Fn() -> Vec<String>>,
}

impl Transcript {
    /// `about` says what the transcript is of.
    pub fn new(about: &str, below: impl Fn() -> Vec<String> + 'static) -> Self {
        below();
        Self { text: format!("# {about}\n"), below: Box::new(below) }
    }

    pub fn line(&mut self, text: impl Display) {
        self.text += &format!("{text}\n");
    }

    /// A line between parts.
    pub fn part(&mut self, name: impl Display) {
        self.line(format_args!("\n## {name}"));
    }

    /// Writes down a call, its answer as `show` has it, and all that went on below.
    pub fn call_as<T, E: Display>(
        &mut self,
        call: impl Display,
        f: impl FnOnce() -> Result<T, E>,
        show: impl FnOnce(&T) -> String,
    ) -> Result<T, E> {
        let result = f();
        let answer = match &result {
            Ok(value) => show(value),
            Err(error) => format!("ERROR {error}"),
        };
        self.text += &format!("{call} -> {answer}\n");
        self.below();
        result
    }

    /// The same of an answer that shows itself.
    pub fn call<T: Debug, E: Display>(
        &mut self,
        call: impl Display,
        f: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.call_as(call, f, |value| format!("{value:x?}"))
    }

    /// Writes down a value.
    pub fn note(&mut self, name: impl Display, value: impl Debug) {
        self.text += &format!("{name}: {value:?}\n");
        self.below();
    }

    fn below(&mut self) {
        let events = joined((self.below)());
        if !events.is_empty() {
            self.line(format_args!("    {events}"));
        }
    }

    /// Compares the transcript with the file of this name in `folder`, or writes that with `PORTCULLIS_WRITE_TABLES=1`.
    #[track_caller]
    pub fn assert_is(self, folder: &str, name: &str) {
        golden::is_golden(PathBuf::from(folder).join(name).with_extension("txt"), &self.text);
    }
}

/// One line of events. What happens many times in a row is one event; and of very many the ones in the middle are a number that tells
/// whether they are the same.
pub fn joined(events: Vec<String>) -> String {
    let mut line: Vec<String> = Vec::new();
    let mut events = events.into_iter().peekable();
    while let Some(event) = events.next() {
        let mut times = 1;
        while events.next_if_eq(&event).is_some() {
            times += 1;
        }
        line.push(if times > 1 { format!("{event} x{times}") } else { event });
    }
    if line.len() > MOST {
        let middle: Vec<String> = line.splice(MOST / 2..line.len() - MOST / 4, []).collect();
        line.insert(
            MOST / 2,
            format!("({} more, {:016x})", middle.len(), sum(middle.iter().flat_map(|event| event.bytes()))),
        );
    }
    line.join("; ")
}

/// FNV-1a, of Fowler, Noll and Vo.
pub fn sum(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
