//! Mappings with addresses of their own: how they are made, synced and ended. One that has buffers
//! is in the pool's map from before it is mapped until no device reaches it, so its buffers are not
//! freed before.

use alloc::vec::Vec;

use super::BouncePool;
use super::claim::Claim;
use super::client::Client;
use super::mapping::{PoolMapping, Way};
use super::memory::copy_pieces;
use super::single::{Parts, Phase, Place, Single, find, remember};
use super::slot::{Terms, Toward};
use crate::addr::{Iova, IovaRange, PhysAddr, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError, inside};
use crate::domain::{AtomicPolicy, Ending as HowItEnds, Fate, MapListError, UnmapError};
use crate::heap::{OutOfMemory, Shared};
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::sync::{Ordering, fence};

/// A mapping of the map, and the caller that has it in hand.
pub(super) type Taken<'a, M, P, C> = (Claim<'a, M, P, C>, Shared<Single>);

/// How what was mapped directly ends. (What has buffers ends strictly, as they go back to an allocator.)
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule<'a> {
    /// By the policy of its device, which is read when it ends; by the domain's where that has none.
    Policy(Option<&'a AtomicPolicy>),
    /// Strictly.
    Strictly,
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Maps `len` bytes, those of `list`, through a buffer of their own.
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map).
    #[inline(never)]
    pub(super) unsafe fn map_single_use<'a>(
        &self,
        client: &Client,
        list: &'a [PhysSegment],
        len: u64,
        (terms, copied): (Terms, bool),
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let phys = list.first().map_or(PhysAddr::new(0), |piece| piece.phys);
        let bytes = terms.offset.checked_add(len).and_then(|bytes| self.domain.granule().round_up(bytes));
        let bytes = bytes.ok_or(MapListError::Wraps { index: 0, phys, len })?;
        let original = remember(list)?;
        let buffer = self.alloc_pieces(bytes)?;
        let linked = remember(&buffer).inspect_err(|_| {
            // SAFETY: they came from the line above.
            unsafe { self.free_pieces(&buffer) };
        })?;
        let parts = Parts::Whole(buffer);
        if copied && terms.copies_in() {
            // SAFETY: the original is the caller's promise, and no one else has the buffer yet.
            unsafe { self.copy_parts(&parts, &original, (terms.offset, len), (0, len), Toward::Buffer) };
        }
        // SAFETY: all of `linked` is the buffer that came from `alloc`.
        let single = unsafe { self.enter_single(client, (&linked, bytes), original, (len, terms), parts) }?;
        Ok(PoolMapping { iova: single.iova(), len, way: Way::SingleUse, list: None })
    }

    /// Opens the granules of `linked`, `bytes` bytes in all, to devices, and keeps the mapping in the map. After an
    /// error the parts' buffers are free again, or wait for a later trim.
    ///
    /// # Safety
    /// The parts' buffers came from `alloc` and are not used but by the pool's copies. What else is in `linked` is the caller's to
    /// open, as for [`BounceDevice::map`](super::BounceDevice::map).
    #[inline(never)]
    pub(super) unsafe fn enter_single(
        &self,
        client: &Client,
        (linked, bytes): (&[PhysSegment], u64),
        list: Vec<PhysSegment>,
        (len, terms): (u64, Terms),
        parts: Parts,
    ) -> Result<Shared<Single>, DmaMapError> {
        let mut claim = self.claim();
        let (mut list, mut parts) = (list, parts);
        // Each round but the last gives up addresses of another mapping, which a caller has ended
        // by number before its owner did.
        let single = loop {
            let memory = || Place::new().map_err(|OutOfMemory| DmaMapError::OutOfMemory);
            let reserve = |place| match self.domain.reserve(bytes, client.limit()) {
                Ok(reserved) => Ok((place, reserved.into_range())),
                Err(error) => Err(DmaMapError::List(error.into())),
            };
            let (place, range) = match memory().and_then(reserve) {
                Ok(both) => both,
                Err(error) => {
                    // SAFETY: the parts' buffers came from `alloc` just now, and no device has them.
                    unsafe { self.free_parts(&parts) };
                    claim.done();
                    return Err(error);
                }
            };
            match claim.enter(place, Single { range, len, group: client.group(), terms, list, parts }) {
                Ok(single) => break single,
                Err(single) => (list, parts) = (single.list, single.parts),
            }
        };
        // SAFETY: the caller's promise.
        unsafe { self.link_single(claim, single, linked) }
    }

    /// Opens the granules of `linked` at the addresses of `single`, which `claim` has entered. By itself, as the making of a mapping
    /// needs most of the stack before this, for its addresses.
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
        // SAFETY: the caller's promise; buffers are freed after an unmap that is confirmed, or never.
        let linked =
            unsafe { self.domain.link(range, linked, single.terms.direction.permissions().into(), None) };
        let Err(failed) = linked else {
            claim.set(start, Phase::Live(claim.number()), false);
            claim.done();
            return Ok(single);
        };
        let is_lost = failed.remains.addresses() == Fate::Lost;
        if failed.remains.reachable {
            // A device may have met the buffers for a moment, and still know them: a later trim gives them back.
            claim.set(start, Phase::Unconfirmed, is_lost);
            claim.done();
            self.wait_for_trim(&single);
        } else {
            claim.end(start, is_lost);
        }
        Err(failed.error.into())
    }

    /// Leaves a mapping whose unmap is not confirmed to a later trim, with its buffers and
    /// addresses. The bytes of the original in it count as open until a flush is confirmed, which
    /// the domain tries again and again.
    fn wait_for_trim(&self, single: &Single) {
        let open = single.range.len().saturating_sub(self.bytes_of(&single.parts));
        if open > 0 {
            self.domain.leave_open(open);
        }
        self.look_later();
    }

    /// Ends a mapping with addresses outside the slots'.
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
            // SAFETY: the caller's promise.
            return unsafe { self.end_single(rule, claim, &single) };
        }
        Ok(self.end_direct(rule, range, range.len().saturating_sub(len))?)
    }

    /// Takes the mapping of `len` bytes at `iova`, in the granules `range`, in hand: of the group, if one is given. Returns
    /// `None` where the map knows nothing of these addresses.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: the map has another mapping there. Nothing is changed.
    pub(super) fn take_single(
        &self,
        (range, iova, len): (IovaRange, Iova, u64),
        group: Option<u64>,
    ) -> Result<Option<Taken<'_, M, P, C>>, DmaUnmapError> {
        if self.singles.count() == 0 {
            return Ok(None);
        }
        let claim = self.claim();
        // The caller may have given its only token away for this call: where the search panics, the addresses are lost.
        let changing = self.domain.changing(range);
        let found = self.find_single(range, iova, Some(len), (Some(claim.number()), group));
        changing.done();
        if let Ok(Some(single)) = found {
            return Ok(Some((claim, single)));
        }
        claim.done();
        found.map(|_| None)
    }

    /// Ends what was mapped directly, in granules of which `neighbours` bytes are not its own.
    fn end_direct(&self, rule: Rule<'_>, range: IovaRange, neighbours: u64) -> Result<(), UnmapError> {
        match rule {
            Rule::Policy(exception) => self.domain.end(range, HowItEnds { neighbours, exception }, |_| ()),
            Rule::Strictly => self.domain.end_now(range, neighbours, |_| ()),
        }
    }

    /// Ends a mapping of the map, which `claim` has in hand.
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
        if let Parts::Direct { neighbours } = single.parts {
            // Forgotten first: once the domain has the addresses back, they may have any owner.
            let changing = claim.forget(start);
            changing.done();
            claim.done();
            return Ok(self.end_direct(rule, single.range, neighbours)?);
        }
        // SAFETY: the caller's promise.
        unsafe { self.end_parts(claim, single, true) }
    }

    /// Ends a mapping of the map that has buffers, which `claim` has in hand. `copied` says whether the original gets what the
    /// device wrote.
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
            // SAFETY: the caller's promise lasts until this returns; the buffers are the mapping's.
            unsafe { self.copy_single(single, 0, single.len, Toward::Original) };
        }
        if single.terms.wipe {
            // SAFETY: the buffers are the mapping's until they are released.
            unsafe { self.wipe_parts(&single.parts) };
        }
        let Err(error) = confirmed else {
            claim.end(start, lost);
            return Ok(());
        };
        claim.set(start, Phase::Unconfirmed, lost);
        claim.done();
        self.wait_for_trim(single);
        match single.parts {
            // The device never had the original. The buffer waits for a trim.
            Parts::Whole(_) => Ok(()),
            _ => Err(DmaUnmapError::Unconfirmed { error }),
        }
    }

    /// Syncs `len` bytes from `offset` on of a mapping with addresses outside the slots'. What was
    /// mapped directly needs no copy, and but for lists with gaps the map does not know it: then
    /// this does nothing.
    ///
    /// # Safety
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    pub(super) unsafe fn sync_own(
        &self,
        iova: Iova,
        offset: u64,
        len: u64,
        into: Toward,
    ) -> Result<(), DmaUnmapError> {
        let range =
            IovaRange::of_pages(iova, 1, self.domain.granule()).ok_or(DmaUnmapError::NotMapped { iova })?;
        let Some(single) = self.find_single(range, iova, None, (None, None))? else { return Ok(()) };
        inside(iova, single.len, (offset, len))?;
        if single.terms.copies(into) {
            // SAFETY: the caller's promise.
            unsafe { self.copy_single(&single, offset, len, into) };
        }
        Ok(())
    }

    fn find_single(
        &self,
        range: IovaRange,
        iova: Iova,
        len: Option<u64>,
        by: (Option<u64>, Option<u64>),
    ) -> Result<Option<Shared<Single>>, DmaUnmapError> {
        if self.singles.count() == 0 {
            return Ok(None);
        }
        self.domain.platform().with_cpu(|_| self.singles.with(|map| find(map, range, iova, len, by)))
    }

    /// Copies `len` bytes from `offset` on between a mapping's buffers and its original. See
    /// [`copy_parts`](Self::copy_parts).
    pub(super) unsafe fn copy_single(&self, single: &Single, offset: u64, len: u64, into: Toward) {
        let whole = (single.terms.offset, single.len);
        // SAFETY: the caller's promise.
        unsafe { self.copy_parts(&single.parts, &single.list, whole, (offset, len), into) };
    }

    /// Copies `len` bytes from `offset` on between `parts` and the `total` bytes of `list`, whose first is `skip` bytes
    /// into its granule.
    ///
    /// # Safety
    /// The original is memory that this caller has to itself, but for devices; so are the buffers of `parts`.
    #[inline(never)]
    pub(super) unsafe fn copy_parts(
        &self,
        parts: &Parts,
        list: &[PhysSegment],
        (skip, total): (u64, u64),
        (offset, len): (u64, u64),
        into: Toward,
    ) {
        // Copies the part of these bytes that lies from `first` to `end` of the mapping, which is in `buffer`.
        let part = |buffer: &[PhysSegment], skip: u64, first: u64, end: u64| {
            let (from, to) = (offset.max(first), (offset + len).min(end));
            if from >= to {
                return;
            }
            let buffer = (buffer, skip + (from - first));
            let (source, target) = match into {
                Toward::Buffer => ((list, from), buffer),
                Toward::Original => (buffer, (list, from)),
            };
            // SAFETY: the caller's promise.
            unsafe { copy_pieces(&*self.memory, source, target, to - from, into) };
        };
        let granule = |phys| [PhysSegment { phys, len: self.domain.granule().bytes() }];
        match parts {
            Parts::Whole(buffer) => part(buffer, skip, 0, total),
            Parts::Split(ends) => {
                if let Some((phys, bytes)) = ends.head {
                    part(&granule(phys), skip, 0, bytes);
                }
                if let Some((phys, bytes)) = ends.tail {
                    part(&granule(phys), 0, total - bytes, total);
                }
            }
            Parts::Direct { .. } => {}
        }
    }

    /// Allocates `bytes` bytes of zeroed memory, a multiple of the granule, in pieces as large as
    /// can be had.
    #[inline(never)]
    fn alloc_pieces(&self, bytes: u64) -> Result<Vec<PhysSegment>, DmaMapError> {
        let granule = self.domain.granule().bytes();
        let mut pieces = Vec::new();
        let mut piece = self.threshold();
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
                    // SAFETY: it came from the line above.
                    unsafe { self.free(phys, len) };
                    result = Err(DmaMapError::OutOfMemory);
                }
                None if piece > granule => piece /= 2,
                None => result = Err(self.no_buffer(bytes)),
            }
        }
        if let Err(error) = result {
            // SAFETY: they came from the loop above.
            unsafe { self.free_pieces(&pieces) };
            return Err(error);
        }
        Ok(pieces)
    }

    /// # Safety
    /// The buffers of `parts` are this caller's, but for devices.
    unsafe fn wipe_parts(&self, parts: &Parts) {
        // SAFETY: the caller's promise.
        self.each_buffer(parts, |piece| unsafe { self.memory.zero(piece.phys, piece.len) });
    }

    /// # Safety
    /// As [`free`](Self::free), for each.
    unsafe fn free_pieces(&self, pieces: &[PhysSegment]) {
        for piece in pieces {
            // SAFETY: the caller's promise.
            unsafe { self.free(piece.phys, piece.len) };
        }
    }
}
