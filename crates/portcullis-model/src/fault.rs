//! Faults: why an access was refused, and the unit's bounded log.

use std::collections::VecDeque;

use portcullis::addr::{Iova, Permissions, PhysAddr};

use crate::iommu::DeviceId;

/// Why an access was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultReason {
    /// An entry on the path allows nothing.
    #[error("the entry at level {level} is not present")]
    NotPresent {
        /// The level of its table; 1 is the lowest.
        level: u32,
    },
    /// The translation exists and does not allow this access.
    #[error("the translation does not allow it")]
    Permission,
    /// An entry on the path has a reserved bit set, or an invalid encoding.
    #[error("an entry on the way has a reserved bit set")]
    ReservedBit,
    /// The leaf's access flag is clear, and this hardware does not set it.
    #[error("the entry's access flag is clear")]
    AccessFlag,
    /// An entry on the path names an address beyond the context's output width.
    #[error("an entry on the way has an address that is too wide")]
    AddressSize,
    /// The leaf claims to be one of a run of contiguous entries, and they differ. Hardware may use any of them.
    #[error("the entries of a contiguous run differ")]
    InconsistentRun,
    /// The address is wider than the tables translate.
    #[error("the address is wider than the tables")]
    BeyondWidth,
    /// The device was never attached, or was detached.
    #[error("the device has no context")]
    NoContext,
    /// The device's context blocks all accesses.
    #[error("the device is blocked")]
    Blocked,
    /// The device's context asks for table dimensions that the hardware lacks, or names a misaligned root.
    #[error("the device's context is malformed")]
    BadContext,
    /// A table on the path is not in the memory.
    #[error("the table at {0} is not in the memory")]
    BadTable(PhysAddr),
    /// The translation leads outside the memory.
    #[error("there is no memory at {0}")]
    NoMemory(PhysAddr),
}

/// One refused access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("device {} may not access ({access:?}) {iova}: {reason}", device.0)]
pub struct Fault {
    /// The device.
    pub device: DeviceId,
    /// The first address that was refused.
    pub iova: Iova,
    /// The access.
    pub access: Permissions,
    /// Why it was refused.
    pub reason: FaultReason,
}

/// Drops new faults while it is full, as hardware does; the counts go on.
#[derive(Debug)]
pub(crate) struct FaultLog {
    faults: VecDeque<Fault>,
    capacity: usize,
    total: u64,
    lost: u64,
}

impl FaultLog {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { faults: VecDeque::new(), capacity, total: 0, lost: 0 }
    }

    pub(crate) fn record(&mut self, fault: Fault) {
        self.total += 1;
        if self.faults.len() < self.capacity {
            self.faults.push_back(fault);
        } else {
            self.lost += 1;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter()
    }

    pub(crate) fn take(&mut self) -> Vec<Fault> {
        self.faults.drain(..).collect()
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }
}
