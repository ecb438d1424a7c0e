//! What a call has in hand: where something below panics, the state has it back.

use super::RegistrationCache;
use super::state::{Batch, Claim, Ended, Held, State};
use crate::addr::IovaRange;
use crate::mapper::Mapper;
use crate::platform::Platform;

/// What a call has taken on: an entry that it holds or maps, and entries that it unmaps. Filled and emptied under the
/// state's lock, in the same turn that changes the state, so that the two agree wherever a call unwinds.
///
/// Dropped, nobody is at any of it any more. What may be mapped is unconfirmed, its addresses are given up, and a later call
/// unmaps it. Where all goes well there is nothing left in it by then.
pub(super) struct Hands<'a, M: Mapper, P: Platform> {
    cache: &'a RegistrationCache<M, P>,
    pub entry: Entry,
    pub batch: Batch,
}

/// The entry that a call is about.
#[derive(Debug, Clone, Copy)]
pub(super) enum Entry {
    None,
    /// The caller has a registration of it, or is about to get one, or has just given one back.
    Held(Held),
    /// It has addresses once there is a range; translations may be there if so, unless they were `removed`.
    Mapping {
        slot: u32,
        range: Option<IovaRange>,
        removed: bool,
    },
}

impl<'a, M: Mapper, P: Platform> Hands<'a, M, P> {
    #[inline]
    pub(super) fn new(cache: &'a RegistrationCache<M, P>, entry: Entry) -> Self {
        Self { cache, entry, batch: Batch::new() }
    }

    /// What is held is the caller's own business from here on.
    #[inline]
    pub(super) fn take_held(&mut self) -> Option<Held> {
        match core::mem::replace(&mut self.entry, Entry::None) {
            Entry::Held(held) => Some(held),
            _ => None,
        }
    }

    #[cold]
    fn give_up(&mut self) {
        let Self { cache, entry, batch } = self;
        cache.with(|state| {
            let abandon = |state: &mut State, batch: &mut Batch| {
                batch.drain(..).for_each(|doomed| state.abandon(doomed.slot, !doomed.again));
            };
            abandon(state, batch);
            match core::mem::replace(entry, Entry::None) {
                Entry::None => {}
                Entry::Held(held) => {
                    // The caller gets no answer, so nothing is waited for; but the registration is gone.
                    if let Some(Ended::Forgotten(Some((range, _)))) = state.release(&held, false, batch) {
                        drop(cache.device.domain().changing(range));
                    }
                    abandon(state, batch);
                }
                Entry::Mapping { slot, range, removed } => {
                    state.slots.at_mut(slot).range = range;
                    state.abandon(slot, !removed);
                }
            }
        });
    }
}

impl<M: Mapper, P: Platform> Drop for Hands<'_, M, P> {
    #[inline]
    fn drop(&mut self) {
        if !matches!(self.entry, Entry::None) || !self.batch.is_empty() {
            self.give_up();
        }
    }
}

/// Room that is set aside. Dropped, it is given up.
pub(super) struct MakingRoom<'a, M: Mapper, P: Platform> {
    pub cache: &'a RegistrationCache<M, P>,
    pub claim: Claim,
}

impl<M: Mapper, P: Platform> Drop for MakingRoom<'_, M, P> {
    fn drop(&mut self) {
        if !self.claim.is_empty() {
            self.cache.with(|state| state.unclaim(&mut self.claim));
        }
    }
}

/// A change of what is open beside what is mapped, on its way to the domain. Dropped, the next call brings it there.
pub(super) struct Uncounted<'a, M: Mapper, P: Platform> {
    pub cache: &'a RegistrationCache<M, P>,
    pub opened: u64,
}

impl<M: Mapper, P: Platform> Drop for Uncounted<'_, M, P> {
    #[cold]
    fn drop(&mut self) {
        // The caller's slot is still lent.
        let mut state = self.cache.state.lock();
        state.opened = state.opened.wrapping_add(self.opened);
    }
}
