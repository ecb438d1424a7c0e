//! What a domain does where a call below does not return, but panics: addresses at which anything
//! may be mapped are never handed out again, but counted as lost; a range that is queued gets a
//! timer; and where it is not known what is to be invalidated, everything is. A guard does each of
//! these when it is dropped; its holder calls [`done`](Changing::done) instead, once all is known.
//!
//! Guards cost nothing where nothing panics: they are dropped inline, so that none need be in
//! memory. They ask nothing of the mapper or its queue, which may panic again.

use super::Domain;
use crate::addr::IovaRange;
use crate::guard::Guard;
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::Platform;

/// Addresses whose translations are being changed. Dropping it counts them as lost: as it is not
/// known what is mapped there, they are never handed out again.
#[must_use = "dropping it gives the addresses up"]
pub(crate) struct Changing<'a, M: Mapper, P: Platform> {
    pub(super) domain: &'a Domain<M, P>,
    range: IovaRange,
}

impl<M: Mapper, P: Platform> Changing<'_, M, P> {
    pub(crate) fn range(&self) -> IovaRange {
        self.range
    }

    /// Ends the guard, as all is known of the range again. Returns the range.
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

/// What is to be invalidated, while translations are being changed. Dropping it makes that
/// everything, as it is not known how far the change has come.
pub(super) struct Unsure<'a>(pub &'a mut Gather);

impl Unsure<'_> {
    /// Ends the guard: the gather says what is to be invalidated.
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

/// Makes `gather` everything. By itself, so that no caller has another gather on its stack for that.
#[cold]
#[inline(never)]
pub(super) fn gather_everything(gather: &mut Gather) {
    *gather = Gather::everything();
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Guards `range` from here until [`done`](Changing::done): a call may have mapped any part of it, or none.
    #[inline]
    pub(crate) fn changing(&self, range: IovaRange) -> Changing<'_, M, P> {
        Changing { domain: self, range }
    }

    /// From here on until it is done something may be queued whose timer is not asked for. Dropped, the next that is queued asks
    /// for one.
    #[inline]
    pub(super) fn untimed(&self) -> Guard<impl FnMut()> {
        Guard::new(|| self.lose_timer())
    }
}
