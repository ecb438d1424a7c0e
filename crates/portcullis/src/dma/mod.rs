//! The calls of a driver: map a buffer for a device, and unmap it.
//!
//! A driver gets a mapping's buffer back only from an unmap or a commit that has kept the policy's promise: no device reaches it, or, under a lazy
//! policy, only within the window.
//!
//! A driver's handle is a [`Queue`] of a [`Device`]; a domain made by [`Domain::builder`](crate::domain::Domain::builder)
//! [attaches](DmaDomain::attach) devices. The queue's [`map`](Queue::map) takes a buffer and returns a [`Mapping`] that owns it, so that memory
//! cannot be used or freed while it is mapped. [`map_raw`](Queue::map_raw) takes physical addresses, for kernels that keep track of their buffers
//! themselves. The [`QueueConfig`] chooses the protection.
//!
//! A kernel whose drivers unmap by address and length, on any CPU, uses a [`DmaOps`] for each device instead of queues.
//!
//! All parts of queues work by address. [`DmaDevice`] is always public; with the feature `parts`, so are `RawBatch`, `StrictRing` and `AdaptiveRing`.
//!
//! Read `queue` (what drivers call), then `device` (mappings that are not copied), `raw_batch`, `ring`, `adaptive` (the choice between copying and
//! mapping), `pooled` and `coherent` (memory that stays mapped), and `ops`. This layer uses every other one.
//!
//! # The unit of protection
//! The strategy decides how much becomes unreachable together, and when:
//!
//! | ends with | the device loses its access to | hardware waits |
//! |---|---|---|
//! | a [`direct`](QueueConfig::direct) [`Queue`], [`DmaDevice::unmap_sg`], on a strict domain | each *mapping*, when the call returns | one per mapping |
//! | a `StrictRing` of batch 1 | each *descriptor*: the pages of a list | one per descriptor |
//! | an `AdaptiveRing` | each copied *mapping*; a mapped one with its *batch* | none; one per batch |
//! | a [`Queue`] in [batches](QueueConfig::batched), a `RawBatch`, a `StrictRing` of batch N | the *batch*, when it is committed | one per batch |
//!
//! Until its commit, all of a batch counts as mapped, and the caller must not use its memory. A device reaches whole pages: also the bytes beside a
//! buffer in its pages. It never reaches the original of a copied mapping, which is protected to the byte.

/// Implements `Debug`, `Display` and `Error` for a type with a field `error`. They print that field, or `$says`, and never a buffer, so `unwrap`
/// works for buffers without `Debug`. Example: `error_by_its_reason!([B] NotMapped<B>);`
macro_rules! error_by_its_reason {
    ([$($generics:tt)*] $type:ty) => {
        error_by_its_reason!([$($generics)*] $type, |this, f| core::fmt::Display::fmt(&this.error, f));
    };
    ([$($generics:tt)*] $type:ty, |$this:ident, $f:ident| $says:expr) => {
        impl<$($generics)*> core::fmt::Debug for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{:?}: {self}", self.error)
            }
        }

        impl<$($generics)*> core::fmt::Display for $type {
            fn fmt(&self, $f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                let $this = self;
                $says
            }
        }

        impl<$($generics)*> core::error::Error for $type {}
    };
}

use alloc::boxed::Box;

mod adaptive;
mod buffer;
mod coherent;
mod device;
mod layout;
mod machine;
mod mapping;
pub mod ops;
mod pooled;
mod queue;
mod raw_batch;
mod ring;
mod slab;
mod told;

#[cfg(not(feature = "parts"))]
pub(crate) use adaptive::AdaptiveRing;
#[cfg(feature = "parts")]
pub use adaptive::{AdaptiveRing, Explained};
pub use buffer::{BufferList, DmaBuffer, NotMapped};
pub use coherent::CoherentMemory;
pub use device::DmaDevice;
pub use machine::Machine;
pub(crate) use mapping::Choice;
pub use mapping::{Ended, Mapping, NotUnmapped, RawMapping};
pub use ops::{DmaAttributes, DmaOps, OpsConfig, OpsUsage};
pub use pooled::{BufferPool, PoolBuffer};
#[cfg(feature = "parts")]
pub use queue::Strategy;
pub use queue::{
    AnyQueue, Device, DmaDomain, DmaMapError, DmaMask, DmaUnmapError, DomainBuilder, Queue, QueueConfig,
};
pub use raw_batch::MOST_IN_BATCH;
#[cfg(not(feature = "parts"))]
pub(crate) use raw_batch::RawBatch;
#[cfg(feature = "parts")]
pub use raw_batch::{BatchError, RawBatch};
#[cfg(feature = "parts")]
pub use ring::{StrictRing, StrictRingConfig};
#[cfg(not(feature = "parts"))]
pub(crate) use ring::{StrictRing, StrictRingConfig};

/// A clock in nanoseconds, for measuring copies and maps.
type Clock = Box<dyn Fn() -> u64 + Send + Sync>;
