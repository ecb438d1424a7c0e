//! A mapper's list of memory, checked and merged into contiguous pieces.

use portcullis::addr::{IovaRange, Permissions, PhysAddr};
use portcullis::mapper::Geometry;
use portcullis::pgtable::MapError;

/// Contiguous memory, and its IOVAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub range: IovaRange,
    /// Address of the memory.
    pub address: u64,
    /// The devices' permissions.
    pub permissions: Permissions,
}

/// The pieces of a list, which fill `range`. Merges adjacent ones. Allocates.
///
/// # Errors
/// [`MapError::Misaligned`], [`MapError::BeyondAperture`] or [`MapError::Length`] for an invalid list; [`MapError::OutOfMemory`].
pub fn checked(
    geometry: &Geometry,
    range: IovaRange,
    list: impl IntoIterator<Item = (PhysAddr, u64)>,
    permissions: Permissions,
) -> Result<Vec<Piece>, MapError> {
    let granule = geometry.page_sizes.smallest().map_or(1, |size| size.bytes());
    let misaligned = |phys| MapError::Misaligned { range, phys, granule };
    if !(range.start().get() | range.len()).is_multiple_of(granule) {
        return Err(misaligned(PhysAddr::new(0)));
    }
    if !geometry.aperture.contains_range(range) {
        return Err(MapError::BeyondAperture { range, last: geometry.aperture.last() });
    }
    let mut pieces: Vec<Piece> = Vec::new();
    let mut done = 0_u64;
    for (phys, len) in list {
        if !(phys.get() | len).is_multiple_of(granule) || len == 0 {
            return Err(misaligned(phys));
        }
        let at = range.start().checked_add(done);
        done = done.saturating_add(len);
        let too_long = MapError::Length { range, list: done };
        let at = at.filter(|_| done <= range.len()).ok_or(too_long)?;
        match pieces.last_mut() {
            Some(last) if last.address.checked_add(last.range.len()) == Some(phys.get()) => {
                last.range =
                    IovaRange::new(last.range.start(), last.range.len() + len).map_err(|_| too_long)?;
            }
            _ => {
                pieces.try_reserve(1).map_err(|_| MapError::OutOfMemory)?;
                let range = IovaRange::new(at, len).map_err(|_| too_long)?;
                pieces.push(Piece { range, address: phys.get(), permissions });
            }
        }
    }
    if done == range.len() { Ok(pieces) } else { Err(MapError::Length { range, list: done }) }
}
