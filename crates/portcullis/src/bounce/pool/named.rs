//! Mappings through buffers for callers that have nothing but an address, anywhere in a mapping, and do not know which way the
//! mapping went: its end, and syncs of any part. An address that is in no mapping of the caller's group through a buffer is
//! the answer `None`, or an error, and changes nothing.

use core::ops::Bound;

use super::BouncePool;
use super::client::Client;
use super::layout::Place;
use super::single::{Look, Map, Phase, Single};
use super::slot::Toward;
use crate::addr::{Iova, IovaRange};
use crate::bounce::error::{DmaUnmapError, inside};
use crate::heap::Shared;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, LocalCpu, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Whether the address is one of a slot.
    #[inline]
    pub(crate) fn has_slot_at(&self, iova: Iova) -> bool {
        self.layout.find(iova).is_some()
    }

    /// Ends a mapping of `client`'s group through a slot, as [`unmap`](Self::unmap) does. `copied` says whether the original
    /// gets what the device wrote. Calls `counted` with the CPU that keeps the slot, if one does at once, as nearly always. Returns
    /// `None` where the address is none of a slot.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[inline]
    pub(crate) unsafe fn end_in_slot(
        &self,
        client: &Client,
        (iova, len): (Iova, u64),
        copied: bool,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Option<Result<(), DmaUnmapError>> {
        let place = self.layout.find(iova)?;
        if self.slots[place.index].whose() != client.group() {
            return Some(Err(DmaUnmapError::NotMapped { iova }));
        }
        // SAFETY: the caller's promise.
        if copied && unsafe { self.unmap_fast::<true>(iova, len, counted) } {
            return Some(Ok(()));
        }
        // SAFETY: the caller's promise.
        Some(unsafe { self.unmap_slot(place, iova, len, copied) })
    }

    /// Ends a mapping of `client`'s group that has buffers and addresses of its own, as [`end_in_slot`](Self::end_in_slot).
    /// Returns `None` where the pool has none at the address.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[cold]
    pub(crate) unsafe fn end_single_use(
        &self,
        client: &Client,
        iova: Iova,
        len: u64,
        copied: bool,
    ) -> Option<Result<(), DmaUnmapError>> {
        let range = IovaRange::of_pages(iova, len, self.domain.granule())?;
        match self.take_single((range, iova, len), Some(client.group())) {
            Ok(None) => None,
            // SAFETY: the caller's promise.
            Ok(Some((claim, single))) => Some(unsafe { self.end_parts(claim, &single, copied) }),
            Err(error) => Some(Err(error)),
        }
    }

    /// Copies `len` bytes from the address `at` on, which may lie anywhere in a mapping of `client`'s group, as
    /// [`sync_for_cpu`](Self::sync_for_cpu) and [`sync_for_device`](Self::sync_for_device) do. Returns `None` where the
    /// pool has nothing at the address: the domain may.
    ///
    /// # Errors
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    ///
    /// # Safety
    /// As [`sync_for_cpu`](Self::sync_for_cpu), for the mapping that has the address.
    pub(crate) unsafe fn sync_named(
        &self,
        client: &Client,
        at: Iova,
        len: u64,
        into: Toward,
    ) -> Option<Result<(), DmaUnmapError>> {
        let nothing = DmaUnmapError::NotMapped { iova: at };
        if let Some(place) = self.layout.find(at) {
            let slot = &self.slots[place.index];
            let Some(terms) = slot.lent().filter(|_| slot.whose() == client.group()) else {
                return Some(Err(nothing));
            };
            let begin = Iova::new(place.start + terms.offset);
            // Before the mapping, this is more than any mapping has.
            let offset = at.get().wrapping_sub(begin.get());
            // SAFETY: the caller's promise.
            return Some(unsafe { self.sync(begin, offset, len, into) });
        }
        let single = self.single_around(at)?;
        if single.group != client.group() {
            return Some(Err(nothing));
        }
        let offset = at.get().wrapping_sub(single.iova().get());
        if let Err(error) = inside(single.iova(), single.len, (offset, len)) {
            return Some(Err(error));
        }
        if single.terms.copies(into) {
            // SAFETY: the caller's promise.
            unsafe { self.copy_single(&single, offset, len, into) };
        }
        Some(Ok(()))
    }

    /// Ends every mapping of `client`'s group that has buffers, without a copy, and calls `ended` with the bytes of each. O(slots).
    ///
    /// # Errors
    /// [`DmaUnmapError`]: all are over, but of some devices may still reach what was mapped directly, until a later trim succeeds.
    ///
    /// # Safety
    /// No map, unmap or sync for a device of the group runs at the same time.
    pub(crate) unsafe fn end_all_of(
        &self,
        client: &Client,
        mut ended: impl FnMut(u64),
    ) -> Result<(), DmaUnmapError> {
        let mut result = Ok(());
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(terms) = slot.lent().filter(|_| slot.whose() == client.group()) else { continue };
            let class = self.layout.class_of_slot(index);
            let start = self.layout.start_of(class, index);
            let (iova, len) = (Iova::new(start | terms.offset), slot.origin().len);
            // SAFETY: nothing is copied; for the rest the caller's promise.
            match unsafe { self.unmap_slot(Place { class, index, start }, iova, len, false) } {
                Ok(()) => ended(len),
                Err(error) => result = Err(error),
            }
        }
        let mut from = Bound::Unbounded;
        loop {
            let (claim, mut found) = (self.claim(), None);
            self.singles.visit(self.domain.platform(), &mut from, |entry| {
                if !matches!(entry.phase.get(), Phase::Live(_)) || entry.single.group != client.group() {
                    return Look::On;
                }
                entry.phase.set(Phase::Taken(claim.number()));
                found = Some(entry.single.clone());
                Look::Enough
            });
            let Some(single) = found else {
                claim.done();
                return result;
            };
            ended(single.len);
            // SAFETY: nothing is copied; for the rest the caller's promise.
            result = result.and(unsafe { self.end_parts(claim, &single, false) });
        }
    }

    /// The mapping of the map that has the granule of `at`, if it has not ended.
    fn single_around(&self, at: Iova) -> Option<Shared<Single>> {
        if self.singles.count() == 0 {
            return None;
        }
        let range = IovaRange::of_pages(at, 1, self.domain.granule())?;
        let around = |map: &mut Map| {
            let entry = map.noted(range).filter(|entry| matches!(entry.phase.get(), Phase::Live(_)))?;
            Some(entry.single.clone())
        };
        self.domain.platform().with_cpu(|_| self.singles.with(around))
    }
}
