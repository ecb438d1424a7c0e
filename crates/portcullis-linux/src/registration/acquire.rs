//! Acquiring a range: share a mapped entry, or map a missing one, and evict others if there is no room. Memory that devices may reach never
//! exceeds the limits.

use portcullis::addr::{Direction, Iova, PhysSegment};
use portcullis::domain::{MapListError, Refused};
use portcullis::invalidation::Gather;
use portcullis::mapper::Mapper;
use portcullis::platform::Platform;

use super::config::{Keep, Registration};
use super::error::AcquireError;
use super::hands::{Entry, Hands, Lent, MakingRoom};
use super::index::Span;
use super::state::{Claim, Held, Step};
use super::{RegistrationCache, pause};

impl<M: Mapper, P: Platform> RegistrationCache<M, P> {
    /// Acquires `memory`, mapped for `direction`. A hit changes no translation, and waits only for the cache's lock: `memory` is part of a
    /// [persistent](Keep::UntilForgotten) entry, or exactly the range of another. O(log n). If `keep` says so, an entry of exactly this
    /// range becomes persistent.
    ///
    /// A miss maps the whole granules of `memory`, as [`Domain::map`](portcullis::domain::Domain::map) does; it may allocate. If the limits
    /// leave no room, it first evicts idle entries in LRU order, and waits for the invalidation before it maps: one, or one for each 64
    /// entries if a large range needs more. If other callers are evicting entries that will make the room, it waits for them. CPUs that
    /// miss the same range at the same time may map it once each.
    ///
    /// Context: may wait; the caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`AcquireError`]: nothing is acquired or mapped.
    ///
    /// # Safety
    /// As for [`Domain::map`](portcullis::domain::Domain::map), clauses 1 to 3, for as long as the device may reach the memory by the table
    /// of the [module](crate::registration): until a [`forget`](Self::forget) of it has returned `Ok`; or, if every caller acquired it
    /// [`WhileHeld`](Keep::WhileHeld), until the last [`release`](Self::release) has returned `Ok`. After an `Unconfirmed` error, of this
    /// call or a release, and after a panic, it lasts until a `forget` of the memory has returned `Ok`; after [`MapListError::Unconfirmed`]
    /// a [flush](portcullis::domain::Domain::flush) suffices.
    // Inlined: a call would pass the registration through memory.
    #[inline(always)]
    pub unsafe fn acquire(
        &self,
        memory: PhysSegment,
        direction: Direction,
        keep: Keep,
    ) -> Result<Registration, AcquireError> {
        let mut lent = Lent { cache: self, held: None };
        if let Some(span) = Span::new(memory, direction.permissions()) {
            let mut state = self.lock();
            let hit = state.hit(&span, keep);
            lent.held = hit.map(|held| (held.slot, held.whole));
            self.tell(state);
            if let Some(held) = hit {
                lent.done();
                return Ok(self.registration(held, memory.len));
            }
        }
        lent.done();
        // SAFETY: clauses 1 to 3 are the caller's.
        let held = unsafe { self.acquire_missing(memory, direction, keep) }?;
        Ok(self.registration(held, memory.len))
    }

    #[inline]
    fn registration(&self, held: Held, len: u64) -> Registration {
        let Held { slot, generation, iova, whole } = held;
        Registration { iova, len, cache: self.number, slot, generation, whole }
    }

    /// # Safety
    /// As for [`acquire`](Self::acquire), clauses 1 to 3.
    #[cold]
    #[inline(never)]
    unsafe fn acquire_missing(
        &self,
        memory: PhysSegment,
        direction: Direction,
        keep: Keep,
    ) -> Result<Held, AcquireError> {
        let bytes = self.device.domain().pages_of(&[memory])?;
        let wraps = MapListError::Wraps { index: 0, phys: memory.phys, len: memory.len };
        let span = Span::new(memory, direction.permissions()).ok_or(wraps)?;
        let limit = self.limits.bytes;
        if bytes > limit {
            return Err(AcquireError::TooLarge { bytes, limit });
        }
        let mut making = MakingRoom { cache: self, claim: Claim::default() };
        let mut hands = Hands::new(self, Entry::None);
        loop {
            let claim = &mut making.claim;
            let step = self.with(|state| {
                let step = state.step((&span, bytes, keep), claim, &mut hands.batch);
                hands.entry = match &step {
                    Step::Hit(held) => held.into(),
                    Step::Reserved(slot) => Entry::Mapping { slot: *slot, range: None },
                    _ => Entry::None,
                };
                step
            });
            match step {
                Step::Hit(held) => {
                    hands.done();
                    return Ok(held);
                }
                // SAFETY: clauses 1 to 3 are the caller's.
                Step::Reserved(slot) => return unsafe { self.map(slot, &mut hands, &span, bytes) },
                Step::Failed(error) => return Err(error),
                Step::Wait => pause(),
                Step::Evict => {
                    // This caller gets the room before any other caller sees it.
                    self.end_evicted(&mut hands, |state| state.top_up(claim, bytes))
                        .map_err(|error| AcquireError::Eviction { error })?;
                }
            }
        }
    }

    /// Maps the reserved entry.
    ///
    /// # Safety
    /// As for [`acquire`](Self::acquire), clauses 1 to 3.
    unsafe fn map(
        &self,
        slot: u32,
        hands: &mut Hands<'_, M, P>,
        span: &Span,
        bytes: u64,
    ) -> Result<Held, AcquireError> {
        let domain = self.device.domain();
        // The entry exists already: if addresses are short, deferred unmaps are confirmed to free some.
        let reserved = match domain.reserve(bytes, Iova::new(self.device.mask())) {
            Ok(reserved) => reserved,
            Err(error) => {
                self.with(|state| {
                    hands.entry = Entry::None;
                    state.not_mapped(slot, false);
                });
                return Err(error.into());
            }
        };
        let mut unconfirmed = Gather::new();
        hands.entry = Entry::Mapping { slot, range: Some(reserved.range()) };
        // SAFETY: clauses 1 to 3 are the caller's.
        let linked = unsafe { reserved.link(&[span.memory()], span.permissions(), &mut unconfirmed) };
        let linked = match linked {
            Ok(linked) => linked,
            Err(Refused { error, unlinked, is_confirmed }) => {
                // Another caller's translations may be there; they stay.
                let free = self.with(|state| {
                    hands.entry = Entry::None;
                    if is_confirmed {
                        state.not_mapped(slot, false);
                        return Some(unlinked);
                    }
                    let (range, lost) = unlinked.into_range();
                    let entry = state.slots.at_mut(slot);
                    (entry.range, entry.lost) = (Some(range), lost);
                    state.not_mapped(slot, true);
                    None
                });
                if let Some(free) = free {
                    free.free();
                }
                return Err(error.into());
            }
        };
        let held = self.with(|state| {
            state.slots.at_mut(slot).range = Some(linked.into_range());
            let held = state.mapped(slot, &mut hands.batch);
            hands.entry = held.as_ref().map_or(Entry::None, Entry::from);
            held
        });
        hands.entry = Entry::None;
        held.ok_or_else(|| match self.end_evicted(hands, |_| ()) {
            Ok(()) => AcquireError::forgotten(span),
            // A concurrent forget waits for this, and tries again.
            Err(error) => AcquireError::Unconfirmed { error },
        })
    }
}
