//! The steps of `map` and `unmap`, for callers that combine them differently: batches and rings. The only steps that free addresses are
//! those whose caller has seen the unmap confirmed.

use alloc::vec::Vec;

use super::guards::Unsure;
use super::lifecycle::{LinkFailed, Remains};
use super::{Changing, Domain};
use crate::addr::{IovaRange, PhysAddr, PhysSegment};
use crate::broken::broken;
use crate::domain::MapListError;
use crate::invalidation::{Gather, SLICE};
use crate::iova::{ArenaError, Own, ReleaseError, RingArena, RingConfig};
use crate::mapper::Mapper;
use crate::percpu::Turn;
use crate::pgtable::{Attributes, MapError, Unmapped};
use crate::platform::{LocalCpu, Platform};
use crate::sync::Ordering;

/// Counters of a ring since its last [`settle`](Domain::settle).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub maps: u64,
    pub unmaps: u64,
    /// Bytes of neighbours that were mapped, and the time of the first, in nanoseconds.
    pub opened: u64,
    pub since_ns: u64,
    /// Bytes of neighbours whose unmap is confirmed.
    pub closed: u64,
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Makes a ring in the domain's space, of the next colour unless `config` names one. Allocates; does not wait for hardware.
    pub(crate) fn new_ring(&self, config: RingConfig) -> Result<RingArena, ArenaError> {
        // Relaxed: only the number counts. Colours repeat after 2^32 rings.
        let next = || self.rings.fetch_add(1, Ordering::Relaxed) as u32;
        let config = RingConfig { colour: config.colour.or_else(|| Some(next())), ..config };
        // No call between the allocation and the arena can panic.
        RingArena::new_by(&self.space, &config, |len, limit| {
            let guard = |_: Option<&LocalCpu<'_>>, range| self.changing(range);
            let range = self.space.alloc_guarded(&self.platform, (len, limit), !self.is_at_once(), guard)?;
            Ok(self.divided(range).done())
        })
    }

    pub(crate) fn divided<'d>(&self, addresses: Changing<'d, M, P>) -> Changing<'d, M, P> {
        if !self.space.divide(addresses.range()) {
            broken("addresses that a caller holds are handed out");
        }
        addresses
    }

    #[allow(clippy::result_large_err, reason = "a ring that is refused comes back in place")]
    pub(crate) fn release_ring(&self, arena: RingArena) -> Result<(), ReleaseError> {
        let changing = self.changing(arena.range());
        let result = arena.release(&self.space, &self.platform);
        changing.done();
        result
    }

    /// Enters the pages of `list`, which [`pages_of`](Self::pages_of) has checked, into `range`. If table memory is short, reclaims empty
    /// tables once.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 to 3; after an error the mapping lasts until `gather` is synced.
    #[inline(always)]
    pub(super) unsafe fn enter(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        // SAFETY: clauses 1 to 3 are the caller's.
        match unsafe { self.enter_once(range, list, attributes, gather) } {
            Err(MapError::OutOfMemory) if !self.is_at_once() => {
                // SAFETY: clauses 1 to 3 are the caller's.
                unsafe { self.enter_again(range, list, attributes, gather) }
            }
            result => result,
        }
    }

    /// As [`enter`](Self::enter), once and without a reclaim.
    ///
    /// # Safety
    /// As for [`enter`](Self::enter).
    #[inline(always)]
    unsafe fn enter_once(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let granules = self.granules(list);
        // SAFETY: the mapper asks for the caller's clauses, for all of the granules that the memory touches.
        unsafe { self.mapper.map(&self.platform, range, granules, attributes, gather) }
    }

    /// The granules that each segment touches, of a list that [`pages_of`](Self::pages_of) has checked, so no sum wraps.
    #[inline(always)]
    pub(super) fn granules(
        &self,
        list: &[PhysSegment],
    ) -> impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone {
        let granule = self.granule;
        list.iter().map(move |piece| (piece.phys.align_down(granule), piece.bytes_of_granules(granule)))
    }

    /// Reclaims empty tables, or relies on others that do, and tries again. It does not wait for another reclaim: this
    /// caller may be an interrupt handler that has interrupted it. It syncs first, as hardware may have cached entries
    /// of the first attempt in other pieces than the second makes.
    #[cold]
    #[inline(never)]
    unsafe fn enter_again(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        if self.mapper.sync(gather).is_err() || self.mapper.try_reclaim(&self.platform).is_err() {
            return Err(MapError::OutOfMemory);
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.enter_once(range, list, attributes, gather) }
    }

    /// Maps the pages of a checked `list` to `range`, which the caller owns. Does not count the map. Entries that were undone without a
    /// confirmation are added to `unconfirmed`, which a caller passes if it goes on to confirm it.
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
        // SAFETY: clauses 1 to 3 are the caller's; after an error `link_failed` syncs, or says `Unconfirmed`.
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
        // A device may have used and cached entries that were there for a moment.
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

    /// Maps the pages at `phys` to `range`, which the caller owns, on the fast path. If that is not possible, nothing is changed, and the
    /// caller uses [`link`](Self::link). Counts nothing.
    ///
    /// # Safety
    /// As for [`link`](Self::link), clauses 1 and 2.
    #[inline]
    pub(crate) unsafe fn link_fast(&self, range: IovaRange, phys: PhysAddr, attributes: Attributes) -> bool {
        // SAFETY: the mapper asks for clauses 1 and 2, which are the caller's.
        self.in_turn_of(|turn| unsafe { self.mapper.map_fast(turn, range, phys, attributes) })
    }

    /// As [`link_fast`](Self::link_fast), for the granules of a list that [`pages_of`](Self::pages_of) has checked.
    ///
    /// # Safety
    /// As for [`link`](Self::link), clauses 1 and 2.
    #[inline]
    pub(crate) unsafe fn link_list_fast(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
    ) -> bool {
        // SAFETY: the mapper asks for clauses 1 and 2, which are the caller's for all granules; and a slice's clones are equal.
        self.in_turn_of(|turn| unsafe {
            self.mapper.map_list_fast(turn, range, self.granules(list), attributes)
        })
    }

    #[inline(always)]
    fn in_turn_of(&self, enter: impl FnOnce(&Turn<'_>) -> bool) -> bool {
        if !M::IS_QUICK {
            return false;
        }
        let enter =
            |cpu: &LocalCpu<'_>| self.space.in_turn(cpu, |turn: &Turn<'_>, _: Option<Own<'_>>| enter(turn));
        self.platform.with_cpu_fast(enter).flatten() == Some(true)
    }

    /// Removes the translations of `range` and adds them to `gather`, or everything if not all of the range was mapped. Returns what was
    /// mapped, and what still is.
    // Inlined: otherwise the result goes through memory, which costs a batch 1.5 ns.
    #[inline(always)]
    pub(crate) fn unlink(&self, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let unsure = Unsure(gather);
        let unmapped = self.mapper.unmap(&self.platform, range, unsure.0);
        if unmapped.bytes == range.len() {
            unsure.done();
        }
        // Otherwise the guard adds everything: another caller has removed the rest, and may not have invalidated it. The rest may have been
        // part of a large page, whose extent is not known any more.
        unmapped
    }

    /// Frees addresses whose unmap is confirmed. Counts no unmap.
    pub(crate) fn take_back(&self, changing: Changing<'_, M, P>) {
        self.with_turn(|cpu, own| self.give_back(cpu, own, changing.done()));
    }

    /// Frees all `ranges`, whose unmaps are confirmed, and counts one unmap for each; `neighbours` bytes of them are neighbours. Works in
    /// slices, so that no CPU is held for long. If the platform panics, `ranges` still has what was not freed.
    pub(crate) fn take_back_all(&self, ranges: &mut Vec<IovaRange>, mut neighbours: u64) {
        loop {
            self.with_turn(|cpu, own| {
                let slice = ranges.len().min(SLICE);
                self.books.of(cpu).add(|book| &book.unmaps, slice as u64);
                self.uncount_neighbours(cpu, core::mem::take(&mut neighbours));
                for range in core::iter::from_fn(|| ranges.pop()).take(slice) {
                    self.give_back(cpu, own, range);
                }
            });
            if ranges.is_empty() {
                return;
            }
        }
    }

    pub(crate) fn settle(&self, tally: Tally) {
        let Tally { maps, unmaps, opened, closed, since_ns } = tally;
        let neighbours = opened > 0 || closed > 0;
        let now_ns = if neighbours { self.platform.now_ns() } else { 0 };
        self.platform.with_cpu(|cpu| {
            let book = self.books.of(cpu);
            book.add(|book| &book.maps, maps);
            book.add(|book| &book.unmaps, unmaps);
            if neighbours {
                book.settle((opened, since_ns), closed, now_ns);
            }
        });
    }
}
