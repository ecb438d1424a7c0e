//! Layouts of the RISC-V page tables, of both stages.
//!
//! Source: The RISC-V Instruction Set Manual, volume II: Privileged Architecture, version 20240411, sections
//! "Sv39", "Sv48" and "Sv57" of the chapter on the supervisor level, section "Two-Stage Address Translation" of
//! the one on the hypervisor extension, and the chapter on Svpbmt; RISC-V IOMMU Architecture Specification,
//! version 1.0, whose tables these are. Bits:
//!
//! ```text
//!  63 62  61 60    54 53                  10 9   8 7 6 5 4 3 2 1 0
//!  N   PBMT  reserved  physical page number   RSW  D A G U X W R V
//! ```
//!
//! The page number is that of 4 KiB pages, whatever the leaf's size. An entry with R, W and X clear leads to a table;
//! D, A, U, PBMT and N are reserved there. RSW is software's in every entry.
//!
//! What an entry keeps of the [`Attributes`]:
//! - W without R is reserved, so a write-only mapping can be read, too.
//! - Memory types are PBMT: NC for [`Memory::Uncached`], IO for [`Memory::Device`], and none for [`Memory::WriteBack`],
//!   which leaves the platform's memory type. NC and IO need hardware with Svpbmt; without it the bits are reserved,
//!   and such a mapping faults.
//! - In the first stage, a privileged mapping has U clear; privileged accesses do not reach the others unless the
//!   process context sets SUM. In the second stage every access counts as one of user mode: U is always set, and
//!   privilege is not kept.
//! - X is execution. Snooping is not kept.
//!
//! A is preset, and D where the page can be written, so hardware has nothing to write back or to fault on. N, for 64
//! KiB pages of 16 contiguous PTEs (Svnapot), is not used, and neither is G.
//!
//! In the first stage addresses are sign-extended, and only the positive half is translated: the upper half of the root
//! must be there, and absent. The second stage's root has four times the entries of other tables and is aligned to its
//! 16 KiB.

use super::Memory;
use super::error::check;
use super::format::{Attributes, Entry, Format, LeafSize, ONE_ENTRY};

use crate::addr::{Permissions, PhysAddr};
use crate::setup::SetupError;

const VALID: u64 = 1 << 0;
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const EXECUTE: u64 = 1 << 3;
const USER: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
const MEMORY: u64 = 3 << 61;
const MEMORY_NC: u64 = 1 << 61;
const MEMORY_IO: u64 = 2 << 61;
const NUMBER: u64 = 0x003f_ffff_ffff_fc00;
/// An address lies this much further left than the page number in an entry.
const NUMBER_SHIFT: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Sv39,
    Sv48,
    Sv57,
    Sv39x4,
    Sv48x4,
}

/// RISC-V: 3, 4 or 5 levels of first-stage tables, 3 or 4 of second-stage ones.
///
/// ```
/// use portcullis::prelude::*;
/// const TABLES: Riscv = Riscv::sv48();
/// // For hardware without pages larger than 1 GiB.
/// const UP_TO_1G: Result<Riscv, SetupError> = TABLES.within(3, 56);
/// assert!(UP_TO_1G.is_ok_and(|tables| tables.mode() == TABLES.mode()));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Riscv {
    mode: Mode,
    levels: u32,
    large: u32,
    last_phys: PhysAddr,
}

impl Riscv {
    /// First stage, 3 levels, for 38 bits: leaves at every level, and 56 bits of physical addresses, which
    /// [`within`](Self::within) can limit.
    pub const fn sv39() -> Self {
        Self::of(Mode::Sv39)
    }

    /// First stage, 4 levels, for 47 bits; the rest as [`sv39`](Self::sv39).
    pub const fn sv48() -> Self {
        Self::of(Mode::Sv48)
    }

    /// First stage, 5 levels, for 56 bits; the rest as [`sv39`](Self::sv39).
    pub const fn sv57() -> Self {
        Self::of(Mode::Sv57)
    }

    /// Second stage, 3 levels, for 41 bits; the rest as [`sv39`](Self::sv39).
    pub const fn sv39x4() -> Self {
        Self::of(Mode::Sv39x4)
    }

    /// Second stage, 4 levels, for 50 bits; the rest as [`sv39`](Self::sv39).
    pub const fn sv48x4() -> Self {
        Self::of(Mode::Sv48x4)
    }

    const fn of(mode: Mode) -> Self {
        let levels = match mode {
            Mode::Sv39 | Mode::Sv39x4 => 3,
            Mode::Sv48 | Mode::Sv48x4 => 4,
            Mode::Sv57 => 5,
        };
        Self { mode, levels, large: levels, last_phys: PhysAddr::new((1 << 56) - 1) }
    }

    /// The layout with leaves at the lowest `large` levels (1: 4 KiB; 2: and 2 MiB; 3: and 1 GiB; 4: and 512 GiB; 5:
    /// and 256 TiB), for hardware with `address_bits` bits of physical addresses, at least 12 and at most 56.
    ///
    /// # Errors
    /// [`SetupError::LeafLevels`], [`SetupError::AddressBits`].
    pub const fn within(self, large: u32, address_bits: u32) -> Result<Self, SetupError> {
        match check((self.levels, 3, 5), (large, self.levels), (address_bits, 56)) {
            Ok(last_phys) => Ok(Self { large, last_phys, ..self }),
            Err(error) => Err(error),
        }
    }

    /// The MODE field: bits 63:60 of `iosatp`, for the first stage (fields `fsc` of a device context and of a process
    /// context), or of `iohgatp`, for the second (RISC-V IOMMU Architecture Specification, "Device-context fields").
    /// The numbers are those of `satp` and `hgatp` in the Privileged Architecture.
    pub const fn mode(&self) -> u32 {
        match self.mode {
            Mode::Sv39 | Mode::Sv39x4 => 8,
            Mode::Sv48 | Mode::Sv48x4 => 9,
            Mode::Sv57 => 10,
        }
    }

    /// Whether the tables are of the second stage.
    #[inline]
    pub const fn is_second_stage(&self) -> bool {
        matches!(self.mode, Mode::Sv39x4 | Mode::Sv48x4)
    }
}

// SAFETY: 1: pure functions. 2: `decode` takes a table's address out of the bits that `table` put it into, and tells a
// table from a leaf by R, W and X. 3: bit 8 is RSW, outside of the page number. 4 and 5: each mode is the
// architecture's, and `within` refuses other levels and widths. 6: the bits are the manual's; the software IOMMU's
// walker reads them independently.
unsafe impl Format for Riscv {
    const GRANULE_SHIFT: u32 = 12;
    /// RSW, which hardware ignores in leaves and in tables' entries alike.
    const MARK: u64 = 1 << 8;
    const SPLIT: u64 = 1 << 9;
    const PRESENT: u64 = VALID;
    const KIND: u64 = VALID | READ | WRITE | EXECUTE;
    /// Until the invalidation, hardware may use either the old or the new entry, and nothing else.
    const BREAK_BEFORE_MAKE: bool = false;

    fn name(&self) -> &'static str {
        match self.mode {
            Mode::Sv39 => "riscv-sv39",
            Mode::Sv48 => "riscv-sv48",
            Mode::Sv57 => "riscv-sv57",
            Mode::Sv39x4 => "riscv-sv39x4",
            Mode::Sv48x4 => "riscv-sv48x4",
        }
    }

    #[inline]
    fn levels(&self) -> u32 {
        self.levels
    }

    fn input_bits(&self) -> u32 {
        // In the first stage one bit less than the tables could translate; in the second two more than with a root of
        // the usual size.
        12 + 9 * self.levels + 2 * u32::from(self.is_second_stage()) - u32::from(!self.is_second_stage())
    }

    fn last_phys(&self) -> PhysAddr {
        self.last_phys
    }

    fn leaf_sizes(&self) -> &'static [LeafSize] {
        &ONE_ENTRY[..self.large as usize]
    }

    #[inline]
    fn leaf(&self, page: PhysAddr, _size: LeafSize, attributes: Attributes) -> u64 {
        let write = if attributes.permissions.allows(Permissions::WRITE) { WRITE | DIRTY } else { 0 };
        let execute = if attributes.execute { EXECUTE } else { 0 };
        let user = if attributes.privileged && !self.is_second_stage() { 0 } else { USER };
        let memory = match attributes.memory {
            Memory::WriteBack => 0,
            Memory::Uncached => MEMORY_NC,
            Memory::Device => MEMORY_IO,
        };
        page.get() >> NUMBER_SHIFT & NUMBER | VALID | READ | ACCESSED | write | execute | user | memory
    }

    #[inline]
    fn stride(&self, size: LeafSize) -> u64 {
        1 << (10 + 9 * (size.level - 1))
    }

    #[inline]
    fn table(&self, table: PhysAddr, _level: u32) -> u64 {
        table.get() >> NUMBER_SHIFT & NUMBER | VALID
    }

    #[inline]
    fn decode(&self, entry: u64, level: u32) -> Entry {
        if entry & VALID == 0 {
            Entry::Absent
        } else if entry & (READ | EXECUTE) != 0 {
            Entry::Leaf { run: 0 }
        } else if entry & WRITE == 0 && level > 1 {
            Entry::Table { table: PhysAddr::new((entry & NUMBER) << NUMBER_SHIFT), level: level - 1 }
        } else {
            Entry::Absent
        }
    }

    #[inline]
    fn page(&self, entry: u64, level: u32) -> PhysAddr {
        // The bits below a large page's size are reserved, and 0.
        PhysAddr::new((entry & NUMBER) << NUMBER_SHIFT & !((1 << (12 + 9 * (level - 1))) - 1))
    }

    fn attributes(&self, entry: u64, _level: u32) -> Attributes {
        let permissions = if entry & WRITE != 0 { Permissions::READ_WRITE } else { Permissions::READ };
        let memory = match entry & MEMORY {
            MEMORY_NC => Memory::Uncached,
            MEMORY_IO => Memory::Device,
            _ => Memory::WriteBack,
        };
        let (privileged, execute) = (entry & USER == 0, entry & EXECUTE != 0);
        Attributes { memory, privileged, execute, ..permissions.into() }
    }
}
