//! All figures of a replay, a column for each policy.

use std::fmt::Write;

use comfy_table::CellAlignment;
use indicatif::HumanBytes;
use portcullis_trace::replay::PolicyReport;

use crate::exposed::Exposed;
use crate::look::{self, NOT_KNOWN, count};
use crate::runs::{Cost, Runs};
use crate::short::{if_known, if_timed, share};

/// One line of the table: what it is called, what it means, and how to print it.
pub struct Line {
    pub label: &'static str,
    pub meaning: &'static str,
    /// Of a policy and its cost, and whether the recording tells which bytes of which pages its mappings are.
    pub value: fn(&PolicyReport, &Cost, bool) -> String,
}

pub const LINES: [Line; 26] = [
    Line {
        label: "mappings",
        meaning: "mappings replayed; each is a map and, where the trace has it, an unmap",
        value: |p, _, _| count(p.operations),
    },
    Line {
        label: "cost, ns",
        meaning: "as in the short table: map + unmap + wait, per mapping, of the run in the middle",
        value: |_, cost, _| if_known(cost, || ns(cost.median_ns)),
    },
    Line {
        label: "  of which wait, ns",
        meaning: "modelled by the profile: waiting for the IOMMU, spread over the mappings",
        value: |p, cost, _| if cost.known { ns(p.wait_ns_per_op) } else { NOT_KNOWN.into() },
    },
    Line {
        label: "map, mean ns",
        meaning: "measured: one call of the library to map a buffer or a list, the timer's cost taken off",
        value: |p, cost, _| if_timed(cost, || ns(p.map_ns.mean)),
    },
    Line {
        label: "  p50",
        meaning: "half of the maps took no longer",
        value: |p, cost, _| if_timed(cost, || count(p.map_ns.p50.round() as u64)),
    },
    Line {
        label: "  p99",
        meaning: "99 % of the maps took no longer",
        value: |p, cost, _| if_timed(cost, || count(p.map_ns.p99.round() as u64)),
    },
    Line {
        label: "  p99.99",
        meaning: "99.99 % of the maps took no longer",
        value: |p, cost, _| if_timed(cost, || count(p.map_ns.p99_99.round() as u64)),
    },
    Line {
        label: "unmap, mean ns",
        meaning: "measured: one call to unmap, without the time that the software IOMMU took in it",
        value: |p, cost, _| if_timed(cost, || ns(p.unmap_ns.mean)),
    },
    Line {
        label: "  p50",
        meaning: "half of the unmaps took no longer",
        value: |p, cost, _| if_timed(cost, || count(p.unmap_ns.p50.round() as u64)),
    },
    Line {
        label: "  p99",
        meaning: "99 % of the unmaps took no longer",
        value: |p, cost, _| if_timed(cost, || count(p.unmap_ns.p99.round() as u64)),
    },
    Line {
        label: "  p99.99",
        meaning: "99.99 % of the unmaps took no longer",
        value: |p, cost, _| if_timed(cost, || count(p.unmap_ns.p99_99.round() as u64)),
    },
    Line {
        label: "calls interrupted",
        meaning: "map and unmap calls left out of the figures above, because this machine ran something else \
                  meanwhile: they seemed to take 100 us or more",
        value: |p, _, _| count(p.interrupted_calls),
    },
    Line {
        label: "mappings/s, one CPU",
        meaning: "what one CPU can do: 1 s / (work + cost)",
        value: |p, cost, _| if_known(cost, || count(p.ops_per_s as u64)),
    },
    Line {
        label: "CPU time",
        meaning: "the share of the CPU's time that protection takes: 100 % less mappings/s as a share of passthrough's",
        value: |p, cost, _| if_known(cost, || share(p)),
    },
    Line {
        label: "invalidations",
        meaning: "descriptors that ask the IOMMU to forget a range or everything of a domain; several go in one submission, \
                  and how often a CPU waits is another line (wait)",
        value: |p, _, _| count(p.invalidations),
    },
    Line {
        label: "IOTLB misses/access",
        meaning: "page walks per access of a device; an access stays within one 4 KiB page",
        value: |p, _, _| format!("{:.3}", p.iotlb_misses_per_access),
    },
    Line {
        label: "walk-cache misses/access",
        meaning: "page walks per access that had to read more than the last table",
        value: |p, _, _| format!("{:.4}", p.walk_cache_misses_per_access),
    },
    Line {
        label: "peak IOVA space",
        meaning: "the most address space taken at once: mapped, waiting for a flush, or cached per CPU",
        value: |p, _, _| HumanBytes(p.peak_iova_bytes).to_string(),
    },
    Line {
        label: "peak page tables",
        meaning: "the most memory that page tables took",
        value: |p, _, _| HumanBytes(p.peak_table_bytes).to_string(),
    },
    Line {
        label: "peak bounce buffers",
        meaning: "the most memory that bounce buffers took, in use or waiting for it",
        value: |p, _, _| HumanBytes(p.peak_bounce_bytes).to_string(),
    },
    Line {
        label: "freed memory, byte-s",
        meaning: "bytes of unmapped buffers that a device still reached, times seconds, for each device by itself: what \
                  another device has mapped there is open all the same. `all`: nothing is translated, and a device reaches all memory",
        value: |p, _, known| exposed(Exposed::of(p, known)[0]),
    },
    Line {
        label: "  as the domains counted",
        meaning: "the same by the library's own account at run time: what devices could have reached, had the IOTLB \
                  forgotten nothing by itself",
        value: |p, _, known| Exposed::counted(p, known).map_or("-".into(), |[freed, _]| exposed(freed)),
    },
    Line {
        label: "other data, byte-s",
        meaning: "bytes that no mapping covers but that a device reached because they share a page with a \
                  buffer, times seconds",
        value: |p, _, known| exposed(Exposed::of(p, known)[1]),
    },
    Line {
        label: "  as the domains counted",
        meaning: "the same by the library's own account; a page that several buffers share counts for each of them",
        value: |p, _, known| Exposed::counted(p, known).map_or("-".into(), |[_, other]| exposed(other)),
    },
    Line {
        label: "faults",
        meaning: "accesses of a well-behaved device that were refused: must be 0",
        value: |p, _, _| count(p.faults),
    },
    Line {
        label: "violations",
        meaning: "broken promises: memory reached after a strict unmap (or its batch's commit) or past lazy's window, an access that \
                  ended in the wrong place, bytes that a copy lost or misplaced, or more exposure than the domains counted: must be 0",
        value: |p, _, _| count(p.violations),
    },
];

/// Writes the table.
pub fn write(text: &mut String, runs: &Runs, unicode: bool) -> std::fmt::Result {
    let policies = &runs.report.policies;
    let known = runs.report.trace.tells_copies();
    let of = |some: &[(&PolicyReport, &Cost)]| {
        let mut table = look::table(unicode);
        table.set_header(
            std::iter::once("").chain(some.iter().map(|(policy, _)| policy.policy)).collect::<Vec<_>>(),
        );
        for line in &LINES {
            let values = some.iter().map(|(policy, cost)| (line.value)(policy, cost, known));
            table.add_row(std::iter::once(line.label.to_owned()).chain(values).collect::<Vec<_>>());
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.to_string()
    };
    let wide = |some: &[_]| of(some).lines().map(|line| line.chars().count()).max().unwrap_or(0);
    let all: Vec<_> = policies.iter().zip(&runs.costs).collect();
    for some in look::parts(&all, look::room(), wide) {
        writeln!(text, "{}\n", of(some))?;
    }
    let timers = || policies.iter().map(|policy| policy.timer_ns);
    let (least, most) =
        (timers().fold(f64::MAX, f64::min).min(runs.report.timer_ns), timers().fold(0.0, f64::max));
    let timer = format!("The timer's own {least:.1} to {most:.1} ns are taken off each call.");
    write!(text, "{}", look::wrap(&timer, ""))
}

fn ns(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { count(value.round() as u64) }
}

fn exposed(exposed: Exposed) -> String {
    match exposed {
        Exposed::All => "all".into(),
        Exposed::NotKnown => NOT_KNOWN.into(),
        Exposed::AtLeast(open) => format!("> {}", byte_s(open)),
        Exposed::Sum(open) => byte_s(open),
    }
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
