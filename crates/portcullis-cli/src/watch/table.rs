//! The live view: a line for each device.

use std::time::Duration;

use comfy_table::CellAlignment;
use portcullis_trace::Printable;

use super::device::{Mode, Shown};
use crate::look::{self, bytes, count, number_of};

/// What is to be said beside the devices.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// How long it has been watched.
    pub time: Duration,
    /// Events that were lost.
    pub lost: u64,
}

/// The text of a view, in lines of `columns` at the most: a view takes the place of the one before, line by line, so none may be broken by
/// the terminal.
pub fn text(devices: &[Shown<'_>], view: View, unicode: bool, columns: usize) -> String {
    let lost = match view.lost {
        0 => "none lost".to_owned(),
        lost => format!("{} LOST: the figures are too low", number_of(lost, "event")),
    };
    let head = look::wrap_at(&format!("{} s, {lost}", view.time.as_secs()), "", columns);
    if devices.is_empty() {
        return head + &look::wrap_at("no device has mapped anything yet", "", columns);
    }
    let mut table = look::table(unicode);
    table.set_header(["device", "mode", "maps/s", "mapped/s", "mapped now", "open after unmap"]);
    for device in devices {
        table.add_row(cells(device));
    }
    for column in 2..5 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let table = table.to_string();
    if look::fits(&table, columns) {
        return format!("{head}{table}\n");
    }
    let lines = devices.iter().map(|device| {
        let [name, mode, maps, mapped, open, after] = cells(device);
        let text = format!(
            "{name} ({mode}): {maps} maps/s, {mapped}/s; {open} mapped now; open after unmap: {after}"
        );
        look::wrap_at(&text, "  ", columns)
    });
    head + &lines.collect::<String>()
}

/// What each column has.
fn cells(device: &Shown<'_>) -> [String; 6] {
    [
        Printable(device.name).to_string(),
        mode(device.mode).to_owned(),
        count(device.maps.round() as u64),
        bytes_of(device.bytes),
        format!("{} in {}", bytes_of(device.open_bytes as f64), count(device.open)),
        after(device),
    ]
}

fn bytes_of(n: f64) -> String {
    if n == 0.0 { "0".into() } else { bytes(n) }
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Strict => "strict",
        Mode::Lazy => "lazy",
        Mode::Passthrough => "passthrough",
        Mode::NoIommu => "no IOMMU",
        Mode::Module => "portcullis",
        Mode::Unknown => "?",
    }
}

/// What devices reach after its unmap.
fn after(device: &Shown<'_>) -> String {
    match device.mode {
        Mode::Strict => "nothing".into(),
        Mode::Lazy if device.after_ns == 0 => "nothing now".into(),
        Mode::Lazy => format!("{}, up to {:.1} ms", bytes(device.after_bytes), device.after_ns as f64 / 1e6),
        Mode::Passthrough | Mode::NoIommu => "all memory".into(),
        Mode::Module => "see status".into(),
        Mode::Unknown => "not known".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_says_what_is_open_and_how_long() {
        let shown = |name, mode, maps| Shown {
            name,
            mode,
            maps,
            bytes: maps * 4096.0,
            open: 512,
            open_bytes: 2_097_152,
            after_bytes: 1_234_567.0,
            after_ns: 9_950_000,
        };
        let devices = || {
            vec![
                shown("0000:00:03.0", Mode::Lazy, 123_456.4),
                shown("0000:00:04.0", Mode::Strict, 10.0),
                shown("0000:00:05.0", Mode::Passthrough, 0.0),
                shown("0000:00:05.1", Mode::NoIommu, 0.0),
                shown("0000:00:06.0", Mode::Module, 1.0),
                Shown { after_ns: 0, ..shown("0000:00:07.0", Mode::Lazy, 1.0) },
                shown("a\u{1b}b", Mode::Unknown, 1.0),
            ]
        };
        let at = |lost, columns| {
            text(&devices(), View { time: Duration::from_millis(7_900), lost }, false, columns)
        };
        let view = |lost| at(lost, 90);
        assert_eq!(
            view(0),
            "\
7 s, none lost
+--------------+-------------+---------+----------+---------------+----------------------+
| device       | mode        |  maps/s | mapped/s |    mapped now | open after unmap     |
+========================================================================================+
| 0000:00:03.0 | lazy        | 123,456 | 505.7 MB | 2.1 MB in 512 | 1.2 MB, up to 9.9 ms |
| 0000:00:04.0 | strict      |      10 |    41 kB | 2.1 MB in 512 | nothing              |
| 0000:00:05.0 | passthrough |       0 |        0 | 2.1 MB in 512 | all memory           |
| 0000:00:05.1 | no IOMMU    |       0 |        0 | 2.1 MB in 512 | all memory           |
| 0000:00:06.0 | portcullis  |       1 |     4 kB | 2.1 MB in 512 | see status           |
| 0000:00:07.0 | lazy        |       1 |     4 kB | 2.1 MB in 512 | nothing now          |
| a\\u{1b}b     | ?           |       1 |     4 kB | 2.1 MB in 512 | not known            |
+--------------+-------------+---------+----------+---------------+----------------------+
"
        );
        assert!(view(1_234).starts_with("7 s, 1,234 events LOST: the figures are too low\n"));
        // No line is longer than a narrow terminal's.
        let narrow = at(1_234, 40);
        assert!(
            narrow.starts_with(
                "\
7 s, 1,234 events LOST: the figures are
too low
0000:00:03.0 (lazy): 123,456 maps/s,
  505.7 MB/s; 2.1 MB in 512 mapped now;
  open after unmap: 1.2 MB, up to 9.9 ms
0000:00:04.0 (strict): 10 maps/s, 41
"
            ),
            "{narrow}"
        );
        assert!(
            [20, 40, 89]
                .iter()
                .all(|columns| { at(0, *columns).lines().all(|line| line.chars().count() <= *columns) })
        );
        let nothing = text(&[], View { time: Duration::ZERO, lost: 0 }, false, 80);
        assert_eq!(nothing, "0 s, none lost\nno device has mapped anything yet\n");
    }
}
