//! virtio-iommu: an IOMMU that a hypervisor offers, whose translations change by requests.
//!
//! [`Unit::start`] takes the device over and detaches all endpoints. It has no tables in memory: the [`RequestMapper`] of a domain is a
//! [`Mapper`](portcullis::mapper::Mapper) whose maps and unmaps are requests.
//!
//! The transport is PCI: [`Structures::find`] finds the device's registers in its configuration space.

mod events;
mod layout;
mod mapper;
mod pci;
mod requests;
mod ring;
mod settings;
mod space;
#[cfg(all(test, not(loom)))]
mod tests;
mod unit;

pub use mapper::RequestMapper;
pub use pci::{NarrowRegisters, Structures};
pub use settings::Region;
pub use unit::Unit;
