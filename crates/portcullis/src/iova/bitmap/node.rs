//! Nodes: eight adjoining blocks, and what the search needs of each. A node whose runs are not up to date is stale, and
//! so are all above it.

use super::fit::{Fit, LEAF_ORDER, Need};
use super::runs::Runs;
use super::slab::Entry;

pub(super) const FAN: usize = 8;
/// The highest level of a node. A leaf is at level 0, and each level covers eight times as much.
pub(super) const MAX_LEVEL: u32 = 15;

#[inline]
pub(super) const fn bits(level: u32) -> u32 {
    LEAF_ORDER + FAN.ilog2() * level
}

#[inline]
pub(super) const fn pages(level: u32) -> u64 {
    1 << bits(level)
}

#[inline]
pub(super) const fn child_index(page: u64, level: u32) -> usize {
    (page >> bits(level - 1)) as usize % FAN
}

#[inline]
pub(super) const fn base(page: u64, level: u32) -> u64 {
    page >> bits(level) << bits(level)
}

/// A block: the number of its node or leaf; or, if it has neither, the state of all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Child(u32);

impl Child {
    pub(super) const FREE: Self = Self(u32::MAX);
    /// None of it is free. Freeing all of it needs no memory; freeing a part of it does.
    pub(super) const TAKEN: Self = Self(u32::MAX - 1);

    pub(super) const fn to(number: u32) -> Self {
        Self(number)
    }

    #[inline]
    pub(super) fn number(self) -> Option<u32> {
        (self.0 < Self::TAKEN.0).then_some(self.0)
    }

    pub(super) fn fit(self) -> Fit {
        if self == Self::FREE { Fit::ALL } else { Fit::NONE }
    }
}

/// Eight blocks of the level below. Most calls read only the first three of the four cache lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Node {
    pub(super) fits: [Fit; FAN],
    pub(super) children: [Child; FAN],
    /// Whether runs below may have changed since [`Node::runs`] were computed. If so, this is set in all nodes above,
    /// too.
    pub(super) is_runs_stale: bool,
    pub(super) runs: Runs,
}

const _: () = assert!(size_of::<Node>() == 256, "what is documented");

impl Node {
    /// A node of which all blocks are `state`. The caller computes [`Node::runs`].
    pub(super) fn uniform(state: Child) -> Self {
        Self { fits: [state.fit(); FAN], children: [state; FAN], is_runs_stale: false, runs: Runs::NONE }
    }

    #[inline]
    pub(super) fn fit(&self) -> Fit {
        self.fits.iter().skip(1).fold(self.fits[0], |best, fit| best.max(fit))
    }

    /// The blocks inside whose leaves the request fits, as bits.
    #[inline]
    pub(super) fn fitting(&self, need: Need) -> u32 {
        let mut blocks = 0;
        for (block, fit) in self.fits.iter().enumerate() {
            blocks |= u32::from(fit.has(need)) << block;
        }
        blocks
    }
}

impl Entry for Node {
    fn unused(next: u32) -> Self {
        Self::uniform(Child(next))
    }

    fn next(&self) -> u32 {
        self.children[0].0
    }
}
