use alloc::vec::Vec;

use super::*;
use crate::dice::Dice;

const GRANULES: u32 = 200;

/// Spans of lengths that `dice` makes, from 0 on, without those for which it says so.
fn edges(mut dice: impl FnMut(u32) -> u32) -> (Edges, Vec<Span>) {
    let (mut edges, mut spans, mut at) = (Edges::new(GRANULES.into()).unwrap(), Vec::new(), 0);
    while at < GRANULES {
        let span = Span { first: at, last: (at + dice(70)).min(GRANULES - 1) };
        if dice(6) > 0 {
            edges.insert(span);
            spans.push(span);
        }
        at = span.last + 1;
    }
    (edges, spans)
}

#[test]
fn a_run_is_removed_where_spans_lie_side_by_side() {
    let mut dice = Dice(1);
    let mut dice = |sides: u32| dice.below(sides.into()) as u32;
    for _ in 0..2000 {
        let (mut edges, spans) = edges(&mut dice);
        let run = if dice(4) > 0 && !spans.is_empty() {
            let from = dice(spans.len() as u32) as usize;
            let to = from + dice((spans.len() - from) as u32) as usize;
            Span { first: spans[from].first, last: spans[to].last }
        } else {
            let first = dice(GRANULES);
            Span { first, last: first + dice(GRANULES - first) }
        };
        let inside = |span: &&Span| run.first <= span.first && span.last <= run.last;
        let covered: u32 = spans.iter().filter(inside).map(|span| span.last - span.first + 1).sum();
        let is_covered = covered == run.last - run.first + 1;
        let count = spans.iter().filter(inside).count() as u32;
        assert_eq!(edges.remove_run(run), is_covered.then_some(count), "{run:?} of {spans:?}");
        let is_left = |span: &&Span| !(is_covered && inside(span));
        let left: Vec<_> = spans.iter().filter(is_left).collect();
        let begins = core::iter::successors(edges.next_first(0), |first| edges.next_first(first + 1));
        assert!(begins.eq(left.iter().map(|span| span.first)));
        assert!(left.iter().all(|span| edges.remove_run(**span) == Some(1)));
        assert!(edges.words.iter().all(|word| word.first | word.last == 0));
    }
}
