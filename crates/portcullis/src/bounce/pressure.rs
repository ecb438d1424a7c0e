//! The error of a full pool.

/// The pool is full now. The I/O has not failed: try again when something was unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{needed} bytes in one piece needed, {free} free of {capacity}; the limit is {limit}")]
pub struct Pressure {
    /// Bytes in one piece that the mapping needs.
    pub needed: u64,
    /// Bytes that were free, perhaps in smaller pieces, or out of the device's reach.
    pub free: u64,
    /// Bytes of the pool.
    pub capacity: u64,
    /// Bytes that it may grow to. If that exceeds the capacity, there was no memory.
    pub limit: u64,
}
