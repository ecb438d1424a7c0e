//! The replay's report for people.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{HumanBytes, HumanCount};
use portcullis_trace::Summary;
use portcullis_trace::replay::{PolicyReport, Profile, Report};

/// One line of the table: what it is called, what it means, and how to print it.
struct Line {
    label: &'static str,
    meaning: &'static str,
    value: fn(&PolicyReport) -> String,
}

const LINES: [Line; 25] = [
    Line {
        label: "operations",
        meaning: "mappings replayed; each is a map and, where the trace has it, an unmap",
        value: |p| count(p.operations),
    },
    Line {
        label: "map, mean ns",
        meaning: "measured: one call of the library to map a buffer or a list, the timer's cost taken off",
        value: |p| ns(p.map_ns.mean),
    },
    Line {
        label: "  p50",
        meaning: "half of the maps took no longer",
        value: |p| count(p.map_ns.p50.round() as u64),
    },
    Line {
        label: "  p99",
        meaning: "99 % of the maps took no longer",
        value: |p| count(p.map_ns.p99.round() as u64),
    },
    Line {
        label: "  p99.99",
        meaning: "99.99 % of the maps took no longer",
        value: |p| count(p.map_ns.p99_99.round() as u64),
    },
    Line {
        label: "unmap, mean ns",
        meaning: "measured: one call to unmap, without the time that the software IOMMU took in it",
        value: |p| ns(p.unmap_ns.mean),
    },
    Line {
        label: "  p50",
        meaning: "half of the unmaps took no longer",
        value: |p| count(p.unmap_ns.p50.round() as u64),
    },
    Line {
        label: "  p99",
        meaning: "99 % of the unmaps took no longer",
        value: |p| count(p.unmap_ns.p99.round() as u64),
    },
    Line {
        label: "  p99.99",
        meaning: "99.99 % of the unmaps took no longer",
        value: |p| count(p.unmap_ns.p99_99.round() as u64),
    },
    Line {
        label: "calls interrupted",
        meaning: "map and unmap calls left out of the figures above, because this machine ran something else \
                  meanwhile: they seemed to take 100 us or more",
        value: |p| count(p.interrupted_calls),
    },
    Line {
        label: "wait per operation, ns",
        meaning: "modelled by the profile: waiting for the IOMMU, spread over the operations",
        value: |p| ns(p.wait_ns_per_op),
    },
    Line {
        label: "operations/s, one CPU",
        meaning: "what one CPU can do: 1 s / (work + map + unmap + wait)",
        value: |p| count(p.ops_per_s as u64),
    },
    Line {
        label: "  share of passthrough",
        meaning: "the same, with no protection at all as 100 %",
        value: |p| p.relative_to_passthrough.map_or("-".into(), |share| format!("{:.1} %", share * 100.0)),
    },
    Line {
        label: "invalidations",
        meaning: "descriptors that ask the IOMMU to forget a range or everything of a domain; several go in one submission, \
                  and how often a CPU waits is another line (wait)",
        value: |p| count(p.invalidations),
    },
    Line {
        label: "IOTLB misses/access",
        meaning: "page walks per access of a device; an access stays within one 4 KiB page",
        value: |p| format!("{:.3}", p.iotlb_misses_per_access),
    },
    Line {
        label: "walk-cache misses/access",
        meaning: "page walks per access that had to read more than the last table",
        value: |p| format!("{:.4}", p.walk_cache_misses_per_access),
    },
    Line {
        label: "peak IOVA space",
        meaning: "the most address space taken at once: mapped, waiting for a flush, or cached per CPU",
        value: |p| HumanBytes(p.peak_iova_bytes).to_string(),
    },
    Line {
        label: "peak page tables",
        meaning: "the most memory that page tables took",
        value: |p| HumanBytes(p.peak_table_bytes).to_string(),
    },
    Line {
        label: "peak bounce buffers",
        meaning: "the most memory that bounce buffers took, in use or waiting for it",
        value: |p| HumanBytes(p.peak_bounce_bytes).to_string(),
    },
    Line {
        label: "stale exposure, byte-s",
        meaning: "bytes of unmapped buffers that a device still reached, times how long, for each device by itself: what \
                  another device has mapped there is stale all the same. Without translation: until the trace ends or the bytes \
                  are mapped again, of memory that the trace names; the rest of memory is not counted",
        value: |p| byte_s(p.exposure.stale_byte_s),
    },
    Line {
        label: "  as the domains counted",
        meaning: "the same by the library's own account at run time: what devices could have reached, had the IOTLB \
                  forgotten nothing by itself",
        value: |p| p.exposure_counted.map_or("-".into(), |counted| byte_s(counted.stale_byte_s)),
    },
    Line {
        label: "neighbour exposure, byte-s",
        meaning: "bytes that no mapping covers but that a device reached because they share a page with a \
                  buffer, times how long. Without translation this goes on after the unmap, as the buffer's stale bytes do",
        value: |p| byte_s(p.exposure.neighbour_byte_s),
    },
    Line {
        label: "  as the domains counted",
        meaning: "the same by the library's own account; a page that several buffers share counts for each of them",
        value: |p| p.exposure_counted.map_or("-".into(), |counted| byte_s(counted.neighbour_byte_s)),
    },
    Line {
        label: "faults",
        meaning: "accesses of a well-behaved device that were refused: must be 0",
        value: |p| count(p.faults),
    },
    Line {
        label: "violations",
        meaning: "broken promises: memory reached after a strict unmap (or its batch's commit) or past lazy's window, an access that \
                  ended in the wrong place, bytes that a copy lost or misplaced, or more exposure than the domains counted: must be 0",
        value: |p| count(p.violations),
    },
];

/// The whole report as text.
pub fn render(report: &Report, profile: &Profile, summary: &Summary, legend: bool, unicode: bool) -> String {
    let mut text = header(report, summary).join("\n") + "\n";
    // Writing to a string cannot fail.
    let timers = || report.policies.iter().map(|policy| policy.timer_ns);
    let (least, most) =
        (timers().fold(f64::MAX, f64::min).min(report.timer_ns), timers().fold(0.0, f64::max));
    let _ = writeln!(
        text,
        "waits of {} ({}), {} ns of work per operation, {least:.1} to {most:.1} ns of timer taken off each call\n",
        report.profile, profile.about, report.work_ns
    );
    let mut table = Table::new();
    table.load_style(if unicode { presets::UTF8_FULL_CONDENSED } else { presets::ASCII_FULL_CONDENSED });
    table.set_header(
        std::iter::once("").chain(report.policies.iter().map(|policy| policy.policy)).collect::<Vec<_>>(),
    );
    for line in &LINES {
        let values = report.policies.iter().map(|policy| (line.value)(policy));
        table.add_row(std::iter::once(line.label.to_owned()).chain(values).collect::<Vec<_>>());
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let _ = writeln!(text, "{table}");
    let _ = if legend {
        write_legend(&mut text, profile)
    } else {
        writeln!(text, "What each line means, and where the waits come from: --legend")
    };
    text
}

/// What was replayed, and what of the recording is to be known besides, one line each.
pub fn header(report: &Report, summary: &Summary) -> Vec<String> {
    let trace = &report.trace;
    let devices = if trace.devices.is_empty() { "none".into() } else { trace.devices.join(", ") };
    let mut lines = vec![
        format!(
            "{}: {} events, {} maps, {} unmaps, {} mapped, {} CPUs",
            trace.name,
            count(trace.events),
            count(trace.maps),
            count(trace.unmaps),
            HumanBytes(trace.bytes_mapped),
            trace.cpus
        ),
        format!("devices: {devices}"),
    ];
    lines.extend(notes(summary).into_iter().map(|note| format!("note: {note}")));
    lines
}

fn write_legend(text: &mut String, profile: &Profile) -> std::fmt::Result {
    writeln!(text, "\nWhat each line means")?;
    for line in &LINES {
        writeln!(text, "  {}: {}", line.label.trim(), line.meaning)?;
    }
    writeln!(
        text,
        "  maps and unmaps, above the table: those that were replayed. An unmap without a map in the file is \
         noted below them, and is not among them"
    )?;
    writeln!(text, "\nThe waits of profile {} ({})", profile.name, profile.about)?;
    for (_, what, cost) in profile.waits.named() {
        writeln!(text, "  {what}: {} ns - {}", cost.ns, cost.source)?;
    }
    let caches = &profile.caches;
    writeln!(
        text,
        "  caches: IOTLB of {} entries, {} ways; {} table pointers a level - {}",
        caches.iotlb_entries, caches.iotlb_ways, caches.walk_cache_entries, caches.source
    )
}

/// How every event that is not in the figures is accounted for, and what of the recording is to be known besides.
fn notes(summary: &Summary) -> Vec<String> {
    let (unmaps, syncs) = (&summary.unpaired, &summary.syncs_unpaired);
    let never_end = summary.mappings().saturating_sub(summary.mappings_ended());
    let known = [
        (
            never_end,
            if summary.limited {
                "mappings do not end before the limit"
            } else {
                "mappings never end in the file"
            },
        ),
        (unmaps.before_recording, "unmaps of buffers mapped before the recording began"),
        (unmaps.already_unmapped, "unmaps of buffers unmapped before"),
        (syncs.before_recording, "syncs of buffers mapped before the recording began"),
        (syncs.already_unmapped, "syncs came after the unmap of their buffer"),
        (unmaps.after_loss + syncs.after_loss, "unmaps and syncs whose map may be among lost events"),
        (summary.lost_events, "events were lost while recording"),
        (summary.cut().unwrap_or(0), "events that the header promises are not in the file"),
        (summary.truncated_lists, "scatter-gather lists were cut by the kernel, at 128 entries"),
        (summary.guessed_lengths, "lists whose entries' lengths had to be guessed"),
        (summary.iommu_unclaimed, "IOMMU events whose device is unknown"),
        (summary.filtered, "events of other devices"),
    ];
    let seen = known.into_iter().filter(|(n, _)| *n > 0);
    let mut notes: Vec<String> = seen.map(|(n, what)| format!("{} {what}", count(n))).collect();
    if summary.skipped > 0 {
        let names = summary.skipped_names.iter().map(|(name, n)| format!("{} {name}", count(*n)));
        let names = names.collect::<Vec<_>>().join(", ");
        notes.push(format!("{} events passed over with a warning: {names}", count(summary.skipped)));
    }
    if summary.limited {
        notes.push(format!("stopped after {} events, as --limit asks", count(summary.events)));
    }
    if summary.mappings() == 0 {
        notes.push("nothing is mapped in this recording, so there is nothing to compare".into());
    } else if summary.maps == 0 {
        notes.push(
            "the recording has events of the IOMMU alone: which driver mapped, and when, is not known".into(),
        );
    }
    notes
}

/// What should not be overlooked, one line each.
pub fn warnings(summary: &Summary, report: &Report) -> Vec<String> {
    let mut lines: Vec<String> =
        summary.kept_warnings.iter().map(|warning| format!("{}: {warning}", summary.name)).collect();
    let more = summary.warnings.saturating_sub(lines.len() as u64);
    if more > 0 {
        lines.push(format!("{}: {} more warnings", summary.name, count(more)));
    }
    for policy in &report.policies {
        if let Some(first) = &policy.first_failure {
            lines.push(format!(
                "{}: {} calls failed, the first at {first}",
                policy.policy,
                count(policy.failures)
            ));
        }
    }
    lines
}

fn count(n: u64) -> String {
    HumanCount(n).to_string()
}

fn ns(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { count(value.round() as u64) }
}

fn byte_s(value: f64) -> String {
    if value >= 1000.0 {
        count(value.round() as u64)
    } else if value == 0.0 {
        "0".into()
    } else {
        format!("{value:.3}")
    }
}
