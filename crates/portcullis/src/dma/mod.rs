//! What a driver calls: map a buffer for a device, hand it over, unmap it.
//!
//! A driver's handle is a [`Queue`], of a [`Device`] that was [attached](DmaDomain::attach) to a domain that
//! [`Domain::builder`](crate::domain::Domain::builder) made. Its [`map`](Queue::map) takes a buffer and gives a [`Mapping`] that owns
//! it, so that memory cannot be used or freed while the device may reach it; [`map_raw`](Queue::map_raw) deals in numbers, for
//! kernels that keep account of their buffers themselves. Which of what follows protects it is its [`QueueConfig`]'s affair.
//!
//! With the feature `parts`, what queues are made of can be had by itself: [`DmaDevice`] with `RawBatch`, `StrictRing`,
//! `AdaptiveRing`, all of which deal in numbers.
//!
//! # The unit of protection
//! How much becomes unreachable at once, when it does, is the caller's choice, by type:
//!
//! | ends with | the device loses its access to | hardware waits |
//! |---|---|---|
//! | a [`Queue`] by itself ([`direct`](QueueConfig::direct)), [`DmaDevice::unmap_sg`], on a strict domain | each *mapping*, when the call returns | one per mapping |
//! | a `StrictRing` of batch 1 | each *descriptor*: the pages of a list | one per descriptor |
//! | an `AdaptiveRing` | each *mapping* that it copied; what it mapped, with its *batch* | none; one per batch |
//! | a [`Queue`] in [batches](QueueConfig::batched), a `RawBatch`, a `StrictRing` of batch N | the *batch*, when it is committed | one per batch |
//!
//! In a batch whose commit is still to come everything counts as mapped: nothing of it is the caller's yet.
//! Under every one of them the smallest unit is the page: what shares a page with a buffer goes with it.

/// Makes an error of a type that carries what could not be done, and in `error` why. By hand, so that a buffer needs no
/// `Debug` for a result to be unwrapped.
macro_rules! error_by_its_reason {
    ([$($generics:tt)*] $type:ty) => {
        impl<$($generics)*> core::fmt::Debug for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Debug::fmt(&self.error, f)
            }
        }

        impl<$($generics)*> core::fmt::Display for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Display::fmt(&self.error, f)
            }
        }

        impl<$($generics)*> core::error::Error for $type {}
    };
}

mod adaptive;
mod buffer;
mod coherent;
mod device;
mod layout;
mod queue;
mod raw_batch;
mod ring;

pub(crate) use adaptive::Choice;
pub use adaptive::Explained;
#[cfg(feature = "parts")]
pub use adaptive::{
    AdaptiveMapError, AdaptiveMapping, AdaptiveRing, AdaptiveUnmap, AdaptiveUnmapError, AdaptiveUnmapFailed,
};
#[cfg(not(feature = "parts"))]
pub(crate) use adaptive::{
    AdaptiveMapError, AdaptiveMapping, AdaptiveRing, AdaptiveUnmap, AdaptiveUnmapError, AdaptiveUnmapFailed,
};
pub use buffer::DmaBuffer;
pub use coherent::CoherentMemory;
pub use device::DmaDevice;
#[cfg(feature = "parts")]
pub use queue::Strategy;
pub use queue::{
    AnyQueue, Device, DmaDomain, DmaMapError, DmaMask, DmaUnmapError, DomainBuilder, Ended, Machine, Mapping,
    NotMapped, NotUnmapped, Queue, QueueConfig, RawMapping,
};
pub use raw_batch::MOST_IN_BATCH;
#[cfg(feature = "parts")]
pub use raw_batch::{BatchError, RawBatch};
#[cfg(not(feature = "parts"))]
pub(crate) use raw_batch::{BatchError, RawBatch};
#[cfg(feature = "parts")]
pub use ring::{RingError, RingMapping, RingUnmap, RingUnmapFailed, StrictRing, StrictRingConfig};
#[cfg(not(feature = "parts"))]
pub(crate) use ring::{RingError, RingMapping, RingUnmap, RingUnmapFailed, StrictRing, StrictRingConfig};
