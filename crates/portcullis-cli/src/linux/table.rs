//! What `portcullis status` shows to people.

use portcullis_trace::Printable;

use super::status::{Found, Protected, Seen};
use crate::look::{self, bytes, count, number_of, number_of_these};

/// What stands where the module does not tell.
const NOT_TOLD: &str = "-";

/// The text for a terminal of `columns`: a block for each protected device, then a table of the other devices.
pub fn text(found: &Found, unicode: bool, columns: usize) -> String {
    let wrap = |text: &str, indent: &str| look::wrap_at(text, indent, columns);
    let mut text = String::new();
    for device in &found.protected {
        text.push_str(&block(device, unicode, columns));
        text.push('\n');
    }
    let version = found.module.version.as_deref().unwrap_or("of a version that it does not tell");
    text.push_str(&match (found.module.loaded, found.protected.is_empty()) {
        (false, _) => wrap(
            "The module portcullis is not loaded, so Portcullis protects no device. docs/linux.md says how to get it.",
            "",
        ),
        (true, true) => wrap(
            &format!("The module portcullis ({}) is loaded, and protects none of these devices.", Printable(version)),
            "",
        ),
        (true, false) => String::new(),
    });
    for rule in &found.module.rules {
        text.push_str(&wrap(&format!("Rule for devices that drivers take: {}", Printable(rule)), "  "));
    }
    if !found.unprotected.is_empty() {
        text.push_str(&others(&found.unprotected, unicode, columns));
    }
    text
}

fn told(value: Option<&String>) -> String {
    value.map_or(NOT_TOLD.into(), |value| Printable(value).to_string())
}

fn all_of(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| Printable(name).to_string()).collect();
    names.join(", ")
}

fn figure(value: Option<u64>, shown: fn(u64) -> String) -> String {
    value.map_or(NOT_TOLD.into(), shown)
}

fn amount(n: u64) -> String {
    if n == 0 { "none".into() } else { bytes(n as f64) }
}

/// The table in `columns` at the most: what is longer takes several lines.
fn fit(mut table: comfy_table::Table, columns: usize) -> comfy_table::Table {
    let columns = u16::try_from(columns).unwrap_or(u16::MAX);
    table.set_content_arrangement(comfy_table::ContentArrangement::Dynamic).set_width(columns);
    table
}

/// A policy with its figures.
fn policy(device: &Protected) -> String {
    let name = told(device.policy.as_ref());
    match device.policy.as_deref() {
        Some("lazy") => {
            format!("{name}, {}", figure(device.window_us, |us| format!("up to {} us open", count(us))))
        }
        Some("bounce" | "auto") => {
            format!(
                "{name}, {}",
                figure(device.threshold, |most| format!("copies up to {}", look::size(most)))
            )
        }
        _ => name,
    }
}

/// Rows of a protected device: what each is called, and what it says.
fn rows(device: &Protected) -> Vec<(&'static str, String)> {
    let counter = |name: &str| device.counter(name);
    let ns = |ns, calls| device.mean(ns, calls).map_or(NOT_TOLD.into(), |mean| format!("{mean:.0} ns"));
    let mut rows = vec![
        ("policy", policy(device)),
        ("driver", told(device.seen.driver.as_ref())),
        ("Linux had", told(device.seen.linux_mode.as_ref())),
        ("mappings", figure(counter("maps"), count)),
        (
            "copied",
            format!(
                "{}, in {}",
                figure(counter("copied_bytes"), amount),
                figure(counter("copies"), |n| number_of_these(n, "copy", "copies"))
            ),
        ),
        (
            "open now",
            format!(
                "{} in {}",
                figure(counter("open_bytes"), amount),
                figure(counter("open_mappings"), |n| number_of(n, "mapping"))
            ),
        ),
        ("exposed beside", figure(counter("exposed_bytes"), amount)),
        ("hardware waits", figure(counter("waits"), count)),
        ("cost", format!("map {}, unmap {}", ns("map_ns", "maps"), ns("unmap_ns", "unmaps"))),
        (
            "memory",
            format!(
                "{} for copies, {} for books",
                figure(counter("pool_bytes"), amount),
                figure(counter("book_bytes"), amount)
            ),
        ),
        (
            "errors",
            figure(counter("errors"), |n| {
                if n == 0 { "none".into() } else { format!("{}: dmesg tells them", count(n)) }
            }),
        ),
    ];
    // What is as it should be is no news.
    if let Some(lost @ 1..) = counter("lost_bytes") {
        rows.push(("addresses lost", amount(lost)));
    }
    rows
}

fn block(device: &Protected, unicode: bool, columns: usize) -> String {
    let seen = &device.seen;
    let uses = if seen.uses.is_empty() { String::new() } else { format!(" ({})", all_of(&seen.uses)) };
    let external = if seen.external { ", behind an external port" } else { "" };
    let head = look::wrap_at(&format!("{}{uses}{external}", Printable(&seen.device)), "  ", columns);
    let mut table = fit(look::table(unicode), columns);
    for (name, value) in rows(device) {
        table.add_row([name.to_owned(), value]);
    }
    format!("{head}{table}\n")
}

/// A table; sentences where a narrow terminal has no room for it, as names in it would be cut.
fn others(devices: &[Seen], unicode: bool, columns: usize) -> String {
    let mut table = look::table(unicode);
    table.set_header(["not protected", "is", "driver", "Linux's mode", "port"]);
    for device in devices {
        table.add_row([
            Printable(&device.device).to_string(),
            all_of(&device.uses),
            told(device.driver.as_ref()),
            mode(device),
            if device.external { "external".into() } else { String::new() },
        ]);
    }
    let drawn = table.to_string();
    if look::fits(&drawn, columns) {
        return format!("{drawn}\n");
    }
    if columns >= look::COLUMNS {
        return format!("{}\n", fit(table, columns));
    }
    let sentences = devices.iter().map(|device| look::wrap_at(&sentence(device), "  ", columns));
    look::wrap_at("Not protected:", "", columns) + &sentences.collect::<String>()
}

fn mode(device: &Seen) -> String {
    device.linux_mode.as_ref().map_or("no IOMMU".into(), |mode| Printable(mode).to_string())
}

/// A row of the table, in a line.
fn sentence(device: &Seen) -> String {
    let uses = if device.uses.is_empty() { String::new() } else { format!(" ({})", all_of(&device.uses)) };
    let driver =
        device.driver.as_ref().map_or("no driver".into(), |name| format!("driver {}", Printable(name)));
    let external = if device.external { ", external port" } else { "" };
    format!("{}{uses}: {driver}, {}{external}", Printable(&device.device), mode(device))
}
