//! Layout of the x86-64 page tables, which VT-d walks as its first stage.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3A, chapter 4,
//! section "4-Level Paging and 5-Level Paging"; Intel Virtualization Technology for Directed I/O, Architecture
//! Specification, Rev. 4.1 (March 2023), section 3.6 "First-Stage Translation" and section 9.7 "First-Stage
//! Paging Entries". Bits:
//!
//! ```text
//!  63 62      52 51        12 11 10  9   8  7   6  5   4   3   2   1  0
//!  XD  ignored    address      ignored   G  PS  D  A  PCD PWT U/S R/W P
//! ```
//!
//! PS turns an entry of level 2 (2 MiB) or level 3 (1 GiB) into a leaf; bit 7 of a level-1 entry is PAT, which larger
//! leaves have in bit 12.
//!
//! What an entry keeps of the [`Attributes`]:
//! - A present entry can always be read, so a write-only mapping can be read, too.
//! - Memory types are an index into the PAT, of which the power-on layout is assumed: 0 is WB, 2 (PCD) is UC-, 3 (PCD
//!   and PWT) is UC. [`Memory::Uncached`] is UC-, [`Memory::Device`] is UC. The PAT bit is never set. Hardware that
//!   takes no memory types from the first stage ignores all of this.
//! - A privileged mapping has U/S clear. Tables allow everything, so the leaf decides. Hardware keeps privileged
//!   accesses off read-only pages only with WPE set in the PASID-table entry.
//! - XD is set unless execution is allowed. It is reserved unless NXE is set in the PASID-table entry, so NXE must be
//!   set.
//! - Snooping is not kept.
//!
//! A is preset, and D where the page can be written, so hardware has nothing to write back. Bit 10 is "extended
//! accessed" with EAFE set in the PASID-table entry; it is clear, and EAFE must be clear, too.
//!
//! Only the lower half of the canonical addresses is translated. The root keeps its full size: its upper 256 entries
//! must be there, and absent.

use super::Memory;
use super::error::{check, levels_up_to};
use super::format::{Attributes, Entry, Format, LeafSize, ONE_ENTRY};

use crate::addr::{PageSize, Permissions, PhysAddr};
use crate::setup::SetupError;

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const WRITE_THROUGH: u64 = 1 << 3;
const CACHE_DISABLE: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
pub(super) const PAGE_SIZE: u64 = 1 << 7;
const EXECUTE_DISABLE: u64 = 1 << 63;
/// The address bits of the largest physical address width that the format has, 52 bits.
pub(super) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// x86-64, VT-d first stage: 4 or 5 levels for 47 or 56 bits, the lower half of what they could translate.
///
/// ```
/// use portcullis::prelude::*;
/// const TABLES: X86FirstStage = X86FirstStage::five_level();
/// assert_eq!(X86FirstStage::new(5, 3, 52), Ok(TABLES));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct X86FirstStage {
    levels: u32,
    large: u32,
    last_phys: PhysAddr,
}

impl X86FirstStage {
    /// The layout of `levels` levels, with leaves at the lowest `large` levels (1: 4 KiB; 2: and 2 MiB; 3: and 1 GiB),
    /// for hardware with `address_bits` bits of physical addresses, at most 52.
    ///
    /// # Errors
    /// [`SetupError::Levels`], [`SetupError::LeafLevels`], [`SetupError::AddressBits`].
    pub const fn new(levels: u32, large: u32, address_bits: u32) -> Result<Self, SetupError> {
        match check((levels, 4, 5), (large, 3), (address_bits, 52)) {
            Ok(last_phys) => Ok(Self { levels, large, last_phys }),
            Err(error) => Err(error),
        }
    }

    /// Four levels, for 47 bits, with all sizes of pages and 52 bits of physical addresses.
    pub const fn four_level() -> Self {
        Self::of(4)
    }

    /// Five levels, for 56 bits, with all sizes of pages and 52 bits of physical addresses.
    pub const fn five_level() -> Self {
        Self::of(5)
    }

    const fn of(levels: u32) -> Self {
        Self { levels, large: 3, last_phys: PhysAddr::new((1 << 52) - 1) }
    }

    /// The layout without pages larger than `largest`, for hardware without them: Capability Register, FS1GP, bit 56
    /// for 1 GiB (VT-d, section 11.4.2). 4 KiB pages always stay.
    #[must_use]
    pub const fn up_to(self, largest: PageSize) -> Self {
        Self { large: levels_up_to(self.large, largest), ..self }
    }

    /// The FSPM field: bits 131:130 of a scalable-mode PASID-table entry (VT-d, section 9.6). It is 0 for 4 levels and
    /// 1 for 5.
    pub const fn fspm(&self) -> u32 {
        self.levels - 4
    }
}

// SAFETY: 1: pure functions. 2: `decode` takes a table's address out of the bits that `table` put it into, and tells a
// table from a leaf by PS and the level. 3: bit 52 is ignored, and above all addresses. 4 and 5: `new` refuses levels
// and widths that the architecture does not have. 6: the bits are the manual's; the software IOMMU's walker reads them
// independently.
unsafe impl Format for X86FirstStage {
    const GRANULE_SHIFT: u32 = 12;
    const MARK: u64 = 1 << 52;
    const SPLIT: u64 = 1 << 53;
    const PRESENT: u64 = PRESENT;
    const KIND: u64 = PRESENT | PAGE_SIZE;
    /// Sizes may change in place as long as address, rights and memory type stay (SDM, chapter 4, on TLBs).
    const BREAK_BEFORE_MAKE: bool = false;

    fn name(&self) -> &'static str {
        if self.levels == 4 { "x86-4" } else { "x86-5" }
    }

    #[inline]
    fn levels(&self) -> u32 {
        self.levels
    }

    fn input_bits(&self) -> u32 {
        11 + 9 * self.levels
    }

    fn last_phys(&self) -> PhysAddr {
        self.last_phys
    }

    fn leaf_sizes(&self) -> &'static [LeafSize] {
        &ONE_ENTRY[..self.large as usize]
    }

    #[inline]
    fn leaf(&self, page: PhysAddr, size: LeafSize, attributes: Attributes) -> u64 {
        let write = if attributes.permissions.allows(Permissions::WRITE) { WRITE | DIRTY } else { 0 };
        let user = if attributes.privileged { 0 } else { USER };
        let memory = match attributes.memory {
            Memory::WriteBack => 0,
            Memory::Uncached => CACHE_DISABLE,
            Memory::Device => CACHE_DISABLE | WRITE_THROUGH,
        };
        let large = if size.level > 1 { PAGE_SIZE } else { 0 };
        let execute = if attributes.execute { 0 } else { EXECUTE_DISABLE };
        page.get() & ADDRESS | PRESENT | ACCESSED | write | user | memory | large | execute
    }

    #[inline]
    fn table(&self, table: PhysAddr, _level: u32) -> u64 {
        table.get() & ADDRESS | PRESENT | WRITE | USER | ACCESSED
    }

    #[inline]
    fn decode(&self, entry: u64, level: u32) -> Entry {
        decode(entry, PRESENT, level)
    }

    #[inline]
    fn page(&self, entry: u64, level: u32) -> PhysAddr {
        page(entry, level)
    }

    fn attributes(&self, entry: u64, _level: u32) -> Attributes {
        let permissions = if entry & WRITE != 0 { Permissions::READ_WRITE } else { Permissions::READ };
        let memory = match (entry & CACHE_DISABLE != 0, entry & WRITE_THROUGH != 0) {
            (false, _) => Memory::WriteBack,
            (true, false) => Memory::Uncached,
            (true, true) => Memory::Device,
        };
        let (privileged, execute) = (entry & USER == 0, entry & EXECUTE_DISABLE == 0);
        Attributes { memory, privileged, execute, ..permissions.into() }
    }
}

/// The meaning of an entry of either of VT-d's stages, which is present if it has any of the bits `present`.
#[inline]
pub(super) const fn decode(entry: u64, present: u64, level: u32) -> Entry {
    if entry & present == 0 {
        Entry::Absent
    } else if level == 1 || entry & PAGE_SIZE != 0 {
        Entry::Leaf { run: 0 }
    } else {
        Entry::Table { table: PhysAddr::new(entry & ADDRESS), level: level - 1 }
    }
}

/// The page of a leaf of either of VT-d's stages. Below a large page's size lie PAT, in the first stage, and reserved
/// bits.
#[inline]
pub(super) const fn page(entry: u64, level: u32) -> PhysAddr {
    PhysAddr::new(entry & ADDRESS & !((1 << (12 + 9 * (level - 1))) - 1))
}
