//! DMA remapping as a library: it decides which bytes a device may touch, and for how long.
//!
//! A device reaches memory through *I/O virtual addresses* that an IOMMU translates. This crate hands out those
//! addresses, writes the page tables, and invalidates the hardware's caches when a mapping ends, by the domain's
//! [`Policy`] and the queue's [`QueueConfig`]. It needs `alloc` and an embedder that implements
//! [`Platform`](platform::Platform); with the feature `std` (on by default) a [ready-made
//! one](std_platform::StdPlatform) is included.
//!
//! # What to take
//! [`prelude::driver`] has the names for a driver's author, [`prelude::kernel`] those for an embedder, and [`prelude`]
//! both. The files are in `examples`; `cargo run -p portcullis --example map` runs the first.
//!
//! | you want | take | example |
//! |---|---|---|
//! | to map a buffer and unmap it (a [`Mapping`] that is dropped stays open) | [`Queue`] | `map.rs` |
//! | buffers for a network card's rings | [`Queue`], `(buffer, cookie)` | `nic.rs` |
//! | lists of pages for a disk | [`BufferList`](dma::BufferList), [`Queue::segments`](dma::Queue::segments) | `prp.rs` |
//! | each buffer back after an error, or when the device goes | [`NotMapped`](dma::NotMapped), [`NotUnmapped`](dma::NotUnmapped), [`Queue::unmap_all`](dma::Queue::unmap_all) | `unplug.rs` |
//! | to run `virtio-drivers` in a kernel | a [`Queue`], to implement its `Hal` | `tests/kernel/src/net.rs` |
//! | to map by physical address | [`Queue::map_raw`](dma::Queue::map_raw) | `kernel/machine.rs` |
//! | a kernel whose drivers unmap by address | [`Device::ops`](dma::Device::ops) | `docs/porting.md` |
//! | memory that CPU and device share | [`CoherentMemory`](dma::CoherentMemory) | its [`as_slice`](dma::CoherentMemory::as_slice), `prp.rs` |
//! | I/O buffers, mapped already | [`Device::buffers`](dma::Device::buffers) | its [`BufferPool`](dma::BufferPool) |
//! | a kernel of yours, in `no_std` | [`Platform`](platform::Platform), [`Frames`](platform::Frames), [`InvalidationQueue`](invalidation::InvalidationQueue) | `kernel/machine.rs` |
//! | a kernel that drives an IOMMU | `portcullis-hw` | `docs/porting.md` |
//! | a non-coherent device | [`Device::not_coherent`](dma::Device::not_coherent) | `docs/porting.md` |
//! | buffers in a process's heap | `portcullis_linux::heap` | there |
//! | a `Vec`, a borrowed slice, or a memfd as a buffer | `portcullis_linux::buffer`, `portcullis_linux::vfio::scope` | `crates/portcullis-linux` |
//! | a PCI device in a program on Linux | `portcullis_linux::vfio`: `Device::open("0000:01:00.0")` | there |
//! | a PCI device from C or C++ | `portcullis.h`, by `cargo xtask c-library /usr/local` | `crates/portcullis-c` |
//! | a disk, and what each policy costs | `portcullis_linux::vfio` with a [`Queue`] or `portcullis_linux::registration` | `cargo run --release --example nvme -- --pci 0000:01:00.0` |
//! | a PCI device's interrupts | `vfio::Device::interrupts` | there |
//! | a device unplugged, or plugged in later | `vfio::Device::unplug_request`, `release` and `open_in` | there |
//! | many small buffers, without a kernel's mapping for each | [`Pieces`](domain::Pieces), or `portcullis_linux::registration` of their area | [there](domain::Pieces) |
//! | to run `virtio-drivers` in a program on Linux | `portcullis_linux::virtio`, with the feature `virtio-drivers` | `crates/portcullis-linux` |
//! | the IOMMU of a virtual machine, in a VMM | `portcullis_linux::vmm`, with the feature `vm-memory` | `crates/portcullis-linux` |
//! | to test without hardware | `portcullis-model`, `model` of `portcullis-hw` | below |
//!
//! # From the top
//! - Drivers: [`dma::Queue`], by [`Domain::builder`](domain::Domain::builder): mappings that own their buffers, whatever protects them.
//! - Kernels and VMMs: [`domain::Domain`] over a [`mapper::Mapper`].
//! - The layers, each of which uses only those before it: [`addr`], [`heap`], `sync`, [`platform`], `percpu`,
//!   `iova`, `setup`, [`pgtable`], [`exposure`], [`invalidation`], [`mapper`], [`domain`],
//!   [`bounce`], [`dma`].
//!
//! # Parts
//! The parts of domains and queues (lists of addresses, flush queues, per-CPU values, rings, batches, pools) are public
//! with the feature `parts`, for this workspace's tests and benches, and for users who measure or reuse them. They
//! change whenever the library does.
//!
//! # What always holds
//! - When a strict unmap has returned `Ok` (a queue's: [`Ended::Done`](dma::Ended::Done) or
//!   [`Ended::Flushed`](dma::Ended::Flushed)), devices reach nothing of what was unmapped. Under lazy protection they
//!   may until a flush is confirmed. The flush begins at the latest when the stated window ends, and the addresses are
//!   not used again before it is confirmed.
//! - Without heap memory, a call returns an error, and nothing is lost. That holds for making a domain, a device or a
//!   queue, and for every later call. (Only [`StdPlatform`](std_platform::StdPlatform::try_new) aborts while it is
//!   made, as it starts a thread.)
//! - An unmap of a whole mapping never allocates memory.
//! - No lock is held during a wait for hardware, with one exception: a page table splits contiguous PTEs, and reclaims
//!   its tables, one after the other.
//! - A list of segments is mapped as a whole or not at all.
//!
//! # What is unsafe
//! No safe call can break memory safety, provided that these promises hold, each listed under *Safety*:
//! - of the implementers of [`Platform`](platform::Platform), [`Frames`](platform::Frames) and
//!   [`CopyMemory`](platform::CopyMemory), [`CacheMaintenance`](platform::CacheMaintenance),
//!   [`Mapper`](mapper::Mapper), [`InvalidationQueue`](invalidation::InvalidationQueue), [`Format`](pgtable::Format),
//!   and, for mappings that own their buffers, [`DmaBuffer`];
//! - of callers that map memory by physical address ([`DmaDevice::map_single`](dma::DmaDevice::map_single) and its
//!   like): the memory is theirs to open. Unmapping only closes memory, so it is safe, except in the [parts](#parts)
//!   that copy to memory by physical address when they unmap;
//! - of callers below a mapper that report translations as invalidated, as to
//!   [`PageTable::unmap`](pgtable::PageTable::unmap).
//!
//! # Example
//! A domain, a device and a queue are all that a driver needs. The example maps a buffer, lets a device write to it,
//! unmaps it, and checks that a late write does not change it. Device, memory and IOMMU are those of the software
//! model, `portcullis-model`.
//!
//! ```
//! # #[cfg(feature = "std")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//!
//! use portcullis::prelude::*;
//! use portcullis_model::{Context, Iommu, IommuConfig, Memory};
//!
//! // The machine: 64 MiB of memory, an IOMMU in front of it that walks a page table of four levels, and a network card.
//! let memory = Memory::new(64 << 20);
//! let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
//! let platform = StdPlatform::new();
//! let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
//! let (id, card) = (DomainId(1), DeviceId(0));
//! iommu.attach(card, Context::SecondStage { domain: id, root: table.root(), levels: table.levels() });
//!
//! let domain = Domain::builder(table, iommu.queue(), id)
//!     .policy(Policy::Strict)
//!     .bounce(Arc::clone(&memory), PoolConfig::default())
//!     .build(platform)?;
//! let nic = domain.attach(card, DmaMask::BITS_64)?;
//!
//! // One line chooses the protection; nothing else changes.
//! for config in [
//!     QueueConfig::direct(),          // each unmap waits for the hardware
//!     QueueConfig::batched(64),       // 64 unmaps wait together
//!     QueueConfig::ring(512, 4096),   // and the addresses come out of a ring
//!     QueueConfig::bounce(),          // buffers are copied, and nothing waits
//!     QueueConfig::auto(512, 4096),   // copied or mapped, whichever is cheaper
//! ] {
//!     let mut rx = nic.queue(config)?;
//!     let buffer = memory.buffer(2048).ok_or("out of memory")?;
//!
//!     // The mapping owns the buffer while the card has it.
//!     let mapping = rx.map(buffer, Direction::FromDevice)?;
//!     let iova = mapping.iova();
//!     iommu.dma_write(card, iova, b"a packet")?;
//!
//!     // It comes back when the card cannot reach it: now, or with its batch, which ends here as the queue falls idle.
//!     let mut received = Vec::new();
//!     match rx.unmap(mapping)? {
//!         Ended::Done(buffer) => received.push(buffer),
//!         Ended::Pending => {}
//!         Ended::Flushed(buffers) => received.extend(buffers),
//!     }
//!     received.extend(rx.commit()?);
//!
//!     // A late write faults, or goes to a copy that is not read any more: the packet stays as it was read.
//!     let _ = iommu.dma_write(card, iova, b"too late");
//!     let mut packet = [0; 8];
//!     received[0].read(0, &mut packet)?;
//!     assert_eq!(&packet, b"a packet");
//! }
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
#[cfg(all(test, not(loom)))]
#[path = "../tests/inside/errors.rs"]
mod errors;
pub mod exposure;
mod guard;
pub mod heap;
pub mod invalidation;
#[cfg(feature = "parts")]
pub mod iova;
#[cfg(not(feature = "parts"))]
mod iova;
pub mod mapper;
#[cfg(feature = "parts")]
pub mod percpu;
#[cfg(not(feature = "parts"))]
mod percpu;
pub mod pgtable;
pub mod platform;
pub mod prelude;
mod setup;
pub use dma::{Device, DmaBuffer, Mapping, Queue, QueueConfig};
pub use domain::{Domain, Policy};
pub use setup::SetupError;
#[cfg(feature = "std")]
pub mod std_platform;
#[cfg(feature = "parts")]
pub mod sync;
#[cfg(not(feature = "parts"))]
mod sync;

/// Compiles and runs the documents' examples. A test of `xtask` finds a document that no crate includes.
#[cfg(all(doctest, feature = "std"))]
mod documents {
    #[doc = include_str!("../../../CHANGELOG.md")]
    struct Changelog;
    #[doc = include_str!("../../../CONTRIBUTING.md")]
    struct Contributing;
    #[doc = include_str!("../../../kmod/README.md")]
    struct Module;
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../SECURITY.md")]
    struct Security;
    #[doc = include_str!("../../../crates/portcullis-cli/traces/README.md")]
    struct TracesReadme;
    #[doc = include_str!("../../../docs/bench.md")]
    struct Bench;
    #[doc = include_str!("../../../docs/bounce.md")]
    struct Bounce;
    #[doc = include_str!("../../../docs/design.md")]
    struct Design;
    #[doc = include_str!("../../../docs/doctor.md")]
    struct Doctor;
    #[doc = include_str!("../../../docs/glossary.md")]
    struct Glossary;
    #[doc = include_str!("../../../docs/library.md")]
    struct Library;
    #[doc = include_str!("../../../docs/linux.md")]
    struct Linux;
    #[doc = include_str!("../../../docs/mutants.md")]
    struct Mutants;
    #[doc = include_str!("../../../docs/replay.md")]
    struct Replay;
    #[doc = include_str!("../../../docs/report.md")]
    struct Report;
    #[doc = include_str!("../../../docs/scaling.md")]
    struct Scaling;
    #[doc = include_str!("../../../docs/security.md")]
    struct Promises;
    #[doc = include_str!("../../../docs/strict.md")]
    struct Strict;
}
