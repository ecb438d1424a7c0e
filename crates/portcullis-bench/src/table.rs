//! The report for people.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};

use crate::report::{Measurement, Report};

/// How to lay out one benchmark's report.
#[derive(Debug, Clone)]
pub struct Layout<'a> {
    /// The subject that the benchmark is about.
    pub ours: &'a str,
    /// The rival whose figure it is put in relation to.
    pub rival: &'a str,
    /// Workloads whose slowest operations are shown as well.
    pub tails: &'a [&'a str],
    /// Subjects with what to know of each.
    pub about: &'a [(&'a str, &'a str)],
}

/// The whole report as text: a row for each workload and number of threads, a column for each subject.
pub fn render(report: &Report, layout: &Layout<'_>) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_header(&mut text, report);
    let _ = writeln!(text, "{}", table(report, layout));
    let _ = write_skipped(&mut text, report);
    let _ = write_legend(&mut text, report, layout);
    text
}

fn table(report: &Report, layout: &Layout<'_>) -> Table {
    let mut rows: Vec<(&str, usize)> = Vec::new();
    let results = report.results.iter().map(|result| (result.workload, result.threads, result.subject));
    let skipped = report.skipped.iter().map(|skipped| (skipped.workload, skipped.threads, skipped.subject));
    let mut seen: Vec<&str> = Vec::new();
    for (workload, threads, subject) in results.clone().chain(skipped) {
        if !seen.contains(&subject) {
            seen.push(subject);
        }
        if !rows.contains(&(workload, threads)) {
            rows.push((workload, threads));
        }
    }
    // Who failed at the first workload keeps the place that the others know it by.
    let subjects: Vec<&str> =
        layout.about.iter().map(|(name, _)| *name).filter(|name| seen.contains(name)).collect();
    let (ours, rival) = (subjects.contains(&layout.ours), subjects.contains(&layout.rival));

    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let mut header = vec!["workload".to_owned(), "thr.".into()];
    // Long names in several lines: the columns are no wider than their figures.
    header.extend(subjects.iter().map(|subject| subject.replace('-', "-\n").replace('_', "_\n")));
    if ours && rival {
        header.push(format!("{}\n/ {}", layout.ours, layout.rival));
    }
    if ours {
        header.push("times\nthe limit".into());
    }
    let columns = header.len();
    table.set_header(header);
    for (workload, threads) in rows {
        let mut row = vec![workload.to_owned(), threads.to_string()];
        let tail = layout.tails.contains(&workload);
        let shown = |subject| report.find(workload, threads, subject).map(|result| cell(result, tail));
        row.extend(subjects.iter().map(|subject| shown(*subject).unwrap_or("-".into())));
        let our_ns = report.find(workload, threads, layout.ours).map(|result| result.ns_per_op);
        if ours && rival {
            let theirs = report.find(workload, threads, layout.rival).map(|result| result.ns_per_op);
            row.push(our_ns.zip(theirs).map_or("-".into(), |(ours, theirs)| format!("{:.3}", ours / theirs)));
        }
        if ours {
            let nearest = our_ns.map(|ns| report.limits.nearest(ns));
            row.push(nearest.map_or("-".into(), |(name, times)| format!("{times:.1} x {name}")));
        }
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1).take(columns) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn cell(result: &Measurement, tail: bool) -> String {
    let median = format!("{} ±{:.0}%", ns(result.ns_per_op), result.spread() * 100.0);
    match result.p99_99 {
        Some(slowest) if tail => format!("{median}\n{}", ns(slowest)),
        _ if tail => format!("{median}\n-"),
        _ => median,
    }
}

fn ns(ns: f64) -> String {
    if ns < 100.0 { format!("{ns:.1}") } else { format!("{ns:.0}") }
}

fn write_header(text: &mut String, report: &Report) -> std::fmt::Result {
    let machine = &report.machine;
    let cpus = if machine.cpus == 1 { "CPU" } else { "CPUs" };
    writeln!(text, "{} {cpus}, {}, {} ({})\n", machine.cpus, machine.model, machine.os, machine.arch)
}

/// Every subject that is missing somewhere, once for each reason.
fn write_skipped(text: &mut String, report: &Report) -> std::fmt::Result {
    let mut reasons: Vec<(&str, &str, Vec<String>)> = Vec::new();
    for skipped in &report.skipped {
        let workload = format!("{} ({})", skipped.workload, skipped.threads);
        let known = reasons.iter_mut().find(|known| (known.0, known.1) == (skipped.subject, &skipped.reason));
        match known {
            Some(known) => known.2.push(workload),
            None => reasons.push((skipped.subject, &skipped.reason, vec![workload])),
        }
    }
    if !reasons.is_empty() {
        writeln!(text, "\nNot measured")?;
    }
    for (subject, reason, workloads) in reasons {
        writeln!(text, "  {subject}, {}: {reason}", workloads.join(", "))?;
    }
    Ok(())
}

fn write_legend(text: &mut String, report: &Report, layout: &Layout<'_>) -> std::fmt::Result {
    let (limits, timer) = (&report.limits, &report.timer);
    writeln!(
        text,
        "\nNanoseconds of one thread per operation: the median of interleaved repetitions, and half of the span \
         from\nleast to greatest in percent. With two threads the same figure means perfect scaling. A second \
         line: 99.99 %\nof single operations took no longer, whatever else the machine did included; --json has \
         that of every\nworkload. The clock for these moves in steps of {:.1} ns; the {:.1} ns that it takes \
         itself are taken off.\nTimes the limit: how often the largest of the limits below that is not above \
         our figure fits into it.",
        timer.resolution_ns, timer.overhead_ns
    )?;
    writeln!(text, "\nLimits, measured on one core in this run")?;
    for (name, meaning, ns) in [
        (
            "load+store",
            "a load and a store of one word, each waiting for the one before",
            limits.load_store_ns,
        ),
        ("atomic", "an atomic read-modify-write on a cache line that the core owns", limits.atomic_ns),
        ("lock", "taking and releasing a lock that nobody else wants", limits.lock_ns),
    ] {
        writeln!(text, "  {name}: {ns:.1} ns - {meaning}")?;
    }
    writeln!(text, "\nSubjects")?;
    let measured = |subject: &str| {
        let results = report.results.iter().map(|result| result.subject);
        results.chain(report.skipped.iter().map(|skipped| skipped.subject)).any(|name| name == subject)
    };
    for (subject, about) in layout.about.iter().filter(|(subject, _)| measured(subject)) {
        writeln!(text, "  {subject}: {about}")?;
    }
    Ok(())
}
