//! What a unit refused, in one form for all IOMMUs.

use portcullis::addr::{DeviceId, Iova};

/// What the device was about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read memory.
    Read,
    /// Write memory.
    Write,
    /// Execute from memory.
    Execute,
    /// Read and write it as one (an atomic operation).
    Atomic,
}

/// Why it may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The device is attached to nothing.
    NotAttached,
    /// The device's context is malformed, or asks for what the unit does not have.
    BadContext,
    /// No mapping covers the address, or the mapping does not allow this access. (Not every IOMMU tells the two apart.)
    NotMapped,
    /// A mapping covers the address, and does not allow this access.
    Permission,
    /// The address has bits that the tables do not translate.
    BeyondWidth,
    /// An entry of a page table has bits that the unit does not know.
    BadEntry,
    /// The unit could not read one of its structures, or a page table.
    Unreadable,
    /// Something else; the code says what.
    Other,
}

/// One refused access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("device {:#x} may not {access:?} {address:?}: {reason:?} (code {code:#x})", device.0)]
pub struct Fault {
    /// Whose access it was: for PCI bus, device and function, as 16 bits.
    pub device: DeviceId,
    /// The process address space that the device named, if it named one.
    pub pasid: Option<u32>,
    /// The address that it used; often only its page is known. `None` where the unit does not say.
    pub address: Option<Iova>,
    /// What it was about to do; `None` where the unit does not say.
    pub access: Option<Access>,
    /// Why it may not.
    pub reason: Reason,
    /// The unit's own code for it.
    pub code: u32,
}
