//! A device of the trace, and what of it waits for a commit.
#![allow(unsafe_code, reason = "the library trusts its caller with memory, which here is the trace's")]

use std::sync::Arc;

use portcullis::addr::Direction;
use portcullis::bounce::pool::Attributes;
use portcullis::bounce::{pool, swiotlb};
use portcullis::dma::{
    AdaptiveMapError, AdaptiveRing, AdaptiveUnmap, AdaptiveUnmapError, BatchError, DmaDevice, DmaSegment,
    Explained, RawBatch, RingError, StrictRing, StrictRingConfig,
};
use portcullis::domain::{MapListError, PhysSegment, UnmapError};
use portcullis::iova::ArenaError;
use portcullis::mapper::Mapper;
use portcullis::platform::Platform;

use super::live::{Live, Way};
use super::memory::TraceMemory;
use super::mode::{BATCH_UNMAPS, COMMIT_WITHIN_NS, Mode, RING_BATCH, RING_PAGES};
use super::pools::{Pool, Side};
use crate::Origin;

/// A batch or a ring, and the mappings that wait in it.
struct Lane<M: Mapper, P: Platform> {
    kind: Kind<M, P>,
    waiting: Vec<Live>,
    /// When the first of them came.
    since_ns: u64,
}

enum Kind<M: Mapper, P: Platform> {
    Batch(RawBatch<M, P>),
    Ring(StrictRing<M, P>),
    Adaptive(AdaptiveRing<M, P, Arc<TraceMemory>, Clock>),
}

/// The time that costs are measured by.
pub(super) type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

/// A mapping that was not made.
pub(super) enum MapFailed {
    /// Its ring is full.
    Full,
    Error(MapListError),
    Ring(RingError),
    Bounce(pool::BounceMapError),
    Swiotlb(swiotlb::BounceError),
    Adaptive(AdaptiveMapError),
}

/// Which way a mapping is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Course {
    /// By the device's own calls, and the domain's policy.
    Alone,
    /// By a lane.
    Lane(usize),
    /// By the pool of bounce buffers.
    Pool,
}

impl Course {
    pub(super) fn lane(self) -> Option<usize> {
        match self {
            Self::Lane(index) => Some(index),
            Self::Alone | Self::Pool => None,
        }
    }
}

/// An unmap or a commit that did not do all it was to.
#[derive(Debug, thiserror::Error)]
pub enum EndError {
    /// Of one mapping by itself.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
    /// Of a batch.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// Of a ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Of a mapping through the pool of its domain.
    #[error(transparent)]
    Bounce(#[from] pool::BounceError),
    /// Of a mapping that was copied or mapped.
    #[error(transparent)]
    Adaptive(#[from] AdaptiveUnmapError),
    /// Of a mapping through the pool of a machine without an IOMMU.
    #[error(transparent)]
    Swiotlb(#[from] swiotlb::MappingError),
}

/// When a mapping that was unmapped has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    Now,
    /// With all that wait in the lane.
    WithLane,
    Later,
}

/// A device of the trace.
pub(super) struct Port<M: Mapper, P: Platform> {
    pub device: DmaDevice<M, P>,
    mode: Mode,
    pub pool: Option<Pool<M, P>>,
    /// One for all directions, or for rings one for each.
    lanes: [Option<Lane<M, P>>; 3],
}

impl<M: Mapper, P: Platform> Port<M, P> {
    pub(super) fn new(device: DmaDevice<M, P>, mode: Mode, pool: Option<Pool<M, P>>) -> Self {
        let mut lanes = [None, None, None];
        if mode == Mode::StrictBatch {
            let batch = RawBatch::new(&device, BATCH_UNMAPS);
            lanes[0] = Some(Lane { kind: Kind::Batch(batch), waiting: Vec::new(), since_ns: 0 });
        }
        Self { device, mode, pool, lanes }
    }

    /// Whether there is all that a mapping will need.
    pub(super) fn is_ready(&self, direction: Direction, origin: Origin) -> bool {
        self.course(direction, origin).lane().is_none_or(|index| self.lanes[index].is_some())
    }

    /// Makes the ring that a mapping will come from, of the next of `colours`, as a driver would when it starts.
    pub(super) fn prepare(
        &mut self,
        direction: Direction,
        origin: Origin,
        colours: &mut u32,
        clock: impl FnOnce() -> Clock,
    ) -> Result<(), RingError> {
        let Some(index) = self.course(direction, origin).lane() else {
            return Ok(());
        };
        if self.lanes[index].is_none() {
            let granule = self.device.domain().granule().bytes();
            let config = StrictRingConfig::new(RING_PAGES, granule, RING_BATCH);
            let config = StrictRingConfig { colour: Some(*colours), ..config };
            *colours += 1;
            let kind = match self.pool.as_ref().and_then(Pool::bounce_device) {
                Some(pool) => {
                    let (device, pool) = (&self.device, pool.clone());
                    Kind::Adaptive(AdaptiveRing::new(device, pool, direction, config, clock())?)
                }
                None => Kind::Ring(StrictRing::new(&self.device, config)?),
            };
            self.lanes[index] = Some(Lane { kind, waiting: Vec::new(), since_ns: 0 });
        }
        Ok(())
    }

    /// The way of mappings of an origin. What lives as long as its driver, and is not synced, goes alone: a ring
    /// would be full as soon as it came round to it, a bounce buffer would never be copied, and memory that goes back
    /// to its allocator is unmapped at once.
    pub(super) fn course(&self, direction: Direction, origin: Origin) -> Course {
        match (self.mode, origin, direction) {
            (Mode::Each(_), ..) | (_, Origin::Coherent | Origin::Resource, _) => Course::Alone,
            (Mode::Bounce | Mode::Adaptive | Mode::Swiotlb, Origin::Direct, _) => Course::Alone,
            (Mode::Bounce | Mode::Swiotlb, ..) => Course::Pool,
            (Mode::StrictBatch, ..) => Course::Lane(0),
            (Mode::StrictRing | Mode::Adaptive, ..) => Course::Lane(direction.index()),
        }
    }

    /// Maps a list. How, and how many segments that is for the device.
    #[inline]
    pub(super) fn map(
        &mut self,
        course: Course,
        list: &[PhysSegment],
        direction: Direction,
        view: &mut [DmaSegment],
    ) -> Result<(Way, usize), MapFailed> {
        if let (Course::Pool, Some(pool)) = (course, &self.pool) {
            return pool.map(list, direction, view);
        }
        let mut lane = course.lane().and_then(|index| self.lanes[index].as_mut());
        if let Some(Lane { kind: Kind::Ring(ring), .. }) = &mut lane {
            // SAFETY: the memory is simulated: its bytes are atomics, and only simulated devices reach them.
            match unsafe { ring.map_sg(list, direction, view) } {
                Ok((mapping, used)) => return Ok((Way::Ring(mapping), used)),
                // It never fits: alone, then.
                Err(RingError::Arena(ArenaError::Oversize { .. })) => {}
                Err(error) if error.is_full() => return Err(MapFailed::Full),
                Err(error) => return Err(MapFailed::Ring(error)),
            }
        }
        if let Some(Lane { kind: Kind::Adaptive(ring), .. }) = &mut lane {
            // SAFETY: the memory is simulated, and all accesses to it are this thread's.
            let mapped = unsafe { ring.map(list, Attributes::default(), view) };
            let (mapping, used) = mapped.map_err(MapFailed::Adaptive)?;
            return Ok((Way::Adaptive(mapping), used));
        }
        let is_batch = self.mode == Mode::StrictBatch && lane.is_some();
        let way = if is_batch { Way::Batch } else { Way::Alone };
        // SAFETY: as above.
        let used = unsafe { self.device.map_sg(list, direction, view) }.map_err(MapFailed::Error)?;
        Ok((way, used))
    }

    /// Unmaps a mapping, in the way that it was made. When it has ended.
    #[inline]
    pub(super) fn unmap(
        &mut self,
        lane: Option<usize>,
        way: Way,
        view: &[DmaSegment],
    ) -> Result<Ended, EndError> {
        let lane = lane.and_then(|index| self.lanes[index].as_mut());
        match (way, lane.map(|lane| &mut lane.kind)) {
            (way @ (Way::Pool { .. } | Way::Swiotlb), _) => {
                self.pool.as_ref().map_or(Ok(()), |pool| pool.unmap(&way, view))?;
                Ok(Ended::Now)
            }
            (Way::Ring(mapping), Some(Kind::Ring(ring))) => match ring.unmap(mapping) {
                Ok(portcullis::dma::RingUnmap::Waiting) => Ok(Ended::Later),
                Ok(portcullis::dma::RingUnmap::Committed) => Ok(Ended::WithLane),
                Err(failed) => Err(failed.error.into()),
            },
            (Way::Adaptive(mapping), Some(Kind::Adaptive(ring))) => match ring.unmap(mapping) {
                Ok(AdaptiveUnmap::Done) => Ok(Ended::Now),
                Ok(AdaptiveUnmap::Waiting) => Ok(Ended::Later),
                Ok(AdaptiveUnmap::Committed) => Ok(Ended::WithLane),
                Err(failed) => Err(failed.error.into()),
            },
            (Way::Batch, Some(Kind::Batch(batch))) => {
                self.device.unmap_sg_in(batch, view)?;
                if !batch.is_full() {
                    return Ok(Ended::Later);
                }
                batch.commit()?;
                Ok(Ended::WithLane)
            }
            _ => {
                self.device.unmap_sg(view)?;
                Ok(Ended::Now)
            }
        }
    }

    /// Syncs `len` bytes from `offset` on of a mapping that may be a copy.
    pub(super) fn sync(&self, live: &Live, side: Side, (offset, len): (u64, u64)) -> Result<(), EndError> {
        let Way::Adaptive(mapping) = &live.way else {
            return self.pool.as_ref().map_or(Ok(()), |pool| pool.sync(live, side, (offset, len)));
        };
        let lane = live.lane.and_then(|index| self.lanes[index].as_ref());
        if let Some(Lane { kind: Kind::Adaptive(ring), .. }) = lane {
            match side {
                Side::Cpu => ring.sync_for_cpu(mapping, offset, len)?,
                Side::Device => ring.sync_for_device(mapping, offset, len)?,
            }
        }
        Ok(())
    }

    /// What was chosen, and why, for sizes and directions that occurred.
    pub(super) fn explain(&self) -> Vec<Explained> {
        let rows = |lane: &Lane<M, P>| match &lane.kind {
            Kind::Adaptive(ring) => ring.explain().filter(|row| row.copied + row.mapped > 0).collect(),
            _ => Vec::new(),
        };
        self.lanes.iter().flatten().flat_map(rows).collect()
    }

    /// Keeps a mapping until its lane is committed.
    pub(super) fn hold(&mut self, lane: usize, live: Live, now_ns: u64) {
        if let Some(lane) = self.lanes[lane].as_mut() {
            if lane.waiting.is_empty() {
                lane.since_ns = now_ns;
            }
            lane.waiting.push(live);
        }
    }

    /// All that waits in lanes.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &Live> {
        self.lanes.iter().flatten().flat_map(|lane| &lane.waiting)
    }

    /// What waited in a lane that was committed.
    pub(super) fn settled(&mut self, lane: usize) -> Vec<Live> {
        self.lanes[lane].as_mut().map(|lane| std::mem::take(&mut lane.waiting)).unwrap_or_default()
    }

    /// Commits what waits in a lane.
    pub(super) fn commit(&mut self, lane: usize) -> Result<(), EndError> {
        match self.lanes[lane].as_mut().map(|lane| &mut lane.kind) {
            Some(Kind::Batch(batch)) => drop(batch.commit()?),
            Some(Kind::Ring(ring)) => drop(ring.commit()?),
            Some(Kind::Adaptive(ring)) => drop(ring.commit()?),
            None => {}
        }
        Ok(())
    }

    /// The lane that must be committed first, and when.
    pub(super) fn next_due(&self) -> Option<(u64, usize)> {
        let waits = |lane: &Lane<M, P>| {
            (!lane.waiting.is_empty()).then(|| lane.since_ns.saturating_add(COMMIT_WITHIN_NS))
        };
        let due = self.lanes.iter().map(|lane| lane.as_ref().and_then(waits));
        due.enumerate().filter_map(|(index, due)| Some((due?, index))).min()
    }
}
