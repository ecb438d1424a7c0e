//! What a replay comes to, for a reader who has never heard of an IOTLB: what protection costs, which policy to choose, and
//! what it leaves open.

use indicatif::HumanCount;
use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, PolicyReport};

use crate::look::{bytes, percent};
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

    /// The figures do not tell it from the cheapest.
    fn is_as_cheap(&self, _cheapest: &Self) -> bool {
        false
    }
}

/// A policy and what it costs.
type Row<'a> = (&'a PolicyReport, &'a Cost);

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
        Some(format!(": in sum, a device could have reached {} for one second", bytes(self.open())))
    }

    fn is_as_cheap(&self, cheapest: &Self) -> bool {
        self.1.overlaps(cheapest.1)
    }
}

/// What is said, and which policy is the one to choose.
pub struct Verdict<'a> {
    pub sentences: Vec<String>,
    pub choice: Option<&'a str>,
}

impl<'a> Verdict<'a> {
    pub fn of(runs: &'a Runs) -> Self {
        let rows: Vec<Row<'_>> = runs.report.policies.iter().zip(&runs.costs).collect();
        let is_strict = |row: &&Row<'_>| row.0.mode.is_strict() && row.0.exposure.stale_byte_s == 0.0;
        let strict: Vec<Row<'_>> = rows.iter().filter(is_strict).copied().collect();
        let choice = choose(strict.iter().copied());
        let mut sentences = Vec::new();
        sentences.extend(costs(&strict, runs.report.work_ns));
        sentences.extend(choice.map(|choice| advice(choice, &strict)));
        sentences.extend(rest(&rows));
        Self { sentences, choice: choice.map(|(policy, _)| policy.policy) }
    }
}

/// If policies differ by less than this share of the CPU time, the verdict names the one that leaves less open.
const SMALL: f64 = 0.01;

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

fn costs(strict: &[Row<'_>], work_ns: f64) -> Option<String> {
    let range = range(strict)?;
    let depends = if range.contains(" to ") { ", depending on the policy" } else { "" };
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
    Some(if least == most { least } else { format!("{least} to {most}") })
}

/// What to choose of `strict`, what that means, and what else there is.
pub fn advice<C: Candidate>(choice: C, strict: &[C]) -> String {
    let mode = choice.mode();
    let name = mode.name();
    let means = if mode.protects_bytes() {
        "no device reaches anything but the bytes that are meant for it"
    } else if mode.gives_all_back_in_batches() {
        "buffers come back in groups, up to 10 ms after their unmap, and no device reaches them from then on"
    } else {
        "no device reaches a buffer after it is given back"
    };
    let chosen = if strict.len() > 1 {
        format!("Choose {name} ({}): {means}.", percent(choice.lost()))
    } else {
        format!("With {name}, {means}.")
    };
    let chosen = chosen + &cheaper(choice, strict);
    let late = late(choice, strict);
    if choice.open() <= 0.0 {
        return format!("{chosen} It leaves nothing open.{late}");
    }
    let closed = choose(strict.iter().copied().filter(|row| row.open() <= 0.0));
    let instead =
        closed.map(|row| format!("; {} ({}) leaves nothing open", row.mode().name(), percent(row.lost())));
    format!(
        "{chosen} It leaves open other data in a buffer's page{}{}.{late}",
        choice.open_in_words().unwrap_or_default(),
        instead.unwrap_or_default()
    )
}

/// Why a policy with a lower figure is not the one to choose, if there is one.
fn cheaper<C: Candidate>(choice: C, strict: &[C]) -> String {
    let Some(least) = strict.iter().min_by(|a, b| a.lost().total_cmp(&b.lost())) else {
        return String::new();
    };
    let (name, cost) = (least.mode().name(), percent(least.lost()));
    if cost == percent(choice.lost()) {
        String::new()
    } else if least.open() > choice.open() {
        format!(" {} costs less ({cost}), and leaves more open.", capital(name))
    } else {
        format!(" The runs do not rank it against {name} ({cost}).")
    }
}

/// What the choice makes late, and what does not. No figure knows who waits for a buffer.
fn late<C: Candidate>(choice: C, strict: &[C]) -> String {
    let mode = choice.mode();
    if !mode.gives_back_in_batches() {
        return String::new();
    }
    let what = if mode.gives_all_back_in_batches() {
        ""
    } else {
        " Buffers that it maps, and does not copy, come back in groups, up to 10 ms after their unmap."
    };
    let at_once = strict.iter().filter(|row| !row.mode().gives_back_in_batches());
    let soonest = at_once.min_by(|a, b| a.cost().total_cmp(&b.cost()));
    let instead = soonest.map(|row| {
        format!(" If requests wait for their buffer, take {} ({}).", row.mode().name(), percent(row.lost()))
    });
    format!("{what}{}", instead.unwrap_or_default())
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
        assert!(verdict.contains(" Strict-ring costs less (0.3 %), and leaves more open."), "{verdict}");
        assert!(verdict.contains("costs this workload 0.3 % to 41.2 %"), "{verdict}");
        let costs = [(strict, 700.0, 690.0, 0.0), (Mode::StrictRing, 40.0, 1.0, 0.0)];
        let verdict = Verdict::of(&runs(&costs)).sentences.join(" ");
        assert!(verdict.contains(" The runs do not rank it against strict-ring (3.8 %)."), "{verdict}");
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
            assert!(said.contains("; adaptive ("), "{said}");
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
