//! The IOMMU of RISC-V.
//!
//! [`Unit::start`] takes a unit over, whatever firmware has left of it, and lets no device reach
//! anything until it is attached. The unit is the
//! [`InvalidationQueue`](portcullis::invalidation::InvalidationQueue) of all its domains, each of which has an `Arc` of it. CPUs share their
//! waits where [`Host::cpus`](crate::Host::cpus) says how many there are.
//!
//! All domains of a unit use one [`Stage`]: the number of a domain is the tag of its translations
//! (PSCID of the first stage, GSCID of the second), and an invalidation names nothing else. There
//! are no process directories and no MSI page tables. Devices may not ask for translations to keep
//! (ATS). Their MSIs are writes like any other: the domain of a device that sends some maps the
//! interrupt controller's pages.
//!
//! The unit never caches what is absent (section "Caching invalid entries"), so that to map and to
//! attach need no invalidation. (An emulated unit that wants one for each mapping says so outside
//! of its registers, and is not served.)
//!
//! Interrupts of the unit stay off: ask for faults by [`next_fault`](crate::Iommu::next_fault).

mod capabilities;
mod directory;
mod faults;
pub(crate) mod layout;
mod queue;
#[cfg(all(test, not(loom)))]
mod tests;
mod unit;

pub use capabilities::{Capabilities, Stage};
pub use unit::Unit;
