//! A cache with the software IOMMU, whose hardware the test counts and makes fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{Direction, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::domain::Policy;
use portcullis::invalidation::InvalidationError;
use portcullis::platform::Platform;
use portcullis_linux::registration::{
    AcquireError, Keep, Registration, RegistrationCache, RegistrationLimits,
};
use portcullis_model::Queue;

use crate::open::OpenCache;
use crate::played::Played;
use crate::rig::{Clocked, DEVICE, Hooked, Mapper, PAGE, Rig};

pub const TIMEOUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };
pub const HELD: Keep = Keep::WhileHeld;
pub const KEPT: Keep = Keep::UntilForgotten;
pub const BOTH: Direction = Direction::Bidirectional;

type Q = Hooked<Queue>;
pub type Cache = RegistrationCache<Mapper, Played>;

pub struct Bench<P: Platform = Arc<Clocked>> {
    pub rig: Rig<P, Q>,
    pub cache: Arc<Cache>,
    submissions: Arc<AtomicU64>,
}

impl Bench {
    pub fn new(entries: usize, pages: u64) -> Self {
        Self::on(Clocked::new(2), entries, pages)
    }
}

impl<P: Platform + Clone> Bench<P> {
    /// The domain is lazy: the cache must be strict by itself.
    pub fn on(platform: P, entries: usize, pages: u64) -> Self {
        let rig = Rig::new(platform, Policy::Lazy { window_ns: 1 << 62 }, Hooked::new);
        let limits = RegistrationLimits { entries, bytes: pages * PAGE };
        let cache = Arc::new(RegistrationCache::new(rig.device.clone(), limits).unwrap());
        let bench = Self { rig, cache, submissions: Arc::default() };
        bench.unhook();
        bench
    }

    /// From now on only counts submissions.
    pub fn unhook(&self) {
        let submissions = Arc::clone(&self.submissions);
        self.rig.queue.set(move || _ = submissions.fetch_add(1, Ordering::Relaxed));
    }

    /// Submissions since the last call.
    pub fn submissions(&self) -> u64 {
        self.submissions.swap(0, Ordering::Relaxed)
    }

    /// From now on every request fails, or none does.
    pub fn fail(&self, fails: bool) {
        self.rig.iommu.queue().fail_next(if fails { u64::MAX } else { 0 }, TIMEOUT);
    }

    pub fn acquire(&self, memory: PhysSegment, keep: Keep) -> Result<Registration, AcquireError> {
        self.cache.open(memory, BOTH, keep)
    }

    /// Acquires and releases; returns the IOVA.
    pub fn touch(&self, memory: PhysSegment, keep: Keep) -> Iova {
        let registration = self.acquire(memory, keep).unwrap();
        let iova = registration.iova();
        // The device caches the translation, so that a missing invalidation shows.
        assert_eq!(self.reached(iova), Some(memory.phys));
        assert!(self.rig.reaches(iova));
        self.cache.release(registration).unwrap();
        iova
    }

    /// The memory that a device's write reaches.
    pub fn reached(&self, iova: Iova) -> Option<PhysAddr> {
        self.rig.iommu.probe(DEVICE, iova, Permissions::WRITE)
    }

    /// Drops the cache and checks that nothing is left.
    pub fn finish(self) {
        let domain = self.rig.domain.clone();
        drop(self.cache);
        let usage = domain.stats();
        assert_eq!(usage.taken_iova_bytes - usage.cached_iova_bytes, 0, "addresses are not back");
        assert_eq!(domain.stats().lost_iova_bytes, 0);
        assert_eq!(domain.stats().maps, domain.stats().unmaps);
    }
}

/// `len` bytes from `offset` on of the test's memory.
pub fn bytes(offset: u64, len: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + offset), len }
}

pub fn pages(number: u64, count: u64) -> PhysSegment {
    bytes(number * PAGE, count * PAGE)
}
