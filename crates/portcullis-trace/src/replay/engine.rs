//! One policy's replay: a domain, a device model and an account of exposure for each device of the trace.

mod data;
mod due;
mod finish;
mod map;
mod pools;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use portcullis::addr::{DomainId, PageSize, PhysAddr, PhysSegment};
use portcullis::bounce::pool::Way;
use portcullis::dma::DmaUnmapError;
use portcullis::domain::Policy;
use portcullis::heap::Shared;
use portcullis_model::{DeviceId as ModelDevice, Iommu, IommuConfig, Memory};

use super::ReplayError;
use super::driver::{Driver, Ground, ReplaySwiotlb, Side};
use super::format::AnyFormat;
use super::hostile::{Hostile, Retry};
use super::live::{Copied, Live, Segments, pages, to_whole_pages};
use super::memory::TraceMemory;
use super::mode::Mode;
use super::painted::{Paint, Painter};
use super::platform::ReplayPlatform;
use super::port::Port;
use super::profile::Profile;
use super::queue::ClockedQueue;
use super::share::{Alive, Share};
use super::timing::{Samples, Timer};
use crate::{Chunk, OpKind, Origin};
use due::{Due, Dues};

/// The most memory of page tables: a domain of existing traces takes less than 1 MiB.
const TABLE_MEMORY: u64 = 1 << 30;

/// Counts before the trace, which no figure includes.
#[derive(Debug, Default)]
struct Startup {
    waited_ns: f64,
    invalidations: u64,
    copied_bytes: u64,
}

/// A replay under one policy, fed chunk by chunk.
pub(super) struct Engine {
    mode: Mode,
    /// The policy of every domain.
    policy: Policy,
    format: Arc<dyn AnyFormat>,
    /// The smallest page of the format.
    granule: PageSize,
    timer: Timer,
    platform: Arc<ReplayPlatform>,
    memory: Arc<Memory>,
    iommu: Arc<Iommu>,
    queue: Arc<ClockedQueue>,
    ports: Vec<Port>,
    /// The port of each device of the trace, once it has mapped something.
    port_of: Vec<Option<u16>>,
    /// Commit deadlines of ports' lanes.
    dues: Dues,
    /// The limits of memory and time.
    share: Share,
    /// Why the replay cannot go on.
    exceeded: Option<ReplayError>,
    /// Live mappings.
    alive: usize,
    /// The bytes of the trace's memory, if any policy accesses them.
    bytes: Option<Arc<TraceMemory>>,
    swiotlb: Option<Shared<ReplaySwiotlb>>,
    copies_in: bool,
    /// Counts before the trace began.
    startup: Startup,
    /// The number of the last transfer.
    transfers: u64,
    /// Rings made so far.
    colours: u32,
    live: Vec<Option<Live>>,
    map: Samples,
    unmap: Samples,
    /// Empty measurements, taken beside the measured calls.
    empty: Samples,
    operations: u64,
    ended: u64,
    violations: u64,
    failures: u64,
    first_failure: Option<ReplayError>,
    last_time_ns: u64,
    last_cpu: u32,
    /// Of the current event.
    line: u64,
    scratch: Segments,
    hostile: Option<Hostile>,
    painter: Option<Painter>,
}

impl Engine {
    pub(super) fn new(
        mode: Mode,
        format: &Arc<dyn AnyFormat>,
        profile: &Profile,
        timer: &Timer,
        cpus: usize,
        share: &Share,
    ) -> Self {
        let memory = Memory::new(TABLE_MEMORY);
        let caches = &profile.caches;
        let granule = format.granule();
        let iommu = Iommu::new(IommuConfig {
            exposure_page: granule,
            iotlb_entries: caches.iotlb_entries,
            iotlb_ways: caches.iotlb_ways,
            walk_cache_entries: caches.walk_cache_entries,
            honours_leaf_only: caches.honours_leaf_only,
            max_address_mask: caches.max_address_mask,
            ..IommuConfig::new(Arc::clone(&memory))
        });
        let costs = profile.waits.costs();
        let queue = Arc::new(ClockedQueue::new(iommu.queue(), timer.clone(), &profile.waits));
        Self {
            mode,
            policy: mode.policy(&costs),
            format: Arc::clone(format),
            granule,
            timer: timer.clone(),
            platform: Arc::new(ReplayPlatform::new(cpus)),
            memory,
            iommu,
            queue,
            ports: Vec::new(),
            port_of: Vec::new(),
            dues: Dues::default(),
            share: share.clone(),
            exceeded: None,
            alive: 0,
            bytes: mode.copies().then(|| TraceMemory::new(share.bytes)),
            swiotlb: None,
            copies_in: false,
            startup: Startup::default(),
            transfers: 0,
            colours: 0,
            live: Vec::new(),
            map: Samples::new(timer),
            unmap: Samples::new(timer),
            empty: Samples::new(timer),
            operations: 0,
            ended: 0,
            violations: 0,
            failures: 0,
            first_failure: None,
            last_time_ns: 0,
            last_cpu: 0,
            line: 0,
            scratch: Segments::new(),
            hostile: None,
            painter: None,
        }
    }

    /// Enables the hostile device's retries.
    pub(super) fn retry(&mut self, retry: Retry) {
        self.hostile = Some(Hostile::new(retry));
    }

    /// Enables its accesses to painted memory.
    pub(super) fn paint(&mut self, paint: Paint) {
        if self.policy != Policy::Passthrough {
            self.bytes.get_or_insert_with(|| TraceMemory::new(self.share.bytes));
            self.painter = Some(Painter::new(paint));
        }
    }

    /// From now on the model ignores invalidations, as with a broken driver.
    pub(super) fn break_invalidation(&self) {
        self.iommu.queue().drop_next(u64::MAX);
    }

    /// From now on copies do nothing.
    pub(super) fn break_copies(&self) {
        if let Some(bytes) = &self.bytes {
            bytes.break_copies();
        }
    }

    /// Copies a device-written buffer into its slot first: see [`Options::copies_in`](super::Options::copies_in).
    pub(super) const fn copies_in(&mut self, copies_in: bool) {
        self.copies_in = copies_in;
    }

    pub(super) fn run(&mut self, chunk: &Chunk) -> Result<(), ReplayError> {
        for op in &chunk.ops {
            let alive = Alive { line: op.line, devices: self.ports.len(), mappings: self.alive };
            self.share.event(|| alive)?;
            self.line = op.line;
            self.commit_due(op.time_ns);
            self.go_to(op.cpu, op.time_ns);
            self.last_time_ns = op.time_ns;
            if self.hostile.as_mut().is_some_and(Hostile::is_due) {
                self.retry_all(true);
            }
            if self.painter.as_mut().is_some_and(Painter::is_due) {
                self.look_at_all();
            }
            match &op.kind {
                OpKind::Map { id, dir, segments, origin } => {
                    let list = &chunk.segments[segments.start as usize..segments.end as usize];
                    self.scratch.clear();
                    self.scratch.extend(
                        list.iter().map(|part| PhysSegment { phys: PhysAddr::new(part.phys), len: part.len }),
                    );
                    if *origin == Origin::Coherent {
                        // Allocators of coherent memory return whole pages.
                        self.scratch.iter_mut().for_each(|part| to_whole_pages(part, self.granule));
                    }
                    self.share.map(pages(&self.scratch), || alive)?;
                    let device = self.device(op.device.0)?;
                    self.map(op, device, *id, *dir, *origin)?;
                }
                OpKind::Unmap { id } => self.unmap(op, *id),
                OpKind::SyncForCpu { id, offset, len } => self.sync(op, *id, Side::Cpu, (*offset, *len)),
                OpKind::SyncForDevice { id, offset, len } => {
                    self.sync(op, *id, Side::Device, (*offset, *len));
                }
            }
            if let Some(error) = self.exceeded.take() {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Advances to `time_ns` on `cpu`. Runs earlier timers first.
    fn go_to(&mut self, cpu: u32, time_ns: u64) {
        let iommu = &self.iommu;
        let looks = self.platform.at(cpu, time_ns, |time| iommu.set_time(time));
        self.iommu.set_time(time_ns);
        self.last_cpu = cpu;
        if looks > 0 {
            let looked = self.share.look(self.line, looks);
            self.note(looked);
        }
    }

    /// Counts `pages` individually tracked pages: too many are an error.
    fn follow(&mut self, pages: u64) {
        let followed = self.share.follow(self.line, pages);
        self.note(followed);
    }

    /// Records an error that ends the replay after this event.
    fn note(&mut self, result: Result<(), ReplayError>) {
        if let Err(error) = result {
            self.exceeded.get_or_insert(error);
        }
    }

    /// Commits all lanes with a deadline by `time_ns`, each at its own time.
    fn commit_due(&mut self, time_ns: u64) {
        self.commit_by(u64::MAX, time_ns);
    }

    /// Commits all lanes with a deadline by `due_ns`: each at its own time, or at `end_ns` if that comes first.
    fn commit_by(&mut self, end_ns: u64, due_ns: u64) {
        while let Some(Due { due_ns: due, lane, device }) = self.dues.next(due_ns) {
            if self.ports[device].due(lane) != Some(due) {
                // Already committed.
                continue;
            }
            let due = due.min(end_ns);
            self.go_to(self.last_cpu, due);
            let ticks = self.commit(device, lane, due);
            // A part of the cost of the unmaps before it.
            self.unmap.add_to_all(ticks.saturating_sub(self.timer.overhead_ticks()));
        }
    }

    /// Commits a lane. Returns the ticks without the model's part.
    fn commit(&mut self, device: usize, lane: usize, time_ns: u64) -> u64 {
        let spent_by_model = self.queue.ticks();
        let (result, ticks) = self.ports[device].driver.commit(lane, &self.timer);
        self.settle(device, lane, time_ns);
        if let Err(error) = result {
            self.fail(ReplayError::Commit { line: 0, error });
        }
        ticks.saturating_sub(self.queue.ticks() - spent_by_model)
    }

    /// A lane's pending mappings have ended.
    fn settle(&mut self, device: usize, lane: usize, time_ns: u64) {
        for live in self.ports[device].settled(lane) {
            self.end(&live, time_ns, Policy::Strict);
        }
    }

    /// The policy of a mapping that ends individually.
    fn in_force(&self, live: &Live) -> Policy {
        match live.copied {
            Copied::No | Copied::Swiotlb | Copied::Pool(Way::Direct) => {
                self.ports[live.device].driver.policy()
            }
            Copied::Pool(_) => Policy::Strict,
        }
    }

    /// A mapping has ended, by the library, under `policy`: a hostile device tries all of it.
    fn end(&mut self, live: &Live, time_ns: u64, policy: Policy) {
        let reached = self.iommu.observe_unmap(model_device(live.device), time_ns, live.exposed());
        if policy == Policy::Strict && reached > 0 {
            self.violations += 1;
        }
        if let Some(hostile) = self.hostile.as_mut().filter(|_| policy != Policy::Passthrough) {
            hostile.ended(live, policy, time_ns);
        }
        if let (Some(painter), Some(bytes)) = (&mut self.painter, &self.bytes) {
            painter.ended(bytes, live);
        }
    }

    /// The hostile device tries everything, and again after each change of a policy.
    fn retry_all(&mut self, change: bool) {
        let Some(hostile) = &mut self.hostile else { return };
        let now_ns = self.last_time_ns;
        let translated = |port: &Port| port.driver.is_translated();
        for (device, port) in self.ports.iter().enumerate().filter(|(_, port)| translated(port)) {
            hostile.try_all(&self.iommu, device, now_ns);
            if change && hostile.change(device, port) {
                hostile.try_all(&self.iommu, device, now_ns);
            }
        }
    }

    /// The hostile device reads and writes at every address that it ever saw.
    fn look_at_all(&mut self) {
        let (Some(painter), Some(bytes)) = (&mut self.painter, &self.bytes) else { return };
        (0..self.ports.len()).for_each(|device| painter.look(&self.iommu, bytes, device));
    }

    /// The engine's device for the trace's `index`, made at its first map.
    fn device(&mut self, index: u32) -> Result<usize, ReplayError> {
        if let Some(Some(port)) = self.port_of.get(index as usize) {
            return Ok(usize::from(*port));
        }
        let number = self.ports.len();
        let too_many = |_| ReplayError::TooManyDevices { number };
        let id = u16::try_from(number + 1).map_err(too_many)?;
        let ground = Ground {
            copies: self.copies()?,
            platform: &self.platform,
            memory: &self.memory,
            iommu: &self.iommu,
            queue: &self.queue,
            timer: &self.timer,
            policy: self.policy,
        };
        let driver = Driver::new(&*self.format, &ground, u32::from(id - 1), DomainId(id))?;
        let strategy = self.mode.strategy(self.granule.bytes(), self.copies_in);
        let port = Port::new(driver, index, strategy, self.mode.copies())
            .map_err(|error| ReplayError::Queue { line: 0, error })?;
        self.ports.push(port);
        let at = index as usize;
        if self.port_of.len() <= at {
            self.port_of.resize(at + 1, None);
        }
        self.port_of[at] = Some(id - 1);
        Ok(number)
    }

    fn fail(&mut self, error: ReplayError) {
        self.failures += 1;
        self.first_failure.get_or_insert(error);
    }
}

fn end_failed(line: u64, error: DmaUnmapError) -> ReplayError {
    match error {
        error if error.is_of_commit() => ReplayError::Commit { line, error },
        error => ReplayError::Unmap { line, error },
    }
}

fn model_device(index: usize) -> ModelDevice {
    ModelDevice(index as u32)
}
