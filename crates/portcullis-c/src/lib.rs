//! Portcullis for drivers in C and C++ on Linux: `portcullis.h`, which `cbindgen` generates from this crate, documents each function.
//! `cargo xtask c-library` makes the libraries, and a file for pkg-config.
//!
//! The functions use [`vfio`](portcullis_linux::vfio) and one [`DmaOps`](portcullis::dma::DmaOps) for each device: a C driver ends its
//! mappings by their addresses, from any thread, and its mistakes are refused with an error. Queues support batches and rings.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "this is what a C program calls")]

mod device;
mod dma;
mod error;
mod interrupts;
mod queue;

pub use device::{
    PortcullisDevice, PortcullisPolicy, PortcullisUsage, portcullis_bar, portcullis_device_close,
    portcullis_device_open, portcullis_device_open_in, portcullis_device_release, portcullis_device_reset,
    portcullis_device_set_bus_master, portcullis_device_usage, portcullis_read_config, portcullis_version,
    portcullis_write_config,
};
pub use dma::{
    PortcullisDirection, PortcullisPiece, PortcullisSegment, portcullis_alloc, portcullis_free,
    portcullis_map, portcullis_map_list, portcullis_sync_for_cpu, portcullis_sync_for_device,
    portcullis_unmap, portcullis_unmap_all,
};
pub use error::{PortcullisError, portcullis_error_text};
pub use interrupts::{
    PortcullisInterruptKind, portcullis_interrupt_unmask, portcullis_interrupt_wait, portcullis_interrupts,
    portcullis_interrupts_off, portcullis_unplug_request,
};
pub use queue::{
    PortcullisQueue, PortcullisStrategy, portcullis_queue_commit, portcullis_queue_free,
    portcullis_queue_map, portcullis_queue_new, portcullis_queue_sync_for_cpu,
    portcullis_queue_sync_for_device, portcullis_queue_unmap,
};
