//! A queue's lane, one of seven, and the lanes of coherent devices that no swiotlb copies for.

use alloc::boxed::Box;

use super::lane::{Common, Lane, Unmapped};
use super::not_coherent::NotCoherent;
use super::swiotlb::Copies;
use super::{DmaMapError, DmaUnmapError, Machine, Strategy};
use crate::addr::{Direction, DmaSegment, IovaRange, PhysSegment};
use crate::bounce::pool::{PoolMapping, Toward};
use crate::dma::machine::{AdaptiveOf, BatchOf, CopyingOf, RingOf};
use crate::dma::mapping::Kind;
use crate::dma::told::Told;
use crate::dma::{Ended, NotUnmapped, RawMapping};
use crate::domain::{MapListError, Rule, UnmapError};

pub(super) struct Direct;

// `u8`, as every call looks at the tag.
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

/// Evaluates `$call` with the lane as `$lane`.
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

impl<X: Machine> Lane<X> for Direct {
    #[inline]
    unsafe fn map_for(
        &mut self,
        queue: &Common<X>,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError> {
        // SAFETY: clauses 1 and 3 are the caller's.
        Ok(unsafe { queue.map_directly(list, direction, out) }?)
    }

    unsafe fn unmap_for(&mut self, queue: &mut Common<X>, mapping: RawMapping) -> Unmapped {
        let Some(range) = queue.pages(&mapping) else { return Ok(Ended::Done(())) };
        let ended = queue.device.end_beside(range, mapping.beside());
        queue.ended(ended)
    }
}

impl<X: Machine> Lane<X> for BatchOf<X> {
    #[inline]
    unsafe fn map_for(
        &mut self,
        queue: &Common<X>,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError> {
        // SAFETY: clauses 1 and 3 are the caller's.
        Ok(unsafe { queue.map_directly(list, direction, out) }?)
    }

    #[inline(always)]
    unsafe fn unmap_for(&mut self, queue: &mut Common<X>, mapping: RawMapping) -> Unmapped {
        if self.is_full() {
            // Its commit failed. This unmap cannot report what the next try ends: a later commit does.
            match self.commit() {
                Ok(_) => self.told().take_back(),
                Err(error) => return Err(NotUnmapped::of_commit(Some(mapping), error)),
            }
        }
        let range = queue.pages(&mapping);
        let used = range.map_or(0, IovaRange::len) - mapping.beside();
        if let Err(error) = self.unlink(range, used) {
            // The commit invalidates all of the range, even if another caller had unmapped a part. It does not end parts that are still mapped.
            let waits = matches!(error, UnmapError::NotMapped { .. });
            return Err(NotUnmapped { mapping: None, waits, error: error.into() });
        }
        if !self.is_full() {
            return Ok(Ended::Pending);
        }
        match self.commit() {
            Ok(_) => Ok(Ended::Flushed(())),
            Err(error) => Err(NotUnmapped::of_commit(None, error)),
        }
    }

    fn commit_for(&mut self, _: &Common<X>) -> Result<usize, DmaUnmapError> {
        self.commit()
    }

    fn waiting_for(&self, _: &Common<X>) -> usize {
        self.len()
    }

    fn told_for(&mut self, _: &Common<X>) -> Option<&mut Told> {
        Some(self.told())
    }
}

/// A list longer than the whole ring is mapped by itself, and ends strictly.
impl<X: Machine> Lane<X> for RingOf<X> {
    #[inline]
    unsafe fn map_for(
        &mut self,
        queue: &Common<X>,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError> {
        // SAFETY: clauses 1 and 3 are the caller's.
        match unsafe { self.map_list_sg(list, direction, out) } {
            Ok((mapping, used)) => Ok((used, mapping)),
            // SAFETY: clauses 1 and 3 are the caller's.
            Err(DmaMapError::TooLong { .. }) => Ok(unsafe { queue.map_directly(list, direction, out) }?),
            Err(error) => Err(error),
        }
    }

    unsafe fn unmap_for(&mut self, queue: &mut Common<X>, mapping: RawMapping) -> Unmapped {
        if mapping.kind() != Kind::Alone {
            return self.unmap(mapping);
        }
        let Some(range) = queue.pages(&mapping) else { return Ok(Ended::Done(())) };
        let ended = queue.device.domain().end(range, mapping.beside(), Rule::Strictly, |_| ());
        queue.ended(ended)
    }

    fn commit_for(&mut self, _: &Common<X>) -> Result<usize, DmaUnmapError> {
        self.commit()
    }

    fn waiting_for(&self, _: &Common<X>) -> usize {
        self.waiting()
    }

    fn told_for(&mut self, _: &Common<X>) -> Option<&mut Told> {
        Some(self.told())
    }
}

impl<X: Machine> Lane<X> for CopyingOf<X> {
    #[inline]
    unsafe fn map_for(
        &mut self,
        queue: &Common<X>,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError> {
        let (needed, room) = (list.len(), out.len());
        if room < needed {
            return Err(MapListError::NoRoom { needed, room }.into());
        }
        // SAFETY: the pool's clauses: 1 and 3 are the caller's clause 2, and 2 is clause 1.
        let mapping = unsafe { self.map(list, direction, queue.attributes) }?;
        Ok(of_pool(&mapping, queue.number, out))
    }

    #[inline]
    unsafe fn unmap_for(&mut self, queue: &mut Common<X>, mapping: RawMapping) -> Unmapped {
        // SAFETY: `unmap`'s clauses 1 and 3: by clause 1 this has the only token of an open mapping, which syncs borrow, so no other unmap or sync runs now or later.
        // Clause 2: `map_raw`'s clause 2 holds until this returns.
        let ended = unsafe { self.pool().unmap_by(queue.rule(), mapping.iova, mapping.word) };
        queue.ended_copy(ended)
    }

    unsafe fn sync_for(
        &self,
        _: &Common<X>,
        mapping: &RawMapping,
        into: Toward,
        part: (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        // SAFETY: the pool's clause 1: the mapping is borrowed, so it does not end meanwhile, and a queue is not `Sync`, so no two of its syncs run
        // together. Clause 2 is `map_raw`'s clause 2, of the mapping's caller.
        unsafe { self.pool().sync_toward(mapping.iova, part, into) }
    }
}

impl<X: Machine> Lane<X> for AdaptiveOf<X> {
    #[inline]
    unsafe fn map_for(
        &mut self,
        queue: &Common<X>,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError> {
        if list.len() > 1 {
            // SAFETY: clauses 1 to 3 are the caller's; a queue is not `Sync`, so no two syncs meet.
            if let Some((mapping, used)) = unsafe { self.map_in_ring(list, direction, out) }? {
                return Ok((used, mapping));
            }
        }
        if out.len() >= list.len()
            // SAFETY: clauses 1 to 3 are the caller's; a queue is not `Sync`, so no two syncs meet.
            && let Some(copied) = unsafe { self.copy_fast(list, direction, queue.attributes) }
        {
            return Ok(of_pool(&copied?, queue.number, out));
        }
        // SAFETY: clauses 1 to 3 are the caller's; a queue is not `Sync`, so no two syncs meet.
        let (mapping, used) = unsafe { self.map_toward(list, direction, queue.attributes, out) }?;
        Ok((used, mapping))
    }

    #[inline]
    unsafe fn unmap_for(&mut self, queue: &mut Common<X>, mapping: RawMapping) -> Unmapped {
        let kind = mapping.kind();
        if matches!(kind, Kind::Pool(_)) && mapping.timed().is_none() {
            // SAFETY: `unmap`'s clauses, as for a queue that copies.
            let ended = unsafe { self.end_fast(mapping.iova, mapping.word) };
            return queue.ended_copy(ended);
        }
        match self.unmap(mapping) {
            Err(failed) if !kind.is_in_ring() => queue.ended_copy(Err(failed.error)),
            ended => ended,
        }
    }

    unsafe fn sync_for(
        &self,
        _: &Common<X>,
        mapping: &RawMapping,
        into: Toward,
        part: (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        self.sync(mapping, into, part)
    }

    fn commit_for(&mut self, _: &Common<X>) -> Result<usize, DmaUnmapError> {
        self.commit()
    }

    fn waiting_for(&self, _: &Common<X>) -> usize {
        self.waiting()
    }

    fn told_for(&mut self, _: &Common<X>) -> Option<&mut Told> {
        Some(self.told())
    }
}

#[inline]
fn of_pool(mapping: &PoolMapping<'_>, queue: u64, out: &mut [DmaSegment]) -> (usize, RawMapping) {
    (mapping.write_segments(out), RawMapping::of_pool(mapping, queue))
}
