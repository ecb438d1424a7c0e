//! What a space is made of, what it reports, and what can go wrong with it.

use alloc::vec::Vec;

use crate::addr::{Iova, IovaRange, PageSize};

/// What an address space is made of.
#[derive(Debug, Clone)]
pub struct SpaceConfig {
    /// The addresses that may be handed out.
    pub aperture: IovaRange,
    /// The unit of allocation: the mapper's smallest page.
    pub granule: PageSize,
    /// Ranges inside the aperture that must never be handed out (interrupt windows, for one).
    pub reserved: Vec<IovaRange>,
    /// How many CPUs keep lists of their own; up to 4,094, further ones do without.
    pub cpus: usize,
    /// Where the low zone ends: addresses below are kept apart, for devices that reach no others, and used
    /// for other devices last.
    pub low_end: Iova,
    /// The most that one CPU keeps in its lists of each of the two zones, in bytes. Together the CPUs keep at
    /// the most an eighth of a zone, whatever this says. On their way back to a CPU from others are up to as
    /// much again, and half as much on top that is not sent yet, plus one range for each CPU and size.
    pub cache_bytes: u64,
}

impl SpaceConfig {
    /// What one CPU keeps of a zone at the most unless told otherwise: 64 MiB, a hundredth of a percent of 39
    /// bits of addresses. (In a small zone the limit is the eighth that all CPUs share.)
    pub const CACHE_BYTES: u64 = 64 << 20;

    /// The space of `aperture` in units of `granule` for `cpus` CPUs, with a low zone of 4 GiB.
    pub fn new(aperture: IovaRange, granule: PageSize, cpus: usize) -> Self {
        let low_end = Iova::new(1 << 32);
        Self { aperture, granule, reserved: Vec::new(), cpus, low_end, cache_bytes: Self::CACHE_BYTES }
    }
}

/// A range that could not be allocated, or was not allocated when it was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IovaError {
    /// 0 bytes were asked for.
    #[error("an I/O virtual range of 0 bytes")]
    Empty,
    /// No hole is large enough at the alignment needed.
    #[error(
        "no room for {len:#x} bytes of I/O virtual addresses up to {limit}: {free:#x} bytes are free and \
         {cached:#x} cached, the largest hole has {largest:#x}"
    )]
    Exhausted {
        /// Bytes asked for.
        len: u64,
        /// The highest address allowed.
        limit: Iova,
        /// Bytes free anywhere in the space.
        free: u64,
        /// Bytes that CPUs keep for themselves.
        cached: u64,
        /// Bytes in the largest hole anywhere in the space.
        largest: u64,
    },
    /// The range is not handed out as a whole: it, or a part of it, was freed before, or never handed out.
    #[error("{range} is freed, but it is not allocated")]
    NotAllocated {
        /// What was to be freed.
        range: IovaRange,
    },
    /// No memory for the allocator's own book-keeping.
    #[error("no memory to keep account of I/O virtual addresses")]
    OutOfMemory,
}

/// How full a space is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceUsage {
    /// Bytes that could be handed out when the space was empty.
    pub total: u64,
    /// Bytes taken out of the bitmap: handed out, or kept by a CPU.
    pub taken: u64,
    /// Of those, bytes that CPUs keep, or have on their way to each other.
    pub cached: u64,
    /// The most that was ever taken.
    pub peak_taken: u64,
    /// Bytes of memory that the space itself uses.
    pub memory: usize,
}
