//! A list of memory segments as a device sees it: segments with device addresses, in the order of the list's bytes.

use crate::addr::{DmaSegment, Iova, PageSize, PhysSegment};

/// The device's view of a list, in order. Touching neighbours are merged. It ends with `None` if a sum overflows, which cannot happen for a
/// mapped list.
#[derive(Debug, Clone)]
pub(crate) struct DeviceView<'a> {
    rest: &'a [PhysSegment],
    /// The address of the first page of `rest`; `None` without translation.
    page: Option<u64>,
    granule: PageSize,
}

impl<'a> DeviceView<'a> {
    /// With translation, `base` is the address of the first page of `list`, and the segments' pages follow each other. Without `base`, the
    /// device uses physical addresses.
    #[inline]
    pub(crate) fn new(list: &'a [PhysSegment], base: Option<Iova>, granule: PageSize) -> Self {
        Self { rest: list, page: base.map(Iova::get), granule }
    }

    #[inline]
    fn place(&self, piece: &PhysSegment) -> Option<Iova> {
        match self.page {
            Some(page) => page.checked_add(piece.phys.page_offset(self.granule)).map(Iova::new),
            None => Some(Iova::new(piece.phys.get())),
        }
    }

    #[inline]
    fn pass(&mut self, piece: &PhysSegment) -> Option<()> {
        if let Some(page) = &mut self.page {
            let end = piece.phys.page_offset(self.granule).checked_add(piece.len)?;
            // Wraps after the last segment only: the mapped range does not.
            *page = page.wrapping_add(self.granule.round_up(end)?);
        }
        Some(())
    }

    /// The merged segment that begins with `first`, which the caller has taken off `rest`.
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
