//! Releasing, forgetting and trimming. After `Ok` no device reaches an entry that the call has ended.

use std::sync::PoisonError;

use arrayvec::ArrayVec;
use portcullis::addr::{IovaRange, Permissions, PhysSegment};
use portcullis::domain::{Domain, Linked, Unlinked};
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis::mapper::Mapper;
use portcullis::platform::Platform;

use super::config::{Forgotten, Registration, Released};
use super::error::{ForgetError, ReleaseRegistrationError};
use super::hands::{Entry, Hands};
use super::index::Span;
use super::slot::{Phase, Slots};
use super::state::{BATCH, Ended, Evicted, State};
use super::{RegistrationCache, pause};

impl<M: Mapper, P: Platform> RegistrationCache<M, P> {
    /// Releases a registration. O(1), except the last registration of a range that is not [persistent](super::Keep::UntilForgotten): that
    /// unmaps the range, with one invalidation; if its owner is forgetting it at this moment, the call waits for that invalidation. Does
    /// not allocate. Context: may wait; the caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`ReleaseRegistrationError`]; after `Unconfirmed` devices may still reach the memory.
    #[inline(always)]
    pub fn release(&self, registration: Registration) -> Result<Released, ReleaseRegistrationError> {
        let Registration { slot, generation, whole, cache, .. } = registration;
        // `Hands` is not needed: if the entry stays open, a panic below leaves it released; otherwise nothing has changed.
        if cache == self.number {
            let mut state = self.lock();
            let stays = state.release(slot, generation, whole);
            self.tell(state);
            if stays {
                return Ok(Released::Open);
            }
        }
        self.release_otherwise(registration)
    }

    /// The slow path of `release`.
    #[cold]
    #[inline(never)]
    fn release_otherwise(&self, registration: Registration) -> Result<Released, ReleaseRegistrationError> {
        if registration.cache != self.number {
            return Err(ReleaseRegistrationError::OtherCache { registration });
        }
        let Registration { slot, generation, whole, .. } = registration;
        let mut hands = Hands::new(self, Entry::Held { slot, whole });
        // It may have come to stay open meanwhile.
        let ended = self.with(|state| self.end_held(state, &mut hands, (slot, generation, whole)));
        self.release_last(&mut hands, registration, ended)
    }

    /// Ends the registration in `hands`, if its entry exists.
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

    /// Ends the last registration of a range, or of a forgotten range, and waits until that is done.
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
                    if let Entry::Freed { range, lost } = std::mem::replace(&mut hands.entry, Entry::None) {
                        Unlinked::from_range(self.device.domain(), (range, lost)).free();
                    }
                    Ok(Released::Forgotten)
                }
                None => Err(ReleaseRegistrationError::OtherCache { registration }),
            };
        }
    }

    /// Takes `memory` back for its owner: unmaps every entry that shares a byte with it, for any direction, held or not, and waits until no
    /// device reaches any of them. Also unmaps ranges whose acquisition was in progress when the call began; the owner is responsible for
    /// ranges that are acquired later. Holders' devices meet faults, and their releases return [`Forgotten`](Released::Forgotten); no other
    /// caller gets the addresses before that. An empty range is no error; one that runs past the last address ends there.
    ///
    /// Costs one invalidation for each 64 entries, and waits for CPUs that are mapping or unmapping such entries. O(log n) for each entry,
    /// and for each size class. Does not allocate. Context: may wait; the caller holds no lock and no CPU.
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
                // Each remaining entry leaves its phase when its mapping or its invalidation is over.
                None => pause(),
            }
        }
    }

    /// Unmaps idle entries, in LRU order, until the rest has at most `keep` bytes, and also entries with an unconfirmed invalidation.
    /// Returns how many bytes devices no longer reach.
    ///
    /// Costs one invalidation for each 64 entries; O(log n) for each. Does not allocate. Context: may wait; the caller holds no lock and no
    /// CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach the unconfirmed entries, until a later call succeeds.
    pub fn trim(&self, keep: u64) -> Result<u64, InvalidationError> {
        let mut bytes = 0;
        // Entries that fail meanwhile are left to later calls.
        let mut unconfirmed = self.with(|state| state.unconfirmed.len());
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

    /// Unmaps the batch in `hands`, which is then empty, and waits until no device reaches it. Calls `settled` under the same lock under
    /// which the result is recorded.
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
        let mut tokens: ArrayVec<_, BATCH> = ArrayVec::new();
        for evicted in &mut hands.batch {
            let Evicted { range, lost, again, .. } = *evicted;
            // From here on a token has the addresses, and counts them if this call unwinds.
            evicted.lost = true;
            // An entry that was unlinked before is not unlinked again: another caller's translation may be there now.
            if again {
                gather.add(range);
                tokens.push(Unlinked::from_range(domain, (range, lost)));
                continue;
            }
            match linked(domain, range, lost).unlink(&mut gather) {
                Ok(unlinked) => {
                    evicted.again = true;
                    tokens.push(unlinked);
                }
                // A later call removes the rest.
                Err(linked) => {
                    kept += linked.kept();
                    linked.into_range();
                    evicted.lost = lost;
                }
            }
        }
        let confirmed = domain.confirm(&gather);
        let mut free: ArrayVec<_, BATCH> = ArrayVec::new();
        self.with(|state| {
            // Each unlinked entry has a token, in the same order.
            let mut tokens = tokens.into_iter();
            for Evicted { slot, lost, again, .. } in hands.batch.drain(..) {
                let Some(unlinked) = (if again { tokens.next() } else { None }) else {
                    state.abandon(slot, lost, true);
                    continue;
                };
                state.slots.at_mut(slot).lost = unlinked.is_lost();
                if state.ended(slot, confirmed.is_ok()) {
                    free.push(unlinked);
                } else {
                    unlinked.into_range();
                }
            }
            settled(state);
        });
        free.into_iter().for_each(Unlinked::free);
        if kept > 0 { Err(InvalidationError::StillMapped { bytes: kept }) } else { confirmed }
    }
}

/// Returns the token of an entry's addresses, which may have translations.
fn linked<M: Mapper, P: Platform>(domain: &Domain<M, P>, range: IovaRange, lost: bool) -> Linked<'_, M, P> {
    if lost { Linked::from_lost(domain, range) } else { Linked::from_range(domain, range) }
}

/// The entries of a cache that is dropped. Its own drop leaks the addresses of the remaining ones.
struct Leaving<'a, M: Mapper, P: Platform> {
    domain: &'a Domain<M, P>,
    slots: &'a mut Slots,
}

impl<M: Mapper, P: Platform> Drop for Leaving<'_, M, P> {
    fn drop(&mut self) {
        for entry in self.slots.iter_mut() {
            if let Some(range) = entry.range.take() {
                drop(Unlinked::from_range(self.domain, (range, entry.lost)));
            }
        }
    }
}

impl<M: Mapper, P: Platform> Drop for RegistrationCache<M, P> {
    fn drop(&mut self) {
        let domain = self.device.domain();
        // No other call can hold the lock.
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let leaving = Leaving { domain, slots: &mut state.slots };
        let mut gather = Gather::new();
        for entry in leaving.slots.iter_mut() {
            let Some(range) = entry.range else { continue };
            match entry.phase {
                Phase::Free | Phase::Gone => {}
                Phase::Unconfirmed if !entry.interrupted => gather.add(range),
                // Anything from all of it to nothing may be mapped, if a call has unwound.
                Phase::Live | Phase::Unconfirmed | Phase::Ending | Phase::Mapping => {
                    let linked = linked(domain, range, entry.lost);
                    // Dropping the token counts them.
                    entry.lost = true;
                    if let Ok(unlinked) = linked.unlink(&mut gather) {
                        (_, entry.lost) = unlinked.into_range();
                    }
                }
            }
        }
        let confirmed = domain.confirm(&gather).is_ok();
        for entry in leaving.slots.iter_mut() {
            let Some(range) = entry.range.take() else { continue };
            let mut unlinked = Unlinked::from_range(domain, (range, entry.lost));
            domain.count_neighbours(entry.open.wrapping_neg().cast_signed());
            if entry.refs > 0 {
                // A holder may still tell them to its device.
                drop(unlinked);
                unlinked = Unlinked::from_range(domain, (range, true));
            }
            if confirmed {
                unlinked.free();
            } else {
                unlinked.quarantine();
            }
        }
    }
}
