//! The life of a domain's addresses, from an allocation to a free. *Unmapped means unreachable* is decided here: addresses are handed out to one
//! caller each, and are free again only if nothing is mapped at them and hardware has nothing of them cached.
//!
//! ```text
//!   alloc --> Reserved --link--> Linked --unlink--> Unlinked --(confirmed)--> free
//! ```
//! If the mapper refuses a list half-way, this becomes of the addresses:
//!
//! | at the addresses is | so they are |
//! |---|---|
//! | nothing | free |
//! | nothing, but the hardware did not confirm it | held until it does, and so is the memory |
//! | another caller's translation, or what the mapper could not remove | leaked: never used again |
//! | it is unknown what, as a call below has panicked | leaked |
//!
//! An unmap that is not confirmed holds the addresses as well. One that finds less than its range mapped leaks what it found, unless that was all that
//! was left of a mapping.

use alloc::vec::Vec;

use super::Domain;
use crate::addr::{Iova, IovaRange};
use crate::domain::MapListError;
use crate::guard::Guard;
use crate::invalidation::{Gather, SLICE};
use crate::iova::{ArenaError, IovaError, Own, RingArena, RingConfig};
use crate::mapper::Mapper;
use crate::platform::{LocalCpu, Platform};
use crate::sync::Ordering;

/// Addresses whose translations a call changes, or which a token owns. Once the outcome is known, the holder calls [`done`](Self::done). If a call
/// below panics instead, this value is dropped. What is mapped at the addresses is unknown then, so the drop leaks and counts them, unless they had
/// leaked before.
///
/// Guards like this one and [`Unsure`] cost nothing without a panic: they are dropped inline, and need no memory. They call neither the mapper nor
/// its queue, which may panic again.
#[must_use = "dropping it gives the addresses up"]
pub(crate) struct Changing<'a, M: Mapper, P: Platform> {
    pub(super) domain: &'a Domain<M, P>,
    pub(super) range: IovaRange,
    /// They have leaked, and are counted.
    pub(super) is_lost: bool,
}

impl<M: Mapper, P: Platform> Changing<'_, M, P> {
    pub(crate) fn range(&self) -> IovaRange {
        self.range
    }

    #[inline]
    pub(crate) fn done(self) -> IovaRange {
        let range = self.range;
        core::mem::forget(self);
        range
    }

    /// Leaks and counts the addresses now.
    pub(super) fn lost(self) -> Self {
        let (domain, range) = (self.domain, self.range);
        drop(self);
        Self { domain, range, is_lost: true }
    }

    /// Frees the addresses, of which devices are confirmed to reach nothing; unless they have leaked. Counts no unmap.
    pub(crate) fn free(self) {
        let domain = self.domain;
        if !self.is_lost {
            domain.with_turn(|_, own| domain.give_back(own, self.done()));
        }
    }

    /// [Holds](Domain::hold) the addresses until a later flush is confirmed. If they have leaked, their bytes count as exposed until then.
    pub(crate) fn hold(self) {
        self.domain.hold(self.range.len(), Some(self));
    }
}

impl<M: Mapper, P: Platform> Drop for Changing<'_, M, P> {
    #[inline]
    fn drop(&mut self) {
        if !self.is_lost {
            self.domain.lose(self.range.len());
        }
    }
}

/// A gather while translations are being changed. Dropping it makes the gather everything, as the extent of the change is unknown.
pub(super) struct Unsure<'a>(pub &'a mut Gather);

impl Unsure<'_> {
    #[inline]
    pub(super) fn done(self) {
        core::mem::forget(self);
    }
}

impl Drop for Unsure<'_> {
    // Out of line, so that no caller has a second gather on its stack.
    #[cold]
    #[inline(never)]
    fn drop(&mut self) {
        *self.0 = Gather::everything();
    }
}

/// What becomes of the addresses at which a list was refused: the table above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Free,
    /// They can be used again once it is confirmed that devices reach nothing of the list.
    Held,
    Lost,
}

/// A list could not be entered into a range that its caller owns.
pub(crate) struct LinkFailed {
    pub error: MapListError,
    /// A device may still reach a part of the list: the memory is held until the hardware confirms. It was added to the caller's gather.
    pub is_reachable: bool,
    pub addresses: Fate,
}

impl LinkFailed {
    /// `is_occupied` says that another caller's translation is at the addresses.
    pub(super) fn new(error: MapListError, is_reachable: bool, is_occupied: bool) -> Self {
        let addresses = match (is_occupied, is_reachable) {
            (true, _) => Fate::Lost,
            (false, true) => Fate::Held,
            (false, false) => Fate::Free,
        };
        Self { error, is_reachable, addresses }
    }
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Guards `range` until [`done`](Changing::done): a call may have mapped any part of it, or none.
    #[inline]
    pub(crate) fn changing(&self, range: IovaRange) -> Changing<'_, M, P> {
        Changing { domain: self, range, is_lost: false }
    }

    /// Takes addresses for `len` bytes. Calls `guarded` on the CPU on which they are taken, and returns its result, which guards them from
    /// then on. If addresses are exhausted, flushes and takes back all deferred ranges, once.
    #[inline(always)]
    pub(super) fn alloc<T>(
        &self,
        len: u64,
        limit: Iova,
        guarded: impl Fn(Option<&LocalCpu<'_>>, IovaRange) -> T + Copy,
    ) -> Result<T, IovaError> {
        match self.space.alloc_fast(&self.platform, (len, limit), guarded) {
            Some(taken) => Ok(taken),
            None => self.alloc_slowly(len, limit, guarded),
        }
    }

    #[cold]
    #[inline(never)]
    fn alloc_slowly<T>(
        &self,
        len: u64,
        limit: Iova,
        guarded: impl Fn(Option<&LocalCpu<'_>>, IovaRange) -> T,
    ) -> Result<T, IovaError> {
        let may_wait = !self.is_at_once();
        let alloc = || self.space.alloc_guarded(&self.platform, (len, limit), may_wait, &guarded);
        match alloc() {
            Err(IovaError::Exhausted { .. }) if may_wait => {
                // Even if this flush fails, ranges of earlier ones are free.
                let _ = self.flush_pending();
                self.reclaim_deferred(None);
                alloc()
            }
            result => {
                if matches!(result, Err(IovaError::Exhausted { .. })) {
                    self.want_maintenance();
                }
                result
            }
        }
    }

    /// Calls `f` with a CPU, if there is one, and with that CPU's cache of addresses in an exclusive section, if it is not revoked.
    pub(super) fn with_turn<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>, Option<Own<'_>>) -> R) -> R {
        self.platform.with_cpu(|cpu| self.space.with_own(cpu, |_, own| f(cpu, own)))
    }

    #[inline]
    pub(super) fn give_back(&self, own: Option<Own<'_>>, range: IovaRange) {
        if !own.is_some_and(|own| self.space.put(own, range)) {
            self.give_back_any(own, range);
        }
    }

    /// The slow path of [`give_back`](Self::give_back), also for a part of a mapping, which is freed with the rest.
    #[cold]
    #[inline(never)]
    fn give_back_any(&self, own: Option<Own<'_>>, range: IovaRange) {
        self.parts.forget(range);
        if !self.space.free_local(own, range)
            && let Some(whole) = self.parts.gone(&self.space, range)
            && !self.space.free_local(own, whole)
        {
            self.lose(whole.len());
        }
    }

    /// Frees all `ranges`, whose unmaps are confirmed, and counts one unmap for each; `neighbours` bytes of them are neighbours. Works in
    /// slices, so that no CPU is held for long. If the platform panics, `ranges` still has what was not freed.
    pub(crate) fn free_all(&self, ranges: &mut Vec<IovaRange>, mut neighbours: u64) {
        loop {
            self.with_turn(|cpu, own| {
                let (slice, book) = (ranges.len().min(SLICE), self.books.of(cpu));
                book.add(|book| &book.unmaps, slice as u64);
                self.change_in(book, core::mem::take(&mut neighbours).wrapping_neg());
                for range in core::iter::from_fn(|| ranges.pop()).take(slice) {
                    self.give_back(own, range);
                }
            });
            if ranges.is_empty() {
                return;
            }
        }
    }

    /// Ends the addresses of `range`, of which only `bytes` were mapped. If these were the rest of a mapping whose other parts were unmapped
    /// before, and they `may_be_free`, the mapping's addresses are free. Otherwise they leak, and so do those earlier parts. If the platform
    /// panics, that is counted nevertheless, without a CPU.
    #[cold]
    #[inline(never)]
    pub(crate) fn end_rest(&self, range: IovaRange, bytes: u64, may_be_free: bool) {
        if self.parts.is_empty() {
            return self.lose(bytes);
        }
        // The guard runs while the CPU is lent; if the platform lends none, it runs without.
        let losing = Guard::new(|| self.lose(bytes.saturating_add(self.parts.forget(range))));
        let rest = self.platform.with_cpu(move |_| {
            (may_be_free && self.parts.was_rest(range, bytes)).then(|| {
                losing.done();
                self.changing(range)
            })
        });
        if let Some(rest) = rest {
            rest.free();
        }
    }

    /// Counts leaked addresses. It borrows no CPU, as the platform might panic and replace the caller's own error; it is slower, but rare.
    #[cold]
    #[inline(never)]
    pub(crate) fn lose(&self, bytes: u64) {
        self.books.of(None).add(|book| &book.lost, bytes);
    }

    /// Makes a ring in the domain's space, of the next colour unless `config` names one. Allocates. Context: as for
    /// [`reserve`](Self::reserve).
    pub(crate) fn new_ring(&self, config: RingConfig) -> Result<RingArena, ArenaError> {
        // Relaxed: only the number counts. Colours repeat after 2^32 rings.
        let next = || self.rings.fetch_add(1, Ordering::Relaxed) as u32;
        let config = RingConfig { colour: config.colour.or_else(|| Some(next())), ..config };
        // No call between the allocation and the arena can panic.
        RingArena::new_by(&self.space, &config, |len, limit| {
            Ok(self.reserve(len, limit)?.divided().into_range())
        })
    }

    /// Frees the addresses of a ring. If some are in use, all leak.
    pub(crate) fn free_ring(&self, arena: RingArena) {
        let changing = self.changing(arena.range());
        if arena.release(&self.space, &self.platform).is_ok() {
            changing.done();
        }
    }
}
