//! What a pool that is full says.

/// A pool that is full now. The I/O has not failed: it can be tried again when a slot is
/// [freed](super::swiotlb::Swiotlb::freed_since).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{needed} bytes in one piece needed, {free} free of {capacity}; the limit is {limit}")]
pub struct Pressure {
    /// Bytes in one piece that the mapping needs.
    pub needed: u64,
    /// Bytes that were free, perhaps in smaller pieces (or out of the reach of a limited device).
    pub free: u64,
    /// Bytes of the pool.
    pub capacity: u64,
    /// Bytes that it may grow to. If that is more than the capacity, the platform had no memory.
    pub limit: u64,
    /// The pool's count of frees, before slots were looked for.
    pub(super) freed: u64,
}
