//! The heap refuses memory to each request in turn, from the making of a table to the end of the last queue: once to that request
//! alone, and once to all that follow it, too.
//!
//! A life goes through the public calls one after the other. Whatever the heap refuses,
//! - nothing panics, and what cannot be done is a typed error;
//! - the same call succeeds once there is memory again, and so does the rest of the life;
//! - no end of a mapping fails for want of memory;
//! - in the end all memory of the heap, all frames and all addresses are back.
//!
//! What lies below (the machine's memory, its IOMMU, the test's platform) is exempt.
#![cfg(not(loom))]

mod ops;

use std::fmt::Debug;
use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange, PhysAddr, PhysSegment};
use portcullis::bounce::pool::PoolConfig;
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::dma::{BufferList, CoherentMemory, Device, DmaDevice, DmaDomain, DmaMask, QueueConfig};
use portcullis::domain::{Domain, Linked, MapListError, Policy, Refused};
use portcullis::invalidation::{Costs, Gather, Invalidation, InvalidationError, InvalidationQueue};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{CacheMaintenance, CopyMemory, Frames, PlatformEvents, Table};
use portcullis::prelude::DmaBuffer;
use portcullis_model::{Context, Iommu, IommuConfig, Memory, Queue};

use crate::chosen::Chosen;
use crate::limited::{exempt, grant, grant_all, held};

const PAGE: u64 = 4096;
const CARD: DeviceId = DeviceId(7);
const ID: DomainId = DomainId(1);

/// The machine's memory, which is no part of the library.
#[derive(Clone)]
struct Ram(Arc<Memory>);

// SAFETY: all is the model's.
unsafe impl Frames for Ram {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        exempt(|| self.0.alloc(count))
    }

    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        exempt(|| self.0.alloc_within(count, last))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise.
        exempt(|| unsafe { self.0.free(first, count) });
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise.
        exempt(|| unsafe { self.0.table(frame) })
    }
}

// SAFETY: all is the model's.
unsafe impl CopyMemory for Ram {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: the caller's promise.
        exempt(|| unsafe { self.0.copy(from, to, len) });
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        // SAFETY: the caller's promise.
        exempt(|| unsafe { self.0.zero(at, len) });
    }
}

/// The queue of the machine's IOMMU.
struct Unit(Queue);

// SAFETY: all is the model's.
unsafe impl InvalidationQueue for Unit {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        exempt(|| self.0.invalidate(domain, invalidation))
    }

    fn costs(&self) -> Costs {
        self.0.costs()
    }
}

struct NoCache;

// SAFETY: there is nothing to maintain.
unsafe impl CacheMaintenance for NoCache {
    fn line_bytes(&self) -> u64 {
        64
    }

    unsafe fn clean(&self, _: PhysAddr, _: u64) {}

    unsafe fn invalidate(&self, _: PhysAddr, _: u64) {}
}

type Machine = (TableMapper<Ram, Unit>, Arc<Chosen>, Ram);

/// A buffer that is a list, kept by the test.
#[derive(Debug, Clone, Copy)]
struct List(&'static [PhysSegment]);

// SAFETY: nothing but the device and the library's copies touches the memory behind it.
unsafe impl DmaBuffer for List {
    fn segments(&self) -> &[PhysSegment] {
        self.0
    }
}

/// What does not change from one life to the next.
struct Ground {
    memory: Arc<Memory>,
    iommu: Arc<Iommu>,
    platform: Arc<Chosen>,
    cache: Arc<dyn CacheMaintenance>,
    lists: Vec<List>,
}

impl Ground {
    fn new() -> Self {
        let memory = Memory::new(64 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let buffer = Frames::alloc(&*memory, 256).unwrap();
        let at = |offset, len| PhysSegment { phys: PhysAddr::new(buffer.get() + offset), len };
        let lists: [&'static [PhysSegment]; 6] = [
            vec![at(0, PAGE)].leak(),
            // In a slot, as a whole and in pieces.
            vec![at(0x30, 5000)].leak(),
            vec![at(0x30, 500), at(2 * PAGE + 64, 700), at(9 * PAGE, 100)].leak(),
            // Above the threshold: with gaps in granules, split, and in whole granules.
            vec![at(0x80, 20 * PAGE), at(40 * PAGE + 0x80, 20 * PAGE)].leak(),
            vec![at(0x40, 30 * PAGE)].leak(),
            vec![at(0, 40 * PAGE), at(64 * PAGE, 8 * PAGE)].leak(),
        ];
        let platform = Arc::new(Chosen::new(2));
        Self { memory, iommu, platform, cache: Arc::new(NoCache), lists: lists.map(List).into() }
    }
}

/// One life, in which the heap refuses a request.
struct Life<'a> {
    ground: &'a Ground,
    refused: bool,
    /// Which life it is, for messages, and the request that is refused.
    name: &'a str,
    request: usize,
}

impl Life<'_> {
    fn which(&self) -> String {
        format!("{}, request {}", self.name, self.request)
    }

    /// A call that may need memory. Where it fails for want of it, it succeeds with it.
    fn step<T, E: Debug>(&mut self, what: &str, mut call: impl FnMut() -> Result<T, E>) -> T {
        match call() {
            Ok(done) => done,
            Err(error) => {
                let refused = grant_all();
                let error = format!("{error:?}");
                assert!(refused > 0 && !self.refused, "{}: {what}: {error}", self.which());
                // A swiotlb says that there is no memory for its least size.
                assert!(
                    error.contains("OutOfMemory") || error.contains("NoArea"),
                    "{}: {what}: {error}",
                    self.which()
                );
                self.refused = true;
                call().unwrap_or_else(|error| panic!("{}: {what}, with memory: {error:?}", self.which()))
            }
        }
    }

    /// A call that succeeds whatever the heap refuses.
    fn end<T, E: Debug>(&self, what: &str, call: Result<T, E>) -> T {
        call.unwrap_or_else(|error| {
            grant_all();
            panic!("{}: {what}: {error:?}", self.which())
        })
    }

    fn device(&mut self, policy: Policy, not_coherent: bool) -> Device<Machine> {
        let Ground { memory, iommu, platform, cache, .. } = self.ground;
        let ram = Ram(Arc::clone(memory));
        let format = VtdSecondStage::new(4, 3, 48).unwrap();
        let dead = IovaRange::new(Iova::new(0xfee0_0000), 1 << 20).unwrap();
        let config = SwiotlbConfig {
            min_bytes: 1 << 20,
            max_bytes: 4 << 20,
            area_bytes: 1 << 20,
            ..SwiotlbConfig::default()
        };
        let pool = PoolConfig { threshold: 64 << 10, class_bytes: 256 << 10, ..PoolConfig::default() };
        let domain: DmaDomain<Machine> = self.step("a domain", || {
            let table = PageTable::for_cpus(ram.clone(), format, 2)?;
            exempt(|| {
                let context = Context::SecondStage { domain: ID, root: table.root(), levels: 4 };
                let context = if policy == Policy::Passthrough { Context::Passthrough } else { context };
                iommu.attach(CARD, context);
            });
            let queue = Unit(exempt(|| iommu.queue()));
            let clock = Arc::clone(platform);
            let builder = Domain::builder(table, queue, ID).policy(policy).reserve(dead).reserve(dead);
            let builder = builder.clock(move || clock.lends() as u64).cache_maintenance(Arc::clone(cache));
            match policy {
                Policy::Passthrough => {
                    let swiotlb = Swiotlb::new(Arc::clone(platform), ram.clone(), &config)?;
                    builder.swiotlb(swiotlb).build(Arc::clone(platform))
                }
                _ => builder.bounce(ram.clone(), pool).build(Arc::clone(platform)),
            }
        });
        let device = self.step("attaching", || domain.attach(CARD, DmaMask::BITS_64));
        if not_coherent { self.end("not coherent", device.not_coherent()) } else { device }
    }

    /// All of it, with one policy and one kind of queue.
    fn live(&mut self, policy: Policy, config: QueueConfig, trusted: bool, not_coherent: bool) -> u64 {
        let device = self.device(policy, not_coherent);
        let device = if trusted { device.trusted() } else { device };
        let space = device.domain().space().clone();
        let mut queue = self.step("a queue", || device.queue::<List>(config));
        let ground: &Ground = self.ground;
        let lists = &ground.lists;
        let mut buffers = exempt(|| lists[..3].to_vec());
        // What was refused brings its buffers back.
        let listed = self.step("a list of buffers", || {
            BufferList::new(std::mem::take(&mut buffers)).map_err(|refused| {
                buffers = refused.buffer.unwrap();
                refused.error
            })
        });
        assert_eq!(listed.buffers().len(), 3, "{}", self.which());
        let buffers = listed.into_inner();
        exempt(|| drop(buffers));
        for cpu in [0, 2] {
            self.ground.platform.be(cpu);
            for direction in [Direction::FromDevice, Direction::ToDevice] {
                // A device that is not coherent shares no line; a swiotlb has no room for what is long.
                let fits = |list: &&List| {
                    let len: u64 = list.0.iter().map(|piece| piece.len).sum();
                    let aligned =
                        list.0.iter().all(|piece| piece.phys.get() % 64 == 0 && piece.len % 64 == 0);
                    (!not_coherent || aligned) && (policy != Policy::Passthrough || len < 64 << 10)
                };
                for list in lists.iter().filter(fits) {
                    let mapping =
                        self.step("a map", || queue.map(*list, direction).map_err(|refused| refused.error));
                    self.end("a sync", queue.sync_for_cpu(&mapping, 0, 64));
                    self.end("a sync", queue.sync_for_device(&mapping, 0, 64));
                    let mut segments = 0;
                    queue.segments(&mapping).for_each(|_| segments += 1);
                    assert!(segments > 0, "{}", self.which());
                    let ended = queue.unmap(mapping).map_err(|failed| failed.error);
                    drop(self.end("an unmap", ended));
                    // By number, too.
                    let mut view = [DmaSegment::default(); 3];
                    let (mapping, _) = self.step("a map by number", || {
                        // SAFETY: the memory is the test's, which does not touch it.
                        unsafe { queue.map_raw(list.0, direction, &mut view) }
                    });
                    let _ = self
                        .end("an unmap by number", queue.unmap_raw(mapping).map_err(|failed| failed.error));
                }
            }
            let _ = self.end("a commit", queue.commit()).count();
        }
        self.ground.platform.be(0);
        // The steps below queues.
        let list = lists[5].0;
        if policy != Policy::Passthrough {
            // SAFETY: as above.
            let range = self.step("a domain's map", || unsafe {
                space.map(list, portcullis::addr::Permissions::READ, Iova::new(u64::MAX))
            });
            self.end("a part's unmap", space.unmap_strictly(range));
            let range = self.step("a list that comes piece by piece", || {
                let reserved = space.reserve(48 * PAGE, Iova::new(u64::MAX))?;
                let mut pieces = reserved.pieces();
                let noted = pieces.add(40 * PAGE, list[1]).and_then(|_| pieces.add(0, list[0]));
                match noted.and_then(|_| pieces.list()) {
                    // SAFETY: as above.
                    Ok(list) => unsafe {
                        let linked =
                            reserved.link(&list, portcullis::addr::Permissions::READ, &mut Gather::new());
                        linked.map(Linked::into_range).map_err(Refused::end)
                    },
                    Err(error) => {
                        reserved.free();
                        Err::<_, MapListError>(error)
                    }
                }
            });
            self.end("its unmap", space.unmap_strictly(range));
            let other = if policy == Policy::Strict { Policy::LAZY } else { Policy::Strict };
            self.end("another policy", space.set_policy(other));
            self.end("a reclaim", space.reclaim());
        }
        self.end("a flush", space.flush());
        let dma = device.dma();
        let own = self.step("a handle", || DmaDevice::new(dma.domain().clone(), dma.mask()));
        self.end("its policy", own.set_policy(Some(policy)));
        if !not_coherent {
            let ram = Ram(Arc::clone(&self.ground.memory));
            let coherent =
                self.step("coherent memory", || CoherentMemory::new(&own, ram.clone(), 3 * PAGE as usize));
            assert_eq!(coherent.write(8, &[1; 100]), Some(()));
            self.end("coherent memory's end", coherent.free());
        }
        let _ = self.end("the last commit", queue.commit()).count();
        // As a platform's timer does, with work for it; and a CPU that is unplugged.
        self.ground.platform.at(1 << 62);
        space.timer();
        (0..2).for_each(|cpu| space.cpu_released(cpu));
        self.ground.platform.at(0);
        drop(queue);
        drop(own);
        self.addresses_out(&device)
    }

    /// How many bytes of addresses have not come back: a pool's, and what is deferred.
    fn addresses_out(&self, device: &Device<Machine>) -> u64 {
        let stats = device.domain().space().stats();
        assert_eq!(stats.lost_iova_bytes, 0, "{}", self.which());
        stats.taken_iova_bytes - stats.cached_iova_bytes
    }
}

/// Lives, in each of which the heap refuses another request, until one needs no more of them. Each returns how many addresses have not
/// come back, and each returns the same. Returns how many lives there were.
fn lives(ground: &Ground, name: &str, once: bool, live: impl Fn(&mut Life<'_>) -> u64) -> usize {
    let one = |request| {
        let mut life = Life { ground, refused: false, name, request };
        let out = live(&mut life);
        (grant_all() > 0 || life.refused, out)
    };
    // What is kept for the thread, and for good, is made by a life with all memory.
    let (_, out) = one(usize::MAX);
    let (before, frames) = (held(), ground.memory.frames_in_use());
    for request in 0.. {
        grant(request, once);
        let (refused, now_out) = one(request);
        assert_eq!(now_out, out, "{name}, request {request}: bytes of addresses");
        let kept = (held() - before, ground.memory.frames_in_use() - frames);
        assert_eq!(kept, (0, 0), "{name}, request {request}: bytes of the heap, and frames");
        if !refused {
            return request;
        }
    }
    unreachable!()
}

const DIRECT: QueueConfig = QueueConfig::direct();
const BATCHED: QueueConfig = QueueConfig::batched(4);
const RING: QueueConfig = QueueConfig::ring(16, 128 * PAGE).batch(4);
const BOUNCE: QueueConfig = QueueConfig::bounce();
const AUTO: QueueConfig = QueueConfig::auto(16, 128 * PAGE).batch(4);

/// A life of such a device, for each request of it that the heap may refuse.
fn each(policy: Policy, config: QueueConfig, trusted: bool, not_coherent: bool) {
    let ground = Ground::new();
    for once in [true, false] {
        let name =
            format!("{policy:?} {config:?}, trusted {trusted}, not coherent {not_coherent}, once {once}");
        let requests = lives(&ground, &name, once, |life| life.live(policy, config, trusted, not_coherent));
        assert!(requests > 20, "{name}: {requests}");
    }
}

#[test]
fn direct_queues_survive_every_refusal() {
    each(Policy::Strict, DIRECT, false, false);
    each(Policy::LAZY, DIRECT, true, false);
    each(Policy::Strict, DIRECT, true, true);
}

#[test]
fn batches_and_rings_survive_every_refusal() {
    each(Policy::Strict, BATCHED, false, false);
    each(Policy::LAZY, RING, false, false);
    each(Policy::Strict, RING, true, true);
}

#[test]
fn queues_that_copy_survive_every_refusal() {
    each(Policy::Strict, BOUNCE, false, false);
    each(Policy::LAZY, BOUNCE, true, false);
    each(Policy::Strict, BOUNCE, false, true);
}

#[test]
fn queues_that_choose_survive_every_refusal() {
    each(Policy::Strict, AUTO, false, false);
    each(Policy::LAZY, AUTO, true, true);
}

#[test]
fn queues_without_translation_survive_every_refusal() {
    each(Policy::Passthrough, DIRECT, false, false);
    each(Policy::Passthrough, BOUNCE, true, false);
    each(Policy::Passthrough, AUTO, true, true);
}

/// Where the hardware does not confirm, and the heap has no memory for a buffer that would wait, the buffer is leaked, and the error says so.
#[test]
fn a_buffer_that_cannot_wait_for_want_of_memory_is_said_to_be_leaked() {
    let ground = Ground::new();
    let mut life = Life { ground: &ground, refused: false, name: "no room", request: 0 };
    let device = life.device(Policy::Strict, false);
    for refuses in [false, true] {
        let mut queue = device.queue::<List>(DIRECT).unwrap();
        let mapping =
            queue.map(ground.lists[0], Direction::FromDevice).map_err(|refused| refused.error).unwrap();
        ground.iommu.queue().fail_next(1, InvalidationError::TimedOut { waited_ns: 1 });
        if refuses {
            grant(0, false);
        }
        let failed = queue.unmap(mapping).err();
        grant_all();
        let failed = failed.expect("the hardware has failed");
        assert_eq!((failed.mapping.is_none(), failed.waits), (true, !refuses));
        assert_eq!(queue.commit().unwrap().count(), usize::from(!refuses));
    }
}
