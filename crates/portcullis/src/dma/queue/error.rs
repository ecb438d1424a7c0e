//! What goes wrong in a ring or a batch, as queues say it; and what comes back with it.

use alloc::vec::Vec;

use super::Mapping;
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::dma::{AdaptiveMapError, BatchError, DmaBuffer, RingError};
use crate::domain::{MapListError, UnmapError};
use crate::iova::ArenaError;

impl DmaMapError {
    #[cold]
    pub(super) fn of_ring(error: RingError) -> Self {
        match error {
            RingError::Map(error) => Self::List(error),
            RingError::Arena(ArenaError::Oversize { len, capacity }) => Self::TooLong { len, most: capacity },
            RingError::Arena(ArenaError::Space(error)) => Self::List(error.into()),
            RingError::Arena(ArenaError::OutOfMemory) => Self::OutOfMemory,
            RingError::Arena(ArenaError::Empty) => Self::List(MapListError::EmptyList),
            RingError::Arena(ArenaError::Full { .. }) => Self::Full,
            // A map of a ring returns none of these: they are of a ring that is made, ends a mapping, commits or is closed. With each of
            // them nothing is mapped, and a full ring is what a driver has an answer for.
            RingError::Arena(
                ArenaError::Granule { .. }
                | ArenaError::TooLarge { .. }
                | ArenaError::NotReserved { .. }
                | ArenaError::InUse { .. },
            )
            | RingError::Batch { .. }
            | RingError::Foreign { .. }
            | RingError::StillMapped { .. }
            | RingError::Untranslated
            | RingError::OtherDomain
            | RingError::Unconfirmed { .. } => Self::Full,
        }
    }

    #[cold]
    pub(super) fn of_auto(error: AdaptiveMapError) -> Self {
        match error {
            AdaptiveMapError::Ring(error) => Self::of_ring(error),
            AdaptiveMapError::Pool(error) => error,
        }
    }
}

impl DmaUnmapError {
    #[cold]
    pub(super) fn of_ring(error: RingError) -> Self {
        match error {
            RingError::Unconfirmed { error, .. } => Self::Unconfirmed { error },
            RingError::StillMapped { range, kept } => Self::StillMapped { range, kept },
            RingError::Arena(ArenaError::NotReserved { range }) => {
                Self::Unmap(UnmapError::NotMapped { range, unmapped: 0 })
            }
            RingError::Foreign { .. } | RingError::Untranslated => Self::OtherQueue,
            // The end of a mapping has none of these: they are of a ring that is made, maps or is closed. The mapping is as it was.
            RingError::Arena(
                ArenaError::Empty
                | ArenaError::Granule { .. }
                | ArenaError::TooLarge { .. }
                | ArenaError::Space(_)
                | ArenaError::OutOfMemory
                | ArenaError::Oversize { .. }
                | ArenaError::Full { .. }
                | ArenaError::InUse { .. },
            )
            | RingError::Batch { .. }
            | RingError::Map(_)
            | RingError::OtherDomain => Self::OtherQueue,
        }
    }

    #[cold]
    pub(super) fn of_batch(error: BatchError) -> Self {
        match error {
            BatchError::Unconfirmed { error, .. } => Self::Unconfirmed { error },
            BatchError::Unmap(UnmapError::StillMapped { range, kept, .. }) => {
                Self::StillMapped { range, kept }
            }
            BatchError::Unmap(error) => Self::Unmap(error),
            // A queue's batch takes its own domain's, and is committed when it is full.
            BatchError::Full { .. } | BatchError::OtherDomain => Self::OtherQueue,
        }
    }
}

/// A buffer that was not mapped, and why.
pub struct NotMapped<B> {
    /// The buffer, untouched; `None` where the device [may reach it](DmaMapError::may_be_reached): it is leaked.
    pub buffer: Option<B>,
    /// Why.
    pub error: DmaMapError,
}

/// A mapping that has not ended, and why: a [`Mapping`](super::Mapping), or a [`RawMapping`](super::RawMapping).
pub struct NotUnmapped<T> {
    /// The mapping, as it was, where it can be unmapped again.
    pub mapping: Option<T>,
    /// Whether the next [commit](super::Queue::commit) that succeeds is the mapping's end, and gives its buffer back. If not, and no
    /// mapping came back, its memory must not be used again, and its buffer is leaked.
    pub waits: bool,
    /// Why.
    pub error: DmaUnmapError,
}

/// Mappings of which not all have ended, and why: see [`Queue::unmap_all`](super::Queue::unmap_all).
pub struct NotAllUnmapped<B: DmaBuffer> {
    /// Mappings that are as they were: the driver can unmap them again.
    pub mappings: Vec<Mapping<B>>,
    /// How many buffers wait for a [commit](super::Queue::commit) that succeeds.
    pub waiting: usize,
    /// How many buffers are leaked, as the device may reach them for ever.
    pub leaked: usize,
    /// The last reason.
    pub error: DmaUnmapError,
}

error_by_its_reason!([B] NotMapped<B>);

error_by_its_reason!([T] NotUnmapped<T>, |this, f| {
    let left = match (&this.mapping, this.waits) {
        (Some(_), _) => "the mapping is as it was, and can be unmapped again",
        (None, true) => "the buffer waits for the next commit that succeeds",
        (None, false) => "the buffer is leaked, as the device may reach it for ever",
    };
    write!(f, "{}; {left}", this.error)
});

error_by_its_reason!([B: DmaBuffer] NotAllUnmapped<B>, |this, f| {
    let Self { mappings, waiting, leaked, error } = this;
    let kept = mappings.len();
    write!(f, "{error}; mappings as they were: {kept}; buffers that wait for a commit: {waiting}; leaked: {leaked}")
});

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/dma/queue/error.rs"]
mod tests;
