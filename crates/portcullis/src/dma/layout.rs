//! How a list of memory segments looks to the device.

use crate::addr::{DmaSegment, Iova, PageSize, PhysSegment};
use crate::domain::DeviceView;

/// Writes the device's view of `list` to `out` and returns how many segments that takes, or `None` where
/// `out` is too short. The view is as [`DeviceView::new`] says.
#[inline]
pub(super) fn device_view(
    list: &[PhysSegment],
    base: Option<Iova>,
    granule: PageSize,
    out: &mut [DmaSegment],
) -> Option<usize> {
    let mut used: usize = 0;
    for segment in DeviceView::new(list, base, granule) {
        *out.get_mut(used)? = segment?;
        used += 1;
    }
    Some(used)
}
