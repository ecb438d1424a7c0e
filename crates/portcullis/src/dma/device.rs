//! Mappings by address. A device reaches all pages of a mapping from the map until an unmap has kept the policy's promise.

use core::fmt;

use super::layout::device_view;
use crate::addr::{Direction, DmaSegment, Iova, IovaRange, PhysAddr, PhysSegment};
use crate::bounce::pool::Toward;
use crate::domain::{AtomicPolicy, Domain, MapListError, Policy, PolicyError, Rule, UnmapError, last_byte};
use crate::heap::{OutOfMemory, Shared};
use crate::mapper::Mapper;
use crate::platform::Platform;
use crate::sync::{Ordering, fence};

/// A device attached to a domain. Cheap to clone; a clone is the same device. Its mappings end by the domain's policy, or by [its
/// own](Self::set_policy).
///
/// These methods rely on the caller for two things that a [`Queue`](super::Queue) tracks by itself. First, the caller may let devices access the
/// memory: memory safety rests on this, so the methods that map are unsafe. Second, a mapping is unmapped once, as a whole, by one CPU, and by its
/// owner. Memory safety does not rest on this, as an unmap only removes access. But a caller that ends another's mapping frees its address: the owner
/// may then end the next mapping there, whose device loses its access.
///
/// The `DmaDevice` of a [non-coherent device](super::Device::not_coherent) maps nothing ([`MapListError::NotCoherent`]): its queues do.
///
/// Context: any number of CPUs may call its methods at once. For waits see [`Domain::map`] and [`Domain::unmap`].
pub struct DmaDevice<M: Mapper, P: Platform> {
    domain: Shared<Domain<M, P>>,
    /// The highest address of mappings through this handle: 0 for a non-coherent device, so that its fast paths find no addresses and the
    /// slow path reports why.
    limit: u64,
    mask: u64,
    /// The device's own policy, if it has one: all clones share it.
    exception: Shared<AtomicPolicy>,
}

impl<M: Mapper, P: Platform> fmt::Debug for DmaDevice<M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaDevice")
            .field("mask", &Iova::new(self.mask))
            .field("policy", &self.policy())
            .finish_non_exhaustive()
    }
}

impl<M: Mapper, P: Platform> Clone for DmaDevice<M, P> {
    fn clone(&self) -> Self {
        let exception = self.exception.clone();
        Self { domain: self.domain.clone(), limit: self.limit, mask: self.mask, exception }
    }
}

impl<M: Mapper, P: Platform> DmaDevice<M, P> {
    /// Makes a device that can use addresses up to `mask` (`u32::MAX` for a 32-bit device). Allocates.
    pub fn new(domain: Shared<Domain<M, P>>, mask: u64) -> Result<Self, OutOfMemory> {
        Ok(Self { domain, limit: mask, mask, exception: Shared::new(AtomicPolicy::new(None))? })
    }

    /// A handle that maps nothing, for a non-coherent device.
    pub(super) fn not_coherent(self) -> Self {
        Self { limit: 0, ..self }
    }

    /// A handle that maps although the device is non-coherent, for callers that do the cache maintenance.
    pub(super) fn maintained(&self) -> Self {
        Self { limit: self.mask, ..self.clone() }
    }

    /// Whether the device sees the CPUs' caches.
    pub fn is_coherent(&self) -> bool {
        self.limit == self.mask
    }

    /// The policy by which the device's mappings end now.
    pub fn policy(&self) -> Policy {
        self.exception.get().unwrap_or_else(|| self.domain.policy())
    }

    /// Gives the device a policy of its own, or, with `None`, its domain's again, while I/O runs. When the call returns, the stricter of the two
    /// promises holds, as [`Domain::set_policy`] says, for every mapping of the device that ends by a policy: by this handle, its clones or a
    /// [queue](super::Queue). (A flush, if needed, is of the whole domain.)
    ///
    /// # Errors
    /// As [`Domain::set_policy`]: no device has passthrough in a domain that translates.
    pub fn set_policy(&self, policy: Option<Policy>) -> Result<(), PolicyError> {
        self.domain.change(&self.exception, policy)
    }

    /// The device's own policy, if it has one.
    #[inline]
    pub(super) fn exception(&self) -> &AtomicPolicy {
        &self.exception
    }

    /// The device's domain.
    pub fn domain(&self) -> &Shared<Domain<M, P>> {
        &self.domain
    }

    /// The highest address that the device can use.
    pub fn mask(&self) -> u64 {
        self.mask
    }

    pub(super) fn maps(&self) -> Result<(), MapListError> {
        if self.is_coherent() { Ok(()) } else { Err(MapListError::NotCoherent) }
    }

    pub(super) fn is_translated(&self) -> bool {
        self.domain.is_translated()
    }

    /// Maps `len` bytes at `phys`, and returns the address for the device, which reaches the whole pages. Cost and context as for [`Domain::map`].
    ///
    /// # Errors
    /// [`MapListError`], with nothing mapped.
    ///
    /// # Safety
    /// As for [`Domain::map`], clauses 1 to 3. Under passthrough the device reaches all memory, mapped or not: the caller that attached it so is
    /// responsible.
    pub unsafe fn map_single(
        &self,
        phys: PhysAddr,
        len: u64,
        direction: Direction,
    ) -> Result<Iova, MapListError> {
        let segment = PhysSegment { phys, len };
        // SAFETY: clauses 1 and 2 are the caller's.
        match unsafe { self.map_fast(segment, direction) } {
            Some(range) => Ok(self.first_of(segment, range)),
            // SAFETY: clauses 1 to 3 are the caller's.
            None => unsafe { self.map_list(&[segment], direction, |_, _| Ok(())) }.map(|(first, ..)| first),
        }
    }

    /// Unmaps what [`map_single`](Self::map_single) returned for the same `len`. Cost and context as for [`Domain::unmap`], by the policy of this
    /// handle.
    ///
    /// # Errors
    /// [`UnmapError`]: the device may still reach the memory, unless the error says otherwise.
    #[inline]
    pub fn unmap_single(&self, iova: Iova, len: u64) -> Result<(), UnmapError> {
        match self.range_to_unmap(iova, len)? {
            Some(range) => self.end(range, len),
            None => Ok(()),
        }
    }

    /// Ends the mapping of a buffer of `used` bytes in the pages of `range`.
    #[inline]
    pub(super) fn end(&self, range: IovaRange, used: u64) -> Result<(), UnmapError> {
        self.end_beside(range, range.len().saturating_sub(used))
    }

    /// As [`end`](Self::end), for a buffer that leaves `neighbours` bytes of its pages to others.
    // Out of line: all of a strict unmap is in it.
    #[inline(never)]
    pub(super) fn end_beside(&self, range: IovaRange, neighbours: u64) -> Result<(), UnmapError> {
        self.domain.end(range, neighbours, Rule::Policy(Some(&self.exception)), |_| ())
    }

    /// Maps a scatter-gather list to one range, and writes the device's segments to `out`: touching ones are merged. Returns their number, at most
    /// `list.len()`; `out` must have room for that many. Cost and context as for [`Domain::map`].
    ///
    /// # Errors
    /// [`MapListError`]: the list is mapped as a whole or not at all. After [`MapListError::Unconfirmed`] devices may reach entries of it.
    ///
    /// # Safety
    /// As for [`map_single`](Self::map_single), for each segment.
    pub unsafe fn map_sg(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<usize, MapListError> {
        if let ([segment], [first, ..]) = (list, &mut *out)
            // SAFETY: clauses 1 and 2 are the caller's.
            && let Some(range) = unsafe { self.map_fast(*segment, direction) }
        {
            *first = DmaSegment { iova: self.first_of(*segment, range), len: segment.len };
            return Ok(1);
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.map_list_sg(list, direction, out, |_, _| Ok(())) }.map(|(.., count)| count)
    }

    /// As [`map_sg`](Self::map_sg), but returns the results of [`map_list`](Self::map_list), with the neighbours in place of the used bytes, and the
    /// count.
    ///
    /// # Safety
    /// As for [`map_single`](Self::map_single), for each segment.
    pub(super) unsafe fn map_list_sg(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
        fits: impl FnOnce(u64, u64) -> Result<(), MapListError>,
    ) -> Result<(Iova, Option<IovaRange>, u64, usize), MapListError> {
        let (needed, room) = (list.len(), out.len());
        let no_room = MapListError::NoRoom { needed, room };
        if room < needed {
            return Err(no_room);
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        let (first, range, used) = unsafe { self.map_list(list, direction, fits) }?;
        let base = range.map(IovaRange::start);
        let count = device_view(list, used, base, self.domain.granule(), out).ok_or(no_room)?;
        Ok((first, range, range.map_or(0, |range| range.len().saturating_sub(used)), count))
    }

    /// Unmaps a list that [`map_sg`](Self::map_sg) wrote, as it was written, with one invalidation.
    ///
    /// # Errors
    /// [`UnmapError`], as for [`unmap_single`](Self::unmap_single). An empty list is no error.
    pub fn unmap_sg(&self, mapped: &[DmaSegment]) -> Result<(), UnmapError> {
        let Some((iova, len)) = self.whole_of(mapped)? else {
            return Ok(());
        };
        match self.range_to_unmap(iova, len)? {
            Some(range) => self.end(range, bytes_of(mapped.iter().map(|segment| segment.len))),
            None => Ok(()),
        }
    }

    /// Makes the device's writes visible to the CPU, for memory that stays mapped: a fence orders the CPU's later reads after its read of the
    /// device's completion. (Queues sync the mappings of a non-coherent device.)
    ///
    /// This fence, and that of [`sync_for_device`](Self::sync_for_device), orders accesses to memory as other CPUs see them. The rest is up to the
    /// kernel's functions that access a register of the device: they order that access with those of memory. A non-coherent device that polls memory
    /// may lie outside of the CPUs' domain, as on Arm: there the driver adds the kernel's barrier for devices (`dmb osh`).
    pub fn sync_for_cpu(&self) {
        fence(Ordering::Acquire);
    }

    /// Makes the CPU's writes visible to the device: a fence orders them before the store by which the CPU tells the device.
    pub fn sync_for_device(&self) {
        fence(Ordering::Release);
    }

    pub(super) fn sync(&self, into: Toward) {
        match into {
            Toward::Original => self.sync_for_cpu(),
            Toward::Buffer => self.sync_for_device(),
        }
    }

    /// The address of a segment that the device reaches without a translation. `None` if it needs one, or cannot reach the segment.
    #[inline]
    pub(super) fn passed_through(&self, segment: PhysSegment) -> Option<Iova> {
        let reached = !self.is_translated() && segment.last().is_ok_and(|last| last.get() <= self.limit);
        reached.then(|| Iova::new(segment.phys.get()))
    }

    /// The fast path: maps one segment, and returns its pages. `None`, with nothing changed: [`map_list`](Self::map_list) maps it or says why not.
    ///
    /// # Safety
    /// As for [`map_single`](Self::map_single).
    #[inline]
    pub(super) unsafe fn map_fast(&self, segment: PhysSegment, direction: Direction) -> Option<IovaRange> {
        if !self.is_translated() {
            return None;
        }
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe {
            self.domain.map_fast(segment, direction.permissions().into(), Iova::new(self.limit), |_| ())
        }
    }

    /// The address of the first byte of a list that begins with `segment` and is mapped to `range`.
    #[inline]
    pub(super) fn first_of(&self, segment: PhysSegment, range: IovaRange) -> Iova {
        Iova::new(range.start().get() | segment.phys.page_offset(self.domain.granule()))
    }

    /// Maps `list` into one range. Returns the address of its first byte, the range to unmap, and the used bytes: `None` and 0 without translation.
    ///
    /// # Safety
    /// As for [`map_single`](Self::map_single), for each segment.
    // Out of line: it is the slow path for one segment.
    #[inline(never)]
    pub(super) unsafe fn map_list(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        fits: impl FnOnce(u64, u64) -> Result<(), MapListError>,
    ) -> Result<(Iova, Option<IovaRange>, u64), MapListError> {
        let Some(&first) = list.first() else {
            return Err(MapListError::EmptyList);
        };
        if !self.is_translated() {
            let last = last_byte(list)?;
            if last.get() > self.limit {
                self.maps()?;
                return Err(MapListError::BeyondMask { last, mask: self.mask });
            }
            return Ok((Iova::new(first.phys.get()), None, 0));
        }
        let used = bytes_of(list.iter().map(|segment| segment.len));
        let (how, limit) = (direction.permissions().into(), Iova::new(self.limit));
        let opened = self.domain.pages_of(list).and_then(|len| {
            fits(len, used)?;
            // SAFETY: clauses 1 to 3 are the caller's.
            unsafe { self.domain.open::<false>(list, (len, used), how, limit, |_, _| ()) }
        });
        match opened {
            Ok(range) => Ok((self.first_of(first, range), Some(range), used)),
            Err(error) => Err(self.maps().err().unwrap_or(error)),
        }
    }

    /// The pages of a mapping of `len` bytes at `iova`; `None` without translation.
    pub(super) fn range_to_unmap(&self, iova: Iova, len: u64) -> Result<Option<IovaRange>, UnmapError> {
        if !self.is_translated() {
            return Ok(None);
        }
        let range = IovaRange::of_pages(iova, len, self.domain.granule());
        range.map(Some).ok_or(UnmapError::NoSuchRange { iova, len })
    }

    /// The first address of a list that [`map_sg`](Self::map_sg) wrote, and the bytes up to its last; `None` for an empty list.
    pub(super) fn whole_of(&self, mapped: &[DmaSegment]) -> Result<Option<(Iova, u64)>, UnmapError> {
        let (Some(first), Some(last)) = (mapped.first(), mapped.last()) else {
            return Ok(None);
        };
        if !self.is_translated() {
            // The segments lie in any order, and nothing needs an unmap.
            return Ok(Some((first.iova, first.len)));
        }
        let distance = last.iova.offset_from(first.iova);
        let len = distance.and_then(|distance| distance.checked_add(last.len));
        let wrong = UnmapError::NoSuchRange { iova: first.iova, len: last.len };
        len.map(|len| Some((first.iova, len))).ok_or(wrong)
    }
}

/// Saturates: memory safety does not depend on the sum.
#[inline]
pub(super) fn bytes_of(lens: impl Iterator<Item = u64>) -> u64 {
    lens.fold(0, u64::saturating_add)
}
