//! Mappings of the map whose end was not confirmed, tried again; and all of them, when the pool ends.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::ops::Bound;

use super::BouncePool;
use super::single::{Entry, Look, Parts, Phase};
use crate::addr::IovaRange;
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// What a trim has in hand until this is dropped: what is left of it then waits for another.
pub(super) struct Attempt<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    number: u64,
}

impl<M: Mapper, P: Platform, C: CopyMemory> Attempt<'_, M, P, C> {
    /// Gives back all of it, which is confirmed. How many bytes of memory.
    pub(super) fn confirmed(self) -> u64 {
        self.pool.end_attempt(self.number, true)
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> Drop for Attempt<'_, M, P, C> {
    fn drop(&mut self) {
        self.pool.end_attempt(self.number, false);
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Adds to `gather` what waits for a confirmation, and takes it in hand.
    pub(super) fn begin_attempt(&self, gather: &mut Gather) -> Attempt<'_, M, P, C> {
        let attempt = Attempt { pool: self, number: self.singles.next_attempt() };
        self.unlink_torn(gather);
        self.singles.visit(self.domain.platform(), &mut Bound::Unbounded, |entry| {
            if entry.phase == Phase::Unconfirmed {
                entry.phase = Phase::Trying(attempt.number);
                gather.add(entry.single.range);
            }
            Look::On
        });
        attempt
    }

    /// Removes the translations of what a mapper has panicked at.
    fn unlink_torn(&self, gather: &mut Gather) {
        loop {
            let mut torn = None;
            self.singles.visit(self.domain.platform(), &mut Bound::Unbounded, |entry| {
                torn = (entry.phase == Phase::Torn).then_some(entry.single.range);
                if torn.is_some() { Look::Enough } else { Look::On }
            });
            let Some(range) = torn else { return };
            // What is not there was removed before the panic.
            let _ = self.unlink(range, gather);
            self.set_phase_from(range, Phase::Torn, Phase::Unconfirmed);
        }
    }

    /// Puts the mapping of `range` from one phase into another, if it is in that.
    pub(super) fn set_phase_from(&self, range: IovaRange, from: Phase, to: Phase) {
        let set = |map: &mut BTreeMap<_, Entry>| {
            let entry = map.get_mut(&range.start()).filter(|entry| entry.phase == from);
            entry.into_iter().for_each(|entry| entry.phase = to);
        };
        self.domain.platform().with_slot(|_| self.singles.with(set));
    }

    /// Whether anything waits for a confirmation.
    pub(super) fn awaits(&self) -> bool {
        let mut awaits = false;
        self.singles.visit(self.domain.platform(), &mut Bound::Unbounded, |entry| {
            awaits = entry.phase != Phase::Live;
            if awaits { Look::Enough } else { Look::On }
        });
        awaits
    }

    /// Gives back what an attempt had in hand, if it was confirmed. How many bytes of memory.
    fn end_attempt(&self, attempt: u64, confirmed: bool) -> u64 {
        let mut bytes = 0;
        let mut from = Bound::Unbounded;
        loop {
            let mut found = None;
            self.singles.visit(self.domain.platform(), &mut from, |entry| {
                if entry.phase != Phase::Trying(attempt) {
                    return Look::On;
                }
                entry.phase = Phase::Unconfirmed;
                if !confirmed {
                    return Look::On;
                }
                let range = entry.single.range;
                found = Some((Arc::clone(&entry.single), entry.lost, self.domain.changing(range)));
                Look::Remove
            });
            let Some((single, lost, changing)) = found else { return bytes };
            changing.done();
            bytes += self.bytes_of(&single.parts);
            self.release(&single, lost);
        }
    }

    fn bytes_of(&self, parts: &Parts) -> u64 {
        let mut bytes = 0;
        self.each_buffer(parts, |piece| bytes += piece.len);
        bytes
    }

    /// For the pool's end: removes all translations but those made directly.
    pub(super) fn unlink_singles(&self, gather: &mut Gather) {
        // Without a slot, which would be held for long: nobody else is here.
        self.singles.with(|map| map.retain(|_, entry| !matches!(entry.single.parts, Parts::Direct { .. })));
        let mut from = Bound::Unbounded;
        loop {
            let next = |map: &mut BTreeMap<_, Entry>| {
                let (_, entry) = map.range((from, Bound::Unbounded)).next()?;
                Some((entry.single.range, entry.phase))
            };
            let next = self.domain.platform().with_slot(|_| self.singles.with(next));
            let Some((range, phase)) = next else { return };
            from = Bound::Excluded(range.start());
            // What was unlinked before is not looked for again: somebody else's translation may have been met there.
            if matches!(phase, Phase::Unconfirmed | Phase::Trying(_)) {
                gather.add(range);
            } else if !self.unlink(range, gather) {
                let lose = |entry: &mut Entry| entry.lost = true;
                self.domain
                    .platform()
                    .with_slot(|_| self.singles.with(|map| map.get_mut(&range.start()).map(lose)));
            }
        }
    }

    /// For the pool's end: gives everything back.
    pub(super) fn free_singles(&self) {
        self.singles.drain().values().for_each(|entry| self.release(&entry.single, entry.lost));
    }

    /// For a pool's end that was not confirmed: gives the addresses up.
    pub(super) fn lose_singles(&self) {
        let give_up = |entry: &Entry| drop(self.domain.changing(entry.single.range));
        self.singles.drain().values().for_each(give_up);
    }
}
