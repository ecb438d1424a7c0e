//! One policy's replay: a domain, a device model and an account of exposure for each device of the trace.

mod finish;

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, IovaRange, PhysAddr};
use portcullis::dma::{DmaDevice, DmaSegment, RingError};
use portcullis::domain::{Domain, PhysSegment, Policy};
use portcullis::invalidation::DomainId;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{Format, PageTable};
use portcullis::platform::Platform;
use portcullis_model::{Context, DeviceId as ModelDevice, Iommu, IommuConfig, Memory};

use super::ReplayError;
use super::format::Both;
use super::hostile::{Hostile, Retry};
use super::live::{Live, Segments, View, Way, pages};
use super::mode::Mode;
use super::platform::ReplayPlatform;
use super::port::{EndError, Ended, MapFailed, Port};
use super::profile::Profile;
use super::queue::ClockedQueue;
use super::timing::{Samples, Timer};
use crate::{Chunk, MapId, Op, OpKind, Origin};

/// Memory that page tables may take: a domain of the traces at hand takes less than 1 MiB.
const TABLE_MEMORY: u64 = 1 << 30;

/// Pages whose exposure is followed at once, of all devices, 32 GiB of memory: each takes some hundred bytes.
const MOST_PAGES: u64 = 8 << 20;

/// On x86 no address in here is ever translated: it is where interrupts are written to. (Others do without it
/// as well, so that their figures compare.)
const INTERRUPT_WINDOW: (u64, u64) = (0xfee0_0000, 0x10_0000);

type ReplayMapper<X> = TableMapper<Arc<Memory>, Arc<ClockedQueue>, X>;
type ReplayPort<X> = Port<ReplayMapper<X>, Arc<ReplayPlatform>>;
/// A replay under one policy, fed chunk by chunk.
pub(super) struct Engine<X: Format> {
    mode: Mode,
    /// The policy of every domain.
    policy: Policy,
    format: Both<X>,
    timer: Timer,
    platform: Arc<ReplayPlatform>,
    memory: Arc<Memory>,
    iommu: Arc<Iommu>,
    queue: Arc<ClockedQueue>,
    ports: Vec<ReplayPort<X>>,
    /// Rings made so far.
    colours: u32,
    live: Vec<Option<Live>>,
    map: Samples,
    unmap: Samples,
    operations: u64,
    ended: u64,
    mapped_pages: u64,
    unmapped_pages: u64,
    violations: u64,
    failures: u64,
    first_failure: Option<ReplayError>,
    last_time_ns: u64,
    last_cpu: u32,
    scratch: Segments,
    hostile: Option<Hostile>,
}

impl<X: Format> Engine<X> {
    pub(super) fn new(mode: Mode, format: Both<X>, profile: &Profile, timer: &Timer, cpus: usize) -> Self {
        let memory = Memory::new(TABLE_MEMORY);
        let caches = &profile.caches;
        let iommu = Iommu::new(IommuConfig {
            iotlb_entries: caches.iotlb_entries,
            iotlb_ways: caches.iotlb_ways,
            walk_cache_entries: caches.walk_cache_entries,
            honours_leaf_only: caches.honours_leaf_only,
            max_address_mask: caches.max_address_mask,
            ..IommuConfig::new(Arc::clone(&memory))
        });
        let costs = profile.waits.costs();
        let queue = Arc::new(ClockedQueue::new(iommu.queue(), timer.clone(), costs));
        Self {
            mode,
            policy: mode.policy(&costs),
            format,
            timer: timer.clone(),
            platform: Arc::new(ReplayPlatform::new(cpus)),
            memory,
            iommu,
            queue,
            ports: Vec::new(),
            colours: 0,
            live: Vec::new(),
            map: Samples::new(timer),
            unmap: Samples::new(timer),
            operations: 0,
            ended: 0,
            mapped_pages: 0,
            unmapped_pages: 0,
            violations: 0,
            failures: 0,
            first_failure: None,
            last_time_ns: 0,
            last_cpu: 0,
            scratch: Segments::new(),
            hostile: None,
        }
    }

    /// Has the hostile device retry everything, too.
    pub(super) fn retry(&mut self, retry: Retry) {
        self.hostile = Some(Hostile::new(retry));
    }

    /// Has the model's queue ignore invalidations from now on, as a broken driver would.
    pub(super) fn break_invalidation(&self) {
        self.iommu.queue().drop_next(u64::MAX);
    }

    /// Replays the operations of `chunk`.
    pub(super) fn run(&mut self, chunk: &Chunk) -> Result<(), ReplayError> {
        for op in &chunk.ops {
            self.commit_due(op.time_ns);
            self.go_to(op.cpu, op.time_ns);
            self.last_time_ns = op.time_ns;
            let device = self.device(op.device.0)?;
            if self.hostile.as_mut().is_some_and(Hostile::is_due) {
                self.retry_all(true);
            }
            match &op.kind {
                OpKind::Map { id, dir, segments, origin } => {
                    let list = &chunk.segments[segments.start as usize..segments.end as usize];
                    self.scratch.clear();
                    self.scratch.extend(
                        list.iter().map(|part| PhysSegment { phys: PhysAddr::new(part.phys), len: part.len }),
                    );
                    self.map(op, device, *id, *dir, *origin)?;
                }
                OpKind::Unmap { id } => self.unmap(op, *id),
                OpKind::SyncForCpu { id, offset, len } => {
                    self.access(*id, *offset, *len);
                    self.ports[device].device.sync_for_cpu();
                }
                OpKind::SyncForDevice { .. } => self.ports[device].device.sync_for_device(),
            }
        }
        Ok(())
    }

    fn map(
        &mut self,
        op: &Op,
        device: usize,
        id: MapId,
        direction: Direction,
        origin: Origin,
    ) -> Result<(), ReplayError> {
        let pages = pages(&self.scratch).saturating_add(self.iommu.pages_observed());
        if pages > MOST_PAGES {
            self.fail(ReplayError::TooMuchMemory { line: op.line, pages, most: MOST_PAGES });
            return Ok(());
        }
        let prepared = self.ports[device].prepare(direction, origin, &mut self.colours);
        prepared.map_err(|error| ReplayError::Ring { line: op.line, error })?;
        let mut view = View::from_elem(DmaSegment::default(), self.scratch.len());
        let lane = self.ports[device].lane_for(direction, origin);
        let (mut result, mut ticks) = self.map_in(device, lane, direction, &mut view);
        if let (Err(MapFailed::Full), Some(lane)) = (&result, lane) {
            // What waits for a commit may make room; else the mapping is too large, or the oldest too old.
            ticks += self.commit(device, lane, op.time_ns);
            let again = self.map_in(device, Some(lane), direction, &mut view);
            (result, ticks) = (again.0, ticks + again.1);
            if matches!(result, Err(MapFailed::Full)) {
                let alone = self.map_in(device, None, direction, &mut view);
                (result, ticks) = (alone.0, ticks + alone.1);
            }
        }
        let line = op.line;
        let (way, used) = match result {
            Ok(mapped) => mapped,
            Err(MapFailed::Error(error) | MapFailed::Ring(RingError::Map(error))) => {
                self.fail(ReplayError::Map { line, error });
                return Ok(());
            }
            Err(MapFailed::Ring(error)) => return Err(ReplayError::Ring { line, error }),
            Err(MapFailed::Full) => return Ok(()),
        };
        self.map.record(ticks);
        view.truncate(used);
        let live = Live { device, direction, lane, memory: self.scratch.clone(), view, way };
        self.operations += 1;
        self.mapped_pages += live.pages();
        self.iommu.observe_map(model_device(device), op.time_ns, live.pieces());
        if let Some(hostile) = &mut self.hostile {
            hostile.mapped(device, live.pieces());
        }
        let at = id as usize;
        if self.live.len() <= at {
            self.live.resize_with(at + 1, || None);
        }
        self.live[at] = Some(live);
        if origin == Origin::Coherent {
            // Rings are used as long as they exist; once shows that they can be.
            self.access(id, 0, u64::MAX);
        }
        Ok(())
    }

    /// The library's call, and the ticks it took without the model's part.
    fn map_in(
        &mut self,
        device: usize,
        lane: Option<usize>,
        direction: Direction,
        view: &mut View,
    ) -> (Result<(Way, usize), MapFailed>, u64) {
        let port = &mut self.ports[device];
        let spent_by_model = self.queue.ticks();
        let start = self.timer.ticks();
        let result = port.map(lane, &self.scratch, direction, view);
        let ticks = self.timer.since(start);
        (result, ticks.saturating_sub(self.queue.ticks() - spent_by_model))
    }

    fn unmap(&mut self, op: &Op, id: MapId) {
        // The transfer happens before the driver ends the mapping: here, as late as can be.
        self.access(id, 0, u64::MAX);
        let Some(mut live) = self.live.get_mut(id as usize).and_then(Option::take) else {
            // Its map failed, and was counted then.
            return;
        };
        let way = std::mem::replace(&mut live.way, Way::Alone);
        let (device, lane) = (live.device, live.lane);
        let port = &mut self.ports[device];
        let spent_by_model = self.queue.ticks();
        let start = self.timer.ticks();
        let result = port.unmap(lane, way, &live.view);
        let ticks = self.timer.since(start);
        self.unmap.record(ticks.saturating_sub(self.queue.ticks() - spent_by_model));
        self.ended += 1;
        self.unmapped_pages += live.pages();
        match (result, lane) {
            (Ok(Ended::Later), Some(lane)) => self.ports[device].hold(lane, live, op.time_ns),
            (Ok(Ended::WithLane), Some(lane)) => {
                self.ports[device].hold(lane, live, op.time_ns);
                self.settle(device, lane, op.time_ns);
            }
            (Ok(_), _) => self.end(&live, op.time_ns, self.in_force(device)),
            (Err(error), _) => {
                self.end(&live, op.time_ns, self.in_force(device));
                self.fail(end_failed(op.line, error));
            }
        }
    }

    /// It is `time_ns`, and `cpu` acts. Timers that end before are run first.
    fn go_to(&mut self, cpu: u32, time_ns: u64) {
        let iommu = &self.iommu;
        self.platform.at(cpu, time_ns, |time| iommu.set_time(time));
        self.iommu.set_time(time_ns);
        self.last_cpu = cpu;
    }

    /// Commits, each at its own time, what has waited as long as it may by `time_ns`.
    fn commit_due(&mut self, time_ns: u64) {
        loop {
            let dues = self.ports.iter().enumerate();
            let next = dues.filter_map(|(device, port)| Some((port.next_due()?, device))).min();
            match next {
                Some(((due, lane), device)) if due <= time_ns => {
                    self.go_to(self.last_cpu, due);
                    let ticks = self.commit(device, lane, due);
                    // A part of what the unmaps before it cost.
                    self.unmap.add_to_all(ticks.saturating_sub(self.timer.overhead_ticks()));
                }
                _ => return,
            }
        }
    }

    /// Commits what waits in a lane. The ticks it took without the model's part.
    fn commit(&mut self, device: usize, lane: usize, time_ns: u64) -> u64 {
        let port = &mut self.ports[device];
        let spent_by_model = self.queue.ticks();
        let start = self.timer.ticks();
        let result = port.commit(lane);
        let ticks = self.timer.since(start);
        self.settle(device, lane, time_ns);
        if let Err(error) = result {
            self.fail(end_failed(0, error));
        }
        ticks.saturating_sub(self.queue.ticks() - spent_by_model)
    }

    /// What waited in a lane has ended.
    fn settle(&mut self, device: usize, lane: usize, time_ns: u64) {
        for live in self.ports[device].settled(lane) {
            self.end(&live, time_ns, Policy::Strict);
        }
    }

    /// The policy by which mappings end that end by themselves.
    fn in_force(&self, device: usize) -> Policy {
        self.ports[device].device.policy()
    }

    /// A mapping has ended, by what the library says, under `policy`: a hostile device tries all of it.
    fn end(&mut self, live: &Live, time_ns: u64, policy: Policy) {
        let reached = self.iommu.observe_unmap(model_device(live.device), time_ns, live.pieces());
        if policy == Policy::Strict && reached > 0 {
            self.violations += 1;
        }
        if let Some(hostile) = self.hostile.as_mut().filter(|_| policy != Policy::Passthrough) {
            hostile.ended(live.device, live.pieces(), policy, time_ns);
        }
    }

    /// The hostile device tries everything, and again after each policy has changed.
    fn retry_all(&mut self, change: bool) {
        let Some(hostile) = &mut self.hostile else { return };
        let now_ns = self.last_time_ns;
        let translated = |port: &ReplayPort<X>| port.device.domain().is_translated();
        for (device, port) in self.ports.iter().enumerate().filter(|(_, port)| translated(port)) {
            hostile.try_all(&self.iommu, device, now_ns);
            if change && hostile.change(device, port) {
                hostile.try_all(&self.iommu, device, now_ns);
            }
        }
    }

    /// Has the device transfer `len` bytes from `offset` on, as far as the mapping goes.
    fn access(&mut self, id: MapId, offset: u64, len: u64) {
        let Some(live) = self.live.get(id as usize).and_then(Option::as_ref) else {
            return;
        };
        let device = model_device(live.device);
        let permissions = live.direction.permissions();
        let end = offset.saturating_add(len);
        let mut at = 0;
        for piece in live.pieces() {
            let (first, last) = (offset.max(at), end.min(at + piece.len));
            if first < last {
                let skip = first - at;
                let (Some(iova), Some(phys)) = (piece.iova.checked_add(skip), piece.phys.checked_add(skip))
                else {
                    return;
                };
                let outcome = self.iommu.access_checked(device, iova, phys, last - first, permissions);
                self.violations += outcome.wrong;
            }
            at += piece.len;
        }
    }

    /// The engine's device for the trace's `index`, made when it is first seen.
    fn device(&mut self, index: u32) -> Result<usize, ReplayError> {
        let index = index as usize;
        while self.ports.len() <= index {
            let number = self.ports.len();
            let id = u16::try_from(number + 1).map_err(|_| ReplayError::TooManyDevices { number })?;
            let Both { written, read } = self.format;
            let table = PageTable::new(Arc::clone(&self.memory), written, self.platform.slots())?;
            let context = match self.policy {
                Policy::Passthrough => Context::Passthrough,
                _ => Context::Translated { domain: DomainId(id), root: table.root(), format: read },
            };
            self.iommu.attach(model_device(number), context);
            let (start, len) = INTERRUPT_WINDOW;
            let window = IovaRange::new(Iova::new(start), len);
            let mapper =
                TableMapper::new(table, Arc::clone(&self.queue), DomainId(id), window.into_iter().collect());
            let domain = Domain::new(Arc::clone(&self.platform), mapper, self.policy)?;
            self.ports.push(Port::new(DmaDevice::new(domain, u64::MAX), self.mode));
        }
        Ok(index)
    }

    fn fail(&mut self, error: ReplayError) {
        self.failures += 1;
        self.first_failure.get_or_insert(error);
    }
}

fn end_failed(line: u64, error: EndError) -> ReplayError {
    match error {
        EndError::Unmap(error) => ReplayError::Unmap { line, error },
        error => ReplayError::Commit { line, error },
    }
}

fn model_device(index: usize) -> ModelDevice {
    ModelDevice(index as u32)
}
