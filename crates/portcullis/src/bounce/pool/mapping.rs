//! A mapping as its driver gets it.

use crate::addr::{DmaSegment, Iova, PageSize, PhysSegment};
use crate::domain::DeviceView;

/// How a mapping was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Way {
    /// Through a slot's buffer, which stays mapped.
    Slot,
    /// Through a single-use buffer, which is unmapped with it.
    SingleUse,
    /// Its unaligned head and tail through buffers, its middle directly.
    Split,
    /// Directly, by the domain.
    Direct,
}

impl Way {
    /// All ways, in the order of their numbers.
    pub(crate) const ALL: [Self; 4] = [Self::Slot, Self::SingleUse, Self::Split, Self::Direct];
}

/// A mapping: its address and length, by which [`unmap`](super::BouncePool::unmap) ends it, and the device's segments.
#[derive(Debug, Clone, Copy)]
pub struct PoolMapping<'a> {
    pub(super) iova: Iova,
    pub(super) len: u64,
    pub(super) way: Way,
    /// For a direct mapping with gaps: its pieces, and the granule.
    pub(super) list: Option<(&'a [PhysSegment], PageSize)>,
}

impl<'a> PoolMapping<'a> {
    /// The address of the first byte, for the device and for unmap.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// The length for unmap: bytes from the first to the last, gaps included.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "a mapping holds at least one byte")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// How it was made.
    #[inline]
    pub fn way(&self) -> Way {
        self.way
    }

    /// Writes the device's [segments](Self::segments) to `out`, as many as fit: there are never more than pieces of the mapped list. Returns the
    /// number written. O(pieces).
    #[inline]
    pub fn write_segments(&self, out: &mut [DmaSegment]) -> usize {
        // Nearly all mappings are one segment, for which the general code costs more than the map.
        if self.list.is_none() {
            let Some(place) = out.first_mut() else { return 0 };
            *place = DmaSegment { iova: self.iova, len: self.len };
            return 1;
        }
        let places = out.iter_mut().zip(self.segments());
        places.map(|(place, segment)| *place = segment).count()
    }

    /// The device's segments, in order: one for a mapping through buffers, or whose pieces touch; several only for a list that was mapped
    /// directly and has gaps inside its pages.
    pub fn segments(&self) -> impl Iterator<Item = DmaSegment> + use<'a> {
        let whole = DmaSegment { iova: self.iova, len: self.len };
        let (list, granule) = self.list.map_or((&[][..], PageSize::SIZE_4K), |parts| parts);
        let one = if self.list.is_none() { Some(whole) } else { None };
        // The list's sums were checked when it was mapped.
        let view = DeviceView::new(list, Some(self.iova.align_down(granule)), granule);
        one.into_iter().chain(view.flatten())
    }
}
