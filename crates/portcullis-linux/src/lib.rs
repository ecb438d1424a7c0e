//! What programs in Linux user space need beside the core: [`vfio`], devices that a process drives, and address spaces of the
//! kernel's for them; [`registration`], mappings that are kept because drivers use them again; [`heap`], the process's memory as
//! devices' memory; and [`buffer`], any other buffer of a program.
//!
//! Everything here stands on the public interface of [`portcullis`] alone: addresses live by the
//! tokens of a [`Domain`](portcullis::domain::Domain), as they would in a cache or a queue of an
//! embedder's own.

// The model checker's words are not memory.
#[cfg(not(loom))]
pub mod buffer;
#[cfg(not(loom))]
pub mod heap;
#[cfg(all(target_os = "linux", not(loom)))]
mod pieces;
pub mod registration;
#[cfg(all(target_os = "linux", not(loom)))]
pub mod vfio;
#[cfg(all(target_os = "linux", feature = "virtio-drivers", not(loom)))]
pub mod virtio;
#[cfg(all(target_os = "linux", feature = "vm-memory", not(loom)))]
pub mod vmm;
