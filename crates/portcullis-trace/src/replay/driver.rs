//! What a device's driver calls in the library, behind a pointer: the rest of a replay is compiled once, and not
//! again for each format of page tables.
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
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{Format, PageTable};
use portcullis_model::{Context, DeviceId as ModelDevice, Iommu, Memory, TableFormat};

use super::memory::TraceMemory;
use super::platform::ReplayPlatform;
use super::queue::ClockedQueue;
use super::requests::RequestMapper;
use super::timing::Timer;

/// For whom a part of a mapping is synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Cpu,
    Device,
}

/// Queues of a device besides the one for what goes alone: one for all directions, or one for each.
pub(super) const LANES: usize = 3;

/// A device of the trace, its domain and its queues. Calls that are measured are measured in here: the ticks that
/// they return hold no call through a pointer.
pub(super) trait Driver {
    /// Makes the queue of a lane.
    fn open(&mut self, lane: usize, config: QueueConfig) -> Result<(), SetupError>;

    /// Maps a list, in the queue of a lane or alone. Returns how many segments that is for the device, and the ticks.
    fn map(
        &mut self,
        lane: Option<usize>,
        list: &[PhysSegment],
        direction: Direction,
        view: &mut [DmaSegment],
        timer: &Timer,
    ) -> (Result<(RawMapping, usize), DmaMapError>, u64);

    /// Unmaps a mapping of a lane. Returns when it has ended, and the ticks.
    fn unmap(
        &mut self,
        lane: Option<usize>,
        mapping: RawMapping,
        timer: &Timer,
    ) -> (Result<Ended<(), ()>, DmaUnmapError>, u64);

    /// Commits what waits in a lane. Returns the ticks, too.
    fn commit(&mut self, lane: usize, timer: &Timer) -> (Result<(), DmaUnmapError>, u64);

    /// Syncs `len` bytes from `offset` on of a mapping of a lane. Returns the ticks, too.
    fn sync(
        &mut self,
        lane: Option<usize>,
        mapping: &RawMapping,
        side: Side,
        part: (u64, u64),
        timer: &Timer,
    ) -> (Result<(), DmaUnmapError>, u64);

    /// Syncs all that the device has, where nothing is copied.
    fn sync_all(&self, side: Side);

    /// What was chosen in the queue of a lane, and why.
    fn explain(&self, lane: usize) -> Vec<Explained>;

    /// The policy by which the device's mappings end.
    fn policy(&self) -> Policy;

    /// The policy of its domain.
    fn domain_policy(&self) -> Policy;

    /// Changes that.
    fn set_domain_policy(&self, policy: Policy) -> Result<(), PolicyError>;

    /// Whether its addresses are translated.
    fn is_translated(&self) -> bool;

    /// What its domain says that it has left exposed.
    fn exposure(&self) -> Exposure;

    /// The most bytes of addresses that its domain had in use at once.
    fn peak_iova_bytes(&self) -> u64;

    /// Bytes of its domain's page tables.
    fn table_bytes(&self) -> u64;
}

/// What a driver stands on, of one engine.
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

/// What its queues copy through.
pub(super) enum Copies {
    None,
    Pool(Arc<TraceMemory>),
    Swiotlb(Arc<ReplaySwiotlb>),
}

pub(super) type ReplaySwiotlb = Swiotlb<Arc<ReplayPlatform>, Arc<TraceMemory>>;
type ReplayMapper<X> = RequestMapper<TableMapper<Arc<Memory>, Arc<ClockedQueue>, X>, ClockedQueue>;
type ReplayMachine<X> = (ReplayMapper<X>, Arc<ReplayPlatform>, Arc<TraceMemory>);

/// On x86 no address in here is ever translated: it is where interrupts are written to. (Others do without it
/// as well, so that their figures compare.)
const INTERRUPT_WINDOW: (u64, u64) = (0xfee0_0000, 0x10_0000);

/// The driver of a device whose domain has page tables of format `X`.
pub(super) struct DriverOf<X: Format> {
    device: Device<ReplayMachine<X>>,
    /// For what belongs to no lane.
    alone: Queue<ReplayMachine<X>>,
    lanes: [Option<Queue<ReplayMachine<X>>>; LANES],
}

impl<X: Format> DriverOf<X> {
    /// The driver of device `number`, in a domain of its own with page tables that the library writes by `written`, and
    /// the model reads by `read`.
    pub(super) fn new(
        (written, read): (X, TableFormat),
        ground: &Ground<'_>,
        number: u32,
        id: DomainId,
    ) -> Result<Self, SetupError> {
        let queue = || Arc::clone(ground.queue);
        let table = PageTable::new(Arc::clone(ground.memory), written)?;
        let context = match ground.policy {
            Policy::Passthrough => Context::Passthrough,
            _ => Context::Translated { domain: id, root: table.root(), format: read },
        };
        ground.iommu.attach(ModelDevice(number), context);
        let (start, len) = INTERRUPT_WINDOW;
        let window = IovaRange::new(Iova::new(start), len);
        let mapper = TableMapper::new(table, queue(), id, window.into_iter().collect());
        let domain = Self::domain(RequestMapper::new(mapper, queue()), ground)?;
        let device = domain.attach(DeviceId(number), DmaMask::BITS_64)?;
        let alone = device.queue(QueueConfig::direct())?;
        Ok(Self { device, alone, lanes: [None, None, None] })
    }

    fn domain(
        mapper: ReplayMapper<X>,
        ground: &Ground<'_>,
    ) -> Result<DmaDomain<ReplayMachine<X>>, SetupError> {
        let platform = Arc::clone(ground.platform);
        let (queue, timer) = (Arc::clone(ground.queue), ground.timer.clone());
        // What is measured, less the model's part, and what is modelled.
        let now = move || {
            let ticks = timer.ticks().wrapping_sub(queue.ticks());
            (timer.ns_of(ticks) + queue.waited_ns()) as u64
        };
        let builder = |mapper| DomainBuilder::new(mapper).policy(ground.policy).clock(now);
        match &ground.copies {
            Copies::None => Ok(DmaDomain::over(Domain::new(platform, mapper, ground.policy)?, None)),
            Copies::Pool(bytes) => {
                builder(mapper).bounce(Arc::clone(bytes), PoolConfig::default()).build(platform)
            }
            Copies::Swiotlb(pool) => builder(mapper).swiotlb(Arc::clone(pool)).build(platform),
        }
    }

    fn queue(&mut self, lane: Option<usize>) -> &mut Queue<ReplayMachine<X>> {
        match lane.and_then(|index| self.lanes[index].as_mut()) {
            Some(queue) => queue,
            None => &mut self.alone,
        }
    }
}

impl<X: Format> Driver for DriverOf<X> {
    fn open(&mut self, lane: usize, config: QueueConfig) -> Result<(), SetupError> {
        self.lanes[lane] = Some(self.device.queue(config)?);
        Ok(())
    }

    fn map(
        &mut self,
        lane: Option<usize>,
        list: &[PhysSegment],
        direction: Direction,
        view: &mut [DmaSegment],
        timer: &Timer,
    ) -> (Result<(RawMapping, usize), DmaMapError>, u64) {
        let start = timer.ticks();
        // SAFETY: the memory is simulated: its bytes are atomics, all accesses are this thread's or simulated devices', and no
        // mapping is ended but by its queue.
        let result = unsafe { self.queue(lane).map_raw(list, direction, view) };
        (result, timer.since(start))
    }

    fn unmap(
        &mut self,
        lane: Option<usize>,
        mapping: RawMapping,
        timer: &Timer,
    ) -> (Result<Ended<(), ()>, DmaUnmapError>, u64) {
        let start = timer.ticks();
        let result = self.queue(lane).unmap_raw(mapping).map_err(|failed| failed.error);
        (result, timer.since(start))
    }

    fn commit(&mut self, lane: usize, timer: &Timer) -> (Result<(), DmaUnmapError>, u64) {
        let start = timer.ticks();
        let result = self.queue(Some(lane)).commit_raw().map(drop);
        (result, timer.since(start))
    }

    fn sync(
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

    fn sync_all(&self, side: Side) {
        match side {
            Side::Cpu => self.device.dma().sync_for_cpu(),
            Side::Device => self.device.dma().sync_for_device(),
        }
    }

    fn explain(&self, lane: usize) -> Vec<Explained> {
        self.lanes[lane].iter().flat_map(Queue::explain).collect()
    }

    fn policy(&self) -> Policy {
        self.device.dma().policy()
    }

    fn domain_policy(&self) -> Policy {
        self.device.dma().domain().policy()
    }

    fn set_domain_policy(&self, policy: Policy) -> Result<(), PolicyError> {
        self.device.dma().domain().set_policy(policy)
    }

    fn is_translated(&self) -> bool {
        self.device.dma().domain().is_translated()
    }

    fn exposure(&self) -> Exposure {
        self.device.dma().domain().exposure()
    }

    fn peak_iova_bytes(&self) -> u64 {
        self.device.dma().domain().stats().peak_iova_bytes
    }

    fn table_bytes(&self) -> u64 {
        self.device.dma().domain().mapper().inner().table().table_bytes() as u64
    }
}
