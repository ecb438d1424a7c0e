//! What a guest said: the lines of its job, and its kernel's log.

use std::fmt::Write as _;

/// A line of a job (`tests/guest/lib.sh` lists them).
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    Holds(&'a str),
    Fails(&'a str),
    Skipped(&'a str),
    /// Its name and its value.
    Figure(&'a str, &'a str),
    /// What a device of the attempts reached: the way it was protected, the attempt, the outcome.
    Edu(&'a str, &'a str, &'a str),
    /// A command for QEMU's monitor.
    Host(&'a str),
    End,
    Other(&'a str),
}

impl<'a> Line<'a> {
    pub fn read(line: &'a str) -> Self {
        let line = line.trim_end();
        let edu = |rest: &'a str| {
            let (way, rest) = rest.split_once(": ")?;
            let (attempt, outcome) = rest.rsplit_once(": ")?;
            Some(Self::Edu(way, attempt, outcome))
        };
        let figure = |rest: &'a str| rest.split_once(": ").map(|(name, value)| Self::Figure(name, value));
        let read = |begin: &str| line.strip_prefix(begin);
        let known = read("ok ").map(Self::Holds);
        let known = known.or_else(|| read("not ok ").map(Self::Fails));
        let known = known.or_else(|| read("skip ").map(Self::Skipped));
        let known = known.or_else(|| read("figure ").and_then(figure));
        let known = known.or_else(|| read("edu ").and_then(edu));
        let known = known.or_else(|| read("host: ").map(Self::Host));
        known.unwrap_or(if line == "end" { Self::End } else { Self::Other(line) })
    }
}

/// What a run came to.
#[derive(Default)]
pub struct Report {
    pub held: usize,
    pub failed: Vec<String>,
    pub skipped: Vec<String>,
    pub figures: Vec<(String, String)>,
    pub edu: Vec<(String, String, String)>,
    pub ended: bool,
    said: Vec<String>,
}

impl Report {
    pub fn take(&mut self, line: &str) {
        self.said.push(line.trim_end().to_owned());
        match Line::read(line) {
            Line::Holds(_) => self.held += 1,
            Line::Fails(what) => self.failed.push(what.to_owned()),
            Line::Skipped(what) => self.skipped.push(what.to_owned()),
            Line::Figure(name, value) => self.figures.push((name.to_owned(), value.to_owned())),
            Line::Edu(way, attempt, outcome) => {
                self.edu.push((way.to_owned(), attempt.to_owned(), outcome.to_owned()));
            }
            Line::End => self.ended = true,
            Line::Host(_) | Line::Other(_) => {}
        }
    }

    /// All lines of the job.
    pub fn said(&self) -> impl Iterator<Item = &str> {
        self.said.iter().map(String::as_str)
    }

    /// What a hostile device reached, as a table of Markdown with a column for each way to protect.
    pub fn reached(&self) -> Option<String> {
        let mut ways: Vec<&str> = Vec::new();
        let mut attempts: Vec<&str> = Vec::new();
        for (way, attempt, _) in &self.edu {
            if !ways.contains(&way.as_str()) {
                ways.push(way);
            }
            if !attempts.contains(&attempt.as_str()) {
                attempts.push(attempt);
            }
        }
        let rule = "|---".repeat(ways.len() + 1);
        let mut table = format!("| | {} |\n{rule}|\n", ways.join(" | "));
        for attempt in attempts {
            let _ = write!(table, "| {attempt} |");
            for way in &ways {
                let found = self.edu.iter().find(|(w, a, _)| w == way && a == attempt);
                let _ = write!(table, " {} |", found.map_or("-", |(_, _, outcome)| outcome));
            }
            table.push('\n');
        }
        (!self.edu.is_empty()).then_some(table)
    }

    /// Looks through the kernel's log. With `hostile`, what the IOMMU says that it refused is as it should be.
    pub fn take_log(&mut self, log: &str, hostile: bool) {
        self.failed.extend(complaints(log, hostile).map(|line| format!("the kernel's log: {line}")));
    }

    /// What is wrong, with what the job said beside, if anything is.
    pub fn verdict(&self, log: &str) -> Result<(), String> {
        if self.failed.is_empty() && self.ended && self.held > 0 {
            return Ok(());
        }
        let mut text = String::new();
        for line in self.failed.iter() {
            let _ = writeln!(text, "not ok {line}");
        }
        if !self.ended {
            let _ = writeln!(text, "the job did not come to its end");
        }
        if self.held == 0 {
            let _ = writeln!(text, "nothing was found to hold");
        }
        for line in self.said.iter().filter(|line| matches!(Line::read(line), Line::Other(_))) {
            let _ = writeln!(text, "| {line}");
        }
        let last: Vec<&str> = log.lines().rev().take(60).collect();
        for line in last.iter().rev() {
            let _ = writeln!(text, "log: {line}");
        }
        Err(text)
    }
}

/// Words with which a kernel says that something is wrong with it. Stalls are not among them: where the host is busy, they come of that.
const WRONG: [&str; 15] = [
    "BUG:",
    "DMA-API:",
    "INFO: task",
    "INFO: trying to register non-static key",
    "KASAN:",
    "KFENCE:",
    "Kernel panic",
    "Oops:",
    "UBSAN:",
    "WARNING:",
    "double free",
    "general protection fault",
    "kernel BUG at",
    "refcount_t:",
    "stack guard page was hit",
];

/// Words with which it says that the IOMMU has refused something.
const REFUSED: [&str; 3] = ["DMAR: [DMA", "IO_PAGE_FAULT", "virtio_iommu: page fault"];

/// Reports of stalls, which take a word of the list.
const STALLS: [&str; 2] = ["soft lockup", "workqueue lockup"];

/// What a machine of QEMU says at each boot.
const USUAL: [&str; 2] = ["DMA-API: preallocated", "DMA-API: debugging enabled"];

fn complaints(log: &str, hostile: bool) -> impl Iterator<Item = &str> {
    log.lines().filter(move |line| {
        let has = |words: &[&str]| words.iter().any(|word| line.contains(word));
        (has(&WRONG) && !has(&STALLS) && !has(&USUAL)) || (has(&REFUSED) && !hostile)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_known_by_how_they_begin() {
        assert_eq!(Line::read("ok nvme strict: 12 reads"), Line::Holds("nvme strict: 12 reads"));
        assert_eq!(Line::read("not ok a: b\r"), Line::Fails("a: b"));
        assert_eq!(Line::read("skip a: b"), Line::Skipped("a: b"));
        assert_eq!(Line::read("figure reads of 4 KiB: 5"), Line::Figure("reads of 4 KiB", "5"));
        assert_eq!(Line::read("edu lazy: write: REACHED"), Line::Edu("lazy", "write", "REACHED"));
        assert_eq!(Line::read("host: device_del hot"), Line::Host("device_del hot"));
        assert_eq!((Line::read("end"), Line::read("ended")), (Line::End, Line::Other("ended")));
    }

    #[test]
    fn a_report_of_the_kernel_is_a_failure_and_a_refusal_where_no_device_is_hostile() {
        let log = "a\n[ 1.0] WARNING: CPU: 0 PID: 1 at x\nDMA-API: preallocated 65536 debug entries\n\
                   watchdog: BUG: soft lockup - CPU#0\nDMAR: [DMA Write NO_PASID] Request device [00:0a.0]\n";
        assert_eq!(complaints(log, true).count(), 1);
        assert_eq!(complaints(log, false).count(), 2);
        let mut report = Report::default();
        report.take("ok a");
        assert!(report.verdict("").is_err(), "it did not end");
        report.take("end");
        assert!(report.verdict("").is_ok());
        report.take_log(log, true);
        let said = report.verdict(log).unwrap_err();
        assert!(said.starts_with("not ok the kernel's log: [ 1.0] WARNING"), "{said}");
        let mut empty = Report::default();
        empty.take("end");
        assert!(empty.verdict("").is_err(), "nothing was checked");
    }
}
