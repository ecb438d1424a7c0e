//! A scenario, once for every call that may go wrong.

use std::any::Any;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use portcullis::addr::{DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::PoolConfig;
use portcullis::dma::{DmaDevice, DmaDomain, DomainBuilder};
use portcullis::domain::{Domain, MapListError, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::{Costs, SharedQueue};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory};

use crate::doubles::{Ca, Fr, Ma, Pl, Qu};
use crate::faults::{Call, Mode, Planned};
use crate::hostile::{Hostile, PAGE};

pub type M = Ma<TableMapper<Fr, SharedQueue<Qu>>>;

pub const DEVICE: DeviceId = DeviceId(7);
/// It caches translations itself.
pub const CACHING: DeviceId = DeviceId(8);
pub const WINDOW_NS: u64 = 10_000_000;
pub const LAZY: Policy = Policy::Lazy { window_ns: WINDOW_NS };

/// CPUs of the platform.
const SLOTS: usize = 2;

/// What is done again and again.
pub type Work = Box<dyn FnMut() -> Result<(), Box<dyn Error>>>;

/// A machine with a domain.
pub struct World {
    pub hostile: Arc<Hostile>,
    pub memory: Arc<Memory>,
    pub unit: Arc<Iommu>,
    pub context: Context,
    pub platform: Pl,
    pub frames: Fr,
    pub domain: Shared<Domain<M, Pl>>,
    /// The same, with caches to maintain, until a scenario has taken what it needs of it.
    pub dma: Option<DmaDomain<(M, Pl, Fr)>>,
    pub device: DmaDevice<M, Pl>,
}

impl World {
    /// `mask` is the highest address of the device.
    pub fn new(policy: Policy, mask: u64) -> Self {
        let world = Self::without_tlbs(policy, mask);
        world.unit.attach_with_tlb(CACHING, world.context, 256);
        world.domain.mapper().inner.add_device_tlb(CACHING).unwrap();
        world.hostile.is_behind(&world.unit, CACHING);
        world
    }

    /// Without a device that caches translations: requests that are for one are in no batch of those who share their waits.
    fn without_tlbs(policy: Policy, mask: u64) -> Self {
        let hostile = Arc::new(Hostile::default());
        let memory = Memory::new(32 << 20);
        let config =
            IommuConfig { iotlb_entries: 1 << 10, iotlb_ways: 16, ..IommuConfig::new(Arc::clone(&memory)) };
        let unit = Iommu::new(config);
        let frames = Fr { memory: Arc::clone(&memory), hostile: Arc::clone(&hostile) };
        let platform = Pl::new(Arc::clone(&hostile), SLOTS);
        let format = VtdSecondStage::new(4, 3, 48).unwrap();
        let table = PageTable::for_cpus(frames.clone(), format, 2).unwrap();
        let context = Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 };
        unit.attach(DEVICE, context);
        let queue = Qu { queue: unit.queue(), hostile: Arc::clone(&hostile), costs: Costs::BARE_METAL };
        let inner = TableMapper::new(table, SharedQueue::new(queue), DomainId(1), Vec::new());
        let mapper = Ma { inner, hostile: Arc::clone(&hostile) };
        let builder = DomainBuilder::new(mapper).bounce(frames.clone(), PoolConfig::default());
        let builder = builder.cache_maintenance(Arc::new(Ca(Arc::clone(&hostile)))).policy(policy);
        let dma = builder.build(platform.clone()).unwrap();
        let domain = dma.space().clone();
        let device = DmaDevice::new(domain.clone(), mask).unwrap();
        hostile.is_behind(&unit, DEVICE);
        hostile.set_lazy(matches!(policy, Policy::Lazy { .. }));
        Self { hostile, memory, unit, context, platform, frames, domain, dma: Some(dma), device }
    }

    /// After some time no window is open, and what waits for a timer is done.
    fn later(&self) {
        self.platform.pass(1_000_000_000);
        self.hostile.windows_end();
    }

    /// Nothing waits to be handed out again, in any CPU's keep.
    fn take_back_all(&self) {
        let page = [PhysSegment { phys: PhysAddr::new(0), len: PAGE }];
        // SAFETY: nothing is mapped, as there is no such address: but all is looked through for it.
        let none = unsafe { self.domain.map(&page, Permissions::READ, Iova::new(PAGE - 1)) };
        assert!(matches!(none, Err(MapListError::Iova(_))), "{none:?}");
        // Where maps wait for no other caller, the timer does that.
        self.later();
        (0..SLOTS).for_each(|slot| self.platform.release(slot));
    }

    /// What is gone for good: frames, buffers, and addresses that are not free.
    fn gone(&self) -> (usize, usize, u64) {
        let (frames, buffers) = self.hostile.outstanding();
        (frames, buffers, self.domain.stats().lost_iova_bytes)
    }
}

/// How often what went wrong, and how.
pub type Tally = BTreeMap<(Call, Mode), usize>;

/// A scenario.
pub struct Scenario {
    pub name: &'static str,
    pub policy: Policy,
    pub mask: u64,
    pub make: fn(&World) -> Work,
    /// One call in so many goes wrong, where all of them would take long.
    pub stride: usize,
    /// Something that goes wrong is followed by a while in which nothing is done.
    pub waits: bool,
    /// Those who wait for the hardware share their waits.
    pub shares: bool,
    /// In the end all frames are free again, whatever went wrong.
    pub frees_all: bool,
    /// It is for kernels, which end with a panic: none is tried.
    pub aborts: bool,
}

impl Scenario {
    pub const fn new(name: &'static str, make: fn(&World) -> Work) -> Self {
        let (policy, mask) = (Policy::Strict, u64::MAX);
        Self {
            name,
            policy,
            mask,
            make,
            stride: 1,
            waits: false,
            shares: false,
            frees_all: false,
            aborts: false,
        }
    }

    pub const fn lazily(self) -> Self {
        Self { policy: LAZY, ..self }
    }

    /// The device reaches so few pages that what is lost is missed.
    pub const fn one_in(self, stride: usize) -> Self {
        Self { stride, ..self }
    }

    pub const fn waits(self) -> Self {
        Self { waits: true, ..self }
    }

    pub const fn shares(self) -> Self {
        Self { shares: true, ..self }
    }

    pub const fn frees_all(self) -> Self {
        Self { frees_all: true, ..self }
    }

    pub const fn aborts(self) -> Self {
        Self { aborts: true, ..self }
    }

    pub const fn within(self, pages: u64) -> Self {
        Self { mask: pages * PAGE - 1, ..self }
    }

    /// Runs it without a fault, and then with each. What went wrong when, and what was found.
    fn run(&self) -> (Tally, Vec<String>) {
        let mut tally = Tally::new();
        let mut found = Vec::new();
        let mut calls = Vec::new();
        found.extend(self.run_with(None, &mut calls).err());
        let mut tables = 0;
        for (number, call) in calls.into_iter().enumerate() {
            // A walk over all tables is the same many times over.
            tables += u64::from(call == Call::Table);
            if number % self.stride != 0 || call == Call::Table && tables > 200 && tables % 37 != 0 {
                continue;
            }
            let is_panic = |mode: &Mode| matches!(mode, Mode::Panic | Mode::PanicAfter);
            for mode in call.modes().iter().filter(|mode| !(self.aborts && is_panic(mode))) {
                let result = self.run_with(Some((number, *mode)), &mut Vec::new());
                found.extend(result.err().map(|what| format!("call {number}, {call:?}, {mode:?}: {what}")));
                *tally.entry((call, *mode)).or_default() += 1;
            }
        }
        (tally, found)
    }

    /// What was found. `calls` are those of the run.
    fn run_with(&self, fault: Option<(usize, Mode)>, calls: &mut Vec<Call>) -> Result<(), String> {
        let make = if self.shares { World::without_tlbs } else { World::new };
        let mut world = make(self.policy, self.mask);
        let mut work = (self.make)(&world);
        world.dma = None;
        let before = world.gone();
        world.hostile.faults.arm(fault);
        let result = attempt(&mut work);
        let (made, happened) = world.hostile.faults.disarm();
        calls.clone_from(&made);
        ensure(happened == fault.is_some(), || "it is never met".into())?;
        let is_well = match result {
            Ok(()) => true,
            Err(How::Failed(error)) if fault.is_none() => {
                return Err(format!("does not work at all: {error}"));
            }
            Err(How::Failed(_)) => false,
            Err(How::Unwound(payload)) if payload.is::<Planned>() => false,
            Err(unwound) => return Err(format!("at once: {unwound}")),
        };
        let check = |when: &str| {
            world.hostile.look();
            let violations = world.hostile.violations();
            ensure(violations.is_empty(), || format!("{when}: {violations:?}"))
        };
        check("at once")?;
        // A platform that has panicked may have forgotten its timer.
        if self.waits && !fault.is_some_and(|(at, _)| made[at].is_of_platform()) {
            world.later();
            check("a while later")?;
        }
        // Everything works again.
        let mut again = || {
            attempt(&mut work).map_err(|how| format!("does not go on: {how}"))?;
            check("going on")?;
            world.later();
            check("later")
        };
        again()?;
        let settled = world.gone();
        again()?;
        again()?;
        // Frames may come and go with what is kept; buffers and addresses must not.
        let after = world.gone();
        ensure((settled.1, settled.2) == (after.1, after.2), || "loses more and more".into())?;
        // A drop has nobody to tell that the hardware does not answer.
        let is_told = !made.iter().enumerate().any(|(number, call)| {
            fault.is_some_and(|(at, _)| at == number) && matches!(call, Call::Sync | Call::Submit)
        });
        if is_well && is_told {
            let lost = (after.1 - before.1, after.2 - before.2);
            ensure(lost == (0, 0), || format!("{lost:?} buffers and bytes are lost without a word"))?;
        }
        let end = |what, f: &mut dyn FnMut()| {
            catch_unwind(AssertUnwindSafe(f)).map_err(|payload| format!("{what}: {}", How::Unwound(payload)))
        };
        end("the end of it", &mut || drop(std::mem::replace(&mut work, Box::new(|| Ok(())))))?;
        world.domain.flush().map_err(|error| error.to_string())?;
        world.later();
        check("at the end")?;
        // With nothing mapped and nothing kept by a CPU, what is not free was counted as lost.
        world.take_back_all();
        let usage = world.domain.stats();
        let lost = usage.lost_iova_bytes;
        let in_use = usage.taken_iova_bytes - usage.cached_iova_bytes;
        // An address space rounds up to powers of two, and all that is asked for here has such a size.
        ensure(in_use <= lost, || format!("{in_use} bytes of addresses are gone, and {lost} counted"))?;
        world.unit.detach(DEVICE);
        world.unit.detach(CACHING);
        let World { hostile, domain, device, .. } = world;
        drop((device, domain));
        let (frames, buffers) = hostile.outstanding();
        if is_well && is_told {
            let left = (frames, buffers, lost);
            ensure(left == (0, 0, 0), || {
                format!("{left:?} frames, buffers and bytes are lost without a word")
            })?;
        }
        // Not those that the double itself has kept.
        let is_kept = |(at, mode)| {
            matches!((made[at], mode), (Call::Free, Mode::Panic) | (Call::Alloc, Mode::PanicAfter))
        };
        if self.frees_all && !fault.is_some_and(is_kept) {
            ensure(frames == 0, || format!("{frames} frames are lost"))?;
        }
        let violations = hostile.violations();
        ensure(violations.is_empty(), || format!("at last: {violations:?}"))?;
        hostile.faults.steps.store(0, Ordering::Relaxed);
        Ok(())
    }
}

/// How a piece of work did not succeed.
enum How {
    Failed(String),
    Unwound(Box<dyn Any + Send>),
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => f.write_str(error),
            Self::Unwound(payload) => {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let text = text.or(payload.downcast_ref::<&str>().copied());
                write!(f, "a panic: {}", text.unwrap_or("of no words"))
            }
        }
    }
}

fn attempt(work: &mut Work) -> Result<(), How> {
    match catch_unwind(AssertUnwindSafe(|| work().map_err(|error| error.to_string()))) {
        Ok(result) => result.map_err(How::Failed),
        Err(payload) => Err(How::Unwound(payload)),
    }
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// Runs all of them.
pub fn all(scenarios: &[Scenario]) {
    let mut found = Vec::new();
    for scenario in scenarios {
        let (tally, wrong) = scenario.run();
        let runs: usize = tally.values().sum();
        println!("{}: {runs} runs, {} wrong", scenario.name, wrong.len());
        found.extend(wrong.into_iter().map(|what| format!("{}: {what}", scenario.name)));
    }
    let few: Vec<_> = found.iter().take(40).map(|what| what.chars().take(330).collect::<String>()).collect();
    assert!(found.is_empty(), "{} found:\n{}", found.len(), few.join("\n"));
}
