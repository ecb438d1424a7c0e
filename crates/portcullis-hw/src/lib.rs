//! Drivers of IOMMUs, for kernels and for every other program that reaches a unit's registers.
//!
//! A driver brings its unit up, makes domains ([`Iommu::domain`]), attaches devices to them, carries out their invalidations
//! ([`InvalidationQueue`](portcullis::invalidation::InvalidationQueue)), and reads faults. All drivers implement the trait [`Iommu`],
//! except [`virtio`], whose [`Unit`](virtio::Unit) has no page tables, and has these calls as methods. A driver owns the unit's structures
//! in memory. Page tables belong to domains.
//!
//! | module | IOMMU | page tables |
//! |---|---|---|
//! | [`vtd`] | Intel VT-d, legacy or scalable mode | second stage; x86-64's in scalable mode |
//! | [`amdvi`] | AMD-Vi | version 1 |
//! | [`smmuv3`] | Arm's SMMUv3 | first or second stage, pages of 4, 16 or 64 KiB |
//! | [`riscv`] | the IOMMU of RISC-V | first or second stage |
//! | [`virtio`] | virtio-iommu | none: it maps by request |
//!
//! With the feature `model` the module `model` has a VT-d unit in software, to test a kernel's port without hardware.
//!
//! A kernel supplies a [`Host`]: registers, memory and a clock. Each wait for hardware ends at the latest after the time that the host
//! allows, with an error that names what did not answer.
//!
//! A `layout` file of a driver defines where bits lie, by the manual, and holds no behaviour; no other file names a bit.
#![no_std]

extern crate alloc;

mod answers;
mod blocks;
mod command_ring;
#[cfg(all(test, not(loom)))]
mod commands;
mod domain;
mod failures;
#[cfg(all(test, not(loom)))]
mod fake;
mod fault;
mod frames;
mod heap;
mod host;
mod iommu;
mod numbers;
mod queue;
#[cfg(all(test, not(loom)))]
mod said;
mod switch;
mod sync;
#[cfg(all(test, not(any(loom, watched))))]
#[path = "../../portcullis/tests/transcript/text.rs"]
mod transcript;
mod waits;

pub mod acpi;
pub mod amdvi;
#[cfg(all(feature = "model", not(loom)))]
pub mod model;
pub mod riscv;
pub mod smmuv3;
#[cfg(all(feature = "parts", not(loom)))]
pub mod software;
pub mod virtio;
pub mod vtd;

pub use domain::{DomainError, UnitDomain, UnitDomainBuilder, UnitMapper, UnitQueue, UnitTables};
pub use fault::{Access, Fault, Reason};
pub use host::{Host, Registers, UnitError};
pub use iommu::{Attachment, Iommu};
pub use numbers::Numbers;

/// Compiles the examples of `docs/porting.md`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/porting.md")]
struct Porting;
