//! [`Mapper`] changes the translations of one address space, and keeps this invariant: after `Ok`
//! of a sync no device reaches what was unmapped before.
//!
//! [`TableMapper`] implements it for an IOMMU that walks tables in memory and takes invalidations
//! by a queue.

use arrayvec::ArrayVec;

use alloc::vec::Vec;

use crate::addr::{DeviceId, DomainId, IovaRange, PageSizes, PhysAddr};
use crate::heap::{OutOfMemory, Shared};
use crate::invalidation::{
    Costs, DeviceTlbs, Gather, Invalidation, InvalidationError, InvalidationQueue, Request,
};
use crate::percpu::{Marks, Turn};
use crate::pgtable::{Attributes, Format, MapError, PageTable, Unmapped, VtdSecondStage};
use crate::platform::{Frames, Platform};

/// The addresses and page sizes of an address space.
#[derive(Debug, Clone)]
pub struct Geometry {
    /// The addresses that can be translated.
    pub aperture: IovaRange,
    /// The page sizes of a translation; the smallest is the granule of every mapping.
    pub page_sizes: PageSizes,
    /// Ranges inside the aperture that never reach memory through a translation.
    pub reserved: Vec<IovaRange>,
}

/// Changes the translations of one address space.
///
/// All methods may be called on any number of CPUs at once for disjoint ranges. Addresses and lengths are
/// multiples of the granule.
///
/// # Safety
/// A buffer goes back to its owner, and frames to their allocator, on the word of this trait. So:
///
/// - A device reaches memory through an address of this mapper only while a [`map`](Self::map) (or
///   [`map_fast`](Self::map_fast), or [`map_list_fast`](Self::map_list_fast)) of just that memory to that address is in force: from
///   the call on until it is confirmed that it was removed.
/// - **After `Ok` of [`sync`](Self::sync) no device reaches what was in the gather**: nothing that an
///   [`unmap`](Self::unmap) or a failed `map` removed and added, or that lies in a range which the caller added, through a
///   translation that was there before the removal, and every access that used one is complete. A gather of
///   [everything](Gather::everything) covers all that was removed before the call, by any CPU.
/// - **A `map` that fails leaves nothing mapped** that it has entered, and has added to the gather all that a device
///   may have used meanwhile. A `map_fast` or a `map_list_fast`
///   that returns `false` has changed nothing.
/// - `unmap` removes all translations of the range except what it reports as kept, adds what it
///   removed to the gather, and leaves what is beside the range as it was. An
///   [`unmap_fast`](Self::unmap_fast) that returns `true` has removed all of the range, and
///   `Ok` of [`sync_range`](Self::sync_range) of that range then says the same as that of `sync`;
///   one that returns `false` has changed nothing. [`unmap_now`](Self::unmap_now) says what `unmap` does, and with `Ok` what `sync` does
///   of all that such an `unmap` would have added to its gather ([`Unmapped::stale`], which may be more than the range), and of everything
///   where not all of the range was mapped.
/// - All CPUs that its [`marks`](Self::marks) are used with are of the one platform that the
///   caller passes to `marks`.
/// - A call that panics may have done any part of its work, and nothing else.
/// - [`geometry`](Self::geometry) always returns the same.
pub unsafe trait Mapper: Send + Sync + 'static {
    /// Whether it implements [`map_fast`](Self::map_fast) and [`unmap_fast`](Self::unmap_fast). Where it does not, they and
    /// [`map_list_fast`](Self::map_list_fast) are not called,
    /// and no address is taken for them in vain.
    const IS_QUICK: bool = false;

    /// Whether it removes what one [`map`](Self::map) has mapped as a whole only, as a kernel does for its processes. The domain then notes
    /// parts that are to go, and has all of a mapping unmapped when no part of it is wanted.
    const REMOVES_WHOLES: bool = false;

    /// Returns the addresses and page sizes of the address space. They never change.
    fn geometry(&self) -> &Geometry;

    /// Returns what [`sync`](Self::sync) costs. It never changes.
    fn costs(&self) -> Costs {
        Costs::BARE_METAL
    }

    /// Tells the mapper how many CPUs the platform has that it will be called with. A [`Domain`](crate::domain::Domain) does so when
    /// it is made of the mapper, before any other call. A mapper that keeps nothing for each CPU need not implement this.
    ///
    /// # Errors
    /// [`OutOfMemory`]: the mapper is as it was.
    fn set_cpus(&mut self, cpus: usize) -> Result<(), OutOfMemory> {
        let _ = cpus;
        Ok(())
    }

    /// Lets devices reach the pieces of memory in `list`, each with its length, through `range`,
    /// one after the other, as `attributes` say: a mapper that cannot keep one of them maps without it, but
    /// never allows more. All of a list comes in one call. May allocate, and may wait for hardware. The caller holds no CPU.
    ///
    /// # Errors
    /// [`MapError`]: the range is as it was before. What was entered and removed again meanwhile is added to
    /// `gather`, which the caller [syncs](Self::sync) before it uses the range again.
    ///
    /// # Safety
    /// As for [`PageTable::map`]: the memory is the caller's to open, for as long as it is mapped.
    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError>;

    /// Returns the marks of the turns in which [`map_fast`](Self::map_fast) and
    /// [`unmap_fast`](Self::unmap_fast) are called by CPUs of `platform`, so that the caller
    /// may have values of its own that are used in the same turns. Returns `None` where the mapper
    /// has no marks, or none for CPUs of this platform.
    fn marks<P: Platform>(&self, platform: &P) -> Option<&Shared<Marks>> {
        let _ = platform;
        None
    }

    /// Maps `range` to the memory at `phys` as [`map`](Self::map) does, in a turn that the caller
    /// has, if that takes only a short time. Returns whether it did. If not, nothing is changed,
    /// and `map` does it or returns the error; this is always so where the turn is not of the
    /// mapper's [marks](Self::marks). Never allocates or waits, and what it enters needs no
    /// invalidation.
    ///
    /// A mapper that has no quicker way than `map` need not implement this. To implement it, together with
    /// [`IS_QUICK`](Self::IS_QUICK), or to pass it on to another mapper, takes the feature `parts`, with which the turn has a name,
    /// `percpu::Turn`.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    #[inline]
    unsafe fn map_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        phys: PhysAddr,
        attributes: Attributes,
    ) -> bool {
        let _ = (turn, range, phys, attributes);
        false
    }

    /// As [`map_fast`](Self::map_fast), to the pieces of memory in `list`, each with its length, one after the other.
    /// May go through a clone of `list` before. A mapper that is quick for one piece alone need not implement it.
    ///
    /// # Safety
    /// As for [`map`](Self::map); and a clone of `list` has what `list` has.
    #[inline]
    unsafe fn map_list_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        list: impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone,
        attributes: Attributes,
    ) -> bool {
        let _ = (turn, range, list, attributes);
        false
    }

    /// Removes the translations of all of `range`, in a turn that the caller has, if that takes
    /// only a short time. Returns whether it did: then all of `range` was mapped, and
    /// [`sync_range`](Self::sync_range) makes it unreachable. If not, nothing is changed, and
    /// [`unmap`](Self::unmap) does it; this is always so where the turn is not of the mapper's
    /// [marks](Self::marks). Never allocates or waits.
    ///
    /// A mapper that has no quicker way than `unmap` need not implement this. To implement it takes [`IS_QUICK`](Self::IS_QUICK), without which
    /// it is not called, and the feature `parts`, as for [`map_fast`](Self::map_fast).
    #[inline]
    fn unmap_fast(&self, turn: &Turn<'_>, range: IovaRange) -> bool {
        let _ = (turn, range);
        false
    }

    /// Removes the translations of `range`, holes or not, and adds the part of it that is
    /// [stale](Unmapped::stale) to `gather`. The caller holds no CPU.
    ///
    /// Cannot fail except for parts of large pages, or of what the mapper can only remove as a whole, which may have to stay: devices
    /// still reach the part that is [kept](Unmapped::kept), whatever [`sync`](Self::sync) says, and the caller must
    /// treat it so. What one call mapped, or all that is left of it, can be removed at once.
    ///
    /// Allocates and may wait only where a part of a large page is to be removed: see
    /// [`PageTable::unmap`](crate::pgtable::PageTable::unmap).
    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped;

    /// Waits until no device can reach what is in `gather`. No lock or CPU is held during the call.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach it.
    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError>;

    /// [`unmap`](Self::unmap)s `range`, and [`sync`](Self::sync)s what that removed: for mappers that do both at once for less. Where not all of
    /// `range` was mapped, the sync covers everything, as another caller may have removed the rest without one.
    ///
    /// # Errors
    /// Beside what was unmapped, [`InvalidationError`]: devices may still reach it.
    // By itself, as what is gathered here takes much of the stack.
    #[inline(never)]
    fn unmap_now<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
    ) -> (Unmapped, Result<(), InvalidationError>) {
        let mut gather = Gather::new();
        let unmapped = self.unmap(platform, range, &mut gather);
        let all = unmapped.bytes == range.len();
        (unmapped, self.sync(if all { &gather } else { Gather::EVERYTHING }))
    }

    /// As [`sync`](Self::sync), for one range that an [`unmap_fast`](Self::unmap_fast) has removed.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach it.
    #[inline]
    fn sync_range(&self, range: IovaRange) -> Result<(), InvalidationError> {
        let mut gather = Gather::new();
        gather.add(range);
        self.sync(&gather)
    }

    /// Frees the memory that the mapper keeps for translations that are gone, and returns how many
    /// bytes it freed. Waits for hardware; the caller holds no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: a later call frees the memory that could not be freed because of it.
    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        let _ = platform;
        Ok(0)
    }

    /// As [`reclaim`](Self::reclaim), but does nothing where it would have to wait for another reclaim. A map that finds no memory
    /// calls this: a mapper that has a `reclaim` has this, too.
    ///
    /// # Errors
    /// As [`reclaim`](Self::reclaim).
    fn try_reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        let _ = platform;
        Ok(0)
    }
}

/// A page table in memory and the queue of the IOMMU that walks it.
#[derive(Debug)]
pub struct TableMapper<F: Frames, Q: InvalidationQueue, X: Format = VtdSecondStage> {
    table: PageTable<F, X>,
    queue: Q,
    domain: DomainId,
    device_tlbs: DeviceTlbs,
    geometry: Geometry,
    /// Whether the queue says that the hardware caches what is absent.
    caches_absent: bool,
}

impl<F: Frames, Q: InvalidationQueue, X: Format> TableMapper<F, Q, X> {
    /// Makes a mapper that changes `table`, which the hardware knows as `domain` and caches as
    /// `queue` is told. The caller, who has hardware walk the table, ensures both. `reserved` lists
    /// the ranges that the machine keeps from translation (on x86 the interrupt window).
    pub fn new(table: PageTable<F, X>, queue: Q, domain: DomainId, reserved: Vec<IovaRange>) -> Self {
        let geometry = Geometry { aperture: table.aperture(), page_sizes: table.page_sizes(), reserved };
        let caches_absent = queue.caches_absent();
        Self { table, queue, domain, device_tlbs: DeviceTlbs::new(domain), geometry, caches_absent }
    }

    /// Returns the queue that tells the hardware what to forget.
    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// Returns the page table.
    pub fn table(&self) -> &PageTable<F, X> {
        &self.table
    }

    /// Adds `device` to those that are told, too, whenever translations are to be forgotten. Call
    /// this **before** the device is allowed to cache them itself (PCIe: before ATS is enabled).
    /// A device that is told already stays so. Looks at 16 places and waits for one invalidation of
    /// the domain; allocates nothing. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: it must not cache translations.
    pub fn add_device_tlb(&self, device: DeviceId) -> Result<(), InvalidationError> {
        self.device_tlbs.add(device, &self.queue)
    }

    /// Makes `device` forget everything, and then tells it of no further invalidations. Call this
    /// **after** the device was made to fetch no translation any more (PCIe: ATS is disabled).
    ///
    /// Waits for one invalidation of the device's TLB: a device that does not answer takes all of
    /// the queue's time-out. Allocates nothing. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: the device may still use what it has cached, and is still told. Call
    /// this again, or see that the device reaches nothing, and
    /// [forget](Self::forget_device_tlb) it.
    ///
    /// # Safety
    /// The device fetches no translation of the domain any more, from the call on until another
    /// [`add_device_tlb`](Self::add_device_tlb) that began after it has returned `Ok`.
    pub unsafe fn remove_device_tlb(&self, device: DeviceId) -> Result<(), InvalidationError> {
        // SAFETY: the caller's promise; the queue is the domain's.
        unsafe { self.device_tlbs.remove(device, &self.queue) }
    }

    /// Makes the hardware forget that `range` was absent, now that it is mapped, and also the
    /// tables on the way, which may just have been made. Devices' own TLBs hold only present
    /// translations, so they are not told.
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
            // Also where another caller has removed it meanwhile, by number, and not invalidated
            // it.
            gather.add(range);
            MapError::Unconfirmed
        })
    }

    /// Stops telling `device` of invalidations, as the device reaches nothing: it was reset or
    /// unplugged, or the IOMMU lets none of its accesses through, translated ones included. While a
    /// device that does not answer is still told, no invalidation of the domain is confirmed. The
    /// next flush brings back what its silence has kept from use. Looks at 16 places.
    ///
    /// # Safety
    /// - The device reaches nothing by what it has cached, and its accesses under way are complete.
    /// - It fetches no translation of the domain any more, from the call on until another
    ///   [`add_device_tlb`](Self::add_device_tlb) that began after it has returned `Ok`.
    pub unsafe fn forget_device_tlb(&self, device: DeviceId) {
        // SAFETY: the caller's promise.
        unsafe { self.device_tlbs.forget(device) };
    }
}

// SAFETY: hardware reads only the table (by `X`'s word), which changes as asked; an unmap adds the
// range that it cleared, a failed map what it took out again; `sync` asks for all of that, of the
// IOTLB and then of each device that caches translations, and its `Ok` is the queue's.
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
            // One piece: the short way.
            ((1, Some(1)), wanted) => match list.next() {
                // SAFETY: the caller's promise.
                Some((phys, len)) if len == wanted => unsafe {
                    self.table.map(platform, range, phys, attributes)
                },
                // SAFETY: the caller's promise.
                piece => unsafe { self.table.map_list(platform, range, piece, attributes) },
            },
            // SAFETY: the caller's promise.
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
        // Where absent entries are cached, `map` makes the hardware see the new one.
        // SAFETY: the caller's promise.
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
        // As above. SAFETY: the caller's promise.
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
        // A large page is split: nothing of the range is gathered yet, so this must be complete.
        let forget = &mut |range| {
            let invalidation = Invalidation::Range { range, leaf_only: false };
            let request = Request { domain: self.domain, invalidation };
            self.device_tlbs.submit(&self.queue, &[request]).is_ok()
        };
        // SAFETY: `Ok` is the word of the queue, for the IOTLB and for each device that caches translations.
        let unmapped = unsafe { self.table.unmap(platform, range, forget) };
        if unmapped.bytes > 0 {
            gather.add(unmapped.stale);
        }
        unmapped
    }

    // By itself, as its requests take more of the stack than all else.
    #[inline(never)]
    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        let mut requests = ArrayVec::new();
        gather.write_requests(self.domain, &self.queue.costs(), &mut requests);
        if requests.is_empty() { Ok(()) } else { self.device_tlbs.submit(&self.queue, &requests) }
    }

    #[inline(never)]
    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        // Devices cache translations, and a table that is reclaimed has none: they need not be
        // told.
        // SAFETY: `Ok` is the queue's word.
        unsafe { self.table.reclaim(platform, || self.queue.invalidate(self.domain, Invalidation::Domain)) }
    }

    #[inline(never)]
    fn try_reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        let forget = || self.queue.invalidate(self.domain, Invalidation::Domain);
        // SAFETY: as above.
        unsafe { self.table.try_reclaim(platform, forget) }
    }
}
