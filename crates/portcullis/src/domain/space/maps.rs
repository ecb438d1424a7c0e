//! Maps of a list: in one exclusive section of the CPU that has the addresses, on the fast path, or else in several. A map updates its counters
//! with the CPU that it holds to allocate addresses. If it fails later, it undoes the counts and frees the addresses.

use core::cell::Cell;
use core::slice;

use super::lifecycle::{Changing, LinkFailed, Unsure};
use super::{Domain, Refused};
use crate::addr::{Iova, IovaRange, PhysAddr, PhysSegment};
use crate::domain::MapListError;
use crate::guard::Guard;
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::percpu::Turn;
use crate::pgtable::{Attributes, MapError};
use crate::platform::{LocalCpu, Platform};

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Maps the pages that `list` touches, one segment after another, into one range of addresses at or below `limit`. Costs one allocation
    /// of addresses, one walk for each leaf table, and one store for each entry.
    ///
    /// Context: may allocate page tables. Waits for hardware if addresses or memory for tables are exhausted, if a failed call is undone,
    /// and if the mapper waits for each map (as for hardware in [caching mode](crate::invalidation::InvalidationQueue::caches_absent)). The
    /// caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`MapListError`]: nothing is mapped. No addresses leak, except if another caller's translation was in the way.
    ///
    /// # Safety
    /// The mapping *lasts* until an [`unmap`](Self::unmap) of it has returned `Ok` and, under a lazy policy, the flush that covers it is
    /// confirmed.
    /// 1. **The memory is the caller's to open** to every device of the domain for as long as the mapping lasts: all granules that `list`
    ///    touches. Devices may access them at any time, as the permissions say.
    /// 2. Until then it is not given to others, and nothing relies on its contents: the only references to it are to atomics (or, where
    ///    devices only read, shared ones to what is not written).
    /// 3. After [`MapListError::Unconfirmed`], clauses 1 and 2 hold until a [`flush`](Self::flush) has returned `Ok`. After any other error
    ///    they end with the call.
    pub unsafe fn map(
        &self,
        list: &[PhysSegment],
        attributes: impl Into<Attributes>,
        limit: Iova,
    ) -> Result<IovaRange, MapListError> {
        let (len, attributes) = (self.pages_of(list)?, attributes.into());
        if let [PhysSegment { phys, .. }] = list {
            // Whole pages, so that no bytes count as neighbours.
            let pages = PhysSegment { phys: phys.align_down(self.granule), len };
            // SAFETY: clauses 1 and 2 are the caller's; `pages` are the granules that the segment touches.
            if let Some(range) = unsafe { self.map_fast(pages, attributes, limit, |_| ()) } {
                return Ok(range);
            }
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.open::<false>(list, (len, len), attributes, limit, |_, _| ()) }
    }

    /// The fast path of [`map`](Self::map) for one segment: takes addresses from the CPU's cache and enters them, in one exclusive section.
    /// If that is not possible, returns `None` with nothing changed; `map` then does it or says why not. The segment's neighbours
    /// [count](Self::count_neighbours). Calls `counted` with the CPU on success.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 and 2.
    #[inline]
    pub(crate) unsafe fn map_fast(
        &self,
        segment: PhysSegment,
        attributes: Attributes,
        limit: Iova,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Option<IovaRange> {
        if !M::IS_QUICK {
            return None;
        }
        let pages = IovaRange::of_pages(Iova::new(segment.phys.get()), segment.len, self.granule)?;
        let bytes = (pages.len(), pages.len() - segment.len);
        // SAFETY: clauses 1 and 2 are the caller's, for all granules that the segment touches; `of_pages` has checked and counted them.
        unsafe { self.open_in_turn::<true>(slice::from_ref(&segment), bytes, attributes, limit, counted) }
    }

    /// The fast path of all maps: takes `len` bytes of addresses from the CPU's cache, and enters the granules of `list` there, in one
    /// exclusive section. If either fails, nothing is changed. `neighbours` of the bytes are neighbours. Calls `counted` with the CPU on
    /// success.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 and 2; `list` is checked, and has `len` bytes of granules.
    #[inline(always)]
    unsafe fn open_in_turn<const ONE: bool>(
        &self,
        list: &[PhysSegment],
        (len, neighbours): (u64, u64),
        attributes: Attributes,
        limit: Iova,
        counted: impl FnOnce(&LocalCpu<'_>),
    ) -> Option<IovaRange> {
        let fast = |cpu: &LocalCpu<'_>| {
            self.space.in_turn(cpu, |turn, own| {
                let own = own?;
                let changing = self.changing(self.space.take(own, len, limit)?);
                // SAFETY: clauses 1 and 2 are the caller's; `take` has just handed out the range, of the `len` bytes that the list's granules have.
                if !unsafe { self.enter_fast::<ONE>(turn, changing.range(), list, attributes) } {
                    self.give_back(Some(own), changing.done());
                    return None;
                }
                self.books.with(cpu, |book| self.count_map(book, neighbours));
                counted(cpu);
                Some(changing)
            })?
        };
        Some(self.platform.with_cpu_fast(fast)??.done())
    }

    /// Maps the granules of a checked list, in an exclusive section. If that is not possible, nothing is changed. `ONE` is for a list of one piece.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 and 2; the caller owns the range, which is as long as the granules.
    #[inline(always)]
    unsafe fn enter_fast<const ONE: bool>(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
    ) -> bool {
        // SAFETY: the mapper asks for clauses 1 and 2, which are the caller's for all granules; and a slice's clones are equal.
        unsafe {
            match list {
                [piece] if ONE => {
                    self.mapper.map_fast(turn, range, piece.phys.align_down(self.granule), attributes)
                }
                _ => self.mapper.map_list_fast(turn, range, self.granules(list), attributes),
            }
        }
    }

    /// As [`map`](Self::map), for a list of `used` bytes in `len` bytes of pages, as [`pages_of`](Self::pages_of) counts them. The list's
    /// neighbours [count](Self::count_neighbours). Calls `count` with the CPU that took the addresses, and `true`; if the map fails then,
    /// again with `false`. With `HERE`, the gather is in the caller's frame.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 to 3.
    #[inline(always)]
    pub(crate) unsafe fn open<const HERE: bool>(
        &self,
        list: &[PhysSegment],
        (len, used): (u64, u64),
        attributes: Attributes,
        limit: Iova,
        count: impl Fn(Option<&LocalCpu<'_>>, bool) + Copy,
    ) -> Result<IovaRange, MapListError> {
        // By reference: one word instead of three in each closure below.
        let (neighbours, count) = (len.saturating_sub(used), &count);
        // One segment has `map_fast`.
        if M::IS_QUICK && list.len() > 1 {
            // SAFETY: clauses 1 and 2 are the caller's.
            let range = unsafe { self.open_fast(list, (len, neighbours), attributes, limit, count) };
            if let Some(range) = range {
                return Ok(range);
            }
        }
        let uncount = move |cpu: Option<&LocalCpu<'_>>| {
            let book = self.books.of(cpu);
            count(cpu, false);
            book.add(|book| &book.refused, 1);
            self.change_in(book, neighbours.wrapping_neg());
        };
        let is_counted = &Cell::new(false);
        let counted = Guard::new(|| {
            if is_counted.get() {
                uncount(None);
            }
        });
        // Counted while the CPU is lent for the addresses, to save a second loan.
        let taken = move |cpu: Option<&LocalCpu<'_>>, range| {
            let changing = self.changing(range);
            count(cpu, true);
            is_counted.set(true);
            self.count_map(self.books.of(cpu), neighbours);
            changing
        };
        let changing = self.alloc(len, limit, taken)?;
        let range = changing.range();
        // SAFETY: clauses 1 to 3 are the caller's; the range was just allocated.
        let linked = unsafe {
            if HERE {
                self.link_here(range, list, attributes, None)
            } else {
                self.link(range, list, attributes, None)
            }
        };
        match linked {
            Ok(()) => {
                counted.done();
                Ok(changing.done())
            }
            Err(failed) => Err(self.open_failed(failed, changing, move |cpu| {
                counted.done();
                uncount(cpu);
            })),
        }
    }

    /// The fast path of a list. Out of line, to keep the map's frame small.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 and 2.
    #[inline(never)]
    unsafe fn open_fast(
        &self,
        list: &[PhysSegment],
        bytes: (u64, u64),
        attributes: Attributes,
        limit: Iova,
        count: impl Fn(Option<&LocalCpu<'_>>, bool),
    ) -> Option<IovaRange> {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.open_in_turn::<false>(list, bytes, attributes, limit, |cpu| count(Some(cpu), true)) }
    }

    /// Ends a map that was counted and has taken `addresses`. Out of line, to keep the map's frame small.
    #[cold]
    #[inline(never)]
    fn open_failed(
        &self,
        failed: LinkFailed,
        addresses: Changing<'_, M, P>,
        uncount: impl FnOnce(Option<&LocalCpu<'_>>),
    ) -> MapListError {
        // With a CPU, as `uncount` may take a lock that interrupt handlers take, too.
        self.platform.with_cpu(uncount);
        Refused::new(failed, addresses).end()
    }

    /// Maps the pages of a checked `list` to `range`, which the caller owns. If table memory is short, reclaims empty tables once. Does not
    /// count the map. Entries that were undone without a confirmation are added to `unconfirmed`, which a caller passes if it goes on to
    /// confirm it.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 to 3; the mapping lasts until its [unlink](Self::unlink) is [confirmed](Self::confirm).
    // Out of line: its gather takes much of the stack.
    #[inline(never)]
    pub(crate) unsafe fn link(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        unconfirmed: Option<&mut Gather>,
    ) -> Result<(), LinkFailed> {
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.link_here(range, list, attributes, unconfirmed) }
    }

    /// As [`link`](Self::link), in the caller's frame.
    ///
    /// # Safety
    /// As for [`link`](Self::link).
    #[inline(always)]
    pub(crate) unsafe fn link_here(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        unconfirmed: Option<&mut Gather>,
    ) -> Result<(), LinkFailed> {
        let (mut unsure, mut gather) = (unconfirmed.map(Unsure), Gather::new());
        let granules = self.granules(list);
        // SAFETY: the mapper asks for clauses 1 to 3, which are the caller's, for all granules; after an error `link_failed` syncs, or says
        // `Unconfirmed`.
        let entered = unsafe { self.mapper.map(&self.platform, range, granules, attributes, &mut gather) };
        let entered = match entered {
            Err(MapError::OutOfMemory) if !self.is_at_once() => {
                // SAFETY: as above.
                unsafe { self.link_again(range, list, attributes, &mut gather) }
            }
            entered => entered,
        };
        let linked = entered.map_err(|error| {
            let unconfirmed = unsure.as_mut().map(|unsure| &mut *unsure.0);
            self.link_failed(error, &gather, unconfirmed)
        });
        if let Some(unsure) = unsure {
            unsure.done();
        }
        linked
    }

    /// Reclaims empty tables, or relies on others that do, and tries again. It does not wait for another reclaim: this caller may be an
    /// interrupt handler that has interrupted it. It syncs first, as hardware may have cached entries of the first attempt in other pieces
    /// than the second makes.
    ///
    /// # Safety
    /// As for [`link`](Self::link); after an error the mapping lasts until `gather` is synced.
    #[cold]
    #[inline(never)]
    unsafe fn link_again(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        if self.mapper.sync(gather).is_err() || self.mapper.try_reclaim(&self.platform).is_err() {
            return Err(MapError::OutOfMemory);
        }
        // SAFETY: the mapper asks for clauses 1 to 3, which are the caller's, for all granules.
        unsafe { self.mapper.map(&self.platform, range, self.granules(list), attributes, gather) }
    }

    #[cold]
    #[inline(never)]
    fn link_failed(&self, why: MapError, gather: &Gather, unconfirmed: Option<&mut Gather>) -> LinkFailed {
        let is_occupied = matches!(why, MapError::AlreadyMapped { .. });
        // A device may have used and cached entries that were there for a moment.
        match self.mapper.sync(gather) {
            Ok(()) => LinkFailed::new(why.into(), false, is_occupied),
            Err(error) => {
                if let Some(unconfirmed) = unconfirmed {
                    unconfirmed.merge(gather);
                }
                LinkFailed::new(MapListError::Unconfirmed { error }, true, is_occupied)
            }
        }
    }

    /// Maps the granules of a list, checked as by [`pages_of`](Self::pages_of), to `range`, which the caller owns and which is as long, on the
    /// fast path. If that is not possible, nothing is changed, and the caller uses [`link`](Self::link). Counts nothing.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 and 2; the mapping lasts until its [unlink](Self::unlink) is [confirmed](Self::confirm).
    #[inline(always)]
    pub(crate) unsafe fn link_fast<const ONE: bool>(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
    ) -> bool {
        let fast = |cpu: &LocalCpu<'_>| {
            // SAFETY: clauses 1 and 2 are the caller's, and the list is checked.
            self.space
                .in_turn(cpu, |turn, _| unsafe { self.enter_fast::<ONE>(turn, range, list, attributes) })
        };
        M::IS_QUICK && self.platform.with_cpu_fast(fast).flatten() == Some(true)
    }

    /// The granules that each segment touches, of a list that [`pages_of`](Self::pages_of) has checked, so no sum wraps.
    #[inline(always)]
    fn granules(&self, list: &[PhysSegment]) -> impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone {
        let granule = self.granule;
        list.iter().map(move |piece| (piece.phys.align_down(granule), piece.bytes_of_granules(granule)))
    }
}
