//! What a replay found, as a part of the page: the verdict first, then the table of policies, then plots, and the tables behind them.

use std::fmt::Write;

use portcullis_trace::replay::PolicyReport;

use super::axes::{at_time, times};
use super::html::{details, element, escape, pairs, table, time};
use super::plot::{Axis, Mark, Names, Plot, Point, side_by_side};
use super::policies::{self, Cell, Open, Row};
use super::read::Replayed;
use super::{machine, made, said, warning};
use crate::choice::{Candidate, SMALL};
use crate::exposed::Exposed;
use crate::header;
use crate::look::{NOT_KNOWN, bytes, count, number_of, short_time};
use crate::on_linux::{Offer, Place};
use crate::price::Code;
use crate::runs::{Cost, Runs, TIMED_FROM, cpu_time};
use crate::short::{self, if_known};
use crate::table::LINES;
use crate::verdict::{self, Verdict};

/// Percentiles that are printed.
const PERCENTILES: [(f64, &str); 5] =
    [(0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %")];

pub fn section(replayed: &Replayed) -> String {
    let runs = &replayed.runs;
    let trace = &runs.report.trace;
    let mut html = element("h2", &format!("Replay of {}", trace.name)) + &made(&replayed.origin);
    for policy in &runs.report.policies {
        if policy.violations > 0 || policy.faults > 0 {
            html += &warning(&format!(
                "{}: protection did not hold: {} and {}.",
                policy.policy,
                number_of(policy.violations, "violation"),
                number_of(policy.faults, "fault")
            ));
        }
    }
    if runs.costs.is_empty() {
        html += &element("p", "Nothing is mapped in this recording, so there is nothing to compare.");
        return html + &about(replayed);
    }
    // A page is not of the machine that shows it: no group of its.
    let offer = Offer::of(replayed.on, &replayed.format);
    let verdict = Verdict::told(runs, offer, &Place::named(&trace.devices));
    html += &said(verdict.sentences.iter());
    for hidden in trace.recorded.iter().filter_map(|recorded| Some(header::hidden(recorded)? + ".")) {
        html += &warning(&hidden);
    }
    for sentence in &replayed.warnings {
        html += &warning(sentence);
    }
    html += &policies(runs, verdict.choice, offer);
    let calls = [("An unmap", unmaps as Latency, "unmap"), ("A map", maps, "map")];
    for (what, latency, call) in calls {
        // Of a policy whose cost is not known, the calls that were replayed copied too little.
        let is_told = |policy: &&PolicyReport| {
            runs.report.trace.tells_cost_of(policy.mode) && policy.operations >= TIMED_FROM
        };
        let policies = runs.report.policies.iter().filter(is_told);
        let lines: Vec<_> = policies.filter(|policy| !latency(policy).is_empty()).collect();
        if lines.is_empty() {
            let why = if runs.costs.iter().any(|cost| !cost.timed) {
                format!("Too few mappings for a distribution of {call}s.")
            } else {
                format!(
                    "This result has no distribution of {call}s: `portcullis replay --json` of this version writes it."
                )
            };
            html += &element("p", &why);
            continue;
        }
        let marks: Vec<Mark> =
            lines.iter().map(|policy| mark(policy.policy, line_of(policy, runs), latency(policy))).collect();
        let others = |at: usize| {
            let others = marks.iter().enumerate().filter(|(other, _)| *other != at);
            others.flat_map(|(_, mark)| mark.lines.clone()).collect()
        };
        let behind = (0..marks.len()).map(others).collect();
        html += &distributions(
            &format!("{what}: how long calls take"),
            "In each plot a policy, and all others in grey, on the same scales.",
            marks,
            behind,
        );
        html += &details(
            &format!("The figures behind it: {call}s"),
            &percentiles(&format!("Time of {call}s, waits included"), &lines, latency),
        );
    }
    html += &all_figures(runs);
    html + &about(replayed)
}

/// The class of a policy's line.
pub fn line_of(policy: &PolicyReport, runs: &Runs) -> String {
    Open::counted(policy, runs.report.trace.tells_copies()).of_line(policy.policy, 0)
}

/// What a policy leaves open for a second, in words: of freed memory, and of other data.
pub fn said_open(policy: &PolicyReport, runs: &Runs) -> [String; 2] {
    Exposed::of(policy, runs.report.trace.tells_copies()).map(|exposed| match exposed {
        Exposed::All => "all memory".into(),
        Exposed::NotKnown => NOT_KNOWN.into(),
        Exposed::AtLeast(open) => format!("more than {}", bytes(open)),
        Exposed::Sum(open) if open > 0.0 => bytes(open),
        Exposed::Sum(_) => "none".into(),
    })
}

/// What each policy costs and leaves open.
fn policies(runs: &Runs, choice: Option<&str>, offer: Offer) -> String {
    let head = [
        "CPU time",
        "cost of a mapping",
        "of it, wait",
        "< 1 % from",
        "freed memory, open for 1 s",
        "other data, open for 1 s",
    ];
    let known = runs.report.trace.tells_copies();
    let all = || runs.report.policies.iter().zip(&runs.costs);
    let told = all().filter(|(_, cost)| cost.is_told()).map(|(policy, _)| cpu_time(policy));
    let of_kernel: Vec<verdict::Row<'_>> = verdict::rows(runs, offer)
        .into_iter()
        .filter(|row| row.price.code != Code::Library && row.price.cost.is_told())
        .collect();
    let told = told.chain(of_kernel.iter().map(Candidate::lost));
    let most = told.filter(|share| share.is_finite()).fold(1e-9, f64::max);
    let opened = |policy: &PolicyReport| {
        said_open(policy, runs).map(|text| {
            let is_open = text != "none" && text != NOT_KNOWN;
            Cell { is_open, ..Cell::from(text) }
        })
    };
    let rates = verdict::rows(runs, Offer::Library);
    let ns = |ns: f64| format!("{} ns", count(ns.round() as u64));
    let row = |(policy, cost): (&PolicyReport, &Cost)| {
        let share = Cell {
            bar: cost.is_told().then(|| cpu_time(policy) / most),
            ..Cell::from(if_known(cost, || short::share(policy)))
        };
        let spread =
            short::spread_of(cost, runs.number).map_or(String::new(), |spread| format!(" ± {spread}"));
        let costs = [
            if_known(cost, || ns(cost.median_ns) + &spread),
            if cost.known { ns(policy.wait_ns_per_op) } else { NOT_KNOWN.into() },
            verdict::small_from(&rates, policy).map_or("-".into(), short_time),
        ];
        let open = opened(policy);
        Row {
            policy: policy.policy.into(),
            about: policies::about(policy.policy),
            open: Open::counted(policy, known),
            cost: cost.median_ns,
            cells: std::iter::once(share).chain(costs.map(Cell::from)).chain(open).collect(),
        }
    };
    let kernel = |row: &verdict::Row<'_>| {
        let (price, policy) = (row.price, row.price.policy);
        let share = format!("{:.1} %", row.lost() * 100.0);
        let share = Cell { bar: Some(row.lost() / most), ..Cell::from(share) };
        let [least, most] = price.range_ns.map(|ns| count(ns.round() as u64));
        let costs = [
            format!("{}, estimated ({least} to {most})", ns(price.ns)),
            ns(policy.wait_ns_per_op),
            short_time(row.work_ns(SMALL)),
        ];
        let whose = if price.code == Code::Module { "Our module's" } else { "Linux's" };
        Row {
            policy: price.row.into(),
            about: format!(
                "{whose} own code for {}, estimated: {} instructions a mapping.",
                policy.policy,
                count(price.instructions.unwrap_or_default().round() as u64)
            ),
            open: Open::counted(policy, known),
            cost: price.ns,
            cells: std::iter::once(share).chain(costs.map(Cell::from)).chain(opened(policy)).collect(),
        }
    };
    let chosen = of_kernel.iter().find(|row| Some(row.price.policy.policy) == choice);
    let choice = chosen.map(|row| row.price.row).or(choice);
    let rows = of_kernel.iter().map(kernel).chain(all().map(row)).collect();
    let work = short_time(runs.report.work_ns);
    policies::table("What each policy costs, and what it leaves open", &head.map(String::from), rows, choice)
        + &format!(
            "<p class=\"note\">{}</p>\n",
            escape(&format!(
                "CPU time is the share that protection takes where {work} of other work comes with each mapping; less than 1 % \
                 where more comes with each than the fourth figure says. Open for 1 s: bytes times seconds that a device reached, over the \
                 whole recording. Red is what is open."
            ))
        )
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
pub fn mark(name: &str, class: String, latency: &[(f64, u64)]) -> Mark {
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
    // A figure and its unit stay in one line.
    let [half, slow] = [0.5, 0.99].map(|share| time(quantile(latency, share)).replace(' ', "\u{a0}"));
    let label = Some(format!("half\u{a0}{half}, 99\u{a0}%\u{a0}{slow}"));
    Mark { class, name: name.into(), label, readout, lines: vec![line], ..Mark::default() }
}

/// Calls from the fastest to the slowest: a plot for each mark, with lines behind it.
pub fn distributions(title: &str, caption: &str, marks: Vec<Mark>, behind: Vec<Vec<Vec<Point>>>) -> String {
    let lines = marks.iter().flat_map(|mark| &mark.lines).chain(behind.iter().flatten());
    let mut far = 1.0_f64;
    let (mut least, mut most) = (f64::MAX, 1.0_f64);
    for (x, y) in lines.flatten() {
        (far, least, most) = (far.max(*x), least.min(*y), most.max(*y));
    }
    let plot = |(mark, behind): (Mark, _)| {
        let ticks = PERCENTILES.iter().map(|(share, label)| (nines(*share), (*label).to_owned()));
        let ticks = ticks.filter(|(at, _)| *at <= far).collect();
        Plot {
            title: format!("{title}: {}", mark.name),
            caption: String::new(),
            x: Axis { range: (0.0, far), ticks, title: String::new() },
            y: times("", 10f64.powf(least.min(most)), 10f64.powf(most)),
            marks: vec![mark],
            behind,
            names: Names::Above,
            height: 84,
        }
    };
    let plots: Vec<Plot> = marks.into_iter().zip(behind).map(plot).collect();
    let caption = format!(
        "{caption} Up: the time of a call, measured on the machine that replayed, with the waits that the profile adds. To the right: the \
         share of calls that take no longer. Both scales are logarithmic."
    );
    side_by_side(title, &caption, &plots)
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
        "{}: {}, {}, {}, {}",
        trace.name,
        number_of(trace.events, "event"),
        number_of(trace.maps, "map"),
        number_of(trace.unmaps, "unmap"),
        number_of(trace.cpus, "CPU")
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
