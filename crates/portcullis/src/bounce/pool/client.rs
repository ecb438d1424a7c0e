//! A device as its pool sees it: what it reaches, which bytes it may find in a buffer, and what it may be given.

use super::BouncePool;
use super::config::DeviceProfile;
use crate::addr::{Iova, PhysSegment};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::setup::SetupError;

/// Beside a group: what maps for it has nothing but addresses. So no token of a queue is of a mapping that was ended by its address.
const BY_NUMBER: u64 = 1 << 33;

/// A device as its pool sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    pub(super) profile: DeviceProfile,
    /// Whose mappings and bytes these are.
    pub(super) group: u64,
    pub(super) reaches_slots: bool,
    /// Bits of an address that are 0 where the device may be given what begins or ends there.
    pub(super) inside: u64,
}

impl Client {
    /// The highest address that the device can put on the bus.
    pub(super) fn limit(&self) -> Iova {
        Iova::new(self.profile.mask)
    }

    #[inline]
    pub(super) fn group(&self) -> u64 {
        self.group
    }

    /// The same device, for mappings that are found and ended by their addresses: they are its group's that are mapped so, and no queue's.
    #[inline]
    pub(crate) fn by_number(self) -> Self {
        Self { group: self.group | BY_NUMBER, ..self }
    }

    /// Returns the bytes of `list`, whose sums are not checked, and whether the device may be given all of its granules: for
    /// an untrusted one, whether each piece consists of whole ones.
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
    /// Returns a device with this profile, as this pool sees it.
    ///
    /// # Errors
    /// [`SetupError::OffsetMask`] where the bits to keep are not the lowest, or reach beyond a
    /// granule's offset.
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
