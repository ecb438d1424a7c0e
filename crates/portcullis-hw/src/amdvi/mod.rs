//! AMD-Vi, AMD's I/O virtualization technology.
//!
//! [`Unit::start`] takes a unit over, whatever firmware has left of it, and from
//! [`enable`](crate::Iommu::enable) on no device reaches anything until it is attached. The unit is
//! the [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains: give
//! each an `Arc` of it, or of a [`SharedQueue`](portcullis::invalidation::SharedQueue) around one,
//! so that CPUs share waits.
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
