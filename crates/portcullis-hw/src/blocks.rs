//! Address ranges in commands: the core's blocks ([`portcullis::invalidation::blocks()`]), appended to a submission all together or not at
//! all.

use portcullis::addr::{IovaRange, PageSize};
use portcullis::invalidation::{Block, Granularity, blocks};

use crate::queue::{Command, Commands};

/// The order of the whole address space, in pages of 4 KiB.
pub(crate) const EVERYTHING: u32 = u64::BITS - PageSize::SIZE_4K.shift();

/// Appends to `out` the commands that invalidate `range`: `name` makes the command of a block, and `whole` invalidates everything if the
/// unit has no blocks. Returns `false`, and appends nothing, if there is no room.
pub(crate) fn add(
    out: &mut Commands,
    range: IovaRange,
    granule: PageSize,
    granularity: Granularity,
    name: impl Fn(Block) -> Command,
    whole: Command,
) -> bool {
    match blocks(range, granule, granularity) {
        None => out.try_push(whole).is_ok(),
        Some(blocks) if blocks.len() > out.remaining_capacity() => false,
        Some(blocks) => {
            out.extend(blocks.map(name));
            true
        }
    }
}

/// The same for a device TLB; `None` is all of it. `name` makes the command of 2^n pages at an address. `barrier` precedes them.
pub(crate) fn add_for_device(
    out: &mut Commands,
    range: Option<IovaRange>,
    barrier: Option<Command>,
    name: impl Fn(u64, u32) -> Command,
) -> bool {
    let before = out.len();
    let whole = name(0, EVERYTHING);
    let block = |block: Block| name(block.address.get(), block.order);
    let is_added = barrier.is_none_or(|barrier| out.try_push(barrier).is_ok())
        && match range {
            None => out.try_push(whole).is_ok(),
            Some(range) => add(out, range, PageSize::SIZE_4K, Granularity::ANY_BLOCK, block, whole),
        };
    if !is_added {
        out.truncate(before);
    }
    is_added
}

/// Encodes 2^`order` pages of 4 KiB at `address`, aligned to their size: the bit `says_size` is set, and of the bits from 12 on the lowest
/// 0 is bit 12 + `order` - 1. For an order of 0 the address stays as it is. (PCIe Address Translation Services, followed by AMD-Vi, and
/// RISC-V's NAPOT.)
pub(crate) const fn sized_address(address: u64, order: u32, says_size: u64) -> u64 {
    if order == 0 { address } else { address | ((1 << (order - 1)) - 1) << 12 | says_size }
}
