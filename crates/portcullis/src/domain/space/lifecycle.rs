//! The life of addresses, from one allocation to the next:
//!
//! ```text
//!   reserve --> Reserved --link--> Linked --unlink--> Unlinked --(confirmed)--> free
//! ```
//! *Unmapped means unreachable* is decided here: addresses become free only out of a token that says that nothing is mapped at
//! them, and a list that was refused half-way says by its token what becomes of them:
//!
//! | what is at the addresses | what becomes of them |
//! |---|---|
//! | nothing | they are free |
//! | nothing, but the hardware did not confirm it | they are held until it does, and so is the memory |
//! | another's translation | they are lost: never used again, and counted |
//!
//! A token cannot be copied. Dropped, where a call below panics for example, its addresses are
//! lost; what is mapped there can still be unlinked ([`Linked::from_lost`]).

use super::guards::Unsure;
use super::{Changing, Domain};
use crate::addr::{Iova, IovaRange, Permissions};
use crate::domain::{MapListError, PhysSegment};
use crate::invalidation::{Gather, InvalidationError};
use crate::iova::IovaError;
use crate::mapper::Mapper;
use crate::pgtable::{MapError, Unmapped};
use crate::platform::Platform;

/// What a list that was refused has left behind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Remains {
    /// A device may still reach a part of the list: the memory is held until that is confirmed.
    pub reachable: bool,
    /// Another's translation is at the addresses.
    pub occupied: bool,
}

/// What becomes of the addresses of a list that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// They can be used again.
    Free,
    /// They can be, once it is confirmed that no device reaches what was entered.
    Held,
    /// They are never used again.
    Lost,
}

impl Remains {
    /// By the [table](self) above.
    pub(crate) fn addresses(self) -> Fate {
        match self {
            Self { occupied: true, .. } => Fate::Lost,
            Self { reachable: true, .. } => Fate::Held,
            Self { .. } => Fate::Free,
        }
    }
}

/// A list that was not entered into a caller's own range. What is `reachable` was added to the caller's gather.
pub(crate) struct LinkFailed {
    /// Why.
    pub error: MapListError,
    /// What is left of it.
    pub remains: Remains,
}

/// Addresses of a domain at which nothing is mapped.
///
/// Dropping it loses them: they are never used again, and
/// [counted](crate::domain::DomainStats::lost_iova_bytes).
#[must_use = "dropping it loses the addresses"]
pub struct Reserved<'d, M: Mapper, P: Platform>(Changing<'d, M, P>);

/// Addresses of a domain at which a list of memory is mapped.
///
/// Dropping it leaves the memory mapped, and counts the addresses as lost:
/// [`from_lost`](Self::from_lost) leads back to it.
#[must_use = "dropping it leaves the memory mapped"]
pub struct Linked<'d, M: Mapper, P: Platform> {
    domain: &'d Domain<M, P>,
    range: IovaRange,
    /// `None` where they are lost.
    addresses: Option<Changing<'d, M, P>>,
}

/// Addresses of a domain whose translations are removed, while devices may still use what they have cached of them.
///
/// Dropping it loses the addresses. Those at which another's translation was met are lost already, and counted.
#[must_use = "dropping it loses the addresses"]
pub struct Unlinked<'d, M: Mapper, P: Platform> {
    domain: &'d Domain<M, P>,
    range: IovaRange,
    /// `None` where they are lost.
    addresses: Option<Changing<'d, M, P>>,
    /// What it counts as when it is free: 0 or 1.
    unmaps: u64,
}

/// A list that was refused, and the addresses that it was to have.
#[must_use = "dropping it loses the addresses"]
pub struct Refused<'d, M: Mapper, P: Platform> {
    /// Why.
    pub error: MapListError,
    /// The addresses, at which nothing of the list is mapped.
    pub unlinked: Unlinked<'d, M, P>,
    /// Whether it is confirmed that no device reaches any of the list. If not, the gather has what must be.
    pub is_confirmed: bool,
}

/// An unlink that could not remove everything: the mapper had to split a large page, and had no memory for it, say.
#[must_use = "dropping it leaves the memory mapped"]
pub struct StillMapped<'d, M: Mapper, P: Platform> {
    /// What is still linked, in part.
    pub linked: Linked<'d, M, P>,
    /// Bytes of it that devices still reach.
    pub kept: u64,
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Takes addresses for `len` bytes, whole granules as [`pages_of`](Self::pages_of) counts them, at or below `limit`.
    ///
    /// O(1) out of the CPU's free list; else a search of the address space, which flushes once where it is exhausted, and waits
    /// for hardware then. The caller holds no lock and no slot.
    ///
    /// # Errors
    /// [`IovaError`]: nothing is taken.
    pub fn reserve(&self, len: u64, limit: Iova) -> Result<Reserved<'_, M, P>, IovaError> {
        self.alloc(len, limit).map(Reserved)
    }

    /// Waits until no device reaches what is in `gather`. The caller holds no lock and no slot.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach it.
    pub fn confirm(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.mapper.sync(gather)
    }

    /// Maps the pages of a checked `list` to `range`, which the caller has to itself. Counts nothing. Adds to
    /// `unconfirmed` what was entered, removed again, and not confirmed.
    ///
    /// # Safety
    /// As for [`map`](Self::map), until what was [unlinked](Self::unlink) is [confirmed](Self::confirm).
    #[inline]
    pub(crate) unsafe fn link(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        permissions: Permissions,
        unconfirmed: &mut Gather,
    ) -> Result<(), LinkFailed> {
        let (unsure, mut gather) = (Unsure(unconfirmed), Gather::new());
        // SAFETY: the caller's promise.
        let entered = unsafe { self.enter(range, list, permissions, &mut gather) };
        let linked = entered.map_err(|error| self.link_failed(error, &gather, unsure.0));
        unsure.done();
        linked
    }

    #[cold]
    fn link_failed(&self, error: MapError, gather: &Gather, unconfirmed: &mut Gather) -> LinkFailed {
        let occupied = matches!(error, MapError::AlreadyMapped { .. });
        // A device may have used, and cached, what was entered for a moment.
        let (error, reachable) = match self.mapper.sync(gather) {
            Ok(()) => (error.into(), false),
            Err(error) => {
                unconfirmed.merge(gather);
                (MapListError::Unconfirmed { error }, true)
            }
        };
        LinkFailed { error, remains: Remains { reachable, occupied } }
    }
}

impl<'d, M: Mapper, P: Platform> Reserved<'d, M, P> {
    /// The addresses.
    pub fn range(&self) -> IovaRange {
        self.0.range()
    }

    /// The addresses: the caller keeps them by number, and goes on with [`from_range`](Self::from_range).
    pub fn into_range(self) -> IovaRange {
        self.0.done()
    }

    /// Goes on with addresses of `domain` that [`into_range`](Self::into_range) has returned. It trusts the caller in that, as
    /// [`Domain::unmap`] does.
    pub fn from_range(domain: &'d Domain<M, P>, range: IovaRange) -> Self {
        Self(domain.changing(range))
    }

    /// Maps the pages of `list` there, which are as many as were reserved. One walk for each lowest table; may allocate page
    /// tables. Waits for hardware only where a list that was refused half-way must be undone.
    ///
    /// # Errors
    /// [`Refused`]: nothing of the list is mapped. What of it is not confirmed is added to `unconfirmed`.
    ///
    /// # Safety
    /// As for [`Domain::map`], until what was [unlinked](Linked::unlink) is [confirmed](Domain::confirm); after
    /// an error that [says so](Refused::is_confirmed) until `unconfirmed` is.
    pub unsafe fn link(
        self,
        list: &[PhysSegment],
        permissions: Permissions,
        unconfirmed: &mut Gather,
    ) -> Result<Linked<'d, M, P>, Refused<'d, M, P>> {
        match self.0.domain.pages_of(list) {
            // SAFETY: the caller's promise.
            Ok(_) => unsafe { self.link_checked(list, permissions, unconfirmed) },
            Err(error) => {
                Err(Refused { error, unlinked: Unlinked::new(self.0, false, 0), is_confirmed: true })
            }
        }
    }

    /// The same of a list that [`pages_of`](Domain::pages_of) has checked.
    ///
    /// # Safety
    /// As for [`link`](Self::link).
    #[inline]
    pub(super) unsafe fn link_checked(
        self,
        list: &[PhysSegment],
        permissions: Permissions,
        unconfirmed: &mut Gather,
    ) -> Result<Linked<'d, M, P>, Refused<'d, M, P>> {
        let Self(addresses) = self;
        let domain = addresses.domain;
        // SAFETY: the caller's promise.
        match unsafe { domain.link(addresses.range(), list, permissions, unconfirmed) } {
            Ok(()) => {
                domain.platform.with_slot(|slot| domain.books.of(slot).add(|book| &book.maps, 1));
                Ok(Linked { domain, range, addresses: Some(addresses) })
            }
            Err(LinkFailed { error, remains }) => {
                let is_lost = remains.addresses() == Fate::Lost;
                let unlinked = Unlinked::new(addresses, is_lost, 0);
                Err(Refused { error, unlinked, is_confirmed: !remains.reachable })
            }
        }
    }

    /// Gives the addresses back, with which nothing was done.
    pub fn free(self) {
        Unlinked::new(self.0, false, 0).free();
    }
}

impl<'d, M: Mapper, P: Platform> Refused<'d, M, P> {
    /// Frees the addresses, or has them wait until a later flush is confirmed. Returns why the list was refused.
    #[cold]
    pub fn end(self) -> MapListError {
        let Self { error, unlinked, is_confirmed } = self;
        if is_confirmed {
            unlinked.free()
        } else {
            unlinked.quarantine()
        }
        error
    }
}

impl<'d, M: Mapper, P: Platform> Linked<'d, M, P> {
    /// The addresses.
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// The addresses, at which the memory stays mapped: the caller keeps them by number, and goes on with
    /// [`from_range`](Self::from_range).
    #[inline]
    pub fn into_range(self) -> IovaRange {
        self.addresses.map_or(self.range, Changing::done)
    }

    /// Goes on with addresses of `domain` that [`into_range`](Self::into_range) has returned. It trusts the caller in that, as
    /// [`Domain::unmap`] does.
    pub fn from_range(domain: &'d Domain<M, P>, range: IovaRange) -> Self {
        Self { domain, range, addresses: Some(domain.changing(range)) }
    }

    /// Goes on with addresses of `domain` whose token was dropped while memory was mapped there,
    /// where a call below panicked for example. They are lost, and counted:
    /// [`unlink`](Self::unlink) removes what is left there, and this token neither counts them
    /// again nor frees them. It trusts the caller in that, as [`Domain::unmap`] does.
    pub fn from_lost(domain: &'d Domain<M, P>, range: IovaRange) -> Self {
        Self { domain, range, addresses: None }
    }

    /// Removes the translations, and adds them to `gather`. Devices reach the memory until `gather` is
    /// [confirmed](Domain::confirm). Where another caller has removed a part of them, by number, `gather` has everything, and the
    /// addresses are [lost](Unlinked::is_lost).
    ///
    /// One walk for each lowest table, one store for each page. Waits for nothing and allocates nothing.
    ///
    /// # Errors
    /// [`StillMapped`]: try again.
    pub fn unlink(self, gather: &mut Gather) -> Result<Unlinked<'d, M, P>, StillMapped<'d, M, P>> {
        let Self { domain, range, .. } = self;
        let Unmapped { bytes, kept, .. } = domain.unlink(range, gather);
        if kept > 0 {
            return Err(StillMapped { linked: self, kept });
        }
        let addresses = self.addresses.filter(|_| bytes == range.len());
        Ok(Unlinked { domain, range, addresses, unmaps: 1 })
    }
}

impl<'d, M: Mapper, P: Platform> Unlinked<'d, M, P> {
    fn new(addresses: Changing<'d, M, P>, is_lost: bool, unmaps: u64) -> Self {
        let (domain, range) = (addresses.domain, addresses.range());
        Self { domain, range, addresses: (!is_lost).then_some(addresses), unmaps }
    }

    /// The addresses.
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// Returns whether another's translation was met at the addresses, or another has removed some of this one: they are
    /// never used again.
    pub fn is_lost(&self) -> bool {
        self.addresses.is_none()
    }

    /// The addresses, and whether they are [lost](Self::is_lost): the caller keeps them by number until what was unlinked is
    /// confirmed, and goes on with [`from_range`](Self::from_range).
    pub fn into_range(self) -> (IovaRange, bool) {
        (self.range, self.addresses.map(Changing::done).is_none())
    }

    /// Goes on with addresses of `domain` that [`into_range`](Self::into_range) has returned. It trusts the caller in that, as
    /// [`Domain::unmap`] does.
    pub fn from_range(domain: &'d Domain<M, P>, (range, is_lost): (IovaRange, bool)) -> Self {
        Self { domain, range, addresses: (!is_lost).then(|| domain.changing(range)), unmaps: 1 }
    }

    /// Gives the addresses back, for others to use, unless they are lost. The caller has seen the gather that
    /// [`unlink`](Linked::unlink) added them to [confirmed](Domain::confirm); addresses that are freed before lead the device
    /// to the memory that was mapped there, when it is to reach what is mapped there next.
    pub fn free(self) {
        let Self { domain, addresses, unmaps, .. } = self;
        if let Some(addresses) = addresses {
            domain.take_back(addresses, unmaps);
        }
    }

    /// Keeps the addresses out of use until a later flush is confirmed, which the domain tries again and again: for what the
    /// hardware did not confirm. What is lost stays so, and counts as exposed until then.
    pub fn quarantine(self) {
        let Self { domain, range, addresses, .. } = self;
        match addresses {
            Some(addresses) => domain.quarantine(addresses),
            None => domain.leave_open(range.len()),
        }
    }
}
