//! A call's work in progress: if a call below panics, these guards return it to the state.

use portcullis::addr::IovaRange;
use portcullis::domain::Unlinked;
use portcullis::mapper::Mapper;
use portcullis::platform::Platform;

use super::RegistrationCache;
use super::state::{Batch, Claim, Ended, Evicted, Held, State};

/// The entries of a call: one that it holds or maps, and the ones to unmap. It changes only under the state's lock, in the same critical
/// section as the state, so that the two agree wherever a call unwinds.
///
/// Drop ends the call's work on all of them. Entries that may be mapped become unconfirmed, and a later call unmaps them. Addresses in a
/// token when the call unwound are leaked, and the token counts them. A call that succeeds leaves it empty.
pub(super) struct Hands<'a, M: Mapper, P: Platform> {
    cache: &'a RegistrationCache<M, P>,
    pub entry: Entry,
    pub batch: Batch,
}

/// The entry of a call.
#[derive(Debug, Clone, Copy)]
pub(super) enum Entry {
    None,
    /// The caller has a registration of it, is about to get one, or has just released one.
    Held {
        slot: u32,
        whole: bool,
    },
    /// The entry has addresses once `range` is set, and a token has these; then translations may be there.
    Mapping {
        slot: u32,
        range: Option<IovaRange>,
    },
    /// The entry has ended, and no caller has its addresses.
    Freed {
        range: IovaRange,
        lost: bool,
    },
}

impl From<&Held> for Entry {
    #[inline]
    fn from(held: &Held) -> Self {
        Self::Held { slot: held.slot, whole: held.whole }
    }
}

impl<'a, M: Mapper, P: Platform> Hands<'a, M, P> {
    #[inline]
    pub(super) fn new(cache: &'a RegistrationCache<M, P>, entry: Entry) -> Self {
        Self { cache, entry, batch: Batch::new() }
    }

    /// Marks the work as done: it is in the state, or the caller's responsibility from here on.
    #[inline]
    pub(super) fn done(self) {
        std::mem::forget(self);
    }

    #[cold]
    fn give_up(&mut self) {
        let Self { cache, entry, batch } = self;
        cache.with(|state| {
            let abandon = |state: &mut State, batch: &mut Batch| {
                for Evicted { slot, lost, again, .. } in batch.drain(..) {
                    state.abandon(slot, lost, !again);
                }
            };
            abandon(state, batch);
            if let Entry::Held { slot, whole } = *entry {
                // The caller gets no result, so the call does not wait; but the registration has ended.
                *entry = match state.end_held(slot, whole, false, batch) {
                    Ended::Forgotten(Some((range, lost))) => Entry::Freed { range, lost },
                    _ => Entry::None,
                };
                abandon(state, batch);
            }
            match std::mem::replace(entry, Entry::None) {
                Entry::None | Entry::Held { .. } => {}
                Entry::Freed { range, lost } => {
                    drop(Unlinked::from_range(cache.device.domain(), (range, lost)));
                }
                Entry::Mapping { slot, range } => {
                    state.slots.at_mut(slot).range = range;
                    state.abandon(slot, true, range.is_some());
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

/// A hit that is being returned: an entry, and whether all of it is held. Drop releases the entry. (It has no batch, which would enlarge
/// the frame of the fast path.)
pub(super) struct Lent<'a, M: Mapper, P: Platform> {
    pub cache: &'a RegistrationCache<M, P>,
    pub held: Option<(u32, bool)>,
}

impl<M: Mapper, P: Platform> Lent<'_, M, P> {
    /// Marks the hit as the caller's.
    #[inline]
    pub(super) fn done(self) {
        std::mem::forget(self);
    }
}

impl<M: Mapper, P: Platform> Drop for Lent<'_, M, P> {
    #[cold]
    fn drop(&mut self) {
        if let Some((slot, whole)) = self.held {
            drop(Hands::new(self.cache, Entry::Held { slot, whole }));
        }
    }
}

/// Reserved room. Drop releases it.
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
