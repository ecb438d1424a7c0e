use super::*;
use crate::addr::Iova;
use crate::dice::Dice;

const DOMAIN: DomainId = DomainId(7);
const PAGE: u64 = 4096;

fn page(index: u64) -> IovaRange {
    IovaRange::new(Iova::new(index * PAGE), PAGE).unwrap()
}

fn requests(gather: &Gather, costs: &Costs) -> ArrayVec<Request, GATHER_RANGES> {
    let mut requests = ArrayVec::new();
    gather.write_requests(DOMAIN, costs, &mut requests);
    requests
}

fn ranges(gather: &Gather, costs: &Costs) -> Option<alloc::vec::Vec<IovaRange>> {
    let one = |request: &Request| match request.invalidation {
        Invalidation::Range { range, leaf_only: true } => Some(range),
        _ => None,
    };
    let asked: Option<alloc::vec::Vec<IovaRange>> = requests(gather, costs).iter().map(one).collect();
    let mut told = alloc::vec::Vec::new();
    let by_range = gather.each_range(costs, |range| told.push(range));
    assert_eq!(by_range.then_some(told), asked, "the ranges are those of the requests");
    asked
}

#[test]
fn neighbours_in_any_order_become_one_request() {
    let mut gather = Gather::new();
    // Every third, then the second, then the first of each three: far apart until the last ones come.
    (0..3).rev().for_each(|step| (0..10).for_each(|n| gather.add(page(100 + n * 3 + step))));
    let whole = IovaRange::new(page(100).start(), 30 * PAGE).unwrap();
    assert_eq!(ranges(&gather, &Costs::BARE_METAL), Some(alloc::vec![whole]));
}

#[test]
fn what_lies_far_apart_is_asked_for_by_range_until_there_are_too_many() {
    let mut gather = Gather::new();
    (0..GATHER_RANGES as u64).for_each(|n| gather.add(page(n * 1000)));
    let all: alloc::vec::Vec<_> = (0..GATHER_RANGES as u64).map(|n| page(n * 1000)).collect();
    assert_eq!(ranges(&gather, &Costs::BARE_METAL), Some(all));
    gather.add(page(1 << 20));
    assert_eq!(ranges(&gather, &Costs::BARE_METAL), None);
}

#[test]
fn the_stated_costs_choose_between_ranges_and_the_domain() {
    let mut gather = Gather::new();
    (0..10).for_each(|n| gather.add(page(n * 1000)));
    let costs = |refill_ns| Costs { submission_ns: 700, request_ns: 100, refill_ns };
    assert_eq!(ranges(&gather, &costs(1000)).map(|ranges| ranges.len()), Some(10));
    // Neighbours count once, although they were not merged when they were added.
    (0..6).for_each(|n| gather.add(page(n * 1000 + 1)));
    assert_eq!(
        (gather.ranges.len(), ranges(&gather, &costs(1000)).map(|ranges| ranges.len())),
        (16, Some(10))
    );
    let requests = requests(&gather, &costs(899));
    assert_eq!(requests.as_slice(), [Request { domain: DOMAIN, invalidation: Invalidation::Domain }]);
}

#[test]
fn ranges_at_the_ends_of_the_address_space_are_kept_apart() {
    let mut gather = Gather::new();
    let last = IovaRange::new(Iova::new(u64::MAX - PAGE + 1), PAGE).unwrap();
    gather.add(last);
    gather.add(page(0));
    assert_eq!(ranges(&gather, &Costs::BARE_METAL), Some(alloc::vec![last, page(0)]));
}

#[test]
fn neighbours_that_did_not_come_one_after_the_other_are_found_in_the_end() {
    let mut gather = Gather::new();
    [0, 1000, 2000, 3000, 4000, 1].iter().for_each(|number| gather.add(page(*number)));
    assert_eq!(ranges(&gather, &Costs::BARE_METAL).map(|ranges| ranges.len()), Some(5));
}

/// Where it is full, neighbours that were not found before make room.
#[test]
fn a_full_gather_makes_room_of_neighbours() {
    let mut gather = Gather::new();
    let half = GATHER_RANGES as u64 / 2;
    (0..2).for_each(|step| (0..half).for_each(|n| gather.add(page(n * 1000 + step))));
    assert_eq!(gather.ranges.len(), GATHER_RANGES);
    (half..2 * half).for_each(|n| gather.add(page(n * 1000)));
    let expected =
        |n: u64| IovaRange::new(page(n * 1000).start(), if n < half { 2 } else { 1 } * PAGE).unwrap();
    let expected = Some((0..2 * half).map(expected).collect());
    assert_eq!(ranges(&gather, &Costs { refill_ns: u32::MAX, ..Costs::BARE_METAL }), expected);
}

/// Against a plain list of the added ranges; `None` is everything.
#[test]
fn requests_cover_all_that_was_added() {
    let mut dice = Dice(1);
    let dear = Costs { refill_ns: u32::MAX, ..Costs::BARE_METAL };
    let mut both = [(Gather::new(), Some(alloc::vec::Vec::new())), (Gather::new(), Some(alloc::vec![]))];
    for _ in 0..if cfg!(debug_assertions) { 3_000 } else { 30_000 } {
        let which = dice.below(2) as usize;
        match dice.below(60) {
            0 => {
                both[which].0.clear();
                both[which].1 = Some(alloc::vec![]);
            }
            1 => both[which] = (Gather::everything(), None),
            2..5 => {
                let (Gather { ranges, everything, hints }, added) = &both[1 - which];
                let (other, added) = (
                    Gather { ranges: ranges.clone(), everything: *everything, hints: *hints },
                    added.clone(),
                );
                both[which].0.merge(&other);
                both[which].1 = both[which].1.take().and_then(|mut all| {
                    all.extend(added?);
                    Some(all)
                });
            }
            _ => {
                let range =
                    IovaRange::new(page(dice.below(5_000)).start(), (1 + dice.below(9)) * PAGE).unwrap();
                both[which].0.add(range);
                both[which].1.iter_mut().for_each(|all| all.push(range));
            }
        }
        for (gather, added) in &both {
            let whole = Request { domain: DOMAIN, invalidation: Invalidation::Domain };
            let requests = requests(gather, &dear);
            assert_eq!(gather.is_empty(), requests.is_empty());
            let Some(added) = added else {
                assert_eq!(requests[..], [whole]);
                continue;
            };
            assert_eq!(gather.is_empty(), added.is_empty());
            let asked = ranges(gather, &dear);
            let is_covered =
                |range: &IovaRange| asked.iter().flatten().any(|asked| asked.contains_range(*range));
            assert!(requests[..] == [whole] || added.iter().all(is_covered));
            // Ranges are far apart, or there would be fewer.
            assert!(requests[..] != [whole] || added.len() > GATHER_RANGES);
        }
    }
}

/// A mapper's hints for one range hold for all ranges of the gather. A range without hints sets all bits.
#[test]
fn hints_are_those_of_all_ranges_and_all_bits_where_a_range_came_without() {
    let mut gather = Gather::new();
    assert_eq!(gather.hints(), 0);
    gather.add_with(page(1), 0b100);
    gather.add_with(page(2), 0b001);
    assert_eq!(gather.hints(), 0b101);
    let mut other = Gather::new();
    other.add_with(page(1 << 20), 0b1000);
    gather.merge(&other);
    assert_eq!((gather.hints(), other.hints()), (0b1101, 0b1000));
    other.add(page(3));
    assert_eq!(other.hints(), u64::MAX);
    gather.merge(&other);
    assert_eq!(gather.hints(), u64::MAX);
    gather.clear();
    assert_eq!((gather.hints(), Gather::everything().hints()), (0, u64::MAX));
    gather.merge(&Gather::everything());
    assert_eq!(gather.hints(), u64::MAX);
    // Hints survive when ranges become everything.
    let mut many = Gather::new();
    (0..100).for_each(|n| many.add_with(page(n * 1000), 2));
    assert_eq!(many.hints(), 2);
}

#[test]
fn one_range_alone_needs_no_list_of_requests() {
    let mut gather = Gather::new();
    assert_eq!(gather.only(), None);
    gather.add(page(1));
    assert_eq!(gather.only(), Some(page(1)));
    gather.add(page(2));
    assert_eq!(gather.only(), Some(IovaRange::new(Iova::new(PAGE), 2 * PAGE).unwrap()));
    gather.add(page(1000));
    assert_eq!((gather.only(), Gather::everything().only()), (None, None));
    gather.clear();
    gather.add(page(1));
    gather.merge(&Gather::everything());
    assert_eq!(gather.only(), None);
}
