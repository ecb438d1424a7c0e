//! Allocation of I/O virtual address ranges.
//!
//! An [`IovaSpace`] hands out ranges with *natural alignment*: a range begins at a multiple of its size
//! rounded up to a power of two (of 2^18 granules at most, 1 GiB with granules of 4 KiB), so that large pages
//! and address-mask invalidations fit it. Each CPU keeps lists of free ranges of the
//! [sizes that are cached](CACHED_ORDERS); behind them stands a shared [`HoleTree`].
//!
//! [`Bitmap`] has the same contract as the tree: faster and far smaller with many live ranges of mixed sizes,
//! slower in a nearly empty space. No space uses it yet.

mod bitmap;
mod cached;
mod config;
mod cpu;
mod inbox;
mod links;
mod notes;
mod placement;
mod space;
mod tree;
mod word;

pub use bitmap::Bitmap;
pub use config::{IovaError, SpaceConfig, SpaceUsage};
pub use cpu::CACHED_ORDERS;
pub use placement::Placement;
pub use space::IovaSpace;
pub use tree::{HoleTree, MAX_ORDER, TreeError};
