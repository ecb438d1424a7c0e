//! The errors of registrations. Each says whether devices may still reach the memory.

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::domain::IovaError;
use portcullis::domain::MapListError;
use portcullis::invalidation::InvalidationError;

use super::config::Registration;
use super::index::Span;

/// Why a cache cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationConfigError {
    /// The domain's devices use physical addresses: there is nothing to map or to unmap.
    #[error("a domain without translation has nothing to register")]
    NoTranslation,
    /// The limits leave no room for an entry, or exceed the entry numbers.
    #[error("a cache of {entries} entries and {bytes} bytes: 1 to {most} entries and a granule are needed")]
    Limits {
        /// Entries asked for.
        entries: usize,
        /// Bytes asked for.
        bytes: u64,
        /// The most entries of a cache.
        most: usize,
    },
    /// There is no memory for the cache itself.
    #[error("no memory to keep account of {entries} entries")]
    OutOfMemory {
        /// Entries asked for.
        entries: usize,
    },
}

/// Why a range was not acquired. No part of it is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// The range alone exceeds the limit.
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
    /// Held entries leave too few bytes. Nothing was evicted.
    #[error("{wanted} bytes are wanted: of the cache's limit of {limit}, {held} are held")]
    NoBytes {
        /// Bytes of the granules of the range.
        wanted: u64,
        /// [`RegistrationLimits::bytes`](super::RegistrationLimits::bytes).
        limit: u64,
        /// Bytes of entries that cannot be evicted now.
        held: u64,
    },
    /// There is no memory to record that the caller waits for room. Nothing was evicted.
    #[error("no memory to keep account of who waits for room")]
    NoMemory,
    /// Idle entries were unmapped to make room, and the hardware did not confirm it: **devices may still reach them**. They count against
    /// the limits until a later call succeeds.
    #[error("no room could be made, as unmapped entries may still be reached: {error}")]
    Eviction {
        /// Why it was not confirmed.
        error: InvalidationError,
    },
    /// The owner forgot a part of the range during the acquisition.
    #[error("the {len} bytes at {phys} were forgotten while they were being acquired")]
    Forgotten {
        /// The start of the range.
        phys: PhysAddr,
        /// Its length in bytes.
        len: u64,
    },
    /// The range was forgotten in the same way, but the hardware did not confirm its unmap: **devices may still reach it** until a
    /// [`forget`](super::RegistrationCache::forget) or a [`trim`](super::RegistrationCache::trim) succeeds.
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

/// Why a registration was not released normally.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReleaseRegistrationError {
    /// It belongs to another cache. Nothing has changed.
    #[error("a registration of another cache")]
    OtherCache {
        /// The registration, to be released to its own cache.
        registration: Registration,
    },
    /// It was the last registration and is released, but the hardware did not confirm the unmap: **devices may still reach it** until a
    /// [`forget`](super::RegistrationCache::forget) or a [`trim`](super::RegistrationCache::trim) succeeds.
    #[error("released, but devices may still reach it: {error}")]
    Unconfirmed {
        /// Why it was not confirmed.
        error: InvalidationError,
    },
}

/// A forgotten range that devices may still reach: the hardware did not confirm its unmap. The entries count against the limits; another
/// forget of the range tries again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("devices may still reach what {entries} entries were for: {error}")]
pub struct ForgetError {
    /// Entries with an unconfirmed unmap.
    pub entries: usize,
    /// Why the first of them is unconfirmed.
    pub error: InvalidationError,
}
