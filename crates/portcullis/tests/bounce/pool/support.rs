//! A pool in the software IOMMU, with memory that runs out when the test says so.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::{Direction, DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{
    Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig, PoolMapping,
};
use portcullis::dma::DmaMapError;
use portcullis::domain::{Domain, Policy};
use portcullis::heap::{OutOfMemory, Shared, Weak};
use portcullis::invalidation::InvalidationError;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{CopyMemory, Frames, LocalCpu, Platform, PlatformEvents, PlatformNumber, Table};
use portcullis_model::open::Simulated;
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory, Queue};

use crate::chosen::Chosen;

pub const PAGE: u64 = 4096;
pub const DEVICE: DeviceId = DeviceId(7);
pub const TIMEOUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };

/// Memory of which only so many more allocations are granted.
#[derive(Clone)]
pub struct Rationed {
    memory: Arc<Memory>,
    grants: Arc<AtomicU64>,
    largest: Arc<AtomicU64>,
    copied: Arc<AtomicU64>,
    breaks_at: Arc<AtomicU64>,
}

impl Rationed {
    pub fn new(memory: &Arc<Memory>) -> Self {
        let unlimited = || Arc::new(AtomicU64::new(u64::MAX));
        Self {
            memory: Arc::clone(memory),
            grants: unlimited(),
            largest: unlimited(),
            copied: Arc::default(),
            breaks_at: unlimited(),
        }
    }

    /// Bytes that were copied so far.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// From now on no more frames than so many are to be had in a row.
    pub fn break_up(&self, largest: u64) {
        self.largest.store(largest, Ordering::Relaxed);
    }

    pub fn grant(&self, grants: u64) {
        self.grants.store(grants, Ordering::Relaxed);
    }

    /// After so many copies and wipes one panics half-way; at the end of numbers, none does. What was left until then.
    pub fn break_at(&self, left: u64) -> u64 {
        self.breaks_at.swap(left, Ordering::Relaxed)
    }

    fn breaks(&self) -> bool {
        let left = self.breaks_at.load(Ordering::Relaxed);
        self.breaks_at.store(if left == u64::MAX { left } else { left.wrapping_sub(1) }, Ordering::Relaxed);
        left == 0
    }
}

// SAFETY: it is the software IOMMU's memory.
unsafe impl Simulated for Rationed {}

// SAFETY: everything is passed on to the memory, or refused.
unsafe impl Frames for Rationed {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        if count as u64 > self.largest.load(Ordering::Relaxed) {
            return None;
        }
        let grant = |grants: u64| if grants == u64::MAX { Some(grants) } else { grants.checked_sub(1) };
        self.grants.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grant).ok()?;
        self.memory.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.memory.table_at(frame)
    }
}

// SAFETY: as above.
unsafe impl CopyMemory for Rationed {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        self.copied.fetch_add(len, Ordering::Relaxed);
        let breaks = self.breaks();
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.copy(from, to, if breaks { len.div_ceil(2) } else { len }) }
        assert!(!breaks, "as the test wants");
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        let breaks = self.breaks();
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.zero(at, if breaks { len / 2 } else { len }) }
        assert!(!breaks, "as the test wants");
    }
}

/// One thread as all CPUs, with a clock that the test sets.
#[derive(Default)]
pub struct Ticking(Chosen, AtomicU64, Mutex<Vec<u64>>);

impl Ticking {
    pub fn new(slots: usize) -> Self {
        Self(Chosen::new(slots), AtomicU64::new(0), Mutex::default())
    }

    pub fn advance(&self, ns: u64) {
        self.1.fetch_add(ns, Ordering::Relaxed);
    }

    /// The times that were asked for since the last call.
    pub fn wakes(&self) -> Vec<u64> {
        std::mem::take(&mut self.2.lock().unwrap())
    }
}

// SAFETY: slots are `Chosen`'s.
unsafe impl Platform for Ticking {
    fn cpus(&self) -> usize {
        self.0.cpus()
    }

    fn number(&self) -> PlatformNumber {
        self.0.number()
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        self.0.with_cpu(f)
    }

    fn now_ns(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.2.lock().unwrap().push(deadline_ns);
    }
}

pub type Mapper = TableMapper<Rationed, Queue>;
pub type Pool<P> = BouncePool<Mapper, P, Rationed>;
pub type Device<P> = BounceDevice<Mapper, P, Rationed>;

/// A pool, the machine around it, and a trusted device of group 0.
pub struct Bench<P: Platform = Arc<Chosen>> {
    pub memory: Arc<Memory>,
    pub frames: Rationed,
    pub tables: Rationed,
    pub iommu: Arc<Iommu>,
    pub platform: P,
    pub domain: Shared<Domain<Mapper, P>>,
    pub pool: Shared<Pool<P>>,
    pub device: Device<P>,
    /// Frames in use before the pool was made.
    pub frames_before: u64,
}

/// Classes of 4 KiB to 64 KiB, with 64 to 4 slots.
pub fn small() -> PoolConfig {
    PoolConfig { threshold: 64 << 10, class_bytes: 256 << 10, ..PoolConfig::default() }
}

/// The same for the ready-made platform, whose timer's thread would have the pool in hand whenever it comes.
pub fn without_timer(config: PoolConfig) -> PoolConfig {
    PoolConfig { idle_ns: u64::MAX, ..config }
}

impl Bench {
    pub fn new(config: PoolConfig) -> Self {
        Self::on(Arc::new(Chosen::new(3)), Policy::Strict, config)
    }
}

impl<P: Platform + Clone> Bench<P> {
    pub fn on(platform: P, policy: Policy, config: PoolConfig) -> Self {
        let memory = Memory::new(256 << 20);
        let (frames, tables) = (Rationed::new(&memory), Rationed::new(&memory));
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let format = VtdSecondStage::new(4, 3, 52).unwrap();
        let table = PageTable::for_cpus(tables.clone(), format, platform.cpus()).unwrap();
        let context = Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 };
        for device in 0..8 {
            iommu.attach(DeviceId(device), context);
        }
        let mapper = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let domain = Domain::new(platform.clone(), mapper, policy).unwrap();
        let frames_before = memory.frames_in_use();
        let pool = BouncePool::new(domain.clone(), frames.clone(), config).unwrap();
        let device = BounceDevice::new(pool.clone(), DeviceProfile::default()).unwrap();
        Self { memory, frames, tables, iommu, platform, domain, pool, device, frames_before }
    }

    /// Another device of the pool.
    pub fn device(&self, group: u32, untrusted: bool) -> Device<P> {
        let profile = DeviceProfile { untrusted, group, ..DeviceProfile::default() };
        BounceDevice::new(self.pool.clone(), profile).unwrap()
    }

    pub fn write(&self, phys: PhysAddr, bytes: &[u8]) {
        self.memory.write(phys, bytes).unwrap();
    }

    pub fn bytes(&self, phys: PhysAddr, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.memory.read(phys, &mut bytes).unwrap();
        bytes
    }

    /// What the device sees of `len` bytes at `iova`; `None` where it may not read all of them.
    pub fn seen(&self, iova: Iova, len: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        self.iommu.dma_read(DEVICE, iova, &mut bytes).ok()?;
        Some(bytes)
    }

    /// Where the device would get to.
    pub fn reaches(&self, iova: Iova, access: Permissions) -> Option<PhysAddr> {
        self.iommu.probe(DEVICE, iova, access)
    }

    /// After everything is unmapped: trims, and checks that nothing is lost, and nobody reaches anything.
    pub fn finish(self) {
        self.pool.trim(0).unwrap();
        let usage = self.pool.usage();
        assert_eq!((usage.buffer_bytes, usage.cached_bytes, usage.unconfirmed_bytes), (0, 0, 0));
        assert_eq!((usage.singles, usage.lost_slots), (0, 0));
        self.domain.reclaim().unwrap();
        self.check_end();
    }

    fn check_end(self) {
        let Self { memory, domain, pool, device, frames_before, .. } = self;
        assert_eq!(memory.frames_in_use(), frames_before, "memory is not back");
        drop((pool, device));
        assert_eq!(memory.frames_in_use(), frames_before);
        let usage = domain.stats();
        assert_eq!(usage.taken_iova_bytes - usage.cached_iova_bytes, 0, "addresses are not back");
        assert_eq!(domain.stats().lost_iova_bytes, 0);
        assert_eq!((memory.bad_frees(), memory.stray_tables()), (0, 0));
    }
}

/// Maps memory of the bench's, which only its devices and this thread use.
pub fn map<'a, P: Platform>(
    device: &Device<P>,
    list: &'a [PhysSegment],
    direction: Direction,
    attributes: Attributes,
) -> Result<PoolMapping<'a>, DmaMapError> {
    // SAFETY: the memory is simulated, every access to it atomic, and any address allowed.
    unsafe { device.map(list, direction, attributes) }
}

pub fn piece(phys: PhysAddr, offset: u64, len: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(phys.get() + offset), len }
}
