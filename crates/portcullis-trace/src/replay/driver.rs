//! A device driver's calls of the library.
#![allow(unsafe_code, reason = "a queue trusts its caller with memory, which here is the trace's")]

use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange, PhysSegment};
use portcullis::bounce::PoolConfig;
use portcullis::bounce::swiotlb::Swiotlb;
use portcullis::dma::{
    Device, DmaDomain, DmaMapError, DmaMask, DmaUnmapError, DomainBuilder, Ended, Explained, Queue,
    QueueConfig, RawMapping,
};
use portcullis::domain::{Domain, Policy, PolicyError};
use portcullis::exposure::Exposure;
use portcullis::heap::Shared;
use portcullis_model::{Context, DeviceId as ModelDevice, Iommu, Memory};

use super::format::AnyFormat;
use super::memory::TraceMemory;
use super::platform::ReplayPlatform;
use super::queue::ClockedQueue;
use super::requests::RequestMapper;
use super::tables::Tables;
use super::timing::Timer;

/// The new owner of a synced part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Cpu,
    Device,
}

/// A device's queues besides the one for individual mappings: one for all directions, or one for each.
pub(super) const LANES: usize = 3;

/// What the drivers of one engine share.
pub(super) struct Ground<'a> {
    pub platform: &'a Arc<ReplayPlatform>,
    /// Memory of page tables.
    pub memory: &'a Arc<Memory>,
    pub iommu: &'a Iommu,
    pub queue: &'a Arc<ClockedQueue>,
    pub timer: &'a Timer,
    /// The policy of its domain.
    pub policy: Policy,
    pub copies: Copies,
}

/// The memory of its queues' copies.
pub(super) enum Copies {
    None,
    Pool(Arc<TraceMemory>),
    Swiotlb(Shared<ReplaySwiotlb>),
}

pub(super) type ReplaySwiotlb = Swiotlb<Arc<ReplayPlatform>, Arc<TraceMemory>>;
type ReplayMapper = RequestMapper<Tables, ClockedQueue>;
type ReplayMachine = (ReplayMapper, Arc<ReplayPlatform>, Arc<TraceMemory>);

/// The interrupt window of x86, which is never translated. (Other formats leave it out as well, so that their figures compare.)
const INTERRUPT_WINDOW: (u64, u64) = (0xfee0_0000, 0x10_0000);

/// A device of the trace, its domain and its queues. The measured calls are here.
pub(super) struct Driver {
    device: Device<ReplayMachine>,
    /// For mappings without a lane.
    alone: Queue<ReplayMachine>,
    lanes: [Option<Queue<ReplayMachine>>; LANES],
}

impl Driver {
    /// The driver of device `number`, in a domain of its own with page tables of `format`.
    pub(super) fn new(
        format: &dyn AnyFormat,
        ground: &Ground<'_>,
        number: u32,
        id: DomainId,
    ) -> Result<Self, SetupError> {
        let queue = || Arc::clone(ground.queue);
        let (start, len) = INTERRUPT_WINDOW;
        let window = IovaRange::new(Iova::new(start), len);
        let (tables, root) = format.tables(ground.memory, queue(), id, window.into_iter().collect())?;
        let context = match ground.policy {
            Policy::Passthrough => Context::Passthrough,
            _ => Context::Translated { domain: id, root, format: format.read() },
        };
        ground.iommu.attach(ModelDevice(number), context);
        let domain = Self::domain(RequestMapper::new(tables, queue()), ground)?;
        let device = domain.attach(DeviceId(number), DmaMask::BITS_64)?;
        let alone = device.queue(QueueConfig::direct())?;
        Ok(Self { device, alone, lanes: [None, None, None] })
    }

    fn domain(mapper: ReplayMapper, ground: &Ground<'_>) -> Result<DmaDomain<ReplayMachine>, SetupError> {
        let platform = Arc::clone(ground.platform);
        let (queue, timer) = (Arc::clone(ground.queue), ground.timer.clone());
        // Measured time without the model's part, and modelled time.
        let now = move || {
            let ticks = timer.ticks().wrapping_sub(queue.ticks());
            (timer.ns_of(ticks) + queue.waited_ns()) as u64
        };
        let builder = |mapper| DomainBuilder::new(mapper).policy(ground.policy).clock(now);
        match &ground.copies {
            Copies::None => Ok(DmaDomain::over(Domain::new(platform, mapper, ground.policy)?, None)?),
            Copies::Pool(bytes) => {
                builder(mapper).bounce(Arc::clone(bytes), PoolConfig::default()).build(platform)
            }
            Copies::Swiotlb(pool) => builder(mapper).swiotlb(pool.clone()).build(platform),
        }
    }

    fn queue(&mut self, lane: Option<usize>) -> &mut Queue<ReplayMachine> {
        match lane.and_then(|index| self.lanes[index].as_mut()) {
            Some(queue) => queue,
            None => &mut self.alone,
        }
    }

    pub(super) fn open(&mut self, lane: usize, config: QueueConfig) -> Result<(), SetupError> {
        self.lanes[lane] = Some(self.device.queue(config)?);
        Ok(())
    }

    /// Maps a list, in the queue of a lane or individually. Returns the number of device segments, and the ticks.
    pub(super) fn map(
        &mut self,
        lane: Option<usize>,
        list: &[PhysSegment],
        direction: Direction,
        view: &mut [DmaSegment],
        timer: &Timer,
    ) -> (Result<(RawMapping, usize), DmaMapError>, u64) {
        let start = timer.ticks();
        // SAFETY: the memory is simulated: its bytes are atomics, all accesses are this thread's or simulated devices', and only its queue
        // ends a mapping.
        let result = unsafe { self.queue(lane).map_raw(list, direction, view) };
        (result, timer.since(start))
    }

    /// Unmaps a mapping of a lane. Returns when it ends, and the ticks.
    pub(super) fn unmap(
        &mut self,
        lane: Option<usize>,
        mapping: RawMapping,
        timer: &Timer,
    ) -> (Result<Ended<(), ()>, DmaUnmapError>, u64) {
        let start = timer.ticks();
        let result = self.queue(lane).unmap_raw(mapping).map_err(|failed| failed.error);
        (result, timer.since(start))
    }

    /// Commits a lane's pending unmaps. Returns the ticks, too.
    pub(super) fn commit(&mut self, lane: usize, timer: &Timer) -> (Result<(), DmaUnmapError>, u64) {
        let start = timer.ticks();
        let result = self.queue(Some(lane)).commit_raw().map(drop);
        (result, timer.since(start))
    }

    /// Makes a lane without pending unmaps report its counts to the domain.
    pub(super) fn settle(&mut self, lane: usize) {
        let settled = self.queue(Some(lane)).commit_raw();
        debug_assert!(settled.is_ok());
    }

    /// Syncs `len` bytes from `offset` on of a mapping of a lane. Returns the ticks, too.
    pub(super) fn sync(
        &mut self,
        lane: Option<usize>,
        mapping: &RawMapping,
        side: Side,
        (offset, len): (u64, u64),
        timer: &Timer,
    ) -> (Result<(), DmaUnmapError>, u64) {
        let start = timer.ticks();
        let queue = self.queue(lane);
        let result = match side {
            Side::Cpu => queue.sync_raw_for_cpu(mapping, offset, len),
            Side::Device => queue.sync_raw_for_device(mapping, offset, len),
        };
        (result, timer.since(start))
    }

    /// Syncs everything of the device, if nothing is copied.
    pub(super) fn sync_all(&self, side: Side) {
        match side {
            Side::Cpu => self.device.dma().sync_for_cpu(),
            Side::Device => self.device.dma().sync_for_device(),
        }
    }

    /// The choices of a lane's queue, and their reasons.
    pub(super) fn explain(&self, lane: usize) -> Vec<Explained> {
        self.lanes[lane].iter().flat_map(Queue::explain).collect()
    }

    /// The policy of the device's unmaps.
    pub(super) fn policy(&self) -> Policy {
        self.device.dma().policy()
    }

    pub(super) fn domain_policy(&self) -> Policy {
        self.device.dma().domain().policy()
    }

    pub(super) fn set_domain_policy(&self, policy: Policy) -> Result<(), PolicyError> {
        self.device.dma().domain().set_policy(policy)
    }

    /// Whether its addresses are translated.
    pub(super) fn is_translated(&self) -> bool {
        self.device.dma().domain().is_translated()
    }

    /// The domain's count of its exposure.
    pub(super) fn exposure(&self) -> Exposure {
        self.device.dma().domain().exposure()
    }

    /// The most address bytes that its domain had in use.
    pub(super) fn peak_iova_bytes(&self) -> u64 {
        self.device.dma().domain().stats().peak_iova_bytes
    }

    /// Bytes of its domain's page tables.
    pub(super) fn table_bytes(&self) -> u64 {
        self.device.dma().domain().mapper().inner().table_bytes()
    }
}
