//! A software IOMMU: what Portcullis is tested and measured against where there is no hardware.
//!
//! [`Memory`] is physical memory, [`Iommu`] the unit that stands between it and the devices. The unit walks
//! the real page tables (of any of the formats in [`TableFormat`]) out of that memory, caches what it found as hardware does
//! (an IOTLB, paging-structure caches, TLBs in devices), and forgets only what an invalidation tells it to forget. So a
//! missing invalidation is not an argument about the code but an access that *reaches* freed memory, and the
//! [`exposure`] ledger says how many bytes were open for how long.
//!
//! It takes the manuals literally: a large translation goes only with an invalidation that the architecture says it goes with
//! ([`iotlb`]), entries that make one page and differ fault, and in caching mode ([`IommuConfig::caches_absent`]) what was found
//! absent stays so until it is invalidated.
//!
//! # Guarantees
//! - No access of a device and no address can make it panic: every sum is checked, every fault is a value.
//! - A cache never holds more than its hardware would, and replaces in true least-recently-used order, so
//!   the miss counts depend on the accesses alone and repeat exactly.
//! - One lock per unit: an access and an invalidation never overlap. When
//!   [`Queue`]`::invalidate` has returned, no earlier access is still on its way (VT-d's
//!   read and write draining).
//!
//! # Cost
//! Some tens of nanoseconds per access; `examples/throughput.rs` measures it.
//!
//! Everything here is safe but for what the library's traits ask: [`open`] has its unsafe calls in safe form, for simulated devices.
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
