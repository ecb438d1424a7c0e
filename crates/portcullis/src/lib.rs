//! DMA remapping as a library: which bytes a device may touch, and for how long.
//!
//! A device reaches memory through *I/O virtual addresses* that an IOMMU translates. This crate hands out
//! those addresses, writes the page tables, and makes the hardware forget translations when a mapping ends,
//! by the [`Policy`](domain::Policy) chosen. It needs `alloc` and an embedder that implements
//! [`Platform`](platform::Platform); with the feature `std` (on by default) a
//! [ready-made one](std_platform::StdPlatform) is included.
//!
//! # From the top
//! - Drivers: [`dma`], with mappings that own their buffers.
//! - Kernels and VMMs: [`domain::Domain`] over a [`mapper::Mapper`].
//! - The layers, each of which uses only those before it: [`addr`], [`sync`], [`platform`], [`percpu`],
//!   [`iova`], [`pgtable`], [`exposure`], [`invalidation`], [`mapper`], [`domain`], [`bounce`], [`dma`],
//!   [`registration`].
//!
//! # What always holds
//! - Memory that a strict unmap hands back cannot be reached by the device; with lazy protection it can for
//!   the stated window at the most, and its address is not used again before.
//! - Unmapping never allocates memory, and no lock is held while hardware is waited for.
//! - A list of segments is mapped as a whole or not at all.
//!
//! # What is unsafe
//! What safe code may call keeps memory safe. That rests on two kinds of promises, each with its list under *Safety*:
//! - of those who implement what lies below: [`Platform`](platform::Platform), [`Frames`](platform::Frames) and
//!   [`CopyMemory`](platform::CopyMemory), [`Mapper`](mapper::Mapper), [`InvalidationQueue`](invalidation::InvalidationQueue),
//!   [`Format`](pgtable::Format), and [`DmaBuffer`](dma::DmaBuffer) for the typed mappings;
//! - of those who open memory by its number ([`DmaDevice::map_single`](dma::DmaDevice::map_single) and everything like it): that
//!   it is theirs to open. Unmapping is safe, as it only ever closes, except where it copies to memory by its number:
//!   [`BouncePool::unmap`](bounce::pool::BouncePool::unmap) and everything like it.
//!
//! # Example
//! Create a domain, map a buffer, let a device write to it, unmap it, and see that a late write faults. The
//! device, its memory and its IOMMU are those of the software model, `portcullis-model`.
//!
//! ```
//! # #[cfg(feature = "std")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//!
//! use portcullis::addr::Direction;
//! use portcullis::dma::DmaDevice;
//! use portcullis::domain::{Domain, Policy};
//! use portcullis::invalidation::DomainId;
//! use portcullis::mapper::TableMapper;
//! use portcullis::pgtable::{PageTable, VtdSecondStage};
//! use portcullis::platform::Platform;
//! use portcullis::std_platform::StdPlatform;
//! use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory};
//!
//! // The machine: 16 MiB of memory and an IOMMU in front of it.
//! let memory = Memory::new(16 << 20);
//! let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
//!
//! // A domain with a page table of four levels (4 KiB and 2 MiB pages), and a network card attached to it.
//! let platform = StdPlatform::new();
//! let format = VtdSecondStage::new(4, 2, 52)?;
//! let table = PageTable::new(Arc::clone(&memory), format, platform.slots())?;
//! let (id, nic) = (DomainId(1), DeviceId(0));
//! iommu.attach(nic, Context::SecondStage { domain: id, root: table.root(), levels: table.levels() });
//! let mapper = TableMapper::new(table, iommu.queue(), id, Vec::new());
//! let domain = Domain::new(platform, mapper, Policy::Strict)?;
//! let device = DmaDevice::new(domain, u64::MAX);
//!
//! // The driver maps a receive buffer and gives its address to the card, which writes a packet there.
//! let buffer = memory.buffer(2048).ok_or("out of memory")?;
//! let mapped = device.map(buffer, Direction::FromDevice)?;
//! let iova = mapped.iova();
//! iommu.dma_write(nic, iova, b"a packet")?;
//!
//! // Unmapping gives the buffer back, once the hardware has confirmed that the card cannot reach it.
//! let buffer = mapped.unmap().map_err(|failed| failed.error)?;
//! let mut packet = [0; 8];
//! buffer.read(0, &mut packet)?;
//! assert_eq!(&packet, b"a packet");
//!
//! // A late write faults, and the packet stays as it was read.
//! assert!(iommu.dma_write(nic, iova, b"too late").is_err());
//! buffer.read(0, &mut packet)?;
//! assert_eq!(&packet, b"a packet");
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "std"))]
//! # fn main() {}
//! ```
#![no_std]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod addr;
pub mod bounce;
mod broken;
#[cfg(test)]
mod dice;
pub mod dma;
pub mod domain;
pub mod exposure;
pub mod invalidation;
pub mod iova;
pub mod mapper;
pub mod percpu;
pub mod pgtable;
pub mod platform;
pub mod registration;
#[cfg(feature = "std")]
pub mod std_platform;
pub mod sync;
