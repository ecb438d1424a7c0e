//! A [`Domain`]: one I/O address space, with its addresses, its translations and its protection policy.

mod account;
mod error;
mod policies;
mod policy;
mod space;
mod view;

pub use error::{DomainError, MapListError, UnmapError};
pub use policies::Policies;
pub(crate) use policy::{AtomicPolicy, PolicyWord};
pub use policy::{Policy, PolicyError};
pub(crate) use space::{Changing, Ending, Fate, LinkFailed, Tally, last_byte};
pub use space::{Domain, DomainStats, Linked, Refused, Reserved, StillMapped, Unlinked};
pub(crate) use view::DeviceView;

use crate::addr::{Iova, PhysAddr};

/// A piece of a buffer that lies in one piece in physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PhysSegment {
    /// Where it begins.
    pub phys: PhysAddr,
    /// Its length in bytes.
    pub len: u64,
}

impl PhysSegment {
    /// Its last byte. It is number `index` of its list.
    #[inline]
    pub(crate) fn last_byte(self, index: usize) -> Result<PhysAddr, MapListError> {
        let Self { phys, len } = self;
        let distance = len.checked_sub(1).ok_or(MapListError::EmptySegment { index, phys })?;
        phys.checked_add(distance).ok_or(MapListError::Wraps { index, phys, len })
    }
}

/// A piece of a mapping as the device sees it: what a driver writes into a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DmaSegment {
    /// The address for the device.
    pub iova: Iova,
    /// Its length in bytes.
    pub len: u64,
}
