//! The pieces of a mapping: physical addresses from one event, lengths from others.
//!
//! `dma_map_sg` has the address of each entry, but only the length of each *merged* range. Without merging the two correspond. If
//! `iommu:map` events came before, their runs tile the list in order, so each entry ends where the next begins. Otherwise an entry is
//! assumed to extend to the end of its page. For a list that the kernel truncated, the runs also have the rest.

use super::live::Span;
use super::op::Segment;
use super::runs::Run;

/// The kernel pads entries to this page.
const PAGE: u64 = 4096;

/// The source of lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Told,
    Derived,
    Guessed,
}

/// The pieces of a truncated list, by the runs at its device addresses `spans`, and, if spans are missing too, behind them. Returns whether
/// the runs cover them.
pub(super) fn of_cut(spans: &[Span], spans_missing: bool, runs: &[Run], out: &mut Vec<Segment>) -> bool {
    out.clear();
    let mut all = Vec::new();
    for span in spans {
        let first = runs.iter().position(|run| run.iova <= span.addr && span.addr <= run.last());
        let runs = first.and_then(|first| runs.get(first..)).unwrap_or(&[]);
        if of_runs(*span, runs, out).is_none() {
            return false;
        }
        all.append(out);
    }
    let end = spans.last().map_or(0, |span| span.addr.saturating_add(span.len));
    if spans_missing {
        // A range of addresses has no gaps: after a gap comes another range. It begins where the last span's page ends.
        let mut next = end.div_ceil(PAGE).saturating_mul(PAGE);
        for run in runs.iter().filter(|run| run.iova >= end) {
            if run.iova != next {
                break;
            }
            all.push(Segment { phys: run.phys, len: run.size });
            next = next.saturating_add(run.size);
        }
    }
    *out = all;
    !out.is_empty()
}

/// The pieces of a list of entries with device addresses `spans`; `None` if no lengths fit.
///
/// Of a `truncated` list only the printed entries count, and they need not fill the spans.
pub(super) fn of_list(
    entries: &[u64],
    spans: &[Span],
    runs: &[Run],
    truncated: bool,
    out: &mut Vec<Segment>,
) -> Option<Source> {
    let total = spans.iter().try_fold(0u64, |sum, span| sum.checked_add(span.len))?;
    let fits = |out: &[Segment]| {
        let sum = out.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.len));
        sum.is_some_and(|sum| sum == total || truncated && sum < total)
            && out.iter().all(|piece| piece.len > 0)
    };
    out.clear();
    if entries.len() == spans.len() {
        out.extend(entries.iter().zip(spans).map(|(&phys, span)| Segment { phys, len: span.len }));
        if fits(out) {
            return Some(Source::Told);
        }
    }
    if from_runs(entries, spans, runs, truncated, out).is_some() && fits(out) {
        return Some(Source::Derived);
    }
    guess(entries, total, truncated, out)?;
    fits(out).then_some(Source::Guessed)
}

/// Lengths from the runs that tile the list.
fn from_runs(
    entries: &[u64],
    spans: &[Span],
    runs: &[Run],
    truncated: bool,
    out: &mut Vec<Segment>,
) -> Option<()> {
    out.clear();
    let mut runs = runs.iter();
    let mut run = runs.next()?;
    // Bytes of the run used by the entries so far, and their span.
    let mut used = 0;
    let mut at = 0;
    for (i, &phys) in entries.iter().enumerate() {
        let inside = phys % PAGE;
        if used == run.size {
            run = runs.next()?;
            used = 0;
        }
        if run.phys.checked_add(used)? != phys - inside {
            return None;
        }
        let next = match entries.get(i + 1) {
            Some(&next) => {
                (next - next % PAGE).checked_sub(run.phys).filter(|&at| at > used && at < run.size)
            }
            // The last printed entry need not be the last.
            None if truncated => used.checked_add(PAGE).filter(|&end| end < run.size),
            None => None,
        };
        let padded_end = next.unwrap_or(run.size);
        let start = run.iova.checked_add(used)?.checked_add(inside)?;
        let end = run.iova.checked_add(padded_end)?;
        let holds = |span: &Span| start.checked_sub(span.addr).is_some_and(|offset| offset < span.len);
        while !holds(spans.get(at)?) {
            at += 1;
        }
        let span = spans.get(at)?;
        let len = end.min(span.addr.checked_add(span.len)?).checked_sub(start)?;
        out.push(Segment { phys, len });
        used = padded_end;
    }
    Some(())
}

/// Lengths from page ends; the last entry takes the rest.
fn guess(entries: &[u64], total: u64, truncated: bool, out: &mut Vec<Segment>) -> Option<()> {
    out.clear();
    let mut left = total;
    for (i, &phys) in entries.iter().enumerate() {
        let to_page_end = PAGE - phys % PAGE;
        let last = i + 1 == entries.len();
        let len = if last && !truncated { left } else { to_page_end.min(left) };
        out.push(Segment { phys, len });
        left = left.checked_sub(len)?;
    }
    Some(())
}

/// The pieces of `span` by the runs; `None` if they do not cover it.
pub(super) fn of_runs(span: Span, runs: &[Run], out: &mut Vec<Segment>) -> Option<()> {
    out.clear();
    let mut addr = span.addr;
    let mut left = span.len;
    for run in runs {
        if left == 0 {
            break;
        }
        let inside = addr.checked_sub(run.iova).filter(|&inside| inside < run.size)?;
        let len = (run.size - inside).min(left);
        let phys = run.phys.checked_add(inside)?;
        match out.last_mut() {
            // The allocator's pages are often adjacent.
            Some(piece) if piece.phys.checked_add(piece.len) == Some(phys) => piece.len += len,
            _ => out.push(Segment { phys, len }),
        }
        left -= len;
        addr = addr.saturating_add(len);
    }
    (left == 0 && span.len > 0).then_some(())
}

#[cfg(test)]
mod tests {
    use super::super::op::At;
    use super::*;

    fn run(iova: u64, phys: u64, size: u64) -> Run {
        Run { iova, phys, size, at: At::default() }
    }

    #[test]
    fn merged_entries_get_their_lengths_from_the_runs() {
        // Three entries, the first two adjacent in memory (one run), the first and last not on page boundaries.
        let entries = [0x1_0200, 0x1_1000, 0x9_0000];
        let runs = [run(0xf_0000, 0x1_0000, 0x2000), run(0xf_2000, 0x9_0000, 0x1000)];
        let spans = [Span { addr: 0xf_0200, len: 0x1e00 + 0x300 }];
        let mut out = Vec::new();
        assert_eq!(of_list(&entries, &spans, &runs, false, &mut out), Some(Source::Derived));
        let lens: Vec<u64> = out.iter().map(|piece| piece.len).collect();
        assert_eq!(lens, [0xe00, 0x1000, 0x300]);
    }

    #[test]
    fn without_runs_entries_run_to_their_page_ends() {
        let mut out = Vec::new();
        let spans = [Span { addr: 0, len: 0xe00 + 0x1800 }];
        assert_eq!(of_list(&[0x200, 0x5000], &spans, &[], false, &mut out), Some(Source::Guessed));
        assert_eq!(out, [Segment { phys: 0x200, len: 0xe00 }, Segment { phys: 0x5000, len: 0x1800 }]);
    }

    #[test]
    fn lengths_that_cannot_add_up_are_refused() {
        let mut out = Vec::new();
        let spans = [Span { addr: 0, len: 0x100 }];
        assert_eq!(of_list(&[0x200, 0x5000], &spans, &[], false, &mut out), None);
    }
}
