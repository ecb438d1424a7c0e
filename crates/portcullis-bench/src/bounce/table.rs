//! The report for people: a row for each workload, direction and number of threads, and below what it comes to.

use std::fmt::Write;

use super::subject::{COPY, LINUX, OURS, ROTATING, STRICT, SUBJECTS};
use crate::report::{Halves, Measurement, Report};
use crate::table::{self, Layout, ns, write_header, write_limits, write_skipped, write_subjects};

/// The whole report as text.
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, report);
    text
}

fn write(text: &mut String, report: &Report) -> std::fmt::Result {
    write_header(text, report)?;
    let about = SUBJECTS.map(|subject| (subject.name, subject.about));
    let layout = Layout { ours: OURS, rival: LINUX, limit: Some(COPY), tails: &[], about: &about };
    writeln!(text, "{}", table::table(report, &layout))?;
    let lines = comparisons(report);
    if !lines.is_empty() {
        writeln!(text, "\nWhat it comes to")?;
    }
    lines.iter().try_for_each(|line| writeln!(text, "  {line}"))?;
    write_skipped(text, report)?;
    write_legend(text)?;
    write_limits(text, report)?;
    write_subjects(text, report, &about)
}

/// What our figures are beside the others' of the same run.
fn comparisons(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    for ours in report.results.iter().filter(|result| result.subject == OURS) {
        let same = |other: &&Measurement| {
            (other.workload, other.direction, other.threads) == (ours.workload, ours.direction, ours.threads)
        };
        let of = |subject| report.results.iter().filter(same).filter(move |other| other.subject == subject);
        let mut parts = Vec::new();
        for copy in of(COPY) {
            let (more, times) = (ours.ns_per_op - copy.ns_per_op, ours.ns_per_op / copy.ns_per_op);
            parts.push(format!("a bare copy {more:+.1} ns ({times:.2}x)"));
        }
        for subject in [LINUX, ROTATING] {
            let fast = |other: &Measurement| {
                format!("{:.2} times as fast as {subject}", other.ns_per_op / ours.ns_per_op)
            };
            parts.extend(of(subject).map(fast));
        }
        for strict in of(STRICT) {
            let profile = strict.profile.as_deref().unwrap_or("-");
            let mut part =
                format!("{:.2} times as fast as {STRICT} {profile}", strict.ns_per_op / ours.ns_per_op);
            if let Some((ours, strict)) = ours.halves.zip(strict.halves) {
                let less = |ours: f64, strict: f64| (ours / strict - 1.0) * 100.0;
                let (map, unmap) = (less(ours.map_ns, strict.map_ns), less(ours.unmap_ns, strict.unmap_ns));
                let _ = write!(part, " (map {map:+.1} %, unmap {unmap:+.1} %)");
            }
            parts.push(part);
        }
        if let Some(times) = scaling(report, ours) {
            let copy = of(COPY).next().and_then(|copy| scaling(report, copy));
            let copy = copy.map_or(String::new(), |times| format!(" (a bare copy's: {times:.2})"));
            parts.push(format!("{times:.2} times the throughput of 1 thread{copy}"));
        }
        if let Some(Halves { map_ns, unmap_ns, .. }) = ours.halves {
            parts.push(format!("map {} ns, unmap {} ns", ns(map_ns), ns(unmap_ns)));
        }
        if !parts.is_empty() {
            let direction = ours.direction.map_or(String::new(), |direction| format!(" {direction}"));
            lines.push(format!("{}{direction} ({}): {}", ours.workload, ours.threads, parts.join(", ")));
        }
    }
    lines
}

/// What all threads of `many` do in a second, over what one does.
fn scaling(report: &Report, many: &Measurement) -> Option<f64> {
    let one = report.results.iter().find(|one| {
        (one.workload, one.direction, one.threads, one.subject)
            == (many.workload, many.direction, 1, many.subject)
    });
    let one = one.filter(|_| many.threads > 1)?;
    Some(many.threads as f64 * one.ns_per_op / many.ns_per_op)
}

fn write_legend(text: &mut String) -> std::fmt::Result {
    writeln!(
        text,
        "\nNanoseconds of one thread per map and unmap of a buffer, copies included: the median of interleaved \
         repetitions,\nand half of the span from least to greatest in percent. With more threads the same figure means \
         that they do not\nhinder each other; where there are more threads than cores they share these, and all threads \
         together do as much as one\nif the figure is as many times as large. Times the limit: how often the figure of \
         `{COPY}` fits into ours. With --depth\nthe clock's own time is taken off what a map and an unmap take, but not \
         off both together."
    )
}
