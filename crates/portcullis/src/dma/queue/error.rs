//! What can go wrong with a queue: one type for its maps, one for its ends.

use crate::addr::{Iova, IovaRange, PhysAddr};
use crate::bounce::{pool, swiotlb};
use crate::dma::{AdaptiveMapError, BatchError, RingError};
use crate::domain::{MapListError, UnmapError};
use crate::invalidation::InvalidationError;
use crate::iova::ArenaError;

/// A list that was not mapped. Nothing of it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaMapError {
    /// The queue's ring has no room: unmap, or commit what waits, and map again.
    #[error("the queue's ring is full: what is unmapped must be committed first")]
    Full,
    /// The machine's pool of buffers to copy through is full now: wait, and map again.
    #[error(transparent)]
    Pressure(#[from] swiotlb::Pressure),
    /// The list, its addresses, or the tables. After [`MapListError::Unconfirmed`] **devices may reach the list**, until a
    /// [commit](super::Queue::commit) succeeds.
    #[error(transparent)]
    List(#[from] MapListError),
    /// A buffer is longer than what the queue maps or copies at once.
    #[error("{len:#x} bytes in one piece: the queue maps up to {most:#x}")]
    TooLong {
        /// Bytes of the buffer.
        len: u64,
        /// The most that there may be.
        most: u64,
    },
    /// No memory for a buffer to copy through, also after idle ones were evicted.
    #[error("no {bytes:#x} bytes of memory to copy through; the pool's slots hold {held:#x}")]
    NoBuffer {
        /// Bytes that were wanted.
        bytes: u64,
        /// Bytes in buffers of slots, all of them in use.
        held: u64,
    },
    /// No memory to keep account by.
    #[error("no memory to keep account of a mapping")]
    OutOfMemory,
    /// An untrusted device's mapping shares a granule with other data, so it must be copied, and its owner does not sync, so it
    /// must not be.
    #[error("a persistent mapping of {len:#x} bytes for an untrusted device does not cover whole granules")]
    PersistentPart {
        /// Bytes of the list.
        len: u64,
    },
    /// All memory to copy through is beyond the device's reach, or not aligned as it asks.
    #[error("the device reaches addresses up to {last:#x}, and no memory to copy through lies there")]
    BeyondReach {
        /// The highest address that the device can put on the bus.
        last: u64,
    },
}

impl DmaMapError {
    /// Whether it may be tried again, once something of the queue (or of the machine's pool) has ended.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full | Self::Pressure(_))
    }

    /// Whether devices may reach the list although it is not mapped.
    pub fn may_be_reached(&self) -> bool {
        matches!(self, Self::List(MapListError::Unconfirmed { .. }))
    }

    #[cold]
    pub(super) fn of_ring(error: RingError) -> Self {
        match error {
            RingError::Map(error) => Self::List(error),
            RingError::Arena(ArenaError::Oversize { len, capacity }) => Self::TooLong { len, most: capacity },
            RingError::Arena(ArenaError::Space(error)) => Self::List(error.into()),
            RingError::Arena(ArenaError::OutOfMemory) => Self::OutOfMemory,
            RingError::Arena(ArenaError::Empty) => Self::List(MapListError::EmptyList),
            // Of the rest a map says that there is no room, and nothing else.
            _ => Self::Full,
        }
    }

    #[cold]
    pub(super) fn of_pool(error: pool::BounceMapError) -> Self {
        match error {
            pool::BounceMapError::List(error) => Self::List(error),
            pool::BounceMapError::NoBuffer { bytes, held } => Self::NoBuffer { bytes, held },
            pool::BounceMapError::NoMemory { .. } => Self::OutOfMemory,
            pool::BounceMapError::PersistentPart { len } => Self::PersistentPart { len },
        }
    }

    #[cold]
    pub(super) fn of_auto(error: AdaptiveMapError) -> Self {
        match error {
            AdaptiveMapError::Ring(error) => Self::of_ring(error),
            AdaptiveMapError::Pool(error) => Self::of_pool(error),
        }
    }

    #[cold]
    pub(super) fn of_swiotlb(error: swiotlb::BounceError) -> Self {
        match error {
            swiotlb::BounceError::Empty { phys } => MapListError::EmptySegment { index: 0, phys }.into(),
            swiotlb::BounceError::Wraps { phys, len } => MapListError::Wraps { index: 0, phys, len }.into(),
            swiotlb::BounceError::TooLong { len, most, .. } => Self::TooLong { len, most },
            swiotlb::BounceError::Alignment { align, .. } => Self::BeyondReach { last: align },
            swiotlb::BounceError::BeyondReach { reach } => Self::BeyondReach { last: reach.get() },
            swiotlb::BounceError::Pressure(pressure) => Self::Pressure(pressure),
        }
    }
}

/// Why a mapping has not ended, a batch is not committed, or bytes are not synced.
///
/// After [`Unconfirmed`](Self::Unconfirmed) and [`StillMapped`](Self::StillMapped), whether of an unmap or of a commit, **devices
/// may still reach the memory** of what waits, all of which goes on waiting: another commit tries again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaUnmapError {
    /// The mapping is another queue's. It was not touched.
    #[error("a mapping of another queue")]
    OtherQueue,
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
    /// A mapping by itself.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
    /// A copy that is over, as another caller ended it by number. Nothing is changed.
    #[error("{iova} is the address of no copy")]
    NotMapped {
        /// The address.
        iova: Iova,
    },
    /// Some of the bytes are not the mapping's. Nothing is changed, or copied.
    #[error("{len:#x} bytes from {offset:#x} on: the mapping at {iova} has {mapped:#x}")]
    OutOfRange {
        /// Where the mapping begins.
        iova: Iova,
        /// The first byte.
        offset: u64,
        /// How many.
        len: u64,
        /// Bytes of the mapping.
        mapped: u64,
    },
    /// Another caller is syncing or unmapping this mapping, by number.
    #[error("the mapping at {iova} is being synced or unmapped by another caller")]
    Busy {
        /// Where it begins.
        iova: Iova,
    },
}

impl DmaUnmapError {
    /// Whether it is of a commit, which another one tries again.
    pub fn is_of_commit(&self) -> bool {
        matches!(self, Self::Unconfirmed { .. } | Self::StillMapped { .. })
    }

    #[cold]
    pub(super) fn of_ring(error: RingError) -> Self {
        match error {
            RingError::Unconfirmed { error, .. } => Self::Unconfirmed { error },
            RingError::StillMapped { range, kept } => Self::StillMapped { range, kept },
            RingError::Arena(ArenaError::NotReserved { range } | ArenaError::Mismatch { range, .. }) => {
                Self::Unmap(UnmapError::NotMapped { range, unmapped: 0 })
            }
            // Nothing else comes of the end of a mapping.
            _ => Self::OtherQueue,
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

    #[cold]
    pub(super) fn of_pool(error: pool::BounceError) -> Self {
        match error {
            pool::BounceError::NotMapped { iova } => Self::NotMapped { iova },
            pool::BounceError::WrongLength { iova, len, mapped } => {
                Self::OutOfRange { iova, offset: 0, len, mapped }
            }
            pool::BounceError::OutOfRange { iova, offset, len, mapped } => {
                Self::OutOfRange { iova, offset, len, mapped }
            }
            pool::BounceError::Busy { iova } => Self::Busy { iova },
            pool::BounceError::Unconfirmed { error, .. } => Self::Unconfirmed { error },
            pool::BounceError::Direct(error) => Self::Unmap(error),
        }
    }

    #[cold]
    pub(super) fn of_swiotlb(error: swiotlb::MappingError) -> Self {
        let iova = |phys: PhysAddr| Iova::new(phys.get());
        match error {
            swiotlb::MappingError::NotOurs { phys } | swiotlb::MappingError::NotMapped { phys } => {
                Self::NotMapped { iova: iova(phys) }
            }
            swiotlb::MappingError::Mismatch { phys, len, mapped, mapped_len } => {
                let offset = phys.get().wrapping_sub(mapped.get());
                Self::OutOfRange { iova: iova(mapped), offset, len, mapped: mapped_len }
            }
        }
    }
}

impl From<InvalidationError> for DmaUnmapError {
    fn from(error: InvalidationError) -> Self {
        Self::Unconfirmed { error }
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

error_by_its_reason!([B] NotMapped<B>);
error_by_its_reason!([T] NotUnmapped<T>);
