//! What unmaps have cleared and no invalidation has covered yet.

use arrayvec::ArrayVec;

use super::{DomainId, Invalidation, Request};
use crate::addr::IovaRange;

/// Ranges that are asked for one by one: beyond these, or where they lie close together, one range around
/// several is cheaper than a request for each.
pub const GATHER_RANGES: usize = 8;

/// Ranges that unmaps have cleared, for one submission to the hardware.
///
/// Neighbours become one range. What makes one request of two is that it covers at most twice what was asked
/// for: an entry too many that the hardware forgets costs a table walk, a request costs a descriptor.
#[derive(Debug, Default)]
pub struct Gather {
    ranges: ArrayVec<IovaRange, GATHER_RANGES>,
    everything: bool,
}

impl Gather {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self { ranges: ArrayVec::new_const(), everything: false }
    }

    /// Adds the leaves of `range`. At most eight steps; cannot fail.
    pub fn add(&mut self, range: IovaRange) {
        if self.everything {
            return;
        }
        let close = |other: &IovaRange| {
            let both = other.hull(range).map_or(u64::MAX, IovaRange::len);
            both <= 2 * other.len().saturating_add(range.len()).min(u64::MAX / 2)
        };
        // The newest first: that is the neighbour, if there is one.
        if let Some(other) = self.ranges.iter_mut().rev().find(|other| close(other)) {
            match other.hull(range) {
                Ok(hull) => *other = hull,
                Err(_) => self.everything = true,
            }
        } else if self.ranges.try_push(range).is_err() {
            self.everything = true;
        }
    }

    /// Adds all that is in `other`.
    pub fn merge(&mut self, other: &Self) {
        other.ranges.iter().for_each(|range| self.add(*range));
        self.everything |= other.everything;
    }

    /// Everything that the domain ever mapped, paging structures included.
    pub const fn everything() -> Self {
        Self { ranges: ArrayVec::new_const(), everything: true }
    }

    /// Whether there is nothing to invalidate.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty() && !self.everything
    }

    /// The requests that cover all that was added, to be submitted together: one for each range, or one for
    /// the whole domain. None where nothing was added.
    pub fn requests(&self, domain: DomainId) -> ArrayVec<Request, GATHER_RANGES> {
        if self.everything {
            return [Request { domain, invalidation: Invalidation::Domain }].into_iter().collect();
        }
        // Only leaves have changed, so paging-structure caches may be kept.
        let request = |range: &IovaRange| Request {
            domain,
            invalidation: Invalidation::Range { range: *range, leaf_only: true },
        };
        self.ranges.iter().map(request).collect()
    }
}
