//! Mappings with addresses of their own: map, sync and unmap. A mapping with buffers enters the pool's map before it is mapped, and stays there until
//! no device reaches it, so its buffers are not freed earlier.

use alloc::vec::Vec;

use super::BouncePool;
use super::claim::Claim;
use super::client::Request;
use super::mapping::{PoolMapping, Way};
use super::memory::copy_pieces;
use super::single::{Parts, Phase, Place, Single, find, room};
use super::slot::Toward;
use super::split::Cut;
use crate::addr::{Iova, IovaRange, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError, inside};
use crate::domain::{Fate, MapListError, Rule};
use crate::heap::{OutOfMemory, Shared};
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::sync::{Ordering, fence};

pub(super) type Taken<'a, M, P, C> = (Claim<'a, M, P, C>, Shared<Single>);

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Maps through buffers of the mapping's own: all of it; or, with a `cut`, only the ends. The list then has more than a granule, its pieces
    /// touch, and the offset is the one in the granule.
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map); and a `cut` is [`Cut::of`] this list, so that its ends are no longer than the list.
    #[inline]
    pub(super) unsafe fn map_buffered<'a>(
        &self,
        request: &Request<'_, '_>,
        cut: Option<Cut>,
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let PhysSegment { phys, len } = request.origin;
        let granule = self.domain.granule();
        let (middle, largest) = match cut {
            None => (0, self.threshold()),
            Some(Cut { head, tail }) => (len - head - tail, granule.bytes()),
        };
        let bytes = request.terms.offset.checked_add(len).and_then(|bytes| granule.round_up(bytes));
        let bytes = bytes.ok_or(MapListError::Wraps { index: 0, phys, len })?;
        let buffers = self.alloc_pieces(bytes - middle, largest)?;
        // SAFETY: clauses 1 to 3 are the caller's; the buffers came from `alloc` just now (4).
        unsafe { self.map_through(request, cut, bytes, buffers) }
    }

    /// Maps `bytes` bytes of granules through `buffers`. Out of line, so that its frame is not on the stack of the allocation before it.
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map), clauses 1 to 3. 4. The caller owns `buffers`, which [`alloc`](Self::alloc) returned. They
    /// have room for the whole list, or, with a `cut`, for its two ends.
    #[inline(never)]
    unsafe fn map_through<'a>(
        &self,
        request: &Request<'_, '_>,
        cut: Option<Cut>,
        bytes: u64,
        buffers: Vec<PhysSegment>,
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let (list, len) = (request.list, request.origin.len);
        let (middle, way) = match cut {
            None => (0..0, Way::SingleUse),
            Some(Cut { head, tail }) => (head..len - tail, Way::Split),
        };
        let memory = room(list.len())
            .and_then(|original| Ok((original, room(buffers.len() + cut.map_or(0, |_| list.len()))?)));
        let (mut original, mut linked) = memory.inspect_err(|_| {
            // SAFETY: `alloc` returned the buffers, and this caller owns them, by clause 4.
            unsafe { self.free_pieces(&buffers) };
        })?;
        original.extend_from_slice(list);
        let (before, behind) = buffers.split_at(usize::from(middle.start > 0));
        linked.extend_from_slice(before);
        if let Some(cut) = cut {
            cut.push_middle(list, &mut linked);
        }
        linked.extend_from_slice(behind);
        let parts = Parts { list: original, buffers, middle, neighbours: 0 };
        // SAFETY: the buffers came from `alloc` by clause 4 (1); between them are whole granules of `list`, by the caller's clause 2 (2); the list is
        // the request's (3).
        let single = unsafe { self.enter_single(request, (&linked, bytes), parts) }?;
        Ok(PoolMapping { iova: single.iova(), len, way, list: None })
    }

    /// Enters a mapping into the map, fills its buffers if the request says so, and maps the granules of `linked`, `bytes` bytes in all. After an
    /// error the buffers of `parts` are free again, or wait for a later trim.
    ///
    /// # Safety
    /// 1. The buffers of `parts` came from `alloc`, and nothing but the pool's copies uses them.
    /// 2. All else in `linked` is the caller's to open, by [`BounceDevice::map`](super::BounceDevice::map)'s clauses 1 to 3.
    /// 3. As [`BounceDevice::map`](super::BounceDevice::map), clauses 1 and 3, for the list of `parts`.
    #[inline(never)]
    pub(super) unsafe fn enter_single(
        &self,
        request: &Request<'_, '_>,
        (linked, bytes): (&[PhysSegment], u64),
        mut parts: Parts,
    ) -> Result<Shared<Single>, DmaMapError> {
        let Request { client, origin: PhysSegment { len, .. }, terms, copied, .. } = *request;
        let mut claim = self.claim();
        // Each round but the last leaks addresses of another mapping, which a caller has ended by address before its owner did.
        let single = loop {
            let memory = || Place::new().map_err(|OutOfMemory| DmaMapError::OutOfMemory);
            let reserve = |place| match self.domain.reserve(bytes, Iova::new(client.profile.mask)) {
                Ok(reserved) => Ok((place, reserved.into_range())),
                Err(error) => Err(DmaMapError::List(error.into())),
            };
            let (place, range) = match memory().and_then(reserve) {
                Ok(both) => both,
                Err(error) => {
                    // SAFETY: the buffers came from `alloc` by clause 1, and no device has them yet.
                    unsafe { self.free_pieces(&parts.buffers) };
                    claim.done();
                    return Err(error);
                }
            };
            match claim.enter(place, Single { range, len, group: client.group, terms, parts }) {
                Ok(single) => break single,
                Err(single) => parts = single.parts,
            }
        };
        if copied && terms.copies_in() {
            // SAFETY: the original by clause 3; the claim owns the buffers (1).
            unsafe { self.copy_single(&single, (0, len), Toward::Buffer) };
        }
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.link_single(claim, single, linked) }
    }

    /// Enters the granules of `linked` at the addresses of `single`, which `claim` has entered. Out of line, so that its frame is not on the stack of
    /// the reservation before it.
    ///
    /// # Safety
    /// As [`enter_single`](Self::enter_single).
    #[inline(never)]
    unsafe fn link_single(
        &self,
        claim: Claim<'_, M, P, C>,
        single: Shared<Single>,
        linked: &[PhysSegment],
    ) -> Result<Shared<Single>, DmaMapError> {
        let (range, start) = (single.range, single.range.start());
        // The copies into the buffers come before the store by which the driver tells the device.
        fence(Ordering::Release);
        // SAFETY: `link`'s clauses hold for the buffers (clause 1), which are freed after a confirmed unmap or never, and for the rest (clause 2).
        let linked =
            unsafe { self.domain.link(range, linked, single.terms.direction.permissions().into(), None) };
        let Err(failed) = linked else {
            claim.set(start, Phase::Live(claim.number()), false);
            claim.done();
            return Ok(single);
        };
        let is_lost = failed.addresses == Fate::Lost;
        if failed.is_reachable {
            // A device may have cached entries for the buffers: a later trim frees them.
            claim.set(start, Phase::Unconfirmed, is_lost);
            claim.done();
            self.wait_for_trim(&single);
        } else {
            claim.end(start, is_lost);
        }
        Err(failed.error.into())
    }

    /// Leaves a mapping whose unmap is not confirmed, with its buffers and addresses, to a later trim. Its directly mapped bytes count as open until
    /// the domain has confirmed a flush, which it retries.
    fn wait_for_trim(&self, single: &Single) {
        let open = single.range.len().saturating_sub(single.parts.buffer_bytes());
        if open > 0 {
            self.domain.hold(open, None);
        }
        self.look_later();
    }

    /// Ends a mapping with addresses outside of the slots.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap).
    pub(super) unsafe fn unmap_own(&self, rule: Rule<'_>, iova: Iova, len: u64) -> Result<(), DmaUnmapError> {
        let range =
            IovaRange::of_pages(iova, len, self.domain.granule()).ok_or(DmaUnmapError::NotMapped { iova })?;
        // Never addresses of slots, whatever the caller asks for.
        if self.region.last() >= range.start() && range.last() >= self.region.start() {
            return Err(DmaUnmapError::NotMapped { iova });
        }
        if let Some((claim, single)) = self.take_single((range, iova, len), None)? {
            // SAFETY: clauses 1 to 3 are the caller's, for this mapping.
            return unsafe { self.end_single(rule, claim, &single) };
        }
        Ok(self.domain.end(range, range.len().saturating_sub(len), rule, |_| ())?)
    }

    /// Claims the mapping of `len` bytes at `iova`, in the granules `range`; of `group`, if one is given. `None` if the map has none of these
    /// addresses. An error, with nothing changed, if it has another mapping there.
    pub(super) fn take_single(
        &self,
        (range, iova, len): (IovaRange, Iova, u64),
        group: Option<u64>,
    ) -> Result<Option<Taken<'_, M, P, C>>, DmaUnmapError> {
        if self.singles.count() == 0 {
            return Ok(None);
        }
        let claim = self.claim();
        // The caller may have given up its only token: if the search panics, the addresses leak.
        let changing = self.domain.changing(range);
        let found = self.with_singles(|map| find(map, range, iova, Some(len), (Some(claim.number()), group)));
        changing.done();
        if let Ok(Some(single)) = found {
            return Ok(Some((claim, single)));
        }
        claim.done();
        found.map(|_| None)
    }

    /// Ends a mapping of the map, which `claim` owns.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap) of this mapping.
    unsafe fn end_single(
        &self,
        rule: Rule<'_>,
        claim: Claim<'_, M, P, C>,
        single: &Single,
    ) -> Result<(), DmaUnmapError> {
        let start = single.range.start();
        if single.parts.buffers.is_empty() {
            // Out of the map first: once the domain has the addresses, it may hand them out again.
            let changing = claim.forget(start);
            changing.done();
            claim.done();
            return Ok(self.domain.end(single.range, single.parts.neighbours, rule, |_| ())?);
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.end_parts(claim, single, true) }
    }

    /// Ends a mapping with buffers, which `claim` owns. With `copied`, the original gets the device's bytes.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap) of this mapping.
    pub(super) unsafe fn end_parts(
        &self,
        claim: Claim<'_, M, P, C>,
        single: &Single,
        copied: bool,
    ) -> Result<(), DmaUnmapError> {
        let start = single.range.start();
        let mut gather = Gather::new();
        let lost = !self.unlink(single.range, &mut gather);
        let confirmed = self.confirm(&gather);
        if copied && single.terms.copies_out() {
            fence(Ordering::Acquire);
            // SAFETY: the original by the caller's clause 2; the buffers are the mapping's until it is released.
            unsafe { self.copy_single(single, (0, single.len), Toward::Original) };
        }
        if single.terms.wipe {
            for piece in &single.parts.buffers {
                // SAFETY: the buffers are the pool's memory, and the claim owns them until they are released.
                unsafe { self.memory.zero(piece.phys, piece.len) };
            }
        }
        let Err(error) = confirmed else {
            claim.end(start, lost);
            return Ok(());
        };
        claim.set(start, Phase::Unconfirmed, lost);
        claim.done();
        self.wait_for_trim(single);
        // Without a middle no device ever reached the original, so the driver's unmap has succeeded. The buffers wait for a trim.
        if single.parts.middle.is_empty() { Ok(()) } else { Err(DmaUnmapError::Unconfirmed { error }) }
    }

    /// Syncs `len` bytes from `offset` on of a mapping with addresses outside of the slots. A direct mapping needs no copy, and is in the map only if
    /// it is a list with gaps: for any other address this does nothing.
    ///
    /// # Safety
    /// As [`sync_toward`](Self::sync_toward).
    pub(super) unsafe fn sync_own(
        &self,
        iova: Iova,
        offset: u64,
        len: u64,
        into: Toward,
    ) -> Result<(), DmaUnmapError> {
        let range =
            IovaRange::of_pages(iova, 1, self.domain.granule()).ok_or(DmaUnmapError::NotMapped { iova })?;
        if self.singles.count() == 0 {
            return Ok(());
        }
        let found = self.with_singles(|map| find(map, range, iova, None, (None, None)))?;
        // SAFETY: clauses 1 and 2 are the caller's, for this mapping.
        found.map_or(Ok(()), |single| unsafe { self.sync_single(&single, (offset, len), into) })
    }

    /// # Safety
    /// As [`sync_toward`](Self::sync_toward), for this mapping.
    pub(super) unsafe fn sync_single(
        &self,
        single: &Single,
        (offset, len): (u64, u64),
        into: Toward,
    ) -> Result<(), DmaUnmapError> {
        inside(single.iova(), single.len, (offset, len))?;
        if single.terms.copies(into) {
            // SAFETY: clauses 1 and 2 are the caller's.
            unsafe { self.copy_single(single, (offset, len), into) };
        }
        Ok(())
    }

    /// Copies `len` bytes from `offset` on between a mapping's buffers and its original.
    ///
    /// # Safety
    /// 1. Only devices and atomic accesses touch these bytes of the original and of the buffers meanwhile, and all are memory.
    #[inline(never)]
    unsafe fn copy_single(&self, single: &Single, (offset, len): (u64, u64), into: Toward) {
        let Parts { list, buffers, middle, .. } = &single.parts;
        // The buffers hold the bytes before the middle, and then those after it.
        let behind = (middle.end, single.len, middle.end - middle.start);
        for (first, end, skipped) in [(0, middle.start, 0), behind] {
            let (from, to) = (offset.max(first), (offset + len).min(end));
            if from >= to {
                continue;
            }
            let buffer = (&buffers[..], single.terms.offset + from - skipped);
            let (source, target) = match into {
                Toward::Buffer => ((&list[..], from), buffer),
                Toward::Original => (buffer, (&list[..], from)),
            };
            // SAFETY: `copy`'s clauses: the bytes are memory, and nobody else's meanwhile, by clause 1; a buffer overlaps no original.
            unsafe { copy_pieces(&*self.memory, source, target, to - from, into) };
        }
    }

    /// Allocates `bytes` bytes of zeroed memory, a multiple of the granule, in the largest pieces available, up to `largest` bytes.
    #[inline(never)]
    fn alloc_pieces(&self, bytes: u64, largest: u64) -> Result<Vec<PhysSegment>, DmaMapError> {
        let granule = self.domain.granule().bytes();
        let mut pieces = Vec::new();
        let mut piece = largest;
        let mut left = bytes;
        let mut result = Ok(());
        while left > 0 && result.is_ok() {
            let len = piece.min(left);
            let found = if piece > granule { self.try_alloc(len) } else { self.alloc(len) };
            match found {
                Some(phys) if pieces.try_reserve(1).is_ok() => {
                    pieces.push(PhysSegment { phys, len });
                    left -= len;
                }
                Some(phys) => {
                    // SAFETY: it came from the line above, and nobody else has it.
                    unsafe { self.free(phys, len) };
                    result = Err(DmaMapError::OutOfMemory);
                }
                None if piece > granule => piece /= 2,
                None => result = Err(self.no_buffer(bytes)),
            }
        }
        if let Err(error) = result {
            // SAFETY: the loop above allocated the pieces, and only this function knows them.
            unsafe { self.free_pieces(&pieces) };
            return Err(error);
        }
        Ok(pieces)
    }

    /// # Safety
    /// As [`free`](Self::free), for each.
    pub(super) unsafe fn free_pieces(&self, pieces: &[PhysSegment]) {
        for piece in pieces {
            // SAFETY: clauses 1 and 2 are the caller's.
            unsafe { self.free(piece.phys, piece.len) };
        }
    }
}
