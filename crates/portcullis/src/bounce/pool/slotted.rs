//! Mappings through slots: map and unmap. The device never reaches their original; syncs and the unmap copy the device's bytes there. The unmap of
//! all other mappings begins with the same call.

use alloc::boxed::Box;

use super::BouncePool;
use super::client::Request;
use super::layout::Place;
use super::mapping::{PoolMapping, Way};
use super::memory::copy_pieces;
use super::slot::{CPU_BYTES, Phase, Pieces, Slot, Terms, Toward};
use crate::addr::{Direction, Iova, PhysAddr, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::broken::broken;
use crate::domain::Rule;
use crate::heap::boxed;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, LocalCpu, Platform};
use crate::sync::{Ordering, fence};

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Makes a mapping through a free slot.
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map), clauses 1 to 3; 4. this caller owns the slot.
    #[inline]
    pub(super) unsafe fn map_slot<'a>(
        &self,
        request: &Request<'_, '_>,
        (class, index): (usize, usize),
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let (terms, group) = (request.terms, request.client.group);
        let (slot, kind) = (&self.slots[index], terms.direction.index());
        let in_hand = self.in_hand(class, kind, index);
        if terms.listed
            && let Err(error) = park(slot, request.list)
        {
            in_hand.done();
            self.give_back(class, kind, index, |_| ());
            return Err(error);
        }
        // A copy-in overwrites all bytes that the driver will find.
        let fits = if terms.copy_in { slot.whose() == group } else { slot.group.get() == group };
        if !fits {
            self.wipe(slot, class, kind);
            slot.group.set(group);
        }
        in_hand.done();
        let list = terms.listed.then_some(request.list);
        // SAFETY: clauses 1 and 3 are the caller's (`fill`, 1); it owns the slot (`fill`, 2), whose bytes are the group's now (`fill`, 3).
        Ok(unsafe { self.fill(slot, (class, index), request.origin, list, (terms, request.copied)) })
    }

    /// Makes a slot the mapping of `list`, or of one piece where there is no list. Fills the buffer if `copied`; else a later sync does.
    ///
    /// # Safety
    /// 1. As [`BounceDevice::map`](super::BounceDevice::map), clauses 1 and 3.
    /// 2. This caller owns the slot, which has room for the mapping.
    /// 3. Its buffer holds bytes of the mapping's group only.
    // Without the attribute, some builds keep it out of line, which costs 70 instructions.
    #[inline(always)]
    pub(super) unsafe fn fill<'a>(
        &self,
        slot: &Slot,
        (class, index): (usize, usize),
        PhysSegment { phys, len }: PhysSegment,
        list: Option<&[PhysSegment]>,
        (terms, copied): (Terms, bool),
    ) -> PoolMapping<'a> {
        let in_hand = self.in_hand(class, terms.direction.index(), index);
        if terms.copies_in() {
            if terms.direction == Direction::ToDevice && slot.dirty.get() < terms.offset + len {
                slot.dirty.set(terms.offset + len);
            }
            let Some(buffer) = slot.buffer() else { broken("a slot in a magazine has a buffer") };
            let at = PhysAddr::new(buffer.get() + terms.offset);
            // SAFETY: `copy`'s clauses: the original by clause 1; the buffer is the slot's, with room for `offset + len` bytes, by clause 2.
            unsafe {
                match list {
                    _ if !copied => {}
                    Some(list) => {
                        let buffer = [PhysSegment { phys: at, len }];
                        copy_pieces(&*self.memory, (list, 0), (&buffer, 0), len, Toward::Buffer);
                    }
                    None => self.memory.copy_in(phys, at, len),
                }
            }
            // The copy comes before the store by which the driver tells the device.
            fence(Ordering::Release);
        }
        slot.set_mapping(terms, phys, len);
        in_hand.done();
        let iova = Iova::new(self.layout.start_of(class, index) | terms.offset);
        PoolMapping { iova, len, way: Way::Slot, list: None }
    }

    /// Ends the mapping of `len` bytes at `iova`, as its [`PoolMapping`] names them, and copies the device's bytes to the original. After `Ok` the
    /// device does not reach the original, except that of a direct mapping for as long as the domain's policy allows.
    ///
    /// Through a slot: O(len) for the copy and O(1) for the rest, as [`map`](super::BounceDevice::map); the buffer stays mapped, without any link to
    /// the original.
    ///
    /// Context: allocates nothing. A single-use buffer or a split mapping waits for one invalidation; a direct one ends by the domain's policy. The
    /// caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`DmaUnmapError`]. After [`DmaUnmapError::Unconfirmed`] the data is copied and the mapping has ended, but devices may reach its directly
    /// mapped part until a later [`trim`](Self::trim) or [`Domain::flush`](crate::domain::Domain::flush) succeeds. After [`DmaUnmapError::Unmap`], of
    /// a direct mapping, see [`UnmapError`](crate::domain::UnmapError).
    ///
    /// # Safety
    /// This copies to an original that it knows by its address only. If `iova` and `len` are those of an open mapping:
    ///
    /// 1. No other unmap and no sync of the mapping runs at the same time.
    /// 2. Clauses 1 and 3 of its [map](super::BounceDevice::map) hold until this has returned: its original is memory, which only devices and atomic
    ///    accesses touch.
    /// 3. Its maker calls nothing for the mapping afterwards: the address may be another mapping's by then.
    ///
    /// An address without a mapping is an error, and nothing is copied.
    #[cfg(feature = "parts")]
    #[inline]
    pub unsafe fn unmap(&self, iova: Iova, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.unmap_by(Rule::Policy(None), iova, len) }
    }

    /// As [`unmap`](Self::unmap), but a direct mapping ends by `rule`. (One with buffers ends strictly, as these go back to an allocator.)
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[inline]
    pub(crate) unsafe fn unmap_by(&self, rule: Rule<'_>, iova: Iova, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe {
            if self.unmap_fast::<false>(iova, len, |_| ()) {
                Ok(())
            } else {
                self.unmap_slow(rule, iova, len)
            }
        }
    }

    /// The fast path: ends a mapping of one piece through a slot without a wipe or (except when `FILLED`) a copy-in, as nearly all are.
    /// Returns whether it did; if not, nothing has changed. Calls `counted` with the CPU if that keeps the slot at once.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[inline(always)]
    pub(super) unsafe fn unmap_fast<const FILLED: bool>(
        &self,
        iova: Iova,
        len: u64,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> bool {
        let Some(Place { class, index, start }) = self.layout.find(iova) else { return false };
        let Some(slot) = self.slots.get(index) else { return false };
        let Some((kind, offset)) = slot.plain_mapping::<FILLED>() else { return false };
        let origin = slot.origin();
        if origin.len != len || start + offset != iova.get() {
            return false;
        }
        // From here on a second unmap of the address finds no mapping.
        slot.set_phase(Phase::Free);
        let in_hand = self.in_hand(class, kind, index);
        if kind != Direction::ToDevice.index() {
            let Some(buffer) = slot.buffer() else { broken("a slot with a mapping has a buffer") };
            // The copy comes after the load by which the driver learnt of it from the device.
            fence(Ordering::Acquire);
            // SAFETY: `copy`'s clauses: the original by the caller's clause 2; the buffer is the slot's, and no sync uses it by clause 1.
            unsafe { self.memory.copy_out(PhysAddr::new(buffer.get() + offset), origin.phys, len) };
            if FILLED && kind == Direction::FromDevice.index() {
                // As in `unmap_slot`.
                slot.group.set(slot.group.get() | CPU_BYTES);
            }
        }
        in_hand.done();
        self.give_back(class, kind, index, counted);
        true
    }

    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[inline(never)]
    unsafe fn unmap_slow(&self, rule: Rule<'_>, iova: Iova, len: u64) -> Result<(), DmaUnmapError> {
        match self.layout.find(iova) {
            // SAFETY: clauses 1 to 3 are the caller's.
            Some(place) => unsafe { self.unmap_slot(place, iova, len, true) },
            // SAFETY: clauses 1 to 3 are the caller's.
            None => unsafe { self.unmap_own(rule, iova, len) },
        }
    }

    /// Ends a mapping through a slot. With `copied`, the original gets the device's bytes.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap).
    pub(super) unsafe fn unmap_slot(
        &self,
        place: Place,
        iova: Iova,
        len: u64,
        copied: bool,
    ) -> Result<(), DmaUnmapError> {
        let (slot, terms, at) = self.mapped_slot(place, iova)?;
        let origin = slot.origin();
        if origin.len != len {
            return Err(DmaUnmapError::OutOfRange { iova, offset: 0, len, mapped: origin.len });
        }
        let list = take_list(slot, terms, iova)?;
        slot.set_phase(Phase::Free);
        let in_hand = self.in_hand(place.class, terms.direction.index(), place.index);
        if copied && terms.copies_out() {
            fence(Ordering::Acquire);
            // SAFETY: the caller's clauses 1 and 2, as in `unmap_fast`.
            unsafe { self.copy_slot(at, origin.phys, list.as_deref(), (0, len), Toward::Original) };
        }
        if let Some(list) = list {
            slot.list.put(list);
        }
        let kind = terms.direction.index();
        if terms.wipe {
            self.wipe(slot, place.class, kind);
        } else if terms.copy_in {
            // The buffer holds a CPU's bytes, which the next driver must not find.
            slot.group.set(slot.group.get() | CPU_BYTES);
        }
        in_hand.done();
        self.give_back(place.class, kind, place.index, |_| ());
        Ok(())
    }

    pub(crate) fn slot_memory(&self, iova: Iova) -> Option<PhysSegment> {
        let place = self.layout.find(iova)?;
        let (_, terms, at) = self.mapped_slot(place, iova).ok()?;
        let phys = PhysAddr::new(at.get() - terms.offset);
        Some(PhysSegment { phys, len: self.layout.slot_bytes(place.class) })
    }

    /// Detaches the mapping at `iova`, of one piece through a slot, from its original: the slot stays in use, by a mapping of 0 bytes. With `copied`,
    /// the original first gets the device's bytes. The error is [`DmaUnmapError::NotMapped`].
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap), clauses 1 and 2.
    pub(crate) unsafe fn part(&self, iova: Iova, copied: bool) -> Result<(), DmaUnmapError> {
        let place = self.layout.find(iova).ok_or(DmaUnmapError::NotMapped { iova })?;
        let (slot, terms, at) = self.mapped_slot(place, iova)?;
        let PhysSegment { phys, len } = slot.origin();
        if copied && terms.copies_out() {
            fence(Ordering::Acquire);
            // SAFETY: the caller's clauses 1 and 2, as in `unmap_fast`.
            unsafe { self.copy_slot(at, phys, None, (0, len), Toward::Original) };
        }
        slot.set_mapping(terms, phys, 0);
        Ok(())
    }

    /// Ends the mapping at `iova`, of one piece through a slot, without a copy. The error is [`DmaUnmapError::NotMapped`].
    ///
    /// # Safety
    /// 1. No other unmap and no sync of the mapping runs now or later.
    pub(crate) unsafe fn give_slot_back(&self, iova: Iova) -> Result<(), DmaUnmapError> {
        // SAFETY: clause 1 is `unmap`'s clauses 1 and 3; nothing is copied (2).
        unsafe { self.part(iova, false).and_then(|()| self.unmap_slow(Rule::Strictly, iova, 0)) }
    }

    /// The slot whose mapping begins at `iova`, its terms, and the address of its data in the buffer.
    #[inline]
    pub(super) fn mapped_slot(
        &self,
        place: Place,
        iova: Iova,
    ) -> Result<(&Slot, Terms, PhysAddr), DmaUnmapError> {
        let slot = &self.slots[place.index];
        let offset = iova.get() - place.start;
        match (slot.terms(), slot.buffer()) {
            (Some(terms), Some(buffer)) if terms.offset == offset => {
                Ok((slot, terms, PhysAddr::new(buffer.get() + offset)))
            }
            _ => Err(DmaUnmapError::NotMapped { iova }),
        }
    }

    /// Copies `len` bytes from `offset` on between the data at `at` in a buffer and an original, in one piece or a list.
    ///
    /// # Safety
    /// As [`copy_pieces`].
    #[inline]
    pub(super) unsafe fn copy_slot(
        &self,
        at: PhysAddr,
        origin: PhysAddr,
        list: Option<&Pieces>,
        (offset, len): (u64, u64),
        into: Toward,
    ) {
        // The address after the last byte may wrap.
        if len == 0 {
            return;
        }
        let Some(list) = list else {
            let (buffer, origin) = (PhysAddr::new(at.get() + offset), PhysAddr::new(origin.get() + offset));
            // SAFETY: `copy`'s clauses are the caller's.
            return unsafe {
                match into {
                    Toward::Buffer => self.memory.copy_in(origin, buffer, len),
                    Toward::Original => self.memory.copy_out(buffer, origin, len),
                }
            };
        };
        let buffer = [PhysSegment { phys: at, len: offset + len }];
        let (buffer, list) = ((&buffer[..], offset), (&list.0[..], offset));
        let (from, to) = if into == Toward::Buffer { (list, buffer) } else { (buffer, list) };
        // SAFETY: `copy`'s clauses are the caller's.
        unsafe { copy_pieces(&*self.memory, from, to, len, into) };
    }
}

fn park(slot: &Slot, list: &[PhysSegment]) -> Result<(), DmaMapError> {
    let no_memory = |_| DmaMapError::OutOfMemory;
    let mut kept = slot.list.take().map_or_else(|| boxed(Pieces::default()), Ok).map_err(no_memory)?;
    kept.0.clear();
    let room = kept.0.try_reserve(list.len()).map_err(|_| DmaMapError::OutOfMemory);
    if room.is_ok() {
        kept.0.extend_from_slice(list);
    }
    // Even after a failure: the memory serves the next list.
    slot.list.put(kept);
    room
}

/// Takes the list of a mapping that has one; the caller puts it back.
#[inline]
pub(super) fn take_list(slot: &Slot, terms: Terms, iova: Iova) -> Result<Option<Box<Pieces>>, DmaUnmapError> {
    if terms.listed { slot.list.take().map(Some).ok_or(DmaUnmapError::Busy { iova }) } else { Ok(None) }
}

/// The list of a mapping; dropping it puts the list back.
pub(super) struct Borrowed<'a> {
    pub slot: &'a Slot,
    pub list: Option<Box<Pieces>>,
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.list.take().into_iter().for_each(|list| self.slot.list.put(list));
    }
}
