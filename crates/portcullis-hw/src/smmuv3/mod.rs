//! Arm's SMMUv3.
//!
//! [`Unit::start`] takes a unit over, whatever firmware has left of it, and lets no device reach
//! anything until it is attached. The unit is the
//! [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains, each of which has an `Arc` of it. CPUs share their
//! waits where [`Host::cpus`](crate::Host::cpus) says how many there are; or have command queues of their own, where the unit has those (ECMDQ).
//!
//! A device's number is its stream's: for PCI bus, device and function, and what the firmware's
//! tables say to put above them. Tables have pages of one size in all domains of a unit. A domain
//! has tables of the first or of the second stage, and both kinds may be there at once: its number
//! is the ASID, or the VMID. Streams of the first stage have VMID 0.
//!
//! Devices' own TLBs (ATS), substreams and page requests are left off. Refused accesses are
//! aborted, never stalled.

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
    /// The first: tables as a process's or a kernel's. A page that is written can be read.
    One,
    /// The second: tables as a virtual machine's.
    Two,
}

impl Stage {
    /// The stage that tables of this layout are for.
    const fn of<const GRANULE: u32>(format: &Arm<GRANULE>) -> Self {
        if format.is_stage_2() { Self::Two } else { Self::One }
    }
}
