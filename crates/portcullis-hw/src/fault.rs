//! A refused access, in one form for all IOMMUs.

use core::fmt;

use portcullis::addr::{DeviceId, Iova};

/// What the device attempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read memory.
    Read,
    /// Write memory.
    Write,
    /// Execute from memory.
    Execute,
    /// Read and write it in one atomic operation.
    Atomic,
}

/// Why it was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The device is attached to nothing.
    NotAttached,
    /// The device's context is malformed, or asks for a feature that the unit lacks.
    BadContext,
    /// The context does not allow this kind of request: with or without a PASID, a translation request, an already translated address, an
    /// execute access, or a privileged one.
    BadRequest,
    /// No mapping covers the address, or the mapping does not allow the access. (Not every IOMMU distinguishes them.)
    NotMapped,
    /// A mapping covers the address, and does not allow the access.
    Permission,
    /// The address is wider than the tables translate.
    BeyondWidth,
    /// A page table entry has bits that the unit does not know.
    BadEntry,
    /// The unit could not read one of its structures or a page table, or could not set a bit there.
    Unreadable,
    /// Another reason; see the code.
    Other,
}

/// One refused access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The device: for PCI bus, device and function, as 16 bits. [`DeviceId`] `u32::MAX` if the unit names a guest instead (AMD-Vi's
    /// VIOMMU_HARDWARE_ERROR).
    pub device: DeviceId,
    /// The PASID, if the request had one.
    pub pasid: Option<u32>,
    /// The address, as far as the unit reports it (VT-d reports the 4 KiB page). `None` if it does not.
    pub address: Option<Iova>,
    /// What the device attempted; `None` if the unit does not say.
    pub access: Option<Access>,
    /// Why it was refused.
    pub reason: Reason,
    /// The unit's own code.
    pub code: u32,
}

/// Writes the access in words: `read`, `read and write`.
impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Execute => "execute from",
            Self::Atomic => "read and write",
        })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotAttached => "the device is attached to nothing",
            Self::BadContext => "its context is malformed",
            Self::BadRequest => "its context does not allow this kind of request",
            Self::NotMapped => "nothing is mapped there for this",
            Self::Permission => "the mapping does not allow this",
            Self::BeyondWidth => "the address is wider than the tables",
            Self::BadEntry => "an entry of the page table has bits that the unit does not know",
            Self::Unreadable => "the unit could not read its structures",
            Self::Other => "the code says why",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let access: &dyn fmt::Display = match &self.access {
            Some(access) => access,
            None => &"access",
        };
        let reason = self.reason;
        write!(f, "device {:#x} could not {access} ", self.device.0)?;
        match self.address {
            Some(address) => write!(f, "{address}")?,
            None => f.write_str("memory")?,
        }
        if let Some(pasid) = self.pasid {
            write!(f, " with PASID {pasid}")?;
        }
        write!(f, ": {reason} (code {:#x})", self.code)
    }
}

impl core::error::Error for Fault {}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_fault_says_who_did_what_where_and_why() {
        let fault = Fault {
            device: DeviceId(0x28),
            pasid: Some(7),
            address: Some(Iova::new(0x5000)),
            access: Some(Access::Write),
            reason: Reason::NotMapped,
            code: 5,
        };
        let said = "device 0x28 could not write 0x5000 with PASID 7: nothing is mapped there for this \
            (code 0x5)";
        assert_eq!(alloc::format!("{fault}"), said);
        let unknown = Fault { pasid: None, address: None, access: None, reason: Reason::Other, ..fault };
        let said = "device 0x28 could not access memory: the code says why (code 0x5)";
        assert_eq!(alloc::format!("{unknown}"), said);
    }

    #[test]
    fn each_access_and_each_reason_has_words_of_its_own() {
        let fault = Fault {
            device: DeviceId(0x28),
            pasid: None,
            address: None,
            access: None,
            reason: Reason::Other,
            code: 5,
        };
        for (access, words) in [
            (Access::Read, "read"),
            (Access::Write, "write"),
            (Access::Execute, "execute from"),
            (Access::Atomic, "read and write"),
        ] {
            let said = alloc::format!("device 0x28 could not {words} memory: the code says why (code 0x5)");
            assert_eq!(alloc::format!("{}", Fault { access: Some(access), ..fault }), said);
        }
        for (reason, words) in [
            (Reason::NotAttached, "the device is attached to nothing"),
            (Reason::BadContext, "its context is malformed"),
            (Reason::BadRequest, "its context does not allow this kind of request"),
            (Reason::NotMapped, "nothing is mapped there for this"),
            (Reason::Permission, "the mapping does not allow this"),
            (Reason::BeyondWidth, "the address is wider than the tables"),
            (Reason::BadEntry, "an entry of the page table has bits that the unit does not know"),
            (Reason::Unreadable, "the unit could not read its structures"),
            (Reason::Other, "the code says why"),
        ] {
            let said = alloc::format!("device 0x28 could not access memory: {words} (code 0x5)");
            assert_eq!(alloc::format!("{}", Fault { reason, ..fault }), said);
        }
    }
}
