//! The calls of a driver: map a buffer for a device, and unmap it.
//!
//! It guarantees that a mapping's buffer is the driver's again only after an unmap or a commit has kept the promise of the policy in force: no
//! device reaches it, or only for the window of a lazy policy.
//!
//! A driver's handle is a [`Queue`] of a [`Device`]; a domain made by [`Domain::builder`](crate::domain::Domain::builder)
//! [attaches](DmaDomain::attach) devices. The queue's [`map`](Queue::map) takes a buffer and gives a [`Mapping`] that owns it, so that memory cannot
//! be used or freed while it is mapped. [`map_raw`](Queue::map_raw) takes and gives numbers, for kernels that keep track of their buffers
//! themselves. The queue's [`QueueConfig`] chooses the protection.
//!
//! A kernel whose drivers end a mapping by its address and length only, from any CPU, uses a [`DmaOps`] for each device instead of queues.
//!
//! With the feature `parts`, the parts of queues can be used directly: [`DmaDevice`] with `RawBatch`, `StrictRing`, `AdaptiveRing`, all by number.
//!
//! Read `queue` (the front door), then `device` (direct mappings), `raw_batch`, `ring`, `adaptive` (the choice between copying and mapping),
//! `pooled` and `coherent` (memory that stays mapped), and `ops`. It uses every layer.
//!
//! # The unit of protection
//! The caller chooses by type how much becomes unreachable at once, and when:
//!
//! | ends with | the device loses its access to | hardware waits |
//! |---|---|---|
//! | a [`direct`](QueueConfig::direct) [`Queue`], [`DmaDevice::unmap_sg`], on a strict domain | each *mapping*, when the call returns | one per mapping |
//! | a `StrictRing` of batch 1 | each *descriptor*: the pages of a list | one per descriptor |
//! | an `AdaptiveRing` | each copied *mapping*; a mapped one with its *batch* | none; one per batch |
//! | a [`Queue`] in [batches](QueueConfig::batched), a `RawBatch`, a `StrictRing` of batch N | the *batch*, when it is committed | one per batch |
//!
//! Until its commit, a batch counts as mapped: nothing of it is the caller's yet. Mapped memory is opened and closed by pages: neighbours in a page
//! go with the buffer. A device never reaches the original of a copied mapping: it is protected to the byte.

/// Implements an error type whose field `error` is its reason. The error shows that field, or `$says`, and no buffer: so a result can be unwrapped
/// although the buffer in its error has no `Debug`.
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
mod told;

#[cfg(feature = "parts")]
pub use adaptive::AdaptiveRing;
#[cfg(not(feature = "parts"))]
pub(crate) use adaptive::AdaptiveRing;
pub use adaptive::Explained;
pub use buffer::{BufferList, DmaBuffer, NotListed, Tagged};
pub use coherent::CoherentMemory;
pub use device::DmaDevice;
pub use machine::Machine;
pub(crate) use mapping::Choice;
pub use mapping::{Ended, Mapping, NotUnmapped, RawMapping};
pub use ops::{DmaOps, Leftover, MapAttributes, OpsConfig, OpsConfigError, OpsUsage, UnmapAttributes};
pub use pooled::{BufferPool, PoolBuffer};
#[cfg(feature = "parts")]
pub use queue::Strategy;
pub use queue::{
    AnyQueue, Device, DmaDomain, DmaMapError, DmaMask, DmaUnmapError, DomainBuilder, NotAllUnmapped,
    NotMapped, Queue, QueueConfig,
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
