//! The report for people: the verdict first, then a line for each policy, in 80 columns, or all figures.

use std::fmt::Write;

use anstyle::Style;
use indicatif::HumanCount;
use portcullis_trace::replay::{PolicyReport, Profile, TraceReport};
use portcullis_trace::{Printable, Summary};

use crate::args::LONGEST_NS;
use crate::look::{BAD, BOLD, GOOD, NOT_KNOWN, bytes, count, wrap};
use crate::runs::{Cost, Runs, cpu_time};
use crate::verdict::Verdict;
use crate::{header, legend, table};

/// What of it is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    /// The format of page tables.
    pub format: &'a str,
    /// What the rest of a mapping takes was not said.
    pub no_work: bool,
    /// All figures instead of the short table.
    pub full: bool,
    /// What its words mean.
    pub legend: bool,
    /// Whether the terminal has more than ASCII.
    pub unicode: bool,
}

/// Renders the report.
pub fn render(runs: &Runs, profile: &Profile, summary: &Summary, parts: Parts<'_>) -> String {
    let mut text = String::new();
    for line in header::lines(&runs.report, summary) {
        text.push_str(&wrap(&line, "  "));
    }
    if !runs.costs.is_empty() {
        let verdict = Verdict::of(runs);
        if !verdict.sentences.is_empty() {
            text.push('\n');
        }
        for sentence in &verdict.sentences {
            text.push_str(&wrap(sentence, ""));
        }
        // Writing to a string cannot fail.
        let _ = if parts.full {
            table::write(&mut text, runs, parts.unicode)
        } else {
            write_table(&mut text, runs, verdict.choice, parts.unicode)
        };
        let conditions = format!(
            "Costs and waits are per mapping (its map and its unmap); waits are those of {} ({}; --profile), page tables {} \
             (--format).",
            Printable(&profile.name),
            Printable(&profile.about),
            parts.format
        );
        text.push_str(&wrap(&conditions, ""));
        let busy = if parts.no_work { busy(&runs.report.trace, summary.seconds()) } else { None };
        text.extend(busy.map(|busy| wrap(&busy, "")));
        if !parts.legend {
            let more = if parts.full { "" } else { "All figures: --full. " };
            let pointers = format!("{more}What they mean: --legend. For scripts: --csv, --json.");
            text.push_str(&wrap(&pointers, ""));
        }
    }
    if parts.legend {
        text.push_str(&legend::render(profile, parts.unicode));
    }
    text
}

/// Tells the `--work` of CPUs that were busy throughout the recording. `None` for a time that `--work` does not take.
fn busy(trace: &TraceReport, seconds: f64) -> Option<String> {
    let ns = trace.cpus as f64 * seconds * 1e9 / trace.maps as f64;
    let cpus = if trace.cpus == 1 { "CPU".into() } else { format!("{} CPUs", count(trace.cpus)) };
    (1.0..=LONGEST_NS).contains(&ns).then(|| {
        let work = to_ask_for(ns);
        format!("With the recording's {cpus} busy throughout, --work would be {work}.")
    })
}

/// A time as `--work` takes it.
fn to_ask_for(ns: f64) -> String {
    match ns {
        _ if ns < 999.5 => format!("{ns:.0}ns"),
        _ if ns < 9_950.0 => format!("{:.1}us", ns / 1e3),
        _ if ns < 999_500.0 => format!("{:.0}us", ns / 1e3),
        _ if ns < 9.95e6 => format!("{:.1}ms", ns / 1e6),
        _ => format!("{:.0}ms", ns / 1e6),
    }
}

/// The sign before a spread.
pub fn spread_sign(unicode: bool) -> &'static str {
    if unicode { "±" } else { "+-" }
}

fn write_table(text: &mut String, runs: &Runs, choice: Option<&str>, unicode: bool) -> std::fmt::Result {
    let rule = if unicode { "─" } else { "-" };
    writeln!(text)?;
    writeln!(
        text,
        "{:<13}{:>9}{:>9}{:>10}{:>9}{:>14}{:>14}",
        "", "cost,", "", "of which", "CPU", "freed memory", "other data"
    )?;
    writeln!(
        text,
        "{BOLD}{:<13}{:>9}{:>9}{:>10}{:>9}{:>14}{:>14}{BOLD:#}",
        "policy",
        "ns",
        spread_sign(unicode),
        "wait, ns",
        "time",
        "open for 1 s",
        "open for 1 s"
    )?;
    writeln!(text, "{}", rule.repeat(78))?;
    for (policy, cost) in runs.report.policies.iter().zip(&runs.costs) {
        let name = if choice == Some(policy.policy) { BOLD } else { Style::new() };
        let [(stale, a), (neighbour, b)] = open(policy, runs.report.trace.tells_copies());
        writeln!(
            text,
            "{name}{:<13}{name:#}{:>9}{:>9}{:>10}{:>9}{a}{stale:>14}{a:#}{b}{neighbour:>14}{b:#}",
            policy.policy,
            if_known(cost, || HumanCount(cost.median_ns.round() as u64).to_string()),
            spread_of(cost, runs.number),
            if cost.known {
                HumanCount(policy.wait_ns_per_op.round() as u64).to_string()
            } else {
                "-".into()
            },
            if cost.known { share(policy) } else { "-".into() },
        )?;
    }
    writeln!(text)
}

/// A figure that depends on what `cost` is, in words.
pub fn if_known(cost: &Cost, figure: impl FnOnce() -> String) -> String {
    if cost.known { figure() } else { NOT_KNOWN.into() }
}

/// The share of the CPU's time that protection takes; a dash where nothing is mapped.
pub fn share(policy: &PolicyReport) -> String {
    policy.relative_to_passthrough.map_or("-".into(), |_| format!("{:.1} %", cpu_time(policy) * 100.0))
}

/// Half of how far the runs lie apart, as a share of the median, where that is more than the timer's own error.
fn spread_of(cost: &Cost, runs: usize) -> String {
    if runs < 2 || cost.median_ns < 5.0 || !cost.known {
        return "-".into();
    }
    format!("{:.0} %", (cost.most_ns - cost.least_ns) / 2.0 / cost.median_ns * 100.0)
}

/// What a policy leaves open of freed memory, and of other data, where the latter is `known`.
fn open(policy: &PolicyReport, known: bool) -> [(String, Style); 2] {
    if policy.exposure_counted.is_none() {
        // The figures are of the memory that the recording names; the device has all the rest, too.
        return [("all".into(), BAD), ("all".into(), BAD)];
    }
    let exposure = &policy.exposure;
    let word = |open| match open {
        0.0 => ("none".into(), GOOD),
        _ => (bytes(open), BAD),
    };
    let neighbour = match exposure.neighbour_byte_s {
        open if known => word(open),
        0.0 => (NOT_KNOWN.into(), Style::new()),
        // That much is of the mappings of which the bytes are known.
        open => (format!("> {}", bytes(open)), BAD),
    };
    [word(exposure.stale_byte_s), neighbour]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Arguments;
    use crate::replay::short_run;

    #[test]
    fn what_is_not_known_to_be_open_is_not_called_none() {
        let (mut runs, _) = short_run();
        let policy = runs.report.policies.iter_mut().find(|policy| policy.policy == "strict").unwrap();
        (policy.exposure.stale_byte_s, policy.exposure.neighbour_byte_s) = (0.0, 0.0);
        let words = |known| open(policy, known).map(|(word, _)| word);
        assert_eq!(words(true), ["none", "none"]);
        assert_eq!(words(false), ["none", "not known"]);
    }

    #[test]
    fn what_cpus_at_work_come_to_can_be_asked_for() {
        let (runs, _) = short_run();
        let of = |cpus, seconds, maps| {
            let trace = TraceReport { cpus, maps, ..runs.report.trace.clone() };
            busy(&trace, seconds)
        };
        let said = |cpus: &str, work: &str| {
            Some(format!("With the recording's {cpus} busy throughout, --work would be {work}."))
        };
        assert_eq!(of(2, 0.7, 15_000), said("2 CPUs", "93us"));
        assert_eq!(of(1, 10.0, 10), said("CPU", "1000ms"));
        assert_eq!(of(1, 10.0, 9), None, "more than a second");
        assert_eq!((of(2, 0.7, 0), of(2, 0.0, 1), of(0, 0.7, 1)), (None, None, None));
        for ns in
            [1.0, 480.0, 999.4, 1_250.0, 9_949.0, 92_700.0, 999_499.0, 1.24e6, 9.949e6, 123e6, LONGEST_NS]
        {
            let work = Arguments::replay(&["--work", &to_ask_for(ns)]).work.unwrap() as f64;
            assert!((work / ns - 1.0).abs() < 0.05, "{ns}: {work}");
        }
    }
}
