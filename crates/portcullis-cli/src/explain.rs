//! What `replay --explain` says: on which counts and prices the verdict's choice rests; and what was chosen between copying and mapping, and by what
//! costs.

use std::fmt::Write;

use portcullis_trace::Printable;
use portcullis_trace::replay::{Choice, Mode, Report};

use crate::calibration::Calibration;
use crate::counted::{Parts, instruction};
use crate::look::{COLUMNS, columns, count, number_of, size, wrap};
use crate::on_linux::Offer;
use crate::price::Prices;
use crate::runs::Runs;

/// What the choice rests on: what was counted of each policy, its price, and where prices come from.
pub fn counts(runs: &Runs, offer: Offer) -> String {
    let mut text = wrap("\nWhat the choice rests on: counts for each mapping, and their prices", "");
    let is_wide = columns() >= COLUMNS;
    let head = ["policy", "code", "instr.", "code, ns", "wait, ns", "copied, B", "copy, ns", "sum, ns"];
    if is_wide {
        text.push_str(&columns_of(&head.map(String::from)));
    }
    for price in Prices::of(runs, offer).all.iter().filter(|price| price.cost.known) {
        let Parts { code_ns, wait_ns, copy_ns } = price.counted;
        // The counts of `adaptive` are of its choices, one by one.
        let part = |ns: f64| if price.policy.mode == Mode::Adaptive { "-".into() } else { whole(ns) };
        let operations = price.policy.operations.max(1) as f64;
        let cells = [
            price.row.to_owned(),
            price.code.name().to_owned(),
            price.instructions.map_or("-".into(), whole),
            part(code_ns),
            part(wait_ns),
            price.policy.copied_bytes.map_or("-".into(), |bytes| whole(bytes as f64 / operations)),
            part(copy_ns),
            whole(price.counted.ns()),
        ];
        if is_wide {
            text.push_str(&columns_of(&cells));
        } else {
            let said: Vec<String> =
                head.iter().zip(&cells).skip(1).map(|(head, cell)| format!("{head} {cell}")).collect();
            text.push_str(&wrap(&format!("{}: {}", price.row, said.join("; ")), "  "));
        }
    }
    text.push_str(&wrap(&sources(&runs.calibration), ""));
    text
}

fn columns_of([row, code, rest @ ..]: &[String; 8]) -> String {
    let rest: String =
        rest.iter().zip([8, 10, 10, 11, 10, 10]).map(|(cell, wide)| format!("{cell:>wide$}")).collect();
    format!("{row:<13}{code:>8}{rest}\n")
}

fn whole(figure: f64) -> String {
    count(figure.round() as u64)
}

/// Where the prices come from.
fn sources(calibration: &Calibration) -> String {
    let Calibration { copy_hot_ns, copy_cold_ns, .. } = calibration;
    let copies = if copy_hot_ns.source == copy_cold_ns.source {
        copy_cold_ns.source.clone()
    } else {
        format!("{}; {}", copy_hot_ns.source, copy_cold_ns.source)
    };
    let copies = Printable(&copies);
    format!(
        "Waits are counted, at the profile's prices: --legend says where these come from, and --profile takes others. A copied KiB takes {:.0} ns, the mean of {} in a cache and {} in \
         memory ({copies}). {} Code of the library is what it takes for a page on simulated CPUs (docs/scaling.md). These prices \
         are the same on each machine, unless --calibration names others, so that a recording has one verdict. `portcullis calibrate` measures what copies take on yours, and --calibration takes that.",
        calibration.copied_kib_ns(),
        copy_hot_ns.value,
        copy_cold_ns.value,
        instruction(),
    )
}

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
