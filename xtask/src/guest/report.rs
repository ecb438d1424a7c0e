//! What a guest said: the lines of its job, and its kernel's log.

use std::fmt::Write as _;

/// A line of a job (`tests/guest/lib.sh` lists them).
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    Holds(&'a str),
    Fails(&'a str),
    Skipped(&'a str),
    /// A cell of a table: which table, row and column, and what stands there.
    Figure([&'a str; 3], &'a str),
    /// A command for QEMU's monitor.
    Host(&'a str),
    /// How many complaints of the kernel with a text the job provokes.
    Expected(usize, &'a str),
    End,
    Other(&'a str),
}

impl<'a> Line<'a> {
    pub fn read(line: &'a str) -> Self {
        let line = line.trim_end();
        let figure = |rest: &'a str| {
            let (place, value) = rest.rsplit_once(": ")?;
            let mut place = place.split(" | ");
            let cell = [place.next()?, place.next()?, place.next()?];
            place.next().is_none().then_some(Self::Figure(cell, value))
        };
        let read = |begin: &str| line.strip_prefix(begin);
        let known = read("ok ").map(Self::Holds);
        let known = known.or_else(|| read("not ok ").map(Self::Fails));
        let known = known.or_else(|| read("skip ").map(Self::Skipped));
        let known = known.or_else(|| read("figure ").and_then(figure));
        let known = known.or_else(|| read("host: ").map(Self::Host));
        let expected = |rest: &'a str| {
            let (count, text) = rest.split_once(' ')?;
            Some(Self::Expected(count.parse().ok()?, text))
        };
        let known = known.or_else(|| read("expected ").and_then(expected));
        known.unwrap_or(if line == "end" { Self::End } else { Self::Other(line) })
    }
}

/// What a run came to.
#[derive(Default)]
pub struct Report {
    pub held: usize,
    pub failed: Vec<String>,
    pub skipped: Vec<String>,
    figures: Vec<([String; 3], String)>,
    /// Complaints that are still to come, by their texts.
    expected: Vec<(usize, String)>,
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
            Line::Figure(cell, value) => self.figures.push((cell.map(str::to_owned), value.to_owned())),
            Line::Expected(count, text) => self.expected.push((count, text.to_owned())),
            Line::End => self.ended = true,
            Line::Host(_) | Line::Other(_) => {}
        }
    }

    /// The figures, as tables of Markdown.
    pub fn tables(&self) -> String {
        let mut text = String::new();
        let cells = || self.figures.iter().map(|(cell, _)| cell);
        for table in distinct(cells().map(|cell| cell[0].as_str())) {
            let of_table = || cells().filter(|cell| cell[0] == table);
            let columns = distinct(of_table().map(|cell| cell[2].as_str()));
            let ratios: Vec<_> = COUNTERPARTS
                .iter()
                .filter(|(one, other)| columns.contains(one) && columns.contains(other))
                .collect();
            let numbers = self.figures.iter().filter(|(cell, _)| cell[0] == table);
            let numbers = numbers.clone().all(|(_, value)| value.parse::<u64>().is_ok());
            // What is counted is compared by eye.
            let is_time = table.starts_with("ns ") || table.starts_with("us ");
            let ratios = if numbers && is_time { ratios } else { Vec::new() };
            let _ = write!(text, "\n| {table} | {}", columns.join(" | "));
            for (one, other) in &ratios {
                let _ = write!(text, " | {one} / {other}");
            }
            let _ = write!(text, " |\n{}|\n", "|---".repeat(columns.len() + ratios.len() + 1));
            for row in distinct(of_table().map(|cell| cell[1].as_str())) {
                let _ = write!(text, "| {row}");
                let at = |column: &str| self.median([table, row, column]);
                for column in &columns {
                    let _ = write!(text, " | {}", at(column));
                }
                for (one, other) in &ratios {
                    let _ = match (at(one).parse::<f64>(), at(other).parse::<f64>()) {
                        (Ok(one), Ok(other)) if other > 0.0 => write!(text, " | {:.3}", one / other),
                        _ => write!(text, " | -"),
                    };
                }
                text.push_str(" |\n");
            }
        }
        text
    }

    /// What stands in a cell: of several numbers the one in the middle.
    fn median(&self, cell: [&str; 3]) -> String {
        let values = self.figures.iter().filter(|(at, _)| *at == cell).map(|(_, value)| value);
        let mut values: Vec<&String> = values.collect();
        values.sort_by_key(|value| value.parse::<u64>().ok());
        values.get(values.len() / 2).map_or_else(|| "-".to_owned(), |value| (*value).clone())
    }

    /// Looks through the kernel's log. With `hostile`, what the IOMMU says that it refused is as it should be. Of what the job provoked
    /// there must be as much as it said, no less and no more.
    pub fn take_log(&mut self, log: &str, hostile: bool) {
        for line in complaints(log, hostile) {
            match self.expected.iter_mut().find(|(count, text)| *count > 0 && line.contains(text.as_str())) {
                Some((count, _)) => *count -= 1,
                None => self.failed.push(format!("the kernel's log: {line}")),
            }
        }
        let missing = self.expected.iter().filter(|(count, _)| *count > 0);
        self.failed.extend(
            missing.map(|(count, text)| format!("the kernel's log lacks {count} lines with: {text}")),
        );
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
        // What follows the first complaint says what it is about.
        let first = complaints(log, true).next();
        let first = first.and_then(|complaint| log.lines().position(|line| line == complaint));
        let count = log.lines().count();
        for (at, line) in log.lines().enumerate() {
            if at + 60 >= count || first.is_some_and(|first| (first..first + 100).contains(&at)) {
                let _ = writeln!(text, "log: {line}");
            }
        }
        Err(text)
    }
}

/// Which of our ways is measured beside which of Linux's.
const COUNTERPARTS: [(&str, &str); 5] = [
    ("lazy", "linux-lazy"),
    ("strict", "linux-strict"),
    ("bounce", "linux-lazy"),
    ("bounce", "linux-strict"),
    ("auto", "linux-strict"),
];

/// The words, each once, in the order in which they come.
fn distinct<'a>(words: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found = Vec::new();
    for word in words {
        if !found.contains(&word) {
            found.push(word);
        }
    }
    found
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
        assert_eq!(Line::read("figure a: b | c | lazy: 5"), Line::Figure(["a: b", "c", "lazy"], "5"));
        assert_eq!(Line::read("figure a | b: 5"), Line::Other("figure a | b: 5"));
        assert_eq!(Line::read("host: device_del hot"), Line::Host("device_del hot"));
        assert_eq!(Line::read("expected 4 DMA-API: a"), Line::Expected(4, "DMA-API: a"));
        assert_eq!((Line::read("end"), Line::read("ended")), (Line::End, Line::Other("ended")));
    }

    #[test]
    fn figures_become_tables_with_the_value_in_the_middle() {
        let mut report = Report::default();
        for (way, value) in [("linux-lazy", 9), ("linux-lazy", 40), ("linux-lazy", 10), ("lazy", 5)] {
            report.take(&format!("figure ns in all | 4 KiB | {way}: {value}"));
        }
        report.take("figure reached | page | lazy: nothing");
        let wanted = "\n| ns in all | linux-lazy | lazy | lazy / linux-lazy |\n|---|---|---|---|\n| 4 KiB | 10 | 5 | 0.500 |\n\
                      \n| reached | lazy |\n|---|---|\n| page | nothing |\n";
        assert_eq!(report.tables(), wanted);
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
        // What a job provokes is no failure, as often as it said; less is one, and so is more.
        for (said, failures) in [(1, 0), (2, 1), (0, 1)] {
            let mut provoked = Report::default();
            provoked.take(&format!("expected {said} PID: 1 at x"));
            provoked.take_log(log, true);
            assert_eq!(provoked.failed.len(), failures, "{said}: {:?}", provoked.failed);
        }
        let mut empty = Report::default();
        empty.take("end");
        assert!(empty.verdict("").is_err(), "nothing was checked");
    }
}
