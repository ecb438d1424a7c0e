//! A device with its domain, and its mappings by number. A mapping is open to the device, with all
//! of its pages, from the map on until an unmap has kept the promise of the device's policy.

use core::fmt;

use super::RawMapping;
use super::layout::device_view;
use crate::addr::{Direction, DmaSegment, Iova, IovaRange, PhysAddr, PhysSegment};
use crate::domain::{AtomicPolicy, Domain, Ending, MapListError, Policy, PolicyError, UnmapError, last_byte};
use crate::heap::{OutOfMemory, Shared};
use crate::mapper::Mapper;
use crate::platform::Platform;
use crate::sync::{Ordering, fence};

/// A device attached to a domain, with the limits of its addresses. Cheap to clone; a clone is the same device.
///
/// Its mappings end by the domain's policy, or by one of its own: [`set_policy`](Self::set_policy) for all of the
/// device's, [`with_policy`](Self::with_policy) for those that are made or ended through one handle, down to a single
/// mapping.
///
/// A [`Queue`](super::Queue) keeps account of two things for which these methods trust their
/// caller. The first is that the memory is the caller's to open to a device: memory safety rests on
/// that, so the methods that open are unsafe. The second is that a mapping is unmapped once, as a
/// whole, by one CPU, and by its owner. Memory safety does not rest on that, as an unmap only ever
/// closes. But a caller that ends another's mapping sets its address free: the owner may then end
/// the next mapping there, whose device loses its accesses.
///
/// That of a [device that is not coherent](super::Device::not_coherent) maps nothing
/// ([`MapListError::NotCoherent`]): such a device maps by its queues.
///
/// All methods may run on any number of CPUs at once. What they may wait for is the domain's affair: see
/// [`Domain::map`] and [`Domain::unmap`].
pub struct DmaDevice<M: Mapper, P: Platform> {
    domain: Shared<Domain<M, P>>,
    /// The highest address for what is mapped through this handle: none for a device that is not
    /// coherent, so that its short ways find no addresses and the long one says why.
    limit: u64,
    /// The highest address that the device can put on the bus.
    mask: u64,
    /// The device's own policy, if it has one.
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
    /// Makes a device that can put addresses up to `mask` on the bus (`u32::MAX` for a 32-bit
    /// device). Allocates.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn new(domain: Shared<Domain<M, P>>, mask: u64) -> Result<Self, OutOfMemory> {
        Ok(Self { domain, limit: mask, mask, exception: Shared::new(AtomicPolicy::new(None))? })
    }

    /// Returns the handle of a device that is not coherent, which maps nothing.
    pub(super) fn not_coherent(self) -> Self {
        Self { limit: 0, ..self }
    }

    /// Returns a handle that maps, for callers that maintain the caches.
    pub(super) fn maintained(&self) -> Self {
        Self { limit: self.mask, ..self.clone() }
    }

    /// Whether the device sees what the CPUs' caches hold.
    pub fn is_coherent(&self) -> bool {
        self.limit == self.mask
    }

    /// The policy by which the device's mappings end now.
    pub fn policy(&self) -> Policy {
        self.exception.get().unwrap_or_else(|| self.domain.policy())
    }

    /// Gives the device a policy of its own, or, with `None`, its domain's again, while I/O goes on. When the call
    /// returns, the stricter of the two promises holds, as [`Domain::set_policy`] says, for every mapping of the device's
    /// that ends by a policy: by this handle and its clones, or by a [queue](super::Queue). Those that end by a handle
    /// [with a policy](Self::with_policy) keep to that. (Where it takes a flush, this flushes the whole domain.)
    ///
    /// # Errors
    /// As [`Domain::set_policy`]: no device has passthrough in a domain that translates.
    pub fn set_policy(&self, policy: Option<Policy>) -> Result<(), PolicyError> {
        self.domain.change(&self.exception, policy)
    }

    /// Makes another handle of the device, with a policy of its own: for mappings that must end
    /// strictly where the others need not, or the other way round. Allocates.
    ///
    /// # Errors
    /// As [`set_policy`](Self::set_policy).
    pub fn with_policy(&self, policy: Policy) -> Result<Self, PolicyError> {
        let handle = Self { limit: self.limit, ..Self::new(self.domain.clone(), self.mask)? };
        // Nothing was unmapped through it yet, so nothing is flushed.
        handle.domain.allows(policy)?;
        handle.exception.swap(Some(policy));
        Ok(handle)
    }

    /// The policy of its own, if it has one, for those that end its mappings.
    #[inline]
    pub(super) fn exception(&self) -> &AtomicPolicy {
        &self.exception
    }

    /// The device's domain.
    pub fn domain(&self) -> &Shared<Domain<M, P>> {
        &self.domain
    }

    /// The highest address that the device can put on the bus.
    pub fn mask(&self) -> u64 {
        self.mask
    }

    /// Checks that the handle maps.
    pub(super) fn maps(&self) -> Result<(), MapListError> {
        if self.is_coherent() { Ok(()) } else { Err(MapListError::NotCoherent) }
    }

    /// Returns whether the device's addresses are translated at all.
    pub(super) fn is_translated(&self) -> bool {
        self.domain.is_translated()
    }

    /// Maps `len` bytes at `phys` and returns the address for the device. The whole pages around
    /// the buffer become reachable. Cost and context are those of [`Domain::map`].
    ///
    /// # Errors
    /// [`MapListError`], with nothing mapped.
    ///
    /// # Safety
    /// As for [`Domain::map`]. Under passthrough the device reaches all of memory, mapped or not: the caller that attached it
    /// so answers for that.
    pub unsafe fn map_single(
        &self,
        phys: PhysAddr,
        len: u64,
        direction: Direction,
    ) -> Result<Iova, MapListError> {
        let segment = PhysSegment { phys, len };
        // SAFETY: the caller's promise.
        match unsafe { self.map_fast(segment, direction) } {
            Some(range) => Ok(self.first_of(segment, range)),
            // SAFETY: the caller's promise.
            None => unsafe { self.map_list(&[segment], direction) }.map(|(first, ..)| first),
        }
    }

    /// Unmaps what [`map_single`](Self::map_single) returned for the same `len`. Cost and context
    /// are those of [`Domain::unmap`], by the policy of this handle.
    ///
    /// # Errors
    /// [`UnmapError`]; only after `Ok` is the policy's promise kept.
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

    /// As [`end`](Self::end), for a buffer beside which `neighbours` bytes of the pages are not its
    /// own.
    #[inline]
    pub(super) fn end_beside(&self, range: IovaRange, neighbours: u64) -> Result<(), UnmapError> {
        self.domain.end(range, Ending { neighbours, exception: Some(&self.exception) }, |_| ())
    }

    /// Maps a scatter-gather list with one allocation of addresses, and writes to `out` what the
    /// device is to be given: segments that touch are merged. Returns how many segments it wrote,
    /// `list.len()` at the most; `out` must have room for that many. Cost and context are those of
    /// [`Domain::map`].
    ///
    /// # Errors
    /// [`MapListError`], with nothing mapped: the list is mapped as a whole or not at all. After
    /// [`MapListError::Unconfirmed`] devices may reach what was entered of it.
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
            // SAFETY: the caller's promise.
            && let Some(range) = unsafe { self.map_fast(*segment, direction) }
        {
            *first = DmaSegment { iova: self.first_of(*segment, range), len: segment.len };
            return Ok(1);
        }
        // SAFETY: the caller's promise.
        unsafe { self.map_list_sg(list, direction, out) }.map(|(.., count)| count)
    }

    /// As [`map_sg`](Self::map_sg), but also returns, before the count, what
    /// [`map_list`](Self::map_list) does, with the bytes beside the segments in place of those in them.
    ///
    /// # Safety
    /// As for [`map_single`](Self::map_single), for each segment.
    pub(super) unsafe fn map_list_sg(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(Iova, Option<IovaRange>, u64, usize), MapListError> {
        let (needed, room) = (list.len(), out.len());
        let no_room = MapListError::NoRoom { needed, room };
        if room < needed {
            return Err(no_room);
        }
        // SAFETY: the caller's promise.
        let (first, range, used) = unsafe { self.map_list(list, direction) }?;
        let base = range.map(IovaRange::start);
        let count = device_view(list, used, base, self.domain.granule(), out).ok_or(no_room)?;
        Ok((first, range, range.map_or(0, |range| range.len().saturating_sub(used)), count))
    }

    /// Unmaps the list that [`map_sg`](Self::map_sg) wrote, given as it was written, with one invalidation.
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

    /// Makes what the device has written visible to the CPU, for memory that stays mapped.
    ///
    /// This orders the CPU's later reads after its reads of the device's completion; it costs a
    /// fence. (What the queues of a device that is not coherent have mapped, they sync.)
    ///
    /// The fence is one between CPUs, as is that of [`sync_for_device`](Self::sync_for_device). An
    /// access to a register of the device, by whatever the kernel has for that, orders the rest.
    /// A device that is not coherent and finds its work in memory by itself may lie outside of the
    /// CPUs' domain, as on Arm: there the driver adds the kernel's barrier for devices (`dmb osh`).
    pub fn sync_for_cpu(&self) {
        fence(Ordering::Acquire);
    }

    /// Makes what the CPU has written visible to the device, for memory that stays mapped: orders
    /// the CPU's earlier writes before the store by which it tells the device. It costs a fence.
    pub fn sync_for_device(&self) {
        fence(Ordering::Release);
    }

    /// Returns the address of a segment that the device reaches without a translation; `None` where there is one, and where
    /// [`map_list`](Self::map_list) says why not.
    #[inline]
    pub(super) fn passed_through(&self, segment: PhysSegment) -> Option<Iova> {
        let reached = !self.is_translated() && segment.last().is_ok_and(|last| last.get() <= self.limit);
        reached.then(|| Iova::new(segment.phys.get()))
    }

    /// Maps one segment, if that is quickly done, and returns its pages. Otherwise returns `None`
    /// with nothing changed, and [`map_list`](Self::map_list) maps it or says why not.
    ///
    /// # Safety
    /// As for [`map_single`](Self::map_single).
    #[inline]
    pub(super) unsafe fn map_fast(&self, segment: PhysSegment, direction: Direction) -> Option<IovaRange> {
        if !self.is_translated() {
            return None;
        }
        // SAFETY: the caller's promise.
        unsafe {
            self.domain.map_fast(segment, direction.permissions().into(), Iova::new(self.limit), |_| ())
        }
    }

    /// Where the device finds the first byte of a list that begins with `segment` and is mapped to `range`.
    #[inline]
    pub(super) fn first_of(&self, segment: PhysSegment, range: IovaRange) -> Iova {
        Iova::new(range.start().get() | segment.phys.page_offset(self.domain.granule()))
    }

    /// Maps `list` into one range. Returns the device's address of its first byte, the range of pages to
    /// unmap, and the bytes of the segments: `None` and 0 where nothing is translated.
    ///
    /// # Safety
    /// As for [`map_single`](Self::map_single), for each segment.
    pub(super) unsafe fn map_list(
        &self,
        list: &[PhysSegment],
        direction: Direction,
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
            RawMapping::fits(len, used, self.domain.granule())?;
            // SAFETY: the caller's promise.
            unsafe { self.domain.open::<false>(list, (len, used), how, limit, |_, _| ()) }
        });
        match opened {
            Ok(range) => Ok((self.first_of(first, range), Some(range), used)),
            Err(error) => Err(self.maps().err().unwrap_or(error)),
        }
    }

    /// The pages of a mapping of `len` bytes at `iova`; `None` where nothing is translated.
    pub(super) fn range_to_unmap(&self, iova: Iova, len: u64) -> Result<Option<IovaRange>, UnmapError> {
        if !self.is_translated() {
            return Ok(None);
        }
        let range = IovaRange::of_pages(iova, len, self.domain.granule());
        range.map(Some).ok_or(UnmapError::NoSuchRange { iova, len })
    }

    /// The first address of a list as [`map_sg`](Self::map_sg) wrote it, and the bytes up to its last;
    /// `None` for an empty list.
    pub(super) fn whole_of(&self, mapped: &[DmaSegment]) -> Result<Option<(Iova, u64)>, UnmapError> {
        let (Some(first), Some(last)) = (mapped.first(), mapped.last()) else {
            return Ok(None);
        };
        if !self.is_translated() {
            // The segments lie in any order of memory, and nothing is to be unmapped.
            return Ok(Some((first.iova, first.len)));
        }
        // The segments of one list lie in one range of pages, in order.
        let distance = last.iova.offset_from(first.iova);
        let len = distance.and_then(|distance| distance.checked_add(last.len));
        let wrong = UnmapError::NoSuchRange { iova: first.iova, len: last.len };
        len.map(|len| Some((first.iova, len))).ok_or(wrong)
    }
}

/// Returns the sum of lengths. Memory safety rests on none of them.
#[inline]
pub(super) fn bytes_of(lens: impl Iterator<Item = u64>) -> u64 {
    lens.fold(0, u64::saturating_add)
}
