//! Arm's SMMUv3.
//!
//! [`Unit::start`] takes over a unit in whatever state firmware left it. After [`enable`](crate::Iommu::enable) no device reaches memory
//! until it is attached. The unit is the [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains, each of
//! which holds an `Arc` of it. CPUs share waits if [`Host::cpus`](crate::Host::cpus) gives their number, or have command queues of their
//! own if the unit has ECMDQs.
//!
//! A device's ID is its stream ID: for PCI bus, device and function, and the upper bits that firmware's tables say. All tables of a unit
//! have one page size. A domain has first-stage or second-stage tables, and a unit may have domains of both: a domain's number is its ASID
//! or its VMID. First-stage streams have VMID 0.
//!
//! The driver leaves off ATS, substreams and page requests. Refused accesses abort, and never stall.

mod events;
pub(crate) mod layout;
mod own;
mod queue;
mod streams;
#[cfg(all(test, not(loom)))]
mod tests;
mod unit;

use portcullis::pgtable::Arm;

pub use events::reason_of;
pub use unit::{Capabilities, Unit};

/// A stage of translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The first: tables of a process or a kernel. A writable page is readable.
    One,
    /// The second: tables of a virtual machine.
    Two,
}

impl Stage {
    const fn of<const GRANULE: u32>(format: &Arm<GRANULE>) -> Self {
        if format.is_stage_2() { Self::Two } else { Self::One }
    }
}
