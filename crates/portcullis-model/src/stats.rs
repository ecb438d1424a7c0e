//! The unit's counts since it was made.

/// Counts of one [`Iommu`](crate::Iommu). An *access* is one piece that lies inside one 4 KiB page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Accesses of all devices, including refused ones.
    pub accesses: u64,
    /// Accesses that hit the device TLB; they do not reach the IOTLB.
    pub device_tlb_hits: u64,
    /// Accesses that missed in the IOTLB. Each is one walk.
    pub iotlb_misses: u64,
    /// Walks that missed in the last-level paging-structure cache, and so read more than the leaf's entry.
    pub walk_cache_misses: u64,
    /// Walks that missed in the paging-structure cache of a level. Index 0 is the lowest level; published counters number these from the
    /// other end (with four levels, L3 is index 0). A table at level 5, which only six levels put below the root, is in none of them.
    pub misses_by_level: [u64; 4],
    /// Page-table entries read.
    pub table_reads: u64,
    /// Page-table entries read from frames that were not allocated: tables freed while the unit could still find them.
    pub walks_into_freed_frames: u64,
    /// Page-selective invalidations executed.
    pub range_invalidations: u64,
    /// Domain-selective invalidations executed.
    pub domain_invalidations: u64,
    /// Device TLB invalidations executed and answered.
    pub device_invalidations: u64,
    /// Wait descriptors executed.
    pub waits: u64,
    /// Writes of the doorbell.
    pub submissions: u64,
}
