//! AMD-Vi host page tables (version 1).
//!
//! Source: AMD I/O Virtualization Technology (IOMMU) Specification, publication 48882, revision 3.07, "I/O Page
//! Tables for Host Translations" (section 2.2.3).
//!
//! PR (bit 0) is present, IR (bit 61) allows reads and IW (bit 62) writes, if every entry on the way does. Bits
//! 51:12 are the address and bits 11:9 the Next Level:
//! - 1 to 6: a table of that level. It must be lower than the entry's own; levels may be skipped, and then the
//!   bits of the address that would have been their indices must be 0.
//! - 0: a page of the size that one entry covers at this level.
//! - 7: a page of another size, a power of two between that and what one entry covers at the next level up. The
//!   lowest bit of the address field that is 0, bit n, says 2^(n+1) bytes: the bits below it are 1. The entry is
//!   repeated in all places that the page covers.
//!
//! Reserved, and checked: bits 58:52 of a leaf, 60:52 of a pointer to a table; a Next Level that does not lead
//! down; a size outside the bounds that Next Level 7 has (an entry that could have been written with 0 too);
//! the address bits below a page's size. A leaf has FC in bit 60 and U in bit 59. At level 6 one entry covers
//! more than a physical address reaches, so 0 is taken to be reserved there.

use super::{Decoded, Geometry, Layout, Page, Rights, bits};
use crate::fault::FaultReason;

const PRESENT: u64 = 1 << 0;
const READ: u64 = 1 << 61;
const WRITE: u64 = 1 << 62;
const ADDRESS: u64 = bits(51, 12);
const LEAF_RESERVED: u64 = bits(58, 52);
const TABLE_RESERVED: u64 = bits(60, 52);
/// Bits that hardware ignores or sets itself: 4:1, A (5), D (6), 8:7 and 63.
const IGNORED: u64 = bits(8, 1) | 1 << 63;

#[derive(Debug, Clone, Copy)]
pub(super) struct V1 {
    pub(super) levels: u32,
}

impl Layout for V1 {
    fn is_valid(self) -> bool {
        (1..=6).contains(&self.levels)
    }

    fn geometry(self) -> Geometry {
        let input_bits = self.levels.saturating_mul(9).saturating_add(12).min(64);
        Geometry { granule: 12, stride: 9, levels: self.levels, input_bits, root_align: 12 }
    }

    fn decode(self, entry: u64, level: u32, iova: u64) -> Result<Decoded, FaultReason> {
        if entry & PRESENT == 0 {
            return Err(FaultReason::NotPresent { level });
        }
        let rights =
            Rights::ALL.only_if(entry & READ != 0, Rights::READ).only_if(entry & WRITE != 0, Rights::WRITE);
        let geometry = self.geometry();
        let shift = geometry.shift(level);
        let next = (entry >> 9 & 7) as u32;
        let address = entry & ADDRESS;
        if (1..=6).contains(&next) {
            if next >= level || entry & TABLE_RESERVED != 0 {
                return Err(FaultReason::ReservedBit);
            }
            // The indices of the levels between this one and the next table's.
            let skipped = bits(shift - 1, 0) & !bits(geometry.shift(next + 1) - 1, 0);
            if iova & skipped != 0 {
                return Err(FaultReason::BeyondWidth);
            }
            return Ok(Decoded::Table { table: address, level: next, rights });
        }
        let size = if next == 0 { default_size(level, shift) } else { encoded_size(address, shift) };
        let size = size.filter(|_| entry & LEAF_RESERVED == 0).ok_or(FaultReason::ReservedBit)?;
        let offset = bits(size - 1, 0);
        if next == 0 && address & offset != 0 {
            return Err(FaultReason::ReservedBit);
        }
        let attributes = (entry >> 59 & 3) as u8;
        Ok(Decoded::Leaf(Page {
            page: address & !offset,
            shift: size,
            rights,
            attributes,
            run: size - shift,
        }))
    }

    fn continues(self, entry: u64, other: u64, _: i64, _: u32) -> bool {
        (entry ^ other) & !IGNORED == 0
    }
}

fn default_size(level: u32, shift: u32) -> Option<u32> {
    (level < 6).then_some(shift)
}

/// The binary logarithm of the size that an address field encodes, at a level where one entry covers 2^`shift`.
fn encoded_size(address: u64, shift: u32) -> Option<u32> {
    let size = 12 + (address >> 12).trailing_ones() + 1;
    // Bits 51:12 all 1 leave no bit to be the lowest 0.
    (size <= 52 && shift < size && size < shift + 9).then_some(size)
}
