//! What Linux's own code takes for a mapping, estimated: its instructions were counted, and this machine's time for one was measured.

use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, PolicyReport, Report};

use crate::look::count;
use crate::runs::Runs;

/// Instructions of a map and its unmap, without waits and copies.
#[derive(Debug, Clone, Copy)]
struct Instructions {
    /// For a page.
    page: f64,
    /// For each more in one piece of memory.
    more: f64,
    /// For each more that is a piece of its own, in a list.
    piece: f64,
}

impl Instructions {
    /// Linux 6.12 behind VT-d, in a guest that counts them: the first, the third and the fourth row of docs/linux.md.
    const LINUX_STRICT: Self = Self::from_rows(2_604.0, 3_210.0, 11_433.0);
    const LINUX_LAZY: Self = Self::from_rows(2_105.0, 2_708.0, 10_931.0);
    /// The library's, as its tests have callgrind count them: raw-1, raw-4 and sg-16.
    const OURS: Self = Self { page: 490.0, more: (635.0 - 490.0) / 3.0, piece: (2_110.0 - 490.0) / 15.0 };

    /// From counts for a page, for 16 pages in one piece, and for a list of 16.
    const fn from_rows(page: f64, one_piece: f64, list: f64) -> Self {
        Self { page, more: (one_piece - page) / 15.0, piece: (list - page) / 15.0 }
    }

    /// Instructions for a mapping of this number of pages and pieces.
    fn of(self, pages: f64, pieces: f64) -> f64 {
        self.page + self.piece * (pieces - 1.0).max(0.0) + self.more * (pages - pieces).max(0.0)
    }
}

/// How much longer, or shorter, an instruction of Linux may take than one of the library.
const APART: f64 = 2.0;

/// One of Linux's own modes.
#[derive(Debug, Clone, Copy)]
pub struct Own<'a> {
    pub name: &'static str,
    /// The row with its waits, and with what it leaves open.
    pub like: &'a PolicyReport,
    /// Instructions for each mapping.
    pub instructions: f64,
    /// What they take.
    code_ns: f64,
}

impl Own<'_> {
    /// Nanoseconds for each mapping, waits included.
    pub fn ns(&self) -> f64 {
        self.code_ns + self.like.wait_ns_per_op
    }

    /// The least and the most that it may be.
    pub fn range_ns(&self) -> [f64; 2] {
        [self.code_ns / APART, self.code_ns * APART].map(|ns| ns + self.like.wait_ns_per_op)
    }

    /// The share of the CPU's time, where `work_ns` of other work comes with each mapping.
    pub fn share(&self, work_ns: f64) -> f64 {
        self.ns() / (work_ns + self.ns())
    }

    /// The other work for each mapping from which on that share is less than `share`.
    pub fn work_ns(&self, share: f64) -> f64 {
        self.ns() / share - self.ns()
    }
}

/// Both modes.
#[derive(Debug, Clone, Copy)]
pub struct Both<'a> {
    pub strict: Own<'a>,
    pub lazy: Option<Own<'a>>,
    /// What an instruction took.
    pub instruction_ns: f64,
}

impl<'a> Both<'a> {
    /// `None` where strict was not replayed, or the recording does not tell what mappings are like.
    pub fn of(runs: &'a Runs) -> Option<Self> {
        let Report { trace, policies, .. } = &runs.report;
        let (strict, cost) =
            policies.iter().zip(&runs.costs).find(|(policy, _)| policy.mode == Mode::Each(Policy::Strict))?;
        let pieces = trace.pieces_mapped as f64 / trace.maps as f64;
        if !trace.costs_known || trace.maps == 0 || pieces <= 0.0 {
            return None;
        }
        let (pieces, pages) =
            (pieces.max(1.0), (trace.bytes_mapped as f64 / 4096.0 / trace.maps as f64).max(pieces));
        let instruction_ns =
            (cost.median_ns - strict.wait_ns_per_op).max(0.0) / Instructions::OURS.of(pages, pieces);
        let own = |name, like, counts: Instructions| {
            let instructions = counts.of(pages, pieces);
            Own { name, like, instructions, code_ns: instructions * instruction_ns }
        };
        let lazy = policies.iter().find(|policy| policy.mode == Policy::LAZY.into());
        Some(Self {
            strict: own("linux-strict", strict, Instructions::LINUX_STRICT),
            lazy: lazy.map(|lazy| own("linux-lazy", lazy, Instructions::LINUX_LAZY)),
            instruction_ns,
        })
    }

    pub fn rows(&self) -> impl Iterator<Item = Own<'a>> {
        std::iter::once(self.strict).chain(self.lazy)
    }

    /// Where the rows come from.
    pub fn said(&self) -> String {
        let each = |text: fn(&Own<'_>) -> String| {
            self.rows().map(|own| text(&own)).collect::<Vec<_>>().join(" and ")
        };
        let ns = |ns: f64| count(ns.round() as u64);
        let ranges: Vec<String> = self
            .rows()
            .map(|own| {
                let [least, most] = own.range_ns().map(ns);
                format!("{} {least} to {most} ns", own.name)
            })
            .collect();
        format!(
            "{} are Linux's own code, estimated: the {} instructions that Linux 6.12 takes for such a mapping (docs/linux.md; counted in a guest), at the \
             {:.2} ns that one took in the row strict, and the same waits. Instructions may take half or twice that: {}. Not in it: CPUs that wait for \
             each other's locks (`portcullis scale` has them).",
            each(|own| own.name.to_owned()),
            each(|own| count(own.instructions.round() as u64)),
            self.instruction_ns,
            ranges.join(", "),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::short_run;

    /// Runs whose mappings have `bytes` in `pieces`, and whose strict took 490 ns besides its waits.
    fn runs(bytes: u64, pieces: u64) -> Runs {
        let (mut runs, _) = short_run();
        let trace = &mut runs.report.trace;
        (trace.maps, trace.bytes_mapped, trace.pieces_mapped) = (10, bytes * 10, pieces * 10);
        for (policy, cost) in runs.report.policies.iter_mut().zip(&mut runs.costs) {
            policy.wait_ns_per_op = if policy.policy == "strict" { 700.0 } else { 5.0 };
            cost.median_ns = 490.0 + policy.wait_ns_per_op;
        }
        runs
    }

    #[test]
    fn counts_of_linux_s_instructions_are_those_of_the_document() {
        let document = include_str!("../../../docs/linux.md");
        let cells = |start: &str| -> Vec<f64> {
            let row = document.lines().find(|line| line.starts_with(start)).unwrap();
            row.split('|').skip(2).take(2).map(|cell| cell.trim().replace(',', "").parse().unwrap()).collect()
        };
        let [page, one, list] = [
            "| 4 KiB, without the data | 2,105 |",
            "| 64 KiB in one piece, without the data |",
            "| 16 pages in a list, without the data |",
        ]
        .map(cells);
        for (at, counts) in [(0, Instructions::LINUX_LAZY), (1, Instructions::LINUX_STRICT)] {
            let said = [counts.of(1.0, 1.0), counts.of(16.0, 1.0), counts.of(16.0, 16.0)];
            assert_eq!(said.map(f64::round), [page[at], one[at], list[at]]);
        }
        let bench = include_str!("../../portcullis-bench/tests/instructions.rs");
        for bar in ["(\"raw-1\", 490)", "(\"raw-4\", 635)", "(\"sg-16\", 2110)"] {
            assert!(bench.contains(bar), "{bar}");
        }
    }

    #[test]
    fn linux_s_modes_have_the_price_of_an_instruction_here() {
        let runs = runs(4096, 1);
        let both = Both::of(&runs).unwrap();
        let lazy = both.lazy.unwrap();
        assert!((both.instruction_ns - 1.0).abs() < 1e-9);
        assert!((both.strict.ns() - 3_304.0).abs() < 1e-6 && (lazy.ns() - 2_110.0).abs() < 1e-6);
        assert_eq!(lazy.range_ns().map(f64::round), [1_058.0, 4_215.0]);
        assert!((lazy.share(2_110.0) - 0.5).abs() < 1e-9);
        assert!((lazy.share(lazy.work_ns(0.01)) - 0.01).abs() < 1e-9);
        let said = both.said();
        assert!(said.starts_with("linux-strict and linux-lazy are Linux's own code, estimated: the 2,604 and 2,105 instructions"), "{said}");
        assert!(said.contains("linux-strict 2,002 to 5,908 ns, linux-lazy 1,058 to 4,215 ns"), "{said}");
    }

    #[test]
    fn lists_take_more_for_each_piece() {
        let runs = runs(65_536, 16);
        let both = Both::of(&runs).unwrap();
        assert_eq!(both.strict.instructions.round(), 11_433.0);
        // The library's time was for 2,110 instructions.
        assert!((both.instruction_ns - 490.0 / 2_110.0).abs() < 1e-9);
    }

    #[test]
    fn what_the_recording_does_not_tell_is_not_estimated() {
        let mut runs = runs(4096, 1);
        runs.report.trace.pieces_mapped = 0;
        assert!(Both::of(&runs).is_none());
        runs.report.trace.pieces_mapped = 10;
        runs.report.trace.costs_known = false;
        assert!(Both::of(&runs).is_none());
    }
}
