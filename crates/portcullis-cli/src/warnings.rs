//! What makes a replay's figures doubtful, for any form of report. All of it goes to standard error, behind the report; what
//! is merely to be known of a recording stands in the report, as notes.

use indicatif::HumanCount;
use portcullis_trace::{Printable, Summary};

use crate::look::number_of;
use crate::runs::{Cost, Runs};

/// How many names of events a warning lists.
const NAMES: usize = 4;

/// What a build for tests measures is of no use to anybody else.
const UNOPTIMISED: &str = "This program was built without optimisation, so its own code costs ten to twenty times what it does when it is \
                           built with `--release`.";

/// All warnings of this program, a sentence or two each.
pub fn all(runs: &Runs, summary: &Summary) -> Vec<String> {
    let build = cfg!(debug_assertions).then(|| UNOPTIMISED.to_owned());
    build.into_iter().chain(of(runs, summary)).collect()
}

/// Those of the figures, whatever the build is.
pub fn of(runs: &Runs, summary: &Summary) -> Vec<String> {
    let name = Printable(&summary.name);
    let mut all: Vec<String> =
        summary.kept_warnings.iter().map(|warning| format!("{name}: {warning}")).collect();
    let more = summary.warnings.saturating_sub(all.len() as u64);
    if more > 0 {
        all.push(format!("{name}: {}", number_of(more, "more warning")));
    }
    for policy in &runs.report.policies {
        if let Some(first) = &policy.first_failure {
            let calls = number_of(policy.failures, "call");
            all.push(format!("{}: {calls} failed, the first at {first}", policy.policy));
        }
    }
    all.extend(unused(summary));
    all.extend(noise(runs));
    all.extend(runs.too_long.then(|| {
        "One run does not tell how far its costs vary: this took too long for more. `--repeat 3` makes three.".into()
    }));
    all
}

/// Says so where most of a recording is of no use.
fn unused(summary: &Summary) -> Option<String> {
    let (unused, all) = (summary.unused(), summary.events.saturating_sub(summary.filtered));
    if unused <= all / 2 {
        return None;
    }
    let mut parts = Vec::new();
    let mut names: Vec<(&String, &u64)> = summary
        .other_names
        .iter()
        .chain(&summary.skipped_names)
        .filter(|(name, _)| !name.is_empty())
        .collect();
    names.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
    let named: u64 = names.iter().take(NAMES).map(|(_, n)| **n).sum();
    parts.extend(names.iter().take(NAMES).map(|(name, n)| format!("{} {name}", HumanCount(**n))));
    let of_other_kinds = summary.other_events + summary.skipped - named;
    if of_other_kinds > 0 {
        parts.push(format!("{} of other kinds", HumanCount(of_other_kinds)));
    }
    let unpaired = summary.unpaired.total() + summary.syncs_unpaired.total();
    for (n, what) in
        [(unpaired, "without the map that they belong to"), (summary.iommu_unclaimed, "of the IOMMU alone")]
    {
        if n > 0 {
            parts.push(format!("{} {what}", HumanCount(n)));
        }
    }
    let advice = if 2 * unpaired > unused {
        " Its buffers were mapped before it began: record from before the driver starts, or for longer."
    } else {
        ""
    };
    Some(format!(
        "most of {} cannot be replayed: {} of its {} {} not used ({}).{advice}",
        Printable(&summary.name),
        HumanCount(unused),
        number_of(all, "event"),
        if unused == 1 { "is" } else { "are" },
        parts.join(", ")
    ))
}

/// Names the policies that the runs do not rank by cost; nothing where there was one run.
fn noise(runs: &Runs) -> Option<String> {
    let mut costs: Vec<&Cost> = runs.costs.iter().filter(|cost| cost.is_told()).collect();
    costs.sort_by(|a, b| a.median_ns.total_cmp(&b.median_ns));
    let same = costs.windows(2).filter(|pair| runs.number > 1 && pair[0].overlaps(pair[1]));
    let pairs: Vec<String> = same.map(|pair| format!("{} and {}", pair[0].policy, pair[1].policy)).collect();
    let (last, others) = pairs.split_last()?;
    let pairs = if others.is_empty() { last.clone() } else { format!("{}, or {last}", others.join(", or ")) };
    let more = (runs.number * 3).min(100);
    Some(format!(
        "This machine is too noisy to rank {pairs}: their costs differ by less than they vary between runs. \
         `--repeat {more}` measures more often."
    ))
}

#[cfg(test)]
mod tests {
    use portcullis_trace::Summary;

    use crate::replay::short_run;

    #[test]
    fn the_most_frequent_kinds_are_named_and_the_rest_counted() {
        let (_, mut summary) = short_run();
        let named = |names: &[(&str, u64)]| names.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        summary.other_names = named(&[("ant", 1), ("bee", 900), ("cat", 30), ("dog", 20), ("eel", 7)]);
        summary.other_events = 958;
        summary.skipped_names = named(&[("fox", 400), ("", 5)]);
        summary.skipped = 405;
        summary.events = 1400;
        let said = super::unused(&summary).unwrap();
        assert!(said.contains("(900 bee, 400 fox, 30 cat, 20 dog, 13 of other kinds"), "{said}");
    }

    /// Of 1,000 events, those of one other device.
    fn with(change: impl FnOnce(&mut Summary)) -> Option<String> {
        let mut summary = Summary::default();
        (summary.name, summary.events, summary.filtered) = ("r".into(), 1_010, 10);
        change(&mut summary);
        super::unused(&summary)
    }

    #[test]
    fn more_than_half_of_what_was_to_be_read_is_most_of_it() {
        assert_eq!(with(|summary| summary.iommu_unclaimed = 500), None);
        let said = with(|summary| summary.iommu_unclaimed = 501).unwrap();
        assert_eq!(
            said,
            "most of r cannot be replayed: 501 of its 1,000 events are not used (501 of the IOMMU alone)."
        );
        // Who records for longer has the maps, too, but not where they are the smaller part.
        let unpaired = |unpaired: u64, syncs: u64, others: u64| {
            with(|summary| {
                summary.unpaired.before_recording = unpaired;
                summary.syncs_unpaired.already_unmapped = syncs;
                summary.other_events = others;
            })
            .unwrap()
        };
        let advice =
            " Its buffers were mapped before it began: record from before the driver starts, or for longer.";
        let said = unpaired(300, 50, 349);
        assert!(said.contains("(349 of other kinds, 350 without the map that they belong to)."), "{said}");
        assert!(said.ends_with(advice), "{said}");
        let said = unpaired(300, 50, 350);
        assert!(said.ends_with("350 without the map that they belong to)."), "{said}");
    }

    #[test]
    fn kinds_that_are_as_frequent_come_by_their_names() {
        let said = with(|summary| {
            summary.other_events = 600;
            summary.other_names = [("b".to_owned(), 300), ("a".to_owned(), 300)].into_iter().collect();
        });
        assert!(said.unwrap().contains("(300 a, 300 b)."), "and there are no others");
    }

    #[test]
    fn warnings_beyond_those_that_are_kept_and_calls_that_failed_are_counted() {
        let (mut runs, mut summary) = short_run();
        let before = super::of(&runs, &summary);
        assert!(
            before.iter().all(|text| !text.contains("failed") && !text.contains("more warning")),
            "{before:?}"
        );
        let kept = summary.kept_warnings.len() as u64;
        runs.report.policies[1].failures = 7;
        runs.report.policies[1].first_failure = Some("line 9: no room".into());
        for (warnings, said) in
            [(kept, None), (kept + 1, Some("1 more warning")), (kept + 2, Some("2 more warnings"))]
        {
            summary.warnings = warnings;
            let all = super::of(&runs, &summary);
            let more = all.iter().find(|text| text.contains("more warning"));
            assert_eq!(more.cloned(), said.map(|said| format!("{}: {said}", summary.name)));
            let failed =
                format!("{}: 7 calls failed, the first at line 9: no room", runs.report.policies[1].policy);
            assert!(all.contains(&failed), "{all:?}");
        }
    }

    #[test]
    fn a_run_that_took_too_long_for_more_is_warned_of_in_every_form() {
        let (mut runs, summary) = short_run();
        let single =
            |warnings: &[String]| warnings.iter().any(|text| text.starts_with("One run does not tell"));
        assert!(!single(&super::of(&runs, &summary)), "it was asked for");
        runs.too_long = true;
        assert!(single(&super::of(&runs, &summary)));
        let arguments = crate::args::Arguments::replay(&[]);
        let profile = portcullis_trace::replay::Profile::load("vtd").unwrap();
        let json = crate::machine::json(&runs, &summary, &arguments, "vtd-ss", &profile).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let warnings: Vec<String> = serde_json::from_value(json["warnings"].clone()).unwrap();
        assert!(single(&warnings), "{json}");
    }
}
