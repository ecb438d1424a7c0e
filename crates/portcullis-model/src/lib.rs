//! A software IOMMU, against which Portcullis is tested and measured without hardware.
//!
//! [`Memory`] is physical memory, [`Iommu`] the unit between it and the devices. The unit walks the real page tables (of any format in
//! [`TableFormat`]) in that memory, caches its results as hardware does (an IOTLB, paging-structure caches, device TLBs), and drops them
//! only by an invalidation. So a missing invalidation is not an argument about the code but an access that *reaches* freed memory, and the
//! [`exposure`] ledger says how many bytes were open for how long.
//!
//! It takes the manuals literally: it drops a large translation only by an invalidation that by the architecture must drop it ([`iotlb`]),
//! contiguous entries that differ fault, and in caching mode ([`IommuConfig::caches_absent`]) non-present entries are cached until they are
//! invalidated.
//!
//! # Guarantees
//! - No device access and no address makes it panic: every sum is checked, every fault is a value.
//! - A cache never exceeds its hardware's size, and replaces in true LRU order, so the miss counts depend only on the accesses and repeat
//!   exactly.
//! - One lock per unit: an access and an invalidation never overlap. When [`Queue`]`::invalidate` has returned, no earlier access is
//!   outstanding (VT-d's read and write draining).
//!
//! # Cost
//! Some tens of nanoseconds per access; `examples/throughput.rs` measures it.
//!
//! Everything here is safe except the contracts of the library's traits: [`open`] has its unsafe calls in safe form, for simulated devices.
#![deny(unsafe_code)]

pub mod exposure;
pub mod fault;
pub mod iommu;
pub mod iotlb;
pub mod memory;
pub mod open;
pub mod queue;
pub mod scale;
pub mod stats;
pub mod walk_cache;
pub mod walker;

mod absent;
mod device_tlbs;
mod sets;
mod unit;

pub use exposure::{Exposed, Segment};
pub use fault::{Fault, FaultReason};
pub use iommu::{AccessOutcome, Context, DeviceId, Iommu, IommuConfig};
pub use memory::{BadAddress, Buffer, Memory};
pub use queue::{Descriptor, Queue};
pub use stats::Stats;
pub use walker::{ArmStage, ArmTables, Granule, RiscvMode, TableFormat};
