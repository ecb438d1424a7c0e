//! Invalidation of the hardware's caches after an unmap. Nothing here treats a range as invalidated before the hardware has confirmed it.
//!
//! An unmap clears page-table entries, and records their range in a [`Gather`]; the fast path requests its one range directly. Until the
//! hardware has confirmed an [`Invalidation`] of them, a device may still reach the memory through a cached translation. *Strict*
//! protection waits for the confirmation at once. *Lazy* protection puts the range into a flush queue, and one wait serves many ranges.
//! Devices with TLBs of their own are invalidated after the IOTLB.
//!
//! Read `gather`, then `flush_queue` (deferred flushes), `shared` (waits that CPUs share), `device_tlb`, and `blocks` (what commands can
//! name). This layer uses `exposure`, `percpu`, `platform`, `heap`, `sync` and `addr`.

mod blocks;
mod costs;
mod device_tlb;
mod flush_queue;
mod gather;
mod shared;

pub use blocks::{Block, Granularity, MOST_BLOCKS, blocks};
pub use costs::Costs;
#[cfg(not(feature = "parts"))]
pub(crate) use device_tlb::DeviceTlbs;
#[cfg(feature = "parts")]
pub use device_tlb::{DeviceTlbs, MOST_DEVICE_TLBS};
#[cfg(feature = "parts")]
pub use flush_queue::{Cleared, Flush, FlushQueue, Pushed, QUEUE_ENTRIES, SHARED_ENTRIES, SLICE, Waiting};
#[cfg(not(feature = "parts"))]
pub(crate) use flush_queue::{Cleared, Flush, FlushQueue, Pushed, QUEUE_ENTRIES, SLICE, Waiting};
pub use gather::{GATHER_RANGES, Gather};
pub use shared::{SharedQueue, SharedWaits};

use crate::addr::{DeviceId, DomainId, IovaRange};

/// A command to drop cached translations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalidation {
    /// The translations of `range`. The hardware may drop more: [`blocks`](blocks()) says which pages to name.
    Range {
        /// The addresses.
        range: IovaRange,
        /// No table was unlinked, only leaves changed: paging-structure caches may stay.
        leaf_only: bool,
    },
    /// All that is cached for the domain, paging-structure caches included.
    Domain,
    /// The translations that a device caches in its own *device TLB* (PCIe's Address Translation Services).
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
    /// What to invalidate in it.
    pub invalidation: Invalidation,
}

/// The hardware did not confirm an invalidation. The translations may still be cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidationError {
    /// The hardware did not answer in time.
    #[error("the IOMMU did not confirm an invalidation within {waited_ns} ns")]
    TimedOut {
        /// How long the CPU waited.
        waited_ns: u64,
    },
    /// A device did not answer an invalidation of its own TLB in time.
    #[error("device {device:#x} did not confirm an invalidation of its TLB within {waited_ns} ns")]
    DeviceTimedOut {
        /// The device's number.
        device: u32,
        /// How long the CPU waited.
        waited_ns: u64,
    },
    /// The hardware refused the request.
    #[error("the IOMMU reported an error for an invalidation (code {code:#x})")]
    Rejected {
        /// The hardware's own code.
        code: u32,
    },
    /// A part of the range is still mapped, as the mapper could not remove it: see [`Unmapped::kept`](crate::pgtable::Unmapped::kept).
    #[error("{bytes} bytes could not be unmapped, and devices still reach them")]
    StillMapped {
        /// How many bytes are still mapped.
        bytes: u64,
    },
    /// The domain has as many devices with TLBs of their own as it can have. (Only
    /// [`add_device_tlb`](crate::mapper::TableMapper::add_device_tlb) returns this.)
    #[error("the domain has {limit} devices that cache translations themselves, which is the limit")]
    TooManyDevices {
        /// The most such devices.
        limit: usize,
    },
    /// Another call is adding the device, and may fail. (Only [`add_device_tlb`](crate::mapper::TableMapper::add_device_tlb) returns this.)
    #[error("another call is adding the device")]
    BeingAdded,
    /// The CPU that was to submit this request for others did not finish: its call panicked, for example.
    #[error("the CPU that was to submit an invalidation did not finish")]
    Abandoned,
}

/// Hardware that caches translations and takes invalidations.
///
/// # Safety
/// Memory goes back to its owner, and page tables to their allocator, because of these promises:
///
/// 1. **`Ok` means forgotten.** When [`invalidate`](Self::invalidate) or [`submit`](Self::submit) returns `Ok`, no cache of the hardware
///    holds anything that a request names and that was read from page tables before the call; later reads see what the caller has stored;
///    and every access that used a dropped translation is complete, its writes visible. That goes for every [`Invalidation`] as documented,
///    for every address of a range, and for paging-structure caches unless only leaves were named.
/// 2. Before it acts, the hardware observes all stores that the caller made before the call.
/// 3. **Calls are in one order, for memory, too.** Of any two calls that return `Ok`, by any CPUs, one is first. Stores of its caller
///    before the call are seen by all loads of the other's caller after its return, and by all reads of hardware from then on. (It is
///    enough that both take one lock, that both pass a read-modify-write of one word with `AcqRel`, or that each passes a `SeqCst` fence
///    before it waits. Memory in which hardware confirms is read with `Acquire`.)
/// 4. Requests of one [`submit`](Self::submit) act in their order: the IOTLB before a device TLB.
///
/// After an error, or a panic, callers assume nothing.
pub unsafe trait InvalidationQueue: Send + Sync + 'static {
    /// Requests `invalidation` in `domain`, and waits until the hardware confirms it. Context: may wait for hardware. The caller holds no
    /// lock and no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: all of it may still be cached.
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError>;

    /// As [`invalidate`](Self::invalidate) for several requests, with as few waits as the hardware needs: one, for a queue that takes
    /// descriptors. The requests act in their order, so a device cannot refetch from the IOTLB a translation that is named for both.
    ///
    /// # Errors
    /// As [`invalidate`](Self::invalidate), for all of them together.
    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        requests.iter().try_for_each(|request| self.invalidate(request.domain, request.invalidation))
    }

    /// The cost of submissions. It never changes.
    fn costs(&self) -> Costs {
        Costs::BARE_METAL
    }

    /// *Caching mode*: whether the hardware may cache non-present entries, and use them after they have become present, until they are
    /// invalidated. Then each map ends with an invalidation, and waits for it. It never changes.
    ///
    /// - Intel VT-d: CAP.CM (architecture specification, "Capability Register": not-present and erroneous entries may be cached, so each
    ///   change of an entry needs an explicit invalidation). Hardware has it clear; emulated IOMMUs set it, so that the hypervisor learns
    ///   of each mapping. It does not concern first-stage tables.
    /// - VT-d with CAP.RWBF keeps stores to tables in a write buffer until an invalidation flushes it, as a queue's `submit` must. Nothing
    ///   else would flush it after a map, so the queue of such an IOMMU returns `true`, too.
    /// - AMD-Vi: NpCache (publication 48882, capability header); again emulated IOMMUs set it.
    /// - Arm (DDI 0487) forbids TLBs to cache non-present entries.
    fn caches_absent(&self) -> bool {
        false
    }
}

// SAFETY: clauses 1 to 4 are `T`'s: each method passes its call on.
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
