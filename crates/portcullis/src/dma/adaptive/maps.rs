//! Maps of an adaptive ring, by the choice for the size where that is possible.

use super::AdaptiveRing;
use super::book::{Half, class_of, pause_after};
use crate::addr::{Direction, DmaSegment, Iova, PhysSegment};
use crate::bounce::error::DmaMapError;
use crate::bounce::pool::{Attributes, PoolMapping, Way};
use crate::dma::RawMapping;
use crate::dma::mapping::{Choice, Kind};
use crate::domain::MapListError;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

#[allow(clippy::result_large_err, reason = "a mapping that is refused comes back in place")]
impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// As [`map`](Self::map), for any direction. One that was not measured is copied at first.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline]
    pub(in crate::dma) unsafe fn map_toward(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        self.direction = direction;
        if !self.met[direction.index()] {
            self.begin();
        }
        // SAFETY: clauses 1 to 5 are the caller's.
        unsafe { self.map(list, attributes, out) }
    }

    /// Lets the device reach the bytes of `list`, or a copy of them, and writes the device's segments to `out`. Returns their number, at most
    /// `list.len()`.
    ///
    /// Cost and context as for [`BounceDevice::map`](crate::bounce::pool::BounceDevice::map) or [`StrictRing::map_sg`](crate::dma::StrictRing::map_sg), or both if the ring has no room.
    ///
    /// # Errors
    /// [`DmaMapError`]: the list is mapped as a whole or not at all. [`DmaMapError::Full`] while others wait for a commit: commit, and map again.
    /// After [`MapListError::Unconfirmed`] devices may reach entries of it.
    ///
    /// # Safety
    /// The mapping lasts until its unmap has returned, and for one in the ring until the commit of its batch.
    ///
    /// As [`BounceDevice::map`](crate::bounce::pool::BounceDevice::map), clauses 1 to 3; and while the mapping lasts:
    ///
    /// 4. Two syncs of the same bytes of the mapping do not run at the same time. (The caller gets the [`RawMapping`] and ensures this, so the syncs
    ///    and the unmap are safe.)
    /// 5. Nothing else calls the pool for the mapping's address, as [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap)'s clauses 1 and 3
    ///    demand.
    #[inline]
    pub unsafe fn map(
        &mut self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        // The pool and the ring check the sum.
        let (len, whole) = self.pool.look_at(list);
        let shared = !whole;
        let class = class_of(len, self.classes).map(|class| self.size_of(class, shared));
        let choice = class.map_or(Choice::Map, |class| self.sizes[class].cell.choice());
        if let Some(class) = class
            && self.sizes[class].until == 0
        {
            // SAFETY: clauses 1 to 5 are the caller's.
            return unsafe { self.map_timed((class, shared), list, attributes, out) };
        }
        // SAFETY: clauses 1 to 5 are the caller's.
        let (mapping, used, _) = unsafe { self.map_by(choice, (class, shared), list, attributes, out) }?;
        if let Some(class) = class {
            let size = &mut self.sizes[class];
            size.until -= 1;
            size.counts[mapping.kind().choice() as usize] += 1;
        }
        Ok((mapping, used))
    }

    /// # Safety
    /// As [`map`](Self::map).
    #[cold]
    unsafe fn map_timed(
        &mut self,
        (class, shared): (usize, bool),
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        let size = &mut self.sizes[class];
        let pause = pause_after(size.made());
        size.until = pause - 1;
        let choice = size.cell.turn(pause);
        let start = (self.clock)();
        // SAFETY: clauses 1 to 5 are the caller's.
        let mapped = unsafe { self.map_by(choice, (Some(class), shared), list, attributes, out) };
        let (mapping, used, failed) = mapped?;
        let ns = self.since(start);
        let (size, kind) = (&mut self.sizes[class], mapping.kind());
        size.counts[kind.choice() as usize] += 1;
        // Not counted if the pool mapped it uncopied: that says nothing of the ring. A failed attempt in the ring and the copy after it count as the
        // cost of mapping.
        let timed = (kind != Kind::Pool(Way::Direct)).then(|| {
            let way = if failed { Choice::Map } else { kind.choice() };
            size.cell.note(way, Half::Map, ns);
            // Fits a `u8`: see `classes`.
            (class as u8, way)
        });
        Ok((mapping.with_timed(timed), used))
    }

    /// Maps a list of this class (`None` above all of them), by `choice` where possible. Returns the mapping, the number of segments in `out`, and
    /// whether the ring failed.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    // Inlined: otherwise a store-forwarding stall at the result (see `RawMapping`) costs as much as the rest of the call.
    #[inline(always)]
    pub(super) unsafe fn map_by(
        &mut self,
        choice: Choice,
        (class, shared): (Option<usize>, bool),
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize, bool), DmaMapError> {
        let mut failed = false;
        if choice == Choice::Map {
            let refused = if shared {
                // SAFETY: clauses 1 to 5 are the caller's.
                match unsafe { self.map_cut(list, attributes, out) } {
                    Ok(Some(mapping)) => return Ok((mapping, 1, false)),
                    Ok(None) => None,
                    Err(error) => Some(error),
                }
            } else {
                // SAFETY: the ring's clauses are the caller's clause 2.
                match unsafe { self.ring.map_sg(list, self.direction, out) } {
                    Ok((mapping, used)) => return Ok((mapping, used, false)),
                    Err(error) => Some(error),
                }
            };
            if let Some(error) = refused {
                failed = true;
                if self.falls_back_to_mapping(error, class)?
                    && !shared
                    // SAFETY: clauses 1 to 5 are the caller's.
                    && let Some((mapping, used)) = unsafe { self.map_alone(list, out) }?
                {
                    return Ok((mapping, used, true));
                }
            }
        }
        let (needed, room) = (list.len(), out.len());
        if room < needed {
            return Err(MapListError::NoRoom { needed, room }.into());
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        let mapping = unsafe { self.pool.map(list, self.direction, attributes) }?;
        let (mapping, used) = self.of_pool(&mapping, out);
        Ok((mapping, used, failed))
    }

    /// Maps outside of the ring, uncopied, a list that the ring has refused, for which `out` has room. `None` without addresses or tables for that,
    /// which slots do not need.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[cold]
    #[inline(never)]
    unsafe fn map_alone(
        &self,
        list: &[PhysSegment],
        out: &mut [DmaSegment],
    ) -> Result<Option<(RawMapping, usize)>, DmaMapError> {
        // SAFETY: clauses 1 to 3 are the caller's.
        match unsafe { self.pool.map_uncopied(list, self.direction) } {
            Ok(mapping) => Ok(Some(self.of_pool(&mapping, out))),
            Err(error) if error.may_be_reached() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Maps the middle of a list with shared ends in the ring, with slots in place of the ends. `None` if that is impossible.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline(never)]
    unsafe fn map_cut(
        &mut self,
        list: &[PhysSegment],
        attributes: Attributes,
        out: &mut [DmaSegment],
    ) -> Result<Option<RawMapping>, DmaMapError> {
        let ([first, ..], true) = (list, list.len() <= out.len()) else { return Ok(None) };
        // SAFETY: clauses 1 to 3 are the caller's.
        let Some(taken) = (unsafe { self.ends.take(list, self.direction, attributes) }) else {
            return Ok(None);
        };
        // SAFETY: the ring's clauses: between the ends the caller's clause 2; the ends are slots' memory, which only the pool's copies use until it
        // is given back, after a commit.
        match unsafe { self.ring.map(self.ends.linked(), self.direction) } {
            Ok(mapping) => {
                let offset = first.phys.page_offset(self.ring.device().domain().granule());
                // The ring's mapping begins with a granule.
                let mapping = RawMapping { iova: Iova::new(mapping.iova.get() | offset), ..mapping };
                out[0] = DmaSegment { iova: mapping.iova, len: taken.len() };
                Ok(Some(mapping.cut(self.ends.keep(taken))))
            }
            Err(error) => {
                self.ends.refuse(taken, error.may_be_reached());
                Err(error)
            }
        }
    }

    /// For a list that the ring refused with `error`: returns `true` to map it outside of the ring, `false` to copy it, or the error for the caller.
    #[cold]
    fn falls_back_to_mapping(&self, error: DmaMapError, class: Option<usize>) -> Result<bool, DmaMapError> {
        match error {
            DmaMapError::Full if self.ring.waiting() > 0 => Err(error),
            DmaMapError::Full
            | DmaMapError::TooLong { .. }
            | DmaMapError::List(MapListError::TooLarge { .. }) => {
                let cell = class.map(|class| &self.sizes[class].cell);
                Ok(!cell.is_some_and(|cell| cell.copies_rather_than_wait(self.commits.ns())))
            }
            // The tables have no room, or cannot point to the buffer.
            DmaMapError::List(MapListError::Map(_)) => Ok(false),
            // Includes `Unconfirmed`, which the caller must get: devices may still reach entries.
            error => Err(error),
        }
    }

    #[inline]
    fn of_pool(&self, mapping: &PoolMapping<'_>, out: &mut [DmaSegment]) -> (RawMapping, usize) {
        (RawMapping::of_pool(mapping, self.number()), mapping.write_segments(out))
    }
}
