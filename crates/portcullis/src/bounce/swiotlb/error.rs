//! The errors of mappings. A call that fails changes nothing.

use crate::addr::PhysAddr;

/// A buffer that was not mapped. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BounceError {
    /// A buffer of no bytes.
    #[error("a buffer at {phys} of 0 bytes")]
    Empty {
        /// The address at which it would have begun.
        phys: PhysAddr,
    },
    /// The buffer runs past the end of the 64-bit address space.
    #[error("{len:#x} bytes at {phys} run past the end of the 64-bit address space")]
    Wraps {
        /// The address at which it begins.
        phys: PhysAddr,
        /// Its length in bytes.
        len: u64,
    },
    /// The buffer, with the offset that is to be kept, is longer than an area.
    #[error("{len:#x} bytes at an offset of {offset:#x}: an area has {most:#x}")]
    TooLong {
        /// The buffer's length in bytes.
        len: u64,
        /// The low bits of its address that are to be kept, in bytes.
        offset: u64,
        /// The size of an area in bytes.
        most: u64,
    },
    /// The alignment that the device asks for is larger than an area.
    #[error("aligned to {align:#x} bytes: an area has {most:#x}")]
    Alignment {
        /// The alignment in bytes.
        align: u64,
        /// The size of an area in bytes.
        most: u64,
    },
    /// All memory of the pool is beyond the device's reach, and there is no more memory below.
    #[error("the device reaches addresses up to {reach}, and no area of the pool lies below")]
    BeyondReach {
        /// The highest address that the device can put on the bus.
        reach: PhysAddr,
    },
    /// The pool is full: wait, and try again.
    #[error(transparent)]
    Pressure(#[from] Pressure),
}

/// A pool that is full now. The I/O has not failed: it can be tried again when a slot is
/// [freed](super::Swiotlb::freed_since).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{needed:#x} bytes in one piece needed, {free:#x} free of {capacity:#x}; the limit is {limit:#x}")]
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

/// A call for a mapping that does not exist. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MappingError {
    /// The address is in no area of the pool.
    #[error("{phys} is not in the pool")]
    NotOurs {
        /// The address.
        phys: PhysAddr,
    },
    /// There is no mapping at the address: there never was, or it is unmapped already.
    #[error("nothing is mapped at {phys}")]
    NotMapped {
        /// The address.
        phys: PhysAddr,
    },
    /// There is a mapping, but not this one; or, for a part of one, it does not hold all of the
    /// bytes.
    #[error("{len:#x} bytes at {phys}: mapped are {mapped_len:#x} bytes at {mapped}")]
    Mismatch {
        /// The address.
        phys: PhysAddr,
        /// Bytes from there on.
        len: u64,
        /// The address at which the mapping begins.
        mapped: PhysAddr,
        /// Its length in bytes.
        mapped_len: u64,
    },
}
