//! Allocation of I/O virtual address ranges. No two ranges that are handed out share an address.
//!
//! An [`IovaSpace`] hands out ranges with *natural alignment*: a range begins at a multiple of its
//! size rounded up to a power of two (of 2^18 granules at most, 1 GiB with granules of 4 KiB), so
//! that large pages and address-mask invalidations fit it. Each CPU keeps lists of free ranges of
//! the [sizes that are cached](CACHED_ORDERS); behind the lists stands a shared [`Bitmap`].
//!
//! A [`RingArena`] takes one contiguous range out of a space for one queue and hands it out in rotation.

mod arena;
mod bitmap;
mod cached;
mod class;
mod config;
mod cpu;
mod homes;
mod links;
mod meta;
mod near;
mod remote;
mod space;
mod word;

pub(crate) use cached::Own;
pub(crate) use links::{Links, WordLeaf};

pub use arena::{ArenaError, ReleaseError, RingArena, RingConfig};
pub use bitmap::{Bitmap, BitmapError, MAX_ORDER, Survey};
pub use class::CACHED_ORDERS;
pub use config::{IovaError, SpaceConfig, SpaceUsage};
pub use space::IovaSpace;
