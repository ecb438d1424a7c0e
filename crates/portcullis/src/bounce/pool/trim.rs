//! Eviction: frees the memory of buffers, only after the hardware has confirmed that no device reaches it, with one invalidation for all.

use core::mem::ManuallyDrop;

use super::BouncePool;
use super::depot::Depot;
use super::hands::Evicted;
use super::slot::{Magazine, Phase};
use crate::addr::Direction;
use crate::domain::Reserved;
use crate::guard::Guard;
use crate::invalidation::{Gather, InvalidationError};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Evicts idle buffers until at most `keep` bytes of them are left, and frees what earlier calls could not. Buffers in depots go first,
    /// the largest first, and then those in per-CPU magazines. Returns the bytes that were freed. O(slots evicted + mappings with addresses
    /// of their own + CPUs x classes).
    ///
    /// Context: waits for one invalidation, and, if CPUs' magazines hold more than `keep` bytes, for their exclusive sections: not for interrupt
    /// handlers. The caller holds no lock and no CPU. Allocates nothing.
    ///
    /// # Errors
    /// [`InvalidationError`]: the buffers are unmapped, but devices may still reach them. They are neither used again nor freed until a later call
    /// succeeds.
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

    /// As [`trim`](Self::trim), but only for buffers in depots that no map has needed since the last call.
    pub(super) fn trim_unwanted(&self, keep: u64) -> Result<u64, InvalidationError> {
        let mut evicted = self.evicted();
        self.evict_retired(&mut evicted);
        self.evict_stored(&mut evicted, self.excess(keep), |(class, kind)| {
            self.with_depot(class, |depot| depot.unwanted(kind))
        });
        self.free_evicted(&mut evicted)
    }

    /// Moves the magazines of all CPUs (or of `only` one) to the depots. Waits for exclusive sections; not with a CPU lent.
    pub(super) fn collect(&self, only: Option<usize>) {
        self.cpus.with_others(self.domain.platform(), only, |_, cpu| {
            cpu.drain(|class, kind, magazine| self.store(class, kind, magazine));
        });
    }

    fn excess(&self, keep: u64) -> u64 {
        self.usage().cached_bytes.saturating_sub(keep)
    }

    /// Takes the slots that an earlier trim could not free.
    fn evict_retired(&self, evicted: &mut Evicted<'_, M, P, C>) {
        for class in 0..self.layout.classes() {
            loop {
                let take = |depot: &mut Depot| {
                    let (index, slot) = depot.retired.pop(&self.slots)?;
                    evicted.list.push(&self.slots, index);
                    Some((index, slot))
                };
                let Some((index, slot)) = self.with_depot(class, take) else { break };
                let range = self.layout.range_of(class, index);
                if slot.phase() == Phase::Torn {
                    // Missing translations were removed before the panic.
                    let _ = self.unlink(range, &mut evicted.gather);
                    slot.set_phase(Phase::Retired);
                }
                evicted.gather.add(range);
            }
        }
    }

    /// Unmaps buffers of slots in the depots, the largest first, until they have `bytes` bytes; of each class and kind at most as many slots as
    /// `limit` returns, which is called once for each.
    fn evict_stored(
        &self,
        evicted: &mut Evicted<'_, M, P, C>,
        bytes: u64,
        limit: impl Fn((usize, usize)) -> u64,
    ) {
        let mut left = bytes;
        for class in (0..self.layout.classes()).rev() {
            for kind in 0..Direction::ALL.len() {
                let limit = limit((class, kind));
                left = left.saturating_sub(self.evict_kind(evicted, (class, kind), left, limit));
            }
        }
    }

    /// Unmaps buffers of slots of one class and kind in its depot, until they have `bytes` bytes; at most `limit` slots. Returns their bytes.
    pub(super) fn evict_kind(
        &self,
        evicted: &mut Evicted<'_, M, P, C>,
        (class, kind): (usize, usize),
        bytes: u64,
        limit: u64,
    ) -> u64 {
        let slot_bytes = self.layout.slot_bytes(class);
        let most = bytes.div_ceil(slot_bytes).min(limit);
        let mut slots = 0;
        while slots < most {
            let mut held = self.held(class, kind, Magazine::default());
            self.with_depot(class, |depot| {
                held.magazine = depot.take_uncounted(&self.slots, kind).unwrap_or_default();
            });
            if held.magazine.slots == 0 {
                break;
            }
            while slots < most
                && let Some((index, slot)) = held.magazine.pop(&self.slots)
            {
                // Torn until it is unmapped: the mapper may panic.
                slot.set_phase(Phase::Torn);
                evicted.list.push(&self.slots, index);
                let whole = self.unlink(self.layout.range_of(class, index), &mut evicted.gather);
                slot.set_phase(if whole { Phase::Retired } else { Phase::Lost });
                if !whole {
                    self.with_depot(class, |depot| depot.lost += 1);
                }
                slots += 1;
            }
            held.store();
        }
        self.with_depot(class, |depot| depot.count_demand(kind));
        slots * slot_bytes
    }

    /// Waits until no device reaches the evicted buffers, and frees them, together with single-use buffers that wait for the same. Returns
    /// their bytes. Unconfirmed buffers, and what a panic leaves undone, wait for a later trim.
    pub(super) fn free_evicted(&self, evicted: &mut Evicted<'_, M, P, C>) -> Result<u64, InvalidationError> {
        let claim = self.try_again(&mut evicted.gather);
        if let Err(error) = self.confirm(&evicted.gather) {
            claim.failed();
            return Err(error);
        }
        let mut bytes = claim.confirmed();
        while let Some(index) = evicted.list.first() {
            let slot = &self.slots[index];
            let class = self.layout.class_of_slot(index);
            bytes += self.free_buffer(class, index);
            self.with_depot(class, |depot| {
                _ = evicted.list.pop(&self.slots);
                depot.buffers = depot.buffers.saturating_sub(1);
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
        // SAFETY: the buffer came from `alloc` (1), its unmap is confirmed, and this caller owns the slot (2).
        unsafe { self.free(buffer, bytes) };
        bytes
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Unmaps everything, and frees it when that is confirmed, except the addresses of slots. Returns the number of slots at whose addresses another
    /// caller has changed translations.
    fn leave(&self) -> Result<u64, InvalidationError> {
        // Leaks the addresses of the mappings that a panic or an error below leaves in the map.
        let _leaving = Guard::new(|| self.lose_singles());
        // Slots that are unmapped already are only gathered: another caller may have a translation there.
        let mut gather = Gather::new();
        let mut lost = self.usage().lost_slots;
        for (index, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.buffer().is_some()) {
            let range = self.layout.range_of(self.layout.class_of_slot(index), index);
            match slot.phase() {
                Phase::Retired | Phase::Lost => gather.add(range),
                // Missing translations were removed before a panic.
                Phase::Torn => _ = self.unlink(range, &mut gather),
                _ => lost += u64::from(!self.unlink(range, &mut gather)),
            }
        }
        self.unlink_singles(&mut gather);
        self.confirm(&gather)?;
        for index in 0..self.slots.len() {
            self.free_buffer(self.layout.class_of_slot(index), index);
        }
        self.free_singles();
        Ok(lost)
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for BouncePool<M, P, C> {
    fn drop(&mut self) {
        let domain = self.domain.clone();
        let region = Reserved::from_range(&domain, self.region);
        // A drop can report no failure: memory that devices may still reach leaks. `memory` is not dropped then, so it stays.
        let Ok(lost) = self.leave() else { return };
        if lost == 0 {
            region.free();
        }
        // SAFETY: `self` is being dropped, and only this drops `memory`.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}
