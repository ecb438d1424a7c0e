//! [`Mapper`] changes the translations of one address space: after `Ok` of a sync no device reaches what was unmapped
//! before. [`TableMapper`] implements it for an IOMMU that walks tables in memory and takes invalidations by a queue.

mod table;

pub use table::TableMapper;

use alloc::vec::Vec;

use crate::addr::{IovaRange, PageSizes, PhysAddr};
use crate::heap::{OutOfMemory, Shared};
use crate::invalidation::{Costs, Gather, InvalidationError};
use crate::percpu::{Marks, Turn};
use crate::pgtable::{Attributes, MapError, Unmapped};
use crate::platform::Platform;

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
/// All methods may be called on any number of CPUs at once for disjoint ranges. Addresses and lengths are multiples of
/// the granule.
///
/// # Safety
/// The library returns buffers to their owners, and frames to their allocator, because of these promises:
///
/// 1. A device reaches memory through an address of this mapper only while a [`map`](Self::map) (or
///    [`map_fast`](Self::map_fast), or [`map_list_fast`](Self::map_list_fast)) of just that memory to that address is
///    in force: from the call until its removal is confirmed.
/// 2. **After `Ok` of [`sync`](Self::sync) no device reaches what was in the gather**: nothing that an
///    [`unmap`](Self::unmap) or a failed `map` removed and added, or that lies in a range which the caller added,
///    through a translation that was there before the removal; and every access that used one is complete. A gather of
///    [everything](Gather::everything) covers all that was removed before the call, by any CPU.
/// 3. **A `map` that fails leaves nothing mapped** that it has entered, and has added to the gather all that a device
///    may have used meanwhile. A `map_fast` or a `map_list_fast` that returns `false` has changed nothing.
/// 4. `unmap` removes all translations of the range except what it reports as kept, adds what it removed to the gather,
///    and leaves everything beside the range as it was.
/// 5. An [`unmap_fast`](Self::unmap_fast) that returns `true` has removed all of the range, and `Ok` of
///    [`sync_range`](Self::sync_range) of that range then promises what clause 2 says; one that returns `false` has
///    changed nothing.
/// 6. [`unmap_now`](Self::unmap_now) does what clause 4 says, and its `Ok` promises what clause 2 says of all that such
///    an `unmap` would have added to its gather ([`Unmapped::stale`], which may be more than the range), and of
///    everything if not all of the range was mapped.
/// 7. All CPUs that its [`marks`](Self::marks) are used with are of the one platform that the caller passes to `marks`.
/// 8. A call that panics may have done any part of its work, and nothing else.
/// 9. [`geometry`](Self::geometry) always returns the same.
pub unsafe trait Mapper: Send + Sync + 'static {
    /// Whether it implements [`map_fast`](Self::map_fast) and [`unmap_fast`](Self::unmap_fast). If not, the domain does
    /// not call them, nor [`map_list_fast`](Self::map_list_fast), and does not first allocate an IOVA for them.
    /// Implementing or forwarding them needs the feature `parts`, which exports `percpu::Turn`.
    const IS_QUICK: bool = false;

    /// Whether it removes only all of what one [`map`](Self::map) mapped, as VFIO type 1 and iommufd do. The domain
    /// then notes which parts were unmapped, and removes the whole mapping with the last part.
    const REMOVES_WHOLES: bool = false;

    /// The addresses and page sizes of the address space. They never change.
    fn geometry(&self) -> &Geometry;

    /// The costs of [`sync`](Self::sync). They never change.
    fn costs(&self) -> Costs {
        Costs::BARE_METAL
    }

    /// Sets the number of CPUs of the platform. A [`Domain`](crate::domain::Domain) calls this when it is made, before
    /// any other call. A mapper without per-CPU values need not implement it. Context: may allocate; for set-up.
    ///
    /// # Errors
    /// [`OutOfMemory`]: the mapper is as it was.
    fn set_cpus(&mut self, cpus: usize) -> Result<(), OutOfMemory> {
        let _ = cpus;
        Ok(())
    }

    /// Lets devices reach the pieces of memory in `list`, each with its length, through `range`, one after the other,
    /// as `attributes` say. A mapper that cannot keep an attribute maps without it, but never allows more. All of a
    /// list comes in one call.
    ///
    /// Context: may allocate, and may wait for hardware. The caller holds no CPU.
    ///
    /// # Errors
    /// [`MapError`]: the range is as it was before. What was entered and removed again meanwhile is added to `gather`,
    /// which the caller [syncs](Self::sync) before it uses the range again.
    ///
    /// # Safety
    /// As for [`PageTable::map`](crate::pgtable::PageTable::map), for each piece.
    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError>;

    /// The section flags for which CPUs of `platform` call [`map_fast`](Self::map_fast) and
    /// [`unmap_fast`](Self::unmap_fast), so that the caller may use values of its own in the same exclusive sections.
    /// `None` if the mapper has no flags, or none for CPUs of this platform.
    fn marks<P: Platform>(&self, platform: &P) -> Option<&Shared<Marks>> {
        let _ = platform;
        None
    }

    /// Maps `range` to the memory at `phys` as [`map`](Self::map) does, in an exclusive section of the caller's, if
    /// that takes only a short time. Returns whether it did. If not, nothing is changed, and `map` does it or returns
    /// the error; this is always so if the section is not of the mapper's [section flags](Self::marks). What it enters
    /// needs no invalidation. Context: any that holds a CPU; never allocates or waits.
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
    /// May iterate over a clone of `list` first. A mapper with a fast path for one piece alone need not implement it.
    ///
    /// # Safety
    /// 1. As for [`map`](Self::map).
    /// 2. A clone of `list` has the same items as `list`.
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

    /// Removes the translations of all of `range`, in an exclusive section of the caller's, if that takes only a short
    /// time. Returns whether it did: then all of `range` was mapped, and [`sync_range`](Self::sync_range) makes it
    /// unreachable. If not, nothing is changed, and [`unmap`](Self::unmap) does it; this is always so if the section is
    /// not of the mapper's [section flags](Self::marks). Context: any that holds a CPU; never allocates or waits.
    #[inline]
    fn unmap_fast(&self, turn: &Turn<'_>, range: IovaRange) -> bool {
        let _ = (turn, range);
        false
    }

    /// Removes all translations of `range`, which may have holes, and adds the part of it that is
    /// [stale](Unmapped::stale) to `gather`.
    ///
    /// Fails only for parts of large pages, or of what the mapper can only remove as a whole: devices still reach the
    /// part that is [kept](Unmapped::kept), whatever [`sync`](Self::sync) says, so the caller keeps its memory and
    /// addresses out of use. An unmap of all that one call mapped, or of all that is left of it, never fails.
    ///
    /// Context: allocates and may wait only to remove a part of a large page: see
    /// [`PageTable::unmap`](crate::pgtable::PageTable::unmap). The caller holds no CPU.
    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped;

    /// Waits until no device can reach what is in `gather`. Context: waits for hardware; the caller holds no lock and
    /// no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach it.
    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError>;

    /// [`unmap`](Self::unmap)s `range`, and [`sync`](Self::sync)s what that removed, for mappers that do both at once
    /// for less. If not all of `range` was mapped, the sync covers everything, as another caller may have removed the
    /// rest and not synced it yet. Context: as for both.
    ///
    /// # Errors
    /// Besides what was unmapped, [`InvalidationError`]: devices may still reach it.
    // A function of its own, as the gather takes much of the stack.
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

    /// Frees the memory that the mapper keeps for removed translations, and returns the number of bytes. Context: waits
    /// for hardware; the caller holds no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: a later call frees the memory that could not be freed because of it.
    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        let _ = platform;
        Ok(0)
    }

    /// As [`reclaim`](Self::reclaim), but does nothing if it would have to wait for another reclaim. A map that finds
    /// no memory calls this, so a mapper that implements `reclaim` implements this, too.
    fn try_reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        let _ = platform;
        Ok(0)
    }
}
