//! What each step of a map knows of its device and of its list.

use super::config::DeviceProfile;
use super::slot::Terms;
use crate::addr::PhysSegment;

/// Set in the group of mappings by address, so that a call by address ends or syncs no queue's mapping.
const BY_NUMBER: u64 = 1 << 33;

/// A device as its pool sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    pub(super) profile: DeviceProfile,
    pub(super) group: u64,
    pub(super) reaches_slots: bool,
    /// For an untrusted device the granule's offset mask, else 0. A buffer that begins or ends with any of these bits set shares a granule with other
    /// data, so the device does not get its granules.
    pub(super) inside: u64,
}

impl Client {
    /// The same device, for mappings that are ended by address: their group is none of its queues' groups.
    #[inline]
    pub(crate) fn by_number(self) -> Self {
        Self { group: self.group | BY_NUMBER, ..self }
    }

    /// Returns the bytes of `list`, unchecked, and whether the device may be given all of its granules: for an untrusted one, whether each piece
    /// consists of whole ones.
    #[inline]
    pub(crate) fn look_at(&self, list: &[PhysSegment]) -> (u64, bool) {
        let look = |(len, bits): (u64, u64), piece: &PhysSegment| {
            (len.wrapping_add(piece.len), bits | piece.phys.get() | piece.len)
        };
        let (len, bits) = list.iter().fold((0, 0), look);
        (len, bits & self.inside == 0)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Request<'c, 'r> {
    pub client: &'c Client,
    pub list: &'r [PhysSegment],
    /// Where the list begins, and the bytes of the mapping.
    pub origin: PhysSegment,
    pub terms: Terms,
    /// Whether the map fills the buffers; else a later sync does.
    pub copied: bool,
}
