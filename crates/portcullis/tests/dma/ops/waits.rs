//! A map in an interrupt handler may have interrupted any other caller: it waits for none. What would take that is done by the
//! platform's timer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use portcullis::addr::{DeviceId, Direction, DomainId, Iova};
use portcullis::bounce::pool::PoolConfig;
use portcullis::dma::{DmaMapError, DmaMask, DmaOps, OpsConfig};
use portcullis::domain::{Domain, MapListError};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{MapError, PageTable, VtdSecondStage};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};
use portcullis_model::{Iommu, IommuConfig, Memory, Queue};

use super::support::{Calls, part};
use crate::queue::world::PAGE;
use crate::rig::Clocked;

/// Counts the barriers of all CPUs: every wait for what another caller does begins with one. And readings of the clock without a CPU.
struct Fenced {
    cpus: Arc<Clocked>,
    fences: AtomicUsize,
    is_lent: AtomicBool,
    unlent: AtomicUsize,
}

// SAFETY: CPUs are `Clocked`'s.
unsafe impl Platform for Fenced {
    fn cpus(&self) -> usize {
        self.cpus.cpus()
    }

    fn number(&self) -> PlatformNumber {
        self.cpus.number()
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        self.cpus.with_cpu(|cpu| {
            self.is_lent.store(true, Ordering::Relaxed);
            let result = f(cpu);
            self.is_lent.store(false, Ordering::Relaxed);
            result
        })
    }

    fn now_ns(&self) -> u64 {
        if !self.is_lent.load(Ordering::Relaxed) {
            self.unlent.fetch_add(1, Ordering::Relaxed);
        }
        self.cpus.now_ns()
    }

    fn fence_all(&self) {
        self.fences.fetch_add(1, Ordering::Relaxed);
        self.cpus.fence_all();
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.cpus.register(events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.cpus.wake_at(deadline_ns);
    }
}

type Tables = TableMapper<Arc<Memory>, Queue>;

struct Bench {
    platform: Arc<Fenced>,
    memory: Arc<Memory>,
    ops: DmaOps<(Tables, Arc<Fenced>, Arc<Memory>)>,
}

/// Sixteen slots of a page, and few addresses beside those of the slots.
const POOL: PoolConfig = PoolConfig {
    threshold: 4 * PAGE,
    class_bytes: 16 * PAGE,
    limit: Iova::new(u64::MAX),
    split: true,
    wipe: false,
    idle_ns: u64::MAX,
    keep_bytes: 0,
};

impl Bench {
    fn new(config: OpsConfig, memory: u64) -> Self {
        let platform = Arc::new(Fenced {
            cpus: Clocked::new(2),
            fences: AtomicUsize::new(0),
            is_lent: AtomicBool::new(false),
            unlent: AtomicUsize::new(0),
        });
        let memory = Memory::new(memory);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let format = VtdSecondStage::new(4, 3, 48).unwrap();
        let table = PageTable::for_cpus(Arc::clone(&memory), format, 2).unwrap();
        let builder = Domain::builder(table, iommu.queue(), DomainId(1)).last_iova(Iova::new(256 * PAGE - 1));
        let domain = builder.bounce(Arc::clone(&memory), POOL).build(Arc::clone(&platform)).unwrap();
        let ops = domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap().ops(config).unwrap();
        Self { platform, memory, ops }
    }

    fn fences(&self) -> usize {
        self.platform.fences.load(Ordering::Relaxed)
    }

    /// The timers come that were asked for.
    fn timers(&self) {
        self.platform.cpus.go_to(self.platform.now_ns());
    }

    /// The same by a call of the kernel's, and not by the timers.
    fn tidy(&self, by_hand: bool) {
        if by_hand { self.ops.maintain().unwrap() } else { self.timers() }
    }
}

fn is_exhausted(error: &DmaMapError) -> bool {
    matches!(error, DmaMapError::List(MapListError::Iova(_)))
}

#[test]
fn a_map_that_finds_no_addresses_leaves_it_to_the_timer_to_take_back_what_others_keep() {
    // What waits for a flush, and what the other CPU has in its lists.
    let lazy = OpsConfig::Lazy { window_ns: 3_600_000_000_000 };
    for (config, by_hand) in
        [(lazy, false), (lazy, true), (OpsConfig::Strict, false), (OpsConfig::Strict, true)]
    {
        let bench = Bench::new(config, 16 << 20);
        let memory = bench.memory.buffer(PAGE).unwrap();
        let map = || bench.ops.maps(part(&memory, 0, PAGE), Direction::ToDevice);
        bench.platform.cpus.be(0);
        let mut open = Vec::new();
        let fences = bench.fences();
        let refused = (0..1_000).find_map(|_| {
            match map() {
                Ok(iova) if config == OpsConfig::Strict => open.push(iova),
                Ok(iova) => bench.ops.ends(iova, PAGE).unwrap(),
                Err(error) => return Some(error),
            }
            None
        });
        let error = refused.expect("there are 256 addresses of pages");
        assert!(is_exhausted(&error), "{error}");
        // All of the CPU's are free again: the other finds only what is nobody's.
        open.drain(..).for_each(|iova| bench.ops.ends(iova, PAGE).unwrap());
        bench.platform.cpus.be(1);
        let error = loop {
            match map() {
                Ok(iova) => open.push(iova),
                Err(error) => break error,
            }
        };
        assert!(is_exhausted(&error), "{error}");
        assert_eq!(bench.fences(), fences, "{config:?}: no call has waited for another");
        let before = open.len();
        bench.tidy(by_hand);
        assert!(bench.fences() > fences, "the timer has");
        open.extend(std::iter::from_fn(|| map().ok()));
        assert!(open.len() > before, "{config:?}: and there are addresses again");
        open.drain(..).for_each(|iova| bench.ops.ends(iova, PAGE).unwrap());
        bench.ops.domain().flush().unwrap();
        assert_eq!(bench.ops.domain().stats().lost_iova_bytes, 0);
        // Called by hand, where nothing is left to do, it does nothing.
        bench.timers();
        let fences = bench.fences();
        bench.ops.maintain().unwrap();
        assert_eq!(bench.fences(), fences);
    }
}

#[test]
fn a_map_that_finds_no_slot_takes_a_buffer_of_its_own_and_the_timer_brings_slots() {
    for by_hand in [false, true] {
        let bench = Bench::new(OpsConfig::Bounce { threshold: 4 * PAGE }, 16 << 20);
        let memory = bench.memory.buffer(PAGE).unwrap();
        let map = |direction| bench.ops.maps(part(&memory, 0, 64), direction).unwrap();
        let singles = || bench.ops.usage().pool.unwrap().singles;
        bench.platform.cpus.be(0);
        let all: Vec<_> = (0..16).map(|_| map(Direction::FromDevice)).collect();
        all.into_iter().for_each(|iova| bench.ops.ends(iova, 64).unwrap());
        assert_eq!(singles(), 0);
        // All slots have buffers, which CPU 0 keeps, mapped for the other direction.
        bench.platform.cpus.be(1);
        let fences = bench.fences();
        let alone = map(Direction::ToDevice);
        assert_eq!((singles(), bench.fences()), (1, fences), "a buffer of its own, and no wait for CPU 0");
        bench.tidy(by_hand);
        assert!(bench.fences() > fences, "the timer has waited");
        let slot = map(Direction::ToDevice);
        assert_eq!(singles(), 1, "this one has a slot");
        [alone, slot].into_iter().for_each(|iova| bench.ops.ends(iova, 64).unwrap());
        assert_eq!(singles(), 0);
    }
}

#[test]
fn a_map_that_finds_no_memory_leaves_it_to_the_timer_to_give_up_buffers() {
    for by_hand in [false, true] {
        let bench = Bench::new(OpsConfig::Bounce { threshold: 4 * PAGE }, 1 << 20);
        let memory = bench.memory.buffer(4 * PAGE).unwrap();
        let map = |len| bench.ops.maps(part(&memory, 0, len), Direction::ToDevice);
        bench.platform.cpus.be(0);
        let large: Vec<_> = (0..4).map(|_| map(4 * PAGE).unwrap()).collect();
        // The tables of the small ones are there.
        let small = map(64).unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| bench.memory.buffer(PAGE)).collect();
        large.into_iter().for_each(|iova| bench.ops.ends(iova, 4 * PAGE).unwrap());
        let fences = bench.fences();
        assert!(matches!(map(64), Err(DmaMapError::NoBuffer { .. })), "buffers of another size wait");
        assert_eq!(bench.fences(), fences);
        bench.tidy(by_hand);
        let again = map(64).unwrap();
        [small, again].into_iter().for_each(|iova| bench.ops.ends(iova, 64).unwrap());
        drop(taken);
    }
}

/// It reads the clock under a lock then. With interrupts on, a handler on the same CPU would wait for that for ever.
#[test]
fn a_map_that_fails_counts_with_a_cpu_lent() {
    let bench = Bench::new(OpsConfig::Strict, 1 << 20);
    let memory = bench.memory.buffer(2 * PAGE).unwrap();
    let map = |len| bench.ops.maps(part(&memory, 8, len), Direction::ToDevice);
    bench.platform.cpus.be(0);
    let taken: Vec<_> = std::iter::from_fn(|| bench.memory.buffer(PAGE)).collect();
    for len in [64, PAGE] {
        assert!(
            matches!(map(len), Err(DmaMapError::List(MapListError::Map(MapError::OutOfMemory)))),
            "no memory for tables"
        );
    }
    assert_eq!(bench.platform.unlent.load(Ordering::Relaxed), 0);
    let usage = bench.ops.usage();
    assert_eq!((usage.maps, usage.open_bytes, usage.exposed_bytes, usage.errors), (0, 0, 0, 2));
    drop(taken);
}
