//! Layout of the VT-d second-stage page tables.
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, Rev. 4.1
//! (March 2023), section 3.7 "Second-Stage Translation" and section 9.8 "Second-Stage Paging Entries". Bits:
//!
//! ```text
//!  63  62  61      52 51        12 11 10  9  8  7  6  5..3  2  1  0
//!  ign TM  ignored    address      SNP ign D  A  PS IPAT EMT X  W  R
//! ```
//!
//! An entry is present when R or W is set (X counts only where the root enables it; it is left clear). PS
//! turns an entry of level 2 (2 MiB) or level 3 (1 GiB) into a leaf. A level-1 entry is always a leaf and
//! its bit 7 is ignored. EMT and IPAT matter only in scalable mode with memory types, A and D only with
//! access and dirty tracking: they are left clear.

use portcullis::addr::{PageSize, Permissions, PhysAddr};

/// R: a read through this entry is allowed.
pub const READ: u64 = 1 << 0;
/// W: a write through this entry is allowed.
pub const WRITE: u64 = 1 << 1;
/// PS: this level-2 or level-3 entry is a leaf.
pub const PAGE_SIZE: u64 = 1 << 7;
/// The address bits for the largest host address width the format has, 52 bits.
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The highest physical address that an entry can hold the page of.
pub const MAX_PHYS: PhysAddr = PhysAddr::new((1 << 52) - 1);

/// Bits of the address that one level translates.
pub const BITS_PER_LEVEL: u32 = 9;
/// The highest level at which an entry can be a leaf (1 GiB).
pub const MAX_LEAF_LEVEL: u32 = 3;
/// The fewest levels: a 39-bit address space.
pub const MIN_LEVELS: u32 = 3;
/// The most levels: a 57-bit address space.
pub const MAX_LEVELS: u32 = 5;

/// The size of the page that an entry at `level` (1 is the lowest) translates.
pub const fn page_size(level: u32) -> PageSize {
    match PageSize::from_shift(12 + BITS_PER_LEVEL * (level - 1)) {
        Some(size) => size,
        None => panic!("levels are 1 to 5"),
    }
}

/// The index into the table at `level` for the address `iova`.
pub const fn index(iova: u64, level: u32) -> usize {
    (iova >> page_size(level).shift()) as usize & ((1 << BITS_PER_LEVEL) - 1)
}

/// The entry of a table that points to the next lower table at `table`.
pub const fn table_entry(table: PhysAddr) -> u64 {
    table.get() & ADDRESS | READ | WRITE
}

/// The leaf at `level` that translates to the page at `page`.
pub const fn leaf_entry(page: PhysAddr, permissions: Permissions, level: u32) -> u64 {
    let large = if level > 1 { PAGE_SIZE } else { 0 };
    page.get() & ADDRESS | permission_bits(permissions) | large
}

const fn permission_bits(permissions: Permissions) -> u64 {
    let read = if permissions.allows(Permissions::READ) { READ } else { 0 };
    let write = if permissions.allows(Permissions::WRITE) { WRITE } else { 0 };
    read | write
}

/// Whether the hardware follows `entry` at all.
pub const fn is_present(entry: u64) -> bool {
    entry & (READ | WRITE) != 0
}

/// Whether the present `entry` at `level` ends the walk.
pub const fn is_leaf(entry: u64, level: u32) -> bool {
    level == 1 || entry & PAGE_SIZE != 0
}

/// What a present `entry` allows; `None` where it is not present.
pub const fn permissions(entry: u64) -> Option<Permissions> {
    match (entry & READ != 0, entry & WRITE != 0) {
        (false, false) => None,
        (true, false) => Some(Permissions::READ),
        (false, true) => Some(Permissions::WRITE),
        (true, true) => Some(Permissions::READ_WRITE),
    }
}

/// The table or the page that `entry` points to.
pub const fn target(entry: u64) -> PhysAddr {
    PhysAddr::new(entry & ADDRESS)
}
