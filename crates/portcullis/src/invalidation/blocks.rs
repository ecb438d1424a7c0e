//! The [blocks](Block) of pages that hardware's commands name for a range. The drivers of IOMMUs and the software IOMMU all use this
//! module, so measurements of one hold for the others.
//!
//! A command for addresses names one page, or 2^n pages at a multiple of their size, or some multiple of 2^n pages from any page on. Any
//! other range takes several commands, or a command that invalidates more, or an invalidation of the whole domain. A command costs the
//! hardware a read of memory; a translation that was dropped without need costs a walk, of several reads, if a device still uses it. So a
//! range takes:
//!
//! - **by blocks, one or two**. Where a range crosses a multiple of a large power of two, a single block around it could be the whole
//!   address space. Such a range is cut at that multiple, with a block on each side. A single block is taken where it holds at most twice
//!   the pages of the larger of the two.
//! - **by pages**, one command for each, up to [`MOST_BLOCKS`].
//! - **by runs**, one.
//!
//! The border between two blocks cuts no page that lies wholly in the range, as hardware need not drop a page of which a command names only
//! a part (Intel VT-d, architecture specification, Rev. 4.1, section 6.5.2.3). Pages lie at multiples of their size, so such a page across
//! the border would be all of the range; a range that may be one page is not cut.

use core::ops::Range;

use crate::addr::{Iova, IovaRange, PageSize};

/// The most blocks of one range. An IOTLB has some hundred entries at the most ([`Costs::BARE_METAL`](super::Costs::BARE_METAL) counts 64),
/// so a range of more pages may as well take an invalidation of the domain.
pub const MOST_BLOCKS: usize = 64;

const RUN_BITS: u32 = 5;

const MOST_SCALE: u32 = 31;

/// The unit of one invalidation command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// One page of the granule. It also drops the larger page that contains the address.
    ///
    /// RISC-V (IOMMU architecture specification, version 1.0, "IOMMU Page-Table cache invalidation commands"); SMMUv3 without IDR3.RIL (IHI
    /// 0070, section 4.4).
    Page,
    /// 2^n pages of the granule at a multiple of their size. The hardware need not drop a page of which they are only a part.
    ///
    /// - VT-d (Rev. 4.1, section 6.5.2.3): `max_order` is MAMV of the Capability Register.
    /// - AMD-Vi (publication 48882, section 2.4.3), RISC-V with the Address Range Invalidation extension (section 9.3), and
    ///   device TLBs (PCIe Address Translation Services, Invalidate Request): the address itself tells the size, up to all addresses.
    Block {
        /// The largest n.
        max_order: u32,
    },
    /// 1 to 32 times 2^n pages of the granule, n up to 31, from any page on; but never a single page.
    ///
    /// SMMUv3 with IDR3.RIL (IHI 0070, section 4.4.1.1: NUM and SCALE), where a command without them names a page.
    Run,
}

impl Granularity {
    /// Blocks of any size, for hardware that reads the size from the address.
    pub const ANY_BLOCK: Self = Self::Block { max_order: u64::BITS - PageSize::SIZE_4K.shift() };
}

/// Pages that one command names: `count` times 2^`order` pages of the granule from `address` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The first address: a multiple of the granule, and, except in a [run](Granularity::Run), of the block's size.
    pub address: Iova,
    /// The binary logarithm of the pages in one unit.
    pub order: u32,
    /// The number of units: 1 except in a [run](Granularity::Run), and at most 32.
    pub count: u32,
}

impl Block {
    /// The block's addresses, in pages of `granule`. `None` if they end beyond the last address, or are the whole address space.
    pub fn range(&self, granule: PageSize) -> Option<IovaRange> {
        let pages = u64::from(self.count).checked_mul(1_u64.checked_shl(self.order)?)?;
        IovaRange::new(self.address, pages.checked_mul(granule.bytes())?).ok()
    }
}

struct Blocks {
    shift: u32,
    pages: Range<u64>,
    blocks: [Option<Block>; 2],
}

impl Iterator for Blocks {
    type Item = Block;

    fn next(&mut self) -> Option<Block> {
        match self.pages.next() {
            Some(page) => Some(Block { address: Iova::new(page << self.shift), order: 0, count: 1 }),
            None => self.blocks.iter_mut().find_map(Option::take),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // No truncation: at most `MOST_BLOCKS`.
        let len = (self.pages.end - self.pages.start) as usize + self.blocks.iter().flatten().count();
        (len, Some(len))
    }
}

impl ExactSizeIterator for Blocks {}

/// Returns blocks that together hold each page of `granule` that `range` touches, by ascending address, for commands of this granularity;
/// `None` where the domain must be invalidated. A few instructions; allocates nothing.
///
/// For a range that touches n pages these are:
///
/// - [`Page`](Granularity::Page): n blocks of one page; `None` if n is above [`MOST_BLOCKS`];
/// - [`Block`](Granularity::Block): one or two, of less than 4 n pages in sum; `None` if a block would exceed the largest order, or if the
///   range may be a single page of more than that order;
/// - [`Run`](Granularity::Run): one, of at most n + n / 16 pages; `None` if n is above 2^36.
pub fn blocks(
    range: IovaRange,
    granule: PageSize,
    granularity: Granularity,
) -> Option<impl ExactSizeIterator<Item = Block>> {
    let shift = granule.shift();
    let (first, last) = (range.start().get() >> shift, range.last().get() >> shift);
    let of = |blocks| Some(Blocks { shift, pages: 0..0, blocks });
    let number = last - first;
    match granularity {
        Granularity::Page if number < MOST_BLOCKS as u64 => {
            Some(Blocks { shift, pages: first..last + 1, blocks: [None; 2] })
        }
        Granularity::Page => None,
        Granularity::Block { max_order } => aligned(first, last, shift, max_order).and_then(of),
        Granularity::Run => of([Some(run(first, number, shift)?), None]),
    }
}

fn aligned(first: u64, last: u64, shift: u32, max_order: u32) -> Option<[Option<Block>; 2]> {
    // The order of the smallest block that contains both.
    let order = |first: u64, last: u64| u64::BITS - (first ^ last).leading_zeros();
    let block = |first: u64, last: u64| {
        let order = order(first, last);
        let page = first.checked_shr(order).and_then(|block| block.checked_shl(order)).unwrap_or(0);
        Block { address: Iova::new(page << shift), order, count: 1 }
    };
    let whole = order(first, last);
    // The middle of the block around both: they lie on both sides of it.
    let middle = whole.checked_sub(1).map_or(last, |below| last >> below << below);
    let larger = if middle > first { order(first, middle - 1).max(order(middle, last)) } else { whole };
    // A whole block may be one page, which two halves do not name.
    let may_be_one_page = first.trailing_zeros() >= whole && last.trailing_ones() >= whole;
    if larger > max_order || whole > max_order && may_be_one_page {
        return None;
    }
    // Two pages are not worth a second command.
    let is_worth_two = larger + 1 < whole && whole > 2;
    let is_two = is_worth_two || whole > max_order;
    Some(if is_two {
        [Some(block(first, middle - 1)), Some(block(middle, last))]
    } else {
        [Some(block(first, last)), None]
    })
}

fn run(first: u64, number: u64, shift: u32) -> Option<Block> {
    let order = (u64::BITS - number.leading_zeros()).saturating_sub(RUN_BITS);
    // No truncation: the order leaves five bits.
    let count = (number >> order) as u32 + 1;
    (order <= MOST_SCALE).then_some(Block { address: Iova::new(first << shift), order, count })
}

#[cfg(test)]
#[path = "../../tests/inside/invalidation/blocks.rs"]
mod tests;
