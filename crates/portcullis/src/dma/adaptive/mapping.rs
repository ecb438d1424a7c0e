//! A mapping of an adaptive ring, as its driver holds it. It cannot be copied, and only the ring
//! that made it ends it.

use super::book::Choice;
use crate::addr::Iova;
use crate::bounce::pool::Way;
use crate::dma::RingMapping;

/// A buffer that the device has, or a copy of it, until it is [unmapped](super::AdaptiveRing::unmap).
///
/// It cannot be copied: what is unmapped is unmapped once. Dropping it leaves it mapped.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the buffer stays mapped until it is unmapped"]
pub struct AdaptiveMapping {
    pub(super) course: Course,
    /// The number of the ring that it is of.
    pub(super) ring: u64,
    /// For a mapping whose beginning was timed: the class and the way for which its end counts.
    // A byte from the start. Made one of a `usize` where it is packed with the rest of a queue's kind,
    // it overwrote its neighbour in Rust 1.90: LLVM 20 did not cut it off.
    pub(super) timed: Option<(u8, Choice)>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Course {
    Pool {
        iova: Iova,
        len: u64,
        way: Way,
    },
    Ring(RingMapping),
    /// In the ring, with slots in the place of its ends: by the number of its list.
    Cut {
        mapping: RingMapping,
        number: usize,
    },
}

impl Course {
    /// How it was made, if slots or buffers are a part of it, or the pool mapped it.
    pub(super) fn way(&self) -> Option<Way> {
        match self {
            Self::Pool { way, .. } => Some(*way),
            Self::Cut { .. } => Some(Way::Split),
            Self::Ring(_) => None,
        }
    }

    pub(super) fn is_in_ring(&self) -> bool {
        matches!(self, Self::Ring(_) | Self::Cut { .. })
    }

    /// Returns which way it went.
    pub(super) fn choice(&self) -> Choice {
        match self {
            Self::Pool { way, .. } => Choice::of(*way),
            Self::Ring(_) | Self::Cut { .. } => Choice::Map,
        }
    }
}

impl AdaptiveMapping {
    /// Takes the mapping apart, for `queue` to keep: into a ring's mapping with the number `queue`,
    /// its [way](Self::way), and the class and the way for which its end counts, if it was timed.
    /// What the pool made has no pages, and its length in the place of the neighbours; a list whose
    /// ends are in slots has its number there.
    #[inline]
    pub(in crate::dma) fn into_parts(self, queue: u64) -> (RingMapping, Option<Way>, Option<(u8, Choice)>) {
        match self.course {
            Course::Ring(mapping) => (RingMapping { ring: queue, ..mapping }, None, self.timed),
            Course::Cut { mapping, number } => {
                let mapping = RingMapping { ring: queue, neighbours: number as u64, ..mapping };
                (mapping, Some(Way::Split), self.timed)
            }
            Course::Pool { iova, len, way } => {
                let mapping = RingMapping { first: iova, bytes: 0, neighbours: len, ring: queue };
                (mapping, Some(way), self.timed)
            }
        }
    }

    /// The address of the first byte of the list for the device.
    pub fn iova(&self) -> Iova {
        match &self.course {
            Course::Pool { iova, .. } => *iova,
            Course::Ring(mapping) | Course::Cut { mapping, .. } => mapping.iova(),
        }
    }

    /// How the pool made it; [`Way::Split`] also for one in the ring whose ends are copied. `None` for any other in the ring.
    pub fn way(&self) -> Option<Way> {
        self.course.way()
    }
}

/// What an unmap has led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "what waits for a commit is the driver's again after it only"]
pub enum AdaptiveUnmap {
    /// The buffer is the driver's. (Those that wait go on waiting.)
    Done,
    /// It waits for its batch to become complete: **the device can still reach it**.
    Waiting,
    /// The batch is complete and committed: no device reaches the buffer, or any unmapped before it.
    Committed,
}
