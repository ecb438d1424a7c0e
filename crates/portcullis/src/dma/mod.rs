//! What a driver calls: map a buffer for a device, hand it over, unmap it.
//!
//! There are two levels. The *typed* one, [`DmaDevice::map`], takes the buffer and gives back a [`Mapped`]
//! that owns it, so that memory cannot be used or freed while the device may reach it. The *raw* one
//! ([`DmaDevice::map_single`], [`DmaDevice::map_sg`]) deals in numbers, for kernels that keep account of
//! their buffers themselves.

mod coherent;
mod device;
mod layout;
mod mapped;

pub use coherent::{CoherentError, CoherentMemory};
pub use device::DmaDevice;
pub use mapped::{DmaBuffer, MapFailed, Mapped, ReclaimFailed, Unlinked};

use crate::addr::Iova;

/// A piece of a mapping as the device sees it: what a driver writes into a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DmaSegment {
    /// The address for the device.
    pub iova: Iova,
    /// Its length in bytes.
    pub len: u64,
}
