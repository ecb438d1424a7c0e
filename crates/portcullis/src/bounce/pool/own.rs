//! Mappings with addresses of their own: map, sync and unmap. A mapping with buffers is in the pool's map from before it is mapped until no device
//! reaches it, so its buffers are not freed earlier.

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

pub(super) type Taken<'a, M, P, C> = (Claim<'a, M, P, C>, Shared<Single>);

/// The end of direct mappings. (Mappings with buffers end strictly, as the buffers go back to an allocator.)
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule<'a> {
    /// By the policy of its device, which is read when it ends; by the domain's, if the device has none.
    Policy(Option<&'a AtomicPolicy>),
    Strictly,
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Maps the `len` bytes of `list` through a single-use buffer.
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
            // SAFETY: they came from the line above, and nobody else has them.
            unsafe { self.free_pieces(&buffer) };
        })?;
        let parts = Parts::Whole(buffer);
        if copied && terms.copies_in() {
            // SAFETY: the original by the caller's clauses 1 and 3; nobody else has the buffer yet.
            unsafe { self.copy_parts(&parts, &original, (terms.offset, len), (0, len), Toward::Buffer) };
        }
        // SAFETY: all of `linked` is the buffer, which came from `alloc` just now (clause 1); nothing else is in it (clause 2).
        let single = unsafe { self.enter_single(client, (&linked, bytes), original, (len, terms), parts) }?;
        Ok(PoolMapping { iova: single.iova(), len, way: Way::SingleUse, list: None })
    }

    /// Enters the granules of `linked`, `bytes` bytes in all, and adds the mapping to the map. After an error the buffers of `parts` are
    /// free again, or wait for a later trim.
    ///
    /// # Safety
    /// 1. The buffers of `parts` came from `alloc`, and nothing but the pool's copies uses them.
    /// 2. All else in `linked` is the caller's to open, by [`BounceDevice::map`](super::BounceDevice::map)'s clauses 1 to 3.
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
        // Each round but the last leaks addresses of another mapping, which a caller has ended by number before its owner did.
        let single = loop {
            let memory = || Place::new().map_err(|OutOfMemory| DmaMapError::OutOfMemory);
            let reserve = |place| match self.domain.reserve(bytes, client.limit()) {
                Ok(reserved) => Ok((place, reserved.into_range())),
                Err(error) => Err(DmaMapError::List(error.into())),
            };
            let (place, range) = match memory().and_then(reserve) {
                Ok(both) => both,
                Err(error) => {
                    // SAFETY: the buffers came from `alloc` by clause 1, and no device has them yet.
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
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.link_single(claim, single, linked) }
    }

    /// Enters the granules of `linked` at the addresses of `single`, which `claim` has entered. Out of line, as the caller needs much of the stack
    /// before this, for addresses.
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
        let is_lost = failed.remains.addresses() == Fate::Lost;
        if failed.remains.reachable {
            // A device may have cached entries for the buffers: a later trim frees them.
            claim.set(start, Phase::Unconfirmed, is_lost);
            claim.done();
            self.wait_for_trim(&single);
        } else {
            claim.end(start, is_lost);
        }
        Err(failed.error.into())
    }

    /// Leaves a mapping whose unmap is not confirmed, with its buffers and addresses, to a later trim. Its bytes of the original count as
    /// open until a flush is confirmed, which the domain retries.
    fn wait_for_trim(&self, single: &Single) {
        let open = single.range.len().saturating_sub(self.bytes_of(&single.parts));
        if open > 0 {
            self.domain.leave_open(open);
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
        Ok(self.end_direct(rule, range, range.len().saturating_sub(len))?)
    }

    /// Claims the mapping of `len` bytes at `iova`, in the granules `range`; of `group`, if one is given. `None` if the map knows nothing of these
    /// addresses.
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
        // The caller may have given up its only token for this call: if the search panics, the addresses leak.
        let changing = self.domain.changing(range);
        let found = self.find_single(range, iova, Some(len), (Some(claim.number()), group));
        changing.done();
        if let Ok(Some(single)) = found {
            return Ok(Some((claim, single)));
        }
        claim.done();
        found.map(|_| None)
    }

    fn end_direct(&self, rule: Rule<'_>, range: IovaRange, neighbours: u64) -> Result<(), UnmapError> {
        match rule {
            Rule::Policy(exception) => self.domain.end(range, HowItEnds { neighbours, exception }, |_| ()),
            Rule::Strictly => self.domain.end_now(range, neighbours, |_| ()),
        }
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
        if let Parts::Direct { neighbours } = single.parts {
            // First out of the map: once the domain has the addresses, anybody may own them.
            let changing = claim.forget(start);
            changing.done();
            claim.done();
            return Ok(self.end_direct(rule, single.range, neighbours)?);
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
            unsafe { self.copy_single(single, 0, single.len, Toward::Original) };
        }
        if single.terms.wipe {
            // SAFETY: the claim owns the mapping's buffers until they are released.
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

    /// Syncs `len` bytes from `offset` on of a mapping with addresses outside of the slots. A direct mapping needs no copy, and except for lists with
    /// gaps the map does not know it: then this does nothing.
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
            // SAFETY: clauses 1 and 2 are the caller's, for this mapping.
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

    /// Copies `len` bytes from `offset` on between a mapping's buffers and its original.
    ///
    /// # Safety
    /// As [`copy_parts`](Self::copy_parts), for this mapping.
    pub(super) unsafe fn copy_single(&self, single: &Single, offset: u64, len: u64, into: Toward) {
        let whole = (single.terms.offset, single.len);
        // SAFETY: clause 1 is the caller's.
        unsafe { self.copy_parts(&single.parts, &single.list, whole, (offset, len), into) };
    }

    /// Copies `len` bytes from `offset` on between `parts` and the `total` bytes of `list`, whose first is `skip` bytes into its granule.
    ///
    /// # Safety
    /// 1. Only devices and atomic accesses touch these bytes of the original and of the buffers of `parts` meanwhile, and all are memory.
    #[inline(never)]
    pub(super) unsafe fn copy_parts(
        &self,
        parts: &Parts,
        list: &[PhysSegment],
        (skip, total): (u64, u64),
        (offset, len): (u64, u64),
        into: Toward,
    ) {
        // Copies these bytes, as far as they lie between `first` and `end` of the mapping, whose part is in `buffer`.
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
            // SAFETY: `copy`'s clauses: the bytes are memory, and nobody else's meanwhile, by clause 1; a buffer overlaps no original.
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

    /// Allocates `bytes` bytes of zeroed memory, a multiple of the granule, in the largest pieces available.
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
                    // SAFETY: it came from the line above, and nobody else has it.
                    unsafe { self.free(phys, len) };
                    result = Err(DmaMapError::OutOfMemory);
                }
                None if piece > granule => piece /= 2,
                None => result = Err(self.no_buffer(bytes)),
            }
        }
        if let Err(error) = result {
            // SAFETY: they came from the loop above, and nobody else has them.
            unsafe { self.free_pieces(&pieces) };
            return Err(error);
        }
        Ok(pieces)
    }

    /// # Safety
    /// 1. This caller owns the buffers of `parts`, which only devices access meanwhile.
    unsafe fn wipe_parts(&self, parts: &Parts) {
        // SAFETY: clause 1 is the caller's; the buffers are the pool's memory.
        self.each_buffer(parts, |piece| unsafe { self.memory.zero(piece.phys, piece.len) });
    }

    /// # Safety
    /// As [`free`](Self::free), for each.
    unsafe fn free_pieces(&self, pieces: &[PhysSegment]) {
        for piece in pieces {
            // SAFETY: clauses 1 and 2 are the caller's.
            unsafe { self.free(piece.phys, piece.len) };
        }
    }
}
