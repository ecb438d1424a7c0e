//! What a replay found, as a part of the page: the verdict first, then plots, then the tables behind them.

use std::fmt::Write;

use portcullis_trace::replay::PolicyReport;

use super::axes::{around_zero, at_time, class_of, share, times};
use super::html::{details, element, escape, pairs, table, time};
use super::plot::{Axis, HEIGHT, Mark, Names, Plot, Shape};
use super::read::Replayed;
use super::{machine, warning};
use crate::args::On;
use crate::header;
use crate::look::{NOT_KNOWN, bytes, count, percent};
use crate::on_linux::{self, Place};
use crate::runs::{Cost, Runs, cpu_time};
use crate::short::{self, if_known};
use crate::table::LINES;
use crate::verdict::Verdict;

/// Percentiles that are printed.
const PERCENTILES: [(f64, &str); 5] =
    [(0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %")];

pub fn section(replayed: &Replayed) -> String {
    let runs = &replayed.runs;
    let trace = &runs.report.trace;
    let mut html = element("h2", &format!("Replay of {}", trace.name));
    for policy in &runs.report.policies {
        if policy.violations > 0 || policy.faults > 0 {
            html += &warning(&format!(
                "{}: protection did not hold: {} violations and {} faults.",
                policy.policy,
                count(policy.violations),
                count(policy.faults)
            ));
        }
    }
    if runs.costs.is_empty() {
        html += &element("p", "Nothing is mapped in this recording, so there is nothing to compare.");
        return html + &about(replayed);
    }
    html += "<div class=\"verdict\">\n";
    let verdict = Verdict::of(runs, On::Linux);
    // A page is not of the machine that shows it: no group of its.
    let how = verdict.choice.map(|choice| on_linux::of_choice(choice, &Place::named(&trace.devices)));
    for sentence in verdict.sentences.iter().chain(&how) {
        html += &element("p", sentence);
    }
    html += "</div>\n";
    for hidden in trace.recorded.iter().filter_map(|recorded| Some(header::hidden(recorded)? + ".")) {
        html += &warning(&hidden);
    }
    for sentence in &replayed.warnings {
        html += &warning(sentence);
    }
    html += &cost_and_exposure(runs).figure();
    html += &short_table(runs);
    let calls = [("An unmap", unmaps as Latency, "unmap"), ("A map", maps, "map")];
    for (what, latency, call) in calls {
        let lines: Vec<_> =
            runs.report.policies.iter().filter(|policy| !latency(policy).is_empty()).collect();
        if lines.is_empty() {
            html += &element(
                "p",
                &format!(
                    "This result has no distribution of {call}s: `portcullis replay --json` of this version writes it."
                ),
            );
            continue;
        }
        let marks = lines
            .iter()
            .enumerate()
            .map(|(at, policy)| mark(policy.policy, &class_of(policy.policy, at), latency(policy)));
        html += &distribution(&format!("{what}: how long calls take"), marks.collect()).figure();
        html += &details(
            &format!("The figures behind it: {call}s"),
            &percentiles(&format!("Time of {call}s, waits included"), &lines, latency),
        );
    }
    html += &all_figures(runs);
    html + &about(replayed)
}

/// The freed memory that a policy leaves open; `None` for all there is.
fn open(policy: &PolicyReport) -> Option<f64> {
    policy.exposure_counted.map(|_| policy.exposure.stale_byte_s)
}

/// The policies whose cost the recording tells, each with its cost.
fn told(runs: &Runs) -> impl Iterator<Item = (&PolicyReport, &Cost)> {
    runs.report.policies.iter().zip(&runs.costs).filter(|(_, cost)| cost.known)
}

/// What a policy leaves open for a second, in words: of freed memory, and of other data.
pub fn said_open(policy: &PolicyReport, runs: &Runs) -> [String; 2] {
    let words = |open: f64| if open > 0.0 { bytes(open) } else { "none".into() };
    match open(policy) {
        None => ["all memory".into(), "all memory".into()],
        Some(stale) if runs.report.trace.tells_copies() => {
            [words(stale), words(policy.exposure.neighbour_byte_s)]
        }
        Some(stale) => match policy.exposure.neighbour_byte_s {
            0.0 => [words(stale), NOT_KNOWN.into()],
            open => [words(stale), format!("more than {}", bytes(open))],
        },
    }
}

/// Where policies stand between cost and exposure: `before` beside `runs`, where there are two.
pub fn cost_and_exposure_of(runs: &Runs, before: Option<&Runs>) -> Plot {
    // One of which the recording does not tell the cost has no place.
    let all = || told(runs).chain(before.into_iter().flat_map(told)).map(|(policy, _)| policy);
    let most_open = all().filter_map(open).fold(0.0, f64::max);
    let most_time = all().map(cpu_time).fold(0.05, f64::max);
    let said = |at, _| if at == 0.0 { "none".into() } else { bytes(at) };
    let mut y = around_zero("freed memory open for 1 s", 0.0, most_open.max(1000.0), said);
    let top = y.range.1;
    let everything = top * 1.15;
    y.ticks.push((everything, "all memory".into()));
    y.range = (-0.1 * top, top * 1.25);
    let mut x = around_zero("CPU time that protection takes", 0.0, most_time, share);
    x.range = (-0.02 * x.range.1, x.range.1);
    let at = |policy: &PolicyReport| (cpu_time(policy), open(policy).unwrap_or(everything));
    let marks = runs.report.policies.iter().zip(&runs.costs).enumerate().filter(|(_, (_, cost))| cost.known);
    let marks = marks.map(|(number, (policy, cost))| {
        // Without a count, all memory is open.
        let neighbours = policy.exposure_counted.is_none() || policy.exposure.neighbour_byte_s > 0.0;
        let shape = if neighbours { Shape::Ring } else { Shape::Dot };
        let earlier = before.and_then(|runs| told(runs).find(|(other, _)| other.policy == policy.policy));
        let earlier = earlier.map(|(earlier, _)| earlier);
        let [freed, other] = said_open(policy, runs);
        let cost = cost.median_ns;
        let from =
            earlier.map_or(String::new(), |earlier| format!(" (before: {})", percent(cpu_time(earlier))));
        Mark {
            class: class_of(policy.policy, number),
            name: policy.policy.into(),
            readout: vec![
                format!("costs {}{from} of the CPU time, {} a buffer", percent(cpu_time(policy)), time(cost)),
                format!("open for 1 s: freed memory {freed}, other data {other}"),
            ],
            lines: earlier.map(|earlier| vec![at(earlier), at(policy)]).into_iter().collect(),
            dots: vec![(at(policy), shape)],
            ..Mark::default()
        }
    });
    let arrows = if before.is_some() { " A line comes from where the policy was before." } else { "" };
    Plot {
        title: "Cost and exposure of each policy".into(),
        caption: format!(
            "Further left takes less time, and further down is safer. A ring: what shares a page with a buffer is open to devices, too. \
             A dot: it is not.{arrows}"
        ),
        marks: marks.collect(),
        x,
        y,
        names: Names::Beside,
        height: HEIGHT,
    }
}

fn cost_and_exposure(runs: &Runs) -> Plot {
    cost_and_exposure_of(runs, None)
}

/// The table behind that plot.
fn short_table(runs: &Runs) -> String {
    let head = [
        "policy",
        "cost, ns",
        "runs from",
        "to",
        "of which wait, ns",
        "CPU time",
        "freed memory open for 1 s",
        "other data open for 1 s",
    ];
    let ns = |ns: f64| count(ns.round() as u64);
    let row = |(policy, cost): (&PolicyReport, &Cost)| {
        let [freed, other] = said_open(policy, runs);
        let costs = [cost.median_ns, cost.least_ns, cost.most_ns, policy.wait_ns_per_op]
            .map(|figure| if_known(cost, || ns(figure)));
        let share = if_known(cost, || short::share(policy));
        [vec![policy.policy.to_owned()], costs.to_vec(), vec![share, freed, other]].concat()
    };
    let rows: Vec<_> = runs.report.policies.iter().zip(&runs.costs).map(row).collect();
    table("Each policy, for each buffer", &head.map(String::from), &rows)
}

type Latency = fn(&PolicyReport) -> &[(f64, u64)];

pub fn unmaps(policy: &PolicyReport) -> &[(f64, u64)] {
    &policy.unmap_latency
}

fn maps(policy: &PolicyReport) -> &[(f64, u64)] {
    &policy.map_latency
}

/// The time within which a share of the calls ended.
fn quantile(latency: &[(f64, u64)], share: f64) -> f64 {
    let all: u64 = latency.iter().fold(0, |all, (_, calls)| all.saturating_add(*calls));
    let wanted = (all as f64 * share).ceil().max(1.0) as u64;
    let mut seen = 0u64;
    for (ns, calls) in latency {
        seen = seen.saturating_add(*calls);
        if seen >= wanted {
            return *ns;
        }
    }
    latency.last().map_or(0.0, |(ns, _)| *ns)
}

/// How far from the slowest a call is: 1 for one call in ten, 2 for one in a hundred.
fn nines(share: f64) -> f64 {
    -(1.0 - share).max(1e-9).log10()
}

/// A distribution as a line.
pub fn mark(name: &str, class: &str, latency: &[(f64, u64)]) -> Mark {
    let all = latency.iter().map(|(_, calls)| *calls as f64).sum::<f64>().max(1.0);
    let end = 1.0 - 1.0 / all.max(2.0);
    let (mut line, mut seen) = (Vec::new(), 0.0);
    for (ns, calls) in latency {
        let from = nines((seen / all).min(end));
        seen += *calls as f64;
        line.extend([(from, at_time(*ns)), (nines((seen / all).min(end)), at_time(*ns))]);
    }
    let said = PERCENTILES.map(|(share, label)| format!("{label} {}", time(quantile(latency, share))));
    let most = time(latency.last().map_or(0.0, |(ns, _)| *ns));
    let readout = vec![format!("{} · most {most}", said.join(" · "))];
    Mark { class: class.into(), name: name.into(), readout, lines: vec![line], ..Mark::default() }
}

/// Calls from the fastest to the slowest.
pub fn distribution(title: &str, marks: Vec<Mark>) -> Plot {
    let points = || marks.iter().flat_map(|mark| mark.lines.iter().flatten());
    let (least, most) = points().fold((f64::MAX, 1.0), |(least, most), (_, y)| (y.min(least), y.max(most)));
    let far = points().map(|point| point.0).fold(1.0, f64::max);
    let ticks = PERCENTILES.iter().map(|(share, label)| (nines(*share), (*label).to_owned()));
    let x = Axis {
        range: (0.0, far),
        ticks: ticks.filter(|(at, _)| *at <= far).collect(),
        title: "calls that take no longer".into(),
    };
    Plot {
        title: title.into(),
        caption: "Measured on this machine, with the waits that the profile adds. Each step to the right has a tenth of the calls \
                  beyond it. Both scales are logarithmic, and times below 1 ns are drawn at 1 ns."
            .into(),
        x,
        y: times("time of a call", 10f64.powf(least.min(most)), 10f64.powf(most)),
        marks,
        names: Names::Ends,
        height: HEIGHT,
    }
}

fn percentiles(caption: &str, policies: &[&PolicyReport], latency: Latency) -> String {
    let head = std::iter::once("policy".to_owned())
        .chain(std::iter::once("calls".to_owned()))
        .chain(PERCENTILES.map(|(_, label)| label.to_owned()))
        .chain(std::iter::once("most".to_owned()));
    let row = |policy: &&PolicyReport| {
        let all = latency(policy);
        let calls = all.iter().fold(0u64, |sum, (_, calls)| sum.saturating_add(*calls));
        let shares = PERCENTILES.map(|(share, _)| time(quantile(all, share)));
        let most = time(all.last().map_or(0.0, |(ns, _)| *ns));
        [vec![policy.policy.to_owned(), count(calls)], shares.to_vec(), vec![most]].concat()
    };
    table(caption, &head.collect::<Vec<_>>(), &policies.iter().map(row).collect::<Vec<_>>())
}

fn all_figures(runs: &Runs) -> String {
    let policies = &runs.report.policies;
    let head: Vec<String> = std::iter::once(String::new())
        .chain(policies.iter().map(|policy| policy.policy.to_owned()))
        .collect();
    let known = runs.report.trace.tells_copies();
    let row = |line: &crate::table::Line| {
        let values = policies.iter().zip(&runs.costs).map(|(policy, cost)| (line.value)(policy, cost, known));
        std::iter::once(line.label.trim().to_owned()).chain(values).collect::<Vec<_>>()
    };
    let mut inside = table("All figures", &head, &LINES.iter().map(row).collect::<Vec<_>>());
    inside += "<dl>\n";
    for line in &LINES {
        // Writing to a string cannot fail.
        let _ = writeln!(inside, "<dt>{}</dt><dd>{}</dd>", escape(line.label.trim()), escape(line.meaning));
    }
    details("All figures, and what they mean", &(inside + "</dl>\n"))
}

fn about(replayed: &Replayed) -> String {
    let report = &replayed.runs.report;
    let trace = &report.trace;
    let work = format!("{} ns besides each mapping's own cost", count(report.work_ns as u64));
    let recording = format!(
        "{}: {} events, {} maps, {} unmaps, {} CPUs",
        trace.name,
        count(trace.events),
        count(trace.maps),
        count(trace.unmaps),
        count(trace.cpus)
    );
    let rows = [
        ("recording", recording),
        ("devices", trace.devices.join(", ")),
        ("recorded", header::recorded(&trace.recorded)),
        ("to be known", replayed.notes.join("; ")),
        ("waits of", report.profile.clone()),
        ("page tables", replayed.format.clone()),
        ("work", work),
        ("runs", replayed.runs.number.to_string()),
    ];
    element("h3", "How it was made") + &pairs(&rows) + &machine(&replayed.origin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_fewer_calls_than_a_share_take_no_longer() {
        let three = [(1.0, 1), (2.0, 1), (3.0, 1)];
        let of = |share| quantile(&three, share);
        assert_eq!(
            [of(0.0), of(1.0 / 3.0), of(0.34), of(0.5), of(0.67), of(1.0)],
            [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        );
        assert_eq!(quantile(&[(5.0, 999), (7.0, 1)], 0.999), 5.0);
        assert_eq!(quantile(&[(5.0, 998), (7.0, 2)], 0.999), 7.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
