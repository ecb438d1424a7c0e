//! How a list of memory segments looks to a device: as segments that hold all of its bytes in
//! order, each at an address that the device can use.

use crate::addr::{DmaSegment, Iova, PageSize, PhysSegment};

/// The device's view of a list, in order. Neighbours that touch become one. It ends with `None`
/// where a sum has no address, which cannot happen for a list that was mapped.
#[derive(Debug, Clone)]
pub(crate) struct DeviceView<'a> {
    rest: &'a [PhysSegment],
    /// Where the first page of `rest` is mapped; `None` without translation.
    page: Option<u64>,
    granule: PageSize,
}

impl<'a> DeviceView<'a> {
    /// With translation, `base` is the address at which the first page of `list` is mapped; the
    /// pages of one segment follow those of the one before, in pages of `granule`. Without `base`,
    /// the device uses the memory's own addresses.
    #[inline]
    pub(crate) fn new(list: &'a [PhysSegment], base: Option<Iova>, granule: PageSize) -> Self {
        Self { rest: list, page: base.map(Iova::get), granule }
    }

    /// Where the device finds `piece`, the first of the rest.
    #[inline]
    fn place(&self, piece: &PhysSegment) -> Option<Iova> {
        match self.page {
            Some(page) => page.checked_add(piece.phys.page_offset(self.granule)).map(Iova::new),
            None => Some(Iova::new(piece.phys.get())),
        }
    }

    /// Goes on behind `piece`.
    #[inline]
    fn pass(&mut self, piece: &PhysSegment) -> Option<()> {
        if let Some(page) = &mut self.page {
            let end = piece.phys.page_offset(self.granule).checked_add(piece.len)?;
            // May wrap after the last segment only: the mapped range does not.
            *page = page.wrapping_add(self.granule.round_up(end)?);
        }
        Some(())
    }

    /// The segment that begins with `first`, which is taken off the rest.
    #[inline]
    fn segment(&mut self, first: &PhysSegment) -> Option<DmaSegment> {
        let iova = self.place(first)?;
        let mut len = first.len;
        self.pass(first)?;
        while let Some((piece, rest)) = self.rest.split_first() {
            let at = self.place(piece)?;
            if iova.checked_add(len) != Some(at) {
                break;
            }
            len = len.checked_add(piece.len)?;
            self.rest = rest;
            self.pass(piece)?;
        }
        Some(DmaSegment { iova, len })
    }
}

impl Iterator for DeviceView<'_> {
    type Item = Option<DmaSegment>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        let segment = self.segment(first);
        if segment.is_none() {
            self.rest = &[];
        }
        Some(segment)
    }
}
