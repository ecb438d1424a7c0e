//! Portcullis below Linux's `dma_map_ops`: the functions of `include/portcullis.h`, over the core. The C shim beside it calls them, and
//! supplies the kernel's services.
#![no_std]

extern crate alloc;

mod device;
pub mod ffi;
mod heap;
mod mapper;
mod memory;
mod platform;
