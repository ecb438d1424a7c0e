//! The configuration of a space, its figures, and its errors.

use alloc::vec::Vec;

use crate::addr::{Iova, IovaRange, PageSize};
use crate::heap::OutOfMemory;

/// The configuration of an address space.
#[derive(Debug, Clone)]
pub struct SpaceConfig {
    /// The addresses that may be handed out.
    pub aperture: IovaRange,
    /// The unit of allocation: the mapper's smallest page.
    pub granule: PageSize,
    /// Ranges that are never handed out, such as interrupt windows. They may lie outside the aperture. A granule with a
    /// reserved byte is reserved as a whole.
    pub reserved: Vec<IovaRange>,
    /// The number of CPUs with lists of their own, 4,094 at most. Further CPUs take the space's lock.
    pub cpus: usize,
    /// Where the low zone ends. It is for devices that reach no further; others get its addresses last.
    pub low_end: Iova,
    /// The most bytes that one CPU caches in its lists of each of the two zones. All CPUs together cache at most an
    /// eighth of a zone, even if this allows more. Remote frees to a CPU may hold as much again, and half as much more
    /// may wait to be sent, plus one range for each CPU and size.
    pub cache_bytes: u64,
}

impl SpaceConfig {
    /// The default [`cache_bytes`](Self::cache_bytes): 64 MiB, about 0.01 % of a 39-bit address space. (In a small zone
    /// the eighth that all CPUs share is the smaller limit.)
    pub const CACHE_BYTES: u64 = 64 << 20;

    /// A space of `aperture` in units of `granule` for `cpus` CPUs, with a low zone that ends at 4 GiB.
    pub fn new(aperture: IovaRange, granule: PageSize, cpus: usize) -> Self {
        let low_end = Iova::new(1 << 32);
        Self { aperture, granule, reserved: Vec::new(), cpus, low_end, cache_bytes: Self::CACHE_BYTES }
    }
}

/// Why a space was not made, or a range not allocated or freed. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IovaError {
    /// The request has 0 bytes, or the aperture has no whole granule that is not reserved.
    #[error("no I/O virtual addresses: 0 bytes were asked for, or the aperture has no free granule")]
    Empty,
    /// No hole is large enough at the needed alignment. While other CPUs go on, the figures are of slightly different
    /// times.
    #[error(
        "no room for {len} bytes of I/O virtual addresses up to {limit}: {free} bytes are free there, the \
         largest hole has {largest}; CPUs keep {cached} of their own anywhere"
    )]
    Exhausted {
        /// Bytes asked for.
        len: u64,
        /// The highest address allowed.
        limit: Iova,
        /// Bytes free up to that address.
        free: u64,
        /// Bytes in CPUs' lists, remote batches and remote-free queues, anywhere in the space.
        cached: u64,
        /// Bytes in the largest hole up to it.
        largest: u64,
    },
    /// The range is not handed out as a whole: it was freed before, or never handed out as such.
    #[error("{range} cannot be freed: it is not allocated as a whole")]
    NotAllocated {
        /// What was to be freed.
        range: IovaRange,
    },
    /// There is no memory for the allocator's metadata.
    #[error("no memory for the allocator of I/O virtual addresses")]
    OutOfMemory,
}

impl From<OutOfMemory> for IovaError {
    fn from(_: OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}

/// How full a space is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceUsage {
    /// Bytes that could be handed out when the space was empty.
    pub total: u64,
    /// Bytes taken out of the bitmap: handed out, or cached by a CPU.
    pub taken: u64,
    /// Of those, bytes in CPUs' lists, remote batches and remote-free queues.
    pub cached: u64,
    /// The most that was ever taken.
    pub peak_taken: u64,
    /// Bytes of memory that the space itself uses.
    pub memory: usize,
}
