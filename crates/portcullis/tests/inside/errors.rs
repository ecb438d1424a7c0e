//! What each error says, with no two numbers the same.

use crate::addr::{AddrError, Iova, IovaRange, PageSize, PhysAddr};
use crate::dma::BatchError;
use crate::domain::{MapListError, PolicyError, UnmapError};
use crate::heap::OutOfMemory;
use crate::invalidation::InvalidationError;
use crate::iova::{ArenaError, BitmapError, IovaError};
use crate::pgtable::MapError;
use crate::setup::SetupError;
use alloc::string::ToString;

#[path = "sentences.rs"]
pub(crate) mod sentences;

pub(crate) const AT: Iova = Iova::new(0xa000);
const PHYS: PhysAddr = PhysAddr::new(0xb000);
const LAST: PhysAddr = PhysAddr::new(0xcfff);
pub(crate) const REJECTED: InvalidationError = InvalidationError::Rejected { code: 0x7d };

/// [0x5000, 0x6fff]
pub(crate) fn range() -> IovaRange {
    IovaRange::new(Iova::new(0x5000), 0x2000).unwrap()
}

sentences::sentences! {
    of_addresses: AddrError {
        EmptyRange { start: 7 } => "no range at 0x7: a range holds at least one byte";
        Wraps { start: 8, len: 9 } =>
            "the range at 0x8 runs past the end of the 64-bit address space, or is all of it";
    }

    of_bitmaps: BitmapError {
        NoFit => "no hole takes the request";
        OutOfMemory => "no memory for the bitmap's nodes";
        Invalid => "no such range can be taken, added or given back";
    }

    of_spaces: IovaError {
        Empty => "no I/O virtual addresses: 0 bytes were asked for, or the aperture has no free granule";
        Exhausted { len: 1, limit: AT, free: 2, cached: 3, largest: 4 } =>
            "no room for 1 bytes of I/O virtual addresses up to 0xa000: 2 bytes are free there, the largest hole has 4; CPUs \
             keep 3 of their own anywhere";
        NotAllocated { range: range() } => "[0x5000, 0x6fff] cannot be freed: it is not allocated as a whole";
        OutOfMemory => "no memory for the allocator of I/O virtual addresses";
    }

    of_arenas: ArenaError {
        Empty => "a ring arena, or a reservation in one, has more than 0 bytes";
        Granule { granule: PageSize::SIZE_4K, of_space: PageSize::SIZE_2M } =>
            "a ring arena in units of 4096 bytes does not fit a space in units of 2097152 bytes";
        TooLarge { descriptors: 10, descriptor_bytes: 0x20 } => "no ring arena holds 10 descriptors of 32 bytes";
        Space(IovaError::OutOfMemory) =>
            "the ring arena's space refused: no memory for the allocator of I/O virtual addresses";
        OutOfMemory => "no memory for the bits of a ring arena";
        Oversize { len: 1, capacity: 2 } => "1 bytes do not fit into a ring of 2";
        Full { len: 1, in_use: 2, capacity: 3, reservations: 4, oldest: AT } =>
            "no room for 1 bytes in the ring: 4 reservations hold 2 of 3 bytes, the oldest at 0xa000";
        NotReserved { range: range() } => "[0x5000, 0x6fff] cannot be freed: it is not what is reserved there";
        InUse { reservations: 1, bytes: 2, oldest: AT } =>
            "the ring still has 1 reservations of 2 bytes, the oldest at 0xa000";
    }

    of_invalidations: InvalidationError {
        TimedOut { waited_ns: 10 } => "the IOMMU did not confirm an invalidation within 10 ns";
        DeviceTimedOut { device: 0x20, waited_ns: 11 } =>
            "device 0x20 did not confirm an invalidation of its TLB within 11 ns";
        Rejected { code: 0x7d } => "the IOMMU reported an error for an invalidation (code 0x7d)";
        StillMapped { bytes: 16 } => "16 bytes could not be unmapped, and devices still reach them";
        TooManyDevices { limit: 12 } =>
            "the domain has 12 devices that cache translations themselves, which is the limit";
        BeingAdded => "another call is adding the device";
        Abandoned => "the CPU that was to submit an invalidation did not finish";
    }

    of_tables: MapError {
        Misaligned { range: range(), phys: PHYS, granule: 0x1000 } =>
            "mapping [0x5000, 0x6fff] to 0xb000: the addresses and lengths must be multiples of the granule, 4096 bytes";
        Length { range: range(), list: 16 } =>
            "mapping [0x5000, 0x6fff]: the pieces of memory for it have another length: 16 bytes, or more";
        BeyondAperture { range: range(), last: AT } =>
            "mapping [0x5000, 0x6fff]: the tables translate addresses up to 0xa000";
        BeyondPhysical { phys: PHYS, len: 16, last: LAST } =>
            "mapping 16 bytes of physical memory at 0xb000: an entry holds addresses up to 0xcfff";
        TableBeyondPhysical { table: PHYS, last: LAST } =>
            "memory for a page table lies at 0xb000, and an entry holds addresses up to 0xcfff";
        AlreadyMapped { at: AT } => "0xa000 is mapped already";
        OutOfMemory => "no memory for a page table";
        Unconfirmed => "the IOMMU did not confirm that it has seen the mapping";
        Limit { what: "the limit", used: 1, wanted: 2, most: 4 } =>
            "the limit: 1 used, 2 more wanted, 4 allowed";
        Refused { code: -12 } => "the operating system refused to map (error -12)";
    }

    of_setups: SetupError {
        Levels { levels: 9, min: 3, max: 5 } => "the format has 3 to 5 levels of page tables, not 9";
        LeafLevels { levels: 9, max: 3 } => "the format has leaves at 1 to 3 levels, not at 9";
        AddressBits { bits: 60, min: 12, max: 52 } => "the format has 12 to 52 address bits, not 60";
        TableBeyondPhysical { table: PHYS, last: LAST } =>
            "the root of a page table lies at 0xb000, and the format holds addresses up to 0xcfff";
        OutOfMemory =>
            "no memory: `Frames` has none for the root of a page table, or the heap has none for the library's own account";
        NoPageSize => "the mapper states no page size, or one below 4 KiB or above 2 GiB as its smallest";
        Space(IovaError::OutOfMemory) =>
            "there are no I/O virtual addresses: no memory for the allocator of I/O virtual addresses";
        BeyondReach { last: 0xfff, first: AT } =>
            "the device reaches addresses up to 0xfff, and the domain's begin at 0xa000";
        PoolBeyondReach { last: 0xfff, end: AT } =>
            "the device reaches addresses up to 0xfff, and the pool's buffers lie up to 0xa000: `PoolConfig::reached_by` places them lower";
        NoCopyMemory =>
            "the domain has no memory for a pool of buffers: its builder was given none (`bounce` or `swiotlb`)";
        NoCacheMaintenance => "the domain has no cache maintenance for a device that is not coherent: give it to the domain's builder by `cache_maintenance`";
        NotCoherent =>
            "the device is not coherent, or the pool's memory is uncached: use a queue, as only queues do cache maintenance";
        CacheLine { line: 3, most: 0x1000 } => "cache lines of 3 bytes: a power of two up to 4096 is needed";
        Batch { batch: 300, most: 256 } => "batches of 300 mappings: a queue's batch has 1 to 256";
        NoEffect { option: "batch", strategy: "direct" } =>
            "a queue by `direct` has no use for `batch`: leave it out, or take a strategy that has";
        NoRing { descriptors: 10, bytes: 0x20 } =>
            "no ring holds 10 descriptors of 32 bytes: a ring has at least one, of at least 1 byte, and at most what an address \
             space holds";
        NotTranslated => "a domain without translation has no rings, and no bounce pool";
        OtherDomain => "the pool is not one of the ring's domain";
        Threshold { threshold: 0x30, most: 0x20 } =>
            "mappings of up to 48 bytes are to be bounced, and the largest slot has 32";
        ClassBytes { bytes: 1, least: 2, most: 4 } =>
            "1 bytes of addresses for each class: a power of two from 2 to 4 is needed";
        OffsetMask { mask: 0x5 } =>
            "the bits 0x5 of addresses cannot be kept: they must be the lowest bits of a granule's offset";
        Slot { slot_bytes: 3 } => "slots of 3 bytes: a power of two of at least 64 is needed";
        Area { area_bytes: 1, least: 2, most: 4 } =>
            "areas of 1 bytes: a power of two from 2 to 4 is needed";
        Limits { min_bytes: 1, max_bytes: 2, area_bytes: 4 } =>
            "the limits of 1 to 2 bytes hold no area of 4 bytes, or too many";
        NoArea { area_bytes: 1, reach: LAST } => "there is no memory up to 0xcfff for an area of 1 bytes";
    }

    of_lists: MapListError {
        EmptyList => "the list has no segments";
        EmptySegment { index: 3, phys: PHYS } => "segment 3, at 0xb000, is empty";
        Wraps { index: 3, phys: PHYS, len: 16 } =>
            "segment 3, 16 bytes at 0xb000, runs past the end of the 64-bit address space";
        BeyondMask { last: LAST, mask: 0xfff } =>
            "the device reaches addresses up to 0xfff; without translation the list needs 0xcfff";
        NoRoom { needed: 4, room: 3 } =>
            "the result may need 4 segments, and the caller's list has room for 3";
        Unconfirmed { error: REJECTED } =>
            "a map was refused half-way and could not be undone, so devices may still reach a part of the buffer, until the domain is flushed: the IOMMU reported an error for an invalidation \
             (code 0x7d)";
        TooLarge { bytes: 0x3000, beside: 0x11 } =>
            "12288 bytes in whole granules, 17 of them beside the list's pieces, are more than one mapping has";
        NotOnce { at: AT } => "the pieces of a list leave the address 0xa000 out, or fill it twice";
        NoFrames { frames: 5 } => "there are no 5 free frames of memory in a row";
        NotCoherent => "a device that is not coherent maps by its queues, and coherent memory of uncached frames";
        Iova(IovaError::OutOfMemory) => "no memory for the allocator of I/O virtual addresses";
        Map(MapError::OutOfMemory) => "no memory for a page table";
    }

    of_unmaps: UnmapError {
        NotMapped { range: range(), unmapped: 1 } =>
            "unmapping [0x5000, 0x6fff]: only 1 bytes of it were mapped";
        StillMapped { range: range(), unmapped: 1, kept: 2 } =>
            "unmapping [0x5000, 0x6fff]: devices still reach 2 bytes of it, 1 bytes were unmapped";
        NoSuchRange { iova: AT, len: 1 } => "1 bytes at 0xa000 are no range, so nothing is unmapped";
        Unconfirmed { range: range(), error: REJECTED } =>
            "[0x5000, 0x6fff] is unmapped, but devices may still reach it: the IOMMU reported an error for an invalidation (code \
             0x7d)";
    }

    of_policies: PolicyError {
        Translation { from: "one", to: "another" } =>
            "a domain is made with translation or without: it cannot change from one to another";
        Setup(SetupError::NoPageSize) => "the mapper states no page size, or one below 4 KiB or above 2 GiB as its smallest";
        Unconfirmed(REJECTED) =>
            "the policy is changed, but devices may still reach what was unmapped before: the IOMMU reported an error for an \
             invalidation (code 0x7d)";
    }

    of_batches: BatchError {
        Full { most: 256 } => "a batch of 256 mappings is full: it must be committed first";
        OtherDomain => "a mapping of another domain than the batch's";
        Unmap(UnmapError::NoSuchRange { iova: AT, len: 1 }) =>
            "1 bytes at 0xa000 are no range, so nothing is unmapped";
    }
}

#[test]
fn of_the_heap() {
    assert_eq!(OutOfMemory.to_string(), "the heap has no memory");
}
