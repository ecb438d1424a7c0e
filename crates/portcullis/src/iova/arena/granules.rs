//! How many granules things take.

use super::super::bitmap::MAX_ORDER;
use crate::addr::PageSize;

/// More granules than this no arena has: positions are kept in 32 bits.
const MOST_GRANULES: u64 = 1 << 31;

/// Granules of `descriptors` descriptors of `unit` granules each; `None` for more than an arena may have.
pub(super) fn granules_of(descriptors: u32, unit: u64) -> Option<u64> {
    unit.checked_mul(descriptors.into()).filter(|all| *all <= MOST_GRANULES)
}

/// Granules that a lowest table covers: one entry of 8 bytes for each, but no more than spaces align ranges to.
/// `None` where 64 bits have no room for their bytes.
pub(super) fn granules_per_large(granule: PageSize) -> Option<u64> {
    let order = granule.shift().saturating_sub(3).min(MAX_ORDER);
    (granule.shift() + order < u64::BITS).then(|| 1 << order)
}

/// Granules for `len` bytes, which are not 0.
#[inline]
pub(super) fn granules_for(len: u64, granule: PageSize) -> u64 {
    ((len - 1) >> granule.shift()) + 1
}

#[cfg(test)]
#[path = "../../../tests/inside/iova/arena/granules.rs"]
mod tests;
