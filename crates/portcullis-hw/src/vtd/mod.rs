//! Intel VT-d.
//!
//! [`Unit::start`] takes a unit over, whatever firmware has left of it, and lets no device reach anything until it is
//! attached. The unit is the [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains, each of which has an `Arc` of it. CPUs share their
//! waits where [`Host::cpus`](crate::Host::cpus) says how many there are.
//!
//! The unit walks tables of the second stage, in legacy mode or in scalable mode ([`Mode`]). In
//! scalable mode it may have the first stage, too, whose tables are those of x86-64: [`FirstStage`]
//! is the unit for domains that have these. Each device is led to tables of one stage, by its
//! requests without PASID; those with one are refused, and so is what devices would cache for
//! themselves. Interrupt remapping is left as it is.

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
