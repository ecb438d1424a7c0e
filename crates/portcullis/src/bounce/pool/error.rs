//! What can go wrong with a mapping.

use crate::addr::Iova;
use crate::domain::{MapListError, UnmapError};
use crate::invalidation::InvalidationError;
use crate::iova::IovaError;

/// A mapping that was not made. Nothing of it is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BounceMapError {
    /// The list, or the domain's part in mapping it.
    #[error(transparent)]
    List(#[from] MapListError),
    /// No memory for a bounce buffer, also after the cache was trimmed.
    #[error("no {bytes:#x} bytes of memory for a bounce buffer; the pool's slots hold {held:#x}")]
    NoBuffer {
        /// Bytes that were wanted.
        bytes: u64,
        /// Bytes in buffers of slots, all of them in use.
        held: u64,
    },
    /// No memory to remember the pieces of a list by.
    #[error("no memory to keep a list of {pieces} pieces")]
    NoMemory {
        /// Pieces of the list.
        pieces: usize,
    },
    /// An untrusted device's mapping shares a granule with other data, so it must be bounced, and its owner does not
    /// sync, so it must not be.
    #[error("a persistent mapping of {len:#x} bytes for an untrusted device does not cover whole granules")]
    PersistentPart {
        /// Bytes of the list.
        len: u64,
    },
}

impl From<IovaError> for BounceMapError {
    fn from(error: IovaError) -> Self {
        Self::List(error.into())
    }
}

/// Whether the mapping of `mapped` bytes at `iova` has `len` bytes from `offset` on.
#[inline]
pub(super) fn inside(iova: Iova, mapped: u64, (offset, len): (u64, u64)) -> Result<(), BounceError> {
    match offset.checked_add(len) {
        Some(end) if end <= mapped => Ok(()),
        _ => Err(BounceError::OutOfRange { iova, offset, len, mapped }),
    }
}

/// A mapping that was not unmapped, or not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BounceError {
    /// No mapping begins there: it was unmapped before, or never made. Nothing is changed.
    #[error("{iova} is the address of no mapping")]
    NotMapped {
        /// The address.
        iova: Iova,
    },
    /// The mapping has another length. Nothing is changed.
    #[error("the mapping at {iova} has {mapped:#x} bytes, not {len:#x}")]
    WrongLength {
        /// Where it begins.
        iova: Iova,
        /// The length that was given.
        len: u64,
        /// Its length.
        mapped: u64,
    },
    /// Some of the bytes are outside the mapping. Nothing is copied.
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
    /// Another caller is syncing or unmapping this mapping now.
    #[error("the mapping at {iova} is being synced or unmapped by another caller")]
    Busy {
        /// Where it begins.
        iova: Iova,
    },
    /// The mapping is over and its data copied, but the hardware did not confirm that the part which was mapped
    /// directly is out of reach: **devices may still reach that**, until a later
    /// [`trim`](super::BouncePool::trim) or [`Domain::flush`](crate::domain::Domain::flush) succeeds.
    #[error("the mapping at {iova} is unmapped, but devices may still reach its middle: {error}")]
    Unconfirmed {
        /// Where it began.
        iova: Iova,
        /// Why it was not confirmed.
        error: InvalidationError,
    },
    /// A mapping that was not bounced.
    #[error(transparent)]
    Direct(#[from] UnmapError),
}
