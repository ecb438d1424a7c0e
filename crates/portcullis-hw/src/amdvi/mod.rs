//! AMD-Vi, AMD's I/O virtualization technology.
//!
//! [`Unit::start`] takes a unit over, whatever firmware has left of it, and from
//! [`enable`](crate::Iommu::enable) on no device reaches anything until it is attached. The unit is
//! the [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains, each of which has an `Arc` of it. CPUs share their
//! waits where [`Host::cpus`](crate::Host::cpus) says how many there are.
//!
//! Host translation by version 1 tables. Devices' own TLBs stay off, as do page requests, guest
//! translation, and the exclusion range. Interrupts are not remapped: no entry of the device table
//! has an interrupt table. Mappers keep what the unit
//! [reserves](crate::Iommu::reserved) out of use.

mod events;
pub(crate) mod layout;
mod queue;
#[cfg(all(test, not(loom)))]
mod race_tests;
#[cfg(all(test, not(loom)))]
mod tests;
mod unit;

pub use events::decode as decode_event;
pub use unit::{Capabilities, Config, Unit};
