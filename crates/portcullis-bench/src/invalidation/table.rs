//! The report for people: a line for each subject, and below what it comes to.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};

use super::subject::{AT_ONCE, GLOBAL, LIMIT, OURS, SUBJECTS};
use crate::report::{Measurement, Report, Split};
use crate::table::{ns, write_header, write_limits, write_skipped, write_subjects};

/// The whole report as text.
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, report);
    text
}

fn write(text: &mut String, report: &Report) -> std::fmt::Result {
    write_header(text, report)?;
    if let Some(profile) = report.results.iter().find_map(|result| result.profile.as_ref()) {
        writeln!(text, "Profile: {profile}\n")?;
    }
    writeln!(text, "{}", table(report))?;
    write_comparisons(text, report)?;
    write_skipped(text, report)?;
    write_legend(text, report)?;
    write_limits(text, report)?;
    write_subjects(text, report, &SUBJECTS.map(|subject| (subject.name, subject.about)))
}

fn table(report: &Report) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "workload",
        "thr.",
        "subject",
        "ns/unmap",
        "no\nflush",
        "waits",
        "locks",
        "work",
        "submissions\n/unmap",
        "hardware\nns/unmap",
    ]);
    for result in &report.results {
        let median = format!("{} ±{:.0}%", ns(result.ns_per_op), result.spread() * 100.0);
        let mut row = vec![result.workload.to_owned(), result.threads.to_string(), result.subject.to_owned()];
        row.push(median);
        row.extend(result.split.map(|split| cells(&split)).into_iter().flatten());
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn cells(split: &Split) -> [String; 6] {
    [
        split.no_flush.map_or("-".into(), ns),
        ns(split.wait_ns),
        ns(split.lock_ns),
        ns(split.work_ns),
        format!("{:.4}", split.submissions_per_op),
        ns(split.hardware_wait_ns_per_op),
    ]
}

/// The comparisons that the subjects are there for, as far as both sides were measured.
fn write_comparisons(text: &mut String, report: &Report) -> std::fmt::Result {
    let find = |workload, threads, subject| report.find(workload, threads, subject);
    let quiet = |result: &Measurement| result.split.and_then(|split| split.no_flush);
    let lazy = |threads, subject| find("lazy-unmap", threads, subject);
    let mut lines = Vec::new();
    let (ours, limit) = (lazy(1, OURS).and_then(quiet), lazy(1, LIMIT).and_then(quiet));
    if let Some((ours, limit)) = ours.zip(limit) {
        lines
            .push(format!("lazy, without a flush, over the work on the page table: {:+.1} ns", ours - limit));
    }
    if let Some((two, one)) = lazy(2, OURS).and_then(quiet).zip(ours) {
        lines.push(format!("lazy, without a flush, 2 threads: {:.2} times one", 2.0 * one / two));
    }
    for (workload, rival) in [("lazy-unmap", GLOBAL), ("strict-unmap", GLOBAL)] {
        for theirs in report.results.iter().filter(|r| (r.workload, r.subject) == (workload, rival)) {
            if let Some(ours) = find(workload, theirs.threads, OURS) {
                let (threads, times) = (theirs.threads, theirs.ns_per_op / ours.ns_per_op);
                lines.push(format!("{workload}, {}: {times:.1} times as fast as {rival}", count(threads)));
            }
        }
    }
    for driver in SUBJECTS.iter().filter(|subject| subject.is_of_a_driver()) {
        for ours in report.results.iter().filter(|r| r.subject == driver.name) {
            if let Some(limit) = find(ours.workload, ours.threads, AT_ONCE) {
                let (threads, more) = (count(ours.threads), ours.ns_per_op - limit.ns_per_op);
                lines.push(format!(
                    "{}, {}, {threads}: {more:+.0} ns over {AT_ONCE}",
                    ours.workload, driver.name
                ));
            }
        }
    }
    for result in report.results.iter().filter(|r| r.workload.starts_with("strict-") && r.threads > 1) {
        let one = find(result.workload, 1, result.subject).and_then(|one| one.split);
        let Some((one, many)) = one.zip(result.split) else { continue };
        if one.hardware_wait_ns_per_op > 0.0 {
            // Each thread does as many unmaps as the one did.
            let threads = result.threads as f64;
            let hardware = threads * many.hardware_wait_ns_per_op / one.hardware_wait_ns_per_op;
            let (workload, subject) = (result.workload, result.subject);
            lines.push(format!(
                "{workload}, {subject}, {}: the hardware works {hardware:.2} times as long as for one, each waits \
                 {:.2} times as long",
                count(result.threads),
                many.wait_ns / one.wait_ns
            ));
        }
    }
    if !lines.is_empty() {
        writeln!(text, "\nWhat it comes to")?;
    }
    lines.iter().try_for_each(|line| writeln!(text, "  {line}"))
}

fn count(threads: usize) -> String {
    if threads == 1 { "1 thread".into() } else { format!("{threads} threads") }
}

fn write_legend(text: &mut String, report: &Report) -> std::fmt::Result {
    writeln!(
        text,
        "\nNanoseconds of one thread per unmap of a page: the median of interleaved repetitions, and half of the span \
         from\nleast to greatest in percent. With more threads the same figure means that they do not hinder each \
         other. Where there\nare more threads than cores they take turns, and what passes meanwhile counts for \
         the thread that was in an unmap.\nWaits: in the invalidation queue, for the hardware or for another's batch. Locks: \
         while another thread had the lock.\nNo flush: the median of those blocks of 64 unmaps in which the thread \
         itself did not flush. Hardware: what it\nworked, by all threads' unmaps. The clock's own {:.1} ns are taken off \
         wherever it is read.",
        report.timer.overhead_ns
    )
}
