//! What can go wrong with a queue: one type for each verb.

use super::{Mapping, RawMapping};
use crate::addr::IovaRange;
use crate::bounce::{pool, swiotlb};
use crate::dma::{AdaptiveMapError, AdaptiveUnmapError, BatchError, DmaBuffer, RingError};
use crate::domain::{MapListError, UnmapError};
use crate::invalidation::InvalidationError;
use crate::iova::ArenaError;

/// A queue that was not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// It was to copy, and its domain has nothing to copy through: see [`DomainBuilder::bounce`](super::DomainBuilder::bounce)
    /// and [`DomainBuilder::swiotlb`](super::DomainBuilder::swiotlb).
    #[error("a queue that copies, of a domain that has no memory to copy through")]
    NoMemory,
    /// No ring of these dimensions.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// No pool of bounce buffers.
    #[error(transparent)]
    Pool(#[from] pool::PoolError),
}

/// A list that was not mapped. Nothing of it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaMapError {
    /// The queue's ring has no room: unmap, or commit what waits, and map again.
    #[error("the queue's ring is full: what is unmapped must be committed first")]
    Full,
    /// The list, its addresses, or the tables. After [`MapListError::Unconfirmed`] **devices may reach the list**, until a
    /// [commit](super::Queue::commit) succeeds.
    #[error(transparent)]
    List(#[from] MapListError),
    /// The ring of the queue, otherwise.
    #[error(transparent)]
    Ring(RingError),
    /// No buffer to copy through.
    #[error(transparent)]
    Bounce(pool::BounceMapError),
    /// No buffer to copy through in a machine without an IOMMU: it may be [full](swiotlb::Pressure) now.
    #[error(transparent)]
    Swiotlb(#[from] swiotlb::BounceError),
}

impl DmaMapError {
    /// Whether it may be tried again, once something of the queue (or of the machine's pool) has ended.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full | Self::Swiotlb(swiotlb::BounceError::Pressure(_)))
    }

    /// Whether devices may reach the list although it is not mapped.
    pub fn may_be_reached(&self) -> bool {
        matches!(self, Self::List(MapListError::Unconfirmed { .. }))
    }
}

impl From<RingError> for DmaMapError {
    fn from(error: RingError) -> Self {
        match error {
            RingError::Arena(ArenaError::Full { .. }) => Self::Full,
            RingError::Map(error) => Self::List(error),
            error => Self::Ring(error),
        }
    }
}

impl From<pool::BounceMapError> for DmaMapError {
    fn from(error: pool::BounceMapError) -> Self {
        match error {
            pool::BounceMapError::List(error) => Self::List(error),
            error => Self::Bounce(error),
        }
    }
}

impl From<AdaptiveMapError> for DmaMapError {
    fn from(error: AdaptiveMapError) -> Self {
        match error {
            AdaptiveMapError::Ring(error) => error.into(),
            AdaptiveMapError::Pool(error) => error.into(),
        }
    }
}

/// A commit that was not complete: **devices may still reach the memory** of what waits, all of which goes on waiting. Another
/// commit tries again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaCommitError {
    /// The hardware did not confirm.
    #[error("what is unmapped devices may still reach: {error}")]
    Unconfirmed {
        /// Why not.
        error: InvalidationError,
    },
    /// A part of a large page that was unmapped by number could not be split.
    #[error("devices still reach {kept:#x} bytes of {range}")]
    StillMapped {
        /// What was to be unmapped.
        range: IovaRange,
        /// Bytes that still are mapped.
        kept: u64,
    },
    /// The ring, otherwise.
    #[error(transparent)]
    Ring(RingError),
    /// The batch, otherwise.
    #[error(transparent)]
    Batch(BatchError),
}

impl From<InvalidationError> for DmaCommitError {
    fn from(error: InvalidationError) -> Self {
        Self::Unconfirmed { error }
    }
}

impl From<RingError> for DmaCommitError {
    fn from(error: RingError) -> Self {
        match error {
            RingError::Unconfirmed { error, .. } => Self::Unconfirmed { error },
            RingError::StillMapped { range, kept } => Self::StillMapped { range, kept },
            error => Self::Ring(error),
        }
    }
}

impl From<BatchError> for DmaCommitError {
    fn from(error: BatchError) -> Self {
        match error {
            BatchError::Unconfirmed { error, .. } => Self::Unconfirmed { error },
            BatchError::Unmap(UnmapError::StillMapped { range, kept, .. }) => {
                Self::StillMapped { range, kept }
            }
            error => Self::Batch(error),
        }
    }
}

/// Why a mapping has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaUnmapError {
    /// It is another queue's. It was not touched.
    #[error("a mapping of another queue")]
    OtherQueue,
    /// The commit that it led to, or that must come before it, was not complete.
    #[error(transparent)]
    Commit(#[from] DmaCommitError),
    /// A mapping by itself.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
    /// A copy.
    #[error(transparent)]
    Bounce(#[from] pool::BounceError),
    /// A copy, in a machine without an IOMMU.
    #[error(transparent)]
    Swiotlb(#[from] swiotlb::MappingError),
}

impl From<AdaptiveUnmapError> for DmaUnmapError {
    fn from(error: AdaptiveUnmapError) -> Self {
        match error {
            AdaptiveUnmapError::Ring(error) => Self::Commit(error.into()),
            AdaptiveUnmapError::Pool(error) => Self::Bounce(error),
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

/// A mapping that has not ended, and why.
pub struct NotUnmapped<B: DmaBuffer> {
    /// The mapping, as it was, where it can be unmapped again. Where there is none its buffer waits for a
    /// [commit](super::Queue::commit), or is leaked, as nothing will ever say that the device does not reach it.
    pub mapping: Option<Mapping<B>>,
    /// Why.
    pub error: DmaUnmapError,
}

/// The same by number.
pub struct RawNotUnmapped {
    /// The mapping, as it was, where it can be unmapped again.
    pub mapping: Option<RawMapping>,
    /// Whether the next [commit](super::Queue::commit) that succeeds is the mapping's end. If not, and no mapping came back, its
    /// memory must not be used again.
    pub waits: bool,
    /// Why.
    pub error: DmaUnmapError,
}

error_by_its_reason!([B] NotMapped<B>);
error_by_its_reason!([B: DmaBuffer] NotUnmapped<B>);
error_by_its_reason!([] RawNotUnmapped);

/// A sync that was not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaSyncError {
    /// The mapping is another queue's.
    #[error("a mapping of another queue")]
    OtherQueue,
    /// Some of the bytes are not the mapping's.
    #[error(transparent)]
    Bounce(#[from] pool::BounceError),
    /// The same, in a machine without an IOMMU.
    #[error(transparent)]
    Swiotlb(#[from] swiotlb::MappingError),
}
