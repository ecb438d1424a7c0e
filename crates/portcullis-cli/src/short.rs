//! The report in short: the verdict, and a line for each policy, in 80 columns.

use std::fmt::Write;

use anstyle::Style;
use indicatif::HumanCount;
use portcullis_trace::Summary;
use portcullis_trace::replay::{PolicyReport, Profile};

use crate::look::{BAD, BOLD, GOOD, bytes, wrap};
use crate::runs::{Cost, Runs};
use crate::table;
use crate::verdict::{Verdict, noise};

/// Fewer mappings say little of what a policy costs.
const FEW: u64 = 1_000;

/// Renders the report; `unicode` where the terminal has more than ASCII.
pub fn render(runs: &Runs, profile: &Profile, summary: &Summary, unicode: bool) -> String {
    let mut text = String::new();
    for line in table::header(&runs.report, summary) {
        text.push_str(&wrap(&line, "  "));
    }
    if runs.costs.is_empty() {
        return text;
    }
    let verdict = Verdict::of(runs);
    if !verdict.sentences.is_empty() {
        text.push('\n');
    }
    for sentence in &verdict.sentences {
        text.push_str(&wrap(sentence, ""));
    }
    // Writing to a string cannot fail.
    let _ = write_table(&mut text, runs, verdict.choice, unicode);
    if let Some(noise) = noise(runs) {
        text.push_str(&wrap(&format!("Warning: {noise}."), ""));
    }
    if let Some(few) = runs.report.policies.first().filter(|policy| policy.operations < FEW) {
        let warning = format!(
            "Warning: {} mappings are few: what they cost is what first calls cost, and says little of a longer run.",
            few.operations
        );
        text.push_str(&wrap(&warning, ""));
    }
    let work = HumanCount(runs.report.work_ns as u64);
    text.push_str(&wrap(
        &format!(
            "Costs and waits are for each buffer, besides {work} ns of other work (--work); waits are those of {} ({}; --profile).",
            profile.name, profile.about
        ),
        "",
    ));
    text.push_str(&wrap("All figures: --full. What they mean: --legend. For scripts: --csv, --json.", ""));
    text
}

fn write_table(text: &mut String, runs: &Runs, choice: Option<&str>, unicode: bool) -> std::fmt::Result {
    let (rule, spread) = if unicode { ("─", "±") } else { ("-", "+-") };
    writeln!(text)?;
    writeln!(
        text,
        "{:<13}{:>9}{:>9}{:>10}{:>9}{:>14}{:>14}",
        "", "cost,", "", "of which", "full", "freed memory", "other data"
    )?;
    writeln!(
        text,
        "{BOLD}{:<13}{:>9}{:>9}{:>10}{:>9}{:>14}{:>14}{BOLD:#}",
        "policy", "ns", spread, "wait, ns", "speed", "open for 1 s", "open for 1 s"
    )?;
    writeln!(text, "{}", rule.repeat(78))?;
    for (policy, cost) in runs.report.policies.iter().zip(&runs.costs) {
        let name = if choice == Some(policy.policy) { BOLD } else { Style::new() };
        let share =
            policy.relative_to_passthrough.map_or("-".into(), |share| format!("{:.1} %", share * 100.0));
        let [(stale, a), (neighbour, b)] = open(policy);
        writeln!(
            text,
            "{name}{:<13}{name:#}{:>9}{:>9}{:>10}{share:>9}{a}{stale:>14}{a:#}{b}{neighbour:>14}{b:#}",
            policy.policy,
            HumanCount(cost.median_ns.round() as u64).to_string(),
            spread_of(cost, runs.number),
            HumanCount(policy.wait_ns_per_op.round() as u64).to_string(),
        )?;
    }
    writeln!(text)
}

/// Half of how far the runs lie apart, as a share of the median, where that is more than the timer's own error.
fn spread_of(cost: &Cost, runs: usize) -> String {
    if runs < 2 || cost.median_ns < 5.0 {
        return "-".into();
    }
    format!("{:.0} %", (cost.most_ns - cost.least_ns) / 2.0 / cost.median_ns * 100.0)
}

/// What a policy leaves open of freed memory, and of other data.
fn open(policy: &PolicyReport) -> [(String, Style); 2] {
    if policy.exposure_counted.is_none() {
        // The figures are of the memory that the recording names; the device has all the rest, too.
        return [("all".into(), BAD), ("all".into(), BAD)];
    }
    let exposure = &policy.exposure;
    [exposure.stale_byte_s, exposure.neighbour_byte_s].map(|open| match open {
        0.0 => ("none".into(), GOOD),
        _ => (bytes(open), BAD),
    })
}
