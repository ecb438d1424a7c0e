//! Making and ending mappings.

use portcullis::addr::{Direction, DmaSegment, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{DmaMapError, Ended, RawMapping};
use portcullis::platform::FRAME_SIZE;

use super::due::Due;
use super::{Engine, end_failed, model_device};
use crate::replay::ReplayError;
use crate::replay::data::Pattern;
use crate::replay::live::{Copied, Live, Segments, View, pages};
use crate::replay::memory::is_pool;
use crate::replay::mode::Mode;
use crate::{MapId, Op, Origin};

impl Engine {
    /// Maps `scratch`.
    pub(super) fn map(
        &mut self,
        op: &Op,
        device: usize,
        id: MapId,
        direction: Direction,
        origin: Origin,
    ) -> Result<(), ReplayError> {
        let line = op.line;
        self.follow(pages(&self.scratch));
        if self.exceeded.is_some() {
            return Ok(());
        }
        let prepared = self.prepare(device, direction, origin);
        prepared.map_err(|error| ReplayError::Queue { line, error })?;
        let mut lane = self.ports[device].lane(direction, origin);
        let Some(pattern) = self.fill(line, device, lane, direction) else { return Ok(()) };
        let mut view = View::from_elem(DmaSegment::default(), self.scratch.len());
        let waited_ns = self.queue.waited_ns();
        let (mut result, mut ticks) = self.map_in(device, lane, direction, &mut view);
        if let (Err(DmaMapError::Full), Some(full)) = (&result, lane) {
            // A commit of pending unmaps may make room; otherwise the mapping is too large, or the oldest too old.
            ticks += self.commit(device, full, op.time_ns);
            if self.painter.is_some() {
                // Ended mappings are painted over, and may have had the same memory.
                self.put_original(&self.scratch, (0, u64::MAX), pattern);
            }
            let again = self.map_in(device, lane, direction, &mut view);
            (result, ticks) = (again.0, ticks + again.1);
            if matches!(result, Err(DmaMapError::Full)) {
                lane = None;
                let alone = self.map_in(device, lane, direction, &mut view);
                (result, ticks) = (alone.0, ticks + alone.1);
            }
        }
        let is_refused = |engine: &Self| engine.bytes.as_ref().is_some_and(|bytes| bytes.was_refused());
        if result.is_err() && is_refused(self) {
            // Bytes of the trace's memory use the room of bounce buffers.
            if !self.forget() {
                return Err(self.no_bytes(line));
            }
            let again = self.map_in(device, lane, direction, &mut view);
            (result, ticks) = (again.0, ticks + again.1);
        }
        let (mapping, used) = match result {
            Ok(mapped) => mapped,
            Err(error @ DmaMapError::OutOfMemory) => return Err(ReplayError::Map { line, error }),
            Err(_) if is_refused(self) => {
                return Err(self.no_bytes(line));
            }
            Err(error) => {
                self.refused(line, error);
                return Ok(());
            }
        };
        self.map.record_with_wait(ticks, self.queue.waited_ns() - waited_ns);
        view.truncate(used);
        let copied = match mapping.way() {
            Some(way) => Copied::Pool(way),
            None if self.mode == Mode::Swiotlb && lane.is_some() => Copied::Swiotlb,
            None => Copied::No,
        };
        let (memory, mapping) = (self.scratch.clone(), Some(mapping));
        let overlaps = overlap(&memory);
        let live = Live { device, direction, lane, memory, view, mapping, copied, overlaps, pattern };
        self.operations += 1;
        self.iommu.observe_map(model_device(device), op.time_ns, live.exposed());
        if let Some(hostile) = &mut self.hostile {
            hostile.mapped(&live);
        }
        if let Some(painter) = &mut self.painter {
            painter.mapped(&live);
        }
        let at = id as usize;
        if self.live.len() <= at {
            self.live.resize_with(at + 1, || None);
        }
        self.live[at] = Some(live);
        self.alive += 1;
        if origin == Origin::Coherent {
            // Rings are used as long as they exist; one access shows that they can be.
            self.access(id, 0, u64::MAX);
        }
        Ok(())
    }

    /// The library's call; returns the ticks without the model's part.
    fn map_in(
        &mut self,
        device: usize,
        lane: Option<usize>,
        direction: Direction,
        view: &mut View,
    ) -> (Result<(RawMapping, usize), DmaMapError>, u64) {
        self.measure_nothing();
        let spent_by_model = self.queue.ticks();
        let (result, ticks) =
            self.ports[device].driver.map(lane, &self.scratch, direction, view, &self.timer);
        (result, ticks.saturating_sub(self.queue.ticks() - spent_by_model))
    }

    /// An empty measurement, before one call in 16: the cost of measuring here.
    fn measure_nothing(&mut self) {
        if (self.operations + self.ended).is_multiple_of(16) {
            let start = self.timer.ticks();
            let ticks = self.timer.since(start);
            self.empty.record(ticks);
        }
    }

    /// The driver fills the memory of `scratch` for its device, if it has bytes. Returns the pattern; `None` if there are too many bytes.
    fn fill(
        &mut self,
        line: u64,
        device: usize,
        lane: Option<usize>,
        direction: Direction,
    ) -> Option<Pattern> {
        let wanted = lane.is_some() || self.painter.is_some();
        if self.bytes.is_none() || !wanted {
            return Some(Pattern::default());
        }
        if let Some(part) = self.scratch.iter().find(|part| is_pool(part.phys) || is_pool(last(part))) {
            let phys = part.phys;
            self.not_made(ReplayError::PoolsMemory { line, phys });
            return None;
        }
        if !self.back() {
            let error = self.no_bytes(line);
            self.note(Err(error));
            return None;
        }
        let pattern = self.next_pattern(device);
        // With paint, mapped memory must be distinguishable in any direction.
        if direction.permissions().allows(Permissions::READ) || self.painter.is_some() {
            self.put_original(&self.scratch, (0, u64::MAX), pattern);
        }
        Some(pattern)
    }

    /// The library has refused `scratch`.
    fn refused(&mut self, line: u64, error: DmaMapError) {
        if let (Some(painter), Some(bytes)) = (&self.painter, &self.bytes) {
            painter.refused(bytes, &self.scratch);
        }
        self.not_made(ReplayError::Map { line, error });
    }

    /// `scratch` is not mapped, and the replay goes on.
    fn not_made(&mut self, error: ReplayError) {
        self.share.unmap(pages(&self.scratch));
        self.fail(error);
    }

    pub(super) fn unmap(&mut self, op: &Op, id: MapId) {
        let Some(Some(live)) = self.live.get(id as usize) else {
            // Its map failed, and was counted then.
            return;
        };
        let pages = pages(&live.memory);
        self.follow(pages);
        self.share.unmap(pages);
        // The transfer happens just before the driver ends the mapping.
        let written = self.access(id, 0, u64::MAX);
        let Some(mut live) = self.live.get_mut(id as usize).and_then(Option::take) else { return };
        self.alive -= 1;
        let Some(mapping) = live.mapping.take() else { return };
        let (device, lane) = (live.device, live.lane);
        self.measure_nothing();
        let (spent_by_model, waited_ns) = (self.queue.ticks(), self.queue.waited_ns());
        let (result, ticks) = self.ports[device].driver.unmap(lane, mapping, &self.timer);
        let ticks = ticks.saturating_sub(self.queue.ticks() - spent_by_model);
        self.unmap.record_with_wait(ticks, self.queue.waited_ns() - waited_ns);
        self.ended += 1;
        if let Some(written) = written {
            self.violations += self.wrong_original(&live.memory, (0, u64::MAX), written);
        }
        match (result, lane) {
            (Ok(Ended::Pending), Some(lane)) => {
                if let Some(due_ns) = self.ports[device].hold(lane, live, op.time_ns) {
                    self.dues.push(Due { due_ns, lane, device });
                }
            }
            (Ok(Ended::Flushed(())), Some(lane)) => {
                // It ends at once, so nothing becomes due.
                let _ = self.ports[device].hold(lane, live, op.time_ns);
                self.settle(device, lane, op.time_ns);
            }
            (Ok(_), _) => self.end(&live, op.time_ns, self.in_force(&live)),
            (Err(error), _) => {
                self.end(&live, op.time_ns, self.in_force(&live));
                self.fail(end_failed(op.line, error));
            }
        }
    }

    /// There is no room for the bytes of the current mapping.
    fn no_bytes(&self, line: u64) -> ReplayError {
        let bytes = pages(&self.scratch).saturating_mul(FRAME_SIZE);
        self.share.no_bytes(line, self.mode.name(), bytes)
    }
}

/// Whether two parts of a list overlap.
pub(super) fn overlap(list: &[PhysSegment]) -> bool {
    let end = |part: &PhysSegment| part.phys.get().saturating_add(part.len);
    if list.windows(2).all(|pair| end(&pair[0]) <= pair[1].phys.get()) {
        return false;
    }
    let mut sorted: Segments = list.into();
    sorted.sort_unstable_by_key(|part| part.phys);
    sorted.windows(2).any(|pair| end(&pair[0]) > pair[1].phys.get())
}

/// The last byte of a part of a list.
fn last(part: &PhysSegment) -> PhysAddr {
    PhysAddr::new(part.phys.get().saturating_add(part.len - 1))
}
