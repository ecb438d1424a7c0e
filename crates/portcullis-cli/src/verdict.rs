//! What a replay comes to, for a reader who has never heard of an IOTLB: what protection costs, which policy to choose, and
//! what it leaves open.

use indicatif::HumanCount;
use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, PolicyReport};

use crate::look::{bytes, count, number_of, percent};
use crate::runs::{Cost, Runs, cpu_time};

/// A strict policy, as a verdict may choose it.
pub trait Candidate: Copy {
    /// The policy.
    fn mode(&self) -> Mode;

    /// What it costs, in any unit.
    fn cost(&self) -> f64;

    /// The share of the CPU's time, or of the throughput, that it costs.
    fn lost(&self) -> f64;

    /// Other data that it leaves open, in any unit.
    fn open(&self) -> f64;

    /// How much that is, for people.
    fn open_in_words(&self) -> Option<String> {
        None
    }

    /// What it leaves open is known.
    fn open_is_known(&self) -> bool {
        true
    }

    /// The figures do not tell it from the cheapest.
    fn is_as_cheap(&self, _cheapest: &Self) -> bool {
        false
    }
}

/// A policy, what it costs, and whether the recording tells what it leaves open in the pages of buffers.
type Row<'a> = (&'a PolicyReport, &'a Cost, bool);

impl Candidate for Row<'_> {
    fn mode(&self) -> Mode {
        self.0.mode
    }

    fn cost(&self) -> f64 {
        self.1.median_ns
    }

    fn lost(&self) -> f64 {
        cpu_time(self.0)
    }

    fn open(&self) -> f64 {
        self.0.exposure.neighbour_byte_s
    }

    fn open_in_words(&self) -> Option<String> {
        let more = if self.open_is_known() { "" } else { "more than " };
        Some(format!(" (in sum, {more}{} for one second)", bytes(self.open())))
    }

    fn open_is_known(&self) -> bool {
        self.2
    }

    fn is_as_cheap(&self, cheapest: &Self) -> bool {
        self.1.is_not_told_from(cheapest.1)
    }
}

/// What is said, and which policy is the one to choose.
pub struct Verdict<'a> {
    pub sentences: Vec<String>,
    pub choice: Option<&'a str>,
}

impl<'a> Verdict<'a> {
    pub fn of(runs: &'a Runs) -> Self {
        let trace = &runs.report.trace;
        let known = trace.tells_copies();
        let rows = runs.report.policies.iter().zip(&runs.costs);
        let rows: Vec<Row<'_>> =
            rows.filter(|(_, cost)| cost.known).map(|(policy, cost)| (policy, cost, known)).collect();
        if !trace.costs_known {
            return Self { sentences: vec![nothing_told(trace.hidden, trace.maps)], choice: None };
        }
        let is_strict = |row: &&Row<'_>| row.0.mode.is_strict() && row.0.exposure.stale_byte_s == 0.0;
        let strict: Vec<Row<'_>> = rows.iter().filter(is_strict).copied().collect();
        let choice = choose(strict.iter().copied());
        let mut sentences = Vec::new();
        sentences.extend(costs(&strict, runs.report.work_ns));
        sentences.extend(choice.map(|choice| advice(choice, &strict)));
        sentences.extend(rest(&rows));
        sentences.extend((rows.len() < runs.costs.len()).then(|| NO_COPIES.to_owned()));
        Self { sentences, choice: choice.map(|(policy, ..)| policy.policy) }
    }
}

/// Why policies are not in a verdict.
pub const NO_COPIES: &str = "Policies that copy are left out: this recording does not tell the direction of mappings, and so not what they would copy.";

/// Said in place of a verdict on a recording that has some mappings, and of `hidden` others not enough.
pub fn nothing_told(hidden: u64, maps: u64) -> String {
    format!(
        "What protection costs this workload is not known: the recording has {}, and of {} more too little.",
        number_of(maps, "mapping"),
        count(hidden)
    )
}

/// If policies differ by less than this share of the CPU time, the verdict names the one that leaves less open.
const SMALL: f64 = 0.01;

/// A policy that saves less than this share is not named for it: a simulation does not resolve it, either.
const NOTHING: f64 = 0.001;

/// Which of several policies is named where they cost the same and leave the same open: what keeps no buffer back, before what
/// does; and adaptive before bounce, as it takes the cheaper way for each buffer. So a verdict does not change from run to run.
const PREFERRED: [Mode; 5] =
    [Mode::Each(Policy::Strict), Mode::StrictBatch, Mode::StrictRing, Mode::Adaptive, Mode::Bounce];

/// The cheapest of `rows`; of those that cost hardly more, or that the figures do not tell from it, the one that leaves the least
/// open.
pub fn choose<C: Candidate>(rows: impl Iterator<Item = C> + Clone) -> Option<C> {
    let cheapest = rows.clone().min_by(|a, b| a.cost().total_cmp(&b.cost()))?;
    let equal = rows.filter(|row| row.is_as_cheap(&cheapest) || row.lost() - cheapest.lost() < SMALL);
    let place = |row: &C| PREFERRED.iter().position(|mode| *mode == row.mode());
    equal.min_by(|a, b| a.open().total_cmp(&b.open()).then(place(a).cmp(&place(b))))
}

/// What follows a [`range`] of costs, where it is one of several.
pub fn depends(range: &str) -> &'static str {
    if range.contains(" to ") || range.contains("at most") { ", depending on the policy" } else { "" }
}

fn costs(strict: &[Row<'_>], work_ns: f64) -> Option<String> {
    let range = range(strict)?;
    let depends = depends(&range);
    let work = HumanCount(work_ns as u64);
    Some(format!(
        "Protection from devices costs this workload {range} of its CPU time{depends}, if all else takes {work} ns for each \
         mapping (--work)."
    ))
}

/// What the cheapest of `strict` costs, and the dearest. (The choice may be neither.)
pub fn range<C: Candidate>(strict: &[C]) -> Option<String> {
    let lost = || strict.iter().map(Candidate::lost);
    let (least, most) = (lost().min_by(f64::total_cmp)?, lost().max_by(f64::total_cmp)?);
    let (least, most) = (percent(least), percent(most));
    Some(if least == most {
        least
    } else if least.ends_with(&most) {
        // Less than that, up to that.
        format!("at most {most}")
    } else {
        format!("{least} to {most}")
    })
}

/// What to choose of `strict` and what that means, in a sentence; and in a second one the others that somebody may prefer.
pub fn advice<C: Candidate>(choice: C, strict: &[C]) -> String {
    let mode = choice.mode();
    let means = match mode {
        Mode::Adaptive => {
            "no device reaches anything but the bytes that are meant for it; buffers that it maps, and does not copy, come \
             back in groups, up to 10 ms after their unmap"
        }
        _ if mode.protects_bytes() => "no device reaches anything but the bytes that are meant for it",
        _ if mode.gives_all_back_in_batches() => {
            "buffers come back in groups, up to 10 ms after their unmap, and no device reaches them from then on"
        }
        _ => "no device reaches a buffer after it is given back",
    };
    let open = if mode.protects_bytes() {
        String::new()
    } else if choice.open() > 0.0 {
        format!(
            "; it leaves open other data in a buffer's page{}",
            choice.open_in_words().unwrap_or_default()
        )
    } else if choice.open_is_known() {
        "; it leaves nothing open".into()
    } else {
        "; what else lies in a buffer's pages is not known".into()
    };
    let name = mode.name();
    let chosen = if strict.len() > 1 {
        format!("Choose {name} ({}): {means}{open}.", percent(choice.lost()))
    } else {
        format!("With {name}, {means}{open}.")
    };
    let others = others(choice, strict);
    if others.is_empty() { chosen } else { format!("{chosen} {}.", capital(&others.join("; "))) }
}

/// The policies of `strict` that do something better than the choice, each with what that is.
fn others<C: Candidate>(choice: C, strict: &[C]) -> Vec<String> {
    let mut others: Vec<(C, Vec<&str>)> = Vec::new();
    let mut add = |row: C, does: &'static str| {
        if let Some((_, all)) = others.iter_mut().find(|(known, _)| known.mode() == row.mode()) {
            all.push(does);
        } else {
            others.push((row, vec![does]));
        }
    };
    let least = strict.iter().min_by(|a, b| a.lost().total_cmp(&b.lost()));
    if let Some(least) = least.filter(|least| choice.lost() - least.lost() >= NOTHING) {
        add(*least, if least.is_as_cheap(&choice) { "may cost less" } else { "costs less" });
    }
    if choice.open() > 0.0 {
        let closed = choose(strict.iter().copied().filter(|row| row.open() <= 0.0));
        closed.into_iter().for_each(|row| add(row, "leaves nothing open"));
    }
    if choice.mode().gives_back_in_batches()
        && let Some(row) = choose(strict.iter().copied().filter(|row| !row.mode().gives_back_in_batches()))
    {
        add(row, "gives each buffer back at once");
    }
    let told = |(row, mut does): (C, Vec<&str>)| {
        does.extend((row.open() > choice.open()).then_some("leaves more open"));
        format!("{} ({}) {}", row.mode().name(), percent(row.lost()), does.join(" and "))
    };
    others.into_iter().map(told).collect()
}

/// What the policies leave open that protect less.
fn rest(rows: &[Row<'_>]) -> Option<String> {
    let find = |mode: Mode| rows.iter().find(|row| row.0.mode == mode).copied();
    let lazy = find(Policy::LAZY.into()).map(|row| {
        let stale = row.0.exposure.stale_byte_s;
        let reached = if stale > 0.0 {
            format!("could have reached {} of freed memory for one second, in sum", bytes(stale))
        } else {
            "could have reached no freed memory".into()
        };
        format!("with lazy ({}), a device {reached}", percent(row.lost()))
    });
    let none = find(Mode::PASSTHROUGH).or_else(|| find(Mode::Swiotlb)).map(|row| {
        format!("without protection ({}), a device reads and writes all memory at any time", row.0.policy)
    });
    let parts: Vec<String> = lazy.into_iter().chain(none).collect();
    if parts.is_empty() {
        return None;
    }
    Some(format!("{}.", capital(&parts.join("; "))))
}

/// `text` as a sentence begins.
fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| format!("{}{}", first.to_uppercase(), letters.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::short_run;

    /// Runs in which each policy has this cost and this spread, and leaves so much open.
    fn runs(costs: &[(Mode, f64, f64, f64)]) -> Runs {
        let (mut runs, _) = short_run();
        let known = |mode: Mode| costs.iter().find(|(known, ..)| *known == mode);
        runs.report.policies.retain(|policy| known(policy.mode).is_some());
        runs.costs.retain(|cost| costs.iter().any(|(mode, ..)| mode.name() == cost.policy));
        for (policy, cost) in runs.report.policies.iter_mut().zip(&mut runs.costs) {
            let (_, ns, spread, open) = *known(policy.mode).unwrap();
            (cost.median_ns, cost.least_ns, cost.most_ns) = (ns, ns - spread, ns + spread);
            policy.relative_to_passthrough = Some(1000.0 / (1000.0 + ns));
            (policy.exposure.stale_byte_s, policy.exposure.neighbour_byte_s) = (0.0, open);
        }
        runs
    }

    #[test]
    fn a_policy_that_costs_less_and_is_not_chosen_is_named() {
        let strict = Mode::Each(Policy::Strict);
        // A percent of the CPU's time is not worth it, where less is left open.
        let costs =
            [(strict, 700.0, 1.0, 9e3), (Mode::StrictRing, 3.0, 1.0, 9e3), (Mode::Bounce, 9.0, 1.0, 0.0)];
        let verdict = Verdict::of(&runs(&costs)).sentences.join(" ");
        assert!(verdict.contains("Choose bounce (0.9 %)"), "{verdict}");
        assert!(verdict.contains(" Strict-ring (0.3 %) costs less and leaves more open."), "{verdict}");
        assert!(verdict.contains("costs this workload 0.3 % to 41.2 %"), "{verdict}");
        let costs = [(strict, 90.0, 60.0, 0.0), (Mode::StrictRing, 40.0, 60.0, 0.0)];
        let verdict = Verdict::of(&runs(&costs)).sentences.join(" ");
        assert!(verdict.contains("Choose strict (8.3 %)"), "{verdict}");
        assert!(verdict.contains(" Strict-ring (3.8 %) may cost less."), "{verdict}");
        // What is less by no tenth of a percent is not worth a word, and at most that is what there is to say.
        let costs = [(strict, 0.4, 0.1, 9e3), (Mode::Adaptive, 1.2, 0.1, 0.0)];
        let verdict = Verdict::of(&runs(&costs)).sentences.join(" ");
        assert!(
            verdict.contains("costs this workload at most 0.1 % of its CPU time, depending"),
            "{verdict}"
        );
        assert!(!verdict.contains("costs less"), "{verdict}");
        assert!(
            verdict.contains("Strict (less than 0.1 %) gives each buffer back at once and leaves"),
            "{verdict}"
        );
        // Whatever it does better, that it leaves more open is said once.
        let costs = [(strict, 3.0, 0.1, 9e3), (Mode::Adaptive, 9.0, 0.1, 0.0)];
        let verdict = Verdict::of(&runs(&costs)).sentences.join(" ");
        assert!(
            verdict.contains(
                " Strict (0.3 %) costs less and gives each buffer back at once and leaves more open."
            ),
            "{verdict}"
        );
        // One bad run of the dearer policy does not make it the equal of the cheaper one.
        let costs = [(strict, 700.0, 690.0, 0.0), (Mode::StrictRing, 40.0, 1.0, 9e3)];
        let verdict = Verdict::of(&runs(&costs)).sentences.join(" ");
        assert!(verdict.contains("Choose strict-ring (3.8 %)"), "{verdict}");
        assert!(
            verdict.contains(" Strict (41.2 %) leaves nothing open and gives each buffer back at once."),
            "{verdict}"
        );
    }

    #[test]
    fn what_a_recording_of_the_iommu_alone_would_copy_is_not_guessed() {
        let strict = Mode::Each(Policy::Strict);
        let costs =
            [(strict, 700.0, 1.0, 9e3), (Mode::Bounce, 9.0, 1.0, 0.0), (Mode::Adaptive, 5.0, 1.0, 0.0)];
        let mut runs = runs(&costs);
        assert_eq!(Verdict::of(&runs).choice, Some("adaptive"));
        runs.report.trace.iommu_only = true;
        runs.costs.iter_mut().for_each(|cost| cost.known = cost.policy == "strict");
        let verdict = Verdict::of(&runs);
        let said = verdict.sentences.join(" ");
        assert_eq!(verdict.choice, Some("strict"));
        assert!(!said.contains("ounce") && !said.contains("daptive"), "{said}");
        runs.report.policies.iter_mut().for_each(|policy| policy.exposure.neighbour_byte_s = 0.0);
        let said = Verdict::of(&runs).sentences.join(" ");
        assert!(said.contains("; what else lies in a buffer's pages is not known."), "{said}");
    }

    #[test]
    fn a_verdict_has_two_to_four_sentences() {
        let all = [
            (Mode::Each(Policy::Strict), 700.0, 1.0, 9e3),
            (Mode::StrictRing, 40.0, 1.0, 9e3),
            (Mode::Bounce, 200.0, 1.0, 0.0),
            (Mode::Adaptive, 150.0, 1.0, 0.0),
            (Policy::LAZY.into(), 80.0, 1.0, 0.0),
            (Mode::PASSTHROUGH, 0.0, 0.0, 0.0),
        ];
        for number in 2..=all.len() {
            let verdict = Verdict::of(&runs(&all[..number])).sentences.join(" ");
            let sentences = verdict.matches(". ").count() + 1;
            assert!((2..=4).contains(&sentences), "{verdict}");
        }
    }

    #[test]
    fn what_the_runs_do_not_tell_apart_is_told_the_same_way_each_time() {
        let strict = Mode::Each(Policy::Strict);
        // The one that is to be chosen and the one that leaves nothing open, whichever of two is cheaper by a little.
        for little in [-5.0, 0.0, 5.0] {
            let dear = [
                (strict, 700.0, 5.0, 9e3),
                (Mode::StrictRing, 40.0, 5.0, 9e3),
                (Mode::Bounce, 190.0, 8.0, 0.0),
                (Mode::Adaptive, 190.0 + little, 8.0, 0.0),
            ];
            let runs = runs(&dear);
            let said = Verdict::of(&runs).sentences.join(" ");
            assert!(said.contains("Choose strict-ring (3.8 %)"), "{said}");
            assert!(said.contains(". Adaptive ("), "{said}");
        }
        for little in [-5.0, 0.0, 5.0] {
            let alike = [(Mode::Bounce, 40.0, 1.0, 0.0), (Mode::Adaptive, 40.0 + little, 1.0, 0.0)];
            assert_eq!(Verdict::of(&runs(&alike)).choice, Some("adaptive"));
            // Where nothing shares a page, and waits cost nothing, there is no need to keep buffers back.
            let alike = [(strict, 40.0 + little, 1.0, 0.0), (Mode::StrictRing, 40.0, 1.0, 0.0)];
            assert_eq!(Verdict::of(&runs(&alike)).choice, Some("strict"));
        }
        let apart = [(Mode::Bounce, 40.0, 1.0, 0.0), (Mode::Adaptive, 90.0, 1.0, 0.0)];
        assert_eq!(Verdict::of(&runs(&apart)).choice, Some("bounce"), "it is cheaper, beyond doubt");
    }
}
