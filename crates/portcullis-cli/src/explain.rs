//! What `replay --explain` says: what was chosen between copying and mapping, and by what costs.

use std::fmt::Write;

use portcullis_trace::Printable;
use portcullis_trace::replay::{Choice, Report};

use crate::look::{count, number_of, size, wrap};

/// A table for each device and policy that had a choice.
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    let chosen =
        report.policies.iter().flat_map(|policy| policy.choices.iter().map(move |c| (policy.policy, c)));
    for (policy, choices) in chosen {
        let device = report.trace.devices.get(choices.device).map_or("?", String::as_str);
        let (device, profile) = (Printable(device), Printable(&report.profile));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{device}, {policy}: what is cheaper, with the waits of {profile}");
        let _ = writeln!(
            text,
            "{:<9}{:<12}{:>9}{:>9}{:>9}{:>8}{:>8}{:>8}{:>8}",
            "up to", "direction", "copy, ns", "map, ns", "cheaper", "chosen", "copied", "mapped", "changes"
        );
        for row in &choices.rows {
            let _ = writeln!(text, "{}", line(row));
        }
    }
    let end = if text.is_empty() {
        "\nNothing to explain: no policy that was replayed had a choice (`adaptive` has), or nothing was mapped."
    } else {
        "\nCosts are of a map and its unmap together, means of the latest samples; `-` was never measured. The cheaper way is \
         the one of lower cost. The chosen way may be the other one: the choice changes when the other way was cheaper by an \
         eighth four times in a row. `copied` and `mapped` count mappings that went each way. Not all take the chosen one: \
         what has no page for itself is always copied; what the ring has no room for is mapped alone, or copied; one in 61 \
         is timed, and at most one in 64 of those goes the other way. A size with `+` is of mappings that share a page with \
         other data: of these, to map is to map the pages between, and to copy the ends."
    };
    text.push_str(&wrap(end, ""));
    if !report.trace.tells_copies() {
        let without = number_of(report.trace.without_direction, "mapping");
        let text_of = format!(
            "\n{without} of this recording have no direction: they were mapped without a choice and are in none of these rows. So \
             what `adaptive` would choose for this workload, and what it would cost, is not known."
        );
        text.push_str(&wrap(&text_of, ""));
    }
    text
}

fn line(row: &Choice) -> String {
    let cost = |cost: Option<(u64, u64)>| cost.map_or("-".into(), |(map, unmap)| count(map + unmap));
    format!(
        "{:<9}{:<12}{:>9}{:>9}{:>9}{:>8}{:>8}{:>8}{:>8}",
        format!("{}{}", size(row.most_bytes), if row.shared { "+" } else { "" }),
        row.direction,
        cost(row.copy_ns),
        cost(row.map_ns),
        row.cheaper.unwrap_or("-"),
        row.choice,
        count(row.copied),
        count(row.mapped),
        count(row.switches),
    )
}
