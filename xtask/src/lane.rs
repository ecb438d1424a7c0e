//! A second lane of tests: it runs beside the first, and what it prints follows what the first has printed.

use std::fmt;
use std::io::{PipeReader, Read};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

/// The command that is the second lane, which `cargo xtask test` gives itself.
pub const BESIDE: &str = "beside-test";

/// What was done, and what was not.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub done: usize,
    skipped: usize,
    reasons: Vec<String>,
}

/// The end of the first line of a summary.
const SKIPPED: &str = " tests skipped";

impl Summary {
    /// Counts `tests` that were not run.
    pub fn skip(&mut self, tests: usize, reason: String) {
        self.skipped += tests;
        self.reasons.push(reason);
    }

    /// Adds another's counts and reasons.
    pub fn add(&mut self, other: Self) {
        self.done += other.done;
        self.skipped += other.skipped;
        self.reasons.extend(other.reasons);
    }

    /// Splits what a lane has printed into its output and its summary.
    fn split(text: &str) -> Option<(&str, Self)> {
        let end = text.rfind(&format!("{SKIPPED}\n"))?;
        let start = text[..end].rfind('\n').map_or(0, |at| at + 1);
        let (done, skipped) = text[start..end].split_once(" steps done, ")?;
        let reasons = text[end..].lines().filter_map(|line| line.strip_prefix("skipped: "));
        let reasons = reasons.map(str::to_owned).collect();
        Some((&text[..start], Self { done: done.parse().ok()?, skipped: skipped.parse().ok()?, reasons }))
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{} steps done, {}{SKIPPED}", self.done, self.skipped)?;
        self.reasons.iter().try_for_each(|why| writeln!(out, "skipped: {why}"))
    }
}

/// A second process of this program. If the first ends early, the pipe between them breaks, and with it what writes there.
pub struct Lane {
    child: Child,
    printed: Option<JoinHandle<std::io::Result<String>>>,
}

impl Lane {
    /// Starts it.
    pub fn start() -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("the second lane: {error}");
        let (reader, writer) = std::io::pipe().map_err(failed)?;
        let child = Command::new(std::env::current_exe().map_err(failed)?)
            .arg(BESIDE)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().map_err(failed)?)
            .stderr(writer)
            .spawn()
            .map_err(failed)?;
        Ok(Self { child, printed: Some(std::thread::spawn(|| collect(reader))) })
    }

    /// Fails if it has failed.
    pub fn check(&mut self) -> Result<(), String> {
        match self.child.try_wait() {
            Ok(Some(status)) if !status.success() => self.finish().map(drop),
            Ok(_) => Ok(()),
            Err(error) => Err(format!("the second lane: {error}")),
        }
    }

    /// Waits for its end, and prints what it has printed.
    pub fn end(mut self) -> Result<Summary, String> {
        self.finish()
    }

    fn finish(&mut self) -> Result<Summary, String> {
        let printed = self.printed.take().map(JoinHandle::join);
        let Some(Ok(Ok(text))) = printed else { return Err("the second lane's output was lost".to_owned()) };
        let status = self.child.wait().map_err(|error| format!("the second lane: {error}"))?;
        match Summary::split(&text) {
            Some((output, summary)) if status.success() => {
                eprint!("{output}");
                Ok(summary)
            }
            _ => {
                eprint!("{text}");
                Err(format!("what runs beside: {status}"))
            }
        }
    }
}

fn collect(mut reader: PipeReader) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_read_as_it_is_printed() {
        let mut summary = Summary { done: 3, ..Summary::default() };
        summary.skip(21, "Miri, 21 tests: no Rust".to_owned());
        summary.skip(1, "x: y".to_owned());
        let text = format!("== a\n1 steps done, 0 tests skipped\n== b\n{summary}");
        let (output, read) = Summary::split(&text).unwrap();
        assert_eq!((output, &read), ("== a\n1 steps done, 0 tests skipped\n== b\n", &summary));
        assert!(Summary::split("== a\n").is_none());
        let mut sum = Summary { done: 1, ..Summary::default() };
        sum.add(read);
        assert_eq!(
            sum.to_string(),
            "4 steps done, 22 tests skipped\nskipped: Miri, 21 tests: no Rust\nskipped: x: y\n"
        );
    }
}
