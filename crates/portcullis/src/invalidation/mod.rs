//! IOTLB invalidation: what an unmap leaves behind in the hardware's caches, and how it is removed.
//!
//! An unmap clears page-table entries and records what it cleared in a [`Gather`]. Until the hardware has
//! confirmed an [`Invalidation`] of that, a device may still reach the memory through a cached translation.
//! *Strict* protection waits for the confirmation at once; *lazy* protection puts the range into a
//! [`DeferredQueue`] and waits once for many.

mod deferred;

pub use deferred::{Deferred, DeferredQueue, QUEUE_ENTRIES};

use crate::addr::IovaRange;

/// The number by which the hardware's caches tell address spaces apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u16);

/// What the hardware is asked to forget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalidation {
    /// The translations of `range`. The hardware may forget more.
    Range {
        /// What was unmapped.
        range: IovaRange,
        /// No table was unlinked, only leaves changed: paging-structure caches may be kept.
        leaf_only: bool,
    },
    /// Everything cached for the domain, paging-structure caches included.
    Domain,
}

/// An invalidation that the hardware did not confirm. What it was to remove may still be cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidationError {
    /// The hardware did not answer in time.
    #[error("the IOMMU did not confirm an invalidation within {waited_ns} ns")]
    TimedOut {
        /// How long it was waited for.
        waited_ns: u64,
    },
    /// The hardware refused the request.
    #[error("the IOMMU reported an error for an invalidation (code {code:#x})")]
    Rejected {
        /// The hardware's own code.
        code: u32,
    },
}

/// A piece of hardware that caches translations and can be told to forget them.
pub trait InvalidationQueue: Send + Sync + 'static {
    /// Asks for `request` in `domain` and waits until the hardware confirms it.
    ///
    /// May wait for hardware; the caller holds no lock and no slot. Every page-table store that the caller
    /// made before the call is visible to the hardware before it acts.
    ///
    /// # Errors
    /// [`InvalidationError`]: nothing may be assumed to be forgotten.
    fn invalidate(&self, domain: DomainId, request: Invalidation) -> Result<(), InvalidationError>;
}

impl<T: InvalidationQueue> InvalidationQueue for alloc::sync::Arc<T> {
    fn invalidate(&self, domain: DomainId, request: Invalidation) -> Result<(), InvalidationError> {
        T::invalidate(self, domain, request)
    }
}

/// What unmaps have cleared and no invalidation has covered yet.
///
/// It holds the smallest single range around all of it: one request to the hardware costs more than a few
/// entries too many that it forgets.
#[derive(Debug, Default)]
pub struct Gather {
    range: Option<IovaRange>,
    everything: bool,
}

impl Gather {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self { range: None, everything: false }
    }

    /// Adds the leaves of `range`. O(1), cannot fail.
    pub fn add(&mut self, range: IovaRange) {
        match self.range.map_or(Ok(range), |old| old.hull(range)) {
            Ok(hull) => self.range = Some(hull),
            // Only the whole 64-bit space has no range.
            Err(_) => self.everything = true,
        }
    }

    /// Everything that the domain ever mapped.
    pub const fn everything() -> Self {
        Self { range: None, everything: true }
    }

    /// Whether there is nothing to invalidate.
    pub const fn is_empty(&self) -> bool {
        self.range.is_none() && !self.everything
    }

    /// The one request that covers all that was added; `None` where nothing was.
    pub fn invalidation(&self) -> Option<Invalidation> {
        if self.everything {
            return Some(Invalidation::Domain);
        }
        // No table is ever unlinked while its domain lives, so the hint always holds.
        self.range.map(|range| Invalidation::Range { range, leaf_only: true })
    }
}
