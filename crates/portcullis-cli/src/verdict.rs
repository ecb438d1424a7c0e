//! What a replay comes to, for a reader who has never heard of an IOTLB: what protection costs, which policy to choose, at what rate
//! that changes, and what it leaves open.

use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, PolicyReport};

use crate::choice::{Besides, Candidate, SMALL, advice, by_waits, capital, choose, no_copies, range, tied};
use crate::look::{bytes, count, number_of, percent, short_time};
use crate::on_linux::{self, Offer, Place};
use crate::runs::{Cost, Runs, cpu_time};

/// A policy at a rate of mappings.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    policy: &'a PolicyReport,
    cost: &'a Cost,
    /// The recording tells what it leaves open in the pages of buffers.
    known: bool,
    /// What passthrough costs.
    base_ns: f64,
    /// The CPU time that comes with each mapping besides; `None` for the report's own, whose share the report has.
    work_ns: Option<f64>,
    own_ns: f64,
    /// What waits take longer than the profile has it, for each mapping.
    longer_ns: f64,
}

impl Row<'_> {
    pub fn at(self, work_ns: f64) -> Self {
        Self { work_ns: Some(work_ns), ..self }
    }

    /// Where each wait takes `times` what the profile has.
    fn with_waits(self, times: f64) -> Self {
        let longer_ns = self.policy.wait_ns_per_op * (times - 1.0);
        Self { longer_ns, ..self.at(self.work_ns.unwrap_or(self.own_ns)) }
    }

    /// The other CPU work for each mapping, in nanoseconds, from which on it takes less than `share` of the CPU's time.
    pub fn work_ns(&self, share: f64) -> f64 {
        ((self.cost.median_ns - self.base_ns) / share - self.cost.median_ns).max(0.0)
    }

    /// How many mappings a CPU makes in a second that does `work_ns` of other work for each, in two digits.
    fn rate(&self, work_ns: f64) -> String {
        let per_s = 1e9 / (work_ns + self.cost.median_ns).max(1.0);
        let unit = 10_f64.powf(per_s.log10().floor() - 1.0).max(1.0);
        format!("up to {} mappings/s on a CPU", count(((per_s / unit).round() * unit) as u64))
    }

    /// The share of the CPU's time that a cost of `ns` is.
    fn share(&self, ns: f64) -> f64 {
        let ns = ns + self.longer_ns;
        let all = self.work_ns.unwrap_or(self.own_ns) + ns;
        if all > 0.0 { ((ns - self.base_ns) / all).max(0.0) } else { 0.0 }
    }
}

impl Candidate for Row<'_> {
    fn mode(&self) -> Mode {
        self.policy.mode
    }

    fn lost(&self) -> f64 {
        match self.work_ns {
            None => cpu_time(self.policy),
            Some(_) => self.share(self.cost.median_ns),
        }
    }

    fn least_lost(&self) -> f64 {
        self.share(self.cost.least_ns)
    }

    fn open(&self) -> f64 {
        self.policy.exposure.neighbour_byte_s
    }

    fn open_in_words(&self) -> Option<String> {
        let more = if self.open_is_known() { "" } else { "more than " };
        Some(format!(" (in sum, {more}{} for one second)", bytes(self.open())))
    }

    fn open_is_known(&self) -> bool {
        self.known
    }

    fn is_as_cheap(&self, cheapest: &Self) -> bool {
        self.cost.later_by(self.longer_ns).is_not_told_from(&cheapest.cost.later_by(cheapest.longer_ns))
    }
}

/// All policies whose cost the recording tells, with the CPU time that the report is of.
pub fn rows(runs: &Runs) -> Vec<Row<'_>> {
    let known = runs.report.trace.tells_copies();
    let work_ns = runs.report.work_ns;
    let all = || runs.report.policies.iter().zip(&runs.costs);
    // Passthrough is the yardstick where it was not asked for, too.
    let base = all().find_map(|(policy, cost)| {
        Some(policy.relative_to_passthrough? * (work_ns + cost.median_ns) - work_ns)
    });
    let base_ns = base.unwrap_or(0.0).max(0.0);
    let row =
        |(policy, cost)| Row { policy, cost, known, base_ns, work_ns: None, own_ns: work_ns, longer_ns: 0.0 };
    all().filter(|(_, cost)| cost.known).map(row).collect()
}

/// The other CPU work for each mapping, in nanoseconds, from which on `policy` is [`SMALL`]; `None` where it always is.
pub fn small_from(rows: &[Row<'_>], policy: &PolicyReport) -> Option<f64> {
    let row = rows.iter().find(|row| row.mode() == policy.mode && row.mode() != Mode::PASSTHROUGH)?;
    Some(row.work_ns(SMALL)).filter(|ns| *ns >= 1.0)
}

/// The strict ones of `rows` that are on `offer`.
pub fn strict<'a>(rows: &[Row<'a>], offer: Offer) -> Vec<Row<'a>> {
    let is_strict = |row: &&Row<'_>| row.policy.mode.is_strict() && row.policy.exposure.stale_byte_s == 0.0;
    rows.iter().filter(is_strict).filter(|row| offer.has(row.policy.mode)).copied().collect()
}

/// What is said, and which policy is the one to choose.
pub struct Verdict<'a> {
    pub sentences: Vec<String>,
    pub choice: Option<&'a str>,
}

impl<'a> Verdict<'a> {
    /// With what to type, where Linux is asked for. Empty where nothing is mapped.
    pub fn told(runs: &'a Runs, offer: Offer, place: &Place) -> Self {
        if runs.costs.is_empty() {
            return Self { sentences: Vec::new(), choice: None };
        }
        let mut verdict = Self::of(runs, offer);
        if offer != Offer::Library {
            verdict.sentences.extend(verdict.choice.map(|choice| on_linux::of_choice(choice, offer, place)));
        }
        verdict
    }

    pub fn of(runs: &'a Runs, offer: Offer) -> Self {
        let trace = &runs.report.trace;
        if !trace.costs_known {
            return Self { sentences: vec![nothing_told(trace.hidden, trace.maps)], choice: None };
        }
        let rows = rows(runs);
        let strict = strict(&rows, offer);
        let choice = choose(strict.iter().copied());
        let mut sentences = Vec::new();
        let besides = Besides { ns: runs.report.work_ns, work: runs.report.work, cpus: trace.cpus };
        sentences.extend(costs(&strict, besides));
        sentences.push(SCOPE.to_owned());
        sentences.extend(choice.map(|choice| advice(choice, &strict)));
        sentences.extend(choice.and_then(|choice| ties(choice, &strict)));
        sentences.extend(rates(&strict));
        sentences.extend(choice.and_then(|choice| waits(choice, &strict)));
        sentences.extend(rest(&rows));
        sentences.extend(
            (rows.len() < runs.costs.len())
                .then(|| no_copies(trace.directions_known && !trace.iommu_only, trace.syncs_known)),
        );
        Self { sentences, choice: choice.map(|row| row.policy.policy) }
    }
}

/// What the figures are of.
const SCOPE: &str = "That is the time of one CPU in Portcullis's own code, and waits that are assumed, not measured. Not in it: latency, \
                     throughput that devices lose while the IOMMU walks page tables, and CPUs that wait for one IOMMU together.";

/// Said in place of a verdict on a recording that has some mappings, and of `hidden` others not enough.
pub fn nothing_told(hidden: u64, maps: u64) -> String {
    format!(
        "What protection costs this workload is not known: the recording has {}, and of {} more too little.",
        number_of(maps, "mapping"),
        count(hidden)
    )
}

fn costs(strict: &[Row<'_>], besides: Besides) -> Option<String> {
    let range = range(strict)?;
    let (clause, more) = (besides.clause(), besides.more(&range));
    Some(format!("{clause} protection from devices takes {range} of the CPU time{more}."))
}

/// Which policies cost the same as the choice.
fn ties(choice: Row<'_>, strict: &[Row<'_>]) -> Option<String> {
    let others: Vec<&str> = tied(strict.iter().copied())
        .map(|row| row.policy.mode)
        .filter(|mode| *mode != choice.policy.mode)
        .map(Mode::name)
        .collect();
    let (last, before) = others.split_last()?;
    let names =
        if before.is_empty() { (*last).to_owned() } else { format!("{} and {last}", before.join(", ")) };
    Some(format!(
        "Tied with it, within one percentage point of the CPU time or what runs differ by: {names}."
    ))
}

fn share(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// The rates at which a choice is looked for, in nanoseconds of other CPU work for each mapping: 1, 2 and 5 of each power of ten, from
/// about what a mapping itself takes to what hides any cost. Borders are no finer, so that they stay where they are from run to run.
pub const STEPS: [f64; 14] = [500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7];

/// Which policy to choose at which rate, from the lowest rate on.
fn rates(strict: &[Row<'_>]) -> Option<String> {
    let mut parts: Vec<(f64, Row<'_>)> = Vec::new();
    // The recording's own rate is one of them, so that no border contradicts its choice.
    let mut all: Vec<f64> = STEPS.into_iter().chain(strict.first().map(|row| row.own_ns)).collect();
    all.sort_by(|a, b| b.total_cmp(a));
    for ns in all {
        let choice = choose(strict.iter().map(|row| row.at(ns)))?;
        match parts.last_mut() {
            Some((from, last)) if last.mode() == choice.mode() => *from = ns,
            _ => parts.push((ns, choice)),
        }
    }
    let costs = |row: &Row<'_>, ns: f64| format!("{} at {}", percent(row.at(ns).lost()), short_time(ns));
    let said: Vec<String> = parts
        .iter()
        .enumerate()
        .map(|(at, (from, row))| {
            let name = row.mode().name();
            let border = format!("{}, {}", costs(row, *from), row.rate(*from));
            let above = at.checked_sub(1).and_then(|at| parts.get(at)).map(|(above, _)| *above);
            match above {
                _ if parts.len() == 1 => format!("{name} at any rate ({})", costs(row, 1e3)),
                None => format!("{name} from {} on ({border})", short_time(*from)),
                Some(above) if at + 1 == parts.len() => {
                    format!("below {} {name} ({})", short_time(above), costs(row, 1e3_f64.min(above / 2.0)))
                }
                Some(_) => format!("{name} down to {} ({border})", short_time(*from)),
            }
        })
        .collect();
    let alone = strict.iter().find(|row| row.mode() == Mode::Each(Policy::Strict));
    let alone = alone.map_or(String::new(), |row| {
        let ns = row.work_ns(SMALL);
        format!(" Strict costs less than {} from {} on ({}).", share(SMALL), short_time(ns), row.rate(ns))
    });
    Some(format!("By the other CPU work for each mapping, choose: {}.{alone}", said.join("; ")))
}

/// What the choice is where waits are shorter, and longer.
fn waits(choice: Row<'_>, strict: &[Row<'_>]) -> Option<String> {
    let waits = |row: &Row<'_>| row.policy.wait_ns_per_op > 0.0;
    if strict.len() < 2 || !strict.iter().any(waits) {
        return None;
    }
    let chosen = |times| choose(strict.iter().map(|row| row.with_waits(times)));
    Some(by_waits(choice, chosen(0.25)?, chosen(4.0)?))
}

/// What the policies leave open that protect less.
fn rest(rows: &[Row<'_>]) -> Option<String> {
    let find = |mode: Mode| rows.iter().find(|row| row.policy.mode == mode).copied();
    let lazy = find(Policy::LAZY.into()).map(|row| {
        let stale = row.policy.exposure.stale_byte_s;
        let reached = if stale > 0.0 {
            format!("could have reached {} of freed memory for one second, in sum", bytes(stale))
        } else {
            "could have reached no freed memory".into()
        };
        format!("with lazy ({}), a device {reached}", percent(row.lost()))
    });
    let none = find(Mode::PASSTHROUGH).or_else(|| find(Mode::Swiotlb)).map(|row| {
        format!(
            "without protection ({}), a device reads and writes all memory at any time",
            row.policy.policy
        )
    });
    let registered = find(Mode::Registered).map(|row| {
        format!(
            "with memory that is registered once and stays mapped ({}), as SPDK has it, a device could have reached {}",
            percent(row.lost()),
            bytes(row.policy.exposure.stale_byte_s)
        )
    });
    let parts: Vec<String> = lazy.into_iter().chain(registered).chain(none).collect();
    if parts.is_empty() {
        return None;
    }
    Some(format!("{}.", capital(&parts.join("; "))))
}

#[cfg(test)]
mod tests {
    use portcullis_trace::replay::Work;

    use super::*;
    use crate::replay::short_run;

    /// Runs in which each policy has this cost and this spread, and leaves so much open.
    fn runs(costs: &[(Mode, f64, f64, f64)]) -> Runs {
        let (mut runs, _) = short_run();
        (runs.report.work_ns, runs.report.work) = (1_000.0, Work::Asked);
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
        let verdict = Verdict::of(&runs(&costs), Offer::Library).sentences.join(" ");
        assert!(verdict.contains("Choose bounce (0.9 %)"), "{verdict}");
        assert!(verdict.contains(" Strict-ring (0.3 %) costs less and leaves more open."), "{verdict}");
        assert!(
            verdict.contains(
                "protection from devices takes 0.3 % (strict-ring) to 41.2 % (strict) of the CPU time."
            ),
            "{verdict}"
        );
        let costs = [(strict, 90.0, 60.0, 0.0), (Mode::StrictRing, 40.0, 60.0, 0.0)];
        let verdict = Verdict::of(&runs(&costs), Offer::Library).sentences.join(" ");
        assert!(verdict.contains("Choose strict (8.3 %)"), "{verdict}");
        assert!(verdict.contains(" Strict-ring (3.8 %) may cost less."), "{verdict}");
        // What is less by no tenth of a percent is not worth a word, and at most that is what there is to say.
        let costs = [(strict, 0.4, 0.1, 9e3), (Mode::Adaptive, 1.2, 0.1, 0.0)];
        let verdict = Verdict::of(&runs(&costs), Offer::Library).sentences.join(" ");
        assert!(verdict.contains("takes at most 0.1 % of the CPU time."), "{verdict}");
        assert!(!verdict.contains(" %) costs less"), "{verdict}");
        assert!(
            verdict.contains("Strict (less than 0.1 %) gives each buffer back at once and leaves"),
            "{verdict}"
        );
        // Whatever it does better, that it leaves more open is said once.
        let costs = [(strict, 3.0, 0.1, 9e3), (Mode::Adaptive, 9.0, 0.1, 0.0)];
        let verdict = Verdict::of(&runs(&costs), Offer::Library).sentences.join(" ");
        assert!(
            verdict.contains(
                " Strict (0.3 %) costs less and gives each buffer back at once and leaves more open."
            ),
            "{verdict}"
        );
        // One bad run of the dearer policy does not make it the equal of the cheaper one.
        let costs = [(strict, 700.0, 9.0, 0.0), (Mode::StrictRing, 40.0, 1.0, 9e3)];
        let mut runs = runs(&costs);
        runs.costs.iter_mut().for_each(|cost| cost.most_ns *= 20.0);
        let verdict = Verdict::of(&runs, Offer::Library).sentences.join(" ");
        assert!(verdict.contains("Choose strict-ring (3.8 %)"), "{verdict}");
        assert!(
            verdict.contains(" Strict (41.2 %) leaves nothing open and gives each buffer back at once."),
            "{verdict}"
        );
    }

    #[test]
    fn the_recording_s_own_rate_is_among_those_that_are_said() {
        // Beyond a border that the steps have not, and beyond all of them.
        for (work_ns, from) in [(1.93e6, "1.9ms"), (50e6, "2ms")] {
            let costs = [(Mode::Each(Policy::Strict), 1e3, 1.0, 9e3), (Mode::Bounce, 20e3, 1.0, 0.0)];
            let mut runs = runs(&costs);
            runs.report.work_ns = work_ns;
            let verdict = Verdict::of(&runs, Offer::Module);
            let rates = verdict.sentences.iter().find(|said| said.starts_with("By the other")).unwrap();
            assert_eq!(verdict.choice, Some("bounce"), "{rates}");
            assert!(rates.contains(&format!("bounce from {from} on")), "{rates}");
            assert!(rates.contains(&format!("below {from} strict")), "{rates}");
        }
    }

    #[test]
    fn other_waits_may_change_the_choice() {
        let strict = Mode::Each(Policy::Strict);
        let said = |costs: &[(Mode, f64, f64, f64)], waits: &[f64]| {
            let mut runs = runs(costs);
            for (policy, wait) in runs.report.policies.iter_mut().zip(waits) {
                policy.wait_ns_per_op = *wait;
            }
            let said = Verdict::of(&runs, Offer::Library).sentences;
            said.into_iter().find(|text| text.contains("IOMMU's waits"))
        };
        // At 1 us of other work: (900 - 750 of waits) / 1150, and (900 + 3000) / 4900.
        let costs = [(strict, 900.0, 1.0, 0.0), (Mode::Bounce, 500.0, 1.0, 0.0)];
        assert_eq!(
            said(&costs, &[1000.0, 0.0]).as_deref(),
            Some(
                "If the IOMMU's waits are a quarter as long as assumed, choose strict (13.0 %); if four times as long, bounce (33.3 %)."
            )
        );
        assert_eq!(
            said(&costs, &[40.0, 0.0]).as_deref(),
            Some(
                "The choice is the same if the IOMMU's waits are a quarter as long (33.3 %) or four times as long (33.3 %) as assumed."
            )
        );
        // Without waits, and with one policy alone, there is nothing to say.
        assert_eq!(said(&costs, &[0.0, 0.0]), None);
        assert_eq!(said(&costs[..1], &[700.0]), None);
        // Runs that differ by less than their spread do so wherever the waits put them.
        let costs = [(strict, 700.0, 90.0, 0.0), (Mode::Bounce, 660.0, 90.0, 0.0)];
        assert!(said(&costs, &[30.0, 30.0]).unwrap().starts_with("The choice is the same"));
    }

    #[test]
    fn what_a_recording_of_the_iommu_alone_would_copy_is_not_guessed() {
        let strict = Mode::Each(Policy::Strict);
        let costs =
            [(strict, 700.0, 1.0, 9e3), (Mode::Bounce, 9.0, 1.0, 0.0), (Mode::Adaptive, 5.0, 1.0, 0.0)];
        let mut runs = runs(&costs);
        assert_eq!(Verdict::of(&runs, Offer::Library).choice, Some("adaptive"));
        runs.report.trace.iommu_only = true;
        runs.costs.iter_mut().for_each(|cost| cost.known = cost.policy == "strict");
        let verdict = Verdict::of(&runs, Offer::Library);
        let said = verdict.sentences.join(" ");
        assert_eq!(verdict.choice, Some("strict"));
        assert!(!said.contains("ounce") && !said.contains("daptive"), "{said}");
        runs.report.policies.iter_mut().for_each(|policy| policy.exposure.neighbour_byte_s = 0.0);
        let said = Verdict::of(&runs, Offer::Library).sentences.join(" ");
        assert!(said.contains("; what else lies in a buffer's pages is not known."), "{said}");
    }

    #[test]
    fn the_first_sentence_says_which_work_the_figures_are_of() {
        let mut runs = runs(&[(Mode::Each(Policy::Strict), 1_000.0, 1.0, 9e3)]);
        let mut first = |ns, work, cpus| {
            (runs.report.work_ns, runs.report.work, runs.report.trace.cpus) = (ns, work, cpus);
            runs.report.policies[0].relative_to_passthrough = Some(ns / (ns + 1_000.0));
            Verdict::of(&runs, Offer::Module).sentences.remove(0)
        };
        assert_eq!(
            first(99_000.0, Work::Most, 2),
            "At most 99us of other CPU work came with each mapping, if the recording's 2 CPUs never idled: then protection from \
             devices takes 1.0 % of the CPU time, and more if the recording's CPUs idled at times."
        );
        assert_eq!(
            first(1e9, Work::Most, 1),
            "At most 1000ms of other CPU work came with each mapping, if the recording's CPU never idled: then protection from \
             devices takes less than 0.1 % of the CPU time."
        );
        assert_eq!(
            first(9_000.0, Work::Measured, 2),
            "The recorded machine took 9us of CPU time for each mapping, its protection included: where that comes with each, \
             protection from devices takes 10.0 % of the CPU time."
        );
        assert_eq!(
            first(1e4, Work::Asked, 1),
            "If 10us of other CPU work comes with each mapping (--work), protection from devices takes 9.1 % of the CPU time."
        );
        assert_eq!(
            first(1e3, Work::Assumed, 1),
            "The recording does not tell how much other CPU work comes with each mapping. If it is 1us (--work), protection from \
             devices takes 50.0 % of the CPU time."
        );
    }

    #[test]
    fn it_is_said_at_which_rate_another_policy_is_to_be_chosen() {
        let strict = Mode::Each(Policy::Strict);
        let said = |costs: &[(Mode, f64, f64, f64)], offer| {
            let runs = runs(costs);
            let all = Verdict::of(&runs, offer).sentences;
            all.into_iter().find(|text| text.starts_with("By the other")).unwrap()
        };
        let all =
            [(strict, 780.0, 9.0, 9e3), (Mode::StrictRing, 60.0, 3.0, 9e3), (Mode::Bounce, 430.0, 9.0, 0.0)];
        assert_eq!(
            said(&all, Offer::Library),
            "By the other CPU work for each mapping, choose: bounce from 50us on (0.9 % at 50us, up to 20,000 mappings/s on a CPU); \
             below 50us strict-ring (5.7 % at 1us). Strict costs less than 1 % from 77us on (up to 13,000 mappings/s on a CPU)."
        );
        assert_eq!(
            said(&all, Offer::Module),
            "By the other CPU work for each mapping, choose: bounce at any rate (30.1 % at 1us). Strict costs less than 1 % from 77us on \
             (up to 13,000 mappings/s on a CPU)."
        );
        let three = [
            (Mode::StrictRing, 10.0, 1.0, 9e3),
            (Mode::StrictBatch, 300.0, 1.0, 8e3),
            (Mode::Bounce, 3e3, 9.0, 0.0),
        ];
        assert_eq!(
            said(&three, Offer::Library),
            "By the other CPU work for each mapping, choose: bounce from 500us on (0.6 % at 500us, up to 2,000 mappings/s on a CPU); \
             strict-batch down to 50us (0.6 % at 50us, up to 20,000 mappings/s on a CPU); below 50us strict-ring (1.0 % at 1us)."
        );
    }

    #[test]
    fn policies_that_cost_the_same_are_named_together() {
        let strict = Mode::Each(Policy::Strict);
        let said = |costs: &[(Mode, f64, f64, f64)]| {
            let runs = runs(costs);
            Verdict::of(&runs, Offer::Library).sentences.into_iter().find(|text| text.starts_with("Tied"))
        };
        let ring = (Mode::StrictRing, 40.0, 1.0, 9e3);
        let tied = |names: &str| {
            Some(format!(
                "Tied with it, within one percentage point of the CPU time or what runs differ by: {names}."
            ))
        };
        assert_eq!(said(&[ring, (strict, 700.0, 1.0, 9e3)]), None);
        assert_eq!(said(&[ring, (strict, 50.0, 1.0, 9e3)]), tied("strict-ring"));
        let all = [
            (strict, 49.0, 1.0, 9e3),
            ring,
            (Mode::Bounce, 40.0, 1.0, 0.0),
            (Mode::Adaptive, 45.0, 1.0, 0.0),
        ];
        assert_eq!(said(&all), tied("strict, strict-ring and bounce"));
        // One point more.
        assert_eq!(said(&[ring, (strict, 51.0, 0.5, 9e3)]), None);
    }

    /// Equal inputs give equal verdicts, however busy the machine: each cost varies by up to a tenth upwards.
    #[test]
    fn a_loaded_machine_does_not_change_the_choice() {
        let strict = Mode::Each(Policy::Strict);
        let mut random = fastrand::Rng::with_seed(7);
        let mut said = std::collections::BTreeSet::new();
        for _ in 0..20 {
            let costs: Vec<_> = [
                (strict, 784.0, 80e3),
                (Mode::StrictBatch, 126.0, 83e3),
                (Mode::StrictRing, 60.0, 88e3),
                (Mode::Bounce, 390.0, 0.0),
                (Mode::Adaptive, 326.0, 0.0),
            ]
            .into_iter()
            .map(|(mode, ns, open)| (mode, ns * (1.0 + random.f64() / 10.0), ns / 50.0, open))
            .collect();
            let mut runs = runs(&costs);
            (runs.report.work_ns, runs.report.work) = (94_000.0, Work::Most);
            for offer in [Offer::Module, Offer::Library] {
                said.insert(Verdict::of(&runs, offer).choice.map(str::to_owned));
            }
        }
        assert_eq!(said, [Some("adaptive".to_owned()), Some("bounce".to_owned())].into());
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
            let said = Verdict::of(&runs, Offer::Library).sentences.join(" ");
            assert!(said.contains("Choose strict-ring (3.8 %)"), "{said}");
            assert!(said.contains(". Adaptive ("), "{said}");
        }
        for little in [-5.0, 0.0, 5.0] {
            let alike = [(Mode::Bounce, 40.0, 1.0, 0.0), (Mode::Adaptive, 40.0 + little, 1.0, 0.0)];
            assert_eq!(Verdict::of(&runs(&alike), Offer::Library).choice, Some("adaptive"));
            // Where nothing shares a page, and waits cost nothing, there is no need to keep buffers back.
            let alike = [(strict, 40.0 + little, 1.0, 0.0), (Mode::StrictRing, 40.0, 1.0, 0.0)];
            assert_eq!(Verdict::of(&runs(&alike), Offer::Library).choice, Some("strict"));
        }
        let apart = [(Mode::Bounce, 40.0, 1.0, 0.0), (Mode::Adaptive, 90.0, 1.0, 0.0)];
        assert_eq!(
            Verdict::of(&runs(&apart), Offer::Library).choice,
            Some("bounce"),
            "it is cheaper, beyond doubt"
        );
    }
}
