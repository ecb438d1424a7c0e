//! A lane maps, unmaps, syncs and commits for a queue: one type for each strategy (`lanes`), for machines without an IOMMU (`swiotlb`), and for
//! non-coherent devices (`not_coherent`).

use super::{DmaMapError, DmaUnmapError, Machine};
use crate::addr::{Direction, DmaSegment, IovaRange, PhysSegment};
use crate::bounce::pool::{Attributes, Toward};
use crate::dma::machine::DeviceOf;
use crate::dma::mapping::Kind;
use crate::dma::told::Told;
use crate::dma::{Ended, NotUnmapped, RawMapping};
use crate::domain::{MapListError, Rule, UnmapError};

pub(super) type Unmapped = Result<Ended<(), ()>, NotUnmapped<RawMapping>>;

/// One strategy of a queue.
pub(super) trait Lane<X: Machine> {
    /// Maps a list as a whole or not at all. Returns the number of segments in `out`, and the mapping.
    ///
    /// # Safety
    /// As [`Queue::map_raw`](super::Queue::map_raw).
    unsafe fn map_for(
        &mut self,
        queue: &Common<X>,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError>;

    /// Ends a mapping, or adds it to a batch. Counts an unmap that needs a flush of the domain as [owed](Common::owed).
    ///
    /// # Safety
    /// 1. It is an open mapping of `queue`: its maker's clauses hold.
    unsafe fn unmap_for(&mut self, queue: &mut Common<X>, mapping: RawMapping) -> Unmapped;

    /// `part` is offset and length.
    ///
    /// # Safety
    /// As [`unmap_for`](Self::unmap_for).
    unsafe fn sync_for(
        &self,
        queue: &Common<X>,
        _mapping: &RawMapping,
        into: Toward,
        _part: (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        queue.device.sync(into);
        Ok(())
    }

    /// The device's segments of a mapping, if the lane keeps them.
    fn segments_for(&self, _queue: &Common<X>, _mapping: &RawMapping) -> Option<&[DmaSegment]> {
        None
    }

    /// Ends all waiting mappings. Returns their number.
    fn commit_for(&mut self, _queue: &Common<X>) -> Result<usize, DmaUnmapError> {
        Ok(0)
    }

    fn waiting_for(&self, _queue: &Common<X>) -> usize {
        0
    }

    /// What the lane's commits still have to report; `None` for a lane that reports nothing, or keeps its own list.
    fn told_for(&mut self, _queue: &Common<X>) -> Option<&mut Told> {
        None
    }
}

/// What every lane needs of its queue.
pub(super) struct Common<X: Machine> {
    pub device: DeviceOf<X>,
    pub attributes: Attributes,
    /// Identifies the queue in its mappings. A queue with a ring has the ring's number.
    pub number: u64,
    /// Unmaps outside of batches that were not confirmed. The next commit flushes the domain for them.
    pub owed: usize,
}

impl<X: Machine> Common<X> {
    /// Maps a list by itself, not copied.
    ///
    /// # Safety
    /// As [`Queue::map_raw`](super::Queue::map_raw), clauses 1 and 3.
    #[inline(never)]
    pub unsafe fn map_directly(
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

    #[inline]
    pub fn pages(&self, mapping: &RawMapping) -> Option<IovaRange> {
        mapping.pages(self.device.domain().granule())
    }

    /// The device's own policy holds for what the pool maps without a copy, too.
    #[inline]
    pub fn rule(&self) -> Rule<'_> {
        Rule::Policy(Some(self.device.exception()))
    }

    #[inline]
    pub fn ended(&mut self, ended: Result<(), UnmapError>) -> Unmapped {
        match ended {
            Ok(()) => Ok(Ended::Done(())),
            Err(error) => Err(self.not_ended(error)),
        }
    }

    #[inline]
    pub fn ended_copy(&mut self, ended: Result<(), DmaUnmapError>) -> Unmapped {
        match ended {
            Ok(()) => Ok(Ended::Done(())),
            Err(DmaUnmapError::Unmap(error)) => Err(self.not_ended(error)),
            Err(error) => {
                let waits = matches!(error, DmaUnmapError::Unconfirmed { .. });
                self.owed += usize::from(waits);
                Err(NotUnmapped { mapping: None, waits, error })
            }
        }
    }

    /// The error of a mapping that did not end. If its translations are removed, by this call or another, it waits: the next commit's flush ends it.
    /// If some are left, no flush ends it.
    #[cold]
    fn not_ended(&mut self, error: UnmapError) -> NotUnmapped<RawMapping> {
        let waits = matches!(error, UnmapError::Unconfirmed { .. } | UnmapError::NotMapped { .. });
        self.owed += usize::from(waits);
        NotUnmapped { mapping: None, waits, error: error.into() }
    }
}
