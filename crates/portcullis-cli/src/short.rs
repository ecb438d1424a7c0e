//! The report for people: the verdict first, then a line for each policy, in 80 columns, or all figures.

use std::fmt::Write;

use anstyle::Style;
use indicatif::HumanCount;
use portcullis_trace::replay::{PolicyReport, Profile};
use portcullis_trace::{Printable, Summary};

use crate::choice::{Candidate, SMALL};
use crate::exposed::Exposed;
use crate::look::{BAD, BOLD, GOOD, NOT_KNOWN, bytes, columns, number_of, short_time, wrap};
use crate::on_linux::{Offer, Place};
use crate::price::{Code, Prices};
use crate::runs::{Cost, Runs, cpu_time};
use crate::verdict::{self, Verdict};
use crate::{header, legend, sweep, table};

/// What of it is asked for.
#[derive(Debug, Clone)]
pub struct Parts<'a> {
    /// The format of page tables.
    pub format: &'a str,
    /// What is chosen among.
    pub offer: Offer,
    /// Which device to name in commands.
    pub place: Place,
    /// It is of all devices of the recording.
    pub all_devices: bool,
    /// What each policy costs at other rates, too.
    pub sweep: bool,
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
        let verdict = Verdict::told(runs, parts.offer, &parts.place);
        if !verdict.sentences.is_empty() {
            text.push('\n');
        }
        for sentence in &verdict.sentences {
            text.push_str(&wrap(sentence, ""));
        }
        if let (true, [_, _, ..]) = (parts.all_devices, &*summary.devices) {
            let sentence = format!(
                "The verdict is of {} together. One by itself may have another, which a replay of it alone tells: {}.",
                number_of(summary.devices.len() as u64, "device"),
                each_device(&summary.devices)
            );
            text.push_str(&wrap(&sentence, ""));
        }
        // Writing to a string cannot fail.
        let _ = if columns() < WIDE {
            write_narrow(&mut text, runs, verdict.choice, parts.offer, parts.unicode)
        } else {
            write_table(&mut text, runs, verdict.choice, parts.offer, parts.unicode)
        };
        if parts.full {
            text.push_str(if text.ends_with("\n\n") { "" } else { "\n" });
            let _ = table::write(&mut text, runs, parts.unicode);
        }
        let conditions = format!(
            "Costs and waits are per mapping (its map and its unmap); waits are assumed, those of {} ({}; --profile), page tables {} \
             (--format). The choice rests on counts, which no other load changes; --explain has them, and their prices. docs/strict.md models what devices \
             lose to page walks, `portcullis scale` many CPUs.",
            Printable(&profile.name),
            Printable(&profile.about),
            parts.format
        );
        text.push_str(&wrap(&conditions, ""));
        if let Some(said) = Prices::of(runs, parts.offer).said() {
            text.push_str(&wrap(&said, ""));
        }
        if columns() >= WIDE && runs.number > 1 && runs.costs.iter().all(|cost| cost.timed) {
            let spread = format!(
                "{} is half of the spread of {} in a row on this machine: at another time, or elsewhere, costs may differ by more.",
                spread_sign(parts.unicode),
                number_of(runs.number as u64, "run")
            );
            text.push_str(&wrap(&spread, ""));
        }
        if parts.sweep {
            text.push_str(&sweep::render(runs, parts.offer, parts.unicode));
        }
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

/// The options that replay each of `devices` alone; of many, the first ones.
fn each_device(devices: &[String]) -> String {
    const SOME: usize = 4;
    let options = devices.iter().take(SOME).map(|name| format!("`--device {}`", Printable(name)));
    let more = if devices.len() > SOME { ", .." } else { "" };
    options.collect::<Vec<_>>().join(", ") + more
}

/// The sign before a spread.
pub fn spread_sign(unicode: bool) -> &'static str {
    if unicode { "±" } else { "+-" }
}

/// How wide the short table is.
const WIDE: usize = 79;

/// The rows of the kernel's code.
fn of_kernel(runs: &Runs, offer: Offer) -> Vec<verdict::Row<'_>> {
    let is_kernel = |row: &verdict::Row<'_>| row.price.code != Code::Library && row.price.cost.is_told();
    verdict::rows(runs, offer).into_iter().filter(is_kernel).collect()
}

/// A row's name; bold where it is the choice.
fn named(name: &str, is_chosen: bool) -> String {
    let style = if is_chosen { BOLD } else { Style::new() };
    format!("{style}{name:<12}{style:#}")
}

/// Freed memory and other data that are [open](open), in columns this wide.
fn columns_of_open(policy: &PolicyReport, known: bool, [freed, other]: [usize; 2]) -> String {
    let [(stale, a), (neighbour, b)] = open(policy, known);
    format!("{a}{stale:>freed$}{a:#}{b}{neighbour:>other$}{b:#}")
}

/// What there is room for in 40 columns: the share of the CPU's time, and what is open.
fn write_narrow(
    text: &mut String,
    runs: &Runs,
    choice: Option<&str>,
    offer: Offer,
    unicode: bool,
) -> std::fmt::Result {
    writeln!(text, "\n{:<12}{:>9}{:>9}{:>10}", "", "CPU", "freed", "other")?;
    writeln!(text, "{BOLD}{:<12}{:>9}{:>9}{:>10}{BOLD:#}", "policy", "time", "memory", "data")?;
    writeln!(text, "{}", if unicode { "─" } else { "-" }.repeat(40))?;
    let of_kernel = of_kernel(runs, offer);
    let known = runs.report.trace.tells_copies();
    for row in &of_kernel {
        let policy = row.price.policy;
        let name = named(row.price.row, choice == Some(policy.policy));
        let share = format!("{:.1} %", row.lost() * 100.0);
        writeln!(text, "{name}{share:>9}{}", columns_of_open(policy, known, [9, 10]))?;
    }
    for (policy, cost) in runs.report.policies.iter().zip(&runs.costs) {
        let name = named(policy.policy, choice == Some(policy.policy) && of_kernel.is_empty());
        let share = if_known(cost, || share(policy));
        writeln!(text, "{name}{share:>9}{}", columns_of_open(policy, known, [9, 10]))?;
    }
    let words = "Freed memory and other data: how much is open for 1 s. A terminal of 79 columns shows costs in nanoseconds, too.";
    write!(text, "\n{}", wrap(words, ""))
}

fn write_table(
    text: &mut String,
    runs: &Runs,
    choice: Option<&str>,
    offer: Offer,
    unicode: bool,
) -> std::fmt::Result {
    let rule = if unicode { "─" } else { "-" };
    writeln!(text)?;
    writeln!(
        text,
        "{:<12}{:>10}{:>6}{:>9}{:>8}{:>8}{:>13}{:>13}",
        "", "cost,", "", "of which", "CPU", "< 1 %", "freed memory", "other data"
    )?;
    writeln!(
        text,
        "{BOLD}{:<12}{:>10}{:>6}{:>9}{:>8}{:>8}{:>13}{:>13}{BOLD:#}",
        "policy",
        "ns",
        spread_sign(unicode),
        "wait, ns",
        "time",
        "from",
        "open for 1 s",
        "open for 1 s"
    )?;
    writeln!(text, "{}", rule.repeat(WIDE))?;
    let of_kernel = of_kernel(runs, offer);
    let known = runs.report.trace.tells_copies();
    let whole = |ns: f64| HumanCount(ns.round() as u64).to_string();
    for row in &of_kernel {
        let policy = row.price.policy;
        writeln!(
            text,
            "{}{:>10}{:>6}{:>9}{:>8}{:>8}{}",
            named(row.price.row, choice == Some(policy.policy)),
            whole(row.price.ns),
            "est.",
            whole(policy.wait_ns_per_op),
            format!("{:.1} %", row.lost() * 100.0),
            short_time(row.work_ns(SMALL)),
            columns_of_open(policy, known, [13, 13]),
        )?;
    }
    if !of_kernel.is_empty() {
        writeln!(text, "The library's own code, for drivers that call it:")?;
    }
    let rows = verdict::rows(runs, Offer::Library);
    for (policy, cost) in runs.report.policies.iter().zip(&runs.costs) {
        let from = verdict::small_from(&rows, policy);
        writeln!(
            text,
            "{}{:>10}{:>6}{:>9}{:>8}{:>8}{}",
            named(policy.policy, choice == Some(policy.policy) && of_kernel.is_empty()),
            if_known(cost, || whole(cost.median_ns)),
            spread_of(cost, runs.number).unwrap_or("-".into()),
            if cost.known { whole(policy.wait_ns_per_op) } else { "-".into() },
            if cost.is_told() { share(policy) } else { "-".into() },
            from.map_or("-".into(), short_time),
            columns_of_open(policy, known, [13, 13]),
        )?;
    }
    writeln!(text)
}

/// A figure that depends on what `cost` is, in words.
pub fn if_known(cost: &Cost, figure: impl FnOnce() -> String) -> String {
    if !cost.known {
        NOT_KNOWN.into()
    } else if cost.timed {
        figure()
    } else {
        TOO_FEW.into()
    }
}

/// A figure of calls that were replayed, whether or not they copied what the recording's did.
pub fn if_timed(cost: &Cost, figure: impl FnOnce() -> String) -> String {
    if cost.timed { figure() } else { TOO_FEW.into() }
}

/// In place of what was measured of too few mappings.
const TOO_FEW: &str = "too few";

/// The share of the CPU's time that protection takes; a dash where nothing is mapped.
pub fn share(policy: &PolicyReport) -> String {
    policy.relative_to_passthrough.map_or("-".into(), |_| format!("{:.1} %", cpu_time(policy) * 100.0))
}

/// Half of how far the runs lie apart, as a share of the median, where that is more than the timer's own error.
pub fn spread_of(cost: &Cost, runs: usize) -> Option<String> {
    let is_told = runs >= 2 && cost.median_ns >= 5.0 && cost.is_told();
    is_told.then(|| format!("{:.0} %", (cost.most_ns - cost.least_ns) / 2.0 / cost.median_ns * 100.0))
}

/// What a policy leaves open of freed memory, and of other data, where the latter is `known`.
fn open(policy: &PolicyReport, known: bool) -> [(String, Style); 2] {
    Exposed::of(policy, known).map(|exposed| match exposed {
        Exposed::All => ("all".into(), BAD),
        Exposed::NotKnown => (NOT_KNOWN.into(), Style::new()),
        Exposed::Sum(0.0) => ("none".into(), GOOD),
        Exposed::Sum(open) => (bytes(open), BAD),
        Exposed::AtLeast(open) => (format!("> {}", bytes(open)), BAD),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
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
}
