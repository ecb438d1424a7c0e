//! The interface between the C shim and this crate: `include/portcullis.h` in Rust. The test `layout` compares the two.

use core::ffi::c_void;

/// A range of memory, or of device addresses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Segment {
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// Addresses from `first` to `last`, both included.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Range {
    /// The first address.
    pub first: u64,
    /// The last address.
    pub last: u64,
}

/// `struct pc_policy`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Policy {
    /// One of the `PC_STRICT`.. below.
    pub kind: u32,
    /// Strict mappings, too, are copied if they share a page with other data.
    pub ends: u32,
    /// How long unmapped memory may stay open.
    pub window_ns: u64,
    /// The largest mapping that may be copied, in bytes.
    pub threshold: u64,
}

/// `enum pc_policy_kind`.
pub const STRICT: u32 = 0;
/// See [`STRICT`].
pub const LAZY: u32 = 1;
/// See [`STRICT`].
pub const BOUNCE: u32 = 2;
/// See [`STRICT`].
pub const AUTO: u32 = 3;

/// `struct pc_domain_config`.
#[repr(C)]
pub struct DomainConfig {
    /// The argument of `pcs_iommu_*` and `pcs_arm`.
    pub group: *mut c_void,
    /// The first translated address.
    pub first: u64,
    pub last: u64,
    /// A bit for each page size.
    pub page_sizes: u64,
    /// Reserved addresses.
    pub reserved: *const Range,
    /// The number of ranges.
    pub reserved_count: usize,
}

/// `struct pc_device_config`.
#[repr(C)]
pub struct DeviceConfig {
    /// The highest address that the device reaches.
    pub mask: u64,
    /// Low address bits of a buffer that a copy keeps.
    pub offset_mask: u64,
    /// Its protection.
    pub policy: Policy,
    /// Distinguishes the devices of a domain.
    pub number: u32,
    /// Whether it is treated as hostile.
    pub untrusted: u32,
}

/// `struct pc_usage`.
#[repr(C)]
pub struct Usage {
    /// Bytes of copied mappings.
    pub copied_bytes: u64,
    /// Copied mappings.
    pub copies: u64,
    /// Mappings that were not copied.
    pub mapped: u64,
    /// Flushes of the whole domain.
    pub flushes: u64,
    /// Bytes of the drivers' current mappings.
    pub open_bytes: u64,
    /// The drivers' current mappings.
    pub open_mappings: u64,
    /// Other bytes that the device reaches.
    pub exposed_bytes: u64,
    /// Bytes of memory in pools.
    pub pool_bytes: u64,
    /// Bytes of memory for address lists and mapping records.
    pub book_bytes: u64,
    /// Bytes of leaked addresses.
    pub lost_bytes: u64,
}

/// `struct pc_entered`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Entered {
    /// For `pcs_leave`.
    pub flags: usize,
    /// The CPU's number.
    pub cpu: usize,
}

/// Attributes of mappings: registers of a device.
pub const MMIO: u32 = 1;
/// See [`MMIO`].
pub const UNCACHED: u32 = 2;
/// See [`MMIO`].
pub const PRIVILEGED: u32 = 4;
/// The caller syncs.
pub const SKIP_COPY: u32 = 8;
/// Long-lived and never synced.
pub const LASTING: u32 = 16;
/// The result of a map that maps nothing.
pub const MAPPING_ERROR: u64 = u64::MAX;
/// The same, but devices may reach the memory.
pub const MAPPING_STAYS: u64 = u64::MAX - 1;

/// Protection bits of `pcs_iommu_map`: Linux's `IOMMU_READ`.
pub const PROT_READ: i32 = 1;
/// `IOMMU_WRITE`.
pub const PROT_WRITE: i32 = 2;
/// `IOMMU_CACHE`.
pub const PROT_CACHE: i32 = 4;
/// `IOMMU_MMIO`.
pub const PROT_MMIO: i32 = 16;
/// `IOMMU_PRIV`.
pub const PROT_PRIV: i32 = 32;
/// The result of `pcs_iommu_map` when it failed, and a part of it could not be removed again.
pub const STAYS: i32 = 1;

#[allow(missing_docs, reason = "the header says what they do")]
unsafe extern "C" {
    pub fn pcs_alloc(bytes: usize) -> *mut u8;
    pub fn pcs_free(block: *mut u8);
    pub fn pcs_frames_alloc(order: u32) -> u64;
    pub fn pcs_frames_free(phys: u64, order: u32);
    pub fn pcs_enter() -> Entered;
    pub fn pcs_leave(flags: usize);
    pub fn pcs_cpus() -> u32;
    pub fn pcs_now() -> u64;
    pub fn pcs_arm(group: *mut c_void, deadline_ns: u64);
    pub fn pcs_say(text: *const u8, len: usize);
    pub fn pcs_iommu_map(group: *mut c_void, iova: u64, phys: u64, len: u64, prot: i32) -> i32;
    pub fn pcs_iommu_map_list(
        group: *mut c_void,
        iova: u64,
        list: *const Segment,
        count: usize,
        len: u64,
        prot: i32,
    ) -> i32;
    pub fn pcs_iommu_unmap(group: *mut c_void, iova: u64, len: u64, hints: *mut u64) -> u64;
    pub fn pcs_iommu_unmap_now(group: *mut c_void, iova: u64, len: u64) -> u64;
    pub fn pcs_iommu_sync(group: *mut c_void, first: u64, last: u64, hints: u64);
    pub fn pcs_iommu_flush(group: *mut c_void);
}
