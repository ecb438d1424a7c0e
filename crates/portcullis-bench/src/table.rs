//! The report for people.

use std::collections::HashSet;
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
    /// The subject that shows what can be reached at best; `None` where that is the nearest of the
    /// [limits](crate::limits::Limits).
    pub limit: Option<&'a str>,
    /// Workloads whose slowest operations are shown as well.
    pub tails: &'a [&'a str],
    /// Subjects with what to know of each.
    pub about: &'a [(&'a str, &'a str)],
}

/// A format and a direction, where there are several, a workload and a number of threads.
type Row<'a> = (Option<&'a str>, Option<&'a str>, &'a str, usize);

/// A subject, and the hardware it assumes, where it is measured on several.
type Column<'a> = (&'a str, Option<&'a str>);

/// The whole report as text: a row for each format, direction, workload and number of threads, a column for each
/// subject.
pub fn render(report: &Report, layout: &Layout<'_>) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_header(&mut text, report);
    let _ = writeln!(text, "{}", table(report, layout));
    let _ = write_skipped(&mut text, report);
    let _ = write_legend(&mut text, report, layout);
    text
}

pub(crate) fn table(report: &Report, layout: &Layout<'_>) -> Table {
    let (mut rows, mut seen): (Vec<Row<'_>>, Vec<Column<'_>>) = Default::default();
    let row_of = |r: &'_ Measurement| (r.format, r.direction, r.workload, r.threads);
    let results = report.results.iter().map(|r| (row_of(r), (r.subject, r.profile.as_deref())));
    // Where no subject has a figure in one of several formats, it is told below the table only.
    let skipped = report.skipped.iter().filter(|s| s.format.is_none());
    let skipped = skipped.map(|s| {
        let row = (s.format, s.direction, s.workload, s.threads);
        (row, (s.subject, s.profile.as_deref()))
    });
    for (row, subject) in results.chain(skipped) {
        if !seen.contains(&subject) {
            seen.push(subject);
        }
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    let with_format = rows.iter().any(|(format, ..)| format.is_some());
    let with_direction = rows.iter().any(|(_, direction, ..)| direction.is_some());
    // Who failed at the first workload keeps the place that the others know it by.
    let columns_of = |name| seen.iter().filter(move |(subject, _)| *subject == name).copied();
    let subjects: Vec<Column<'_>> = layout.about.iter().flat_map(|(name, _)| columns_of(*name)).collect();
    let has = |name| subjects.iter().any(|(subject, _)| *subject == name);
    let (ours, rival) = (has(layout.ours), has(layout.rival));

    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let mut header = if with_format { vec!["format".to_owned()] } else { Vec::new() };
    header.push("workload".into());
    header.extend(with_direction.then(|| "direction".into()));
    header.push("thr.".into());
    // Long names in several lines: the columns are no wider than their figures.
    header.extend(subjects.iter().map(|(subject, profile)| {
        let subject = subject.replace('-', "-\n").replace('_', "_\n");
        profile.map_or(subject.clone(), |profile| format!("{subject}\n{}", profile.replace('-', "-\n")))
    }));
    if ours && rival {
        header.push(format!("{}\n/ {}", layout.ours, layout.rival));
    }
    if ours {
        header.push("times\nthe limit".into());
    }
    let columns = header.len();
    table.set_header(header);
    for (format, direction, workload, threads) in rows {
        let mut row: Vec<String> =
            with_format.then(|| format.unwrap_or("-").to_owned()).into_iter().collect();
        row.push(workload.to_owned());
        row.extend(with_direction.then(|| direction.unwrap_or("-").to_owned()));
        row.push(threads.to_string());
        let here = || report.results.iter().filter(|r| row_of(r) == (format, direction, workload, threads));
        let find = |subject| here().find(|result| result.subject == subject);
        let tail = layout.tails.contains(&workload);
        let shown = |(subject, profile)| {
            let result = here().find(|r| (r.subject, r.profile.as_deref()) == (subject, profile));
            result.map(|result| cell(result, tail))
        };
        row.extend(subjects.iter().map(|column| shown(*column).unwrap_or("-".into())));
        let our_ns = find(layout.ours).map(|result| result.ns_per_op);
        if ours && rival {
            let theirs = find(layout.rival).map(|result| result.ns_per_op);
            row.push(our_ns.zip(theirs).map_or("-".into(), |(ours, theirs)| format!("{:.3}", ours / theirs)));
        }
        if ours {
            let limit = our_ns.and_then(|ns| match layout.limit {
                Some(limit) => find(limit).map(|limit| format!("{:.1}", ns / limit.ns_per_op)),
                None => Some(report.limits.nearest(ns)).map(|(name, times)| format!("{times:.1} x {name}")),
            });
            row.push(limit.unwrap_or("-".into()));
        }
        table.add_row(row);
    }
    for column in
        table.column_iter_mut().skip(1 + usize::from(with_format) + usize::from(with_direction)).take(columns)
    {
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

pub(crate) fn ns(ns: f64) -> String {
    if ns < 100.0 { format!("{ns:.1}") } else { format!("{ns:.0}") }
}

pub(crate) fn write_header(text: &mut String, report: &Report) -> std::fmt::Result {
    let machine = &report.machine;
    let cpus = if machine.cpus == 1 { "CPU" } else { "CPUs" };
    writeln!(text, "{} {cpus}, {}, {} ({})\n", machine.cpus, machine.model, machine.os, machine.arch)
}

/// Every subject that is missing somewhere, once for each reason.
pub(crate) fn write_skipped(text: &mut String, report: &Report) -> std::fmt::Result {
    let mut reasons: Vec<(&str, &str, Vec<&str>, Vec<String>)> = Vec::new();
    for skipped in &report.skipped {
        let workload = format!("{} ({})", skipped.workload, skipped.threads);
        let known = reasons.iter().position(|known| (known.0, known.1) == (skipped.subject, &skipped.reason));
        let known = known.unwrap_or_else(|| {
            reasons.push((skipped.subject, &skipped.reason, Vec::new(), Vec::new()));
            reasons.len() - 1
        });
        let (_, _, formats, workloads) = &mut reasons[known];
        formats.extend(skipped.format.filter(|format| !formats.contains(format)));
        if !workloads.contains(&workload) {
            workloads.push(workload);
        }
    }
    if !reasons.is_empty() {
        writeln!(text, "\nNot measured")?;
    }
    let measured = report.results.iter().map(|result| (result.workload, result.threads));
    let all: HashSet<_> = measured.chain(report.skipped.iter().map(|s| (s.workload, s.threads))).collect();
    for (subject, reason, formats, workloads) in reasons {
        let formats: String = formats.iter().map(|format| format!("{format}, ")).collect();
        let workloads = if workloads.len() == all.len() && !formats.is_empty() {
            "every workload".into()
        } else {
            workloads.join(", ")
        };
        writeln!(text, "  {subject}, {formats}{workloads}: {reason}")?;
    }
    Ok(())
}

fn write_legend(text: &mut String, report: &Report, layout: &Layout<'_>) -> std::fmt::Result {
    let timer = &report.timer;
    writeln!(
        text,
        "\nNanoseconds of one thread per operation: the median of interleaved repetitions, and half of the span \
         from\nleast to greatest in percent. With two threads the same figure means perfect scaling."
    )?;
    if !layout.tails.is_empty() {
        writeln!(
            text,
            "A second line: 99.99 % of single operations took no longer, whatever else the machine did included."
        )?;
    }
    writeln!(
        text,
        "--json has what 99.99 % of single operations did not exceed, of every workload. The clock for these moves \
         in\nsteps of {:.1} ns; the {:.1} ns that it takes itself are taken off.",
        timer.resolution_ns, timer.overhead_ns
    )?;
    match layout.limit {
        Some(limit) => writeln!(text, "Times the limit: how often the figure of `{limit}` fits into ours.")?,
        None => writeln!(
            text,
            "Times the limit: how often the largest of the limits below that is not above our figure fits into it."
        )?,
    }
    write_limits(text, report)?;
    write_subjects(text, report, layout.about)
}

/// What the machine can do at best.
pub(crate) fn write_limits(text: &mut String, report: &Report) -> std::fmt::Result {
    let limits = &report.limits;
    writeln!(text, "\nLimits, measured on one core in this run")?;
    for (name, meaning, ns) in [
        (
            "load+store",
            "a load and a store of one word, each waiting for the one before",
            limits.load_store_ns,
        ),
        ("atomic", "an atomic read-modify-write on a cache line that the core owns", limits.atomic_ns),
        ("lock", "taking and releasing a lock that no other thread wants", limits.lock_ns),
    ] {
        writeln!(text, "  {name}: {ns:.1} ns - {meaning}")?;
    }
    Ok(())
}

/// What each subject that was to be measured is.
pub(crate) fn write_subjects(text: &mut String, report: &Report, about: &[(&str, &str)]) -> std::fmt::Result {
    writeln!(text, "\nSubjects")?;
    let measured = |subject: &str| {
        let results = report.results.iter().map(|result| result.subject);
        results.chain(report.skipped.iter().map(|skipped| skipped.subject)).any(|name| name == subject)
    };
    for (subject, about) in about.iter().filter(|(subject, _)| measured(subject)) {
        writeln!(text, "  {subject}: {about}")?;
    }
    Ok(())
}
