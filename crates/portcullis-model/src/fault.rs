//! Faults: why an access was refused, and the bounded log that the unit keeps of them.

use std::collections::VecDeque;

use portcullis::addr::{Iova, Permissions, PhysAddr};

use crate::iommu::DeviceId;

/// Why an access was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultReason {
    /// An entry on the way allows nothing.
    #[error("the entry at level {level} is not present")]
    NotPresent {
        /// The level of the table it is in; 1 is the lowest.
        level: u32,
    },
    /// The translation exists and does not allow this access.
    #[error("the translation does not allow it")]
    Permission,
    /// An entry on the way has a bit set that must be clear, or an encoding that must not be used.
    #[error("an entry on the way has a reserved bit set")]
    ReservedBit,
    /// The leaf has not been marked as accessed, and this hardware does not do that by itself.
    #[error("the entry's access flag is clear")]
    AccessFlag,
    /// An entry on the way names an address beyond those that the context lets tables name.
    #[error("an entry on the way has an address that is too wide")]
    AddressSize,
    /// The leaf says that it is one of a run of alike entries, and they are not. Hardware may use any of them.
    #[error("the entries of a contiguous run differ")]
    InconsistentRun,
    /// The address has bits that the tables do not translate.
    #[error("the address is wider than the tables")]
    BeyondWidth,
    /// The device was never attached, or was detached.
    #[error("the device has no context")]
    NoContext,
    /// The device's context lets nothing through.
    #[error("the device is blocked")]
    Blocked,
    /// The device's context asks for tables of dimensions that the hardware does not have, or names a root that
    /// is not aligned.
    #[error("the device's context is malformed")]
    BadContext,
    /// A table on the way is not in the memory.
    #[error("the table at {0} is not in the memory")]
    BadTable(PhysAddr),
    /// The translation leads to where there is no memory to read or write.
    #[error("there is no memory at {0}")]
    NoMemory(PhysAddr),
}

/// One refused access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("device {} may not access ({access:?}) {iova}: {reason}", device.0)]
pub struct Fault {
    /// Whose access it was.
    pub device: DeviceId,
    /// The first address that was refused.
    pub iova: Iova,
    /// What the device wanted.
    pub access: Permissions,
    /// Why it was refused.
    pub reason: FaultReason,
}

/// The newest faults are lost when it is full, as in hardware; the counts go on.
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
