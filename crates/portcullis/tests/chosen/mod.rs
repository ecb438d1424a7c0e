//! A platform on which one thread plays all CPUs, and spaces for it.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::iova::{IovaError, IovaSpace, SpaceConfig};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};

pub const PAGE: u64 = 4096;
pub const ANYWHERE: Iova = Iova::new(u64::MAX);

/// One thread that is whichever CPU the test says.
#[derive(Default)]
pub struct Chosen {
    number: PlatformNumber,
    cpus: usize,
    cpu: AtomicUsize,
    fences: AtomicUsize,
    lends: AtomicUsize,
    now_ns: AtomicU64,
}

impl Chosen {
    pub fn new(cpus: usize) -> Self {
        Self { cpus, ..Self::default() }
    }

    /// One that does not say who it is.
    pub fn silent(cpus: usize) -> Self {
        Self { number: PlatformNumber::NONE, ..Self::new(cpus) }
    }

    /// The CPU past the last is lent to no caller.
    pub fn be(&self, cpu: usize) -> &Self {
        self.cpu.store(cpu, Ordering::Relaxed);
        self
    }

    /// It is so late now.
    pub fn at(&self, now_ns: u64) {
        self.now_ns.store(now_ns, Ordering::Relaxed);
    }

    /// How often a CPU, or none, was lent.
    pub fn lends(&self) -> usize {
        self.lends.load(Ordering::Relaxed)
    }

    /// How often somebody wanted what other CPUs keep.
    pub fn fences(&self) -> usize {
        self.fences.load(Ordering::Relaxed)
    }
}

// SAFETY: one thread plays all CPUs, so no two callers have a CPU at once; it sees its own stores without a fence.
unsafe impl Platform for Chosen {
    fn cpus(&self) -> usize {
        self.cpus
    }

    fn number(&self) -> PlatformNumber {
        self.number
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        self.lends.fetch_add(1, Ordering::Relaxed);
        let cpu = self.cpu.load(Ordering::Relaxed);
        // SAFETY: one thread plays all CPUs.
        f((cpu < self.cpus).then(|| unsafe { LocalCpu::new(cpu) }).as_ref())
    }

    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    fn fence_all(&self) {
        // One thread needs none.
        self.fences.fetch_add(1, Ordering::Relaxed);
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}

pub fn config(first: u64, pages: u64, cpus: usize) -> SpaceConfig {
    let aperture = IovaRange::new(Iova::new(first * PAGE), pages * PAGE).unwrap();
    SpaceConfig::new(aperture, PageSize::SIZE_4K, cpus)
}

pub fn alloc(space: &IovaSpace, platform: &Chosen, pages: u64, limit: Iova) -> Result<IovaRange, IovaError> {
    space.alloc(platform, pages * PAGE, limit)
}

pub fn free(space: &IovaSpace, platform: &Chosen, range: IovaRange) -> Result<(), IovaError> {
    space.free(platform, range)
}
