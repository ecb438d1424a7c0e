//! Allocation of I/O virtual address ranges.
//!
//! An [`IovaSpace`] hands out ranges with *natural alignment*: a range begins at a multiple of its size
//! rounded up to a power of two (of 2^18 granules at most, 1 GiB with granules of 4 KiB), so that large pages and address-mask invalidations fit
//! it. In front of the shared [`HoleTree`] each CPU keeps a small [`cache`](CACHED_ORDERS) of ranges that it
//! freed.

mod cached;
mod config;
mod cpu;
mod inbox;
mod links;
mod notes;
mod space;
mod tree;
mod word;

pub use config::{IovaError, SpaceConfig, SpaceUsage};
pub use cpu::CACHED_ORDERS;
pub use space::IovaSpace;
pub use tree::{HoleTree, MAX_ORDER, TreeError};
