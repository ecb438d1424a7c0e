//! The errors of registrations. Each says whether devices may still reach the memory.

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::domain::IovaError;
use portcullis::domain::MapListError;
use portcullis::invalidation::InvalidationError;

use super::config::Registration;
use super::index::Span;

/// A cache that cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationConfigError {
    /// The domain's devices use physical addresses: there is nothing to map or to unmap.
    #[error("a domain without translation has nothing to register")]
    NoTranslation,
    /// The limits leave no room for an entry, or there are too few numbers for the entries.
    #[error("a cache of {entries} entries and {bytes} bytes: 1 to {most} entries and a granule are needed")]
    Limits {
        /// Entries asked for.
        entries: usize,
        /// Bytes asked for.
        bytes: u64,
        /// The most entries that there can be.
        most: usize,
    },
    /// There is no memory for the cache's own book-keeping.
    #[error("no memory to keep account of {entries} entries")]
    OutOfMemory {
        /// Entries asked for.
        entries: usize,
    },
}

/// A range that was not acquired. No part of it is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// The range by itself is larger than the limit.
    #[error("{bytes} bytes of granules: the cache's limit is {limit}")]
    TooLarge {
        /// Bytes of the granules that it touches.
        bytes: u64,
        /// [`RegistrationLimits::bytes`](super::RegistrationLimits::bytes).
        limit: u64,
    },
    /// All entries are held. Nothing was evicted.
    #[error("all of the cache's limit of {limit} entries are held")]
    NoEntry {
        /// [`RegistrationLimits::entries`](super::RegistrationLimits::entries).
        limit: usize,
    },
    /// The entries that are held leave too few bytes. Nothing was evicted.
    #[error("{wanted} bytes are wanted: of the cache's limit of {limit}, {held} are held")]
    NoBytes {
        /// Bytes of the granules that were wanted.
        wanted: u64,
        /// [`RegistrationLimits::bytes`](super::RegistrationLimits::bytes).
        limit: u64,
        /// Bytes of entries that cannot be evicted now.
        held: u64,
    },
    /// There is no memory to record that the caller waits for room. Nothing was evicted.
    #[error("no memory to keep account of who waits for room")]
    NoMemory,
    /// Idle entries were unmapped to make room, and the hardware did not confirm it: **devices may
    /// still reach them**, as before. They count against the limits until some later call succeeds.
    #[error("no room could be made, as unmapped entries may still be reached: {error}")]
    Eviction {
        /// Why it was not confirmed.
        error: InvalidationError,
    },
    /// The owner had a part of the range forgotten while it was being acquired.
    #[error("the {len} bytes at {phys} were forgotten while they were being acquired")]
    Forgotten {
        /// The address at which the range begins.
        phys: PhysAddr,
        /// Its length in bytes.
        len: u64,
    },
    /// The range was forgotten in the same way, but the hardware did not confirm that it is
    /// unmapped again: **devices may still reach it** until a
    /// [`forget`](super::RegistrationCache::forget) or a [`trim`](super::RegistrationCache::trim)
    /// succeeds.
    #[error("forgotten while it was being acquired, and devices may still reach it: {error}")]
    Unconfirmed {
        /// Why it was not confirmed.
        error: InvalidationError,
    },
    /// The domain did not map it.
    #[error(transparent)]
    Map(#[from] MapListError),
}

impl AcquireError {
    pub(super) fn forgotten(span: &Span) -> Self {
        let PhysSegment { phys, len } = span.memory();
        Self::Forgotten { phys, len }
    }
}

impl From<IovaError> for AcquireError {
    fn from(error: IovaError) -> Self {
        Self::Map(error.into())
    }
}

/// A registration that was not released as it should be.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReleaseRegistrationError {
    /// It belongs to another cache. Nothing is changed.
    #[error("a registration of another cache")]
    OtherCache {
        /// The registration, to be released to its own cache.
        registration: Registration,
    },
    /// The registration was the last and is released, but the hardware did not confirm that the
    /// range is unmapped: **devices may still reach it** until a
    /// [`forget`](super::RegistrationCache::forget) or a [`trim`](super::RegistrationCache::trim)
    /// succeeds.
    #[error("released, but devices may still reach it: {error}")]
    Unconfirmed {
        /// Why it was not confirmed.
        error: InvalidationError,
    },
}

/// A range that devices may still reach, although every entry in it was to be unmapped: the
/// hardware did not confirm. The entries count against the limits; a caller that forgets the range
/// again tries again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("devices may still reach what {entries} entries were for: {error}")]
pub struct ForgetError {
    /// Entries that are not confirmed as unmapped.
    pub entries: usize,
    /// Why the first of them is not.
    pub error: InvalidationError,
}
