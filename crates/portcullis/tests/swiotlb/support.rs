//! A platform that is told which CPU it is and what time it is, and shorthands.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use portcullis::addr::{Direction, PhysAddr};
use portcullis::bounce::swiotlb::{BounceError, Bounced, Constraints, MappingError, Swiotlb, SwiotlbConfig};
use portcullis::domain::PhysSegment;
use portcullis::platform::{CopyMemory, LocalSlot, Platform, PlatformEvents};
use portcullis_model::Memory;

/// No slot.
pub const NONE: usize = usize::MAX;

/// A machine of four CPUs, used by one thread.
#[derive(Clone, Default)]
pub struct Manual(Arc<State>);

#[derive(Default)]
struct State {
    cpu: AtomicUsize,
    now_ns: AtomicU64,
    wakes: Mutex<Vec<u64>>,
}

impl Manual {
    /// From now on the caller is this CPU.
    pub fn run_on(&self, cpu: usize) {
        self.0.cpu.store(cpu, Ordering::Relaxed);
    }

    pub fn set_time(&self, now_ns: u64) {
        self.0.now_ns.store(now_ns, Ordering::Relaxed);
    }

    /// The times that were asked for since the last call.
    pub fn wakes(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.wakes.lock().unwrap())
    }
}

impl Platform for Manual {
    fn slots(&self) -> usize {
        4
    }

    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        let cpu = self.0.cpu.load(Ordering::Relaxed);
        f((cpu != NONE).then(|| LocalSlot::new(cpu)).as_ref())
    }

    fn now_ns(&self) -> u64 {
        self.0.now_ns.load(Ordering::Relaxed)
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) {}

    fn wake_at(&self, deadline_ns: u64) {
        self.0.wakes.lock().unwrap().push(deadline_ns);
    }
}

pub type Pool = Arc<Swiotlb<Manual, Arc<Memory>>>;

pub const AREA: u64 = 512 << 10;

/// Areas of 512 KiB, one to four of them.
pub fn config() -> SwiotlbConfig {
    SwiotlbConfig { area_bytes: AREA, min_bytes: AREA, max_bytes: 4 * AREA, ..SwiotlbConfig::default() }
}

/// Memory of 16 MiB and a pool in it.
pub fn machine(config: &SwiotlbConfig) -> (Manual, Arc<Memory>, Pool) {
    let (platform, memory) = (Manual::default(), Memory::new(16 << 20));
    let pool = Swiotlb::new(platform.clone(), Arc::clone(&memory), config).unwrap();
    (platform, memory, pool)
}

pub fn map<P: Platform, C: CopyMemory>(
    pool: &Swiotlb<P, C>,
    phys: PhysAddr,
    len: u64,
    direction: Direction,
    constraints: &Constraints,
) -> Result<Bounced, BounceError> {
    // SAFETY: what the model's memory does not have is counted, not touched; all access to it is by atomics.
    unsafe { pool.map(PhysSegment { phys, len }, direction, constraints) }
}

pub fn unmap<P: Platform, C: CopyMemory>(
    pool: &Swiotlb<P, C>,
    phys: PhysAddr,
    len: u64,
) -> Result<(), MappingError> {
    // SAFETY: each test ends a mapping by one thread.
    unsafe { pool.unmap(phys, len) }
}

pub fn bytes(memory: &Memory, at: PhysAddr, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    memory.read(at, &mut bytes).unwrap();
    bytes
}
