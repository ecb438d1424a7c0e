//! Errors of a mapping: one type for maps, one for their ends. Queues return them, and the pools below them.

use core::fmt;

use crate::addr::{Iova, IovaRange};
use crate::domain::{MapListError, UnmapError};
use crate::invalidation::InvalidationError;
use crate::iova::IovaError;

/// A list was not mapped, nor any part of it. Devices may [reach](Self::may_be_reached) it after one of these errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaMapError {
    /// The queue's ring is full: unmap, or commit, and map again. A ring gives its places back in order, so its oldest mapping holds the ones
    /// behind it.
    #[error("the queue's ring is full: commit what was unmapped, and unmap its oldest mapping")]
    Full,
    /// The swiotlb pool is full now: map again when something was unmapped.
    #[error("{needed} bytes in one piece needed, {free} free of {capacity}; the limit is {limit}")]
    Pressure {
        /// Bytes in one piece that the mapping needs.
        needed: u64,
        /// Bytes that were free, perhaps in smaller pieces, or out of the device's reach.
        free: u64,
        /// Bytes of the pool.
        capacity: u64,
        /// Bytes that it may grow to. If that exceeds the capacity, there was no memory.
        limit: u64,
    },
    /// The list, its addresses, or the tables are at fault. After [`MapListError::Unconfirmed`] **devices may reach the list**, until a
    /// [flush](crate::domain::Domain::flush) of the domain succeeds.
    #[error(transparent)]
    List(#[from] MapListError),
    /// The buffer is longer than the queue maps or copies at once.
    #[error("{len} bytes in one piece: a mapping has 1 to {most}")]
    TooLong {
        /// Bytes of the buffer.
        len: u64,
        /// The most bytes.
        most: u64,
    },
    /// There is no memory for a bounce buffer, not even after idle ones were evicted.
    #[error("no {bytes} bytes of memory to copy through; the pool's slots hold {held}")]
    NoBuffer {
        /// Bytes that were needed.
        bytes: u64,
        /// Bytes of the buffers of slots.
        held: u64,
    },
    /// All of a [`BufferPool`](crate::dma::BufferPool)'s buffers are taken, some perhaps by queues' mappings. Give some back and try again, or
    /// configure more by [`PoolConfig::class_bytes`](crate::bounce::PoolConfig::class_bytes).
    #[error(
        "all buffers of {bytes} bytes are taken, queues' mappings included: `PoolConfig::class_bytes` sets how many there are"
    )]
    AllTaken {
        /// Bytes of each.
        bytes: u64,
    },
    /// The heap has no memory for the mapping's metadata.
    #[error("nothing is mapped: the heap has no memory for the mapping's metadata")]
    OutOfMemory,
    /// The device is non-coherent and may write to the buffer, whose first or last cache line holds other data, too; and the queue does not copy.
    /// Align the buffer and its length to lines; or make the queue by [`QueueConfig::auto`](crate::dma::QueueConfig::auto) or
    /// [`bounce`](crate::dma::QueueConfig::bounce), in a domain with bounce memory.
    #[error(
        "a buffer for a device that is not coherent does not consist of whole lines of {line} bytes: align it and its length, or make its queue by `auto` or `bounce`, which copy"
    )]
    SharesLine {
        /// Bytes of a line.
        line: u64,
    },
    /// All bounce memory is beyond the device's reach, or not aligned as it needs.
    #[error("the device reaches addresses up to {last:#x}, and no memory to copy through lies there")]
    BeyondReach {
        /// The highest address that the device can put on the bus.
        last: u64,
    },
}

impl DmaMapError {
    /// Returns whether the map can succeed later: once a mapping, a batch or a deferred flush has ended that uses the queue, the domain's addresses
    /// or a pool.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Full | Self::Pressure { .. } | Self::AllTaken { .. } => true,
            // Addresses that the device can use may be free later.
            Self::List(MapListError::Iova(IovaError::Exhausted { len, limit, .. })) => {
                len.checked_sub(1).is_some_and(|last| last <= limit.get())
            }
            _ => false,
        }
    }

    /// Returns whether devices may reach the list although it is not mapped.
    pub fn may_be_reached(&self) -> bool {
        matches!(self, Self::List(MapListError::Unconfirmed { .. }))
    }
}

/// A mapping has not ended, a batch is not committed, or bytes are not synced.
///
/// After [`Unconfirmed`](Self::Unconfirmed) and [`StillMapped`](Self::StillMapped), of an unmap or of a commit, **devices may still reach the
/// memory** of all pending unmaps, which stay pending: another commit tries again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmaUnmapError {
    /// The mapping is another queue's, and is unchanged.
    #[error("a mapping of another queue")]
    OtherQueue,
    /// The hardware did not confirm an invalidation.
    #[error("devices may still reach what was unmapped: {error}")]
    Unconfirmed {
        /// Why not.
        error: InvalidationError,
    },
    /// A large page, of which a part was unmapped by address, could not be split.
    #[error("devices still reach {kept} bytes of {range}")]
    StillMapped {
        /// What was to be unmapped.
        range: IovaRange,
        /// Bytes that still are mapped.
        kept: u64,
    },
    /// A single mapping has not ended.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
    /// No mapping (for a queue that copies: no copy) begins at the address: another caller has ended it by address, or there never was one. Nothing
    /// is changed.
    #[error("{iova} is the address of no mapping")]
    NotMapped {
        /// The address.
        iova: Iova,
    },
    /// Some of the bytes are not the mapping's; or, for an unmap, they are not all of it. Nothing is changed or copied.
    #[error("{len} bytes{from}: the mapping at {iova} has {mapped}", from = Offset(*offset))]
    OutOfRange {
        /// Where the mapping begins.
        iova: Iova,
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        len: u64,
        /// Bytes of the mapping.
        mapped: u64,
    },
    /// Another caller is syncing or unmapping this mapping by address.
    #[error("the mapping at {iova} is being synced or unmapped by another caller")]
    Busy {
        /// Where it begins.
        iova: Iova,
    },
}

impl DmaUnmapError {
    /// Returns whether the next commit tries again: after a failed commit, or the failed unmap of a split mapping. (For any other unmap see
    /// [`NotUnmapped::waits`](crate::dma::NotUnmapped::waits).)
    pub fn is_of_commit(&self) -> bool {
        matches!(self, Self::Unconfirmed { .. } | Self::StillMapped { .. })
    }
}

impl From<InvalidationError> for DmaUnmapError {
    fn from(error: InvalidationError) -> Self {
        Self::Unconfirmed { error }
    }
}

/// " from N on", for an error's text; empty for 0.
struct Offset(u64);

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " from {} on", self.0) }
    }
}

/// Checks that the mapping of `mapped` bytes at `iova` has `len` bytes from `offset` on.
#[inline]
pub(crate) fn inside(iova: Iova, mapped: u64, (offset, len): (u64, u64)) -> Result<(), DmaUnmapError> {
    match offset.checked_add(len) {
        Some(end) if end <= mapped => Ok(()),
        _ => Err(DmaUnmapError::OutOfRange { iova, offset, len, mapped }),
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/bounce/error.rs"]
mod tests;
