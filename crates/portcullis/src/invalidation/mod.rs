//! IOTLB invalidation: what an unmap leaves behind in the hardware's caches, and how it is removed.
//! Nothing here says that a range is forgotten before the hardware has confirmed that.
//!
//! An unmap clears page-table entries. What it cleared it records in a [`Gather`], unless it is one
//! range, which is asked for by itself. Until the hardware has confirmed an [`Invalidation`] of that,
//! a device may still reach the memory through a cached translation. *Strict* protection waits for
//! the confirmation at once; *lazy* protection puts the range into a flush queue, and one wait serves
//! many ranges. Devices that cache translations themselves are asked after the IOTLB.

mod blocks;
mod costs;
mod device_tlb;
mod flush_queue;
mod gather;
mod shared;

pub use blocks::{Block, Blocks, Granularity, MOST_BLOCKS, blocks};
pub use costs::Costs;
#[cfg(feature = "parts")]
pub use device_tlb::{DeviceTlbs, MOST_DEVICE_TLBS};
#[cfg(not(feature = "parts"))]
pub(crate) use device_tlb::{DeviceTlbs, MOST_DEVICE_TLBS};
#[cfg(feature = "parts")]
pub use flush_queue::{Cleared, Flush, FlushQueue, Pushed, QUEUE_ENTRIES, SHARED_ENTRIES, SLICE, Waiting};
#[cfg(not(feature = "parts"))]
pub(crate) use flush_queue::{
    Cleared, Flush, FlushQueue, Pushed, QUEUE_ENTRIES, SHARED_ENTRIES, SLICE, Waiting,
};
pub use gather::{GATHER_RANGES, Gather};
pub use shared::{SharedQueue, SharedWaits};

use crate::addr::{DeviceId, DomainId, IovaRange};

/// What the hardware is asked to forget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalidation {
    /// The translations of `range`. The hardware may forget more: [`blocks`](blocks()) says which pages to name.
    Range {
        /// What was unmapped.
        range: IovaRange,
        /// No table was unlinked, only leaves changed: paging-structure caches may be kept.
        leaf_only: bool,
    },
    /// Everything cached for the domain, paging-structure caches included.
    Domain,
    /// What a device has cached for itself, in its *device TLB* (PCIe's Address Translation
    /// Services): of a range, or all of it.
    DeviceTlb {
        /// The device.
        device: DeviceId,
        /// The addresses; `None` for all.
        range: Option<IovaRange>,
    },
}

/// An invalidation and the address space that it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The address space.
    pub domain: DomainId,
    /// What is to be forgotten of it.
    pub invalidation: Invalidation,
}

/// An invalidation that the hardware did not confirm. What it was to remove may still be cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidationError {
    /// The hardware did not answer in time.
    #[error("the IOMMU did not confirm an invalidation within {waited_ns} ns")]
    TimedOut {
        /// How long it was waited for.
        waited_ns: u64,
    },
    /// A device did not answer an invalidation of its own TLB in time.
    #[error("device {device:#x} did not confirm an invalidation of its TLB within {waited_ns} ns")]
    DeviceTimedOut {
        /// The device's number.
        device: u32,
        /// How long it was waited for.
        waited_ns: u64,
    },
    /// The hardware refused the request.
    #[error("the IOMMU reported an error for an invalidation (code {code:#x})")]
    Rejected {
        /// The hardware's own code.
        code: u32,
    },
    /// A part of what was to be invalidated is still mapped, as the mapper could not remove it: see
    /// [`Unmapped::kept`](crate::pgtable::Unmapped::kept).
    #[error("{bytes} bytes could not be unmapped, and devices still reach them")]
    StillMapped {
        /// How many bytes are still mapped.
        bytes: u64,
    },
    /// The domain has as many devices that cache translations themselves as it can have. Only
    /// [`add_device_tlb`](crate::mapper::TableMapper::add_device_tlb) returns this error.
    #[error("the domain has {limit} devices that cache translations themselves, which is the limit")]
    TooManyDevices {
        /// How many such devices it can have.
        limit: usize,
    },
    /// Another call is just adding the device, and may fail. Only
    /// [`add_device_tlb`](crate::mapper::TableMapper::add_device_tlb) returns this error.
    #[error("another call is adding the device")]
    BeingAdded,
    /// The CPU that was to submit the batch with this request did not come to the end of that, as
    /// where its call panics.
    #[error("the CPU that was to submit an invalidation did not finish")]
    Abandoned,
}

/// A piece of hardware that caches translations and can be told to forget them.
///
/// # Safety
/// Memory goes back to its owner, and page tables to their allocator, on the word of this trait. So:
///
/// - **`Ok` means forgotten**: when [`invalidate`](Self::invalidate) or [`submit`](Self::submit) returns `Ok`, the hardware holds
///   nothing of what each request names, in any of its caches, that it read from page tables before the call; what it reads
///   from now on is what the caller has stored; and every access that used what is forgotten is complete, its writes
///   visible. That goes for every [`Invalidation`] as its documentation says, paging-structure caches included unless only
///   leaves were named, and for every address of a range.
/// - All that the caller stored before the call is visible to the hardware before it acts.
/// - **Calls are in one order, for memory, too**: of any two calls that return `Ok`, by any CPUs, one is first, and what its
///   caller had stored before it is seen by all that the other's caller loads after its own return, and by all that hardware
///   reads from then on. (One lock that both take makes it so, or a read-modify-write with `AcqRel` that both pass, or a
///   `SeqCst` fence in each before it is waited for. What hardware confirms in memory is read with `Acquire`.)
/// - Requests of one [`submit`](Self::submit) act in their order: an IOTLB has forgotten before a device TLB is asked to.
/// - After an error, or a panic, nothing is assumed.
pub unsafe trait InvalidationQueue: Send + Sync + 'static {
    /// Asks for `invalidation` in `domain` and waits until the hardware confirms it.
    ///
    /// May wait for hardware; the caller holds no lock and no CPU. Every page-table store that the caller
    /// made before the call is visible to the hardware before it acts.
    ///
    /// # Errors
    /// [`InvalidationError`]: nothing may be assumed to be forgotten.
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError>;

    /// As [`invalidate`](Self::invalidate) for several requests, with as few waits as the hardware
    /// needs for them: one, for a queue that takes descriptors. The requests act in their order. So
    /// where an IOTLB is told to forget a translation before a device is, the device cannot fetch
    /// it from there again.
    ///
    /// # Errors
    /// As [`invalidate`](Self::invalidate), for all of them together.
    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        requests.iter().try_for_each(|request| self.invalidate(request.domain, request.invalidation))
    }

    /// What submissions cost. It never changes.
    fn costs(&self) -> Costs {
        Costs::BARE_METAL
    }

    /// Whether the hardware may take an entry to be absent that has become present, until it is
    /// told to forget that: *caching mode*. Then each map ends with an invalidation, and waits for
    /// it. It never changes.
    ///
    /// - Intel VT-d says so by CAP.CM (architecture specification, "Capability Register": not-present and erroneous entries may
    ///   be cached, so each change of an entry needs an explicit invalidation). Hardware has it clear; IOMMUs that a hypervisor
    ///   emulates set it, to be told of each mapping. It does not concern first-stage tables.
    /// - VT-d with CAP.RWBF set keeps stores to tables in a write buffer until that is flushed. Invalidating flushes it, as a
    ///   queue's `submit` must ([`invalidate`](Self::invalidate) says that the hardware sees each store before it). For what
    ///   only becomes present there is nothing else that would: the queue of such an IOMMU says `true` here, too.
    /// - AMD-Vi says so by NpCache (publication 48882, capability header); again it is emulated IOMMUs that do.
    /// - Arm (DDI 0487) forbids that TLBs hold what faults as absent.
    fn caches_absent(&self) -> bool {
        false
    }
}

// SAFETY: everything is passed on to `T`, which promises the same.
unsafe impl<T: InvalidationQueue + ?Sized> InvalidationQueue for alloc::sync::Arc<T> {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        T::invalidate(self, domain, invalidation)
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        T::submit(self, requests)
    }

    fn costs(&self) -> Costs {
        T::costs(self)
    }

    fn caches_absent(&self) -> bool {
        T::caches_absent(self)
    }
}
