//! The fast paths of an [adaptive ring](super::AdaptiveRing), which nearly all mappings take. Each changes nothing if it does not apply: the slow
//! path goes on.

use core::slice::from_ref;

use super::AdaptiveRing;
use super::book::class_of;
use crate::addr::{Direction, DmaSegment, Iova, IovaRange, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::bounce::pool::{Attributes, PoolMapping};
use crate::dma::RawMapping;
use crate::dma::mapping::{Choice, Kind};
use crate::domain::Rule;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// The index in `sizes` for `list`, if `choice` is that of its size, and it is not to be timed. A list above all classes has no index, and is
    /// always mapped.
    #[inline]
    fn is_for(&self, choice: Choice, list: &[PhysSegment], direction: Direction) -> Option<Option<usize>> {
        let (len, whole) = self.pool.look_at(list);
        // Of a list with shared ends, the device may have only the middle.
        if choice == Choice::Map && !whole {
            return None;
        }
        let Some(class) = class_of(len, self.classes) else { return (choice == Choice::Map).then_some(None) };
        let index = self.place(direction, class, !whole);
        let size = self.sizes.get(index)?;
        (size.until > 0 && size.cell.choice() == choice).then_some(Some(index))
    }

    #[inline]
    fn count(&mut self, index: Option<usize>, choice: Choice) {
        if let Some(size) = index.and_then(|index| self.sizes.get_mut(index)) {
            size.until -= 1;
            size.counts[choice as usize] += 1;
        }
    }

    /// Maps one segment in the ring, if that is the choice for its size and the ring's fast path takes it, and returns its pages.
    ///
    /// # Safety
    /// As [`map`](Self::map), clauses 1 to 5.
    // Out of line, it returns in two registers.
    #[inline(never)]
    pub(in crate::dma) unsafe fn map_fast(
        &mut self,
        segment: PhysSegment,
        direction: Direction,
    ) -> Option<IovaRange> {
        let index = self.is_for(Choice::Map, from_ref(&segment), direction)?;
        // SAFETY: the ring's clause 1 is the caller's clause 2.
        let range = unsafe { self.ring.map_fast(segment, direction) }?;
        self.count(index, Choice::Map);
        Some(range)
    }

    /// Maps a list in the ring, if that is the choice for its size and the ring takes it. Returns the ring's error only if devices may reach entries.
    ///
    /// # Safety
    /// As [`map`](Self::map), clauses 1 to 5.
    #[inline]
    pub(in crate::dma) unsafe fn map_in_ring(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<Option<(RawMapping, usize)>, DmaMapError> {
        let Some(index) = self.is_for(Choice::Map, list, direction) else { return Ok(None) };
        // SAFETY: the ring's clauses are the caller's clause 2.
        match unsafe { self.ring.map_list_sg(list, direction, out) } {
            Ok(mapped) => {
                self.count(index, Choice::Map);
                Ok(Some(mapped))
            }
            Err(error) if error.may_be_reached() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Copies a list, if that is the choice for its size.
    ///
    /// # Safety
    /// As [`map`](Self::map), clauses 1 to 5.
    #[inline]
    pub(in crate::dma) unsafe fn copy_fast<'a>(
        &mut self,
        list: &'a [PhysSegment],
        direction: Direction,
        attributes: Attributes,
    ) -> Option<Result<PoolMapping<'a>, DmaMapError>> {
        if !self.met[direction.index()] {
            return None;
        }
        let index = self.is_for(Choice::Copy, list, direction)?;
        // SAFETY: clauses 1 to 3 are the caller's.
        let mapped = unsafe { self.pool.map(list, direction, attributes) };
        if let Ok(mapping) = &mapped {
            self.count(index, Kind::Pool(mapping.way()).choice());
        }
        Some(mapped)
    }

    /// Adds the pages of an untimed mapping to the batch, unless that would complete it: then returns `false`.
    #[inline(never)]
    pub(in crate::dma) fn unmap_fast(&mut self, range: IovaRange, neighbours: u64) -> bool {
        let waits = self.ring.waiting() + 1 < self.batch;
        if waits {
            self.commits.count();
            self.ring.wait_for_batch(range, neighbours);
        }
        waits
    }

    /// Ends an untimed mapping of `len` bytes that the pool made for this ring.
    ///
    /// # Safety
    /// As [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap), clauses 1 to 3.
    #[inline]
    pub(in crate::dma) unsafe fn end_fast(&mut self, first: Iova, len: u64) -> Result<(), DmaUnmapError> {
        self.commits.count();
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.pool.pool().unmap_by(Rule::Strictly, first, len) }
    }
}
