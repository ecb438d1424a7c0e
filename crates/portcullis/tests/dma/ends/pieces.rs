//! Lists that come piece by piece, in any order, against the pages that each address is to lead to.

use portcullis::addr::{Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::domain::{MapListError, Policy, Refused};
use portcullis::invalidation::Gather;
use portcullis::pgtable::MapError;
use portcullis_model::open::OpenReserved;

use crate::dice::Dice;
use crate::ends::bench::{Bench, PAGE, page};

const ANYWHERE: Iova = Iova::new(u64::MAX);
const BOTH: Permissions = Permissions::READ_WRITE;
const PAGES: u64 = 64;

fn memory(first: u64, pages: u64) -> PhysSegment {
    PhysSegment { len: pages * PAGE, ..page(first) }
}

/// Cuts of 64 pages, in random order: each address leads to its own page, and no page beside them is opened.
#[test]
fn pieces_in_any_order_are_one_mapping_of_just_what_was_noted() {
    let bench = Bench::new(Policy::Strict);
    let mut dice = Dice::new(37);
    for round in 0..50 {
        let reserved = bench.domain.reserve(PAGES * PAGE, ANYWHERE).unwrap();
        let (range, mut pieces) = (reserved.range(), reserved.pieces());
        // Of each page of addresses the page of memory; a cut goes on somewhere else, or right there.
        let (mut cuts, mut wanted, mut next) = (Vec::new(), Vec::new(), 1000);
        while (wanted.len() as u64) < PAGES {
            let count = (1 + dice.below(8)).min(PAGES - wanted.len() as u64);
            next += if dice.one_in(2) { 0 } else { 1 + dice.below(9) };
            cuts.push((wanted.len() as u64, memory(next, count)));
            wanted.extend(next..next + count);
            next += count;
        }
        while !cuts.is_empty() {
            let (at, piece) = cuts.swap_remove(dice.below(cuts.len() as u64) as usize);
            let iova = pieces.add(at * PAGE, piece).unwrap();
            assert_eq!(iova.get(), range.start().get() + at * PAGE);
            assert!(!bench.reaches(iova), "nothing is open before the link");
        }
        let list = pieces.list().unwrap();
        let runs = 1 + wanted.windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
        assert_eq!(list.len(), runs, "{round}: neighbours are one");
        assert_eq!(pieces.list().unwrap(), list, "as often as one likes");
        let linked = reserved.open(&list, BOTH, &mut Gather::new()).map_err(Refused::end).unwrap();
        let table = bench.domain.mapper().table();
        for (at, number) in wanted.iter().enumerate() {
            let iova = Iova::new(range.start().get() + at as u64 * PAGE);
            assert_eq!(
                table.iova_to_phys(bench.domain.platform(), iova),
                Some(page(*number).phys),
                "{round} {at}"
            );
        }
        bench.domain.unmap(linked.into_range()).unwrap();
        assert!(!bench.reaches(range.start()));
    }
    let stats = bench.domain.stats();
    assert_eq!((stats.maps, stats.unmaps, stats.lost_iova_bytes), (50, 50, 0));
}

#[test]
fn each_address_has_one_piece() {
    let bench = Bench::new(Policy::Strict);
    let reserved = bench.domain.reserve(4 * PAGE, ANYWHERE).unwrap();
    let at = |number: u64| Iova::new(reserved.range().start().get() + number * PAGE);
    let not_once = |pages: &[(u64, u64)]| {
        let mut pieces = reserved.pieces();
        for (index, (first, count)) in pages.iter().enumerate() {
            pieces.add(first * PAGE, memory(10 * index as u64, *count)).unwrap();
        }
        match pieces.list() {
            Err(MapListError::NotOnce { at }) => Some(at),
            other => panic!("{pages:?}: {other:?}"),
        }
    };
    assert_eq!(not_once(&[]), Some(at(0)));
    assert_eq!(not_once(&[(1, 3)]), Some(at(0)), "a gap before");
    assert_eq!(not_once(&[(0, 1), (2, 2)]), Some(at(1)), "between");
    assert_eq!(not_once(&[(2, 1), (0, 2)]), Some(at(3)), "and behind");
    assert_eq!(not_once(&[(0, 3), (2, 2)]), Some(at(2)), "two meet");
    assert_eq!(not_once(&[(0, 4), (1, 1)]), Some(at(1)), "one lies in another");
    assert_eq!(not_once(&[(0, 4), (0, 4)]), Some(at(0)));
    reserved.free();
}

#[test]
fn what_is_no_piece_is_refused_and_not_noted() {
    let bench = Bench::new(Policy::Strict);
    let reserved = bench.domain.reserve(4 * PAGE, ANYWHERE).unwrap();
    let mut pieces = reserved.pieces();
    let odd = PhysSegment { phys: PhysAddr::new(page(0).phys.get() + 8), len: PAGE };
    let end = PhysSegment { phys: PhysAddr::new(u64::MAX - PAGE + 1), len: 2 * PAGE };
    for (offset, piece) in [(8, page(0)), (0, odd), (0, PhysSegment { len: 8, ..page(0) })] {
        let error = pieces.add(offset, piece).unwrap_err();
        assert!(matches!(error, MapListError::Map(MapError::Misaligned { granule: PAGE, .. })), "{error}");
    }
    for (offset, piece) in
        [(4 * PAGE, page(0)), (PAGE, memory(0, 4)), (0, memory(0, 5)), (u64::MAX - PAGE + 1, memory(0, 2))]
    {
        let error = pieces.add(offset, piece).unwrap_err();
        assert!(matches!(error, MapListError::Map(MapError::Length { .. })), "{error}");
    }
    assert!(matches!(
        pieces.add(0, PhysSegment { len: 0, ..page(0) }),
        Err(MapListError::EmptySegment { index: 0, .. })
    ));
    assert!(matches!(pieces.add(0, end), Err(MapListError::Wraps { .. })));
    pieces.add(0, memory(0, 4)).unwrap();
    assert_eq!(pieces.list().unwrap(), [memory(0, 4)]);
    reserved.free();
}
