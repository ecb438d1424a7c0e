//! The report for people: the verdict first, then a line for each policy, in 80 columns, or all figures.

use std::fmt::Write;

use anstyle::Style;
use indicatif::HumanCount;
use portcullis_trace::replay::{PolicyReport, Profile};
use portcullis_trace::{Printable, Summary};

use crate::choice::SMALL;
use crate::exposed::Exposed;
use crate::linux_own::Both;
use crate::look::{BAD, BOLD, GOOD, NOT_KNOWN, bytes, columns, number_of, short_time, wrap};
use crate::on_linux::{Offer, Place};
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
        let own = Both::of(runs).filter(|_| parts.offer == Offer::Module);
        // Writing to a string cannot fail.
        let _ = if parts.full {
            table::write(&mut text, runs, parts.unicode)
        } else if columns() < WIDE {
            write_narrow(&mut text, runs, verdict.choice, parts.unicode)
        } else {
            write_table(&mut text, runs, verdict.choice, own.as_ref(), parts.unicode)
        };
        let conditions = format!(
            "Costs and waits are per mapping (its map and its unmap); waits are assumed, those of {} ({}; --profile), page tables {} \
             (--format). The choice rests on counted waits and copies, which no other load changes (docs/replay.md). docs/strict.md models what devices \
             lose to page walks, `portcullis scale` many CPUs.",
            Printable(&profile.name),
            Printable(&profile.about),
            parts.format
        );
        text.push_str(&wrap(&conditions, ""));
        if let Some(own) = own {
            text.push_str(&wrap(&own.said(), ""));
        }
        if !parts.full && columns() >= WIDE && runs.number > 1 {
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

/// What there is room for in 40 columns: the share of the CPU's time, and what is open.
fn write_narrow(text: &mut String, runs: &Runs, choice: Option<&str>, unicode: bool) -> std::fmt::Result {
    writeln!(text, "\n{:<12}{:>9}{:>9}{:>10}", "", "CPU", "freed", "other")?;
    writeln!(text, "{BOLD}{:<12}{:>9}{:>9}{:>10}{BOLD:#}", "policy", "time", "memory", "data")?;
    writeln!(text, "{}", if unicode { "─" } else { "-" }.repeat(40))?;
    for (policy, cost) in runs.report.policies.iter().zip(&runs.costs) {
        let name = if choice == Some(policy.policy) { BOLD } else { Style::new() };
        let [(stale, a), (neighbour, b)] = open(policy, runs.report.trace.tells_copies());
        let share = if_known(cost, || share(policy));
        writeln!(
            text,
            "{name}{:<12}{name:#}{share:>9}{a}{stale:>9}{a:#}{b}{neighbour:>10}{b:#}",
            policy.policy
        )?;
    }
    let words = "Freed memory and other data: how much is open for 1 s. A terminal of 79 columns shows costs in nanoseconds, too.";
    write!(text, "\n{}", wrap(words, ""))
}

fn write_table(
    text: &mut String,
    runs: &Runs,
    choice: Option<&str>,
    own: Option<&Both<'_>>,
    unicode: bool,
) -> std::fmt::Result {
    let rule = if unicode { "─" } else { "-" };
    let rows = verdict::rows(runs);
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
    for (policy, cost) in runs.report.policies.iter().zip(&runs.costs) {
        let name = if choice == Some(policy.policy) { BOLD } else { Style::new() };
        let [(stale, a), (neighbour, b)] = open(policy, runs.report.trace.tells_copies());
        let from = verdict::small_from(&rows, policy);
        writeln!(
            text,
            "{name}{:<12}{name:#}{:>10}{:>6}{:>9}{:>8}{:>8}{a}{stale:>13}{a:#}{b}{neighbour:>13}{b:#}",
            policy.policy,
            if_known(cost, || HumanCount(cost.median_ns.round() as u64).to_string()),
            spread_of(cost, runs.number).unwrap_or("-".into()),
            if cost.known {
                HumanCount(policy.wait_ns_per_op.round() as u64).to_string()
            } else {
                "-".into()
            },
            if cost.known { share(policy) } else { "-".into() },
            from.map_or("-".into(), short_time),
        )?;
    }
    for own in own.iter().flat_map(|own| own.rows()) {
        let [(stale, a), (neighbour, b)] = open(own.like, runs.report.trace.tells_copies());
        let whole = |ns: f64| HumanCount(ns.round() as u64).to_string();
        writeln!(
            text,
            "{:<12}{:>10}{:>6}{:>9}{:>8}{:>8}{a}{stale:>13}{a:#}{b}{neighbour:>13}{b:#}",
            own.name,
            whole(own.ns()),
            "est.",
            whole(own.like.wait_ns_per_op),
            format!("{:.1} %", own.share(runs.report.work_ns) * 100.0),
            short_time(own.work_ns(SMALL)),
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
pub fn spread_of(cost: &Cost, runs: usize) -> Option<String> {
    let is_told = runs >= 2 && cost.median_ns >= 5.0 && cost.known;
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
