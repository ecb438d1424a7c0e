//! What `scale` found, as a part of the page.

use portcullis::domain;

use super::axes::{around_zero, at_share, share, shares};
use super::benched::each;
use super::html::{details, element, pairs, table, time};
use super::plot::{Axis, HEIGHT, Mark, Names, Plot, Point, Shape};
use super::policies::{self, Cell, Open, Row};
use super::read::{Scale, Scaled, Spent};
use super::{machine, made, said};
use crate::look::{count, number_of};
use crate::on_linux::OwnStrict;

/// The most numbers of CPUs that have a column.
const COLUMNS: usize = 6;

/// `portcullis scale`.
pub fn section(scaled: &Scaled) -> String {
    let results = &scaled.results;
    let mut html = element("h2", &format!("Scaling of {}", scaled.workload)) + &made(&scaled.origin);
    let most = results.iter().map(|result| result.cpus).max().unwrap_or(0);
    let there: Vec<&Scale> = results.iter().filter(|result| result.cpus == most).collect();
    html += &said(scaled.verdict.iter());
    html += &policies(results, scaled.choice.as_deref());
    html += &losses(results).figure();
    html += &times(&there, most).map_or(String::new(), |plot| plot.figure());
    html += &details("The figures behind it", &figures(results));
    let about = format!("{} {}", scaled.workload, scaled.about);
    let rows = [("workload", about), ("waits of", scaled.profile.clone())];
    html + &element("h3", "How it was made") + &pairs(&rows) + &machine(&scaled.origin)
}

/// The share of the throughput that protection takes with the code that would run, as in the verdict.
fn lost(result: &Scale) -> f64 {
    (1.0 - result.relative_with_kernel.unwrap_or(result.relative_to_passthrough)).max(0.0)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Numbers of CPUs, from the least on.
fn cpus_of(results: &[Scale]) -> Vec<u64> {
    let mut cpus = each(results, |result| result.cpus);
    cpus.sort_unstable();
    cpus
}

/// What each policy costs, by the number of CPUs.
fn policies(results: &[Scale], choice: Option<&str>) -> String {
    let cpus = cpus_of(results);
    let cpus = &cpus[cpus.len().saturating_sub(COLUMNS)..];
    let head: Vec<String> = cpus.iter().map(|cpus| number_of(*cpus, "CPU")).collect();
    let row = |policy: &String| {
        let on = |cpus: u64| results.iter().find(|result| result.policy == *policy && result.cpus == cpus);
        let mut cells: Vec<Cell> = cpus
            .iter()
            .map(|cpus| Cell::from(on(*cpus).map_or("-".into(), |result| percent(lost(result)))))
            .collect();
        let last = cpus.last().and_then(|cpus| on(*cpus)).map(lost);
        if let Some(cell) = cells.last_mut() {
            cell.bar = last;
        }
        let about = about(policy, results);
        Row { policy: policy.clone(), about, open: Open::made(policy), cost: last.unwrap_or(0.0), cells }
    };
    let rows = each(results, |result| &result.policy).into_iter().map(row).collect();
    policies::table("The share of the throughput that protection takes", &head, rows, choice)
}

/// What a policy is. Strict of the library shares waits, and Linux's does not: where both are rows, one is not called by the other's name.
fn about(policy: &str, results: &[Scale]) -> String {
    let of_linux = results.iter().find_map(|result| OwnStrict::named(&result.policy));
    let has_kernel = |result: &Scale| result.policy == policy && result.relative_with_kernel.is_some();
    let code = if results.iter().any(has_kernel) {
        " Estimated with the code of Linux or of our module; the table of all figures has the library's."
    } else {
        ""
    };
    let about = match of_linux.filter(|_| policy == domain::Policy::Strict.name()) {
        Some(own) => format!(
            "Each unmap waits, and CPUs that wait at the same time share one wait: the library's own, for drivers that use its queues. \
             Linux: no setting; its own strict mode is the row {}.",
            own.name
        ),
        None => policies::about(policy),
    };
    about + code
}

/// The same as a plot: its logarithm, so that a percent is told from two, beside what takes all.
fn losses(results: &[Scale]) -> Plot {
    // What takes nothing has no logarithm, and all others are measured by it.
    let is_compared = |result: &&Scale| result.policy != "passthrough";
    let compared: Vec<Scale> = results.iter().filter(is_compared).cloned().collect();
    let results = if compared.is_empty() { results } else { &compared };
    let most = results.iter().map(lost).fold(0.01, f64::max);
    let title = "Throughput that protection takes".to_owned();
    let said = |result: &Scale| percent(lost(result));
    let axis = "share of throughput";
    if cpus_of(results).len() == 1 {
        let caption = "Further left is better. A ring at the end of a bar: extrapolated.";
        return by_cpus(results, title, caption, around_zero(axis, 0.0, most, share), lost, said);
    }
    let least = results.iter().map(lost).fold(1.0, f64::min);
    by_cpus(
        results,
        title,
        "Lower is better. The scale is logarithmic: what takes less than 0.1 % is drawn at 0.1 %. A dot: calculated from what was measured \
         for as many CPUs. A ring: extrapolated.",
        shares(axis, least, most),
        |result| at_share(lost(result)),
        said,
    )
}

/// A part of a request's time: its name in the plot, and its length.
struct Part {
    name: &'static str,
    of: fn(&Spent) -> f64,
}

const PARTS: [Part; 6] = [
    Part { name: "the workload's own work", of: |spent| spent.work_ns },
    Part { name: "the library", of: |spent| spent.library_ns },
    Part { name: "lines and locks", of: |spent| spent.shared_ns },
    Part { name: "invalidation queue", of: |spent| spent.queue_wait_ns },
    Part { name: "copies", of: |spent| spent.copy_ns },
    Part { name: "idle", of: |spent| spent.idle_ns },
];

fn all_of(spent: &Spent) -> f64 {
    PARTS.iter().map(|part| (part.of)(spent)).sum()
}

/// What a request's time goes into, a bar for each policy; nothing where the result does not say.
fn times(there: &[&Scale], cpus: u64) -> Option<Plot> {
    let there: Vec<_> = there.iter().filter(|result| all_of(&result.spent) > 0.0).collect();
    let rows = there.len();
    let row = |at: usize| (rows - 1 - at) as f64;
    let marks = PARTS.iter().enumerate().filter_map(|(number, part)| {
        let piece = |(at, result): (usize, &&&Scale)| {
            let all = all_of(&result.spent);
            let before: f64 = PARTS[..number].iter().map(|part| (part.of)(&result.spent)).sum();
            let own = (part.of)(&result.spent);
            (own > 0.0).then(|| vec![(before / all, row(at)), ((before + own) / all, row(at))])
        };
        let lines: Vec<Vec<Point>> = there.iter().enumerate().filter_map(piece).collect();
        let said = there.iter().map(|result| format!("{} {}", result.policy, time((part.of)(&result.spent))));
        (!lines.is_empty()).then(|| Mark {
            class: format!("bar part-{number}"),
            name: part.name.into(),
            readout: vec![said.collect::<Vec<_>>().join(" · ")],
            lines,
            ..Mark::default()
        })
    });
    let mut x = around_zero("share of the time", 0.0, 1.0, share);
    x.range = (0.0, 1.0);
    (rows > 0).then(|| Plot {
        title: format!("What the time of a request goes into, on {}", number_of(cpus, "CPU")),
        caption: "Each bar is the whole time of a request under that policy.".into(),
        x,
        behind: Vec::new(),
        y: Axis {
            range: (-0.6, rows as f64 - 0.4),
            ticks: there.iter().enumerate().map(|(at, result)| (row(at), result.policy.clone())).collect(),
            title: "policy".into(),
        },
        marks: marks.collect(),
        names: Names::Legend,
        height: 24 * rows.min(200) as u32,
    })
}

fn figures(results: &[Scale]) -> String {
    let head = ["policy", "CPUs", "of full throughput", "requests per second"];
    let head = head.iter().chain(PARTS.iter().map(|part| &part.name)).chain(&["hottest", "extrapolated"]);
    let row = |r: &Scale| {
        let share = percent(r.relative_to_passthrough);
        let first = vec![r.policy.clone(), r.cpus.to_string(), share, count(r.requests_per_s as u64)];
        let parts = PARTS
            .iter()
            .map(|part| if all_of(&r.spent) > 0.0 { time((part.of)(&r.spent)) } else { "-".into() });
        [first, parts.collect(), vec![r.hottest.clone(), r.extrapolated.join(", ")]].concat()
    };
    let head: Vec<String> = head.map(|name| (*name).to_owned()).collect();
    table("All figures; times are those of a request", &head, &results.iter().map(row).collect::<Vec<_>>())
}

/// A figure of each policy by the number of CPUs: a curve for each policy, or a bar where there is one number of CPUs. `place` is where
/// it is, and `said` what it is in words.
pub fn by_cpus(
    results: &[Scale],
    title: String,
    caption: &str,
    axis: Axis,
    place: impl Fn(&Scale) -> f64,
    said: impl Fn(&Scale) -> String,
) -> Plot {
    let at = |cpus: u64| (cpus.max(1) as f64).log2();
    let cpus = cpus_of(results);
    let shape = |result: &Scale| if result.extrapolated.is_empty() { Shape::Dot } else { Shape::Ring };
    let policies = each(results, |result| &result.policy);
    let marks = policies.iter().enumerate().map(|(number, policy)| {
        let mut own: Vec<_> = results.iter().filter(|result| result.policy == **policy).collect();
        own.sort_by_key(|result| result.cpus);
        let points: Vec<Point> = own.iter().map(|result| (at(result.cpus), place(result))).collect();
        let on = own.iter().rev().take(4).rev();
        let on: Vec<_> = on.map(|r| format!("{} on {}", said(r), number_of(r.cpus, "CPU"))).collect();
        Mark {
            class: Open::made(policy).of_line(policy, number),
            name: (*policy).clone(),
            label: own.last().filter(|_| cpus.len() == 1).map(|result| said(result)),
            readout: vec![on.join(" · ")],
            dots: points.iter().copied().zip(own.iter().map(|result| shape(result))).collect(),
            lines: vec![points],
        }
    });
    let least = cpus.first().map_or(0.0, |n| at(*n));
    let most = cpus.last().map_or(1.0, |n| at(*n));
    let curves = Plot {
        title,
        caption: caption.into(),
        x: Axis {
            range: (least, if most > least { most } else { least + 1.0 }),
            ticks: cpus.iter().map(|n| (at(*n), n.to_string())).collect(),
            title: "CPUs".into(),
        },
        y: axis,
        marks: marks.collect(),
        behind: Vec::new(),
        names: Names::Ends,
        height: HEIGHT,
    };
    if let [only] = cpus[..] { bars(curves, only) } else { curves }
}

/// The same plot where there is one number of CPUs: a bar for each policy, the shortest at the top.
fn bars(mut plot: Plot, cpus: u64) -> Plot {
    let value = |mark: &Mark| mark.dots.first().map_or(0.0, |((_, value), _)| *value);
    plot.marks.sort_by(|a, b| value(b).total_cmp(&value(a)));
    let mut ticks = Vec::new();
    for (row, mark) in plot.marks.iter_mut().enumerate() {
        let (row, value) = (row as f64, value(mark));
        ticks.push((row, mark.name.clone()));
        mark.class += " bar";
        mark.lines = vec![vec![(0.0, row), (value, row)]];
        mark.dots.truncate(1);
        mark.dots.retain(|(_, shape)| *shape == Shape::Ring);
        mark.dots.iter_mut().for_each(|dot| dot.0 = (value, row));
    }
    plot.title = format!("{}, on {}", plot.title, number_of(cpus, "CPU"));
    plot.x = plot.y;
    let rows = plot.marks.len();
    plot.y = Axis { range: (-0.6, rows as f64 - 0.4), ticks, title: "policy".into() };
    plot.names = Names::Rows;
    plot.height = 26 * rows.min(200) as u32;
    // Tab goes from the top down.
    plot.marks.reverse();
    plot
}
