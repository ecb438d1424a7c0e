//! Addresses as tokens, for callers that combine the steps of their life: [`Reserved`], [`Linked`], [`Unlinked`], and free or held
//! (`lifecycle.rs`).
//!
//! Tokens are not copied. A dropped token (a call below may have panicked) leaks and counts its addresses, and a mapping there can still be
//! unlinked ([`Linked::from_lost`]). A forgotten token (`mem::forget`) leaks them uncounted.
//!
//! The caller keeps the order of the steps: tokens do not know which gather was confirmed. If a caller frees addresses before their unlink
//! is confirmed, the device of the next mapping there may reach the memory of this one. That memory is still the caller's by the contract
//! of [`Reserved::link`], so no other memory is reached, but the I/O of the next mapping goes astray.

use core::fmt;

use super::Domain;
use super::lifecycle::{Changing, Fate, LinkFailed};
use crate::addr::{Iova, IovaRange, PhysSegment};
use crate::broken::broken;
use crate::domain::{MapListError, Pieces};
use crate::invalidation::{Gather, InvalidationError};
use crate::iova::IovaError;
use crate::mapper::Mapper;
use crate::pgtable::{Attributes, Unmapped};
use crate::platform::Platform;

/// Addresses of a domain at which nothing is mapped. Dropping it leaks them, and [counts](crate::domain::DomainStats::lost_iova_bytes)
/// them.
#[must_use = "dropping it loses the addresses"]
pub struct Reserved<'d, M: Mapper, P: Platform>(Changing<'d, M, P>);

/// Addresses of a domain at which a list of memory is mapped. Dropping it leaves the memory mapped, and leaks and counts the addresses:
/// [`from_lost`](Self::from_lost) leads back to it.
#[must_use = "dropping it leaves the memory mapped"]
pub struct Linked<'d, M: Mapper, P: Platform> {
    addresses: Changing<'d, M, P>,
    /// After an incomplete unlink: bytes that were removed, and bytes that could not be.
    removed: u64,
    kept: u64,
}

/// Addresses of a domain whose translations are removed, while devices may still use cached ones. Dropping it leaks the addresses. If
/// another caller's translation was found there, they have already leaked and been counted.
#[must_use = "dropping it loses the addresses"]
pub struct Unlinked<'d, M: Mapper, P: Platform>(Changing<'d, M, P>);

/// A refused list, and its addresses.
#[must_use = "dropping it loses the addresses"]
pub struct Refused<'d, M: Mapper, P: Platform> {
    /// Why.
    pub error: MapListError,
    /// The addresses, at which nothing of the list is mapped.
    pub unlinked: Unlinked<'d, M, P>,
    /// Whether it is confirmed that devices reach nothing of the list. If not, the gather has what is to be confirmed.
    pub is_confirmed: bool,
}

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
    /// Takes addresses for `len` bytes, whole granules as [`pages_of`](Self::pages_of) counts them, at or below `limit`. O(1) from the
    /// CPU's cache; otherwise a search of the address space.
    ///
    /// Context: a search may allocate; if addresses are exhausted it flushes and searches again, which waits for hardware. The caller holds
    /// no lock and no CPU.
    ///
    /// # Errors
    /// [`IovaError`]: nothing is taken.
    pub fn reserve(&self, len: u64, limit: Iova) -> Result<Reserved<'_, M, P>, IovaError> {
        self.alloc(len, limit, |_, range| self.changing(range)).map(Reserved)
    }

    /// Waits until devices do not reach what is in `gather`: one submission. Context: waits for hardware. The caller holds no lock and no
    /// CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach it.
    pub fn confirm(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.mapper.sync(gather)
    }
}

impl<'d, M: Mapper, P: Platform> Reserved<'d, M, P> {
    /// The addresses.
    pub fn range(&self) -> IovaRange {
        self.0.range()
    }

    /// Returns the addresses, for a caller that records them and later calls [`from_range`](Self::from_range).
    pub fn into_range(self) -> IovaRange {
        self.0.done()
    }

    /// An empty list of pieces for these addresses: [link](Self::link) its [list](Pieces::list). O(1).
    pub fn pieces(&self) -> Pieces {
        Pieces::new(self.range(), self.0.domain.granule())
    }

    /// The same addresses, for an owner that maps parts of them repeatedly: no other caller's unmap of parts frees them.
    pub(crate) fn divided(self) -> Self {
        if !self.0.domain.space.divide(self.range()) {
            broken("addresses that a caller holds are handed out");
        }
        self
    }

    /// The token of addresses of `domain` that [`into_range`](Self::into_range) has returned. The caller guarantees this; it is not
    /// checked. With other addresses, [`free`](Self::free) could hand out a range at which another caller's memory is mapped: the next map
    /// there is refused, and the addresses leak.
    pub fn from_range(domain: &'d Domain<M, P>, range: IovaRange) -> Self {
        Self(domain.changing(range))
    }

    /// Maps the pages of `list` there, exactly as many as were reserved. Costs one walk for each leaf table and one store for each entry.
    ///
    /// Context: may allocate page tables. Waits for hardware only if a list is undone, if memory for tables is exhausted, and if the mapper
    /// waits for each map, as [`Domain::map`] says. If a call below panics, the memory may stay mapped for the life of the domain. The
    /// caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`Refused`]: nothing of the list is mapped. What is not confirmed of it is added to `unconfirmed`.
    ///
    /// # Safety
    /// As for [`Domain::map`], clauses 1 to 3. The mapping lasts until its [unlink](Linked::unlink) is [confirmed](Domain::confirm); after
    /// an error that is not [confirmed](Refused::is_confirmed), until `unconfirmed` is.
    pub unsafe fn link(
        self,
        list: &[PhysSegment],
        attributes: impl Into<Attributes>,
        unconfirmed: &mut Gather,
    ) -> Result<Linked<'d, M, P>, Refused<'d, M, P>> {
        let Self(addresses) = self;
        let domain = addresses.domain;
        if let Err(error) = domain.pages_of(list) {
            return Err(Refused::new(LinkFailed::new(error, false, false), addresses));
        }
        // SAFETY: clauses 1 to 3 are the caller's; the list is checked, and the token owns the range.
        match unsafe { domain.link(addresses.range, list, attributes.into(), Some(unconfirmed)) } {
            Ok(()) => {
                domain.count_one(|book| &book.maps);
                Ok(Linked { addresses, removed: 0, kept: 0 })
            }
            Err(failed) => Err(Refused::new(failed, addresses)),
        }
    }

    /// Frees the addresses. Cost and context as for [`Unlinked::free`].
    pub fn free(self) {
        self.0.free();
    }
}

impl<'d, M: Mapper, P: Platform> Refused<'d, M, P> {
    #[cold]
    pub(super) fn new(failed: LinkFailed, addresses: Changing<'d, M, P>) -> Self {
        let LinkFailed { error, is_reachable, addresses: fate } = failed;
        let addresses = if fate == Fate::Lost { addresses.lost() } else { addresses };
        Self { error, unlinked: Unlinked(addresses), is_confirmed: !is_reachable }
    }

    /// Frees the addresses, or holds them until a later flush is confirmed. Returns why the list was refused. Context: does not wait for
    /// hardware. The caller holds no lock and no CPU.
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
        self.addresses.range
    }

    /// Bytes that the last [unlink](Self::unlink) could not remove: devices still reach them. 0 before any.
    pub fn kept(&self) -> u64 {
        self.kept
    }

    /// Returns the addresses, at which the memory stays mapped, for a caller that records them and later calls
    /// [`from_range`](Self::from_range).
    #[inline]
    pub fn into_range(self) -> IovaRange {
        self.addresses.done()
    }

    /// The token of addresses of `domain` that [`into_range`](Self::into_range) has returned. The caller guarantees this; it is not
    /// checked.
    pub fn from_range(domain: &'d Domain<M, P>, range: IovaRange) -> Self {
        Self { addresses: domain.changing(range), removed: 0, kept: 0 }
    }

    /// Recreates the token of addresses of `domain` whose token was dropped while memory was mapped there, by a panic for example. They
    /// have leaked, and are counted: [`unlink`](Self::unlink) removes what is mapped there, but does not free or count them again. The
    /// caller guarantees this; it is not checked.
    pub fn from_lost(domain: &'d Domain<M, P>, range: IovaRange) -> Self {
        Self { addresses: Changing { domain, range, is_lost: true }, removed: 0, kept: 0 }
    }

    /// Removes the translations, and adds them to `gather`. Devices may reach the memory until `gather` is [confirmed](Domain::confirm). If
    /// another caller has removed a part of them, `gather` becomes everything, and the addresses [leak](Unlinked::is_lost).
    ///
    /// Counts an unmap if it has removed all, and the addresses have not leaked. Costs one walk for each leaf table and one store for each
    /// entry.
    ///
    /// Context: does not wait or allocate for exactly what one `link` mapped. A part of a large page splits the page first, which may do
    /// both (see [`Mapper::unmap`]). The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// The token itself: a part is still linked, as a large page could not be split, for want of memory for example. Devices still reach
    /// the [kept](Self::kept) bytes. The removed ones are in `gather`; unlink the rest again.
    pub fn unlink(self, gather: &mut Gather) -> Result<Unlinked<'d, M, P>, Self> {
        let Self { addresses, removed, .. } = self;
        let Changing { domain, range, is_lost } = addresses;
        let Unmapped { bytes, kept, .. } = domain.unlink(range, gather);
        let removed = removed.saturating_add(bytes);
        if kept > 0 {
            return Err(Self { addresses, removed, kept });
        }
        if removed == range.len() || is_lost {
            if !is_lost {
                domain.count_one(|book| &book.unmaps);
            }
            return Ok(Unlinked(addresses));
        }
        // Another caller has removed the rest, and ended that part of the addresses.
        addresses.done();
        domain.end_rest(range, removed, false);
        Ok(Unlinked(Changing { domain, range, is_lost: true }))
    }
}

impl<'d, M: Mapper, P: Platform> Unlinked<'d, M, P> {
    /// The addresses.
    pub fn range(&self) -> IovaRange {
        self.0.range
    }

    /// Whether the addresses have leaked: another caller's translation was found there, or another caller has removed a part of this one.
    pub fn is_lost(&self) -> bool {
        self.0.is_lost
    }

    /// Returns the addresses, and whether they have [leaked](Self::is_lost), for a caller that records them until the unlink is confirmed,
    /// and later calls [`from_range`](Self::from_range).
    pub fn into_range(self) -> (IovaRange, bool) {
        let is_lost = self.0.is_lost;
        (self.0.done(), is_lost)
    }

    /// The token of addresses of `domain` that [`into_range`](Self::into_range) has returned. The caller guarantees this; it is not
    /// checked.
    pub fn from_range(domain: &'d Domain<M, P>, (range, is_lost): (IovaRange, bool)) -> Self {
        Self(Changing { domain, range, is_lost })
    }

    /// Frees the addresses for other callers, unless they have leaked. The caller has [confirmed](Domain::confirm) the gather of their
    /// [`unlink`](Linked::unlink): otherwise a device of their next mapping may still reach the memory of this one. O(1); if the CPU's
    /// cache is full, O(log n) for each of up to 64 ranges that go back to the address space. Context: does not wait for hardware, and
    /// allocates nothing. The caller holds no lock and no CPU.
    pub fn free(self) {
        self.0.free();
    }

    /// Holds the addresses until a later flush is confirmed, which the domain retries: for what the hardware did not confirm. Leaked
    /// addresses stay so, and count as exposed until then. If the flush queue is full, the addresses leak. O(1). Context: does not wait for
    /// hardware. The caller holds no lock and no CPU.
    pub fn quarantine(self) {
        self.0.hold();
    }
}
