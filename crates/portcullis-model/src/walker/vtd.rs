//! VT-d second-stage tables.
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, revision 4.1:
//! "Second-Stage Translation" (section 3.7) and "Second-Stage Paging Entries" (chapter 9).
//!
//! An entry is present if it allows a read (bit 0) or a write (bit 1); rights are the intersection of all entries on the path. Bit 7 (page
//! size) makes entries at levels 2 and 3 pages and is reserved above; in the lowest level it is ignored. Bits 51:12 are the address; those
//! below a large page's size are reserved. Bit 11 of a leaf is SNP. The host address width is 52 bits, so no higher address bit is
//! reserved.

use super::{Decoded, Geometry, Layout, Page, Rights, bits};
use crate::fault::FaultReason;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const PAGE_SIZE: u64 = 1 << 7;
const SNOOP: u64 = 1 << 11;
const ADDRESS: u64 = bits(51, 12);

#[derive(Debug, Clone, Copy)]
pub(super) struct SecondStage {
    pub(super) levels: u32,
}

impl Layout for SecondStage {
    #[inline]
    fn is_valid(self) -> bool {
        (3..=5).contains(&self.levels)
    }

    #[inline]
    fn geometry(self) -> Geometry {
        let input_bits = self.levels.saturating_mul(9).saturating_add(12);
        Geometry { granule: 12, stride: 9, levels: self.levels, input_bits, root_align: 12 }
    }

    #[inline]
    fn decode(self, entry: u64, level: u32, _: u64) -> Result<Decoded, FaultReason> {
        if entry & (READ | WRITE) == 0 {
            return Err(FaultReason::NotPresent { level });
        }
        let rights =
            Rights::ALL.only_if(entry & READ != 0, Rights::READ).only_if(entry & WRITE != 0, Rights::WRITE);
        let address = entry & ADDRESS;
        if level > 1 && entry & PAGE_SIZE == 0 {
            return Ok(Decoded::Table { table: address, level: level - 1, rights });
        }
        let shift = self.geometry().shift(level);
        if level > 3 || address & bits(shift - 1, 0) != 0 {
            return Err(FaultReason::ReservedBit);
        }
        let attributes = u8::from(entry & SNOOP != 0);
        Ok(Decoded::Leaf(Page { page: address, shift, rights, attributes, run: 0 }))
    }
}
