//! A device of the trace: its queues, and what of it waits for a commit.
#![allow(unsafe_code, reason = "a queue trusts its caller with memory, which here is the trace's")]

use portcullis::SetupError;
use portcullis::addr::{Direction, DmaSegment, PhysSegment};
use portcullis::dma::{
    Device, DmaMapError, DmaUnmapError, Ended, Explained, Machine, Queue, QueueConfig, RawMapping,
};

use super::live::Live;
use super::mode::{COMMIT_WITHIN_NS, Mode, Strategy};
use crate::Origin;

/// A queue, and the mappings that wait in it.
struct Lane<X: Machine> {
    queue: Queue<X>,
    waiting: Vec<Live>,
    /// When the first of them came.
    since_ns: u64,
}

/// For whom a part of a mapping is synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Cpu,
    Device,
}

/// A device of the trace.
pub(super) struct Port<X: Machine> {
    pub device: Device<X>,
    strategy: Strategy,
    copies: bool,
    /// For what belongs to no lane.
    alone: Queue<X>,
    /// One for all directions, or for rings one for each.
    lanes: [Option<Lane<X>>; 3],
}

impl<X: Machine> Port<X> {
    pub(super) fn new(device: Device<X>, mode: Mode) -> Result<Self, SetupError> {
        let alone = device.queue(QueueConfig::direct())?;
        let mut lanes = [None, None, None];
        let strategy = mode.strategy(device.dma().domain().granule().bytes());
        if let Strategy::One(config) = strategy {
            lanes[0] = Some(Lane::new(device.queue(config)?));
        }
        Ok(Self { device, strategy, copies: mode.copies(), alone, lanes })
    }

    /// Whether there is all that a mapping will need.
    pub(super) fn is_ready(&self, direction: Direction, origin: Origin) -> bool {
        self.lane(direction, origin).is_none_or(|index| self.lanes[index].is_some())
    }

    /// Makes the ring that a mapping will come from, of the next of `colours`, as a driver would when it starts.
    pub(super) fn prepare(
        &mut self,
        direction: Direction,
        origin: Origin,
        colours: &mut u32,
    ) -> Result<(), SetupError> {
        if let (Some(index), Strategy::Rings(config)) = (self.lane(direction, origin), self.strategy)
            && self.lanes[index].is_none()
        {
            let config = config.colour(*colours).measuring(direction);
            *colours += 1;
            self.lanes[index] = Some(Lane::new(self.device.queue(config)?));
        }
        Ok(())
    }

    /// The lane of mappings of an origin, if they have one. What lives as long as its driver, and is not synced, goes alone: a
    /// ring would be full as soon as it came round to it, a bounce buffer would never be copied, and memory that goes back to its
    /// allocator is unmapped at once.
    pub(super) fn lane(&self, direction: Direction, origin: Origin) -> Option<usize> {
        match (self.strategy, origin) {
            (_, Origin::Coherent | Origin::Resource) => None,
            (_, Origin::Direct) if self.copies => None,
            (Strategy::Alone, _) => None,
            (Strategy::One(_), _) => Some(0),
            (Strategy::Rings(_), _) => Some(direction.index()),
        }
    }

    fn queue(&mut self, lane: Option<usize>) -> &mut Queue<X> {
        match lane.and_then(|index| self.lanes[index].as_mut()) {
            Some(lane) => &mut lane.queue,
            None => &mut self.alone,
        }
    }

    /// Maps a list. How many segments that is for the device.
    #[inline]
    pub(super) fn map(
        &mut self,
        lane: Option<usize>,
        list: &[PhysSegment],
        direction: Direction,
        view: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        // SAFETY: the memory is simulated: its bytes are atomics, all accesses are this thread's or simulated devices', and no
        // mapping is ended but by its queue.
        unsafe { self.queue(lane).map_raw(list, direction, view) }
    }

    /// Unmaps a mapping of a lane. When it has ended.
    #[inline]
    pub(super) fn unmap(
        &mut self,
        lane: Option<usize>,
        mapping: RawMapping,
    ) -> Result<Ended<(), ()>, DmaUnmapError> {
        self.queue(lane).unmap_raw(mapping).map_err(|failed| failed.error)
    }

    /// Syncs `len` bytes from `offset` on of a mapping.
    pub(super) fn sync(
        &mut self,
        live: &Live,
        side: Side,
        (offset, len): (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        let (queue, Some(mapping)) = (self.queue(live.lane), &live.mapping) else { return Ok(()) };
        match side {
            Side::Cpu => queue.sync_raw_for_cpu(mapping, offset, len),
            Side::Device => queue.sync_raw_for_device(mapping, offset, len),
        }
    }

    /// What was chosen, and why, for sizes and directions that occurred.
    pub(super) fn explain(&self) -> Vec<Explained> {
        let rows = self.lanes.iter().flatten().flat_map(|lane| lane.queue.explain());
        rows.filter(|row| row.copied + row.mapped > 0).collect()
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
    pub(super) fn commit(&mut self, lane: usize) -> Result<(), DmaUnmapError> {
        self.queue(Some(lane)).commit_raw().map(drop)
    }

    /// The lane that must be committed first, and when.
    pub(super) fn next_due(&self) -> Option<(u64, usize)> {
        let waits = |lane: &Lane<X>| {
            (!lane.waiting.is_empty()).then(|| lane.since_ns.saturating_add(COMMIT_WITHIN_NS))
        };
        let due = self.lanes.iter().map(|lane| lane.as_ref().and_then(waits));
        due.enumerate().filter_map(|(index, due)| Some((due?, index))).min()
    }
}

impl<X: Machine> Lane<X> {
    fn new(queue: Queue<X>) -> Self {
        Self { queue, waiting: Vec::new(), since_ns: 0 }
    }
}
