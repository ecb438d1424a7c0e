//! The states of pieces.

use super::*;

fn piece(page: u64, pages: u64) -> Piece {
    Piece { first: page << 12, last: ((page + pages) << 12) - 1, phys: page << 20, flags: 3 }
}

fn present() -> Space {
    let space = Space::new(1);
    space.attaching();
    space.attached();
    space
}

fn live(pieces: &[Piece]) -> Space {
    let space = present();
    for piece in pieces {
        assert_eq!(space.enter(&[*piece]), Entered::Entering);
        space.answered(&[*piece]);
    }
    space
}

fn unlink(space: &Space, from: u64, to: u64) -> Unlinked {
    let (mut next, mut all) = (Some(from), Unlinked::default());
    while next.is_some() {
        let some = space.unlink(&mut next, to);
        all = Unlinked { bytes: all.bytes + some.bytes, kept: all.kept + some.kept };
    }
    all
}

const ALL: [(u64, u64); 1] = [(0, u64::MAX)];

fn stale(space: &Space, ranges: &[(u64, u64)]) -> (Runs, bool) {
    let (mut search, mut runs) = (Space::search(ranges), Runs::new());
    while space.take_stale(ranges, &mut search, &mut runs) {}
    (runs, search.others)
}

#[test]
fn what_is_mapped_between_stale_pieces_is_in_no_run() {
    let space = live(&[piece(1, 1), piece(2, 2), piece(4, 1), piece(5, 1), piece(7, 1)]);
    for page in [1, 2, 5, 7] {
        let pages = if page == 2 { 2 } else { 1 };
        assert_eq!(unlink(&space, page << 12, ((page + pages) << 12) - 1).bytes, pages << 12);
    }
    let (runs, others) = stale(&space, &ALL);
    // No run includes a hole: it may be mapped meanwhile.
    assert_eq!(runs[..], [(0x1000, 0x3fff), (0x5000, 0x5fff), (0x7000, 0x7fff)]);
    assert!(!others);
    assert_eq!(stale(&space, &ALL), (Runs::new(), true), "another CPU asks about them");
    assert_eq!(space.enter(&[piece(3, 1)]), Entered::Stale);
    space.removed(&runs, false);
    assert_eq!(stale(&space, &ALL), (runs.clone(), false), "refused: once more");
    space.removed(&runs, true);
    assert_eq!(stale(&space, &ALL), (Runs::new(), false));
    assert_eq!(space.enter(&[piece(3, 1), piece(4, 1)]), Entered::Occupied(Iova::new(0x4000)));
    assert_eq!(space.enter(&[piece(1, 1), piece(2, 2)]), Entered::Entering);
}

#[test]
fn a_part_of_a_piece_is_kept_and_all_of_it_is_not() {
    let space = live(&[piece(0, 4), piece(4, 4)]);
    assert_eq!(unlink(&space, 0x1000, 0x4fff), Unlinked { bytes: 0, kept: 0x4000 });
    assert_eq!(unlink(&space, 0x1000, 0x7fff), Unlinked { bytes: 0x4000, kept: 0x3000 });
    assert_eq!(unlink(&space, 0, 0xffff), Unlinked { bytes: 0x4000, kept: 0 });
    assert_eq!(unlink(&space, 0, u64::MAX), Unlinked::default(), "once each");
}

#[test]
fn a_piece_that_is_unmapped_while_it_is_entered_waits_for_that() {
    let space = present();
    assert_eq!(space.enter(&[piece(1, 1)]), Entered::Entering);
    assert_eq!(unlink(&space, 0, u64::MAX - 1).bytes, 0x1000);
    assert_eq!(stale(&space, &ALL), (Runs::new(), true));
    space.answered(&[piece(1, 1)]);
    let (runs, others) = stale(&space, &ALL);
    assert_eq!((&runs[..], others), (&[(0x1000, 0x1fff)][..], false));
}

#[test]
fn a_domain_without_endpoints_is_recorded_and_entered_with_the_first() {
    let space = Space::new(1);
    assert_eq!(space.enter(&[piece(1, 1), piece(2, 1)]), Entered::Recorded);
    assert_eq!(unlink(&space, 0x1000, 0x1fff).bytes, 0x1000);
    assert_eq!(stale(&space, &ALL), (Runs::new(), false), "the device does not know of it");
    space.attaching();
    assert_eq!(space.enter(&[piece(3, 1)]), Entered::Recorded);
    space.attached();
    let mut from = Some(0);
    let recorded = space.recorded(&mut from);
    assert_eq!((&recorded[..], from), (&[piece(2, 1), piece(3, 1)][..], None));
    assert!(!space.detaching(), "they are under way");
    space.answered(&recorded);
    assert!(space.detaching());
    assert_eq!(unlink(&space, 0x2000, 0x2fff).bytes, 0x1000);
    space.detached();
    assert_eq!(stale(&space, &ALL), (Runs::new(), false), "forgotten with the last endpoint");
    assert_eq!(space.pieces.lock().unsettled, 0);
    space.attaching();
    space.attached();
    assert_eq!(space.recorded(&mut Some(0))[..], [piece(3, 1)]);
}

#[test]
fn a_search_of_ranges_looks_at_these_alone_and_at_the_last_address() {
    let last = Piece { first: u64::MAX - 0xfff, last: u64::MAX, phys: 0, flags: 1 };
    let space = live(&[piece(1, 1), piece(3, 1), last]);
    assert_eq!(unlink(&space, 0, u64::MAX).bytes, 0x3000);
    let (runs, _) = stale(&space, &[(0x3000, 0x3fff), (u64::MAX - 0xfff, u64::MAX), (0x3000, 0x3fff)]);
    assert_eq!(runs[..], [(0x3000, 0x3fff), (last.first, u64::MAX)]);
    space.removed(&runs, true);
    assert_eq!(stale(&space, &ALL).0[..], [(0x1000, 0x1fff)]);
}

#[test]
fn more_pieces_than_a_call_visits_are_all_found() {
    let pieces: alloc::vec::Vec<_> = (0..3000).map(|index| piece(index * 2, 1)).collect();
    let space = live(&pieces);
    assert_eq!(unlink(&space, 0, u64::MAX - 1).bytes, 3000 << 12);
    let (mut search, mut found) = (Space::search(&ALL), 0);
    loop {
        let mut runs = Runs::new();
        let more = space.take_stale(&ALL, &mut search, &mut runs);
        found += runs.len();
        space.removed(&runs, true);
        if !more {
            break;
        }
    }
    assert_eq!((found, search.others), (3000, false));
    assert_eq!(stale(&space, &ALL), (Runs::new(), false));
}

#[test]
fn a_search_goes_on_where_a_call_has_looked_at_enough() {
    for (number, calls) in [(LOOKS, 1), (LOOKS + 1, 2), (2 * LOOKS, 2), (2 * LOOKS + 1, 3)] {
        let pieces: alloc::vec::Vec<_> = (0..number as u64).map(|index| piece(index, 1)).collect();
        let space = live(&pieces);
        let last = pieces[number - 1];
        assert_eq!(unlink(&space, last.first, last.last).bytes, 0x1000);
        let all = [(0, last.last)];
        let (mut search, mut runs) = (Space::search(&all), Runs::new());
        for call in 1..calls {
            assert!(space.take_stale(&all, &mut search, &mut runs), "call {call} of {number} pieces");
            assert!(runs.is_empty());
        }
        assert!(!space.take_stale(&all, &mut search, &mut runs));
        assert_eq!(runs[..], [(last.first, last.last)]);
        assert!(!space.take_stale(&all, &mut search, &mut runs));
    }
}
