//! The life of addresses, from one allocation to the next, as tokens. *Unmapped means unreachable*
//! is decided here: these addresses become free only out of a token that says that nothing is
//! mapped at them.
//!
//! ```text
//!   reserve --> Reserved --link--> Linked --unlink--> Unlinked --(confirmed)--> free
//! ```
//! The token of a list that was refused half-way says what becomes of its addresses:
//!
//! | what is at the addresses | what becomes of them |
//! |---|---|
//! | nothing | they are free |
//! | nothing, but the hardware did not confirm it | they are held until it does, and so is the memory |
//! | another caller's translation | they are lost: never used again |
//!
//! A token cannot be copied. Where it is dropped, as when a call below panics, its addresses are lost and counted, and what is
//! mapped there can still be unlinked ([`Linked::from_lost`]); where it is forgotten (`mem::forget`), they are lost and not
//! counted.
//!
//! The order of the steps is up to the caller: the tokens do not know which gather was confirmed.
//! If a caller frees addresses before their unlink is confirmed, the device of the next mapping
//! there may reach the memory of this one. That memory is still the caller's by the contract of
//! [`Reserved::link`], so no other memory is reached, but that mapping's I/O goes astray.

use core::fmt;

use super::guards::Unsure;
use super::{Changing, Domain};
use crate::addr::{Iova, IovaRange, PhysSegment};
use crate::domain::{MapListError, Pieces};
use crate::invalidation::{Gather, InvalidationError};
use crate::iova::IovaError;
use crate::mapper::Mapper;
use crate::pgtable::{Attributes, MapError, Unmapped};
use crate::platform::Platform;

/// What is left of a list that was refused.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Remains {
    /// A device may still reach a part of the list: the memory is held until that is confirmed.
    pub reachable: bool,
    /// Another caller's translation is at the addresses.
    pub occupied: bool,
}

/// What becomes of the addresses of a list that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// They can be used again.
    Free,
    /// They can be used again once it is confirmed that no device reaches what was entered.
    Held,
    /// They are never used again.
    Lost,
}

impl Remains {
    /// Returns what the [table](self) above says.
    pub(crate) fn addresses(self) -> Fate {
        match self {
            Self { occupied: true, .. } => Fate::Lost,
            Self { reachable: true, .. } => Fate::Held,
            Self { .. } => Fate::Free,
        }
    }
}

/// The failure to enter a list into a range that its caller has to itself. What is `reachable` was
/// added to the caller's gather.
pub(crate) struct LinkFailed {
    /// Why.
    pub error: MapListError,
    /// What is left of it.
    pub remains: Remains,
}

impl LinkFailed {
    /// What becomes of the `addresses`.
    #[cold]
    pub(super) fn refuse<M: Mapper, P: Platform>(self, addresses: Changing<'_, M, P>) -> Refused<'_, M, P> {
        let Self { error, remains } = self;
        let unlinked = Unlinked::new(addresses, remains.addresses() == Fate::Lost);
        Refused { error, unlinked, is_confirmed: !remains.reachable }
    }

    /// Ends the map for which the `addresses` were taken.
    #[cold]
    #[inline(never)]
    pub(super) fn end<M: Mapper, P: Platform>(self, addresses: Changing<'_, M, P>) -> MapListError {
        self.refuse(addresses).end()
    }
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
    /// `None` where they were lost before.
    addresses: Option<Changing<'d, M, P>>,
    /// Bytes that an unlink has removed where it could not remove all, and bytes that it could not
    /// remove.
    removed: u64,
    kept: u64,
}

/// Addresses of a domain whose translations are removed, while devices may still use what they have cached of them.
///
/// Dropping it loses the addresses. Those at which another caller's translation was met are lost
/// already, and counted.
#[must_use = "dropping it loses the addresses"]
pub struct Unlinked<'d, M: Mapper, P: Platform> {
    domain: &'d Domain<M, P>,
    range: IovaRange,
    /// `None` where they are lost already.
    addresses: Option<Changing<'d, M, P>>,
}

/// A list that was refused, and the addresses that it was to have.
#[must_use = "dropping it loses the addresses"]
pub struct Refused<'d, M: Mapper, P: Platform> {
    /// Why.
    pub error: MapListError,
    /// The addresses, at which nothing of the list is mapped.
    pub unlinked: Unlinked<'d, M, P>,
    /// Whether it is confirmed that no device reaches any of the list. If not, the gather holds
    /// what is to be confirmed.
    pub is_confirmed: bool,
}

/// A token shows its addresses.
macro_rules! debug {
    ($($token:ident),*) => {$(
        impl<M: Mapper, P: Platform> fmt::Debug for $token<'_, M, P> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($token)).field(&self.range()).finish()
            }
        }
    )*};
}

debug!(Reserved, Linked, Unlinked);

impl<M: Mapper, P: Platform> fmt::Debug for Refused<'_, M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl<M: Mapper, P: Platform> fmt::Display for Refused<'_, M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<M: Mapper, P: Platform> core::error::Error for Refused<'_, M, P> {}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Takes addresses for `len` bytes, whole granules as [`pages_of`](Self::pages_of) counts them, at or below `limit`.
    ///
    /// O(1) out of the CPU's free list; otherwise a search of the address space, which may
    /// allocate, and where that is exhausted a flush and another search, which waits for hardware.
    /// The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`IovaError`]: nothing is taken.
    pub fn reserve(&self, len: u64, limit: Iova) -> Result<Reserved<'_, M, P>, IovaError> {
        self.alloc(len, limit, |_, range| self.changing(range)).map(Reserved)
    }

    /// Waits until no device reaches what is in `gather`: one submission to the hardware. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach it.
    pub fn confirm(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.mapper.sync(gather)
    }

    /// Maps the pages of a checked `list` to `range`, which the caller has to itself. Does not
    /// count the map. Adds to `unconfirmed`, which callers have that go on to confirm it, what was entered and removed again without
    /// a confirmation.
    ///
    /// # Safety
    /// As for [`map`](Self::map), until what was [unlinked](Self::unlink) is [confirmed](Self::confirm).
    // By itself, as what it gathers takes much of the stack.
    #[inline(never)]
    pub(crate) unsafe fn link(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        unconfirmed: Option<&mut Gather>,
    ) -> Result<(), LinkFailed> {
        // SAFETY: the caller's promise.
        unsafe { self.link_here(range, list, attributes, unconfirmed) }
    }

    /// As [`link`](Self::link), in the caller's frame.
    ///
    /// # Safety
    /// As [`link`](Self::link).
    #[inline(always)]
    pub(crate) unsafe fn link_here(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        unconfirmed: Option<&mut Gather>,
    ) -> Result<(), LinkFailed> {
        let (mut unsure, mut gather) = (unconfirmed.map(Unsure), Gather::new());
        // SAFETY: the caller's promise.
        let entered = unsafe { self.enter(range, list, attributes, &mut gather) };
        let linked = entered.map_err(|error| {
            let unconfirmed = unsure.as_mut().map(|unsure| &mut *unsure.0);
            self.link_failed(error, &gather, unconfirmed)
        });
        if let Some(unsure) = unsure {
            unsure.done();
        }
        linked
    }

    #[cold]
    #[inline(never)]
    pub(super) fn link_failed(
        &self,
        why: MapError,
        gather: &Gather,
        unconfirmed: Option<&mut Gather>,
    ) -> LinkFailed {
        let occupied = matches!(why, MapError::AlreadyMapped { .. });
        // A device may have used, and cached, what was entered for a moment.
        let (error, reachable) = match self.mapper.sync(gather) {
            Ok(()) => (why.into(), false),
            Err(error) => {
                if let Some(unconfirmed) = unconfirmed {
                    unconfirmed.merge(gather);
                }
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

    /// Returns the addresses, for a caller that keeps them by number and goes on with
    /// [`from_range`](Self::from_range).
    pub fn into_range(self) -> IovaRange {
        self.0.done()
    }

    /// Memory for these addresses that comes piece by piece, none yet: its [list](Pieces::list) is to be [linked](Self::link). O(1).
    pub fn pieces(&self) -> Pieces {
        Pieces::new(self.range(), self.0.domain.granule())
    }

    /// The same addresses, as those of an owner that maps parts of them again and again: no stranger's unmap of these gives them back.
    pub(crate) fn divided(self) -> Self {
        Self(self.0.domain.divided(self.0))
    }

    /// Goes on with addresses of `domain` that [`into_range`](Self::into_range) has returned. It
    /// trusts the caller in that. With other addresses, [`free`](Self::free) could hand out some at
    /// which another caller's memory is still mapped: the next map there is refused, and the
    /// addresses are lost.
    pub fn from_range(domain: &'d Domain<M, P>, range: IovaRange) -> Self {
        Self(domain.changing(range))
    }

    /// Maps the pages of `list` there, which are as many as were reserved. Costs one walk for each
    /// lowest table and one store for each entry; may allocate page tables. Waits for hardware only
    /// where a list that was refused half-way must be undone, where the memory for tables is
    /// exhausted, and where the mapper waits for each map, as [`Domain::map`] says. Where a call
    /// below panics, the memory may stay mapped for the life of the domain. The caller holds no
    /// lock and no CPU.
    ///
    /// # Errors
    /// [`Refused`]: nothing of the list is mapped. What is not confirmed of it is added to
    /// `unconfirmed`.
    ///
    /// # Safety
    /// As for [`Domain::map`], until what was [unlinked](Linked::unlink) is [confirmed](Domain::confirm); after
    /// an error that [says so](Refused::is_confirmed) until `unconfirmed` is.
    pub unsafe fn link(
        self,
        list: &[PhysSegment],
        attributes: impl Into<Attributes>,
        unconfirmed: &mut Gather,
    ) -> Result<Linked<'d, M, P>, Refused<'d, M, P>> {
        match self.0.domain.pages_of(list) {
            // SAFETY: the caller's promise.
            Ok(_) => unsafe { self.link_checked(list, attributes.into(), unconfirmed) },
            Err(error) => Err(Refused { error, unlinked: Unlinked::new(self.0, false), is_confirmed: true }),
        }
    }

    /// As [`link`](Self::link), for a list that [`pages_of`](Domain::pages_of) has checked.
    ///
    /// # Safety
    /// As for [`link`](Self::link).
    #[inline]
    unsafe fn link_checked(
        self,
        list: &[PhysSegment],
        attributes: Attributes,
        unconfirmed: &mut Gather,
    ) -> Result<Linked<'d, M, P>, Refused<'d, M, P>> {
        let Self(addresses) = self;
        let (domain, range) = (addresses.domain, addresses.range());
        // SAFETY: the caller's promise.
        match unsafe { domain.link(range, list, attributes, Some(unconfirmed)) } {
            Ok(()) => {
                domain.platform.with_cpu(|cpu| domain.books.of(cpu).add(|book| &book.maps, 1));
                Ok(Linked { domain, range, addresses: Some(addresses), removed: 0, kept: 0 })
            }
            Err(failed) => Err(failed.refuse(addresses)),
        }
    }

    /// Gives the addresses back, at which nothing was mapped. Cost and context as for
    /// [`Unlinked::free`].
    pub fn free(self) {
        Unlinked::new(self.0, false).free();
    }
}

impl<'d, M: Mapper, P: Platform> Refused<'d, M, P> {
    /// Frees the addresses, or has them wait until a later flush is confirmed. Returns why the list
    /// was refused. Waits for no hardware; the caller holds no lock and no CPU.
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

    /// Bytes that the last [unlink](Self::unlink) could not remove: devices still reach them. It is
    /// 0 before any.
    pub fn kept(&self) -> u64 {
        self.kept
    }

    /// Returns the addresses, at which the memory stays mapped, for a caller that keeps them by
    /// number and goes on with [`from_range`](Self::from_range).
    #[inline]
    pub fn into_range(self) -> IovaRange {
        self.addresses.map_or(self.range, Changing::done)
    }

    /// Goes on with addresses of `domain` that [`into_range`](Self::into_range) has returned. It trusts the caller in that, as
    /// [`Domain::unmap`] does.
    pub fn from_range(domain: &'d Domain<M, P>, range: IovaRange) -> Self {
        Self { domain, range, addresses: Some(domain.changing(range)), removed: 0, kept: 0 }
    }

    /// Goes on with addresses of `domain` whose token was dropped while memory was mapped there,
    /// where a call below panicked for example. They are lost, and counted:
    /// [`unlink`](Self::unlink) removes what is left there, and this token neither counts them
    /// again nor frees them. It trusts the caller in that, as [`Domain::unmap`] does.
    pub fn from_lost(domain: &'d Domain<M, P>, range: IovaRange) -> Self {
        Self { domain, range, addresses: None, removed: 0, kept: 0 }
    }

    /// Removes the translations, and adds them to `gather`. Devices may reach the memory until
    /// `gather` is [confirmed](Domain::confirm). Where another caller has removed a part of them,
    /// by number, `gather` has everything, and the addresses are [lost](Unlinked::is_lost).
    ///
    /// It counts as an unmap where it has removed all, and the addresses are not lost. Costs one
    /// walk for each lowest table, and one store for each entry. Waits for nothing and allocates
    /// nothing where all that one `link` mapped is unlinked; a large page that the range covers
    /// only in part is split first, which may do both (see [`Mapper::unmap`]). The caller holds no
    /// lock and no CPU.
    ///
    /// # Errors
    /// The token itself, as a part is still linked: a large page could not be split, for want of
    /// memory, say. Devices still reach the bytes that are [kept](Self::kept). What was removed is
    /// in `gather`; unlink the rest again.
    pub fn unlink(self, gather: &mut Gather) -> Result<Unlinked<'d, M, P>, Self> {
        let Self { domain, range, addresses, removed, .. } = self;
        let Unmapped { bytes, kept, .. } = domain.unlink(range, gather);
        let removed = removed.saturating_add(bytes);
        if kept > 0 {
            return Err(Self { domain, range, addresses, removed, kept });
        }
        let Some(addresses) = addresses else {
            return Ok(Unlinked { domain, range, addresses: None });
        };
        if removed == range.len() {
            domain.platform.with_cpu(|cpu| domain.books.of(cpu).add(|book| &book.unmaps, 1));
            return Ok(Unlinked { domain, range, addresses: Some(addresses) });
        }
        // Another caller has removed the rest, and taken that part of the addresses with it.
        addresses.done();
        domain.lose_rest(range, removed);
        Ok(Unlinked { domain, range, addresses: None })
    }
}

impl<'d, M: Mapper, P: Platform> Unlinked<'d, M, P> {
    /// Makes the token. Addresses that are lost are counted here.
    fn new(addresses: Changing<'d, M, P>, is_lost: bool) -> Self {
        let (domain, range) = (addresses.domain, addresses.range());
        Self { domain, range, addresses: (!is_lost).then_some(addresses) }
    }

    /// The addresses.
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// Returns whether the addresses are never used again: another caller's translation was met
    /// there, or another caller has removed a part of this one's.
    pub fn is_lost(&self) -> bool {
        self.addresses.is_none()
    }

    /// Returns the addresses, and whether they are [lost](Self::is_lost), for a caller that keeps
    /// them by number until what was unlinked is confirmed, and goes on with
    /// [`from_range`](Self::from_range).
    pub fn into_range(self) -> (IovaRange, bool) {
        (self.range, self.addresses.map(Changing::done).is_none())
    }

    /// Goes on with addresses of `domain` that [`into_range`](Self::into_range) has returned. It trusts the caller in that, as
    /// [`Reserved::from_range`] does.
    pub fn from_range(domain: &'d Domain<M, P>, (range, is_lost): (IovaRange, bool)) -> Self {
        Self { domain, range, addresses: (!is_lost).then(|| domain.changing(range)) }
    }

    /// Gives the addresses back, for other callers to use, unless they are lost. The caller has
    /// [confirmed](Domain::confirm) the gather that [`unlink`](Linked::unlink) added them to: if it
    /// frees them earlier, a device that uses their next mapping may still reach the memory of this
    /// one. O(1), or, where the CPU keeps its share of addresses already, O(log n) for each of up
    /// to 64 ranges that go back to all. Waits for no hardware, allocates nothing; the caller holds
    /// no lock and no CPU.
    pub fn free(self) {
        let Self { domain, addresses, .. } = self;
        if let Some(addresses) = addresses {
            domain.take_back(addresses);
        }
    }

    /// Keeps the addresses out of use until a later flush is confirmed, which the domain tries
    /// again and again: for what the hardware did not confirm. What is lost stays so, and counts as
    /// exposed until then; where the flush queue has no room, the addresses are lost. O(1), waits
    /// for no hardware; the caller holds no lock and no CPU.
    pub fn quarantine(self) {
        let Self { domain, range, addresses, .. } = self;
        match addresses {
            Some(addresses) => domain.quarantine(addresses),
            None => domain.leave_open(range.len()),
        }
    }
}
