//! Guards for slots that a caller owns, so that none leaks: if a call below panics, they put the slot into the depot, or leave it to a trim.

use super::BouncePool;
use super::slot::{Magazine, NO_GROUP, Phase, index_of, link_to};
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
    pub(super) fn pop(&mut self) -> Option<usize> {
        self.magazine.slots = self.magazine.slots.checked_sub(1)?;
        let index = index_of(self.magazine.first)?;
        self.magazine.first = self.pool.slots[index].next();
        Some(index)
    }

    /// Puts them into the depot. If that panics, the drop tries once more.
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

/// A slot that gets memory. Dropped, it goes back where it came from; or, with memory that devices may reach, to a trim.
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

/// Evicted slots: their buffers are unmapped, and not yet confirmed. They are linked to each other, and so need no memory. Dropped, they wait for
/// a later trim.
pub(super) struct Evicted<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    first: u64,
    pub gather: Gather,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Evicted<'_, M, P, C> {
    pub(super) fn is_empty(&self) -> bool {
        self.first == 0 && self.gather.is_empty()
    }

    /// The first slot, which stays until [`pass`](Self::pass).
    pub(super) fn first(&self) -> Option<usize> {
        index_of(self.first)
    }

    /// Drops the first slot; `next` was behind it.
    pub(super) fn pass(&mut self, next: u64) {
        self.first = next;
    }

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
    pub(super) fn held(&self, class: usize, kind: usize) -> Held<'_, M, P, C> {
        Held { pool: self, class, kind, magazine: Magazine::default() }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn store(&self, class: usize, kind: usize, magazine: Magazine) {
        let mut held = self.held(class, kind);
        held.magazine = magazine;
        held.store();
    }

    /// A guard for the free slot `index`, which this caller owns, between a list and a mapping, until it is lent or listed. Dropped, the slot goes to
    /// the depot, and no device may find the bytes of its buffer.
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

    pub(super) fn populating(&self, class: usize) -> Populating<'_, M, P, C> {
        Populating { pool: self, class, index: None, is_counted: false }
    }

    pub(super) fn evicted(&self) -> Evicted<'_, M, P, C> {
        Evicted { pool: self, first: 0, gather: Gather::new() }
    }
}
