//! AMD-Vi, AMD's I/O virtualization technology.
//!
//! [`Unit::start`] takes over a unit in whatever state firmware left it. After [`enable`](crate::Iommu::enable) no device reaches memory
//! until it is attached. The unit is the [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains, each of
//! which holds an `Arc` of it. CPUs share waits if [`Host::cpus`](crate::Host::cpus) gives their number.
//!
//! Domains use version 1 host page tables. The driver leaves off device TLBs, page requests, guest translation and the exclusion range. It
//! does not remap interrupts: no device table entry has an interrupt table. Mappers do not map addresses that the unit
//! [reserves](crate::Iommu::reserved).

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
