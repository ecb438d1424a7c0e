//! Ring arenas: a contiguous range of a space for one queue, allocated as a ring buffer. No two live reservations
//! overlap, in whatever order they are freed. Only [`new`](RingArena::new) allocates.
//!
//! Ranges from a fragmented space are scattered, so nearly every one needs its own lowest page table. In an arena,
//! neighbours in time are neighbours in address: one paging-structure entry serves a whole large page's worth of them,
//! one range invalidation covers a descriptor, and no other user's translations share the queue's tables.
//! [Colours](RingConfig::colour) keep several queues out of each other's sets.
//!
//! All live reservations lie on one arc of the ring, from the oldest (`tail`) to the end of the newest (`head`). A new
//! one begins at the head, and never lies on the arc. Two bits for each granule say where live reservations begin and
//! end: 256 bytes for 1,024 granules. A free clears two bits. If the reservation was the oldest, the tail moves to the
//! next bit at which one begins, across reservations that were freed earlier and granules left unused at the end of a
//! lap.

mod bits;
mod colour;
mod error;
mod granules;

use self::bits::{Edges, Span};
use self::granules::{granules_for, granules_of, granules_per_large};
use super::config::IovaError;
use super::space::IovaSpace;
use core::num::NonZeroU64;

use crate::addr::{Iova, IovaRange, PageSize};
use crate::platform::Platform;

pub use self::error::{ArenaError, ReleaseError};

/// The configuration of a [`RingArena`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingConfig {
    /// How many descriptors of [`descriptor_bytes`](Self::descriptor_bytes) may be reserved at once.
    pub descriptors: u32,
    /// Bytes of addresses of a usual descriptor, rounded up to whole granules. Reservations may have any length; only a
    /// ring of equal ones leaves nothing unused at the end of a lap.
    pub descriptor_bytes: u64,
    /// The unit of a reservation: the granule of the space, the mapper's smallest page.
    pub granule: PageSize,
    /// Where the ring starts, so that rings that move in step do not compete for the same sets of the IOTLB and of the
    /// paging-structure caches. Number the rings behind one IOMMU 0, 1, 2, ..; any number is allowed. With `None` the
    /// ring starts at the beginning of its range.
    ///
    /// *The IOTLB* picks the set by the low bits of the page number. Ranges begin at multiples of a large page, so the
    /// n-th pages of all uncoloured rings fall into the same set: with W ways, the ring number W + 1 that moves in step
    /// makes every access miss. The ring of colour c starts 5 * c granules further on. The number of sets, S, is a
    /// power of two, and five is odd: so any S rings numbered in a row start in S different sets, and S * W rings that
    /// each have one page in use fit. The step is 5 and not 1, so that three consecutive rings with five pages in use
    /// each share no set.
    ///
    /// *The paging-structure cache* of the lowest tables picks the set by the number of the large page, and a ring of T
    /// large pages begins at a multiple of T. So the ring takes a range of at least 16 large pages, and with colour c
    /// it starts in number c modulo 16 of them (modulo T if T is above 16): up to 16 rings, numbered in a row, start in
    /// different sets wherever the space puts them. That takes 32 MiB of addresses for a ring of 2 MiB, but no memory.
    ///
    /// Descriptors of whole large pages are moved by whole large pages only, so that these can map them. An unmap of
    /// another descriptor, no longer aligned to its size, submits [two blocks](crate::invalidation::blocks()) with one
    /// wait: a single block of 2^n pages would cover twice as much or, across the end of the largest block, the whole
    /// domain.
    ///
    /// If hardware mixes further bits into the number of a set, colours neither help nor harm.
    pub colour: Option<u32>,
    /// The highest address that may be handed out.
    pub limit: Iova,
}

impl RingConfig {
    /// A ring without a colour, anywhere in its space.
    pub const fn new(descriptors: u32, descriptor_bytes: u64, granule: PageSize) -> Self {
        Self { descriptors, descriptor_bytes, granule, colour: None, limit: Iova::new(u64::MAX) }
    }
}

/// A range of a space from which one queue takes its addresses, as from a ring buffer.
///
/// One CPU uses it at a time, hence `&mut`. It knows nothing of mappings: reserve, map, unmap and *then* free.
/// [Release](Self::release) it to its space; a drop leaks its addresses until the space is dropped.
///
/// ```
/// # #[cfg(feature = "std")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use portcullis::addr::{Iova, IovaRange, PageSize};
/// use portcullis::iova::{IovaSpace, RingArena, RingConfig, SpaceConfig};
/// use portcullis::std_platform::StdPlatform;
///
/// let platform = StdPlatform::new();
/// let aperture = IovaRange::new(Iova::new(4096), 1 << 40)?;
/// let space = IovaSpace::new(&SpaceConfig::new(aperture, PageSize::SIZE_4K, 1))?;
///
/// // The third queue of a device: 512 descriptors of 256 KiB.
/// let config = RingConfig { colour: Some(2), ..RingConfig::new(512, 256 << 10, PageSize::SIZE_4K) };
/// let mut arena = RingArena::new(&space, &platform, &config)?;
/// let first = arena.reserve(256 << 10)?;
/// let second = arena.reserve(256 << 10)?;
/// assert_eq!(second.start().get(), first.start().get() + (256 << 10));
/// // .. map, let the device work, unmap; then, in any order:
/// arena.free(second)?;
/// arena.free(first)?;
/// arena.release(&space, &platform)?;
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "std"))]
/// # fn main() {}
/// ```
#[derive(Debug)]
#[must_use = "dropping an arena loses its addresses: release it"]
pub struct RingArena {
    range: IovaRange,
    space: u64,
    base: Iova,
    edges: Edges,
    granules: u32,
    /// Where the next reservation goes, if it fits before the end.
    head: u32,
    /// Where the oldest live reservation begins; meaningless while there is none.
    tail: u32,
    live: u32,
    live_granules: u32,
    granule: PageSize,
}

/// A pending reservation. Dropping it commits it, so it stays reserved if `accept` panics.
struct Reserving<'a> {
    arena: &'a mut RingArena,
    span: Span,
}

impl Drop for Reserving<'_> {
    #[inline]
    fn drop(&mut self) {
        let Self { arena, span } = self;
        if arena.live == 0 {
            arena.tail = span.first;
        }
        arena.edges.insert(*span);
        arena.head = if span.last + 1 == arena.granules { 0 } else { span.last + 1 };
        arena.live += 1;
        arena.live_granules += span.last - span.first + 1;
    }
}

impl RingArena {
    /// Takes a range for `descriptors * descriptor_bytes` bytes out of `space`: one or more whole large pages, aligned
    /// to their number rounded up to a power of two (to 2^18 granules at most). A large page is what one lowest table
    /// covers, but 2^18 granules at most: 2 MiB with granules of 4 KiB. With a colour the range has up to a descriptor
    /// more, and at least 16 large pages if the space has them.
    ///
    /// Context: allocates two bits for each granule; for set-up, not for interrupt handlers. Costs one
    /// [`IovaSpace::alloc`], or two if the space has no room for the range that a colour needs.
    ///
    /// # Errors
    /// [`ArenaError::Empty`], [`ArenaError::Granule`] if the space's granule is another, [`ArenaError::TooLarge`],
    /// [`ArenaError::OutOfMemory`], or [`ArenaError::Space`] if the space has no such range; nothing is taken then.
    #[cfg(feature = "parts")]
    pub fn new<P: Platform>(
        space: &IovaSpace,
        platform: &P,
        config: &RingConfig,
    ) -> Result<Self, ArenaError> {
        Self::new_by(space, config, |len, limit| space.alloc(platform, len, limit))
    }

    pub(crate) fn new_by(
        space: &IovaSpace,
        config: &RingConfig,
        alloc: impl Fn(u64, Iova) -> Result<IovaRange, IovaError>,
    ) -> Result<Self, ArenaError> {
        let RingConfig { descriptors, descriptor_bytes, granule, colour, limit } = *config;
        if descriptors == 0 || descriptor_bytes == 0 {
            return Err(ArenaError::Empty);
        }
        if granule != space.granule() {
            return Err(ArenaError::Granule { granule, of_space: space.granule() });
        }
        let too_large = ArenaError::TooLarge { descriptors, descriptor_bytes };
        let per_large = granules_per_large(granule).ok_or(too_large)?;
        let unit = granules_for(descriptor_bytes, granule);
        let granules = granules_of(descriptors, unit).ok_or(too_large)?;
        let layout = colour::layout(colour, unit, granules, per_large);
        let least = (layout.skew + granules).next_multiple_of(per_large);
        let least = least.checked_mul(granule.bytes()).ok_or(too_large)?;
        // No space has as many bytes as a product that saturates.
        let wanted = layout.range.saturating_mul(granule.bytes());

        let edges = Edges::new(granules).ok_or(ArenaError::OutOfMemory)?;
        let (range, base) = match alloc(wanted, limit) {
            // A ring whose tables share their sets is better than none.
            Err(IovaError::Exhausted { .. }) if least < wanted => (alloc(least, limit)?, layout.skew),
            range => (range?, layout.base),
        };
        debug_assert!(range.start().get().is_multiple_of(per_large << granule.shift()));
        Ok(Self {
            range,
            space: space.number(),
            base: Iova::new(range.start().get() + (base << granule.shift())),
            edges,
            granules: granules as u32,
            head: layout.position as u32,
            tail: layout.position as u32,
            live: 0,
            live_granules: 0,
            granule,
        })
    }

    /// Reserves `len` bytes, rounded up to whole granules: the granules after the last reservation, or the first of the
    /// ring if there is no room before its end. The range is aligned to the granule, not to its length.
    ///
    /// O(1). Context: any in which the caller owns the queue; never allocates or waits.
    ///
    /// # Errors
    /// [`ArenaError::Full`] until the oldest reservations are freed, [`ArenaError::Oversize`] for more than the whole
    /// ring, [`ArenaError::Empty`] for no bytes. Nothing is changed then.
    #[inline]
    pub fn reserve(&mut self, len: u64) -> Result<IovaRange, ArenaError> {
        self.reserve_if(len, |_| true).ok_or_else(|| self.no_room(len))
    }

    /// As [`reserve`](Self::reserve), if `accept` returns `true` for the range; else nothing is changed. If `accept`
    /// panics, the range stays reserved.
    #[inline]
    pub(crate) fn reserve_if(
        &mut self,
        len: u64,
        accept: impl FnOnce(IovaRange) -> bool,
    ) -> Option<IovaRange> {
        let granules = granules_for(NonZeroU64::new(len)?.get(), self.granule);
        if granules > self.granules.into() {
            return None;
        }
        let granules = granules as u32;
        let first = self.room(granules)?;
        let span = Span { first, last: first + (granules - 1) };
        let range = self.range_of(span);
        let reserving = Reserving { arena: self, span };
        if !accept(range) {
            core::mem::forget(reserving);
            return None;
        }
        drop(reserving);
        Some(range)
    }

    /// Frees a reservation, in any order, or at once several that adjoin, such as a batch of descriptors. Nothing may
    /// be mapped there any more, and no device may reach it: the addresses are allocated again.
    ///
    /// O(1), plus one word read for each 64 granules of the range, and for each 64 granules that were freed before it
    /// and wait for it. Context: any in which the caller owns the queue; never allocates or waits.
    ///
    /// # Errors
    /// [`ArenaError::NotReserved`] if the range is not exactly one or several live reservations. Nothing is changed
    /// then.
    #[inline]
    pub fn free(&mut self, range: IovaRange) -> Result<(), ArenaError> {
        let span = self.span_of(range);
        let removed = span.and_then(|span| Some((span, self.edges.remove_run(span)?)));
        let (span, count) = removed.ok_or(ArenaError::NotReserved { range })?;
        self.live -= count;
        self.live_granules -= span.last - span.first + 1;
        if self.live > 0 && (span.first..=span.last).contains(&self.tail) {
            // Every other live reservation begins after the freed range, or the arc goes around the end.
            let next = self.edges.next_first(span.last + 1).or_else(|| self.edges.next_first(0));
            self.tail = next.unwrap_or(self.head);
        }
        Ok(())
    }

    /// Frees the arena's range to its `space`, and the arena's memory. All reservations must be unmapped and freed.
    /// Cost and context: as [`IovaSpace::free`].
    ///
    /// # Errors
    /// [`ReleaseError`], which holds the arena: [`ArenaError::InUse`] while reservations are live,
    /// [`ArenaError::Space`] if the range came from another space.
    #[allow(clippy::result_large_err, reason = "a ring that is refused comes back in place")]
    pub fn release<P: Platform>(self, space: &IovaSpace, platform: &P) -> Result<(), ReleaseError> {
        if self.live > 0 {
            let error = ArenaError::InUse {
                reservations: self.live,
                bytes: self.in_use(),
                oldest: self.address(self.tail),
            };
            return Err(ReleaseError { arena: self, error });
        }
        // Another space may have allocated the same addresses.
        let freed = match space.number() == self.space {
            true => space.free(platform, self.range),
            false => Err(IovaError::NotAllocated { range: self.range }),
        };
        freed.map_err(|error| ReleaseError { arena: self, error: error.into() })
    }

    /// Returns the arena's range. Its start and length are multiples of a large page.
    pub fn range(&self) -> IovaRange {
        self.range
    }

    #[inline]
    pub(crate) fn granule(&self) -> PageSize {
        self.granule
    }

    /// Returns the bytes that can be reserved at once, if none are unused at the end of a lap.
    pub fn capacity(&self) -> u64 {
        self.bytes(self.granules)
    }

    /// Returns the bytes in live reservations.
    pub fn in_use(&self) -> u64 {
        self.bytes(self.live_granules)
    }

    /// Returns the number of live reservations.
    #[cfg(feature = "parts")]
    pub fn reservations(&self) -> usize {
        self.live as usize
    }

    /// Returns where `granules` go next, if there is room: never on the arc.
    #[inline]
    fn room(&self, granules: u32) -> Option<u32> {
        // The head is below the end, which is 2^31 at most.
        let before_end = self.granules - self.head >= granules;
        if self.live == 0 {
            return Some(if before_end { self.head } else { 0 });
        }
        if self.head <= self.tail {
            // The arc goes around the end; if both are equal it is the whole ring.
            return (self.tail - self.head >= granules).then_some(self.head);
        }
        if before_end {
            return Some(self.head);
        }
        (self.tail >= granules).then_some(0)
    }

    #[cold]
    fn no_room(&self, len: u64) -> ArenaError {
        if len == 0 {
            return ArenaError::Empty;
        }
        if granules_for(len, self.granule) > self.granules.into() {
            return ArenaError::Oversize { len, capacity: self.capacity() };
        }
        ArenaError::Full {
            len,
            in_use: self.in_use(),
            capacity: self.capacity(),
            reservations: self.live,
            oldest: self.address(self.tail),
        }
    }

    #[inline]
    fn span_of(&self, range: IovaRange) -> Option<Span> {
        let start = range.start().offset_from(self.base)?;
        if (start | range.len()) & self.granule.offset_mask() != 0 {
            return None;
        }
        let (first, count) = (start >> self.granule.shift(), range.len() >> self.granule.shift());
        let last = first + (count - 1);
        (last < self.granules.into()).then_some(Span { first: first as u32, last: last as u32 })
    }

    #[inline]
    fn range_of(&self, span: Span) -> IovaRange {
        // The length is a granule at least; positions lie inside the arena's range, which does not wrap.
        let len = NonZeroU64::MIN.saturating_add(self.bytes(span.last - span.first + 1) - 1);
        IovaRange::inside(self.address(span.first), len)
    }

    fn address(&self, position: u32) -> Iova {
        Iova::new(self.base.get() + self.bytes(position))
    }

    fn bytes(&self, granules: u32) -> u64 {
        u64::from(granules) << self.granule.shift()
    }
}
