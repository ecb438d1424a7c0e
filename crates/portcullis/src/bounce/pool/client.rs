//! What a map knows of its device, and of its list: each step of it gets both.

use super::config::DeviceProfile;
use super::slot::Terms;
use crate::addr::PhysSegment;

/// Set in the group of mappings by number. So a mapping that was ended by its address is no queue's.
const BY_NUMBER: u64 = 1 << 33;

/// A device as its pool sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    pub(super) profile: DeviceProfile,
    pub(super) group: u64,
    pub(super) reaches_slots: bool,
    /// Address bits that must be 0 where a buffer begins and ends, for the device to be given its granules.
    pub(super) inside: u64,
}

impl Client {
    /// The same device, for mappings that are found by their addresses: their group is the device's, but no queue's.
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

/// A mapping to make.
#[derive(Clone, Copy)]
pub(super) struct Request<'c, 'r> {
    pub client: &'c Client,
    pub list: &'r [PhysSegment],
    /// Where the list begins, and the bytes of the mapping.
    pub origin: PhysSegment,
    pub terms: Terms,
    /// The buffers are filled now; else by a later sync.
    pub copied: bool,
}
