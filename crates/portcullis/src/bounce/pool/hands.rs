//! Guards for the slots that a caller has in its hands, so that no slot is lost: where a call below
//! does not return, they bring the slot back to the depot, or leave it to a trim.

use super::BouncePool;
use super::slot::{Magazine, NO_GROUP, Phase, index_of, link_to};
use crate::guard::Guard;
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// Free slots on their way from one list to another. Dropped, they go to the depot.
pub(super) struct Held<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    pub class: usize,
    pub kind: usize,
    pub magazine: Magazine,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Held<'_, M, P, C> {
    /// Hands out the first.
    pub(super) fn pop(&mut self) -> Option<usize> {
        self.magazine.slots = self.magazine.slots.checked_sub(1)?;
        let index = index_of(self.magazine.first)?;
        self.magazine.first = self.pool.slots[index].next();
        Some(index)
    }

    /// Brings them to the depot. Where that panics, it is tried once more.
    pub(super) fn store(mut self) {
        let (pool, class, kind) = (self.pool, self.class, self.kind);
        if self.magazine.slots > 0 {
            pool.with_depot(class, |depot| depot.put(&pool.slots, kind, core::mem::take(&mut self.magazine)));
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Held<'_, M, P, C> {
    #[inline]
    fn drop(&mut self) {
        let Self { pool, class, kind, magazine } = *self;
        if magazine.slots > 0 {
            pool.with_depot(class, |depot| depot.put(&pool.slots, kind, magazine));
        }
    }
}

/// A slot that is given memory. Dropped, it is back where it came from, or, with memory that devices may reach, waits for
/// a trim.
pub(super) struct Populating<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    class: usize,
    pub index: Option<usize>,
    /// The depot knows of its memory.
    pub is_counted: bool,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Populating<'_, M, P, C> {
    #[inline]
    fn drop(&mut self) {
        if self.index.is_some() {
            self.give_up();
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> Populating<'_, M, P, C> {
    #[cold]
    fn give_up(&mut self) {
        let Self { pool, class, index: Some(index), is_counted } = *self else { return };
        let slot = &pool.slots[index];
        pool.with_depot(class, |depot| {
            if slot.buffer().is_none() {
                depot.put_empty(&pool.slots, index);
                return;
            }
            depot.gained(u64::from(!is_counted));
            slot.set_phase(Phase::Torn);
            depot.put_retired(&pool.slots, index);
        });
    }
}

/// Evicted slots: their buffers are unmapped, and await the confirmation. They are linked to each
/// other, so that they need no memory. Dropped, they wait for a later trim.
pub(super) struct Evicted<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    first: u64,
    pub gather: Gather,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Evicted<'_, M, P, C> {
    pub(super) fn is_empty(&self) -> bool {
        self.first == 0 && self.gather.is_empty()
    }

    /// Returns the first slot, which stays until it is [passed](Self::pass).
    pub(super) fn first(&self) -> Option<usize> {
        index_of(self.first)
    }

    /// Goes on to the one that was behind the first.
    pub(super) fn pass(&mut self, next: u64) {
        self.first = next;
    }

    /// Takes in a slot.
    pub(super) fn push(&mut self, index: usize) {
        self.pool.slots[index].set_next(self.first);
        self.first = link_to(index);
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Evicted<'_, M, P, C> {
    fn drop(&mut self) {
        while let Some(index) = index_of(self.first) {
            let pool = self.pool;
            let next = pool.slots[index].next();
            pool.with_depot(pool.layout.class_of_slot(index), |depot| {
                self.first = next;
                depot.put_retired(&pool.slots, index);
            });
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Makes a guard for slots of one class and kind; it has none yet.
    pub(super) fn held(&self, class: usize, kind: usize) -> Held<'_, M, P, C> {
        Held { pool: self, class, kind, magazine: Magazine::default() }
    }

    /// Brings a magazine to its depot.
    #[cold]
    #[inline(never)]
    pub(super) fn store(&self, class: usize, kind: usize, magazine: Magazine) {
        let mut held = self.held(class, kind);
        held.magazine = magazine;
        held.store();
    }

    /// The free slot `index`, which the caller has taken, and which is about to be lent, or has just come back: until it is done,
    /// as it is lent, or in a list. Dropped, it goes to the depot, and what is in its buffer may be handed to no device.
    #[inline(always)]
    pub(super) fn in_hand(&self, class: usize, kind: usize, index: usize) -> Guard<impl FnMut()> {
        Guard::new(move || self.take_from_hand(class, kind, index))
    }

    #[cold]
    #[inline(never)]
    fn take_from_hand(&self, class: usize, kind: usize, index: usize) {
        let slot = &self.slots[index];
        slot.set_phase(Phase::Free);
        slot.set_group(NO_GROUP);
        self.store(class, kind, Magazine { first: link_to(index), slots: 1 });
    }

    /// Makes a guard for a slot of `class` that is to get memory; it has none yet.
    pub(super) fn populating(&self, class: usize) -> Populating<'_, M, P, C> {
        Populating { pool: self, class, index: None, is_counted: false }
    }

    /// Makes a guard for evicted slots; it has none yet.
    pub(super) fn evicted(&self) -> Evicted<'_, M, P, C> {
        Evicted { pool: self, first: 0, gather: Gather::new() }
    }
}
