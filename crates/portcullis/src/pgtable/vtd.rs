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
//! An entry is present when R or W is set (X counts only where the root enables it, and is clear). PS turns an entry of
//! level 2 (2 MiB) or level 3 (1 GiB) into a leaf. A level-1 entry is always a leaf and its bit 7 is ignored. EMT and
//! IPAT matter only in scalable mode with memory types, A and D only with access and dirty tracking: all are clear. SNP
//! keeps [`Attributes::snoop`] if hardware has [snoop control](VtdSecondStage::with_snoop_control); elsewhere the bit
//! is reserved, and hardware faults on it, so snooping is not kept. Nor are privilege, execution and memory types.

use super::error::{check, levels_up_to};
use super::format::{Attributes, Entry, Format, LeafSize, ONE_ENTRY};
use super::x86::{ADDRESS, PAGE_SIZE, decode, page};

use crate::addr::{PageSize, Permissions, PhysAddr};
use crate::broken::broken;
use crate::setup::SetupError;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const SNOOP: u64 = 1 << 11;

/// VT-d second stage: 3, 4 or 5 levels for 39, 48 or 57 bits.
///
/// ```
/// use portcullis::prelude::*;
/// const TABLES: VtdSecondStage = VtdSecondStage::four_level();
/// assert_eq!(VtdSecondStage::new(4, 3, 52), Ok(TABLES));
/// // For hardware without pages of 1 GiB.
/// assert_eq!(VtdSecondStage::new(4, 2, 52), Ok(TABLES.up_to(portcullis::addr::PageSize::SIZE_2M)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VtdSecondStage {
    levels: u32,
    large: u32,
    last_phys: PhysAddr,
    /// SNP, or 0 if hardware has no snoop control.
    snoop: u64,
}

impl VtdSecondStage {
    /// The layout of `levels` levels, with leaves at the lowest `large` levels (1: 4 KiB; 2: and 2 MiB; 3: and 1 GiB),
    /// for hardware with `address_bits` bits of physical addresses, at most 52.
    ///
    /// # Errors
    /// [`SetupError::Levels`], [`SetupError::LeafLevels`], [`SetupError::AddressBits`].
    pub const fn new(levels: u32, large: u32, address_bits: u32) -> Result<Self, SetupError> {
        match check((levels, 3, 5), (large, 3), (address_bits, 52)) {
            Ok(last_phys) => Ok(Self { levels, large, last_phys, snoop: 0 }),
            Err(error) => Err(error),
        }
    }

    /// Three levels, for 39 bits, with all sizes of pages and 52 bits of physical addresses.
    pub const fn three_level() -> Self {
        Self::of(3)
    }

    /// Four levels, for 48 bits, with all sizes of pages and 52 bits of physical addresses.
    pub const fn four_level() -> Self {
        Self::of(4)
    }

    /// Five levels, for 57 bits, with all sizes of pages and 52 bits of physical addresses.
    pub const fn five_level() -> Self {
        Self::of(5)
    }

    const fn of(levels: u32) -> Self {
        Self { levels, large: 3, last_phys: PhysAddr::new((1 << 52) - 1), snoop: 0 }
    }

    /// The layout without pages larger than `largest`, for hardware without them: Capability Register, SSLPS, bit 34
    /// for 2 MiB and bit 35 for 1 GiB (section 11.4.2). 4 KiB pages always stay.
    #[must_use]
    pub const fn up_to(self, largest: PageSize) -> Self {
        Self { large: levels_up_to(self.large, largest), ..self }
    }

    /// The AW field: bits 66:64 of a context entry (section 9.3 "Context Entry"), bits 4:2 of a scalable-mode
    /// PASID-table entry (section 9.6). It is 1, 2 or 3 for 3, 4 or 5 levels, and hardware has it if that bit of SAGAW
    /// is set in the Capability Register (bits 12:8, section 11.4.2).
    pub const fn aw(&self) -> u32 {
        self.levels - 2
    }

    /// The layout for hardware with or without snoop control (Extended Capability Register, bit SC). With it,
    /// [`Attributes::snoop`] is kept.
    #[must_use]
    pub const fn with_snoop_control(self, supported: bool) -> Self {
        Self { snoop: if supported { SNOOP } else { 0 }, ..self }
    }
}

// SAFETY: 1: pure functions. 2: `decode` takes a table's address out of the bits that `table` put it into, and tells a
// table from a leaf by PS and the level. 3: bit 52 is ignored, and above all addresses. 4 and 5: `new` refuses levels
// and widths that the architecture does not have. 6: the bits are the manual's; the software IOMMU's walker reads them
// independently.
unsafe impl Format for VtdSecondStage {
    const GRANULE_SHIFT: u32 = 12;
    const MARK: u64 = 1 << 52;
    const SPLIT: u64 = 1 << 53;
    const PRESENT: u64 = READ | WRITE;
    const KIND: u64 = READ | WRITE | PAGE_SIZE;
    const BREAK_BEFORE_MAKE: bool = false;

    fn name(&self) -> &'static str {
        "vtd-ss"
    }

    #[inline]
    fn levels(&self) -> u32 {
        self.levels
    }

    fn input_bits(&self) -> u32 {
        12 + 9 * self.levels
    }

    fn last_phys(&self) -> PhysAddr {
        self.last_phys
    }

    fn leaf_sizes(&self) -> &'static [LeafSize] {
        &ONE_ENTRY[..self.large as usize]
    }

    #[inline]
    fn leaf(&self, page: PhysAddr, size: LeafSize, attributes: Attributes) -> u64 {
        let read = if attributes.permissions.allows(Permissions::READ) { READ } else { 0 };
        let write = if attributes.permissions.allows(Permissions::WRITE) { WRITE } else { 0 };
        let large = if size.level > 1 { PAGE_SIZE } else { 0 };
        let snoop = if attributes.snoop { self.snoop } else { 0 };
        page.get() & ADDRESS | read | write | large | snoop
    }

    #[inline]
    fn table(&self, table: PhysAddr, _level: u32) -> u64 {
        table.get() & ADDRESS | READ | WRITE
    }

    #[inline]
    fn decode(&self, entry: u64, level: u32) -> Entry {
        decode(entry, READ | WRITE, level)
    }

    fn page(&self, entry: u64, level: u32) -> PhysAddr {
        page(entry, level)
    }

    fn attributes(&self, entry: u64, _level: u32) -> Attributes {
        let permissions = Permissions::of(entry & READ != 0, entry & WRITE != 0)
            .unwrap_or_else(|| broken("a leaf allows something"));
        Attributes { snoop: entry & SNOOP != 0, ..permissions.into() }
    }
}
