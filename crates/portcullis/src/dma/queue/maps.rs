//! Maps by address. A list is mapped as a whole or not at all.

use super::lane::Lane;
use super::lanes::by_lane;
use super::{AnyLane, DmaMapError, Queue};
use crate::addr::{Direction, DmaSegment, PhysSegment};
use crate::dma::Machine;
use crate::dma::mapping::Kind;
use crate::dma::{DmaBuffer, RawMapping};

impl<X: Machine, B: DmaBuffer> Queue<X, B> {
    /// Lets the device reach the bytes of `list`, or a copy of them, and writes the device's segments to `out`: touching ones are merged.
    /// Returns their number, at most `list.len()`; `out` must have room for that many.
    ///
    /// Cost and context as for the type behind the strategy: [`DmaDevice::map_sg`](crate::dma::DmaDevice::map_sg), and with the feature `parts`
    /// `StrictRing::map_sg`, `BounceDevice::map`, `Swiotlb::map`. For a [non-coherent](super::Device::not_coherent) device, a map allocates a record
    /// of the list, unless it can reuse an earlier one; map and unmap are O(cache lines); a commit, and the unmap that completes a batch, O(lines of
    /// all that waited).
    ///
    /// # Errors
    /// [`DmaMapError`]: the list is mapped as a whole or not at all.
    ///
    /// # Safety
    /// The mapping *lasts* until one of these has ended it:
    ///
    /// - an [unmap](Self::unmap_raw) that returns [`Ended::Flushed`](crate::dma::Ended::Flushed) or [`Ended::Done`](crate::dma::Ended::Done), under a
    ///   lazy policy together with the flush that ends its window;
    /// - after [`Ended::Pending`](crate::dma::Ended::Pending), and after an error that [waits](crate::dma::NotUnmapped::waits): the next
    ///   [`Ended::Flushed`](crate::dma::Ended::Flushed), or the next successful [`commit`](Self::commit);
    /// - after [`MapListError::Unconfirmed`](crate::domain::MapListError::Unconfirmed): a successful [flush](crate::domain::Domain::flush) of the domain.
    ///
    /// From the call on and as long as the mapping lasts:
    ///
    /// 1. The caller may let the device access the memory, as for [`Domain::map`](crate::domain::Domain::map), clauses 1 and 2.
    /// 2. If the queue copies, the CPU reaches all bytes of `list` through the domain's [memory](Machine::Memory), and only devices and atomic
    ///    accesses touch them while a call to this queue copies: this, the mapping's syncs and its unmap.
    /// 3. Only this queue ends the mapping.
    /// 4. For a [non-coherent](super::Device::not_coherent) device, all bytes of `list` are memory that CPUs reach. (A CPU's stores to memory that
    ///    such a device writes are lost between the map and the mapping's end, unless a sync gives them to the device.)
    #[inline(always)]
    pub unsafe fn map_raw(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        if let ([segment], [place, ..]) = (list, &mut *out)
            // SAFETY: clauses 1 to 4 are the caller's.
            && let Some(mapping) = unsafe { self.map_fast(*segment, direction) }
        {
            *place = DmaSegment { iova: mapping.iova, len: segment.len };
            return Ok((mapping, 1));
        }
        if let ([segment], [place, ..], AnyLane::Auto(lane)) = (list, &mut *out, &mut self.lane)
            // SAFETY: clauses 1 to 4 are the caller's.
            && let Some(range) = unsafe { lane.map_fast(*segment, direction) }
        {
            let first = self.common.device.first_of(*segment, range);
            *place = DmaSegment { iova: first, len: segment.len };
            return Ok((RawMapping::in_pages(first, range, segment.len, self.common.number | Kind::RING), 1));
        }
        // SAFETY: clauses 1 to 4 are the caller's.
        match unsafe { self.map_otherwise(list, direction, out) } {
            // Rebuilt word by word, so that the words stay in registers where the paths meet (see `RawMapping`).
            Ok((used, RawMapping { iova, word, tag })) => Ok((RawMapping { iova, word, tag }, used)),
            Err(error) => Err(error),
        }
    }

    /// The fast path: maps one segment. `None`, with nothing changed, if it cannot.
    ///
    /// # Safety
    /// As [`map_raw`](Self::map_raw).
    #[inline(always)]
    pub(super) unsafe fn map_fast(
        &mut self,
        segment: PhysSegment,
        direction: Direction,
    ) -> Option<RawMapping> {
        let alone = self.common.number | Kind::ALONE;
        match &mut self.lane {
            AnyLane::Ring(ring) => {
                // SAFETY: clauses 1 and 3 are the caller's.
                let range = unsafe { ring.map_fast(segment, direction) };
                range.map(|range| ring.mapped_fast(segment, range))
            }
            AnyLane::Direct(_) | AnyLane::Batch(_) => match self.common.device.passed_through(segment) {
                Some(first) => Some(RawMapping::untranslated(first, alone)),
                None => {
                    // SAFETY: `Domain::map`'s clauses are the caller's clause 1.
                    let range = unsafe { self.common.device.map_fast(segment, direction) };
                    let first = |range| self.common.device.first_of(segment, range);
                    range.map(|range| RawMapping::in_pages(first(range), range, segment.len, alone))
                }
            },
            _ => None,
        }
    }

    /// The slow path.
    ///
    /// # Safety
    /// As [`map_raw`](Self::map_raw).
    #[inline(never)]
    pub(super) unsafe fn map_otherwise(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError> {
        // SAFETY: clauses 1 to 4 are the caller's.
        unsafe { by_lane!(&mut self.lane, lane => lane.map_for(&self.common, list, direction, out)) }
    }
}
