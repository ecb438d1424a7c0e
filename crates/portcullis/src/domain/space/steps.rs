//! The steps that `map` and `unmap` are made of, for callers that put them together differently:
//! batches and rings. No step gives addresses back but those whose unmap its caller has seen
//! confirmed.

use alloc::vec::Vec;

use super::guards::Unsure;
use super::{Changing, Domain};
use crate::addr::{IovaRange, PhysAddr, PhysSegment};
use crate::broken::broken;
use crate::invalidation::{Gather, SLICE};
use crate::iova::{ArenaError, Own, ReleaseError, RingArena, RingConfig};
use crate::mapper::Mapper;
use crate::percpu::Turn;
use crate::pgtable::{Attributes, MapError, Unmapped};
use crate::platform::{LocalCpu, Platform};
use crate::sync::Ordering;

/// What a ring has counted by itself since it last [settled](Domain::settle).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub maps: u64,
    pub unmaps: u64,
    /// Bytes beside buffers that were mapped, and when the first of these was, in nanoseconds.
    pub opened: u64,
    pub since_ns: u64,
    /// Bytes beside buffers that were unmapped, which is confirmed.
    pub closed: u64,
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Makes a ring out of the domain's space, of the next colour unless `config` names one.
    /// Allocates; waits for no hardware.
    pub(crate) fn new_ring(&self, config: RingConfig) -> Result<RingArena, ArenaError> {
        // Relaxed: only the number counts. After 2^32 rings colours come again.
        let next = || self.rings.fetch_add(1, Ordering::Relaxed) as u32;
        let config = RingConfig { colour: config.colour.or_else(|| Some(next())), ..config };
        // Nothing below is called between the allocation and the arena.
        RingArena::new_by(&self.space, &config, |len, limit| {
            let guard = |_: Option<&LocalCpu<'_>>, range| self.changing(range);
            let range = self.space.alloc_guarded(&self.platform, (len, limit), !self.is_at_once(), guard)?;
            Ok(self.divided(range).done())
        })
    }

    /// Has addresses stay their owner's, which maps parts of them again and again: no stranger's unmap of such parts gives them back.
    pub(crate) fn divided<'d>(&self, addresses: Changing<'d, M, P>) -> Changing<'d, M, P> {
        if !self.space.divide(addresses.range()) {
            broken("addresses that a caller holds are handed out");
        }
        addresses
    }

    /// Takes a ring's addresses back.
    #[allow(clippy::result_large_err, reason = "a ring that is refused comes back in place")]
    pub(crate) fn release_ring(&self, arena: RingArena) -> Result<(), ReleaseError> {
        let changing = self.changing(arena.range());
        let result = arena.release(&self.space, &self.platform);
        changing.done();
        result
    }

    /// Enters the pages of `list`, which [`pages_of`](Self::pages_of) has checked, into `range`. Where table
    /// memory is short, empty tables make room once.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    #[inline(always)]
    pub(super) unsafe fn enter(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        // SAFETY: the caller's promise.
        match unsafe { self.enter_once(range, list, attributes, gather) } {
            Err(MapError::OutOfMemory) if !self.is_at_once() => {
                // SAFETY: the caller's promise.
                unsafe { self.enter_again(range, list, attributes, gather) }
            }
            result => result,
        }
    }

    /// Enters the pages of `list` once, without making room for tables.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    #[inline(always)]
    unsafe fn enter_once(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let granules = self.granules(list);
        // SAFETY: the caller's promise, for all of the granules that the memory touches.
        unsafe { self.mapper.map(&self.platform, range, granules, attributes, gather) }
    }

    /// The granules that each segment touches, of a list that [`pages_of`](Self::pages_of) has checked: so no sum wraps.
    #[inline(always)]
    pub(super) fn granules(
        &self,
        list: &[PhysSegment],
    ) -> impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone {
        let granule = self.granule;
        list.iter().map(move |piece| (piece.phys.align_down(granule), piece.bytes_of_granules(granule)))
    }

    /// Makes room of tables that had become empty, and tries again: they are those that this frees, or that others have freed meanwhile.
    /// Where another call is reclaiming, this one does not wait, as it may be an interrupt handler's, which has interrupted that. What the
    /// first attempt has mapped and removed again may still be cached, in pieces that differ from those of the second.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
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
        // SAFETY: the caller's promise.
        unsafe { self.enter_once(range, list, attributes, gather) }
    }

    /// Maps the pages at `phys` to `range`, which the caller has to itself, if that is quickly done; else nothing
    /// is changed, and [`link`](Self::link) does it. Counts nothing.
    ///
    /// # Safety
    /// As for [`link`](Self::link).
    #[inline]
    pub(crate) unsafe fn link_fast(&self, range: IovaRange, phys: PhysAddr, attributes: Attributes) -> bool {
        // SAFETY: the caller's promise.
        self.in_turn_of(|turn| unsafe { self.mapper.map_fast(turn, range, phys, attributes) })
    }

    /// The same for the granules of a list that [`pages_of`](Self::pages_of) has checked.
    ///
    /// # Safety
    /// As for [`link`](Self::link).
    #[inline]
    pub(crate) unsafe fn link_list_fast(
        &self,
        range: IovaRange,
        list: &[PhysSegment],
        attributes: Attributes,
    ) -> bool {
        // SAFETY: the caller's promise, for all of the granules that the memory touches; a slice does not change.
        self.in_turn_of(|turn| unsafe {
            self.mapper.map_list_fast(turn, range, self.granules(list), attributes)
        })
    }

    /// Has `enter` map in a turn of the CPU, if the mapper is quick.
    #[inline(always)]
    fn in_turn_of(&self, enter: impl FnOnce(&Turn<'_>) -> bool) -> bool {
        if !M::IS_QUICK {
            return false;
        }
        let enter =
            |cpu: &LocalCpu<'_>| self.space.in_turn(cpu, |turn: &Turn<'_>, _: Option<Own<'_>>| enter(turn));
        self.platform.with_cpu_fast(enter).flatten() == Some(true)
    }

    /// Removes the translations of `range` and adds them to `gather`; where not all of the range
    /// was mapped, adds everything. Returns what was mapped, and what still is.
    // In line always: called, its answer goes through memory, which costs a batch 1.5 ns.
    #[inline(always)]
    pub(crate) fn unlink(&self, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let unsure = Unsure(gather);
        let unmapped = self.mapper.unmap(&self.platform, range, unsure.0);
        if unmapped.bytes == range.len() {
            unsure.done();
        }
        // Otherwise another caller has removed the rest, and may not have invalidated it. That may
        // have been a part of a large page, which is not there any more to say how far it went.
        unmapped
    }

    /// Gives back addresses whose unmap is confirmed. Counts no unmap.
    pub(crate) fn take_back(&self, changing: Changing<'_, M, P>) {
        self.with_turn(|cpu, own| self.give_back(cpu, own, changing.done()));
    }

    /// Gives back all `ranges`, whose unmaps are confirmed, and counts one unmap for each;
    /// `neighbours` bytes of them were not the buffers'. Works in slices, so that no CPU is held
    /// for long. Where the platform panics, `ranges` still has what was not given back.
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

    /// Adds what a ring has counted by itself.
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
