//! The IOMMU of RISC-V.
//!
//! [`Unit::start`] takes over a unit in whatever state firmware left it. After [`enable`](crate::Iommu::enable) no device reaches memory
//! until it is attached. The unit is the [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains, each of
//! which holds an `Arc` of it. CPUs share waits if [`Host::cpus`](crate::Host::cpus) gives their number.
//!
//! All domains of a unit use one [`Stage`]: a domain's number is the tag of its translations (PSCID of the first stage, GSCID of the
//! second), and an invalidation names nothing else. The driver uses no process directories, no MSI page tables and no ATS. MSIs are writes
//! like any other: the domain of a device that sends them maps the interrupt controller's pages.
//!
//! The unit never caches non-present entries (section "Caching invalid entries"), so map and attach need no invalidation. (The driver does
//! not support an emulated unit in caching mode, which it would report outside its registers.)
//!
//! The unit's interrupts stay off: poll [`next_fault`](crate::Iommu::next_fault).

mod capabilities;
mod directory;
mod faults;
pub(crate) mod layout;
mod queue;
#[cfg(all(test, not(loom)))]
mod tests;
mod unit;

pub use capabilities::{Capabilities, Stage};
pub use faults::{access_of, reason_of};
pub use unit::Unit;
