//! What `bench` and `scale` found, as parts of the page.

use super::axes::{at_time, class_of, from_zero, times};
use super::html::{details, element, escape, pairs, table, time};
use super::machine;
use super::plot::{Axis, Mark, Names, Plot, Shape};
use super::read::{Benched, Measured, Scaled};
use crate::look::{count, percent};

/// The values of `of`, each once, in their order.
fn each<'a, T, K: PartialEq>(all: &'a [T], of: impl Fn(&'a T) -> K) -> Vec<K> {
    let mut seen = Vec::new();
    for key in all.iter().map(of) {
        if !seen.contains(&key) {
            seen.push(key);
        }
    }
    seen
}

/// What is measured apart: other formats, directions, profiles and numbers of threads are other plots.
fn group(result: &Measured) -> (Option<&str>, Option<&str>, Option<&str>, u64) {
    (result.format.as_deref(), result.direction.as_deref(), result.profile.as_deref(), result.threads)
}

/// `portcullis bench`.
pub fn bench(benched: &Benched) -> String {
    let results = &benched.results;
    let mut html = element("h2", &format!("Benchmark {}", benched.bench));
    let groups = each(results, group);
    let cells = each(results, |result| (group(result), &result.workload));
    let subjects = each(results, |result| &result.subject);
    html += "<div class=\"verdict\">\n";
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
    html += &element(
        "p",
        &format!("The least time, of {} comparisons: {}.", count(cells.len() as u64), said.join(", ")),
    );
    html += "</div>\n";
    for (number, of) in groups.iter().enumerate() {
        let plot = dots(results, *of, &subjects);
        let title = escape(&plot.title).replace("&#39;", "'");
        html += &if number < 2 { plot.figure() } else { details(&title, &plot.figure()) };
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

/// Workloads in rows, and a point for each subject.
fn dots(
    results: &[Measured],
    of: (Option<&str>, Option<&str>, Option<&str>, u64),
    subjects: &[&String],
) -> Plot {
    let of_group: Vec<&Measured> = results.iter().filter(|result| group(result) == of).collect();
    let workloads = each(&of_group, |result| &result.workload);
    let row = |workload: &String| workloads.iter().rev().position(|w| *w == workload).unwrap_or(0) as f64;
    let marks = subjects.iter().enumerate().filter_map(|(number, subject)| {
        let own: Vec<_> = of_group.iter().filter(|result| result.subject == **subject).collect();
        let said =
            own.iter().take(4).map(|r| format!("{} {}", r.workload, time(r.ns_per_op))).collect::<Vec<_>>();
        let shape = Shape::ALL[number % Shape::ALL.len()];
        (!own.is_empty()).then(|| Mark {
            class: format!("nr-{}", number % 7),
            name: (*subject).clone(),
            readout: vec![String::new(), said.join(" · ")],
            line: Vec::new(),
            dots: own.iter().map(|r| ((at_time(r.ns_per_op), row(&r.workload)), shape)).collect(),
        })
    });
    let (format, direction, profile, threads) = of;
    let words: Vec<&str> = [format, direction, profile].into_iter().flatten().collect();
    let apart = if words.is_empty() { String::new() } else { format!(", {}", words.join(", ")) };
    let times_of = || of_group.iter().map(|result| result.ns_per_op);
    Plot {
        title: format!(
            "Time of an operation, {threads} thread{}{apart}",
            if threads == 1 { "" } else { "s" }
        ),
        caption: "Further left is faster. Each line from left to right is ten times the one before.".into(),
        x: times("", times_of().fold(f64::MAX, f64::min), times_of().fold(0.0, f64::max)),
        y: Axis {
            range: (-0.7, workloads.len() as f64 - 0.3),
            ticks: workloads.iter().map(|workload| (row(workload), (*workload).clone())).collect(),
            title: "workload".into(),
        },
        marks: marks.collect(),
        names: Names::Legend,
        height: 110 + 24 * workloads.len().min(200) as u32,
    }
}

/// `portcullis scale`.
pub fn scale(scaled: &Scaled) -> String {
    let results = &scaled.results;
    let mut html = element("h2", &format!("Scaling of {}", scaled.workload));
    let most = results.iter().map(|result| result.cpus).max().unwrap_or(0);
    let mut there: Vec<_> = results.iter().filter(|r| r.cpus == most && r.policy != "passthrough").collect();
    there.sort_by(|a, b| b.relative_to_passthrough.total_cmp(&a.relative_to_passthrough));
    let said: Vec<String> =
        there.iter().map(|r| format!("{} keeps {}", r.policy, percent(r.relative_to_passthrough))).collect();
    html += "<div class=\"verdict\">\n";
    html += &element("p", &format!("On {most} CPUs, of the speed without protection: {}.", said.join(", ")));
    html += "</div>\n";
    html += &curves(scaled).figure();
    let head = ["policy", "CPUs", "share of full speed", "requests per second", "hottest", "extrapolated"]
        .map(String::from);
    let row = |r: &super::read::Scale| {
        let share = format!("{:.1} %", r.relative_to_passthrough * 100.0);
        vec![
            r.policy.clone(),
            r.cpus.to_string(),
            share,
            count(r.requests_per_s as u64),
            r.hottest.clone(),
            r.extrapolated.join(", "),
        ]
    };
    html += &details(
        "The figures behind it",
        &table("All figures", &head, &results.iter().map(row).collect::<Vec<_>>()),
    );
    let rows =
        [("workload", format!("{} {}", scaled.workload, scaled.about)), ("waits of", scaled.profile.clone())];
    html + &element("h3", "How it was made") + &pairs(&rows) + &machine(&scaled.origin)
}

fn curves(scaled: &Scaled) -> Plot {
    let results = &scaled.results;
    let at = |cpus: u64| (cpus.max(1) as f64).log2();
    let mut cpus = each(results, |result| result.cpus);
    cpus.sort_unstable();
    let marks = each(results, |result| &result.policy).into_iter().enumerate().map(|(number, policy)| {
        let mut own: Vec<_> = results.iter().filter(|result| result.policy == *policy).collect();
        own.sort_by_key(|result| result.cpus);
        let place = |r: &&super::read::Scale| (at(r.cpus), r.relative_to_passthrough);
        let said: Vec<String> = own
            .iter()
            .rev()
            .take(4)
            .rev()
            .map(|r| format!("{} on {}", percent(r.relative_to_passthrough), r.cpus))
            .collect();
        let shape =
            |r: &&super::read::Scale| if r.extrapolated.is_empty() { Shape::Dot } else { Shape::Ring };
        Mark {
            class: class_of(policy, number),
            name: policy.clone(),
            readout: vec![said.join(" · ")],
            line: own.iter().map(place).collect(),
            dots: own.iter().map(|r| (place(r), shape(r))).collect(),
        }
    });
    let most = results.iter().map(|result| result.relative_to_passthrough).fold(1.0, f64::max);
    let (least_cpus, most_cpus) = (cpus.first().map_or(0.0, |n| at(*n)), cpus.last().map_or(1.0, |n| at(*n)));
    Plot {
        title: "Share of the speed without protection".into(),
        caption: "Higher is faster. A dot: calculated from what was measured for as many CPUs. A ring: extrapolated.".into(),
        x: Axis {
            range: (least_cpus, most_cpus.max(least_cpus + 1.0)),
            ticks: cpus.iter().map(|n| (at(*n), n.to_string())).collect(),
            title: "CPUs".into(),
        },
        y: from_zero("share of full speed", most, |share| format!("{:.0} %", share * 100.0)),
        marks: marks.collect(),
        names: Names::Ends,
        height: 430,
    }
}
