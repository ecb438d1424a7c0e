//! Work that maps leave where they may not wait for other callers ([`Domain::is_at_once`](crate::domain::Domain)): taking slots from other CPUs and
//! directions, and evicting idle buffers. Each kind of work is a bit.

use super::BouncePool;
use super::layout::MOST_CLASSES;
use crate::addr::Direction;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::sync::{AtomicU64, Ordering};

/// How many free slots of other CPUs and kinds are worth the search for an exhausted class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Search {
    /// A share of the class: the map has another way.
    ManyFree,
    /// Any: without a slot the caller gets nothing.
    AnyFree,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Slots of a class whose buffers are mapped for this direction.
    Slots { class: usize, direction: Direction, search: Search },
    /// Memory.
    Memory,
}

const MEMORY: u64 = 1 << 63;
const _: () = assert!(MOST_CLASSES * Direction::ALL.len() * 2 <= 63);

impl Wanted {
    fn bit(self) -> u64 {
        match self {
            Self::Slots { class, direction, search } => {
                1 << ((class * Direction::ALL.len() + direction.index()) * 2 + search as usize)
            }
            Self::Memory => MEMORY,
        }
    }
}

#[derive(Debug)]
pub(super) struct Wants(AtomicU64);

impl Default for Wants {
    fn default() -> Self {
        Self(AtomicU64::new(0))
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Has the platform call the pool's timer soon, which calls [`maintain`](Self::maintain).
    #[cold]
    pub(super) fn want(&self, wanted: Wanted) {
        // Release: the call that takes the bits sees this caller's work. The platform orders the timer behind the call that asks for it.
        if self.wants.0.fetch_or(wanted.bit(), Ordering::Release) & wanted.bit() == 0 {
            let platform = self.domain.platform();
            platform.wake_at(platform.now_ns());
        }
    }

    /// Does the work that maps have left: takes free slots of other CPUs and directions, and evicts idle buffers. Does nothing without such work.
    /// Unconfirmed buffers wait for a later trim.
    ///
    /// Context: waits for hardware and for other CPUs' exclusive sections. The caller holds no lock and no CPU, and is no interrupt handler.
    pub(crate) fn maintain(&self) {
        let wants = self.wants.0.swap(0, Ordering::Acquire);
        if wants == 0 {
            return;
        }
        if wants & MEMORY != 0 {
            let _ = self.trim(0);
        }
        for class in 0..self.layout.classes() {
            for direction in Direction::ALL {
                // A search for any slot includes a search for many.
                let is_wanted = |search: &Search| {
                    wants & (Wanted::Slots { class, direction, search: *search }).bit() != 0
                };
                if let Some(search) = [Search::AnyFree, Search::ManyFree].into_iter().find(is_wanted) {
                    self.rebalance(class, direction, search);
                }
            }
        }
    }
}
