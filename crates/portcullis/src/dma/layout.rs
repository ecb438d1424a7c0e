//! The device's view of a list of memory segments.

use crate::addr::{DmaSegment, Iova, PageSize, PhysSegment, touch};
use crate::domain::DeviceView;

/// Writes the device's view of `list`, which has `used` bytes, to `out`. Returns the number of segments; `None` if `out` is too short. See
/// [`DeviceView::new`].
#[inline]
pub(super) fn device_view(
    list: &[PhysSegment],
    used: u64,
    base: Option<Iova>,
    granule: PageSize,
    out: &mut [DmaSegment],
) -> Option<usize> {
    if let (Some(base), [first, ..]) = (base, list)
        && touch(list, granule)
    {
        let iova = Iova::new(base.get() | first.phys.page_offset(granule));
        *out.first_mut()? = DmaSegment { iova, len: used };
        return Some(1);
    }
    view_apart(list, base, granule, out)
}

/// As [`device_view`], segment by segment, for a list that need not touch.
#[inline]
pub(super) fn view_apart(
    list: &[PhysSegment],
    base: Option<Iova>,
    granule: PageSize,
    out: &mut [DmaSegment],
) -> Option<usize> {
    let mut count: usize = 0;
    for segment in DeviceView::new(list, base, granule) {
        *out.get_mut(count)? = segment?;
        count += 1;
    }
    Some(count)
}
