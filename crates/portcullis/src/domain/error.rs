//! Errors of a domain. Each says whether devices may still reach memory.

use crate::addr::{AddrError, Iova, IovaRange, PhysAddr, PhysSegment};
use crate::invalidation::InvalidationError;
use crate::iova::IovaError;
use crate::pgtable::MapError;

/// Why a list of memory segments was not mapped. Nothing of it stays mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapListError {
    /// The list has no segment.
    #[error("the list has no segments")]
    EmptyList,
    /// A segment has length 0.
    #[error("segment {index}, at {phys}, is empty")]
    EmptySegment {
        /// Its place in the list.
        index: usize,
        /// Where it begins.
        phys: PhysAddr,
    },
    /// A segment, or the list as a whole, runs past the end of the 64-bit address space.
    #[error("segment {index}, {len} bytes at {phys}, runs past the end of the 64-bit address space")]
    Wraps {
        /// Its place in the list.
        index: usize,
        /// Where it begins.
        phys: PhysAddr,
        /// Its length in bytes.
        len: u64,
    },
    /// [`Pieces`](super::Pieces) leave an address empty, or fill it twice.
    #[error("the pieces of a list leave the address {at} out, or fill it twice")]
    NotOnce {
        /// The lowest address that has no piece, or where the second of two begins.
        at: Iova,
    },
    /// The device cannot address the memory, and the domain does not translate.
    #[error("the device reaches addresses up to {mask:#x}; without translation the list needs {last}")]
    BeyondMask {
        /// The highest physical address needed.
        last: PhysAddr,
        /// The highest address that the device can put on the bus.
        mask: u64,
    },
    /// The caller's slice for the result is too short.
    #[error("the result may need {needed} segments, and the caller's list has room for {room}")]
    NoRoom {
        /// How many segments the result may have.
        needed: usize,
        /// The length of the caller's list.
        room: usize,
    },
    /// The list exceeds what a device's mapping can record: 2^32 - 1 pages of 4 KiB, or 2^32 - 1 bytes in its granules beside its pieces.
    /// [`Domain::map`](super::Domain::map) has no such limit.
    #[error(
        "{bytes} bytes in whole granules, {beside} of them beside the list's pieces, are more than one mapping has"
    )]
    TooLarge {
        /// Bytes of the granules that the list touches.
        bytes: u64,
        /// Those that are not the list's.
        beside: u64,
    },
    /// The mapper refused the list half-way. The entries are removed, but the hardware did not confirm that: **devices may still reach the
    /// memory** until a later [`Domain::flush`](super::Domain::flush) succeeds.
    #[error(
        "a map was refused half-way and could not be undone, so devices may still reach a part of the buffer, until the domain is flushed: {error}"
    )]
    Unconfirmed {
        /// Why it was not confirmed.
        error: InvalidationError,
    },
    /// There are no consecutive free frames for [coherent memory](crate::dma::CoherentMemory).
    #[error("there are no {frames} free frames of memory in a row")]
    NoFrames {
        /// Frames asked for.
        frames: usize,
    },
    /// The device is non-coherent. It maps by its queues, which clean and invalidate the CPUs' caches, and its [coherent
    /// memory](crate::dma::CoherentMemory) needs [uncached](crate::platform::Frames::UNCACHED) frames.
    #[error("a device that is not coherent maps by its queues, and coherent memory of uncached frames")]
    NotCoherent,
    /// There are no I/O virtual addresses for the list.
    #[error(transparent)]
    Iova(#[from] IovaError),
    /// The mapper refused to map the list.
    #[error(transparent)]
    Map(#[from] MapError),
}

impl MapListError {
    #[inline]
    pub(crate) fn check(segment: PhysSegment, index: usize) -> Result<PhysAddr, Self> {
        let PhysSegment { phys, len } = segment;
        segment.last().map_err(|error| match error {
            AddrError::EmptyRange { .. } => Self::EmptySegment { index, phys },
            AddrError::Wraps { .. } => Self::Wraps { index, phys, len },
        })
    }
}

/// Why an unmap did not end all of its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnmapError {
    /// Only a part of the range, or nothing, was mapped. That part is unmapped and unreachable. Its addresses leak, as the library cannot
    /// know which mapping they belonged to. They are free if the range is exactly one mapping, of which other parts were unmapped before.
    #[error("unmapping {range}: only {unmapped} bytes of it were mapped")]
    NotMapped {
        /// What was to be unmapped.
        range: IovaRange,
        /// Bytes that were mapped, and are unmapped now.
        unmapped: u64,
    },
    /// **Devices still reach `kept` bytes of the range**, and may reach the rest. All of the addresses stay out of use. The range is a part
    /// of one of these:
    ///
    /// - a large page that could not be split, for want of memory or of a confirmation. Unmap the part again; that call returns
    ///   [`NotMapped`](Self::NotMapped) if some of the part is gone by then;
    /// - a mapping that the mapper [removes as a whole](crate::mapper::Mapper::REMOVES_WHOLES) only. The call with its last part unmaps all
    ///   of it, and returns the result. From that call on, do not unmap any other part again: another mapping may have its addresses. If
    ///   that call fails, unmap the range of its error;
    /// - what the mapper cannot remove for a reason of its own.
    #[error("unmapping {range}: devices still reach {kept} bytes of it, {unmapped} bytes were unmapped")]
    StillMapped {
        /// What was to be unmapped.
        range: IovaRange,
        /// Bytes that are unmapped now.
        unmapped: u64,
        /// Bytes that still are mapped.
        kept: u64,
    },
    /// The length is 0 or the range wraps.
    #[error("{len} bytes at {iova} are no range, so nothing is unmapped")]
    NoSuchRange {
        /// Where it was to begin.
        iova: Iova,
        /// Its length.
        len: u64,
    },
    /// The translations are removed, but the hardware did not confirm that: **devices may still reach the memory** until a later
    /// [`Domain::flush`](super::Domain::flush) succeeds.
    #[error("{range} is unmapped, but devices may still reach it: {error}")]
    Unconfirmed {
        /// What was unmapped.
        range: IovaRange,
        /// Why it was not confirmed.
        error: InvalidationError,
    },
}
