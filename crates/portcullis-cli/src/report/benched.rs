//! What `bench` found, as a part of the page.

use super::axes::{at_time, times};
use super::html::{details, element, table, time};
use super::plot::{Axis, Mark, Names, Plot, Point, Shape};
use super::read::{Benched, Measured};
use super::{machine, made};
use crate::look::{count, number_of};

/// The values of `of`, each once, in their order.
pub fn each<'a, T, K: PartialEq>(all: &'a [T], of: impl Fn(&'a T) -> K) -> Vec<K> {
    let mut seen = Vec::new();
    for key in all.iter().map(of) {
        if !seen.contains(&key) {
            seen.push(key);
        }
    }
    seen
}

/// What is measured apart: other formats, directions, profiles and numbers of threads are other plots.
pub type Group<'a> = (Option<&'a str>, Option<&'a str>, Option<&'a str>, u64);

pub fn group(result: &Measured) -> Group<'_> {
    (result.format.as_deref(), result.direction.as_deref(), result.profile.as_deref(), result.threads)
}

/// What a group is called: `2 threads, vtd-ss`.
pub fn name_of((format, direction, profile, threads): Group<'_>) -> String {
    let words = [format, direction].into_iter().flatten().map(str::to_owned);
    let waits = profile.map(|profile| match profile {
        "none" => "no waits".to_owned(),
        profile => format!("waits of {profile}"),
    });
    std::iter::once(number_of(threads, "thread")).chain(words).chain(waits).collect::<Vec<_>>().join(", ")
}

/// `portcullis bench`.
pub fn section(benched: &Benched) -> String {
    let results = &benched.results;
    let mut html = element("h2", &format!("Benchmark {}", benched.bench)) + &made(&benched.origin);
    let groups = each(results, group);
    let subjects = each(results, |result| &result.subject);
    if let Some(verdict) = verdict(results, &subjects) {
        html += &format!("<div class=\"verdict\">\n{}</div>\n", element("p", &verdict));
    }
    for (number, of) in groups.iter().enumerate() {
        let plot = times_of(results, *of, &subjects);
        html += &if number < 2 { plot.figure() } else { details(&plot.title, &plot.figure()) };
    }
    let head = [
        "workload",
        "subject",
        "format",
        "direction",
        "profile",
        "threads",
        "ns per operation",
        "least",
        "most",
        "99.99 %",
    ];
    let row = |r: &Measured| {
        let words = [&r.format, &r.direction, &r.profile].map(|word| word.clone().unwrap_or_default());
        let times = [Some(r.ns_per_op), Some(r.min), Some(r.max), r.p99_99]
            .map(|ns| ns.map_or("-".into(), |ns| format!("{ns:.1}")));
        [
            vec![r.workload.clone(), r.subject.clone()],
            words.to_vec(),
            vec![r.threads.to_string()],
            times.to_vec(),
        ]
        .concat()
    };
    html += &details(
        "The figures behind it",
        &table("All measurements", &head.map(String::from), &results.iter().map(row).collect::<Vec<_>>()),
    );
    if !benched.skipped.is_empty() {
        let row = |s: &super::read::Skipped| {
            vec![s.workload.clone(), s.subject.clone(), s.threads.to_string(), s.reason.clone()]
        };
        let head = ["workload", "subject", "threads", "why not"].map(String::from);
        html += &details(
            "Not measured",
            &table("Not measured", &head, &benched.skipped.iter().map(row).collect::<Vec<_>>()),
        );
    }
    html + &element("h3", "How it was made") + &machine(&benched.origin)
}

/// Which subject took the least time how often.
fn verdict(results: &[Measured], subjects: &[&String]) -> Option<String> {
    if let [subject] = subjects {
        let all = || results.iter().map(|result| result.ns_per_op);
        let (least, most) = (time(all().fold(f64::MAX, f64::min)), time(all().fold(0.0, f64::max)));
        let range = if least == most { least } else { format!("{least} to {most}") };
        return Some(format!("An operation of {subject} takes {range}."));
    }
    let cells = each(results, |result| (group(result), &result.workload));
    let wins = |subject: &String| {
        let least = cells.iter().filter(|(of, workload)| {
            let same = results.iter().filter(|r| group(r) == *of && r.workload == **workload);
            same.min_by(|a, b| a.ns_per_op.total_cmp(&b.ns_per_op)).is_some_and(|r| r.subject == *subject)
        });
        least.count()
    };
    let mut best: Vec<_> =
        subjects.iter().map(|subject| (wins(subject), *subject)).filter(|(wins, _)| *wins > 0).collect();
    best.sort_by_key(|(wins, _)| std::cmp::Reverse(*wins));
    let said: Vec<String> =
        best.iter().map(|(wins, subject)| format!("{subject} in {}", count(*wins as u64))).collect();
    let of = number_of(cells.len() as u64, "comparison");
    (!best.is_empty()).then(|| format!("The least time, of {of}: {}.", said.join(", ")))
}

fn times_of(results: &[Measured], of: Group<'_>, subjects: &[&String]) -> Plot {
    let entry = |result| {
        let Measured { workload, subject, ns_per_op, min, max, .. }: &Measured = result;
        let [place, least, most] = [*ns_per_op, *min, *max].map(at_time);
        Entry { workload, subject, place, ends: (least, most), said: time(*ns_per_op) }
    };
    let entries: Vec<Entry<'_>> = results.iter().filter(|result| group(result) == of).map(entry).collect();
    let ends = || entries.iter().map(|entry| entry.ends);
    let least = ends().map(|ends| ends.0).fold(f64::MAX, f64::min);
    let most = ends().map(|ends| ends.1).fold(0.0, f64::max);
    in_rows(
        format!("Time of an operation, {}", name_of(of)),
        "Further left is faster, and the scale is logarithmic. A line goes from the least of the repetitions to the most.",
        times("", 10f64.powf(least), 10f64.powf(most)),
        &entries,
        subjects,
    )
}

/// A point of a plot whose rows are workloads.
pub struct Entry<'a> {
    pub workload: &'a String,
    pub subject: &'a String,
    pub place: f64,
    /// How far it is from repetition to repetition.
    pub ends: (f64, f64),
    pub said: String,
}

/// Workloads in rows, and a point for each subject.
pub fn in_rows(title: String, caption: &str, x: Axis, entries: &[Entry<'_>], subjects: &[&String]) -> Plot {
    let workloads = each(entries, |entry| entry.workload);
    let row = |workload: &String| workloads.iter().rev().position(|w| *w == workload).unwrap_or(0) as f64;
    // Subjects stand one below another, so that none hides another.
    let apart = 0.7 / subjects.len().max(1) as f64;
    let middle = (subjects.len().max(1) - 1) as f64 / 2.0;
    let marks = subjects.iter().enumerate().filter_map(|(number, subject)| {
        let own: Vec<_> = entries.iter().filter(|entry| entry.subject == *subject).collect();
        let said = own.iter().take(6).map(|entry| format!("{} {}", entry.workload, entry.said));
        let shape = Shape::ALL[number % Shape::ALL.len()];
        let y = |entry: &&Entry<'_>| row(entry.workload) + (middle - number as f64) * apart;
        let line =
            |entry: &&Entry<'_>| -> Vec<Point> { vec![(entry.ends.0, y(entry)), (entry.ends.1, y(entry))] };
        (!own.is_empty()).then(|| Mark {
            class: format!("thin nr-{}", number % 7),
            name: (*subject).clone(),
            readout: vec![said.collect::<Vec<_>>().join(" · ")],
            lines: own.iter().map(line).collect(),
            dots: own.iter().map(|entry| ((entry.place, y(entry)), shape)).collect(),
            ..Mark::default()
        })
    });
    Plot {
        title,
        caption: caption.into(),
        x,
        y: Axis {
            range: (-0.6, workloads.len() as f64 - 0.4),
            ticks: workloads.iter().map(|workload| (row(workload), (*workload).clone())).collect(),
            title: "workload".into(),
        },
        marks: marks.collect(),
        behind: Vec::new(),
        names: Names::Legend,
        height: (workloads.len().min(200) * (10 * subjects.len() + 8).clamp(24, 80)) as u32,
    }
}
