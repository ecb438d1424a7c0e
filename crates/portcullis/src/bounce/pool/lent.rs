//! Slots that the pool lends to a driver as buffers of its own. Their memory stays mapped, and the pool copies nothing: it treats a lent slot as a
//! mapping of 0 bytes. So no trim frees its memory, and its unmap copies nothing.

use super::BouncePool;
use super::client::Client;
use super::layout::Place;
use super::refill::ANY_FREE;
use super::slot::{Phase, Slot, Terms};
use crate::addr::{Direction, Iova, PhysAddr};
use crate::bounce::error::DmaMapError;
use crate::broken::broken;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Lends a slot of at least `len` bytes, mapped for `direction`, to `client`, which reaches the slots. Returns its address for the device, and
    /// where its memory begins: both at a granule.
    ///
    /// The device, and the CPU if the device writes, finds zeros in it, or bytes that devices of its group wrote or read there before; the CPU finds
    /// no bytes of a CPU. A slot for both directions, which may hold some, is zeroed.
    ///
    /// Cost and context as for [`BounceDevice::map`](super::BounceDevice::map) without a copy. After an error nothing is lent.
    #[inline]
    pub(crate) fn lend(
        &self,
        client: &Client,
        len: u64,
        direction: Direction,
    ) -> Result<(Iova, PhysAddr), DmaMapError> {
        if direction != Direction::Bidirectional {
            let whose = (direction.index(), client.group);
            if let Some((place, slot)) = self.take_fast::<false>(len, whose, |_| ()) {
                return Ok(self.lend_slot(slot, place, len, direction));
            }
        }
        self.lend_slow(client, len, direction)
    }

    #[cold]
    #[inline(never)]
    fn lend_slow(
        &self,
        client: &Client,
        len: u64,
        direction: Direction,
    ) -> Result<(Iova, PhysAddr), DmaMapError> {
        let most = self.threshold();
        let Some(class) = self.layout.class_of(len) else { return Err(DmaMapError::TooLong { len, most }) };
        let (kind, group) = (direction.index(), client.group);
        let Some(index) = self.take_or_refill(class, direction, group, ANY_FREE)? else {
            return Err(DmaMapError::AllTaken { bytes: self.layout.slot_bytes(class) });
        };
        let slot = &self.slots[index];
        let in_hand = self.in_hand(class, kind, index);
        if slot.group.get() != group || direction == Direction::Bidirectional {
            self.wipe(slot, class, kind);
            slot.group.set(group);
        }
        in_hand.done();
        Ok(self.lend_slot(slot, (class, index), len, direction))
    }

    #[inline]
    fn lend_slot(
        &self,
        slot: &Slot,
        (class, index): (usize, usize),
        len: u64,
        direction: Direction,
    ) -> (Iova, PhysAddr) {
        let Some(buffer) = slot.buffer() else { broken("a slot in a magazine has a buffer") };
        // If devices write, a wipe zeroes all of the slot anyway.
        if direction == Direction::ToDevice && slot.dirty.get() < len {
            slot.dirty.set(len);
        }
        let terms = Terms { direction, copy_in: false, wipe: self.config.wipe, listed: false, offset: 0 };
        // A mapping of 0 bytes copies nothing, so the buffer may stand for the original.
        slot.set_mapping(terms, buffer, 0);
        (Iova::new(self.layout.start_of(class, index)), buffer)
    }

    /// Takes back a slot that was lent at `iova`, and zeroes it where the pool wipes. An address without a lent slot changes nothing. O(1), as
    /// [`unmap`](Self::unmap), and O(bytes of the slot) for the wipe.
    ///
    /// # Safety
    /// 1. If a slot is lent at `iova`, [`lend`](Self::lend) gave it to the caller, which gives it back once.
    /// 2. From this call on the caller does not access the slot's memory. Devices may, and the pool does.
    #[inline]
    pub(crate) unsafe fn take_lent_back(&self, iova: Iova) {
        let Some(place) = self.layout.find(iova) else { return };
        let Some(slot) = self.slots.get(place.index) else { return };
        let Some((kind, offset)) = slot.plain_mapping::<false>() else {
            // SAFETY: clauses 1 and 2 are the caller's.
            return unsafe { self.take_wiped_back(place, iova) };
        };
        if slot.origin().len != 0 || place.start + offset != iova.get() {
            return;
        }
        // From here on the slot may be lent to another caller.
        slot.set_phase(Phase::Free);
        self.give_back(place.class, kind, place.index, |_| ());
    }

    /// As [`take_lent_back`](Self::take_lent_back), for a slot that must be zeroed.
    ///
    /// # Safety
    /// As [`take_lent_back`](Self::take_lent_back).
    #[cold]
    #[inline(never)]
    unsafe fn take_wiped_back(&self, place: Place, iova: Iova) {
        // An error says that nothing is lent there.
        // SAFETY: clause 1 makes this the only call for the slot (`unmap`, 1 and 3); a mapping of 0 bytes has no original (`unmap`, 2).
        let _ = unsafe { self.unmap_slot(place, iova, 0, false) };
    }
}
