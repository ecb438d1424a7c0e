//! Claims on mappings of the pool's map: one caller owns each at a time. So a caller that comes too late, or panics, changes only mappings that it
//! has claimed.
//!
//! Its maker claims a mapping, then the caller that unmaps it, and then a trim, if its end was not confirmed or a call panicked. Each does so under
//! the map's lock, by storing its own number in the mapping's phase. This module also retries confirmations, and ends all mappings with the pool.

use core::ops::Bound;

use super::BouncePool;
use super::single::{Entry, Look, Map, Phase, Place, Single};
use crate::addr::{Iova, IovaRange};
use crate::broken::broken;
use crate::domain::Changing;
use crate::heap::Shared;
use crate::invalidation::{Gather, SLICE};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// A caller that claims mappings of the map, by a number of its own. If a lower layer panics, the drop leaves them to a trim.
pub(super) struct Claim<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    number: u64,
    /// A mapping outside of the map, whose buffers are still to be freed: its unmap was confirmed, or it was never entered. And whether its addresses
    /// leak.
    freed: Option<(Shared<Single>, bool)>,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Claim<'_, M, P, C> {
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Ends the claim of a caller that owns no mapping any more.
    pub(super) fn done(mut self) {
        self.release();
        core::mem::forget(self);
    }

    /// Enters a mapping, at whose addresses nothing is mapped yet, into the map, and claims it. If the map has another mapping at any of them,
    /// returns this one and leaks its addresses: a caller has ended the other by address, and its owner may still unmap it.
    pub(super) fn enter(&mut self, place: Place, single: Single) -> Result<Shared<Single>, Single> {
        let Self { pool, number, freed } = self;
        let (single, entry) = place.fill(single, Phase::Taken(*number));
        *freed = Some((single.clone(), false));
        let is_entered = pool.with_singles(|map| {
            *freed = None;
            if map.noted(single.range).is_some() {
                pool.domain.lose(single.range.len());
                return false;
            }
            map.insert(entry);
            true
        });
        if is_entered {
            return Ok(single);
        }
        Err(Shared::try_unwrap(single)
            .unwrap_or_else(|_| broken("a mapping that was not entered is its maker's")))
    }

    /// Puts the claimed mapping at `start` into `phase`. With `lost`, its addresses leak later.
    pub(super) fn set(&self, start: Iova, phase: Phase, lost: bool) {
        self.pool.with_singles(|map| {
            let entry = in_hand(map, start, self.number);
            entry.phase.set(phase);
            entry.lost.set(entry.lost.get() | lost);
        });
    }

    /// Takes the claimed mapping at `start` out of the map, and frees its buffers; its addresses leak if they are `lost`. The caller owns no other
    /// mapping, and no device reaches this one.
    pub(super) fn end(mut self, start: Iova, lost: bool) {
        let Self { pool, number, freed } = &mut self;
        pool.with_singles(|map| {
            let entry = in_hand(map, start, *number);
            *freed = Some((entry.single.clone(), entry.lost.get() | lost));
            drop(map.remove(start));
        });
        self.done();
    }

    /// Takes the claimed mapping at `start`, which has no buffers, out of the map.
    pub(super) fn forget(&self, start: Iova) -> Changing<'_, M, P> {
        self.pool.with_singles(|map| {
            let range = in_hand(map, start, self.number).single.range;
            drop(map.remove(start));
            self.pool.domain.changing(range)
        })
    }

    fn release(&mut self) {
        if let Some((single, lost)) = self.freed.take() {
            self.pool.release(&single, lost);
        }
    }

    /// Frees all retried mappings of this caller after the confirmation. Returns the bytes of memory.
    pub(super) fn confirmed(mut self) -> u64 {
        let (pool, trying) = (self.pool, Phase::Trying(self.number));
        let mut bytes = 0;
        let mut from = Bound::Unbounded;
        loop {
            pool.visit(&mut from, |entry| {
                if entry.phase.get() != trying {
                    return Look::On;
                }
                self.freed = Some((entry.single.clone(), entry.lost.get()));
                Look::Remove
            });
            let Some((single, _)) = &self.freed else { break };
            bytes += single.parts.buffer_bytes();
            self.release();
        }
        self.done();
        bytes
    }

    pub(super) fn failed(self) {
        self.abandon();
        self.done();
    }

    /// Leaves this caller's mappings to a later trim. O(mappings of the map).
    fn abandon(&self) {
        let Self { pool, number, .. } = *self;
        pool.visit(&mut Bound::Unbounded, |entry| {
            entry.phase.set(match entry.phase.get() {
                Phase::Live(by) | Phase::Taken(by) if by == number => Phase::Torn,
                Phase::Trying(by) if by == number => Phase::Unconfirmed,
                phase => phase,
            });
            Look::On
        });
    }
}

fn in_hand(map: &Map, start: Iova, number: u64) -> &Entry {
    let entry = map.get(start).filter(|entry| entry.phase.get() == Phase::Taken(number));
    entry.unwrap_or_else(|| broken("a mapping that is in hand stays there"))
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Claim<'_, M, P, C> {
    #[cold]
    fn drop(&mut self) {
        self.abandon();
        self.release();
        self.pool.look_later();
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Calls `f` with the locked map of mappings with addresses of their own, and with a CPU lent.
    pub(super) fn with_singles<R>(&self, f: impl FnOnce(&mut Map) -> R) -> R {
        self.domain.platform().with_cpu(|_| self.singles.with(f))
    }

    /// Calls `f` with one entry after the other, until it stops. Takes the lock, with a CPU lent, for 64 entries at a time, so that neither is held
    /// for long. Misses mappings that come or go meanwhile. Begins at `from`, and stores there where to continue.
    pub(super) fn visit(&self, from: &mut Bound<Iova>, mut f: impl FnMut(&Entry) -> Look) {
        let mut slice = |map: &mut Map| map.visit(from, SLICE, &mut f);
        while self.singles.count() > 0 && self.with_singles(&mut slice) {}
    }

    pub(super) fn claim(&self) -> Claim<'_, M, P, C> {
        Claim { pool: self, number: self.singles.next_number(), freed: None }
    }

    /// Adds all unconfirmed mappings to `gather`, and claims them.
    pub(super) fn try_again(&self, gather: &mut Gather) -> Claim<'_, M, P, C> {
        let claim = self.claim();
        self.unlink_torn(&claim, gather);
        self.visit(&mut Bound::Unbounded, |entry| {
            if entry.phase.get() == Phase::Unconfirmed {
                entry.phase.set(Phase::Trying(claim.number));
                gather.add(entry.single.range);
            }
            Look::On
        });
        claim
    }

    /// Removes the translations of torn mappings, one after the other.
    fn unlink_torn(&self, claim: &Claim<'_, M, P, C>, gather: &mut Gather) {
        loop {
            let mut torn = None;
            self.visit(&mut Bound::Unbounded, |entry| {
                if entry.phase.get() != Phase::Torn {
                    return Look::On;
                }
                entry.phase.set(Phase::Taken(claim.number));
                torn = Some(entry.single.range);
                Look::Enough
            });
            let Some(range) = torn else { return };
            // Missing translations were removed before the panic.
            let _ = self.unlink(range, gather);
            claim.set(range.start(), Phase::Trying(claim.number), false);
        }
    }

    pub(super) fn awaits(&self) -> bool {
        let mut awaits = false;
        self.visit(&mut Bound::Unbounded, |entry| {
            awaits = !matches!(entry.phase.get(), Phase::Live(_));
            if awaits { Look::Enough } else { Look::On }
        });
        awaits
    }

    pub(super) fn is_noted(&self, range: IovaRange) -> bool {
        self.singles.count() > 0 && self.with_singles(|map| map.noted(range).is_some())
    }

    /// Frees the buffers of a mapping that no device reaches any more; its addresses leak if they are `lost`.
    fn release(&self, single: &Single, lost: bool) {
        let changing = self.domain.changing(single.range);
        // SAFETY: the buffers came from `alloc` (`free`, 1). Its unmap is confirmed, or it was never mapped (`free`, 2).
        unsafe { self.free_pieces(&single.parts.buffers) };
        if !lost {
            changing.free();
        }
    }

    /// For the pool's end: removes all translations except direct ones.
    pub(super) fn unlink_singles(&self, gather: &mut Gather) {
        let mut from = Bound::Unbounded;
        loop {
            let next = |map: &mut Map| {
                let entry = map.next(from)?;
                Some((entry.single.range, entry.phase.get(), entry.single.parts.buffers.is_empty()))
            };
            let Some((range, phase, is_direct)) = self.with_singles(next) else { return };
            from = Bound::Excluded(range.start());
            // Mappings that are unmapped already are only gathered: another caller may have a translation there.
            if is_direct {
                drop(self.with_singles(|map| map.remove(range.start())));
            } else if matches!(phase, Phase::Unconfirmed | Phase::Trying(_)) {
                gather.add(range);
            } else if !self.unlink(range, gather) {
                self.with_singles(|map| map.get(range.start()).map(|entry| entry.lost.set(true)));
            }
        }
    }

    pub(super) fn free_singles(&self) {
        while let Some(entry) = self.singles.with(Map::pop_first) {
            self.release(&entry.single, entry.lost.get());
        }
    }

    /// For a pool's end that was not confirmed: leaks the addresses of all that is left.
    pub(super) fn lose_singles(&self) {
        while let Some(entry) = self.singles.with(Map::pop_first) {
            self.domain.lose(entry.single.range.len());
        }
    }
}
