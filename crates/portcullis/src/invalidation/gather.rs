//! A [`Gather`]: cleared ranges that are still to be invalidated. Its requests cover all of them, and may cover more.

use arrayvec::ArrayVec;

use super::{Costs, Invalidation, Request};
use crate::addr::{DomainId, IovaRange};

/// The most ranges that a gather keeps. If more do not merge, it requests a domain-wide invalidation.
pub const GATHER_RANGES: usize = 32;

/// The newest ranges, which an [`add`](Gather::add) tries to join: neighbours tend to be added one after the other. A gather with no more
/// ranges than this is not sorted.
const NEAR: usize = 4;

/// Ranges that unmaps have cleared, for one submission to the hardware. Two ranges become one request where that covers at most twice their
/// bytes: an entry that is dropped without need costs a table walk, a request costs a descriptor.
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

    /// Adds `range`, of which only leaves have changed. Cannot fail, and allocates nothing. Compares with at most four ranges; a call on a
    /// full gather sorts it.
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

    /// All bits that a mapper's `unmap` has [added](Self::add_with). All are set if any range was added without hints: by a caller that
    /// does not know an unmap's findings, for a failed map, or as [everything](Self::everything). So a mapper may skip what no set bit asks
    /// for.
    pub fn hints(&self) -> u64 {
        self.hints
    }

    /// The only range, if there is exactly one.
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

    /// Writes the requests that cover all that was added, for one submission, to the caller's empty list: one for each range, or one for the
    /// whole domain where `costs` make that cheaper. None if nothing was added.
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

    /// Calls `f` with at most 32 ranges that cover all that was added. Up to four are passed as they are; more are sorted, O(n^2), and
    /// close ones merged. Returns `false` without a call if everything was added, or if there are more than four and `costs` make the whole
    /// domain cheaper. Takes half as much of the stack as a list of requests, which has 1.3 KiB.
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

    /// As [`each_range`](Self::each_range), for more than four. Out of line, as its list takes much of the stack.
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
#[path = "../../tests/inside/invalidation/gather.rs"]
mod tests;
