//! What `replay --explain` says: what was chosen between copying and mapping, and by what costs.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{HumanBytes, HumanCount};
use portcullis_trace::replay::{Choice, Report};

const HEADINGS: [&str; 9] =
    ["up to", "direction", "copy, ns", "map, ns", "cheaper", "chosen", "copied", "mapped", "changes"];

/// A table for each device and policy that had a choice.
pub fn render(report: &Report, unicode: bool) -> String {
    let mut text = String::new();
    let chosen =
        report.policies.iter().flat_map(|policy| policy.choices.iter().map(move |c| (policy.policy, c)));
    for (policy, choices) in chosen {
        let device = report.trace.devices.get(choices.device).map_or("?", String::as_str);
        let _ = writeln!(
            text,
            "\n{device}, {policy}: nanoseconds to map + to unmap, waits of {} included",
            report.profile
        );
        let mut table = Table::new();
        table.load_style(if unicode { presets::UTF8_FULL_CONDENSED } else { presets::ASCII_FULL_CONDENSED });
        table.set_header(HEADINGS);
        for row in &choices.rows {
            table.add_row(cells(row));
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        text.push_str(&table.to_string());
        text.push('\n');
    }
    if text.is_empty() {
        text.push_str("\nNothing to explain: no policy that was replayed had a choice (`adaptive` has), or nothing was mapped.\n");
    } else {
        text.push_str(
            "\nEach mapping takes the chosen way, but: what shares a page with other data is copied whatever it costs, and so\n\
             is what the ring has no room for; one in 61 is timed, and one in 64 of those goes the other way. The choice\n\
             changes when the other way was cheaper by an eighth four times in a row, so a way that is a little cheaper need\n\
             not be chosen. Costs are means of the latest samples; `-` was never measured.\n",
        );
    }
    text
}

fn cells(row: &Choice) -> [String; 9] {
    let cost = |cost: Option<(u64, u64)>| cost.map_or("-".into(), |(map, unmap)| format!("{map} + {unmap}"));
    [
        HumanBytes(row.most_bytes).to_string(),
        row.direction.into(),
        cost(row.copy_ns),
        cost(row.map_ns),
        row.cheaper.unwrap_or("-").into(),
        row.choice.into(),
        HumanCount(row.copied).to_string(),
        HumanCount(row.mapped).to_string(),
        HumanCount(row.switches).to_string(),
    ]
}
