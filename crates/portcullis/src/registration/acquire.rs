//! Acquiring: what is there is lent, what is not is mapped, and room is made for it where there is none.

use super::RegistrationCache;
use super::config::{Keep, Registration};
use super::error::AcquireError;
use super::index::Span;
use super::state::{Batch, Claim, Held, Step};
use crate::addr::{Direction, Iova, IovaRange};
use crate::domain::{LinkFailed, MapListError, PhysSegment, Tally};
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::Platform;
use crate::sync::pause;

impl<M: Mapper, P: Platform> RegistrationCache<M, P> {
    /// Holds `memory`, mapped for `direction`. A hit, where it is part of an entry that is [kept](Keep::UntilForgotten)
    /// or is just the range of another, changes no translation and waits for nothing but the cache's lock: O(log n).
    /// Asked to be kept, an entry of just this range is kept from then on.
    ///
    /// A miss maps the whole granules of `memory`, as [`Domain::map`](crate::domain::Domain::map) does; it may
    /// allocate. Where the limits leave no room, idle entries are unmapped first, the least recently used ones, and the
    /// hardware has confirmed that before the new one is mapped: one invalidation, or one for each 64 entries that have
    /// to go for a large one. Where others are unmapping what will make the room, it waits for them. CPUs that miss the
    /// same range at the same time may map it once each. The caller holds no lock and no slot.
    ///
    /// # Errors
    /// [`AcquireError`]: nothing is held, and the entry is not mapped.
    ///
    /// # Safety
    /// As for [`Domain::map`](crate::domain::Domain::map), for as long as the device may reach the memory by the table of the
    /// [module](crate::registration): until a [`forget`](Self::forget) of it has returned `Ok`; or, where all who acquired it did so
    /// [`WhileHeld`](Keep::WhileHeld), until the [`release`](Self::release) of the last of them has. After an error it goes on for
    /// what is unconfirmed only, until a [flush](crate::domain::Domain::flush) has returned `Ok`.
    #[inline]
    pub unsafe fn acquire(
        &self,
        memory: PhysSegment,
        direction: Direction,
        keep: Keep,
    ) -> Result<Registration, AcquireError> {
        let hit = Span::new(memory, direction.permissions())
            .and_then(|span| self.with(|state| state.hit(&span, keep)));
        match hit {
            Some(held) => Ok(self.registration(held, memory.len)),
            None => {
                // SAFETY: the caller's promise.
                let held = unsafe { self.acquire_missing(memory, direction, keep) }?;
                Ok(self.registration(held, memory.len))
            }
        }
    }

    fn registration(&self, held: Held, len: u64) -> Registration {
        let Held { slot, generation, iova, whole } = held;
        Registration { iova, len, cache: self.number, slot, generation, whole }
    }

    /// # Safety
    /// As for [`acquire`](Self::acquire).
    #[cold]
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
        let mut batch = Batch::new();
        loop {
            let claim = &mut making.claim;
            match self.with(|state| state.step((&span, bytes, keep), claim, &mut batch)) {
                Step::Hit(held) => return Ok(held),
                // SAFETY: the caller's promise.
                Step::Reserved(slot) => return unsafe { self.map(slot, &span, bytes) },
                Step::Failed(error) => return Err(error),
                Step::Wait => pause(),
                Step::Evict => {
                    // What becomes free is this caller's before anybody else sees it.
                    let settled = self.bury(&mut batch, |state| state.top_up(claim, bytes));
                    settled.map_err(|error| AcquireError::Eviction { error })?;
                }
            }
        }
    }

    /// Maps what was reserved.
    ///
    /// # Safety
    /// As for [`acquire`](Self::acquire).
    unsafe fn map(&self, slot: u32, span: &Span, bytes: u64) -> Result<Held, AcquireError> {
        let domain = self.device.domain();
        // Already here: where addresses are short, what was deferred is confirmed for them.
        let mut linking = Linking { cache: self, slot, range: None };
        let range = domain.reserve(bytes, Iova::new(self.device.mask()))?;
        let mut unconfirmed = Gather::new();
        linking.range = Some(range);
        // SAFETY: the caller's promise.
        let linked = unsafe { domain.link(range, &[span.memory()], span.permissions(), &mut unconfirmed) };
        // It has come back.
        core::mem::forget(linking);
        if let Err(LinkFailed { error, unconfirmed, occupied }) = linked {
            self.with(|state| {
                let entry = state.slots.at_mut(slot);
                (entry.range, entry.lost) = (Some(range), occupied);
                state.not_mapped(slot, unconfirmed);
            });
            if !unconfirmed {
                self.give_back(range, occupied, 0);
            }
            return Err(error.into());
        }
        domain.settle(Tally { maps: 1, ..Tally::default() });
        let mut batch = Batch::new();
        let held = self.with(|state| {
            state.slots.at_mut(slot).range = Some(range);
            state.mapped(slot, &mut batch)
        });
        held.ok_or_else(|| {
            // Whoever had it forgotten waits for this, and tries again where the hardware does not confirm.
            let _ = self.bury(&mut batch, |_| ());
            AcquireError::forgotten(span)
        })
    }
}

/// Room that is set aside; given up when this is dropped, also where a mapper panics.
struct MakingRoom<'a, M: Mapper, P: Platform> {
    cache: &'a RegistrationCache<M, P>,
    claim: Claim,
}

impl<M: Mapper, P: Platform> Drop for MakingRoom<'_, M, P> {
    fn drop(&mut self) {
        if !self.claim.is_empty() {
            self.cache.with(|state| state.unclaim(&mut self.claim));
        }
    }
}

/// An entry that is being mapped. Dropped where it gets no addresses, and where the mapper panics.
struct Linking<'a, M: Mapper, P: Platform> {
    cache: &'a RegistrationCache<M, P>,
    slot: u32,
    /// Its addresses, once it has some.
    range: Option<IovaRange>,
}

impl<M: Mapper, P: Platform> Drop for Linking<'_, M, P> {
    fn drop(&mut self) {
        self.cache.with(|state| {
            state.slots.at_mut(self.slot).range = self.range;
            state.abandon(self.slot, true);
        });
    }
}
