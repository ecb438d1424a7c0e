//! Lines beside events: comments, headings, notes of losses, and stack traces.

use super::{Line, number};
use crate::measured::Measured;

/// Parses `text`, which is no event; `None` if it is none of these.
pub(super) fn read(text: &[u8]) -> Option<Line<'_>> {
    match text {
        [] => return Some(Line::Nothing),
        [b'#', ..] => return Some(comment(text)),
        [b'C' | b'[', ..] => {
            if let Some(count) = lost(text) {
                return Some(Line::Lost(count));
            }
        }
        [b'P', ..] => {
            let lost = lost_by_perf(text).map(Line::Lost).or_else(|| lost_in_all(text).map(Line::LostInAll));
            if lost.is_some() {
                return lost;
            }
        }
        _ => {}
    }
    (is_heading(text) || is_stack(text)).then_some(Line::Nothing)
}

fn comment(text: &[u8]) -> Line<'_> {
    if let Some(measured) = Measured::read(text) {
        return Line::Measured(measured);
    }
    text.strip_prefix(b"# entries-in-buffer/entries-written: ")
        .and_then(number::leading_decimal)
        .map_or(Line::Nothing, |(promised, _)| Line::Promise(promised))
}

/// A heading of `trace-cmd report`: `cpus=2`, `version = 7`, `CPU 0 is empty`.
fn is_heading(text: &[u8]) -> bool {
    let is_number = |rest: &[u8]| number::leading_decimal(rest).is_some_and(|(_, rest)| rest.is_empty());
    let cpu = || text.strip_prefix(b"CPU ")?.strip_suffix(b" is empty");
    text.strip_prefix(b"cpus=")
        .or_else(|| text.strip_prefix(b"version = "))
        .or_else(cpu)
        .is_some_and(is_number)
        || matches!(text, b"Warning:" | b"Check IO/CPU overload!")
}

/// A line of a stack trace: `=> dma_map_page_attrs`, as the kernel prints it, or perf's `ffffffff8118d2a5 dma_map_page_attrs+0x35
/// ([kernel.kallsyms])`.
fn is_stack(text: &[u8]) -> bool {
    let by_perf = || {
        let end = text.iter().position(|b| *b == b' ')?;
        let (address, rest) = text.split_at(end);
        Some(number::hex(address).is_some() && rest.ends_with(b")"))
    };
    text.starts_with(b"=> ") || by_perf().unwrap_or(false)
}

/// `PERF_RECORD_LOST lost 12`, as `perf script --show-lost-events` prints it; `PERF_RECORD_LOST_SAMPLES lost 12`.
pub(super) fn lost_by_perf(text: &[u8]) -> Option<u64> {
    let rest = text.strip_prefix(b"PERF_RECORD_LOST")?;
    let rest = rest.strip_prefix(b"_SAMPLES").unwrap_or(rest);
    let rest = rest.strip_prefix(b":").unwrap_or(rest).trim_ascii_start();
    let count =
        rest.strip_prefix(b"lost").map(|rest| rest.strip_prefix(b"=").unwrap_or(rest).trim_ascii_start());
    // Whatever else it says: something was lost.
    Some(count.and_then(number::leading_decimal).map_or(1, |(count, _)| count))
}

/// perf's final summary: `Processed 900 events and lost 2 chunks!`, each of at least one event.
fn lost_in_all(text: &[u8]) -> Option<u64> {
    let (_, rest) = number::leading_decimal(text.strip_prefix(b"Processed ")?)?;
    let rest = rest.strip_prefix(b" events and ")?;
    let rest = rest.strip_prefix(b"lost ").or_else(|| rest.strip_prefix(b"LOST "))?;
    number::leading_decimal(rest).map(|(count, _)| count)
}

/// `CPU:1 [LOST 12 EVENTS]`; the kernel omits an unknown number. `trace-cmd` prints `[12 EVENTS DROPPED]`.
fn lost(text: &[u8]) -> Option<u64> {
    let text = match text.strip_prefix(b"CPU:") {
        Some(rest) => number::leading_decimal(rest)?.1.trim_ascii_start(),
        None => text,
    };
    let inner = match text.strip_prefix(b"[LOST ") {
        Some(rest) => rest.strip_suffix(b"EVENTS]")?.trim_ascii(),
        None => text.strip_prefix(b"[")?.strip_suffix(b"EVENTS DROPPED]")?.trim_ascii(),
    };
    if inner.is_empty() {
        return Some(1);
    }
    let (count, rest) = number::leading_decimal(inner)?;
    rest.is_empty().then_some(count)
}
