//! Maps by number, each by its lane. A list is mapped as a whole or not at all.

use super::swiotlb::Copied;
use super::{DmaMapError, Lane, Queue};
use crate::addr::{Direction, DmaSegment, IovaRange, PhysSegment};
use crate::bounce::pool::PoolMapping;
use crate::dma::Machine;
use crate::dma::mapping::Kind;
use crate::dma::{DmaBuffer, RawMapping};
use crate::domain::MapListError;

impl<X: Machine, B: DmaBuffer> Queue<X, B> {
    /// Lets the device reach the bytes of `list`, or a copy of them, and writes the device's segments to `out`: touching ones are merged.
    /// Returns their number, at most `list.len()`; `out` must have room for that many.
    ///
    /// Cost and context as for the strategy's part: [`DmaDevice::map_sg`](crate::dma::DmaDevice::map_sg), and with the feature `parts`
    /// `StrictRing::map_sg`, `BounceDevice::map`, `Swiotlb::map`. For a [non-coherent](super::Device::not_coherent) device a map allocates notes
    /// of the list, unless an earlier one left them, and a map and an unmap take a step for each cache line; a commit, and the unmap that
    /// completes a batch, a step for each line of all that waited.
    ///
    /// # Errors
    /// [`DmaMapError`]: the list is mapped as a whole or not at all.
    ///
    /// # Safety
    /// The mapping *lasts* until one of these has ended it:
    ///
    /// - an [unmap](Self::unmap_raw) that returns [`Ended::Flushed`](crate::dma::Ended::Flushed) or [`Ended::Done`](crate::dma::Ended::Done), under a lazy
    ///   policy together with the flush that this owes;
    /// - after [`Ended::Pending`](crate::dma::Ended::Pending), and after an error that [waits](crate::dma::NotUnmapped::waits): the next
    ///   [`Ended::Flushed`](crate::dma::Ended::Flushed), or the next successful [`commit`](Self::commit);
    /// - after [`MapListError::Unconfirmed`]: a successful [flush](crate::domain::Domain::flush) of the domain.
    ///
    /// From the call on and as long as the mapping lasts:
    ///
    /// 1. The memory is the caller's to open to the device, as for [`Domain::map`](crate::domain::Domain::map), clauses 1 and 2.
    /// 2. If the queue copies, all bytes of `list` are memory that the CPU reaches through the domain's [memory](Machine::Memory), and only
    ///    devices and atomic accesses touch them while a call to this queue copies: this, the mapping's syncs and its unmap.
    /// 3. Only this queue ends the mapping.
    /// 4. For a [non-coherent](super::Device::not_coherent) device, all bytes of `list` are memory that CPUs reach. (A CPU's stores to memory that
    ///    such a device writes, between the map and the mapping's end, are lost, unless a sync gives them to the device.)
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
        if let ([segment], [place, ..], Lane::Auto(lane)) = (list, &mut *out, &mut self.lane)
            // SAFETY: clauses 1 to 4 are the caller's.
            && let Some(range) = unsafe { lane.map_fast(*segment, direction) }
        {
            let first = self.device.first_of(*segment, range);
            *place = DmaSegment { iova: first, len: segment.len };
            return Ok((RawMapping::in_pages(first, range, segment.len, self.number | Kind::RING), 1));
        }
        // SAFETY: clauses 1 to 4 are the caller's.
        match unsafe { self.map_otherwise(list, direction, out) } {
            // Word by word: where both paths meet the words are in registers, not in memory that a call was given.
            Ok((used, RawMapping { iova, word, tag })) => Ok((RawMapping { iova, word, tag }, used)),
            Err(error) => Err(error),
        }
    }

    /// The fast path: maps one segment. Otherwise returns `None`, with nothing changed.
    ///
    /// # Safety
    /// As [`map_raw`](Self::map_raw).
    #[inline(always)]
    pub(super) unsafe fn map_fast(
        &mut self,
        segment: PhysSegment,
        direction: Direction,
    ) -> Option<RawMapping> {
        let alone = self.number | Kind::ALONE;
        match &mut self.lane {
            Lane::Ring(ring) => {
                // SAFETY: clauses 1 and 3 are the caller's.
                let range = unsafe { ring.map_fast(segment, direction) };
                range.map(|range| ring.mapped_fast(segment, range))
            }
            Lane::Direct | Lane::Batch(_) => match self.device.passed_through(segment) {
                Some(first) => Some(RawMapping::untranslated(first, alone)),
                None => {
                    // SAFETY: `Domain::map`'s clauses are the caller's clause 1.
                    let range = unsafe { self.device.map_fast(segment, direction) };
                    let first = |range| self.device.first_of(segment, range);
                    range.map(|range| RawMapping::in_pages(first(range), range, segment.len, alone))
                }
            },
            _ => None,
        }
    }

    /// The slow path of [`map_raw`](Self::map_raw).
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
        let queue = self.number;
        match &mut self.lane {
            Lane::Bounce(device) => {
                let (needed, room) = (list.len(), out.len());
                if room < needed {
                    return Err(MapListError::NoRoom { needed, room }.into());
                }
                // SAFETY: the pool's clauses: 1 and 3 are the caller's clause 2, and 2 is clause 1.
                let mapping = unsafe { device.map(list, direction, self.attributes) }?;
                Ok(of_pool(&mapping, queue, out))
            }
            Lane::Auto(lane) => {
                if list.len() > 1 {
                    // SAFETY: clauses 1 to 3 are the caller's; a queue is not `Sync`, so no two syncs meet.
                    if let Some((mapping, used)) = unsafe { lane.map_in_ring(list, direction, out) }? {
                        return Ok((used, mapping));
                    }
                }
                if out.len() >= list.len()
                    // SAFETY: clauses 1 to 3 are the caller's; a queue is not `Sync`, so no two syncs meet.
                    && let Some(copied) = unsafe { lane.copy_fast(list, direction, self.attributes) }
                {
                    return Ok(of_pool(&copied?, queue, out));
                }
                // SAFETY: clauses 1 to 3 are the caller's; a queue is not `Sync`, so no two syncs meet.
                let (mapping, used) = unsafe { lane.map_toward(list, direction, self.attributes, out) }?;
                Ok((used, mapping))
            }
            Lane::Swiotlb(copies) => {
                // SAFETY: the pool's clauses are the caller's clause 2.
                let (Copied { first, is_list, word }, used) = unsafe { copies.map(list, direction, out) }?;
                let tag = queue | Kind::Swiotlb { is_list }.bits();
                Ok((used, RawMapping { iova: first, word, tag }))
            }
            Lane::NotCoherent(lane) => {
                // SAFETY: clauses 1 to 4 are the caller's.
                let (used, first, index) = unsafe { lane.map(list, direction, out) }?;
                let tag = queue | Kind::NotCoherent.bits();
                Ok((used, RawMapping { iova: first, word: index as u64, tag }))
            }
            // SAFETY: clauses 1 and 3 are the caller's.
            Lane::Ring(ring) => match unsafe { ring.map_list_sg(list, direction, out) } {
                Ok((mapping, used)) => Ok((used, mapping)),
                // The list is longer than the ring, and never fits into it.
                Err(DmaMapError::TooLong { .. }) => {
                    // SAFETY: clauses 1 and 3 are the caller's.
                    Ok(unsafe { self.map_list_alone(list, direction, out) }?)
                }
                Err(error) => Err(error),
            },
            // SAFETY: clauses 1 and 3 are the caller's.
            Lane::Direct | Lane::Batch(_) => Ok(unsafe { self.map_list_alone(list, direction, out) }?),
        }
    }

    /// Maps a list directly.
    ///
    /// # Safety
    /// As [`map_raw`](Self::map_raw).
    #[inline(never)]
    unsafe fn map_list_alone(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), MapListError> {
        // SAFETY: the domain's clauses are the caller's clauses 1 and 3.
        let mapped = unsafe { self.device.map_list_sg(list, direction, out, RawMapping::fits) };
        let ((first, range, beside, count), tag) = (mapped?, self.number | Kind::ALONE);
        let in_pages = |range: IovaRange| RawMapping::in_pages(first, range, range.len() - beside, tag);
        Ok((count, range.map_or(RawMapping::untranslated(first, tag), in_pages)))
    }
}

/// Writes the device's segments of a pool's mapping, and returns their number, with the mapping of `queue`.
#[inline]
fn of_pool(mapping: &PoolMapping<'_>, queue: u64, out: &mut [DmaSegment]) -> (usize, RawMapping) {
    (mapping.write_segments(out), RawMapping::of_pool(mapping, queue))
}
