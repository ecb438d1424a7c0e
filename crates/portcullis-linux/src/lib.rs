//! The parts of Linux user space besides the core: [`vfio`], devices that a process drives, and kernel address spaces for them;
//! [`registration`], cached mappings of buffers that drivers reuse; [`heap`], the process's memory as devices' memory; and [`buffer`],
//! other buffers of a program.
//!
//! All of this uses only the public interface of [`portcullis`]: addresses are tokens of a [`Domain`](portcullis::domain::Domain), as in an
//! embedder's own cache or queue.

// The model checker's atomics are not memory.
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
