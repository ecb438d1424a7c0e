//! The library, as drivers call it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use portcullis::addr::{DeviceId, Direction, DmaSegment, Iova, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig};
use portcullis::bounce::swiotlb::{Constraints, Swiotlb, SwiotlbConfig};
use portcullis::dma::{
    AdaptiveRing, DmaBuffer, DmaDevice, DmaDomain, DmaMask, Ended, Mapping, Queue, QueueConfig, RawBatch,
    RawMapping, StrictRing, StrictRingConfig,
};
use portcullis::domain::Policy;
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationQueue;
use portcullis::platform::{FRAME_SIZE, Platform};

use super::machine::{World, list, phys, refused};
use super::subject::Subject;
use super::workload::{BATCH, Case, Kind};
use crate::bounce::memory::{Buffers, Ram};
use crate::invalidation::parts::Tables;
use crate::lane::{Lane, put};
use crate::runner::Failure;

type Device<Q, P> = DmaDevice<Tables<Q>, P>;
type Bounce<Q, P> = BounceDevice<Tables<Q>, P, Ram<true>>;
type Machine<Q, P> = (Tables<Q>, P, Infallible);
type Slots<P> = Swiotlb<P, Ram<true>>;

const DIRECTION: Direction = Direction::ToDevice;

/// The most that pools may take: beyond, a workload is left out.
const MOST_POOL_BYTES: u64 = 256 << 20;

/// What all threads of a domain share.
pub(crate) struct Ours<Q: InvalidationQueue, P: Platform> {
    world: World<Q, P>,
    device: Device<Q, P>,
    bounce: Option<Bounce<Q, P>>,
    swiotlb: Option<Shared<Slots<P>>>,
}

impl<Q: InvalidationQueue, P: Platform + Clone> Ours<Q, P> {
    /// A fresh domain, under the policy of the workload, and what drivers call above it.
    pub(crate) fn new(platform: &P, queue: Q, case: &Case) -> Result<Self, Failure> {
        let kind = case.workload.kind;
        let policy = match kind {
            Kind::Lazy => Policy::lazy_for(&queue.costs()),
            _ => Policy::Strict,
        };
        let world = World::new(platform, queue, policy)?;
        // Twice what is in use.
        let bytes = 2 * case.workload.bytes() * (case.live * case.threads) as u64;
        if kind.copies() && bytes > MOST_POOL_BYTES {
            return Err(Failure::Unsupported(format!("it would take a pool of {} MiB", bytes >> 20)));
        }
        let bytes = bytes.next_power_of_two().max(64 << 20);
        let device = DmaDevice::new(world.domain.clone(), u64::MAX).map_err(refused)?;
        let bounce = || {
            let config = PoolConfig { class_bytes: bytes, ..PoolConfig::default() };
            let pool = BouncePool::new(world.domain.clone(), Ram, config).map_err(refused)?;
            Bounce::new(pool, DeviceProfile::default()).map_err(refused)
        };
        let swiotlb = || {
            // All of it from the beginning, as Linux has: how a pool grows is another bench's subject.
            let config = SwiotlbConfig { min_bytes: bytes, max_bytes: bytes, ..SwiotlbConfig::default() };
            Swiotlb::new(platform.clone(), Ram, &config).map_err(refused)
        };
        let bounce = matches!(kind, Kind::Pool | Kind::Adaptive).then(bounce).transpose()?;
        let swiotlb = (kind == Kind::Swiotlb).then(swiotlb).transpose()?;
        Ok(Self { world, device, bounce, swiotlb })
    }
}

impl<Q: InvalidationQueue, P: Platform + Clone> Subject for Ours<Q, P> {
    fn lane(self: Arc<Self>, case: &Case, thread: usize) -> Result<Box<dyn Lane>, Failure> {
        let device = self.device.clone();
        let work = Work { case: *case, thread };
        let (live, bytes) = (case.live, case.workload.bytes());
        let iovas = vec![Iova::new(0); live];
        let unsupported = || Failure::Unsupported("there is no pool".into());
        let ring_config = || StrictRingConfig::new((live + 2 * BATCH) as u32, bytes + FRAME_SIZE, BATCH);
        // The same memory for several mappings: a device only reads it.
        let buffers = || Buffers::new(live.min(64), bytes);
        Ok(match case.workload.kind {
            Kind::Raw | Kind::Lazy => Box::new(Single { device, work, iovas }),
            Kind::Typed => {
                let domain =
                    DmaDomain::<Machine<Q, P>>::over(self.world.domain.clone(), None).map_err(refused)?;
                let device = domain.attach(DeviceId(0), DmaMask::BITS_64).map_err(refused)?;
                let queue = device.queue(QueueConfig::direct()).map_err(refused)?;
                let slots = (0..live).map(|index| Typed::Idle(Pages::new(work.segment(index)))).collect();
                Box::new(Owned { queue, slots })
            }
            Kind::Sg => {
                let lists = (0..live).map(|index| list(case, thread, index).collect()).collect();
                let views = vec![vec![DmaSegment::default(); case.workload.pages as usize]; live];
                Box::new(Listed { device, lists, used: vec![0; live], views })
            }
            Kind::Batch => Box::new(Batched {
                batch: RawBatch::new(&device, BATCH).map_err(refused)?,
                single: Single { device, work, iovas },
            }),
            Kind::Ring => {
                let ring = StrictRing::new(&device, ring_config()).map_err(refused)?;
                Box::new(Descriptors { ring, work, mappings: (0..live).map(|_| None).collect() })
            }
            Kind::Pool => {
                let device = self.bounce.clone().ok_or_else(unsupported)?;
                Box::new(Bounced { device, buffers: buffers()?, iovas })
            }
            Kind::Swiotlb => {
                let pool = self.swiotlb.clone().ok_or_else(unsupported)?;
                Box::new(Slot {
                    pool,
                    constraints: Constraints::new(),
                    buffers: buffers()?,
                    at: vec![0; live],
                })
            }
            Kind::Adaptive => {
                let bounce = self.bounce.clone().ok_or_else(unsupported)?;
                let start = Instant::now();
                let clock = move || start.elapsed().as_nanos() as u64;
                let queue = AdaptiveRing::new(&device, bounce, DIRECTION, ring_config(), clock);
                let mappings = (0..live).map(|_| None).collect();
                Box::new(Adapted { queue: queue.map_err(refused)?, buffers: buffers()?, mappings })
            }
        })
    }

    fn reach(&self, address: u64) -> Option<u64> {
        match &self.swiotlb {
            Some(pool) => pool.holds(PhysAddr::new(address)).then_some(address),
            None => self.world.reach(address),
        }
    }

    fn settle(&self) -> Result<(), Failure> {
        if let Some(bounce) = &self.bounce {
            bounce.pool().trim(0).map_err(refused)?;
            // The pool keeps its own addresses for as long as it lives.
            let usage = bounce.pool().usage();
            let empty = usage.buffer_bytes == 0 && usage.singles == 0;
            empty.then_some(()).ok_or_else(|| Failure::Broken(format!("still mapped: {usage:?}")))?;
            // What an adaptive ring has mapped, and not copied, is in no pool.
            return self.world.is_unmapped();
        }
        match self.swiotlb.as_ref().map(|pool| pool.usage()) {
            Some(usage) if usage.mapped > 0 => Err(Failure::Broken(format!("still mapped: {usage:?}"))),
            Some(_) => Ok(()),
            None => self.world.settle(),
        }
    }

    fn flush(&self) -> Result<(), Failure> {
        self.world.flush()
    }
}

/// Whose memory is mapped.
#[derive(Debug, Clone, Copy)]
struct Work {
    case: Case,
    thread: usize,
}

impl Work {
    #[inline(always)]
    fn segment(&self, index: usize) -> PhysSegment {
        let phys = PhysAddr::new(phys(&self.case, self.thread, index));
        PhysSegment { phys, len: self.case.workload.bytes() }
    }
}

struct Single<Q: InvalidationQueue, P: Platform> {
    device: Device<Q, P>,
    work: Work,
    iovas: Vec<Iova>,
}

impl<Q: InvalidationQueue, P: Platform> Lane for Single<Q, P> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let PhysSegment { phys, len } = self.work.segment(index);
        // SAFETY: no device is behind these tables.
        put(&mut self.iovas, index, unsafe { self.device.map_single(phys, len, DIRECTION) }.ok())
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        self.device.unmap_single(self.iovas[index], self.work.case.workload.bytes()).is_ok()
    }

    fn address(&self, index: usize) -> u64 {
        self.iovas[index].get()
    }
}

/// A buffer that is memory by number only.
#[derive(Debug)]
struct Pages([PhysSegment; 1]);

impl Pages {
    fn new(segment: PhysSegment) -> Self {
        Self([segment])
    }
}

// SAFETY: the address is a number that stays the same; no memory is behind it, as no device walks these tables.
unsafe impl DmaBuffer for Pages {
    fn segments(&self) -> &[PhysSegment] {
        &self.0
    }
}

enum Typed {
    Idle(Pages),
    Live(Mapping<Pages>),
    Gone,
}

/// A queue of a driver, whose mappings own their buffers.
struct Owned<Q: InvalidationQueue, P: Platform> {
    queue: Queue<Machine<Q, P>, Pages>,
    slots: Vec<Typed>,
}

impl<Q: InvalidationQueue, P: Platform> Lane for Owned<Q, P> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let Typed::Idle(buffer) = std::mem::replace(&mut self.slots[index], Typed::Gone) else {
            return false;
        };
        let mapped = self.queue.map(buffer, DIRECTION);
        put(&mut self.slots, index, mapped.ok().map(Typed::Live))
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        let Typed::Live(mapping) = std::mem::replace(&mut self.slots[index], Typed::Gone) else {
            return false;
        };
        match self.queue.unmap(mapping) {
            Ok(Ended::Done(buffer)) => put(&mut self.slots, index, Some(Typed::Idle(buffer))),
            _ => false,
        }
    }

    fn address(&self, index: usize) -> u64 {
        match &self.slots[index] {
            Typed::Live(mapping) => mapping.iova().get(),
            _ => 0,
        }
    }
}

struct Listed<Q: InvalidationQueue, P: Platform> {
    device: Device<Q, P>,
    lists: Vec<Vec<PhysSegment>>,
    used: Vec<usize>,
    views: Vec<Vec<DmaSegment>>,
}

impl<Q: InvalidationQueue, P: Platform> Lane for Listed<Q, P> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        // SAFETY: no device is behind these tables.
        let used = unsafe { self.device.map_sg(&self.lists[index], DIRECTION, &mut self.views[index]) };
        put(&mut self.used, index, used.ok())
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        self.device.unmap_sg(&self.views[index][..self.used[index]]).is_ok()
    }

    fn address(&self, index: usize) -> u64 {
        self.views[index][0].iova.get()
    }
}

struct Batched<Q: InvalidationQueue, P: Platform> {
    single: Single<Q, P>,
    batch: RawBatch<Tables<Q>, P>,
}

impl<Q: InvalidationQueue, P: Platform> Lane for Batched<Q, P> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        self.single.map(index)
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        let (iova, len) = (self.single.iovas[index], self.single.work.case.workload.bytes());
        self.single.device.unmap_single_in(&mut self.batch, iova, len).is_ok()
            && (!self.batch.is_full() || self.batch.commit().is_ok())
    }

    fn address(&self, index: usize) -> u64 {
        self.single.address(index)
    }

    fn finish(&mut self) -> bool {
        self.batch.commit().is_ok()
    }
}

struct Descriptors<Q: InvalidationQueue, P: Platform> {
    ring: StrictRing<Tables<Q>, P>,
    work: Work,
    mappings: Vec<Option<RawMapping>>,
}

impl<Q: InvalidationQueue, P: Platform> Lane for Descriptors<Q, P> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        // SAFETY: no device is behind these tables.
        let mapping = unsafe { self.ring.map(&[self.work.segment(index)], DIRECTION) };
        put(&mut self.mappings, index, mapping.ok().map(Some))
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        self.mappings[index].take().is_some_and(|mapping| self.ring.unmap(mapping).is_ok())
    }

    fn address(&self, index: usize) -> u64 {
        self.mappings[index].as_ref().map_or(0, |mapping| mapping.iova().get())
    }

    fn finish(&mut self) -> bool {
        self.ring.commit().is_ok()
    }
}

struct Bounced<Q: InvalidationQueue, P: Platform> {
    device: Bounce<Q, P>,
    buffers: Buffers,
    iovas: Vec<Iova>,
}

/// Which of the buffers mapping `index` has, and the whole of it.
#[inline(always)]
fn original(buffers: &Buffers, index: usize) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(buffers.at(index % 64)), len: buffers.bytes() }
}

impl<Q: InvalidationQueue, P: Platform> Lane for Bounced<Q, P> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let list = [original(&self.buffers, index)];
        // SAFETY: the buffer is memory of this process, which lives as long as this value and is only read.
        let mapped = unsafe { self.device.map(&list, DIRECTION, Attributes::default()) };
        put(&mut self.iovas, index, mapped.ok().map(|mapping| mapping.iova()))
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        // SAFETY: only this thread ends this mapping, once, and its buffer is there still.
        unsafe { self.device.pool().unmap(self.iovas[index], self.buffers.bytes()) }.is_ok()
    }

    fn address(&self, index: usize) -> u64 {
        self.iovas[index].get()
    }
}

struct Slot<P: Platform> {
    pool: Shared<Slots<P>>,
    constraints: Constraints,
    buffers: Buffers,
    at: Vec<u64>,
}

impl<P: Platform> Lane for Slot<P> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let original = original(&self.buffers, index);
        // SAFETY: as in `Bounced`.
        let mapped = unsafe { self.pool.map(original, DIRECTION, &self.constraints) };
        put(&mut self.at, index, mapped.ok().map(|mapped| mapped.phys.get()))
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        // SAFETY: only this thread ends this mapping.
        unsafe { self.pool.unmap(PhysAddr::new(self.at[index]), self.buffers.bytes()) }.is_ok()
    }

    fn address(&self, index: usize) -> u64 {
        self.at[index]
    }
}

struct Adapted<Q: InvalidationQueue, P: Platform, K> {
    queue: AdaptiveRing<Tables<Q>, P, Ram<true>, K>,
    buffers: Buffers,
    mappings: Vec<Option<RawMapping>>,
}

impl<Q: InvalidationQueue, P: Platform, K: Fn() -> u64 + Send> Lane for Adapted<Q, P, K> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let mut view = [DmaSegment::default(); 1];
        let list = [original(&self.buffers, index)];
        // SAFETY: as in `Bounced`.
        let mapped = unsafe { self.queue.map(&list, Attributes::default(), &mut view) };
        put(&mut self.mappings, index, mapped.ok().map(|(mapping, _)| Some(mapping)))
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        self.mappings[index].take().is_some_and(|mapping| self.queue.unmap(mapping).is_ok())
    }

    fn address(&self, index: usize) -> u64 {
        self.mappings[index].as_ref().map_or(0, |mapping| mapping.iova().get())
    }

    fn finish(&mut self) -> bool {
        self.queue.commit().is_ok()
    }
}

#[cfg(test)]
mod tests {
    use portcullis::addr::Permissions;
    use portcullis::std_platform::StdPlatform;

    use super::*;
    use crate::path::AtOnce;
    use crate::path::workload::workloads;

    /// The device is to read; and of several mappings each has its own.
    #[test]
    fn a_device_may_do_what_a_mapping_is_for() {
        let platform = StdPlatform::new();
        let of = |workload: &&&crate::path::Workload| (workload.pages, workload.live) == (4, 64);
        for workload in workloads().iter().filter(|workload| of(&workload)) {
            let case = Case { workload: *workload, threads: 2, live: 3, own_domains: false, crowded: false };
            let ours = Arc::new(Ours::new(&platform, AtOnce, &case).unwrap());
            let mut lane = Arc::clone(&ours).lane(&case, 1).unwrap();
            assert!(lane.maps(0, 3), "{}", workload.name);
            let mut addresses: Vec<u64> = (0..3).map(|index| lane.address(index)).collect();
            for address in &addresses {
                let table = ours.world.domain.mapper().table();
                let found =
                    table.translate(&platform, Iova::new(*address)).map(|(_, found)| found.permissions);
                // Through swiotlb nothing is mapped.
                let expected = (workload.kind != Kind::Swiotlb).then_some(Permissions::READ);
                assert_eq!(found, expected, "{}", workload.name);
            }
            addresses.sort_unstable();
            addresses.dedup();
            assert_eq!(addresses.len(), 3, "{}", workload.name);
            assert!(lane.unmaps(0, 3));
        }
    }

    /// Mapping 65 shares the buffer of mapping 1.
    #[test]
    fn what_is_copied_is_all_of_the_mappings_own_buffer() {
        const LIVE: usize = 66;
        let platform = StdPlatform::new();
        for kind in [Kind::Pool, Kind::Swiotlb] {
            let name = format!("{}-4", kind.name());
            let workload = *workloads().iter().find(|workload| workload.name == name).unwrap();
            let case = Case { workload, threads: 1, live: LIVE, own_domains: false, crowded: false };
            let ours = Arc::new(Ours::new(&platform, AtOnce, &case).unwrap());
            let buffers = Buffers::new(64, workload.bytes()).unwrap();
            let words = |at: u64| {
                [at, at + workload.bytes() - 8].map(|at| crate::bounce::memory::pointer(at).cast::<usize>())
            };
            for index in 0..64 {
                let [first, last] = words(buffers.at(index));
                // SAFETY: words of the buffer, which no other code has.
                unsafe { (first.write(index), last.write(1000 + index)) };
            }
            let mut lane: Box<dyn Lane> = match ours.swiotlb.clone() {
                Some(pool) => {
                    Box::new(Slot { pool, constraints: Constraints::new(), buffers, at: vec![0; LIVE] })
                }
                None => {
                    let device = ours.bounce.clone().unwrap();
                    Box::new(Bounced { device, buffers, iovas: vec![Iova::new(0); LIVE] })
                }
            };
            assert!(lane.maps(0, LIVE));
            for index in 0..LIVE {
                let [first, last] = words(ours.reach(lane.address(index)).unwrap());
                // SAFETY: words of the pool, which are the mapping's.
                let found = unsafe { [first.read(), last.read()] };
                assert_eq!(found, [index % 64, 1000 + index % 64], "{kind:?} {index}");
            }
            assert!(lane.unmaps(0, LIVE));
        }
    }
}
