//! RISC-V tables: Sv39, Sv48 and Sv57 as the first stage, Sv39x4 and Sv48x4 as the G-stage.
//!
//! Sources: The RISC-V Instruction Set Manual, volume II, Privileged Architecture, version 20240411, "Sv39",
//! "Sv48", "Sv57", "Virtual Address Translation Process", and "Two-Stage Address Translation" of the hypervisor
//! extension, "Svpbmt" (page-based memory types); RISC-V IOMMU Architecture Specification, version 1.0.
//!
//! V is bit 0, R 1, W 2, X 3, U 4, G 5, A 6, D 7; 9:8 are software's; bits 53:10 are the page number. An entry
//! with R, W and X clear points to a table, any other is a page of what one entry covers at its level. Addresses
//! are sign-extended in the first stage; devices get the positive half, so the highest translated bit is 0
//! and the rest is refused as too wide. The G-stage takes two bits more, in a root of 16 KiB.
//!
//! The hardware has Svpbmt and not Svnapot: bits 62:61 of a page are PBMT (0 is PMA, 1 NC, 2 IO). Reserved, and checked: bits 60:54 and N
//! (63); PBMT of 3, and any in a pointer to a table; W without R; A, D or U in a pointer; a pointer in the lowest level; a superpage whose
//! page number is not aligned. The hardware does not set A and D itself: A clear is a fault, D clear a fault of writes (for which the IOMMU
//! has the same cause as for W clear). The G-stage treats every access as user's, so a page without U is refused; in the first stage it is
//! for privileged requests, which devices here do not make.

use super::{Decoded, Geometry, Layout, Page, Rights, bits};
use crate::fault::FaultReason;

const VALID: u64 = 1 << 0;
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const EXECUTE: u64 = 1 << 3;
const USER: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
const MEMORY_TYPE: u64 = bits(62, 61);
const RESERVED: u64 = bits(63, 54) & !MEMORY_TYPE;

/// The modes, by their names in the manual.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RiscvMode {
    /// First stage, 3 levels: 38 bits of positive address.
    Sv39,
    /// First stage, 4 levels: 47 bits.
    Sv48,
    /// First stage, 5 levels: 56 bits.
    Sv57,
    /// G-stage, 3 levels: 41 bits.
    Sv39x4,
    /// G-stage, 4 levels: 50 bits.
    Sv48x4,
}

impl RiscvMode {
    fn is_guest(self) -> bool {
        matches!(self, Self::Sv39x4 | Self::Sv48x4)
    }
}

impl Layout for RiscvMode {
    fn is_valid(self) -> bool {
        true
    }

    fn geometry(self) -> Geometry {
        let (levels, input_bits, root_align) = match self {
            Self::Sv39 => (3, 38, 12),
            Self::Sv48 => (4, 47, 12),
            Self::Sv57 => (5, 56, 12),
            Self::Sv39x4 => (3, 41, 14),
            Self::Sv48x4 => (4, 50, 14),
        };
        Geometry { granule: 12, stride: 9, levels, input_bits, root_align }
    }

    fn decode(self, entry: u64, level: u32, _: u64) -> Result<Decoded, FaultReason> {
        if entry & VALID == 0 {
            return Err(FaultReason::NotPresent { level });
        }
        if entry & RESERVED != 0 || entry & MEMORY_TYPE == MEMORY_TYPE || entry & (READ | WRITE) == WRITE {
            return Err(FaultReason::ReservedBit);
        }
        // The page number is in bits 53:10, the address it makes in 55:12.
        let address = (entry & bits(53, 10)) << 2;
        if entry & (READ | WRITE | EXECUTE) == 0 {
            if level == 1 || entry & (ACCESSED | DIRTY | USER | MEMORY_TYPE) != 0 {
                return Err(FaultReason::ReservedBit);
            }
            return Ok(Decoded::Table { table: address, level: level - 1, rights: Rights::ALL });
        }
        let shift = self.geometry().shift(level);
        if self.is_guest() && entry & USER == 0 {
            return Err(FaultReason::Permission);
        }
        if address & bits(shift - 1, 0) != 0 {
            return Err(FaultReason::ReservedBit);
        }
        if entry & ACCESSED == 0 {
            return Err(FaultReason::AccessFlag);
        }
        let rights = Rights::ALL
            .only_if(entry & READ != 0, Rights::READ)
            .only_if(entry & (WRITE | DIRTY) == WRITE | DIRTY, Rights::WRITE)
            .only_if(entry & EXECUTE != 0, Rights::EXECUTE)
            .only_if(entry & USER != 0, Rights::USER);
        let attributes = (entry >> 61 & 3) as u8;
        Ok(Decoded::Leaf(Page { page: address, shift, rights, attributes, run: 0 }))
    }
}
