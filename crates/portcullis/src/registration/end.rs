//! Releasing, forgetting, trimming: how entries end.

use arrayvec::ArrayVec;

use super::RegistrationCache;
use super::config::{Forgotten, Registration, Released};
use super::error::{ForgetError, ReleaseRegistrationError};
use super::hands::{Entry, Hands};
use super::index::Span;
use super::slot::{Phase, Slots};
use super::state::{BATCH, Ended, State};
use crate::addr::{IovaRange, Permissions};
use crate::domain::{Domain, PhysSegment};
use crate::invalidation::{Gather, InvalidationError};
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::Platform;
use crate::sync::pause;

impl<M: Mapper, P: Platform> RegistrationCache<M, P> {
    /// Gives a registration back: the caller's device is done with it. O(1), but for the last of a range that is not
    /// [kept](super::Keep::UntilForgotten): that is unmapped, with one invalidation; where its owner is forgetting it at
    /// this moment, that one is waited for. Allocates nothing. The caller holds no lock and no slot.
    ///
    /// # Errors
    /// [`ReleaseRegistrationError`]; after `Unconfirmed` the memory may still be reached.
    #[inline]
    pub fn release(&self, registration: Registration) -> Result<Released, ReleaseRegistrationError> {
        if registration.cache != self.number {
            return Err(ReleaseRegistrationError::OtherCache { registration });
        }
        let Registration { slot, generation, whole, .. } = registration;
        let mut hands = Hands::new(self, Entry::Held { slot, whole });
        let ended = self.with(|state| {
            if state.release(slot, generation, whole) {
                hands.entry = Entry::None;
                return Some(Ended::Open);
            }
            self.end_held(state, &mut hands, (slot, generation, whole))
        });
        if let Some(Ended::Open) = ended {
            hands.done();
            return Ok(Released::Open);
        }
        self.release_last(&mut hands, registration, ended)
    }

    /// Has the state end what `hands` have of a registration, if there is such an entry.
    #[cold]
    fn end_held(
        &self,
        state: &mut State,
        hands: &mut Hands<'_, M, P>,
        (slot, generation, whole): (u32, u64, bool),
    ) -> Option<Ended> {
        if state.slots.get(slot).is_none_or(|entry| entry.generation != generation) {
            hands.entry = Entry::None;
            return None;
        }
        let ended = state.end_held(slot, whole, true, &mut hands.batch);
        hands.entry = match ended {
            Ended::Wait => hands.entry,
            Ended::Forgotten(Some((range, lost))) => Entry::Freed { range, lost },
            _ => Entry::None,
        };
        Some(ended)
    }

    /// Says how a release has ended that was a range's last, or of what was forgotten; waits until it has.
    #[cold]
    fn release_last(
        &self,
        hands: &mut Hands<'_, M, P>,
        registration: Registration,
        mut ended: Option<Ended>,
    ) -> Result<Released, ReleaseRegistrationError> {
        let Registration { slot, generation, whole, .. } = registration;
        loop {
            return match ended {
                Some(Ended::Wait) => {
                    pause();
                    ended = self.with(|state| self.end_held(state, hands, (slot, generation, whole)));
                    continue;
                }
                Some(Ended::Open) => Ok(Released::Open),
                Some(Ended::Last(released)) => {
                    let ended = self.end_evicted(hands, |_| ());
                    ended.map(|()| released).map_err(|error| ReleaseRegistrationError::Unconfirmed { error })
                }
                Some(Ended::Forgotten(_)) => {
                    if let Entry::Freed { range, lost } = core::mem::replace(&mut hands.entry, Entry::None) {
                        self.give_back(range, lost, 1);
                    }
                    Ok(Released::Forgotten)
                }
                None => Err(ReleaseRegistrationError::OtherCache { registration }),
            };
        }
    }

    /// The owner of `memory` takes it back: unmaps every entry that shares a byte with it, for whatever direction, held
    /// or not, and waits until no device reaches any of them. What was being acquired when the call began is unmapped,
    /// too; what is acquired later is the owner's own doing. Holders' devices meet faults, and their releases say
    /// [`Forgotten`](Released::Forgotten); nobody else gets the addresses before. An empty range is no error; one that
    /// runs past the last address ends there.
    ///
    /// One invalidation for each 64 entries, and those of CPUs that are mapping or unmapping such entries at the moment
    /// are waited for. O(log n) for each entry, and for each size class. Allocates nothing. The caller holds no
    /// lock and no slot.
    ///
    /// # Errors
    /// [`ForgetError`]: all of it is unmapped, but **devices may still reach it**, until another call succeeds.
    pub fn forget(&self, memory: PhysSegment) -> Result<Forgotten, ForgetError> {
        let most = (u64::MAX - memory.phys.get()).saturating_add(1);
        let memory = PhysSegment { len: memory.len.min(most), ..memory };
        let mut forgotten = Forgotten::default();
        let Some(span) = Span::new(memory, Permissions::READ_WRITE) else {
            return Ok(forgotten);
        };
        let mut hands = Hands::new(self, Entry::None);
        let stamp = self.with(|state| state.begin_forget(&span));
        loop {
            let (mut after, mut others, mut failed) = (None, false, None);
            loop {
                let more = self.with(|state| {
                    for _ in 0..BATCH {
                        let Some(key) = state.next_overlapping(&span, after, stamp) else {
                            return false;
                        };
                        after = Some(key);
                        others |= !state.forget(key.slot(), &mut hands.batch, &mut forgotten);
                    }
                    true
                });
                let entries = hands.batch.len();
                if let Err(error) = self.end_evicted(&mut hands, |_| ()) {
                    let failed = failed.get_or_insert(ForgetError { entries: 0, error });
                    failed.entries += entries;
                }
                if !more {
                    break;
                }
            }
            match failed {
                Some(failed) => return Err(failed),
                None if !others => return Ok(forgotten),
                // Of those that are left, each leaves its phase when its mapping or its invalidation is over.
                None => pause(),
            }
        }
    }

    /// Unmaps idle entries, the least recently used first, until the rest has no more than `keep` bytes; and what an
    /// earlier call could not confirm. How many bytes devices do not reach any more.
    ///
    /// One invalidation for each 64 entries; O(log n) for each. Allocates nothing. The caller holds no lock and no slot.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach what could not be confirmed, until a later call succeeds.
    pub fn trim(&self, keep: u64) -> Result<u64, InvalidationError> {
        let mut bytes = 0;
        // Those that fail meanwhile are another call's.
        let mut unconfirmed = self.with(|state| state.unconfirmed.len);
        let mut hands = Hands::new(self, Entry::None);
        loop {
            let evicted = self.with(|state| {
                let mut evicted = 0;
                while !hands.batch.is_full() {
                    let again = if unconfirmed > 0 { state.unconfirmed.first() } else { None };
                    unconfirmed = unconfirmed.saturating_sub(1);
                    let idle = || state.idle.first().filter(|_| state.idle.bytes > keep);
                    let Some(slot) = again.or_else(idle) else { break };
                    evicted += state.slots.at(slot).bytes;
                    state.evict_one(slot, &mut hands.batch);
                }
                evicted
            });
            if hands.batch.is_empty() {
                return Ok(bytes);
            }
            self.end_evicted(&mut hands, |_| ())?;
            bytes += evicted;
        }
    }

    /// Unmaps the batch in `hands`, which is empty then, and waits until no device reaches it. Calls `settled` when the
    /// state knows of it, with the same lock.
    pub(super) fn end_evicted(
        &self,
        hands: &mut Hands<'_, M, P>,
        settled: impl FnOnce(&mut State),
    ) -> Result<(), InvalidationError> {
        if hands.batch.is_empty() {
            return Ok(());
        }
        let domain = self.device.domain();
        let mut gather = Gather::new();
        let mut kept = 0;
        for evicted in &mut hands.batch {
            // What was unlinked before is not looked for again: another's translation may have been met there.
            if evicted.again {
                gather.add(evicted.range);
                continue;
            }
            let Unmapped { bytes, kept: left, .. } = domain.unlink(evicted.range, &mut gather);
            // What could not be removed is, by a later call.
            evicted.again = left == 0;
            kept += left;
            if bytes != evicted.range.len() {
                // Whoever removed the rest may have given the addresses to others.
                evicted.lost = true;
            }
        }
        let confirmed = domain.confirm(&gather);
        let mut free: ArrayVec<_, BATCH> = ArrayVec::new();
        self.with(|state| {
            for evicted in hands.batch.drain(..) {
                state.slots.at_mut(evicted.slot).lost = evicted.lost;
                if !evicted.again {
                    state.abandon(evicted.slot, true);
                } else if state.ended(evicted.slot, confirmed.is_ok()) {
                    free.push((domain.changing(evicted.range), evicted.lost));
                }
            }
            settled(state);
        });
        free.drain(..).for_each(|(range, lost)| self.give_back(range.done(), lost, 1));
        if kept > 0 { Err(InvalidationError::StillMapped { bytes: kept }) } else { confirmed }
    }

    /// Gives back the addresses of what nobody reaches and nobody holds, after `unmaps` unmaps, or gives them up.
    pub(super) fn give_back(&self, range: IovaRange, lost: bool, unmaps: u64) {
        let domain = self.device.domain();
        if lost {
            drop(domain.changing(range));
        } else {
            domain.take_back(range, unmaps);
        }
    }
}

/// A cache's entries while it ends. Dropped, the addresses of those that are left are given up.
struct Leaving<'a, M: Mapper, P: Platform> {
    domain: &'a Domain<M, P>,
    slots: &'a mut Slots,
}

impl<M: Mapper, P: Platform> Drop for Leaving<'_, M, P> {
    fn drop(&mut self) {
        let ranges = self.slots.iter_mut().filter_map(|entry| entry.range.take());
        ranges.for_each(|range| drop(self.domain.changing(range)));
    }
}

impl<M: Mapper, P: Platform> Drop for RegistrationCache<M, P> {
    fn drop(&mut self) {
        let domain = self.device.domain();
        // Nobody else can be at it: the lock is for the type.
        let mut state = self.state.lock();
        let leaving = Leaving { domain, slots: &mut state.slots };
        let mut gather = Gather::new();
        for entry in leaving.slots.iter_mut() {
            let Some(range) = entry.range else { continue };
            match entry.phase {
                Phase::Free | Phase::Gone => {}
                Phase::Unconfirmed if !entry.interrupted => gather.add(range),
                // All of it may be there, or nothing, where a call has not come back to it.
                Phase::Live | Phase::Unconfirmed | Phase::Ending | Phase::Mapping => {
                    entry.lost |= entry.phase != Phase::Live;
                    if domain.unlink(range, &mut gather).bytes != range.len() {
                        // Somebody else has removed the rest, and the addresses may be anybody's.
                        entry.lost = true;
                    }
                }
            }
        }
        let confirmed = domain.confirm(&gather).is_ok();
        for entry in leaving.slots.iter_mut() {
            let Some(range) = entry.range.take() else { continue };
            let range = domain.changing(range);
            domain.count_neighbours(entry.open.wrapping_neg());
            match entry.lost || entry.refs > 0 {
                true if confirmed => drop(range),
                true => {
                    let bytes = range.range().len();
                    drop(range);
                    domain.leave_open(bytes);
                }
                false if confirmed => domain.take_back(range.done(), 1),
                false => domain.quarantine(range),
            }
        }
    }
}
