//! The embedder's side of the library: [`Platform`] supplies CPUs, a clock and a timer, [`Frames`] supplies memory for
//! page tables, [`CopyMemory`] copies for bounce buffers, and [`CacheMaintenance`] cleans and invalidates the CPUs'
//! caches for non-coherent devices. Memory safety rests on them, so these traits are `unsafe`. They are separate
//! because not every embedder needs all of them: an IOMMU that maps by request (iommufd, virtio-iommu) needs CPUs and a
//! clock, but no table memory.
//!
//! A *CPU* of a platform is a number below [`Platform::cpus`], for which the library keeps values such as lists of
//! addresses. A kernel lends the number of the processor that the caller runs on, a program
//! ([`StdPlatform`](crate::std_platform::StdPlatform)) one that belongs to the thread.
//!
//! `words.rs` has the accesses of shared bytes. This layer uses `addr`, `heap` and `sync`.

mod cpus;
mod memory;
pub mod words;

pub(crate) use cpus::OnePlatform;
pub use cpus::{LocalCpu, Platform, PlatformEvents, PlatformNumber, events_of};
pub use memory::{CacheMaintenance, CopyMemory, FRAME_SIZE, Frames, TABLE_ENTRIES, Table};
