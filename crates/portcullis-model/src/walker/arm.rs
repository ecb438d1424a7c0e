//! Arm VMSAv8-64 tables, stage 1 and stage 2, as an SMMUv3 walks them.
//!
//! Sources: Arm Architecture Reference Manual for A-profile architecture, DDI 0487, issue J.a, chapter D8: "The
//! VMSAv8-64 translation stages" and "translation process" (D8.2), "Translation table descriptor formats"
//! (D8.3), "Memory access control" (D8.4), "The contiguous bit" (D8.6); Arm System Memory Management Unit
//! Architecture Specification, SMMU architecture version 3, IHI 0070.
//!
//! The manual's level 3 is level 1 here, its level 0 is level 4. Bit 0 is valid. Bit 1 set is a table, or in the
//! lowest level a page; clear it is a block, where the granule has one at that level (elsewhere the encoding is
//! reserved, which the manual has count as invalid). Bits 47 down to the size are the address; with 64 KiB, bits
//! 15:12 are its bits 51:48. Bits in between that the manual calls RES0 are ignored by hardware, and here.
//!
//! - Stage 1: AF is bit 10, AP is bits 7:6 (bit 7 denies writes, bit 6 lets unprivileged requests in), UXN bit
//!   54, SH 9:8, AttrIndx 4:2. Tables take rights away: UXNTable bit 60, APTable 62:61 (bit 61 denies the
//!   unprivileged, bit 62 writes).
//! - Stage 2: S2AP is bits 7:6 (6 reads, 7 writes), XN bit 54, SH 9:8, MemAttr 5:2. Tables take nothing away.
//! - Bit 52 is the contiguous hint: hardware may cache the run it belongs to as one entry, so all of the run must
//!   be present and alike, its addresses rising, and the first aligned to the run's size.
//!
//! Faults come in the manual's order: translation, address size, access flag, permission. FEAT_LPA2 and hardware management of the access
//! flag and dirty state are absent.

use super::{Decoded, Geometry, Layout, Page, Rights, bits};
use crate::fault::FaultReason;

const VALID: u64 = 1 << 0;
const TABLE_OR_PAGE: u64 = 1 << 1;
const ACCESS_FLAG: u64 = 1 << 10;
const CONTIGUOUS: u64 = 1 << 52;
const EXECUTE_NEVER: u64 = 1 << 54;
const AP_UNPRIVILEGED: u64 = 1 << 6;
const AP_READ_ONLY: u64 = 1 << 7;
const S2AP_READ: u64 = 1 << 6;
const S2AP_WRITE: u64 = 1 << 7;
const TABLE_EXECUTE_NEVER: u64 = 1 << 60;
const TABLE_PRIVILEGED: u64 = 1 << 61;
const TABLE_READ_ONLY: u64 = 1 << 62;
/// Bits 58:55 are software's and do not affect the translation.
const SOFTWARE: u64 = bits(58, 55);

/// A stage of translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArmStage {
    /// From virtual addresses; the root is one table.
    One,
    /// From intermediate physical addresses; the root is up to 16 concatenated tables.
    Two,
}

/// The size of the smallest page and of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granule {
    /// 4 KiB.
    Size4K,
    /// 16 KiB.
    Size16K,
    /// 64 KiB.
    Size64K,
}

impl Granule {
    /// The binary logarithm of its size.
    pub const fn shift(self) -> u32 {
        match self {
            Self::Size4K => 12,
            Self::Size16K => 14,
            Self::Size64K => 16,
        }
    }

    /// A table fills a granule with entries of 8 bytes.
    const fn stride(self) -> u32 {
        self.shift() - 3
    }

    /// The highest level with blocks. With 64 KiB, level 3 has them where addresses have 52 bits.
    const fn highest_block(self, output_bits: u32) -> u32 {
        match self {
            Self::Size4K => 3,
            Self::Size64K if output_bits == 52 => 3,
            Self::Size16K | Self::Size64K => 2,
        }
    }

    /// The binary logarithm of the entries in a contiguous run at `level`; 0 if the hint means nothing.
    const fn run(self, level: u32) -> u32 {
        match (self, level) {
            (Self::Size4K, 1..=3) => 4,
            (Self::Size16K, 1) => 7,
            (Self::Size16K, 2) | (Self::Size64K, 1 | 2) => 5,
            _ => 0,
        }
    }
}

/// The dimensions of Arm tables, from the context or stream table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArmTables {
    /// The stage.
    pub stage: ArmStage,
    /// TG0 or S2TG.
    pub granule: Granule,
    /// 64 - T0SZ: width of input addresses. 25 to 48, or 52 with 64 KiB.
    pub input_bits: u32,
    /// Levels of tables, including the root's. In stage 1 `input_bits` determines them; in stage 2 SL0 chooses, and the root has as many
    /// concatenated tables as that takes.
    pub levels: u32,
    /// Width of output addresses (IPS or S2PS): 32, 36, 40, 42, 44, 48, or 52 with 64 KiB.
    pub output_bits: u32,
}

impl ArmTables {
    /// Stage 1 for addresses of `input_bits`, with the levels that takes, and 48 bits of output.
    pub const fn stage1(granule: Granule, input_bits: u32) -> Self {
        let levels = input_bits.saturating_sub(granule.shift()).div_ceil(granule.stride());
        Self { stage: ArmStage::One, granule, input_bits, levels, output_bits: 48 }
    }

    /// Stage 2 for addresses of `input_bits` in `levels` levels, and 48 bits of output.
    pub const fn stage2(granule: Granule, input_bits: u32, levels: u32) -> Self {
        Self { stage: ArmStage::Two, granule, input_bits, levels, output_bits: 48 }
    }

    /// The same with `output_bits`.
    pub const fn with_output_bits(self, output_bits: u32) -> Self {
        Self { output_bits, ..self }
    }

    /// The address in an entry whose address field begins at bit `shift`.
    fn address(self, entry: u64, shift: u32) -> Result<u64, FaultReason> {
        let low = entry & bits(47, shift);
        let address = match self.granule {
            Granule::Size64K => low | (entry >> 12 & 0xf) << 48,
            Granule::Size4K | Granule::Size16K => low,
        };
        if address >> self.output_bits == 0 { Ok(address) } else { Err(FaultReason::AddressSize) }
    }

    fn table_rights(self, entry: u64) -> Rights {
        match self.stage {
            ArmStage::One => Rights::ALL
                .only_if(entry & TABLE_EXECUTE_NEVER == 0, Rights::EXECUTE)
                .only_if(entry & TABLE_PRIVILEGED == 0, Rights::USER)
                .only_if(entry & TABLE_READ_ONLY == 0, Rights::WRITE),
            ArmStage::Two => Rights::ALL,
        }
    }

    fn page_rights(self, entry: u64) -> Rights {
        let rights = Rights::ALL.only_if(entry & EXECUTE_NEVER == 0, Rights::EXECUTE);
        match self.stage {
            ArmStage::One => rights
                .only_if(entry & AP_UNPRIVILEGED != 0, Rights::USER)
                .only_if(entry & AP_READ_ONLY == 0, Rights::WRITE),
            ArmStage::Two => rights
                .only_if(entry & S2AP_READ != 0, Rights::READ)
                .only_if(entry & S2AP_WRITE != 0, Rights::WRITE),
        }
    }

    /// SH above the memory type, which is 3 bits of AttrIndx or 4 of MemAttr.
    fn attributes(self, entry: u64) -> u8 {
        let width = if self.stage == ArmStage::One { 3 } else { 4 };
        let kind = entry >> 2 & bits(width - 1, 0);
        ((entry >> 8 & 3) << width | kind) as u8
    }
}

impl Layout for ArmTables {
    fn is_valid(self) -> bool {
        let Self { stage, granule, input_bits, levels, output_bits } = self;
        let large = granule == Granule::Size64K;
        // How the start level is encoded: 4 KiB has no SL0 for the lowest level, 16 KiB none for the highest.
        let starts = match (stage, granule) {
            (ArmStage::One, Granule::Size4K | Granule::Size16K) => 1..=4,
            (ArmStage::Two, Granule::Size4K) => 2..=4,
            (ArmStage::Two, Granule::Size16K) | (_, Granule::Size64K) => 1..=3,
        };
        let concatenated = if stage == ArmStage::Two { 4 } else { 0 };
        starts.contains(&levels)
            && (25..=if large { 52 } else { 48 }).contains(&input_bits)
            && (matches!(output_bits, 32 | 36 | 40 | 42 | 44 | 48) || large && output_bits == 52)
            && (1..=granule.stride() + concatenated).contains(&self.geometry().index_bits(levels))
    }

    fn geometry(self) -> Geometry {
        let Self { granule, input_bits, levels, .. } = self;
        // With an invalid number of levels the indices mean nothing; it must not overflow here.
        let geometry = Geometry {
            granule: granule.shift(),
            stride: granule.stride(),
            levels: levels.min(5),
            input_bits,
            root_align: 0,
        };
        // A small root is aligned to its size, at least to 64 bytes.
        Geometry { root_align: (geometry.index_bits(geometry.levels) + 3).max(6), ..geometry }
    }

    fn decode(self, entry: u64, level: u32, _: u64) -> Result<Decoded, FaultReason> {
        let granule = self.granule;
        let is_table = level > 1 && entry & TABLE_OR_PAGE != 0;
        let is_page = level == 1 && entry & TABLE_OR_PAGE != 0;
        let is_block =
            entry & TABLE_OR_PAGE == 0 && (2..=granule.highest_block(self.output_bits)).contains(&level);
        if entry & VALID == 0 || !(is_table || is_page || is_block) {
            return Err(FaultReason::NotPresent { level });
        }
        if is_table {
            let table = self.address(entry, granule.shift())?;
            return Ok(Decoded::Table { table, level: level - 1, rights: self.table_rights(entry) });
        }
        let shift = self.geometry().shift(level);
        let page = self.address(entry, shift)?;
        if entry & ACCESS_FLAG == 0 {
            return Err(FaultReason::AccessFlag);
        }
        let run = if entry & CONTIGUOUS != 0 { granule.run(level) } else { 0 };
        Ok(Decoded::Leaf(Page {
            page,
            shift,
            rights: self.page_rights(entry),
            attributes: self.attributes(entry),
            run,
        }))
    }

    fn continues(self, entry: u64, other: u64, distance: i64, level: u32) -> bool {
        let shift = self.geometry().shift(level);
        let (Ok(own), Ok(address)) = (self.address(entry, shift), self.address(other, shift)) else {
            return false;
        };
        let first_of_run = |address: u64| address & !bits(shift + self.granule.run(level) - 1, 0);
        // In the same aligned block of memory, at the same distance as the entries: then the block's start is the first's.
        (entry ^ other) & !(bits(47, shift) | SOFTWARE) == 0
            && own.checked_add_signed(distance << shift) == Some(address)
            && first_of_run(own) == first_of_run(address)
    }
}
