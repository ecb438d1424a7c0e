//! How a list of memory segments looks to the device.

use super::DmaSegment;
use crate::addr::{Iova, IovaRange, PageSize};
use crate::domain::PhysSegment;

/// Writes the device's view of `list` to `out` and returns how many segments that takes, or `None` where
/// `out` is too short. Neighbours that touch become one.
///
/// With translation `base` is where the first page of the list is mapped, the pages of one segment after
/// those of another, with `granule`-sized pages; without, the device uses the memory's own addresses.
pub(super) fn device_view(
    list: &[PhysSegment],
    base: Option<Iova>,
    granule: PageSize,
    out: &mut [DmaSegment],
) -> Option<usize> {
    let mut used: usize = 0;
    let mut page = base.map(Iova::get);
    for PhysSegment { phys, len } in list {
        let offset = phys.page_offset(granule);
        let iova = match page {
            Some(page) => page.checked_add(offset)?,
            None => phys.get(),
        };
        page = match page {
            // May wrap after the last segment only: the mapped range does not.
            Some(page) => Some(page.wrapping_add(granule.round_up(offset.checked_add(*len)?)?)),
            None => None,
        };
        let previous = used.checked_sub(1).map(|last| &mut out[last]);
        match previous {
            Some(previous) if previous.iova.checked_add(previous.len) == Some(Iova::new(iova)) => {
                previous.len = previous.len.checked_add(*len)?;
            }
            _ => {
                *out.get_mut(used)? = DmaSegment { iova: Iova::new(iova), len: *len };
                used += 1;
            }
        }
    }
    Some(used)
}

/// The whole pages that a mapping of `len` bytes at `iova` takes; `None` where there is no such range.
#[inline]
pub(super) fn pages(iova: Iova, len: u64, granule: PageSize) -> Option<IovaRange> {
    let first = iova.align_down(granule);
    let last = iova.checked_add(len.checked_sub(1)?)?;
    let last = Iova::new(last.get() | granule.offset_mask());
    IovaRange::from_bounds(first, last).ok()
}
