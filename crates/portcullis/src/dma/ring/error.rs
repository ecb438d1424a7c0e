//! The errors of a ring. Where devices may still reach memory after one, it says so.

use core::fmt;

use super::RingMapping;
use crate::addr::IovaRange;
use crate::domain::MapListError;
use crate::heap::OutOfMemory;
use crate::invalidation::InvalidationError;
use crate::iova::ArenaError;

/// Why a [`StrictRing`](super::StrictRing) was not made, or why a call of it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// A batch was to have no descriptors, or more than
    /// [`MOST_IN_BATCH`](crate::dma::MOST_IN_BATCH).
    #[error("a batch of {batch} descriptors: there are at least 1 and at most {most}")]
    Batch {
        /// What was asked for.
        batch: usize,
        /// The most there can be.
        most: usize,
    },
    /// The ring has no addresses for the list: [`ArenaError::Full`] while the oldest descriptors
    /// are mapped, or wait for a commit. Or a ring of these dimensions cannot be made, or not be
    /// closed.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The list was not mapped. After [`MapListError::Unconfirmed`] devices may reach it until a
    /// commit succeeds.
    #[error(transparent)]
    Map(#[from] MapListError),
    /// The descriptor at this range is another ring's.
    #[error("{range} is not of this ring")]
    Foreign {
        /// What was named.
        range: IovaRange,
    },
    /// A part of a large page was to be cleared, and the page could not be split: for want of memory, or as the hardware
    /// did not confirm. **Devices still reach `kept` bytes of the range**, whatever a commit says, until another call
    /// clears them: the next commit.
    #[error("unmapping {range}: devices still reach {kept} bytes of it")]
    StillMapped {
        /// What was to be cleared.
        range: IovaRange,
        /// Bytes that still are mapped.
        kept: u64,
    },
    /// The descriptor is of a device whose addresses are not translated, and the ring has addresses
    /// of its own; or an adaptive ring was to be made for such a device.
    #[error("a ring of a device without translation has no addresses of its own")]
    Untranslated,
    /// The pool that was to copy for a ring is another domain's, whose addresses mean something else to the device.
    #[error("the pool is not one of the ring's domain")]
    OtherDomain,
    /// The hardware did not confirm: **devices may still reach the memory** of all `descriptors` that wait.
    /// They go on waiting; another commit tries again.
    #[error("{descriptors} descriptors are unmapped, but devices may still reach them: {error}")]
    Unconfirmed {
        /// Descriptors that wait.
        descriptors: usize,
        /// Why it was not confirmed.
        error: InvalidationError,
    },
}

/// A descriptor that was not unmapped, or a batch that was not committed with it.
pub struct RingUnmapFailed {
    /// The descriptor, untouched, where the ring did not take it; `None` where it waits with the others.
    pub mapping: Option<RingMapping>,
    /// Why.
    pub error: RingError,
}

impl fmt::Debug for RingUnmapFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl fmt::Display for RingUnmapFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl core::error::Error for RingUnmapFailed {}

impl From<OutOfMemory> for RingError {
    fn from(_: OutOfMemory) -> Self {
        Self::Arena(ArenaError::OutOfMemory)
    }
}
