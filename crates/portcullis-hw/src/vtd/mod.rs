//! Intel VT-d.
//!
//! [`Unit::start`] takes over a unit in whatever state firmware left it. After [`enable`](crate::Iommu::enable) no device reaches memory
//! until it is attached. The unit is the [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains, each of
//! which holds an `Arc` of it. CPUs share waits if [`Host::cpus`](crate::Host::cpus) gives their number.
//!
//! The unit walks second-stage tables, in legacy mode or in scalable mode ([`Mode`]). In scalable mode it may also have the first stage,
//! with x86-64 tables: [`FirstStage`] is the unit for domains that have these. The requests of a device without PASID use tables of one
//! stage; the unit refuses requests with a PASID, and device TLBs. The driver does not touch interrupt remapping.

mod capabilities;
mod faults;
mod first_stage;
pub(crate) mod layout;
#[cfg(all(test, not(loom)))]
mod mode_tests;
mod queue;
mod tables;
#[cfg(all(test, not(loom)))]
mod tests;
mod unit;

pub use capabilities::{Capabilities, Mode};
pub use faults::reason_of;
pub use first_stage::FirstStage;
pub use unit::Unit;
