//! What each error of a mapping says.

use super::*;
use crate::errors::{AT, REJECTED, range, sentences};

sentences::sentences! {
    of_maps: DmaMapError {
        Full => "the queue's ring is full: commit what was unmapped, and unmap its oldest mapping";
        Pressure { needed: 0x11, free: 0x12, capacity: 0x13, limit: 0x14 } => "17 bytes in one piece needed, 18 free of 19; the limit is 20";
        List(MapListError::EmptyList) => "the list has no segments";
        TooLong { len: 2, most: 1 } => "2 bytes in one piece: a mapping has 1 to 1";
        NoBuffer { bytes: 1, held: 2 } => "no 1 bytes of memory to copy through; the pool's slots hold 2";
        AllTaken { bytes: 0x1000 } =>
            "all buffers of 4096 bytes are taken, queues' mappings included: `PoolConfig::class_bytes` sets how many there are";
        OutOfMemory => "nothing is mapped: the heap has no memory for the mapping's metadata";
        SharesLine { line: 0x40 } =>
            "a buffer for a device that is not coherent does not consist of whole lines of 64 bytes: align it and its length, or make its queue by `auto` or `bounce`, which copy";
        BeyondReach { last: 0xfff } =>
            "the device reaches addresses up to 0xfff, and no memory to copy through lies there";
    }

    of_ends: DmaUnmapError {
        OtherQueue => "a mapping of another queue";
        Unconfirmed { error: REJECTED } =>
            "devices may still reach what was unmapped: the IOMMU reported an error for an invalidation (code 0x7d)";
        StillMapped { range: range(), kept: 1 } => "devices still reach 1 bytes of [0x5000, 0x6fff]";
        Unmap(UnmapError::NoSuchRange { iova: AT, len: 1 }) =>
            "1 bytes at 0xa000 are no range, so nothing is unmapped";
        NotMapped { iova: AT } => "0xa000 is the address of no mapping";
        OutOfRange { iova: AT, offset: 1, len: 2, mapped: 3 } =>
            "2 bytes from 1 on: the mapping at 0xa000 has 3";
        Busy { iova: AT } => "the mapping at 0xa000 is being synced or unmapped by another caller";
    }
}
