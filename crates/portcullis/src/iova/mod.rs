//! Allocation of I/O virtual address ranges. No two live ranges share an address.
//!
//! An [`IovaSpace`] hands out ranges with *natural alignment*: a range begins at a multiple of its size rounded up to a
//! power of two (of 2^18 granules at most, 1 GiB with granules of 4 KiB), so that large pages and address-mask
//! invalidations fit it. Each CPU has free lists for the [cached sizes](CACHED_ORDERS), over a shared [`Bitmap`]. A
//! [`RingArena`] takes one contiguous range of a space for one queue and allocates from it as from a ring buffer.
//!
//! Read `space.rs`, `cached.rs`, `class.rs` and `cpu.rs` for the fast path; `cached/refill.rs` and `homes.rs` for
//! refills from the bitmap; `word.rs`, `meta.rs`, `links.rs` and `near.rs` for the metadata of each range; `remote.rs`
//! for frees on other CPUs; then `bitmap.rs` and `arena.rs`. This layer uses `addr`, `heap`, `sync`, `platform` and
//! `percpu`.

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

#[cfg(feature = "parts")]
pub use arena::ReleaseError;
pub use arena::{ArenaError, RingArena, RingConfig};
#[cfg(feature = "parts")]
pub use bitmap::{Bitmap, BitmapError, MAX_ORDER, Survey};
#[cfg(feature = "parts")]
pub use class::CACHED_ORDERS;
#[cfg(feature = "parts")]
pub use config::SpaceUsage;
pub use config::{IovaError, SpaceConfig};
pub use space::IovaSpace;
