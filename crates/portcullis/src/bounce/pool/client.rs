//! A device as its pool sees it.

use super::BouncePool;
use super::config::DeviceProfile;
use crate::addr::{Iova, PhysSegment};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::setup::SetupError;

/// Set in the group of mappings by number. So a mapping that was ended by its address is no queue's.
const BY_NUMBER: u64 = 1 << 33;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    pub(super) profile: DeviceProfile,
    pub(super) group: u64,
    pub(super) reaches_slots: bool,
    /// Address bits that must be 0 where a buffer begins and ends, for the device to be given its granules.
    pub(super) inside: u64,
}

impl Client {
    pub(super) fn limit(&self) -> Iova {
        Iova::new(self.profile.mask)
    }

    #[inline]
    pub(super) fn group(&self) -> u64 {
        self.group
    }

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

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Makes the client of a device with this profile.
    ///
    /// # Errors
    /// [`SetupError::OffsetMask`]: the bits to keep are not the lowest, or reach beyond a granule's offset.
    pub(crate) fn client(&self, profile: DeviceProfile) -> Result<Client, SetupError> {
        let mask = profile.offset_mask;
        let inside = self.domain.granule().offset_mask();
        if mask & mask.wrapping_add(1) != 0 || mask > inside {
            return Err(SetupError::OffsetMask { mask });
        }
        let reaches_slots = self.region.last().get() <= profile.mask;
        let group = profile.group.into();
        Ok(Client { profile, group, reaches_slots, inside: if profile.untrusted { inside } else { 0 } })
    }
}
