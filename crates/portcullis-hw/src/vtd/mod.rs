//! Intel VT-d.
//!
//! [`Unit::start`] takes a unit over, whatever firmware has left of it, and lets no device reach anything until it is
//! attached. The unit is the [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains: give each
//! an `Arc` of it, or of a [`SharedQueue`](portcullis::invalidation::SharedQueue) around one, so that CPUs share waits.
//!
//! Legacy mode, second stage. Interrupt remapping is left as it is.

mod faults;
pub(crate) mod layout;
mod queue;
mod unit;

pub use unit::{Capabilities, Unit};
