//! The events of a trace: one value for each line.
//!
//! An event borrows from its line and from the [`Lists`](crate::parse::Lists) it was parsed into, so it allocates nothing. Names are bytes:
//! the kernel does not promise UTF-8.

pub use portcullis::addr::Direction;

/// One trace event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event<'a> {
    /// Its line, counted from 1.
    pub line: u64,
    /// The CPU that recorded it.
    pub cpu: u32,
    /// Its time stamp in nanoseconds.
    pub time_ns: u64,
    /// What happened.
    pub kind: EventKind<'a>,
}

/// A device and a range of its address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region<'a> {
    /// The device's name, such as `0000:00:03.0`.
    pub device: &'a [u8],
    /// The direction of the data.
    pub dir: Direction,
    /// The first device address.
    pub dma_addr: u64,
    /// The length in bytes.
    pub size: u64,
    /// The attributes, such as `NO_WARN|SKIP_CPU_SYNC`; may be empty.
    pub attrs: &'a [u8],
}

impl Region<'_> {
    /// Whether the address is the kernel's error value for a failed map of the memory at `phys`: all ones, of 64 bits or, if addresses are
    /// narrower, of 32.
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
    /// The direction of the data.
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
    /// Device address of each DMA segment.
    pub dma_addrs: &'a [u64],
    /// The length of each DMA segment, as many as in `dma_addrs`.
    pub sizes: &'a [u64],
    /// The physical address of each entry.
    pub phys_addrs: &'a [u64],
    /// The attributes.
    pub attrs: &'a [u8],
}

/// The new owner of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SyncFor {
    /// The CPU.
    Cpu,
    /// The device.
    Device,
}

/// Whether an allocation's event has its direction. `dma_alloc` always allocates for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Told {
    /// It has.
    Told,
    /// It has no such field, as in Linux 6.12.
    Missing,
    /// The field is invalid: the kernel has not written it, as in Linux 6.13 to 6.17.
    Unreadable,
}

/// The contents of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind<'a> {
    /// `dma_map_page`, `dma_map_phys`, `dma_map_resource`.
    Map {
        /// The device's range.
        region: Region<'a>,
        /// The physical address.
        phys: u64,
        /// Whether it is another device's registers rather than memory.
        resource: bool,
    },
    /// `dma_unmap_page`, `dma_unmap_phys`, `dma_unmap_resource`.
    Unmap {
        /// The device's range.
        region: Region<'a>,
    },
    /// `dma_map_sg`.
    MapSg(SgMap<'a>),
    /// `dma_unmap_sg`: it has neither DMA addresses nor lengths.
    UnmapSg {
        /// The device's name.
        device: &'a [u8],
        /// The direction of the data.
        dir: Direction,
        /// The physical address of each entry, the first 128 at most.
        phys_addrs: &'a [u64],
    },
    /// `dma_alloc`, `dma_alloc_pages`, `dma_alloc_sgt`.
    Alloc {
        /// The device's range.
        region: Region<'a>,
        /// The physical address of each piece; only in `dma_alloc_sgt`.
        phys_addrs: &'a [u64],
        /// Whether the event has the direction.
        dir: Told,
    },
    /// `dma_free`, `dma_free_pages`, `dma_free_sgt`.
    Free {
        /// The device's range.
        region: Region<'a>,
    },
    /// `dma_sync_single_for_cpu`, `dma_sync_single_for_device`.
    Sync {
        /// The synced part of a mapping.
        region: Region<'a>,
        /// Its new owner.
        target: SyncFor,
    },
    /// `dma_sync_sg_for_cpu`, `dma_sync_sg_for_device`.
    SyncSg {
        /// The device's name.
        device: &'a [u8],
        /// The direction of the data.
        dir: Direction,
        /// Device address of each DMA segment.
        dma_addrs: &'a [u64],
        /// The length of each, as many as in `dma_addrs`.
        sizes: &'a [u64],
        /// Their new owner.
        target: SyncFor,
    },
    /// `iommu:map`, or `intel_iommu:map_single` and its kin: one physically contiguous run, in an unnamed domain.
    IommuMap {
        /// The device, if the event names one, as VT-d's own events do; else empty.
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
        /// The device, if the event names one; else empty.
        device: &'a [u8],
        /// The first I/O virtual address.
        iova: u64,
        /// The bytes requested.
        size: u64,
        /// The bytes unmapped: fewer if the rest was not mapped, none if nothing was, and more if a large page was removed as a whole.
        unmapped: u64,
    },
    /// `attach_device_to_domain`: from now on another domain translates the device's addresses.
    Attach {
        /// The device's name.
        device: &'a [u8],
    },
    /// A failed `dma_*` call, which maps nothing: `dma_map_sg_err`, an allocation without memory.
    Failed,
    /// A known event that maps nothing, such as an invalidation or a detach.
    NotMapping,
    /// Any other event.
    Other,
    /// A known event with invalid fields: it counts as skipped, with its time.
    Unreadable,
}
