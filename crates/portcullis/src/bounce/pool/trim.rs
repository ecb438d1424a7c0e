//! Giving buffers back: their memory is freed only after the hardware has confirmed that no device
//! reaches it, with one invalidation for all of them.

use core::mem::ManuallyDrop;

use super::BouncePool;
use super::depot::Depot;
use super::hands::Evicted;
use super::slot::Phase;
use crate::addr::Direction;
use crate::domain::Reserved;
use crate::guard::Guard;
use crate::invalidation::{Gather, InvalidationError};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Gives back the memory of buffers that wait for their next use, until they are no more than
    /// `keep` bytes, and what an earlier call could not give back. Buffers in depots go first, the
    /// largest first, and then those that CPUs keep. Returns how many bytes were given back.
    ///
    /// Waits for one invalidation, and, where CPUs keep more than `keep` bytes, for their turns to
    /// end: not for interrupt handlers. The caller holds no lock and no CPU. O(slots given back +
    /// mappings with addresses of their own + CPUs x classes). Allocates nothing.
    ///
    /// # Errors
    /// [`InvalidationError`]: the buffers are unmapped, but devices may still reach them. They are
    /// not used again, and not given back, until a later call succeeds.
    pub fn trim(&self, keep: u64) -> Result<u64, InvalidationError> {
        let mut evicted = self.evicted();
        self.evict_retired(&mut evicted);
        self.evict_stored(&mut evicted, self.excess(keep), |_| u64::MAX);
        if self.excess(keep) > 0 {
            self.collect(None);
            self.evict_stored(&mut evicted, self.excess(keep), |_| u64::MAX);
        }
        self.free_evicted(&mut evicted)
    }

    /// As [`trim`](Self::trim), but only of what depots have and no map has asked for since the
    /// last call.
    pub(super) fn trim_unwanted(&self, keep: u64) -> Result<u64, InvalidationError> {
        let mut evicted = self.evicted();
        self.evict_retired(&mut evicted);
        self.evict_stored(&mut evicted, self.excess(keep), |(class, kind)| {
            self.with_depot(class, |depot| depot.unwanted(kind))
        });
        self.free_evicted(&mut evicted)
    }

    /// Brings what the CPUs keep (or the CPU `only`) to the depots. Waits for their turns to end; not
    /// with a CPU lent.
    pub(super) fn collect(&self, only: Option<usize>) {
        self.cpus.with_others(self.domain.platform(), only, |_, cpu| {
            cpu.drain(|class, kind, magazine| self.store(class, kind, magazine));
        });
    }

    /// Returns by how many bytes the buffers that wait exceed `keep`.
    fn excess(&self, keep: u64) -> u64 {
        self.usage().cached_bytes.saturating_sub(keep)
    }

    /// Takes the slots that an earlier trim could not give back.
    fn evict_retired(&self, evicted: &mut Evicted<'_, M, P, C>) {
        for class in 0..self.layout.classes() {
            loop {
                let take = |depot: &mut Depot| {
                    let index = depot.take_retired(&self.slots)?;
                    evicted.push(index);
                    Some(index)
                };
                let Some(index) = self.with_depot(class, take) else { break };
                let (range, slot) = (self.layout.range_of(class, index), &self.slots[index]);
                if slot.phase() == Phase::Torn {
                    // What is not there was removed before the panic.
                    let _ = self.unlink(range, &mut evicted.gather);
                    slot.set_phase(Phase::Retired);
                }
                evicted.gather.add(range);
            }
        }
    }

    /// Unmaps buffers of slots in the depots, until they are `bytes` bytes or more; the largest
    /// first. Unmaps at most as many slots of each class and kind as `share` says, which is asked
    /// once for each.
    fn evict_stored(
        &self,
        evicted: &mut Evicted<'_, M, P, C>,
        bytes: u64,
        share: impl Fn((usize, usize)) -> u64,
    ) {
        let mut left = bytes;
        for class in (0..self.layout.classes()).rev() {
            for kind in 0..Direction::ALL.len() {
                let share = share((class, kind));
                left = left.saturating_sub(self.evict_kind(evicted, (class, kind), left, share));
            }
        }
    }

    /// Unmaps buffers of slots of one class and kind in its depot, until they are `bytes` bytes or
    /// more; at most `share` slots. Returns how many bytes they are.
    pub(super) fn evict_kind(
        &self,
        evicted: &mut Evicted<'_, M, P, C>,
        (class, kind): (usize, usize),
        bytes: u64,
        share: u64,
    ) -> u64 {
        let slot_bytes = self.layout.slot_bytes(class);
        let most = bytes.div_ceil(slot_bytes).min(share);
        let mut slots = 0;
        while slots < most {
            let mut held = self.held(class, kind);
            self.with_depot(class, |depot| {
                held.magazine = depot.take_unnoticed(&self.slots, kind).unwrap_or_default();
            });
            if held.magazine.slots == 0 {
                break;
            }
            while slots < most
                && let Some(index) = held.pop()
            {
                // Before a call below can panic.
                self.slots[index].set_phase(Phase::Torn);
                evicted.push(index);
                let whole = self.unlink(self.layout.range_of(class, index), &mut evicted.gather);
                self.retire(class, index, whole);
                slots += 1;
            }
            held.store();
        }
        self.with_depot(class, |depot| depot.notice(kind));
        slots * slot_bytes
    }

    /// Notes that the buffer of a slot is unmapped. `whole` says whether all of its translations
    /// were there.
    fn retire(&self, class: usize, index: usize, whole: bool) {
        self.slots[index].set_phase(if whole { Phase::Retired } else { Phase::Lost });
        if !whole {
            self.with_depot(class, |depot| depot.lost += 1);
        }
    }

    /// Waits until no device reaches what is unmapped, and gives its memory back; also that of
    /// single-use buffers which wait for the same. Returns how many bytes. What is not confirmed,
    /// and what a panic leaves undone, waits for a later trim.
    pub(super) fn free_evicted(&self, evicted: &mut Evicted<'_, M, P, C>) -> Result<u64, InvalidationError> {
        let claim = self.try_again(&mut evicted.gather);
        if let Err(error) = self.confirm(&evicted.gather) {
            claim.failed();
            return Err(error);
        }
        let mut bytes = claim.confirmed();
        while let Some(index) = evicted.first() {
            let slot = &self.slots[index];
            let class = self.layout.class_of_slot(index);
            let next = slot.next();
            bytes += self.free_buffer(class, index);
            self.with_depot(class, |depot| {
                evicted.pass(next);
                depot.gave_up();
                if slot.phase() != Phase::Lost {
                    depot.put_empty(&self.slots, index);
                }
            });
        }
        Ok(bytes)
    }

    /// Frees the buffer of a slot, which no device reaches. Returns its bytes.
    fn free_buffer(&self, class: usize, index: usize) -> u64 {
        let slot = &self.slots[index];
        drop(slot.list.take());
        let Some(buffer) = slot.buffer() else { return 0 };
        slot.set_buffer(None);
        let bytes = self.layout.slot_bytes(class);
        // SAFETY: the buffer came from `alloc`, its unmapping is confirmed, and the slot is in this caller's hands.
        unsafe { self.free(buffer, bytes) };
        bytes
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Unmaps everything, and gives it back when that is confirmed, but for the addresses of slots.
    /// Returns in how many slots another caller's translations were met, now or before.
    fn leave(&self) -> Result<u64, InvalidationError> {
        // Gives up the addresses of what is in the map then: all of them where something below panics or fails.
        let _leaving = Guard::new(|| self.lose_singles());
        // What was unlinked before is not looked for again: another's translation may have been met there.
        let mut gather = Gather::new();
        let mut lost = 0;
        for class in 0..self.layout.classes() {
            for index in self.layout.first(class)..self.layout.first(class + 1) {
                let range = self.layout.range_of(class, index);
                match (self.slots[index].buffer(), self.slots[index].phase()) {
                    (None, _) => continue,
                    (Some(_), Phase::Retired | Phase::Lost) => gather.add(range),
                    // What is not there was removed before a panic.
                    (Some(_), Phase::Torn) => _ = self.unlink(range, &mut gather),
                    (Some(_), _) => lost += u64::from(!self.unlink(range, &mut gather)),
                }
            }
            lost += self.with_depot(class, |depot| depot.lost);
        }
        self.unlink_singles(&mut gather);
        self.confirm(&gather)?;
        for class in 0..self.layout.classes() {
            for index in self.layout.first(class)..self.layout.first(class + 1) {
                self.free_buffer(class, index);
            }
        }
        self.free_singles();
        Ok(lost)
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for BouncePool<M, P, C> {
    fn drop(&mut self) {
        let domain = self.domain.clone();
        let region = Reserved::from_range(&domain, self.region);
        // A drop has no one to tell of a failure: what devices may still reach is leaked. `memory` is not dropped then, so that
        // it stays there.
        let Ok(lost) = self.leave() else { return };
        if lost == 0 {
            region.free();
        }
        // SAFETY: `self` is being dropped, and this is the only place that does it.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}
