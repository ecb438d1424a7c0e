//! The events of a trace, as they stand in the file: one value for one line.
//!
//! An event borrows from its line and from the [`Lists`](crate::parse::Lists) it was parsed into, so making one
//! allocates nothing. Names are bytes: the kernel does not promise UTF-8.

pub use portcullis::addr::Direction;

/// One trace event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event<'a> {
    /// The line it stands on, counted from 1.
    pub line: u64,
    /// The CPU that recorded it.
    pub cpu: u32,
    /// Its time stamp in nanoseconds.
    pub time_ns: u64,
    /// What happened.
    pub kind: EventKind<'a>,
}

/// A device and a stretch of its address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region<'a> {
    /// The device's name, such as `0000:00:03.0`.
    pub device: &'a [u8],
    /// Which way the data goes.
    pub dir: Direction,
    /// The first address, as the device sees it.
    pub dma_addr: u64,
    /// The length in bytes.
    pub size: u64,
    /// The attributes, such as `NO_WARN|SKIP_CPU_SYNC`; empty where there are none.
    pub attrs: &'a [u8],
}

impl Region<'_> {
    /// Whether the address is what the kernel returns, and records, for a mapping of the memory at `phys` that failed: all ones,
    /// of 64 bits or, where addresses have no more, of 32.
    pub fn is_error(&self, phys: u64) -> bool {
        const ALL_32: u64 = u32::MAX as u64;
        self.dma_addr == u64::MAX || self.dma_addr == ALL_32 && phys % 4096 != ALL_32 % 4096
    }
}

/// A scatter-gather list as `dma_map_sg` prints it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SgMap<'a> {
    /// The device's name.
    pub device: &'a [u8],
    /// Which way the data goes.
    pub dir: Direction,
    /// Entries printed.
    pub nents: u64,
    /// Entries in the list.
    pub full_nents: u64,
    /// DMA segments printed.
    pub ents: u64,
    /// DMA segments that the entries were merged into.
    pub full_ents: u64,
    /// Whether the kernel cut the lists, at 128 entries.
    pub truncated: bool,
    /// Where each DMA segment begins, as the device sees it.
    pub dma_addrs: &'a [u64],
    /// The length of each DMA segment, as many as `dma_addrs`.
    pub sizes: &'a [u64],
    /// The physical address of each entry.
    pub phys_addrs: &'a [u64],
    /// The attributes.
    pub attrs: &'a [u8],
}

/// Who is about to touch a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SyncFor {
    /// The CPU.
    Cpu,
    /// The device.
    Device,
}

/// Whether an allocation's event tells its direction. What `dma_alloc` allocates is for both, whatever is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Told {
    /// It does.
    Told,
    /// It has no such field, as in Linux 6.12.
    Missing,
    /// What stands there cannot be: the kernel has not written the field, as in Linux 6.13 to 6.17.
    Unreadable,
}

/// What an event says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind<'a> {
    /// `dma_map_page`, `dma_map_phys`, `dma_map_resource`.
    Map {
        /// What the device sees.
        region: Region<'a>,
        /// What lies behind it.
        phys: u64,
        /// Whether it is another device's registers rather than memory.
        resource: bool,
    },
    /// `dma_unmap_page`, `dma_unmap_phys`, `dma_unmap_resource`.
    Unmap {
        /// What the device saw.
        region: Region<'a>,
    },
    /// `dma_map_sg`.
    MapSg(SgMap<'a>),
    /// `dma_unmap_sg`: it tells no DMA address and no length.
    UnmapSg {
        /// The device's name.
        device: &'a [u8],
        /// Which way the data went.
        dir: Direction,
        /// The physical address of each entry, the first 128 at most.
        phys_addrs: &'a [u64],
    },
    /// `dma_alloc`, `dma_alloc_pages`, `dma_alloc_sgt`.
    Alloc {
        /// What the device sees.
        region: Region<'a>,
        /// The physical address of each piece; only `dma_alloc_sgt` tells them.
        phys_addrs: &'a [u64],
        /// Whether the direction is told.
        dir: Told,
    },
    /// `dma_free`, `dma_free_pages`, `dma_free_sgt`.
    Free {
        /// What the device saw.
        region: Region<'a>,
    },
    /// `dma_sync_single_for_cpu`, `dma_sync_single_for_device`.
    Sync {
        /// The part of a mapping that changes hands.
        region: Region<'a>,
        /// Whose it becomes.
        target: SyncFor,
    },
    /// `dma_sync_sg_for_cpu`, `dma_sync_sg_for_device`.
    SyncSg {
        /// The device's name.
        device: &'a [u8],
        /// Which way the data goes.
        dir: Direction,
        /// Where each DMA segment begins.
        dma_addrs: &'a [u64],
        /// The length of each, as many as `dma_addrs`.
        sizes: &'a [u64],
        /// Whose they become.
        target: SyncFor,
    },
    /// `iommu:map`, or `intel_iommu:map_single` and its kin: one physically contiguous run, of a domain that it does not name.
    IommuMap {
        /// The device that it is for, where the kernel tells: VT-d's own events do. Else empty.
        device: &'a [u8],
        /// The first I/O virtual address.
        iova: u64,
        /// The first physical address.
        phys: u64,
        /// The length in bytes, whole pages.
        size: u64,
    },
    /// `iommu:unmap`, or `intel_iommu:unmap_single` and its kin.
    IommuUnmap {
        /// The device that it is for, where the kernel tells. Else empty.
        device: &'a [u8],
        /// The first I/O virtual address.
        iova: u64,
        /// How many bytes should go.
        size: u64,
        /// How many bytes went: fewer where the rest was not mapped, none where nothing was, and more where a large page went
        /// as a whole.
        unmapped: u64,
    },
    /// `attach_device_to_domain`: from now on the device's addresses are translated by another domain.
    Attach {
        /// The device's name.
        device: &'a [u8],
    },
    /// A `dma_*` call that failed, and so maps nothing: `dma_map_sg_err`, an allocation without memory.
    Failed,
    /// A known event that maps nothing: an invalidation, a detachment.
    NotMapping,
    /// Any other event.
    Other,
    /// An event that should be known, but whose fields make no sense: it counts as skipped, and its time as any other's.
    Unreadable,
}
