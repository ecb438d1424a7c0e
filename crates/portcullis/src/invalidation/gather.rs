//! A [`Gather`]: cleared ranges that are still to be invalidated. Its requests cover all of them, and may cover more.

use arrayvec::ArrayVec;

use super::{Costs, Invalidation, Request};
use crate::addr::{DomainId, IovaRange};

/// The most ranges that are requested one by one. More that lie far apart become the whole domain.
pub const GATHER_RANGES: usize = 32;

/// The number of newest ranges that an [`add`](Gather::add) compares with, as neighbours tend to come one after the other.
const NEAR: usize = 4;

/// Ranges that unmaps have cleared, for one submission to the hardware.
///
/// Neighbours are merged. Two ranges become one request where that covers at most twice their bytes: an entry that is dropped without
/// need costs a table walk, a request costs a descriptor.
#[derive(Debug, Default)]
pub struct Gather {
    ranges: ArrayVec<IovaRange, GATHER_RANGES>,
    everything: bool,
    hints: u64,
}

impl Gather {
    /// An empty gather.
    pub const fn new() -> Self {
        Self { ranges: ArrayVec::new_const(), everything: false, hints: 0 }
    }

    /// Adds `range`, of which only leaves have changed. Cannot fail, and allocates nothing. Compares with at most four ranges; a call that
    /// finds 32 ranges sorts them.
    #[inline]
    pub fn add(&mut self, range: IovaRange) {
        self.add_with(range, u64::MAX);
    }

    /// As [`add`](Self::add), for a [`Mapper`](crate::mapper::Mapper) whose [`sync`](crate::mapper::Mapper::sync) uses findings of its
    /// `unmap`: `hints` are bits of the mapper's own meaning, such as the levels that had leaves, or their sizes.
    #[inline]
    pub fn add_with(&mut self, range: IovaRange, hints: u64) {
        self.hints |= hints;
        if self.ranges.is_empty() && !self.everything {
            self.ranges.push(range);
        } else if !self.everything {
            self.add_to_others(range);
        }
    }

    fn add_to_others(&mut self, range: IovaRange) {
        let merged = self.ranges.iter_mut().rev().take(NEAR).any(|other| join(other, range));
        if merged {
            return;
        }
        if self.ranges.is_full() {
            let left = compact(&mut self.ranges);
            self.ranges.truncate(left);
        }
        self.everything |= self.ranges.try_push(range).is_err();
    }

    /// Adds all of `other`: at most 32 ranges, each as by [`add`](Self::add).
    pub fn merge(&mut self, other: &Self) {
        other.ranges.iter().for_each(|range| self.add_with(*range, other.hints));
        self.everything |= other.everything;
        self.hints |= other.hints;
    }

    /// Everything that the domain ever mapped, paging structures included.
    pub const fn everything() -> Self {
        Self { ranges: ArrayVec::new_const(), everything: true, hints: u64::MAX }
    }

    /// The same, in static memory: a kernel's stack need not have room for several.
    pub(crate) const EVERYTHING: &'static Self = {
        static EVERYTHING: Gather = Gather::everything();
        &EVERYTHING
    };

    /// Empties it.
    pub fn clear(&mut self) {
        self.ranges.clear();
        self.everything = false;
        self.hints = 0;
    }

    /// All bits that a mapper's `unmap` has [added](Self::add_with). All are set where any range was added without: by a caller that does not
    /// know an unmap's findings, for a failed map, or as [everything](Self::everything). So a mapper that leaves out what no bit asks for
    /// leaves out nothing that needs an invalidation.
    pub fn hints(&self) -> u64 {
        self.hints
    }

    /// The only range, if there is exactly one: for a [`Mapper`](crate::mapper::Mapper) that needs no list of [requests](Self::requests).
    #[inline]
    pub fn only(&self) -> Option<IovaRange> {
        match *self.ranges.as_slice() {
            [range] if !self.everything => Some(range),
            _ => None,
        }
    }

    /// Whether there is nothing to invalidate.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty() && !self.everything
    }

    /// The requests that cover all that was added, for one submission: one for each range, or one for the whole domain where `costs` make that
    /// cheaper. Empty where nothing was added.
    pub fn requests(&self, domain: DomainId, costs: &Costs) -> ArrayVec<Request, GATHER_RANGES> {
        let mut requests = ArrayVec::new();
        self.write_requests(domain, costs, &mut requests);
        requests
    }

    /// As [`requests`](Self::requests), into the caller's empty list: a kernel's stack has no room for a second one.
    #[inline(never)]
    pub(crate) fn write_requests(
        &self,
        domain: DomainId,
        costs: &Costs,
        requests: &mut ArrayVec<Request, GATHER_RANGES>,
    ) {
        // Only leaves have changed, so paging-structure caches may stay.
        let by_range = |range| {
            requests.push(Request { domain, invalidation: Invalidation::Range { range, leaf_only: true } });
        };
        if !self.each_range(costs, by_range) {
            requests.push(Request { domain, invalidation: Invalidation::Domain });
        }
    }

    /// Calls `f` with at most 32 ranges that cover all that was added. Up to four are passed as they are; more are sorted, O(n^2), and close
    /// ones merged. Returns `false` without a call where everything was added, or where there are more than four and `costs` make the whole
    /// domain cheaper. For a [`Mapper`](crate::mapper::Mapper) that needs no list of [requests](Self::requests), which takes 1.3 KiB of the
    /// stack; this takes half of that.
    #[inline]
    pub fn each_range(&self, costs: &Costs, f: impl FnMut(IovaRange)) -> bool {
        match self.everything {
            true => false,
            false if self.ranges.len() > NEAR => self.each_joined(costs, f),
            false => {
                self.ranges.iter().copied().for_each(f);
                true
            }
        }
    }

    /// The same for more than four ranges. Out of line, as its list takes much of the stack.
    #[inline(never)]
    fn each_joined(&self, costs: &Costs, f: impl FnMut(IovaRange)) -> bool {
        // Filled in place: a clone would put a second list on the stack.
        let mut ranges = ArrayVec::<_, GATHER_RANGES>::new();
        ranges.extend(self.ranges.iter().copied());
        let left = compact(&mut ranges);
        if costs.prefer_domain(left) {
            return false;
        }
        ranges[..left].iter().copied().for_each(f);
        true
    }
}

fn join(one: &mut IovaRange, other: IovaRange) -> bool {
    let asked = one.len().saturating_add(other.len());
    match one.hull(other) {
        Ok(hull) if hull.len() <= asked.saturating_mul(2) => {
            *one = hull;
            true
        }
        _ => false,
    }
}

/// Sorts ranges and merges close ones, in place. Returns the number left. O(n^2), of at most [`GATHER_RANGES`]: the core library's sort
/// takes more stack than all of them.
#[inline(never)]
fn compact(all: &mut [IovaRange]) -> usize {
    for end in 1..all.len() {
        let mut place = end;
        while place > 0 && all[place - 1].start() > all[place].start() {
            all.swap(place - 1, place);
            place -= 1;
        }
    }
    let mut left = 0;
    for number in 0..all.len() {
        let next = all[number];
        if left == 0 || !join(&mut all[left - 1], next) {
            all[left] = next;
            left += 1;
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Iova;
    use crate::dice::Dice;

    const DOMAIN: DomainId = DomainId(7);
    const PAGE: u64 = 4096;

    fn page(index: u64) -> IovaRange {
        IovaRange::new(Iova::new(index * PAGE), PAGE).unwrap()
    }

    fn ranges(gather: &Gather, costs: &Costs) -> Option<alloc::vec::Vec<IovaRange>> {
        let one = |request: &Request| match request.invalidation {
            Invalidation::Range { range, leaf_only: true } => Some(range),
            _ => None,
        };
        let asked: Option<alloc::vec::Vec<IovaRange>> =
            gather.requests(DOMAIN, costs).iter().map(one).collect();
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
        let requests = gather.requests(DOMAIN, &costs(899));
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
                let requests = gather.requests(DOMAIN, &dear);
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
}
