//! Layouts of the Arm VMSAv8-64 page tables (LPAE's long descriptors), of both stages and all three granules.
//!
//! Source: Arm Architecture Reference Manual for A-profile, DDI 0487, chapter D8 "The AArch64 Virtual Memory
//! System Architecture", sections on the descriptor formats and on memory attributes; Arm System Memory
//! Management Unit Architecture Specification, version 3, IHI 0070, which uses them unchanged. Bits:
//!
//! ```text
//!              63   59 58 55 54  53  52   51  50 48 47  16 15 12 11 10 9 8 7 6   5  4      2 1 0
//!  leaf, st. 1 ignored  sw   UXN PXN cont DBM  res0 address high  nG AF SH  AP   NS AttrIndx T V
//!  leaf, st. 2 ignored  sw   XN  0   cont DBM  res0 address high  0  AF SH  S2AP MemAttr     T V
//!  table       limits   ignored                res0 address high  ignored                    1 V
//! ```
//!
//! Levels count from the leaves here: 1 is the manual's level 3. T is 1 for tables and, at level 1, for pages; it is 0
//! for blocks, which only higher levels have. With the 4 KiB granule bits 15:12 are address bits, too, and with the 16
//! KiB granule bits 15:14; with the 64 KiB granule bits 15:12 hold bits 51:48 of an address. The *contiguous* bit says
//! that an aligned run of entries (4 KiB granule: 16; 16 KiB: 128 at level 1, 32 at level 2; 64 KiB: 32) translates one
//! piece of memory; each entry still holds its own address.
//!
//! What stage 1, as a stream of the EL1 regime uses it, keeps of the [`Attributes`]:
//! - A page can always be read, so a write-only mapping can be read, too.
//! - Memory types are an index into MAIR, which must be [`ARM_MAIR`].
//! - AP\[1\] is set unless the mapping is privileged.
//! - UXN and PXN are set unless execution is allowed; a privileged mapping keeps UXN.
//! - nG is set: a translation belongs to one address space.
//!
//! And stage 2:
//! - S2AP has one bit each for reading and for writing.
//! - MemAttr holds the memory type, in the encoding for S2FWB = 0.
//! - XN is set unless execution is allowed. Privilege is not kept.
//!
//! In both, ordinary cached memory is inner shareable and the rest outer shareable, AF is preset, DBM is not used, and
//! [`Attributes::snoop`] is not kept.
//!
//! With physical addresses wider than 48 bits, neighbouring entries differ by the [stride](Format::stride) only if no
//! multiple of 2^48 lies between their pages.

use super::Memory;
use super::format::{Attributes, Entry, Format, Layout, LeafSize, size};

use crate::addr::{Permissions, PhysAddr};
use crate::broken::broken;
use crate::setup::SetupError;

/// The value of MAIR that stage-1 tables need: attribute 0 is ordinary memory, not cached (0x44), 1 is ordinary memory,
/// cached (write-back, allocating: 0xff), 2 is a device's (Device-nGnRE: 0x04).
pub const ARM_MAIR: u64 = 0x0004_ff44;

const VALID: u64 = 1 << 0;
/// With [`VALID`]: the entry of a table, or of a page of the lowest level.
const TABLE: u64 = 1 << 1;
/// MemAttr of stage 2; AttrIndx of stage 1 with NS, which is clear.
const MEMORY: u64 = 0xf << 2;
const S1_USER: u64 = 1 << 6;
const S1_READ_ONLY: u64 = 1 << 7;
const S2_READ: u64 = 1 << 6;
const S2_WRITE: u64 = 1 << 7;
const OUTER_SHAREABLE: u64 = 2 << 8;
const INNER_SHAREABLE: u64 = 3 << 8;
const ACCESSED: u64 = 1 << 10;
const S1_NOT_GLOBAL: u64 = 1 << 11;
const CONTIGUOUS: u64 = 1 << 52;
const S1_PRIVILEGED_NO_EXECUTE: u64 = 1 << 53;
const S1_USER_NO_EXECUTE: u64 = 1 << 54;
const S2_NO_EXECUTE: u64 = 1 << 54;

static SIZES_4K: [LeafSize; 6] = [size(1, 0), size(1, 4), size(2, 0), size(2, 4), size(3, 0), size(3, 4)];
static SIZES_16K: [LeafSize; 4] = [size(1, 0), size(1, 7), size(2, 0), size(2, 5)];
static SIZES_64K: [LeafSize; 4] = [size(1, 0), size(1, 5), size(2, 0), size(2, 5)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// From a process's or a kernel's addresses.
    One,
    /// From a virtual machine's addresses.
    Two,
}

/// VMSAv8-64 with pages of 2^`GRANULE` bytes: 12, 14 or 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arm<const GRANULE: u32> {
    stage: Stage,
    levels: u32,
    input_bits: u32,
    sizes: usize,
    last_phys: PhysAddr,
}

impl<const GRANULE: u32> Arm<GRANULE> {
    /// Stage-1 tables for `input_bits` bits, at least 25, and hardware with `address_bits` bits of physical addresses,
    /// at least 32. Both are at most 48, or 52 with the 64 KiB granule. As few levels as possible, but at least two
    /// with the 4 KiB granule.
    ///
    /// # Errors
    /// [`SetupError::AddressBits`], for the physical bits, or else for the bits to be translated.
    pub const fn stage_1(input_bits: u32, address_bits: u32) -> Result<Self, SetupError> {
        Self::new(Stage::One, input_bits, address_bits, address_bits)
    }

    /// As [`stage_1`](Self::stage_1), of stage 2, which translates no more bits than there are physical ones
    /// (exceptions: [`stage_2_with_ias`](Self::stage_2_with_ias)). The root may be up to 16 concatenated tables, where
    /// that saves a level.
    pub const fn stage_2(input_bits: u32, address_bits: u32) -> Result<Self, SetupError> {
        Self::new(Stage::Two, input_bits, address_bits, address_bits)
    }

    /// As [`stage_2`](Self::stage_2), for an SMMU whose intermediate addresses have more bits, `ias`, than the physical
    /// ones: one that also walks AArch32's long-descriptor tables has at least 40 (SMMUv3, IHI 0070, on address sizes:
    /// IAS is the larger of 40 and OAS if bit 0 of `SMMU_IDR0.TTF` is set, and OAS elsewhere). `input_bits` is at most
    /// `address_bits`, or `ias` up to 40 if that is more.
    pub const fn stage_2_with_ias(input_bits: u32, address_bits: u32, ias: u32) -> Result<Self, SetupError> {
        Self::new(Stage::Two, input_bits, address_bits, ias)
    }

    const fn new(stage: Stage, input_bits: u32, address_bits: u32, ias: u32) -> Result<Self, SetupError> {
        const { assert!(GRANULE == 12 || GRANULE == 14 || GRANULE == 16, "granules are 4, 16 and 64 KiB") };
        let most = if GRANULE == 16 { 52 } else { 48 };
        if address_bits < 32 || address_bits > most {
            return Err(SetupError::AddressBits { bits: address_bits, min: 32, max: most });
        }
        // In stage 2, a root of concatenated tables translates up to `concatenated` bits more, which can save a level.
        let (max, concatenated) = match stage {
            Stage::One => (most, 0),
            Stage::Two if ias <= address_bits || address_bits > 40 => (address_bits, 4),
            Stage::Two => (if ias < 40 { ias } else { 40 }, 4),
        };
        if input_bits < 25 || input_bits > max {
            return Err(SetupError::AddressBits { bits: input_bits, min: 25, max });
        }
        let mut levels = (input_bits - GRANULE - concatenated).div_ceil(GRANULE - 3);
        if GRANULE == 12 && levels < 2 {
            levels = 2;
        }
        let list = Self::all_sizes();
        let mut sizes = 1;
        while sizes < list.len()
            && list[sizes].level <= levels
            && GRANULE + (GRANULE - 3) * (list[sizes].level - 1) + list[sizes].run <= input_bits
        {
            sizes += 1;
        }
        Ok(Self { stage, levels, input_bits, sizes, last_phys: PhysAddr::new((1 << address_bits) - 1) })
    }

    /// T0SZ, 64 less the bits that are translated: in stage 1 CD.T0SZ (SMMUv3, IHI 0070, section 5.4 "Context
    /// Descriptor") or `TCR_EL1`.T0SZ, in stage 2 STE.S2T0SZ (section 5.2 "Stream Table Entry") or `VTCR_EL2`.T0SZ.
    pub const fn t0sz(&self) -> u32 {
        64 - self.input_bits
    }

    /// The granule's code: in stage 1 CD.TG0, in stage 2 STE.S2TG (the same sections of IHI 0070; TG0 of `TCR_EL1` and
    /// of `VTCR_EL2`). 0 stands for 4 KiB, 1 for 64 KiB, 2 for 16 KiB.
    pub const fn tg0(&self) -> u32 {
        match GRANULE {
            12 => 0,
            14 => 2,
            _ => 1,
        }
    }

    /// The level at which hardware starts the walk of stage 2, as STE.S2SL0 and `VTCR_EL2`.SL0 give it; `None` in stage
    /// 1, where T0SZ alone decides. With the 4 KiB granule 0 stands for the manual's level 2, with the others for its
    /// level 3; each more starts one level higher (DDI 0487, section D8.2 "Translation process").
    pub const fn sl0(&self) -> Option<u32> {
        match self.stage {
            Stage::One => None,
            Stage::Two if GRANULE == 12 => Some(self.levels - 2),
            Stage::Two => Some(self.levels - 1),
        }
    }

    /// The code of the smallest size of physical addresses that holds all of the layout's: in stage 1 CD.IPS, in stage
    /// 2 STE.S2PS (the same sections of IHI 0070; `TCR_EL1`.IPS and `VTCR_EL2`.PS). 0 to 6 stand for 32, 36, 40, 42,
    /// 44, 48 and 52 bits. Hardware may be given any larger one that it has.
    pub const fn ps(&self) -> u32 {
        match u64::BITS - self.last_phys.get().leading_zeros() {
            ..=32 => 0,
            33..=36 => 1,
            37..=40 => 2,
            41..=42 => 3,
            43..=44 => 4,
            45..=48 => 5,
            _ => 6,
        }
    }

    /// Whether the tables are of stage 2.
    pub const fn is_stage_2(&self) -> bool {
        matches!(self.stage, Stage::Two)
    }

    const fn all_sizes() -> &'static [LeafSize] {
        match GRANULE {
            12 => &SIZES_4K,
            14 => &SIZES_16K,
            _ => &SIZES_64K,
        }
    }

    #[inline]
    const fn run(entry: u64, level: u32) -> u32 {
        match (GRANULE, level) {
            _ if entry & CONTIGUOUS == 0 => 0,
            (12, _) => 4,
            (14, 1) => 7,
            _ => 5,
        }
    }

    #[inline]
    const fn memory(&self, memory: Memory) -> u64 {
        match (self.stage, memory) {
            (Stage::One, Memory::WriteBack) => INNER_SHAREABLE | 1 << 2,
            (Stage::One, Memory::Uncached) => OUTER_SHAREABLE,
            (Stage::One, Memory::Device) => OUTER_SHAREABLE | 2 << 2,
            (Stage::Two, Memory::WriteBack) => INNER_SHAREABLE | 0xf << 2,
            (Stage::Two, Memory::Uncached) => OUTER_SHAREABLE | 0x5 << 2,
            (Stage::Two, Memory::Device) => OUTER_SHAREABLE | 0x1 << 2,
        }
    }

    /// The address bits that stay in their places.
    const LOW: u64 = (1 << 48) - (1 << GRANULE);

    #[inline]
    const fn encode(address: PhysAddr) -> u64 {
        let high = if GRANULE == 16 { address.get() >> 36 & 0xf000 } else { 0 };
        address.get() & Self::LOW | high
    }

    #[inline]
    const fn address(entry: u64) -> u64 {
        let high = if GRANULE == 16 { (entry & 0xf000) << 36 } else { 0 };
        entry & Self::LOW | high
    }
}

// SAFETY: 1: pure functions. 2: `decode` takes a table's address out of the bits that `table` put it into, and tells a
// table from a leaf by T and the level. 3: hardware ignores bit 55 in a table's entry, and addresses end below it. 4
// and 5: `new` refuses levels and widths that the architecture does not have. 6: the bits are the manual's; the
// software IOMMU's walker reads them independently.
unsafe impl<const GRANULE: u32> Format for Arm<GRANULE> {
    const GRANULE_SHIFT: u32 = GRANULE;
    /// One of bits 58:51, which both stages ignore in tables' entries.
    const MARK: u64 = 1 << 55;
    const SPLIT: u64 = 0;
    const PRESENT: u64 = VALID;
    const KIND: u64 = VALID | TABLE | CONTIGUOUS;
    const BREAK_BEFORE_MAKE: bool = true;

    fn name(&self) -> &'static str {
        match (self.stage, GRANULE) {
            (Stage::One, 12) => "arm-s1-4k",
            (Stage::One, 14) => "arm-s1-16k",
            (Stage::One, _) => "arm-s1-64k",
            (Stage::Two, 12) => "arm-s2-4k",
            (Stage::Two, 14) => "arm-s2-16k",
            (Stage::Two, _) => "arm-s2-64k",
        }
    }

    #[inline]
    fn levels(&self) -> u32 {
        self.levels
    }

    fn input_bits(&self) -> u32 {
        self.input_bits
    }

    fn last_phys(&self) -> PhysAddr {
        self.last_phys
    }

    fn leaf_sizes(&self) -> &'static [LeafSize] {
        Self::all_sizes().get(..self.sizes).unwrap_or_default()
    }

    #[inline]
    fn leaf(&self, page: PhysAddr, size: LeafSize, attributes: Attributes) -> u64 {
        let kind = if size.level == 1 { VALID | TABLE } else { VALID };
        let contiguous = if size.run == 0 { 0 } else { CONTIGUOUS };
        let memory = self.memory(attributes.memory);
        let read = attributes.permissions.allows(Permissions::READ);
        let write = attributes.permissions.allows(Permissions::WRITE);
        let rest = match self.stage {
            Stage::One => {
                let write = if write { 0 } else { S1_READ_ONLY };
                let user = if attributes.privileged { 0 } else { S1_USER };
                let execute = match (attributes.execute, attributes.privileged) {
                    (false, _) => S1_USER_NO_EXECUTE | S1_PRIVILEGED_NO_EXECUTE,
                    (true, true) => S1_USER_NO_EXECUTE,
                    (true, false) => 0,
                };
                S1_NOT_GLOBAL | write | user | execute
            }
            Stage::Two => {
                let read = if read { S2_READ } else { 0 };
                let write = if write { S2_WRITE } else { 0 };
                let execute = if attributes.execute { 0 } else { S2_NO_EXECUTE };
                read | write | execute
            }
        };
        Self::encode(page) | kind | contiguous | memory | ACCESSED | rest
    }

    #[inline]
    fn table(&self, table: PhysAddr, _level: u32) -> u64 {
        Self::encode(table) | VALID | TABLE
    }

    #[inline]
    fn decode(&self, entry: u64, level: u32) -> Entry {
        let run = Self::run(entry, level);
        match (entry & (VALID | TABLE), level) {
            (3, 1) => Entry::Leaf { run },
            (3, _) => Entry::Table { table: PhysAddr::new(Self::address(entry)), level: level - 1 },
            // Level 1 has no blocks: the encoding is reserved there, and hardware treats it as invalid.
            (1, 2..) => Entry::Leaf { run },
            _ => Entry::Absent,
        }
    }

    #[inline]
    fn page(&self, entry: u64, level: u32) -> PhysAddr {
        let run = Self::run(entry, level);
        PhysAddr::new(Self::address(entry) & !((1 << (self.shift(level) + run)) - 1))
    }

    fn attributes(&self, entry: u64, _level: u32) -> Attributes {
        let (read, write, privileged, no_execute) = match self.stage {
            Stage::One => {
                let no_execute = S1_USER_NO_EXECUTE | S1_PRIVILEGED_NO_EXECUTE;
                (true, entry & S1_READ_ONLY == 0, entry & S1_USER == 0, no_execute)
            }
            Stage::Two => (entry & S2_READ != 0, entry & S2_WRITE != 0, false, S2_NO_EXECUTE),
        };
        let permissions = Permissions::of(read, write).unwrap_or_else(|| broken("a leaf allows something"));
        let same = |memory: &Memory| (entry ^ self.memory(*memory)) & MEMORY == 0;
        let memory = [Memory::Uncached, Memory::Device].into_iter().find(same).unwrap_or_default();
        let execute = entry & no_execute != no_execute;
        Attributes { memory, privileged, execute, ..permissions.into() }
    }
}
