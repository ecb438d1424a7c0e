//! Ends mappings through buffers, and syncs any part of them, for callers that know addresses but not the mapping's way. An address that is in no
//! such mapping of the caller's group gets `None` or an error, and changes nothing.

use core::ops::Bound;

use super::BouncePool;
use super::client::Client;
use super::layout::Place;
use super::single::{Look, Phase, Single};
use super::slot::Toward;
use crate::addr::{Iova, IovaRange};
use crate::bounce::error::DmaUnmapError;
use crate::heap::Shared;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, LocalCpu, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    #[inline]
    pub(crate) fn has_slot_at(&self, iova: Iova) -> bool {
        self.layout.find(iova).is_some()
    }

    /// Ends a mapping of `client`'s group through a slot, as [`unmap`](Self::unmap). With `copied`, the original gets the device's bytes. Calls
    /// `counted` with the CPU if that keeps the slot at once, as nearly always. `None` if the address lies in no slot.
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
        if self.slots[place.index].whose() != client.group {
            return Some(Err(DmaUnmapError::NotMapped { iova }));
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        if copied && unsafe { self.unmap_fast::<true>(iova, len, counted) } {
            return Some(Ok(()));
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        Some(unsafe { self.unmap_slot(place, iova, len, copied) })
    }

    /// Ends a mapping of `client`'s group with buffers and addresses of its own, as [`end_in_slot`](Self::end_in_slot). `None` if the pool
    /// has none at the address.
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
        match self.take_single((range, iova, len), Some(client.group)) {
            Ok(None) => None,
            // SAFETY: clauses 1 to 3 are the caller's.
            Ok(Some((claim, single))) => Some(unsafe { self.end_parts(claim, &single, copied) }),
            Err(error) => Some(Err(error)),
        }
    }

    /// Syncs `len` bytes from address `at` on, anywhere in a mapping of `client`'s group, as [`sync_toward`](Self::sync_toward). `None` if the pool
    /// has no mapping at the address: the domain may.
    ///
    /// # Safety
    /// As [`sync_toward`](Self::sync_toward), for the mapping that has the address.
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
            let Some(terms) = slot.terms().filter(|_| slot.whose() == client.group) else {
                return Some(Err(nothing));
            };
            let begin = Iova::new(place.start + terms.offset);
            // For an address before the mapping this wraps, and exceeds every length.
            let offset = at.get().wrapping_sub(begin.get());
            // SAFETY: clauses 1 and 2 are the caller's, for this mapping.
            return Some(unsafe { self.sync(begin, offset, len, into) });
        }
        let single = self.single_around(at)?;
        if single.group != client.group {
            return Some(Err(nothing));
        }
        let offset = at.get().wrapping_sub(single.iova().get());
        // SAFETY: clauses 1 and 2 are the caller's, for this mapping, whose entry `single` is.
        Some(unsafe { self.sync_single(&single, (offset, len), into) })
    }

    /// Ends every mapping of `client`'s group that has buffers, without a copy, and calls `ended` with the bytes of each. O(slots).
    ///
    /// # Errors
    /// [`DmaUnmapError`]: all are over, but devices may still reach directly mapped parts of some, until a later trim succeeds.
    ///
    /// # Safety
    /// 1. No map, unmap or sync for a device of the group runs at the same time.
    pub(crate) unsafe fn end_all_of(
        &self,
        client: &Client,
        mut ended: impl FnMut(u64),
    ) -> Result<(), DmaUnmapError> {
        let mut result = Ok(());
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(terms) = slot.terms().filter(|_| slot.whose() == client.group) else { continue };
            let class = self.layout.class_of_slot(index);
            let start = self.layout.start_of(class, index);
            let (iova, len) = (Iova::new(start | terms.offset), slot.origin().len);
            // SAFETY: clause 1 is `unmap`'s clause 1, and the maker's tokens fail by their group (3); nothing is copied (2).
            match unsafe { self.unmap_slot(Place { class, index, start }, iova, len, false) } {
                Ok(()) => ended(len),
                Err(error) => result = Err(error),
            }
        }
        let mut from = Bound::Unbounded;
        loop {
            let (claim, mut found) = (self.claim(), None);
            self.visit(&mut from, |entry| {
                if !matches!(entry.phase.get(), Phase::Live(_)) || entry.single.group != client.group {
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
            // SAFETY: as above.
            result = result.and(unsafe { self.end_parts(claim, &single, false) });
        }
    }

    fn single_around(&self, at: Iova) -> Option<Shared<Single>> {
        if self.singles.count() == 0 {
            return None;
        }
        let range = IovaRange::of_pages(at, 1, self.domain.granule())?;
        self.with_singles(|map| {
            let entry = map.noted(range).filter(|entry| matches!(entry.phase.get(), Phase::Live(_)))?;
            Some(entry.single.clone())
        })
    }
}
