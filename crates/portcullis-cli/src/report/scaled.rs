//! What `scale` found, as a part of the page.

use super::axes::{around_zero, class_of, share};
use super::benched::each;
use super::html::{details, element, pairs, table, time};
use super::machine;
use super::plot::{Axis, HEIGHT, Mark, Names, Plot, Point, Shape};
use super::read::{Scale, Scaled, Spent};
use crate::look::{count, number_of};

/// `portcullis scale`.
pub fn section(scaled: &Scaled) -> String {
    let results = &scaled.results;
    let mut html = element("h2", &format!("Scaling of {}", scaled.workload));
    let most = results.iter().map(|result| result.cpus).max().unwrap_or(0);
    let there: Vec<&Scale> = results.iter().filter(|result| result.cpus == most).collect();
    html += "<div class=\"verdict\">\n";
    for sentence in &scaled.verdict {
        html += &element("p", sentence);
    }
    html += "</div>\n";
    let place = |result: &Scale| result.relative_to_passthrough;
    let title = "Throughput, as a share of that without protection".to_owned();
    let top = results.iter().map(place).fold(1.0, f64::max);
    let axis = around_zero("share of full throughput", 0.0, top, share);
    html += &by_cpus(results, title, axis, place, |share| format!("{:.1} %", share * 100.0)).figure();
    html += &times(&there, most).map_or(String::new(), |plot| plot.figure());
    html += &details("The figures behind it", &figures(results));
    let about = format!("{} {}", scaled.workload, scaled.about);
    let rows = [("workload", about), ("waits of", scaled.profile.clone())];
    html + &element("h3", "How it was made") + &pairs(&rows) + &machine(&scaled.origin)
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
    let head = ["policy", "CPUs", "share of full throughput", "requests per second"];
    let head = head.iter().chain(PARTS.iter().map(|part| &part.name)).chain(&["hottest", "extrapolated"]);
    let row = |r: &Scale| {
        let share = format!("{:.1} %", r.relative_to_passthrough * 100.0);
        let first = vec![r.policy.clone(), r.cpus.to_string(), share, count(r.requests_per_s as u64)];
        let parts = PARTS
            .iter()
            .map(|part| if all_of(&r.spent) > 0.0 { time((part.of)(&r.spent)) } else { "-".into() });
        [first, parts.collect(), vec![r.hottest.clone(), r.extrapolated.join(", ")]].concat()
    };
    let head: Vec<String> = head.map(|name| (*name).to_owned()).collect();
    table("All figures; times are those of a request", &head, &results.iter().map(row).collect::<Vec<_>>())
}

/// A figure of each policy by the number of CPUs: a curve for each policy, or a bar where there is one number of CPUs.
pub fn by_cpus(
    results: &[Scale],
    title: String,
    axis: Axis,
    place: impl Fn(&Scale) -> f64,
    said: impl Fn(f64) -> String,
) -> Plot {
    let at = |cpus: u64| (cpus.max(1) as f64).log2();
    let mut cpus = each(results, |result| result.cpus);
    cpus.sort_unstable();
    let shape = |result: &Scale| if result.extrapolated.is_empty() { Shape::Dot } else { Shape::Ring };
    let policies = each(results, |result| &result.policy);
    let marks = policies.iter().enumerate().map(|(number, policy)| {
        let mut own: Vec<_> = results.iter().filter(|result| result.policy == **policy).collect();
        own.sort_by_key(|result| result.cpus);
        let points: Vec<Point> = own.iter().map(|result| (at(result.cpus), place(result))).collect();
        let on = own.iter().rev().take(4).rev();
        let on: Vec<_> = on.map(|r| format!("{} on {}", said(place(r)), number_of(r.cpus, "CPU"))).collect();
        Mark {
            class: class_of(policy, number),
            name: (*policy).clone(),
            readout: vec![on.join(" · ")],
            dots: points.iter().copied().zip(own.iter().map(|result| shape(result))).collect(),
            lines: vec![points],
            ..Mark::default()
        }
    });
    let least = cpus.first().map_or(0.0, |n| at(*n));
    let most = cpus.last().map_or(1.0, |n| at(*n));
    let curves = Plot {
        title,
        caption: "Higher is better. A dot: calculated from what was measured for as many CPUs. A ring: extrapolated.".into(),
        x: Axis {
            range: (least, if most > least { most } else { least + 1.0 }),
            ticks: cpus.iter().map(|n| (at(*n), n.to_string())).collect(),
            title: "CPUs".into(),
        },
        y: axis,
        marks: marks.collect(),
        names: Names::Ends,
        height: HEIGHT,
    };
    if let [only] = cpus[..] { bars(curves, only, said) } else { curves }
}

/// The same plot where there is one number of CPUs: a bar for each policy, the fastest at the top.
fn bars(mut plot: Plot, cpus: u64, said: impl Fn(f64) -> String) -> Plot {
    let value = |mark: &Mark| mark.dots.first().map_or(0.0, |((_, value), _)| *value);
    plot.marks.sort_by(|a, b| value(a).total_cmp(&value(b)));
    let mut ticks = Vec::new();
    for (row, mark) in plot.marks.iter_mut().enumerate() {
        let (row, value) = (row as f64, value(mark));
        ticks.push((row, mark.name.clone()));
        mark.label = Some(said(value));
        mark.class += " bar";
        mark.lines = vec![vec![(0.0, row), (value, row)]];
        mark.dots.truncate(1);
        mark.dots.retain(|(_, shape)| *shape == Shape::Ring);
        mark.dots.iter_mut().for_each(|dot| dot.0 = (value, row));
    }
    plot.title = format!("{}, on {}", plot.title, number_of(cpus, "CPU"));
    plot.caption = "Further right is better. A ring at the end of a bar: extrapolated.".into();
    plot.x = plot.y;
    let rows = plot.marks.len();
    plot.y = Axis { range: (-0.6, rows as f64 - 0.4), ticks, title: "policy".into() };
    plot.names = Names::Rows;
    plot.height = 26 * rows.min(200) as u32;
    // Tab goes from the top down.
    plot.marks.reverse();
    plot
}
