//! x86-64 tables of 4 and 5 levels, as VT-d walks them in the first stage and AMD-Vi as guest tables.
//!
//! Sources: Intel Virtualization Technology for Directed I/O, Architecture Specification, revision 4.1,
//! "First-Stage Translation" (section 3.6) and "First-Stage Paging Entries" (chapter 9); Intel 64 and IA-32
//! Architectures Software Developer's Manual, volume 3A, "4-Level Paging and 5-Level Paging" (section 4.5).
//!
//! Addresses must be canonical; a driver gives devices the lower half, so the highest translated bit is always 0 and the upper half is
//! refused here as too wide. An entry with P (bit 0) clear is not present. R/W (bit 1) and U/S (bit 2) need every entry on the path,
//! execution needs XD (bit 63) clear in all. PS (bit 7) makes a page at levels 2 and 3 and is reserved at 4 and 5. Of a large page's
//! address the bits below its size down to bit 13 are reserved; bit 12 is PAT, which in a 4 KiB entry is bit 7. Hardware sets accessed and
//! dirty bits itself here; this walker neither sets nor checks them. The physical address width is 52 bits.

use super::{Decoded, Geometry, Layout, Page, Rights, bits};
use crate::fault::FaultReason;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const PAGE_SIZE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = bits(51, 12);

#[derive(Debug, Clone, Copy)]
pub(super) struct FirstStage {
    pub(super) levels: u32,
}

impl Layout for FirstStage {
    fn is_valid(self) -> bool {
        (4..=5).contains(&self.levels)
    }

    fn geometry(self) -> Geometry {
        // One bit less than the tables translate: the lower half.
        let input_bits = self.levels.saturating_mul(9).saturating_add(11);
        Geometry { granule: 12, stride: 9, levels: self.levels, input_bits, root_align: 12 }
    }

    fn decode(self, entry: u64, level: u32, _: u64) -> Result<Decoded, FaultReason> {
        if entry & PRESENT == 0 {
            return Err(FaultReason::NotPresent { level });
        }
        let rights = Rights::ALL
            .only_if(entry & WRITABLE != 0, Rights::WRITE)
            .only_if(entry & USER != 0, Rights::USER)
            .only_if(entry & NO_EXECUTE == 0, Rights::EXECUTE);
        if level > 3 && entry & PAGE_SIZE != 0 {
            return Err(FaultReason::ReservedBit);
        }
        if level > 1 && entry & PAGE_SIZE == 0 {
            return Ok(Decoded::Table { table: entry & ADDRESS, level: level - 1, rights });
        }
        let shift = self.geometry().shift(level);
        let (pat, page) = match level {
            1 => (7, entry & ADDRESS),
            _ => (12, entry & ADDRESS & !(1 << 12)),
        };
        if page & bits(shift - 1, 0) != 0 {
            return Err(FaultReason::ReservedBit);
        }
        // PWT is bit 3, PCD bit 4.
        let attributes = (entry >> pat & 1) << 2 | entry >> 3 & 3;
        Ok(Decoded::Leaf(Page { page, shift, rights, attributes: attributes as u8, run: 0 }))
    }
}
