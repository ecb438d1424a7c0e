//! The short ways of an [adaptive ring](super::AdaptiveRing): what nearly all mappings need, in few instructions. Each leaves
//! nothing changed where it is not the way to take, and the general way goes on.

use core::slice::from_ref;

use super::AdaptiveRing;
use super::book::class_of;
use crate::addr::{Direction, DmaSegment, Iova, IovaRange, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::bounce::pool::{Attributes, PoolMapping, Rule};
use crate::dma::RawMapping;
use crate::dma::mapping::{Choice, Kind};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// Returns the index in `sizes` of what `list` is one of, if such lists go the way of `choice`, and this one is not to be
    /// timed. What is longer than all of them has none, and is always mapped.
    #[inline]
    fn is_for(&self, choice: Choice, list: &[PhysSegment], direction: Direction) -> Option<Option<usize>> {
        let (len, whole) = self.pool.look_at(list);
        // Of what shares its ends with other data, only the middle is mapped.
        if choice == Choice::Map && !whole {
            return None;
        }
        let Some(class) = class_of(len, self.classes) else { return (choice == Choice::Map).then_some(None) };
        let index = self.place(direction, class, !whole);
        let size = self.sizes.get(index)?;
        (size.until > 0 && size.cell.choice() == choice).then_some(Some(index))
    }

    /// Counts a mapping that [went](Self::is_for) the way of `choice`.
    #[inline]
    fn count(&mut self, index: Option<usize>, choice: Choice) {
        if let Some(size) = index.and_then(|index| self.sizes.get_mut(index)) {
            size.until -= 1;
            size.counts[choice as usize] += 1;
        }
    }

    /// Maps one segment in the ring, if that was chosen for its size and is quickly done, and returns its pages. Otherwise
    /// returns `None`, with nothing changed.
    ///
    /// # Safety
    /// As [`map`](Self::map), with attributes that are not persistent.
    // Out of line, it returns in two registers.
    #[inline(never)]
    pub(in crate::dma) unsafe fn map_fast(
        &mut self,
        segment: PhysSegment,
        direction: Direction,
    ) -> Option<IovaRange> {
        let index = self.is_for(Choice::Map, from_ref(&segment), direction)?;
        // SAFETY: the caller's promise.
        let range = unsafe { self.ring.map_fast(segment, direction) }?;
        self.count(index, Choice::Map);
        Some(range)
    }

    /// Maps a list in the ring, if that was chosen for its size and the ring takes it. Otherwise returns `None`, with nothing
    /// changed.
    ///
    /// # Errors
    /// Of the ring's, those after which devices may reach what was entered of the list.
    ///
    /// # Safety
    /// As [`map`](Self::map), with attributes that are not persistent.
    #[inline]
    pub(in crate::dma) unsafe fn map_in_ring(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<Option<(RawMapping, usize)>, DmaMapError> {
        let Some(index) = self.is_for(Choice::Map, list, direction) else { return Ok(None) };
        // SAFETY: the caller's promise.
        match unsafe { self.ring.map_list_sg(list, direction, out) } {
            Ok(mapped) => {
                self.count(index, Choice::Map);
                Ok(Some(mapped))
            }
            Err(error) if error.may_be_reached() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Copies a list, if that was chosen for its size, or has to be. Otherwise returns `None`, with nothing changed.
    ///
    /// # Errors
    /// Those of the pool: nothing is changed then, either, unless devices may reach what was entered.
    ///
    /// # Safety
    /// As [`map`](Self::map).
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
        // SAFETY: the caller's promise.
        let mapped = unsafe { self.pool.map(list, direction, attributes) };
        if let Ok(mapping) = &mapped {
            self.count(index, Kind::Pool(mapping.way()).choice());
        }
        Some(mapped)
    }

    /// Has the pages of a mapping of this ring, which was not timed, wait for their batch, where that leads to no commit. Otherwise
    /// returns `false`, with nothing changed.
    #[inline(never)]
    pub(in crate::dma) fn unmap_fast(&mut self, range: IovaRange, neighbours: u64) -> bool {
        let waits = self.ring.waiting() + 1 < self.batch;
        if waits {
            self.commits.count();
            self.ring.wait_for_batch(range, neighbours);
        }
        waits
    }

    /// Ends a mapping of `len` bytes that the pool made for this ring, and that was not timed.
    ///
    /// # Errors
    /// As [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap).
    ///
    /// # Safety
    /// As [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap).
    #[inline]
    pub(in crate::dma) unsafe fn end_fast(&mut self, first: Iova, len: u64) -> Result<(), DmaUnmapError> {
        self.commits.count();
        // SAFETY: the caller's promise.
        unsafe { self.pool.pool().unmap_by(Rule::Strictly, first, len) }
    }
}
