//! VT-d's own mapping events, `intel_iommu:*` of Linux 5.4 to 5.10: they name the device, and addresses and sizes of buffers, of pages, or
//! of both.

use super::{Fields, ParseError, Text, need, read};
use crate::event::EventKind;

/// VT-d's smallest page.
const PAGE: u64 = 4096;

impl<'a> Text<'a> {
    /// `intel_iommu:map_single` and its kin, of Linux 5.4 to 5.10. Mappings are whole pages. The size of a `map_single` is that of the
    /// pages, its addresses are the buffer's; others have the buffer's size, or page-aligned addresses.
    pub(super) fn vtd_map(self, of_pages: bool) -> Result<EventKind<'a>, ParseError<'a>> {
        let text = self.text;
        let fields = read(text, self.lists)?.0;
        let (at, size) = vtd_pages(&fields, of_pages, text)?;
        let phys = need(fields.phys_addr, "a field phys_addr=", text)?;
        Ok(EventKind::IommuMap { device: fields.device, iova: at, phys: phys - phys % PAGE, size })
    }

    /// `intel_iommu:unmap_single` and its kin: unmaps are whole pages, and the event's size is not.
    pub(super) fn vtd_unmap(self) -> Result<EventKind<'a>, ParseError<'a>> {
        let text = self.text;
        let fields = read(text, self.lists)?.0;
        let (iova, size) = vtd_pages(&fields, false, text)?;
        Ok(EventKind::IommuUnmap { device: fields.device, iova, size, unmapped: size })
    }
}

/// The pages of a VT-d event: address and size. If the event's size is already theirs, the offset of its address adds none.
fn vtd_pages<'a>(fields: &Fields<'a>, of_pages: bool, text: &'a [u8]) -> Result<(u64, u64), ParseError<'a>> {
    let at = need(fields.dev_addr, "a field dev_addr=", text)?;
    let size = need(fields.size, "a field size=", text)?;
    let inside = if of_pages && size % PAGE == 0 { 0 } else { at % PAGE };
    Ok((at - at % PAGE, inside.saturating_add(size).div_ceil(PAGE).saturating_mul(PAGE)))
}
