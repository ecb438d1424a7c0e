//! What a queue asks of its strategy: to map, to unmap, to sync, to commit. One type implements it for each strategy (`lanes`).

use alloc::boxed::Box;

use super::not_coherent::NotCoherent;
use super::swiotlb::Copies;
use super::{DmaMapError, DmaUnmapError, Machine, Strategy};
use crate::addr::{Direction, DmaSegment, IovaRange, PhysSegment};
use crate::bounce::pool::{Attributes, Rule};
use crate::dma::device::Side;
use crate::dma::machine::{AdaptiveOf, BatchOf, CopyingOf, DeviceOf, RingOf};
use crate::dma::mapping::Kind;
use crate::dma::told::Told;
use crate::dma::{Ended, NotUnmapped, RawMapping};
use crate::domain::{MapListError, UnmapError};

/// The result of an unmap by number.
pub(super) type Unmapped = Result<Ended<(), ()>, NotUnmapped<RawMapping>>;

/// One strategy of a queue. Only mappings of the same queue come to it.
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

    /// Ends a mapping, or has it wait for its batch. An unmap that a flush of the domain completes is [owed](Common::owed).
    fn unmap_for(&mut self, queue: &mut Common<X>, mapping: RawMapping) -> Unmapped;

    /// Syncs `part` (offset and length) of an open mapping.
    fn sync_for(
        &self,
        queue: &Common<X>,
        _mapping: &RawMapping,
        side: Side,
        _part: (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        queue.device.sync(side);
        Ok(())
    }

    /// The device's segments of a mapping, if the lane keeps them.
    fn segments_for(&self, _queue: &Common<X>, _mapping: &RawMapping) -> Option<&[DmaSegment]> {
        None
    }

    /// Ends all mappings that wait for their batch. Returns their number.
    fn commit_for(&mut self, _queue: &Common<X>) -> Result<usize, DmaUnmapError> {
        Ok(0)
    }

    /// The mappings that wait for a commit.
    fn waiting_for(&self, _queue: &Common<X>) -> usize {
        0
    }

    /// The account of commits' mappings, if the driver is told of any.
    fn told_for(&mut self, _queue: &Common<X>) -> Option<&mut Told> {
        None
    }
}

/// What a queue has besides its lane and its buffers.
pub(super) struct Common<X: Machine> {
    pub device: DeviceOf<X>,
    pub attributes: Attributes,
    /// Tells its mappings from another queue's; the number of the ring, if it has one.
    pub number: u64,
    /// Single unmaps that were not confirmed, and wait for a flush of the domain.
    pub owed: usize,
}

impl<X: Machine> Common<X> {
    /// Maps a list directly.
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

    /// The pages of a mapping, as [`RawMapping::pages`].
    #[inline]
    pub fn pages(&self, mapping: &RawMapping) -> Option<IovaRange> {
        mapping.pages(self.device.domain().granule())
    }

    /// Ends a directly mapped one by the device's policy.
    pub fn unmap_directly(&mut self, mapping: &RawMapping) -> Unmapped {
        let Some(range) = self.pages(mapping) else {
            return Ok(Ended::Done(()));
        };
        let ended = self.device.end_beside(range, mapping.beside());
        self.ended(ended)
    }

    /// Ends a directly mapped one strictly.
    pub fn unmap_strictly(&mut self, mapping: &RawMapping) -> Unmapped {
        let Some(range) = self.pages(mapping) else {
            return Ok(Ended::Done(()));
        };
        let ended = self.device.domain().end_now(range, mapping.beside(), |_| ());
        self.ended(ended)
    }

    /// As where a queue maps directly: a device's own policy holds for all of its mappings.
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

    /// The error of a mapping that did not end, and whether it waits: if it is unmapped, by this call or another, the flush of the next
    /// commit ends it; if it is still mapped, no flush does.
    #[cold]
    fn not_ended(&mut self, error: UnmapError) -> NotUnmapped<RawMapping> {
        let waits = matches!(error, UnmapError::Unconfirmed { .. } | UnmapError::NotMapped { .. });
        self.owed += usize::from(waits);
        NotUnmapped { mapping: None, waits, error: error.into() }
    }
}

/// Each mapping by itself, by the device's policy.
pub(super) struct Direct;

// One byte tells them apart, as every call does that.
#[repr(u8)]
pub(super) enum AnyLane<X: Machine> {
    Direct(Direct),
    Batch(BatchOf<X>),
    Ring(RingOf<X>),
    Bounce(CopyingOf<X>),
    Auto(Box<AdaptiveOf<X>>),
    Swiotlb(Box<Copies<X>>),
    NotCoherent(Box<NotCoherent>),
}

/// Calls `$call` of the lane's strategy, `$lane`.
macro_rules! by_lane {
    ($any:expr, $lane:ident => $call:expr) => {
        match $any {
            AnyLane::Direct($lane) => $call,
            AnyLane::Batch($lane) => $call,
            AnyLane::Ring($lane) => $call,
            AnyLane::Bounce($lane) => $call,
            AnyLane::Auto($lane) => $call,
            AnyLane::Swiotlb($lane) => $call,
            AnyLane::NotCoherent($lane) => $call,
        }
    };
}
pub(super) use by_lane;

impl<X: Machine> AnyLane<X> {
    pub fn strategy(&self) -> Strategy {
        match self {
            Self::Direct(_) => Strategy::Direct,
            Self::Batch(_) => Strategy::Batch,
            Self::Ring(_) => Strategy::Ring,
            Self::Bounce(_) | Self::Swiotlb(_) => Strategy::Bounce,
            Self::Auto(_) => Strategy::Auto,
            Self::NotCoherent(lane) => lane.strategy,
        }
    }
}
