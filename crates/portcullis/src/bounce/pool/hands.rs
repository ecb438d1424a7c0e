//! Guards for slots between two owners. If a lower layer panics, the guard puts the slot into the depot or leaves it to a trim, so that none leaks.

use super::BouncePool;
use super::slot::{Magazine, NO_GROUP, Phase};
use crate::guard::Guard;
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// Free slots on their way between two lists. Dropped, they go to the depot.
pub(super) struct Held<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    pub class: usize,
    pub kind: usize,
    pub magazine: Magazine,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Held<'_, M, P, C> {
    /// Puts them into the depot. If that panics, the drop tries once more.
    pub(super) fn store(mut self) {
        self.put();
    }

    fn put(&mut self) {
        let Self { pool, class, kind, magazine } = self;
        if magazine.slots > 0 {
            pool.with_depot(*class, |depot| depot.put(&pool.slots, *kind, core::mem::take(magazine)));
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Held<'_, M, P, C> {
    #[inline]
    fn drop(&mut self) {
        self.put();
    }
}

/// A slot that gets memory. Dropped, it goes back to the slots without a buffer; or, with memory that devices may reach, to a trim.
pub(super) struct Populating<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    class: usize,
    pub index: Option<usize>,
    /// Whether the depot has counted its memory.
    pub is_counted: bool,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Populating<'_, M, P, C> {
    #[inline]
    fn drop(&mut self) {
        let Self { pool, class, index: Some(index), is_counted } = *self else { return };
        let slot = &pool.slots[index];
        pool.with_depot(class, |depot| {
            if slot.buffer().is_none() {
                depot.put_empty(&pool.slots, index);
                return;
            }
            depot.gained(u64::from(!is_counted));
            slot.set_phase(Phase::Torn);
            depot.retired.push(&pool.slots, index);
        });
    }
}

/// Evicted slots: their buffers are unmapped, but not yet confirmed to be. Dropped, they wait for a later trim.
pub(super) struct Evicted<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    pub list: Magazine,
    pub gather: Gather,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Evicted<'_, M, P, C> {
    fn drop(&mut self) {
        while let Some(index) = self.list.first() {
            let slots = &self.pool.slots;
            self.pool.with_depot(self.pool.layout.class_of_slot(index), |depot| {
                _ = self.list.pop(slots);
                depot.retired.push(slots, index);
            });
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    pub(super) fn held(&self, class: usize, kind: usize, magazine: Magazine) -> Held<'_, M, P, C> {
        Held { pool: self, class, kind, magazine }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn store(&self, class: usize, kind: usize, magazine: Magazine) {
        self.held(class, kind, magazine).store();
    }

    /// A guard for the free slot `index`, which this caller owns, until a mapping or a list has it. Dropped, the slot goes to the depot, and is
    /// zeroed before its next use.
    #[inline(always)]
    pub(super) fn in_hand(&self, class: usize, kind: usize, index: usize) -> Guard<impl FnMut()> {
        Guard::new(move || self.take_from_hand(class, kind, index))
    }

    #[cold]
    #[inline(never)]
    fn take_from_hand(&self, class: usize, kind: usize, index: usize) {
        let slot = &self.slots[index];
        slot.set_phase(Phase::Free);
        slot.group.set(NO_GROUP);
        let mut magazine = Magazine::default();
        magazine.push(&self.slots, index);
        self.store(class, kind, magazine);
    }

    pub(super) fn populating(&self, class: usize) -> Populating<'_, M, P, C> {
        Populating { pool: self, class, index: None, is_counted: false }
    }

    pub(super) fn evicted(&self) -> Evicted<'_, M, P, C> {
        Evicted { pool: self, list: Magazine::default(), gather: Gather::new() }
    }
}
