//! Guards for calls that may panic. Addresses at which anything may be mapped leak, and are counted; a queued range gets a timer; and an
//! incomplete gather becomes everything. A guard does this when it is dropped. Its holder calls [`done`](Changing::done) once the outcome
//! is known.
//!
//! Guards cost nothing without a panic: they are dropped inline, and need no memory. They call neither the mapper nor its queue, which may
//! panic again.

use super::Domain;
use crate::addr::IovaRange;
use crate::guard::Guard;
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::Platform;

/// Addresses whose translations are being changed. Dropping it leaks and counts them, as the state of the translations is unknown.
#[must_use = "dropping it gives the addresses up"]
pub(crate) struct Changing<'a, M: Mapper, P: Platform> {
    pub(super) domain: &'a Domain<M, P>,
    range: IovaRange,
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
}

impl<M: Mapper, P: Platform> Drop for Changing<'_, M, P> {
    #[inline]
    fn drop(&mut self) {
        self.domain.lose(self.range.len());
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
    #[cold]
    fn drop(&mut self) {
        gather_everything(self.0);
    }
}

/// Out of line, so that no caller has a second gather on its stack.
#[cold]
#[inline(never)]
pub(super) fn gather_everything(gather: &mut Gather) {
    *gather = Gather::everything();
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Guards `range` until [`done`](Changing::done): a call may have mapped any part of it, or none.
    #[inline]
    pub(crate) fn changing(&self, range: IovaRange) -> Changing<'_, M, P> {
        Changing { domain: self, range }
    }

    /// Guards a range that is queued and has no timer yet. Dropped, it makes the next queued range ask for one.
    #[inline]
    pub(super) fn untimed(&self) -> Guard<impl FnMut()> {
        Guard::new(|| self.lose_timer())
    }
}
