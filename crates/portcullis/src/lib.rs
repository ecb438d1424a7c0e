//! DMA remapping as a library.
#![no_std]
#![deny(unsafe_op_in_unsafe_fn)]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

pub mod addr;
pub mod dma;
pub mod domain;
pub mod invalidation;
pub mod iova;
pub mod mapper;
pub mod percpu;
pub mod pgtable;
pub mod platform;
#[cfg(feature = "std")]
pub mod std_platform;
pub mod sync;
