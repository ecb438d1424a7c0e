//! Releasing, forgetting, trimming: how entries end.

use arrayvec::ArrayVec;

use super::RegistrationCache;
use super::config::{Forgotten, Registration, Released};
use super::error::{ForgetError, ReleaseRegistrationError};
use super::index::Span;
use super::slot::Phase;
use super::state::{BATCH, Batch, Ended, Held, State};
use crate::addr::{IovaRange, Permissions};
use crate::domain::PhysSegment;
use crate::invalidation::{Gather, InvalidationError};
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::Platform;
use crate::sync::pause;

impl<M: Mapper, P: Platform> RegistrationCache<M, P> {
    /// Gives a registration back: the caller's device is done with it. O(1), but for the last of a range that is not
    /// [kept](super::Keep::UntilForgotten): that is unmapped, with one invalidation. Allocates nothing. The caller
    /// holds no lock and no slot.
    ///
    /// # Errors
    /// [`ReleaseRegistrationError`]; after `Unconfirmed` the memory may still be reached.
    #[inline]
    pub fn release(&self, registration: Registration) -> Result<Released, ReleaseRegistrationError> {
        let Registration { iova, cache, slot, generation, whole, len: _ } = registration;
        if cache != self.number {
            return Err(ReleaseRegistrationError::OtherCache);
        }
        let held = Held { slot, generation, iova, whole };
        let mut batch = Batch::new();
        match self.with(|state| state.release(&held, &mut batch)) {
            Some(Ended::Open) => Ok(Released::Open),
            Some(Ended::Last) => match self.bury(&mut batch, |_| ()) {
                Ok(_) => Ok(Released::Unmapped),
                Err(error) => Err(ReleaseRegistrationError::Unconfirmed { error }),
            },
            Some(Ended::Forgotten(range)) => {
                if let Some((range, lost)) = range {
                    self.give_back(range, lost, 1);
                }
                Ok(Released::Forgotten)
            }
            None => Err(ReleaseRegistrationError::OtherCache),
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
        let mut batch = Batch::new();
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
                        others |= !state.forget(key.slot(), &mut batch, &mut forgotten);
                    }
                    true
                });
                let entries = batch.len();
                if let Err(error) = self.bury(&mut batch, |_| ()) {
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
        let mut batch = Batch::new();
        loop {
            let doomed = self.with(|state| {
                let mut doomed = 0;
                while !batch.is_full() {
                    let again = if unconfirmed > 0 { state.unconfirmed.first() } else { None };
                    unconfirmed = unconfirmed.saturating_sub(1);
                    let idle = || state.idle.first().filter(|_| state.idle.bytes > keep);
                    let Some(slot) = again.or_else(idle) else { break };
                    doomed += state.slots.at(slot).bytes;
                    state.doom(slot, &mut batch);
                }
                doomed
            });
            if batch.is_empty() {
                return Ok(bytes);
            }
            self.bury(&mut batch, |_| ())?;
            bytes += doomed;
        }
    }

    /// Unmaps what is in `batch`, which is empty then, and waits until no device reaches it. Calls `settled` when the
    /// state knows of it, with the same lock.
    pub(super) fn bury(
        &self,
        batch: &mut Batch,
        settled: impl FnOnce(&mut State),
    ) -> Result<(), InvalidationError> {
        if batch.is_empty() {
            return Ok(());
        }
        let batch = Interrupted { cache: self, batch };
        let domain = self.device.domain();
        let mut gather = Gather::new();
        let mut kept = 0;
        for doomed in batch.batch.iter_mut() {
            // What was unlinked before is not looked for again: another's translation may have been met there.
            if doomed.again {
                gather.add(doomed.range);
                continue;
            }
            let Unmapped { bytes, kept: left, stale } = domain.unlink(doomed.range, &mut gather);
            // What could not be removed is, by a later call.
            doomed.again = left == 0;
            kept += left;
            if bytes != doomed.range.len() {
                // Whoever removed the rest may have given the addresses to others, and not have invalidated it.
                doomed.lost = true;
                gather.add(stale);
            }
        }
        let confirmed = domain.confirm(&gather);
        let mut free: ArrayVec<(IovaRange, bool), BATCH> = ArrayVec::new();
        self.with(|state| {
            for doomed in batch.batch.drain(..) {
                state.slots.at_mut(doomed.slot).lost = doomed.lost;
                if !doomed.again {
                    state.abandon(doomed.slot, true);
                } else if state.ended(doomed.slot, confirmed.is_ok()) {
                    free.push((doomed.range, doomed.lost));
                }
            }
            settled(state);
        });
        free.into_iter().for_each(|(range, lost)| self.give_back(range, lost, 1));
        if kept > 0 { Err(InvalidationError::StillMapped { bytes: kept }) } else { confirmed }
    }

    /// Gives back the addresses of what nobody reaches and nobody holds, after `unmaps` unmaps, or gives them up.
    pub(super) fn give_back(&self, range: IovaRange, lost: bool, unmaps: u64) {
        let domain = self.device.domain();
        if lost {
            domain.lose(range.len());
        } else {
            domain.take_back(range, unmaps);
        }
    }
}

/// Entries that are being unmapped. What is left of them when this is dropped, the mapper has panicked at.
struct Interrupted<'a, M: Mapper, P: Platform> {
    cache: &'a RegistrationCache<M, P>,
    batch: &'a mut Batch,
}

impl<M: Mapper, P: Platform> Drop for Interrupted<'_, M, P> {
    fn drop(&mut self) {
        if !self.batch.is_empty() {
            self.cache.with(|state| {
                self.batch.drain(..).for_each(|doomed| state.abandon(doomed.slot, !doomed.again))
            });
        }
    }
}

impl<M: Mapper, P: Platform> Drop for RegistrationCache<M, P> {
    fn drop(&mut self) {
        let domain = self.device.domain();
        // Nobody else can be at it: the lock is for the type.
        let mut state = self.state.lock();
        let mut gather = Gather::new();
        for entry in state.slots.iter_mut() {
            let Some(range) = entry.range else { continue };
            match entry.phase {
                // All of it may be there, or nothing.
                Phase::Unconfirmed if entry.interrupted => {
                    // Its addresses are given up in any case.
                    let _ = domain.unlink(range, &mut gather);
                    gather.add(range);
                }
                Phase::Live if domain.unlink(range, &mut gather).bytes != range.len() => {
                    // Somebody else has removed the rest, and the addresses may be anybody's.
                    entry.lost = true;
                    gather.add(range);
                }
                Phase::Unconfirmed => gather.add(range),
                _ => {}
            }
        }
        let confirmed = domain.confirm(&gather).is_ok();
        for entry in state.slots.iter() {
            let Some(range) = entry.range else { continue };
            domain.count_neighbours(entry.open.wrapping_neg());
            if entry.lost || entry.refs > 0 {
                domain.lose(range.len());
            } else if confirmed {
                domain.take_back(range, 1);
            } else {
                domain.quarantine(domain.changing(range), range.len());
            }
        }
    }
}
