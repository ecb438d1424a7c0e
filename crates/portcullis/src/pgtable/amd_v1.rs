//! Layout of AMD's I/O page tables for host translations, known as version 1.
//!
//! Source: AMD I/O Virtualization Technology (IOMMU) Specification, publication 48882, Rev. 3.10,
//! section 2.2.3 "I/O Page Tables for Host Translations". Bits:
//!
//! ```text
//!  63  62 61 60 59 58 57 56 52 51        12 11  9 8 7 6 5 4     1  0
//!  ign IW IR FC U   PMC  resvd   address      NL  ign D A ignored  PR
//! ```
//!
//! NL, "next level", is the level of the table to which the entry leads: any level below the entry's, as long as the
//! skipped bits of the I/O virtual address are 0. Two values make a leaf: 0, of the level's own size; 7, of a size
//! between that and the next level's. The address encodes such a size: the bits from 12 up are set
//! below a clear bit, and a page is twice as large as that bit says (clear bit 12: 8 KiB; clear bit 13 above a set bit
//! 12: 16 KiB). All entries of such a page are the same.
//!
//! What an entry keeps of the [`Attributes`]: IR and IW are the permissions; tables always have both set, as hardware
//! requires. FC, which makes accesses coherent whatever the device says, is [`Attributes::snoop`]. Memory types,
//! privilege and execution are not kept. A and D matter only where the device-table entry turns them on, U (for ATS)
//! and PMC (page migration) are not used: all are clear.

use super::error::check;
use super::format::{Attributes, Entry, Format, Layout, LeafSize};

use crate::addr::{Permissions, PhysAddr};
use crate::broken::broken;
use crate::setup::SetupError;

const PRESENT: u64 = 1 << 0;
const NEXT_LEVEL: u64 = 7 << 9;
const NEXT_LEVEL_SHIFT: u32 = 9;
/// [`NEXT_LEVEL`] of a leaf whose address holds its size.
const SIZE_IN_ADDRESS: u64 = 7 << NEXT_LEVEL_SHIFT;
const FORCE_COHERENT: u64 = 1 << 60;
const READ: u64 = 1 << 61;
const WRITE: u64 = 1 << 62;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Each level has its own size and eight more above it.
const SIZES_PER_LEVEL: usize = 9;

/// Lowest levels that may have leaves. Hardware has a bug with pages of 512 GiB, so Linux masks that size
/// (`drivers/iommu/amd`, `AMD_IOMMU_PGSIZES`), and this layout does not offer it.
const LEAF_LEVELS: usize = 3;

static SIZES: [LeafSize; LEAF_LEVELS * SIZES_PER_LEVEL] = {
    let mut sizes = [LeafSize { level: 1, run: 0 }; LEAF_LEVELS * SIZES_PER_LEVEL];
    let mut index = 0;
    while index < LEAF_LEVELS * SIZES_PER_LEVEL {
        let (level, run) = (index / SIZES_PER_LEVEL + 1, index % SIZES_PER_LEVEL);
        sizes[index] = LeafSize { level: level as u32, run: run as u32 };
        index += 1;
    }
    sizes
};

/// AMD's host tables: 1 to 6 levels for 12 bits and 9 for each level, but 63 for 6 levels. (They could translate all 64
/// bits, but an [`IovaRange`](crate::addr::IovaRange) cannot hold as much.)
///
/// ```
/// use portcullis::prelude::*;
/// const TABLES: AmdV1 = AmdV1::four_level();
/// assert_eq!(AmdV1::new(4, 3, 52), Ok(TABLES));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AmdV1 {
    levels: u32,
    large: u32,
    last_phys: PhysAddr,
}

impl AmdV1 {
    /// The layout of `levels` levels, with leaves at the lowest `large` levels (1: every power of two from 4 KiB to 1
    /// MiB; 2: and to 512 MiB; 3: and to 256 GiB), for hardware with `address_bits` bits of physical addresses, at most
    /// 52. The root has only leaves of one entry, as contiguous PTEs are split by replacing their table, and the root
    /// cannot be replaced. So if all of 1, 2 or 3 levels have leaves, the largest is 4 KiB, 2 MiB or 1 GiB.
    ///
    /// # Errors
    /// [`SetupError::Levels`], [`SetupError::LeafLevels`], [`SetupError::AddressBits`].
    pub const fn new(levels: u32, large: u32, address_bits: u32) -> Result<Self, SetupError> {
        match check((levels, 1, 6), (large, if levels < 3 { levels } else { 3 }), (address_bits, 52)) {
            Ok(last_phys) => Ok(Self { levels, large, last_phys }),
            Err(error) => Err(error),
        }
    }

    /// Four levels, for 48 bits, with pages of every power of two from 4 KiB to 256 GiB and 52 bits of physical
    /// addresses.
    pub const fn four_level() -> Self {
        Self::of(4)
    }

    /// Five levels, for 57 bits, with the pages of [`four_level`](Self::four_level).
    pub const fn five_level() -> Self {
        Self::of(5)
    }

    const fn of(levels: u32) -> Self {
        Self { levels, large: LEAF_LEVELS as u32, last_phys: PhysAddr::new((1 << 52) - 1) }
    }

    /// The Mode field: bits 11:9 of a device table entry (section 2.2.2 "Device Table"), the number of levels.
    pub const fn mode(&self) -> u32 {
        self.levels
    }

    /// The binary logarithm of the size of the leaf to which `entry` of a table of `level` belongs.
    #[inline]
    fn leaf_shift(&self, entry: u64, level: u32) -> u32 {
        if entry & NEXT_LEVEL == SIZE_IN_ADDRESS {
            // Bit 52 stops the search if all address bits are set, which is invalid.
            13 + ((!entry & ADDRESS | 1 << 52) >> 12).trailing_zeros()
        } else {
            self.shift(level)
        }
    }
}

// SAFETY: 1: pure functions. 2: `decode` takes a table's address out of the bits that `table` put it into, and tells a
// table from a leaf by NL. 3: hardware ignores bit 1 in a table's entry, and addresses begin above it. 4 and 5: `new`
// refuses levels and widths that the architecture does not have. 6: the bits are the manual's; the software IOMMU's
// walker reads them independently.
unsafe impl Format for AmdV1 {
    const GRANULE_SHIFT: u32 = 12;
    /// One of bits 4:1, which are ignored in tables' entries.
    const MARK: u64 = 1 << 1;
    const SPLIT: u64 = 1 << 2;
    const PRESENT: u64 = PRESENT;
    const KIND: u64 = PRESENT | NEXT_LEVEL;
    /// One store may change the size of a page: the manual only asks for an invalidation after it. (Contiguous PTEs
    /// must be the same at all times, so their table is replaced.)
    const BREAK_BEFORE_MAKE: bool = false;

    fn name(&self) -> &'static str {
        "amd-v1"
    }

    #[inline]
    fn levels(&self) -> u32 {
        self.levels
    }

    fn input_bits(&self) -> u32 {
        (12 + 9 * self.levels).min(63)
    }

    fn last_phys(&self) -> PhysAddr {
        self.last_phys
    }

    fn leaf_sizes(&self) -> &'static [LeafSize] {
        let larger = if self.large == self.levels { SIZES_PER_LEVEL - 1 } else { 0 };
        &SIZES[..self.large as usize * SIZES_PER_LEVEL - larger]
    }

    #[inline]
    fn leaf(&self, page: PhysAddr, size: LeafSize, attributes: Attributes) -> u64 {
        let read = if attributes.permissions.allows(Permissions::READ) { READ } else { 0 };
        let write = if attributes.permissions.allows(Permissions::WRITE) { WRITE } else { 0 };
        let coherent = if attributes.snoop { FORCE_COHERENT } else { 0 };
        let larger = if size.run == 0 {
            0
        } else {
            SIZE_IN_ADDRESS | ((1 << (self.shift(size.level) + size.run - 1)) - (1 << 12))
        };
        page.get() & ADDRESS | PRESENT | read | write | coherent | larger
    }

    #[inline]
    fn stride(&self, size: LeafSize) -> u64 {
        if size.run == 0 { 1 << self.shift(size.level) } else { 0 }
    }

    #[inline]
    fn table(&self, table: PhysAddr, level: u32) -> u64 {
        table.get() & ADDRESS | PRESENT | READ | WRITE | u64::from(level) << NEXT_LEVEL_SHIFT
    }

    #[inline]
    fn decode(&self, entry: u64, level: u32) -> Entry {
        let next = ((entry & NEXT_LEVEL) >> NEXT_LEVEL_SHIFT) as u32;
        if entry & PRESENT == 0 {
            Entry::Absent
        } else if next == 0 {
            Entry::Leaf { run: 0 }
        } else if next < level {
            Entry::Table { table: PhysAddr::new(entry & ADDRESS), level: next }
        } else if next == 7 {
            Entry::Leaf { run: self.leaf_shift(entry, level).saturating_sub(self.shift(level)) }
        } else {
            // A walk never leads upwards: hardware reports an error here.
            Entry::Absent
        }
    }

    #[inline]
    fn page(&self, entry: u64, level: u32) -> PhysAddr {
        PhysAddr::new(entry & ADDRESS & !((1 << self.leaf_shift(entry, level)) - 1))
    }

    fn attributes(&self, entry: u64, _level: u32) -> Attributes {
        let permissions = Permissions::of(entry & READ != 0, entry & WRITE != 0)
            .unwrap_or_else(|| broken("a leaf allows something"));
        Attributes { snoop: entry & FORCE_COHERENT != 0, ..permissions.into() }
    }
}
