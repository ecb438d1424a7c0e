//! [`TableMapper`]: every unmap that removes something is invalidated where it may be cached, in the IOTLB and then in
//! devices' TLBs.

use arrayvec::ArrayVec;

use alloc::vec::Vec;

use super::{Geometry, Mapper};
use crate::addr::{DeviceId, DomainId, IovaRange, PhysAddr};
use crate::heap::{OutOfMemory, Shared};
use crate::invalidation::{
    Costs, DeviceTlbs, Gather, Invalidation, InvalidationError, InvalidationQueue, Request,
};
use crate::percpu::{Marks, Turn};
use crate::pgtable::{Attributes, Format, MapError, PageTable, Unmapped, VtdSecondStage};
use crate::platform::{Frames, Platform};

/// A page table in memory and the queue of the IOMMU that walks it.
#[derive(Debug)]
pub struct TableMapper<F: Frames, Q: InvalidationQueue, X: Format = VtdSecondStage> {
    table: PageTable<F, X>,
    queue: Q,
    domain: DomainId,
    device_tlbs: DeviceTlbs,
    geometry: Geometry,
    caches_absent: bool,
}

impl<F: Frames, Q: InvalidationQueue, X: Format> TableMapper<F, Q, X> {
    /// Makes a mapper that changes `table`, which the hardware knows as `domain` and whose invalidations go to `queue`.
    /// The caller, which makes the hardware walk the table, ensures both. `reserved` lists the ranges that the machine
    /// does not translate (on x86 the interrupt window).
    pub fn new(table: PageTable<F, X>, queue: Q, domain: DomainId, reserved: Vec<IovaRange>) -> Self {
        let geometry = Geometry { aperture: table.aperture(), page_sizes: table.page_sizes(), reserved };
        let caches_absent = queue.caches_absent();
        Self { table, queue, domain, device_tlbs: DeviceTlbs::new(domain), geometry, caches_absent }
    }

    /// The queue for invalidations.
    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// The page table.
    pub fn table(&self) -> &PageTable<F, X> {
        &self.table
    }

    /// Adds `device` to the devices whose TLBs are invalidated, too. Call this **before** the device may cache
    /// translations (PCIe: before ATS is enabled). Does nothing for a device that was added before. Context: waits for
    /// one invalidation of the domain; allocates nothing. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: the device must not cache translations.
    pub fn add_device_tlb(&self, device: DeviceId) -> Result<(), InvalidationError> {
        self.device_tlbs.add(device, &self.queue)
    }

    /// Invalidates all of `device`'s TLB, and then sends it no further invalidations. Call this **after** the device
    /// has stopped fetching translations (PCIe: ATS is disabled).
    ///
    /// Context: waits for one device-TLB invalidation: a device that does not answer takes all of the queue's time-out.
    /// Allocates nothing. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: the device may still use what it has cached, and later unmaps invalidate its TLB. Call
    /// this again, or ensure that the device reaches nothing, and [forget](Self::forget_device_tlb) it.
    ///
    /// # Safety
    /// 1. The device fetches no translation of the domain any more, from the call on until another
    ///    [`add_device_tlb`](Self::add_device_tlb) that began after it has returned `Ok`.
    pub unsafe fn remove_device_tlb(&self, device: DeviceId) -> Result<(), InvalidationError> {
        // SAFETY: `DeviceTlbs::remove`, 1: the caller's (1). 2: the queue is the domain's.
        unsafe { self.device_tlbs.remove(device, &self.queue) }
    }

    /// In caching mode: invalidates cached non-present entries of `range`, which is mapped now, and of the tables above
    /// it, which may be new. Device TLBs hold only present translations, so they need no invalidation.
    ///
    /// # Errors
    /// [`MapError::Unconfirmed`]: the mapping is removed again, and added to `gather`.
    #[cold]
    fn make_seen<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let invalidation = Invalidation::Range { range, leaf_only: false };
        self.queue.invalidate(self.domain, invalidation).map_err(|_| {
            let _ = self.unmap(platform, range, gather);
            // Also if another caller has removed it meanwhile, and not invalidated it.
            gather.add(range);
            MapError::Unconfirmed
        })
    }

    /// Sends `device` no further invalidations, as the device reaches nothing: it was reset or unplugged, or the IOMMU
    /// blocks all of its accesses, translated ones included. Until then, a device that does not answer keeps all
    /// invalidations of the domain from being confirmed. The next confirmed flush frees the addresses that were held
    /// because it did not answer. Context: any; never waits.
    ///
    /// # Safety
    /// 1. The device reaches nothing by what it has cached, and its accesses under way are complete.
    /// 2. It fetches no translation of the domain any more, from the call on until another
    ///    [`add_device_tlb`](Self::add_device_tlb) that began after it has returned `Ok`.
    pub unsafe fn forget_device_tlb(&self, device: DeviceId) {
        // SAFETY: `DeviceTlbs::forget`, 1 and 2: the caller's (1, 2).
        unsafe { self.device_tlbs.forget(device) };
    }
}

// SAFETY: 1: hardware reads only the table (`Format`, 6), which changes only by the calls. 2 and 5: `sync` and
// `sync_range` invalidate the IOTLB and then each device TLB, and their `Ok` is the queue's. 3 and 4: an unmap adds the
// range that it cleared, a failed map what it took out again. 6: the default. 7: `marks_for` is for one platform. 8:
// before a panic below, a call enters or removes only entries that it was asked to. 9: set once.
unsafe impl<F: Frames, Q: InvalidationQueue, X: Format> Mapper for TableMapper<F, Q, X> {
    const IS_QUICK: bool = true;

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn costs(&self) -> Costs {
        self.queue.costs()
    }

    fn set_cpus(&mut self, cpus: usize) -> Result<(), OutOfMemory> {
        self.table.set_cpus(cpus)
    }

    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let mut list = list.into_iter();
        let result = match (list.size_hint(), range.len()) {
            // One piece: the fast path.
            ((1, Some(1)), wanted) => match list.next() {
                // SAFETY: `PageTable::map`: the caller's (`map`).
                Some((phys, len)) if len == wanted => unsafe {
                    self.table.map(platform, range, phys, attributes)
                },
                // SAFETY: `PageTable::map_list`: the caller's (`map`).
                piece => unsafe { self.table.map_list(platform, range, piece, attributes) },
            },
            // SAFETY: `PageTable::map_list`: the caller's (`map`).
            _ => unsafe { self.table.map_list(platform, range, list, attributes) },
        };
        match result {
            Ok(()) if self.caches_absent => self.make_seen(platform, range, gather),
            Ok(()) => Ok(()),
            Err((error, undone)) => {
                if let Some(undone) = undone {
                    gather.add(undone);
                }
                Err(error)
            }
        }
    }

    fn marks<P: Platform>(&self, platform: &P) -> Option<&Shared<Marks>> {
        self.table.marks_for(platform)
    }

    #[inline]
    unsafe fn map_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        phys: PhysAddr,
        attributes: Attributes,
    ) -> bool {
        // In caching mode, `map` makes the hardware see the new entry.
        // SAFETY: `PageTable::map_in`: the caller's (`map_fast`).
        !self.caches_absent && unsafe { self.table.map_in(turn, range, phys, attributes) }
    }

    #[inline]
    unsafe fn map_list_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        list: impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone,
        attributes: Attributes,
    ) -> bool {
        // SAFETY: `PageTable::map_list_in`, 1 and 2: the caller's (`map_list_fast`, 1 and 2).
        !self.caches_absent && unsafe { self.table.map_list_in(turn, range, list, attributes) }
    }

    #[inline]
    fn unmap_fast(&self, turn: &Turn<'_>, range: IovaRange) -> bool {
        self.table.unmap_in(turn, range)
    }

    #[inline]
    fn sync_range(&self, range: IovaRange) -> Result<(), InvalidationError> {
        let invalidation = Invalidation::Range { range, leaf_only: true };
        self.device_tlbs.submit(&self.queue, &[Request { domain: self.domain, invalidation }])
    }

    #[inline]
    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        // The gather knows nothing of the split, so this invalidation includes paging structures.
        let forget = &mut |range| {
            let invalidation = Invalidation::Range { range, leaf_only: false };
            let request = Request { domain: self.domain, invalidation };
            self.device_tlbs.submit(&self.queue, &[request]).is_ok()
        };
        // SAFETY: `PageTable::unmap`, 1: `Ok` is the queue's, for the IOTLB and for each device TLB.
        let unmapped = unsafe { self.table.unmap(platform, range, forget) };
        if unmapped.bytes > 0 {
            gather.add(unmapped.stale);
        }
        unmapped
    }

    // A function of its own, as its requests take more of the stack than all else.
    #[inline(never)]
    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        let mut requests = ArrayVec::new();
        gather.write_requests(self.domain, &self.queue.costs(), &mut requests);
        if requests.is_empty() { Ok(()) } else { self.device_tlbs.submit(&self.queue, &requests) }
    }

    #[inline(never)]
    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        // Device TLBs cache translations, and a table that is reclaimed has none: they need no invalidation.
        // SAFETY: `PageTable::reclaim`, 1: `Ok` is the queue's.
        unsafe { self.table.reclaim(platform, || self.queue.invalidate(self.domain, Invalidation::Domain)) }
    }

    #[inline(never)]
    fn try_reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        let forget = || self.queue.invalidate(self.domain, Invalidation::Domain);
        // SAFETY: as for `reclaim`.
        unsafe { self.table.try_reclaim(platform, forget) }
    }
}
