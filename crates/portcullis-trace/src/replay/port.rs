//! A device of the trace: its queues, and its pending unmaps.

use portcullis::SetupError;
use portcullis::addr::Direction;
use portcullis::dma::{DmaUnmapError, Explained};

use super::driver::{Driver, LANES, Side};
use super::live::Live;
use super::mode::{COMMIT_WITHIN_NS, Strategy};
use super::timing::Timer;
use crate::Origin;

/// The pending mappings of a queue.
#[derive(Default)]
struct Lane {
    waiting: Vec<Live>,
    /// The time of the first.
    since_ns: u64,
}

/// A device of the trace.
pub(super) struct Port {
    pub driver: Driver,
    /// Its number in the trace.
    pub device: u32,
    strategy: Strategy,
    copies: bool,
    /// One for all directions, or for rings one for each.
    lanes: [Option<Lane>; LANES],
}

impl Port {
    /// A device whose driver maps by `strategy`.
    pub(super) fn new(
        mut driver: Driver,
        device: u32,
        strategy: Strategy,
        copies: bool,
    ) -> Result<Self, SetupError> {
        let mut lanes = [None, None, None];
        if let Strategy::One(config) = strategy {
            driver.open(0, config)?;
            lanes[0] = Some(Lane::default());
        }
        Ok(Self { driver, device, strategy, copies, lanes })
    }

    /// Whether everything that a mapping needs exists.
    pub(super) fn is_ready(&self, direction: Direction, origin: Origin) -> bool {
        self.lane(direction, origin).is_none_or(|index| self.lanes[index].is_some())
    }

    /// Makes a mapping's ring, with the next of `colours`, as a driver would when it starts.
    pub(super) fn prepare(
        &mut self,
        direction: Direction,
        origin: Origin,
        colours: &mut u32,
    ) -> Result<(), SetupError> {
        if let (Some(index), Strategy::Rings { config, measures }) =
            (self.lane(direction, origin), self.strategy)
            && self.lanes[index].is_none()
        {
            let config = if measures { config.measuring(direction) } else { config }.colour(*colours);
            *colours += 1;
            self.driver.open(index, config)?;
            self.lanes[index] = Some(Lane::default());
        }
        Ok(())
    }

    /// The lane of mappings of an origin, if they have one. A mapping that lives as long as its driver, and is not synced, is mapped
    /// individually: a ring would be full when it wraps to it, a bounce buffer would never be copied, and memory that is freed to its
    /// allocator is unmapped at once.
    pub(super) fn lane(&self, direction: Direction, origin: Origin) -> Option<usize> {
        match (self.strategy, origin) {
            (_, Origin::Coherent | Origin::Resource) => None,
            (_, Origin::Direct) if self.copies => None,
            (Strategy::Alone, _) => None,
            (Strategy::One(_), _) => Some(0),
            (Strategy::Rings { .. }, _) => Some(direction.index()),
        }
    }

    /// Syncs `len` bytes from `offset` on of a mapping. Returns the ticks of the library's call, too.
    pub(super) fn sync(
        &mut self,
        live: &Live,
        side: Side,
        part: (u64, u64),
        timer: &Timer,
    ) -> (Result<(), DmaUnmapError>, u64) {
        match &live.mapping {
            Some(mapping) => self.driver.sync(live.lane, mapping, side, part, timer),
            None => (Ok(()), 0),
        }
    }

    /// The choices, and their reasons, for sizes and directions that occurred.
    pub(super) fn explain(&self) -> Vec<Explained> {
        let open = (0..LANES).filter(|lane| self.lanes[*lane].is_some());
        let rows = open.flat_map(|lane| self.driver.explain(lane));
        rows.filter(|row| row.copied + row.mapped > 0).collect()
    }

    /// Keeps a mapping until its lane is committed. Returns the deadline if it is the first in the lane.
    pub(super) fn hold(&mut self, lane: usize, live: Live, now_ns: u64) -> Option<u64> {
        let waits = self.lanes[lane].as_mut()?;
        let is_first = waits.waiting.is_empty();
        if is_first {
            waits.since_ns = now_ns;
        }
        waits.waiting.push(live);
        self.due(lane).filter(|_| is_first)
    }

    /// Makes all lanes report their counts to the domain. Nothing is pending in them.
    pub(super) fn settle(&mut self) {
        for lane in (0..LANES).filter(|lane| self.lanes[*lane].is_some()) {
            self.driver.settle(lane);
        }
    }

    /// All pending mappings.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &Live> {
        self.lanes.iter().flatten().flat_map(|lane| &lane.waiting)
    }

    /// The mappings of a committed lane.
    pub(super) fn settled(&mut self, lane: usize) -> Vec<Live> {
        self.lanes[lane].as_mut().map(|lane| std::mem::take(&mut lane.waiting)).unwrap_or_default()
    }

    /// The commit deadline of a lane; `None` if nothing is pending.
    pub(super) fn due(&self, lane: usize) -> Option<u64> {
        let lane = self.lanes[lane].as_ref().filter(|lane| !lane.waiting.is_empty())?;
        Some(lane.since_ns.saturating_add(COMMIT_WITHIN_NS))
    }
}
