//! What the unit has counted since it was made.

/// Counts of one [`Iommu`](crate::Iommu). An *access* is one piece that lies inside one 4 KiB page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Accesses of all devices, refused ones too.
    pub accesses: u64,
    /// Accesses whose translation was in the device's own TLB; the IOTLB was not asked.
    pub device_tlb_hits: u64,
    /// Accesses whose translation was not in the IOTLB. Each is one walk.
    pub iotlb_misses: u64,
    /// Walks that had to read more than the entry of the leaf's table: they missed in the last-level
    /// paging-structure cache.
    pub walk_cache_misses: u64,
    /// Walks that had to read where the table of a level is, because that was not cached. Index 0 is the
    /// lowest level; published counters name these from the other end (with four levels, L3 is index 0).
    /// A table at level 5, which only six levels put below the root, is in none of them.
    pub misses_by_level: [u64; 4],
    /// Page-table entries read.
    pub table_reads: u64,
    /// Those read from frames that were not allocated: tables freed while the unit could still find them.
    pub walks_into_freed_frames: u64,
    /// Page-selective invalidations carried out.
    pub range_invalidations: u64,
    /// Domain-selective invalidations carried out.
    pub domain_invalidations: u64,
    /// Invalidations of device TLBs carried out. Those that a silent device did not answer are not.
    pub device_invalidations: u64,
    /// Wait descriptors carried out.
    pub waits: u64,
    /// Times the queue was told of new descriptors: writes of the doorbell.
    pub submissions: u64,
}
