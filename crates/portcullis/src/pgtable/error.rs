//! The errors of page tables, and the checks of a layout's dimensions.

use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};
use crate::setup::SetupError;

/// How many of the lowest `large` levels (leaves of 4 KiB, 2 MiB and 1 GiB) have leaves up to `largest`; at least 1.
pub(super) const fn levels_up_to(large: u32, largest: PageSize) -> u32 {
    let most = match largest.shift() {
        ..21 => 1,
        21..30 => 2,
        _ => 3,
    };
    if most < large { most } else { large }
}

/// Checks a layout: `levels` must be `min` to `max`; leaves are at the lowest `large` levels, which must be 1 to
/// `most`; physical addresses have `bits` bits, which must be 12 to `widest`. Returns the highest such address.
pub(super) const fn check(
    (levels, min, max): (u32, u32, u32),
    (large, most): (u32, u32),
    (bits, widest): (u32, u32),
) -> Result<PhysAddr, SetupError> {
    if levels < min || levels > max {
        return Err(SetupError::Levels { levels, min, max });
    }
    if large < 1 || large > most {
        return Err(SetupError::LeafLevels { levels: large, max: most });
    }
    if bits < 12 || bits > widest {
        return Err(SetupError::AddressBits { bits, min: 12, max: widest });
    }
    Ok(PhysAddr::new((1 << bits) - 1))
}

/// A mapping that was not made: no part of it is in the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// An address or the length is not a multiple of the granule.
    #[error(
        "mapping {range} to {phys}: the addresses and lengths must be multiples of the granule, {granule} bytes"
    )]
    Misaligned {
        /// The I/O virtual range.
        range: IovaRange,
        /// The address of the misaligned piece; 0 if the range itself is not aligned.
        phys: PhysAddr,
        /// The smallest page, in bytes.
        granule: u64,
    },
    /// The pieces of memory together are not as long as the range.
    #[error("mapping {range}: the pieces of memory for it have another length: {list} bytes, or more")]
    Length {
        /// The I/O virtual range.
        range: IovaRange,
        /// Bytes of memory up to the piece at which the call noticed.
        list: u64,
    },
    /// The range runs past the last address that the tables can translate.
    #[error("mapping {range}: the tables translate addresses up to {last}")]
    BeyondAperture {
        /// The I/O virtual range.
        range: IovaRange,
        /// The highest address that can be translated.
        last: Iova,
    },
    /// No entry can point to the memory.
    #[error("mapping {len} bytes of physical memory at {phys}: an entry holds addresses up to {last}")]
    BeyondPhysical {
        /// The physical address.
        phys: PhysAddr,
        /// The number of bytes.
        len: u64,
        /// The highest physical address.
        last: PhysAddr,
    },
    /// No entry can point to the memory for a page table.
    #[error("memory for a page table lies at {table}, and an entry holds addresses up to {last}")]
    TableBeyondPhysical {
        /// The address of that memory.
        table: PhysAddr,
        /// The highest physical address.
        last: PhysAddr,
    },
    /// A part of the range is in use.
    #[error("{at} is mapped already")]
    AlreadyMapped {
        /// The lowest such address that the call found.
        at: Iova,
    },
    /// There is no memory for a page table.
    #[error("no memory for a page table")]
    OutOfMemory,
    /// The hardware has a [caching mode](crate::invalidation::InvalidationQueue::caches_absent) and did not confirm the
    /// invalidation after the map. (Only mappers return this.)
    #[error("the IOMMU did not confirm that it has seen the mapping")]
    Unconfirmed,
    /// An operating system maps on the caller's behalf, and a limit of its own is met. (Only mappers return this.)
    #[error("{what}: {used} used, {wanted} more wanted, {most} allowed")]
    Limit {
        /// What is limited, and how to raise it.
        what: &'static str,
        /// How much is in use.
        used: u64,
        /// How much more the mapping needs.
        wanted: u64,
        /// The limit.
        most: u64,
    },
    /// The operating system refused the mapping, with an error code of its own. (Only mappers return this.)
    #[error("the operating system refused to map (error {code})")]
    Refused {
        /// The code.
        code: i32,
    },
}
