//! Sizes in granules. No result overflows.

use super::super::bitmap::MAX_ORDER;
use crate::addr::PageSize;

/// The most granules of an arena, as positions have 32 bits.
const MOST_GRANULES: u64 = 1 << 31;

/// The granules of `descriptors` descriptors of `unit` granules each; `None` for more than an arena may have.
pub(super) fn granules_of(descriptors: u32, unit: u64) -> Option<u64> {
    unit.checked_mul(descriptors.into()).filter(|all| *all <= MOST_GRANULES)
}

/// The granules of a large page, which a lowest table of one granule covers with entries of 8 bytes; but no more than a
/// space aligns ranges to. `None` if 64 bits cannot count their bytes.
pub(super) fn granules_per_large(granule: PageSize) -> Option<u64> {
    let order = granule.shift().saturating_sub(3).min(MAX_ORDER);
    (granule.shift() + order < u64::BITS).then(|| 1 << order)
}

#[inline]
pub(super) fn granules_for(len: u64, granule: PageSize) -> u64 {
    ((len - 1) >> granule.shift()) + 1
}

#[cfg(test)]
#[path = "../../../tests/inside/iova/arena/granules.rs"]
mod tests;
