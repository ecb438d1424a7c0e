//! [`SetupError`]: why a table, a domain, a device, a queue or a pool cannot be made. It is one type, as callers treat
//! all of these failures alike.

use crate::addr::{Iova, PhysAddr};
use crate::heap::OutOfMemory;
use crate::iova::IovaError;

/// Why something could not be made. Nothing of it remains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The format has no tables with this number of levels.
    #[error("the format has {min} to {max} levels of page tables, not {levels}")]
    Levels {
        /// The number that was asked for.
        levels: u32,
        /// The smallest number.
        min: u32,
        /// The largest number.
        max: u32,
    },
    /// The format has no leaves at this number of levels.
    #[error("the format has leaves at 1 to {max} levels, not at {levels}")]
    LeafLevels {
        /// The number of lowest levels at which leaves were asked for.
        levels: u32,
        /// The largest number.
        max: u32,
    },
    /// The format has no addresses of this width.
    #[error("the format has {min} to {max} address bits, not {bits}")]
    AddressBits {
        /// The number that was asked for.
        bits: u32,
        /// The smallest number.
        min: u32,
        /// The largest number.
        max: u32,
    },
    /// The hardware cannot be pointed to the memory for the root of a page table.
    #[error("the root of a page table lies at {table}, and the format holds addresses up to {last}")]
    TableBeyondPhysical {
        /// The address of the memory.
        table: PhysAddr,
        /// The highest physical address.
        last: PhysAddr,
    },
    /// [`Frames`](crate::platform::Frames) has no memory for the root of a page table, or the heap has none for the
    /// library's own account.
    #[error(
        "no memory: `Frames` has none for the root of a page table, or the heap has none for the library's own account"
    )]
    OutOfMemory,
    /// The mapper of a domain has no page size, or its smallest is below 4 KiB or above 2 GiB.
    #[error("the mapper states no page size, or one below 4 KiB or above 2 GiB as its smallest")]
    NoPageSize,
    /// There are no I/O virtual addresses: the mapper's aperture cannot become an address space, or the domain's space
    /// has no room for a ring or a pool.
    #[error("there are no I/O virtual addresses: {0}")]
    Space(#[from] IovaError),
    /// A device reaches none of its domain's addresses.
    #[error("the device reaches addresses up to {last:#x}, and the domain's begin at {first}")]
    BeyondReach {
        /// The highest address that the device can put on the bus.
        last: u64,
        /// The first that the domain hands out.
        first: Iova,
    },
    /// A device does not reach all [buffers of its domain's pool](crate::dma::BufferPool), which it was to use:
    /// [`PoolConfig::reached_by`](crate::bounce::PoolConfig::reached_by) makes a pool that it reaches.
    #[error(
        "the device reaches addresses up to {last:#x}, and the pool's buffers lie up to {end}: `PoolConfig::reached_by` places them lower"
    )]
    PoolBeyondReach {
        /// The highest address that the device can put on the bus.
        last: u64,
        /// The last of the pool.
        end: Iova,
    },
    /// A queue was to copy, or buffers were to come from a pool, and the domain has no memory for it: see
    /// [`DomainBuilder::bounce`](crate::dma::DomainBuilder::bounce) and
    /// [`DomainBuilder::swiotlb`](crate::dma::DomainBuilder::swiotlb).
    #[error(
        "the domain has no memory for a pool of buffers: its builder was given none (`bounce` or `swiotlb`)"
    )]
    NoCopyMemory,
    /// The domain of a non-coherent device has no [cache maintenance](crate::dma::DomainBuilder::cache_maintenance).
    #[error(
        "the domain has no cache maintenance for a device that is not coherent: give it to the domain's builder by `cache_maintenance`"
    )]
    NoCacheMaintenance,
    /// A non-coherent device was to have mappings [by address](crate::dma::DmaOps), or [buffers of a
    /// pool](crate::dma::BufferPool), which do no cache maintenance.
    #[error(
        "the device is not coherent, or the pool's memory is uncached: use a queue, as only queues do cache maintenance"
    )]
    NotCoherent,
    /// The size of a cache line is not a power of two up to a frame, or up to a slot of the pool through which the
    /// queue copies.
    #[error("cache lines of {line} bytes: a power of two up to {most} is needed")]
    CacheLine {
        /// Bytes of a line.
        line: u64,
        /// The most that there may be.
        most: u64,
    },
    /// A batch of no mappings, or of more than [`MOST_IN_BATCH`](crate::dma::MOST_IN_BATCH).
    #[error("batches of {batch} mappings: a queue's batch has 1 to {most}")]
    Batch {
        /// What was asked for.
        batch: usize,
        /// The most that there may be.
        most: usize,
    },
    /// A queue of this strategy has no use for this option of its [`QueueConfig`](crate::dma::QueueConfig).
    #[error("a queue by `{strategy}` has no use for `{option}`: leave it out, or take a strategy that has")]
    NoEffect {
        /// The method that set it.
        option: &'static str,
        /// The constructor that the configuration is of.
        strategy: &'static str,
    },
    /// A dimension of the ring is 0, or their product is too large.
    #[error(
        "no ring holds {descriptors} descriptors of {bytes} bytes: a ring has at least one, of at least 1 byte, and at most what \
         an address space holds"
    )]
    NoRing {
        /// The descriptors asked for, plus the batch if the ring is too large.
        descriptors: u32,
        /// Bytes of each.
        bytes: u64,
    },
    /// The domain's devices use physical addresses, so it has no rings and no pool of bounce buffers.
    #[error("a domain without translation has no rings, and no bounce pool")]
    NotTranslated,
    /// The pool that was to copy for a ring belongs to another domain, so its addresses are not the device's.
    #[error("the pool is not one of the ring's domain")]
    OtherDomain,
    /// The threshold is larger than the largest class that there can be.
    #[error("mappings of up to {threshold} bytes are to be bounced, and the largest slot has {most}")]
    Threshold {
        /// What was asked for, in bytes.
        threshold: u64,
        /// The most that is possible with the domain's granule.
        most: u64,
    },
    /// The addresses for a class are no power of two, have no room for a slot, or are too many: 2^28 granules, or fewer
    /// if those are huge.
    #[error("{bytes} bytes of addresses for each class: a power of two from {least} to {most} is needed")]
    ClassBytes {
        /// What was asked for.
        bytes: u64,
        /// The size of the largest slot.
        least: u64,
        /// The most that there may be.
        most: u64,
    },
    /// The mask of address bits to keep is wider than a granule's offset, or is not a run of the lowest bits.
    #[error(
        "the bits {mask:#x} of addresses cannot be kept: they must be the lowest bits of a granule's offset"
    )]
    OffsetMask {
        /// What was asked for.
        mask: u64,
    },
    /// The slot size of a swiotlb is not a power of two, or below 64.
    #[error("slots of {slot_bytes} bytes: a power of two of at least 64 is needed")]
    Slot {
        /// The size asked for.
        slot_bytes: u64,
    },
    /// The area size of a swiotlb is not a power of two from 64 slots and a frame to 256 MiB.
    #[error("areas of {area_bytes} bytes: a power of two from {least} to {most} is needed")]
    Area {
        /// The size asked for.
        area_bytes: u64,
        /// The smallest possible.
        least: u64,
        /// The largest possible.
        most: u64,
    },
    /// No whole area of a swiotlb lies below the upper limit, the limits are the wrong way round, or there are more
    /// than 65,536 areas.
    #[error("the limits of {min_bytes} to {max_bytes} bytes hold no area of {area_bytes} bytes, or too many")]
    Limits {
        /// The lower limit.
        min_bytes: u64,
        /// The upper limit.
        max_bytes: u64,
        /// The size of an area.
        area_bytes: u64,
    },
    /// There was no memory for the smallest swiotlb, or none that the devices reach.
    #[error("there is no memory up to {reach} for an area of {area_bytes} bytes")]
    NoArea {
        /// The size of an area.
        area_bytes: u64,
        /// The highest address that was allowed.
        reach: PhysAddr,
    },
}

impl From<OutOfMemory> for SetupError {
    fn from(_: OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}
