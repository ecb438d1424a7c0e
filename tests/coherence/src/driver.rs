//! The driver of a real IOMMU, over a unit that carries out what is in its ring when it is rung.
//!
//! What the unit does, and each access of its registers, moves no line: no CPU does it. So what is counted
//! is what CPUs pass each other to fill the unit's ring. It takes no time, unless a profile says how much.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use portcullis_bench::runner::Failure;
use portcullis_bench::units::{Memory, ready};
use portcullis_hw::software::{Kind, SmmuV3, Software, VtD};
use portcullis_hw::{Host, Registers, UnitError, smmuv3, vtd};

use crate::platform;
use crate::simulator::Simulator;

/// The longest that the driver waits: simulated CPUs may all stand before one that is behind.
const PATIENCE_NS: u64 = 1_000_000_000;

/// A unit that is told of commands by a register.
pub trait Rung: Kind {
    /// Whether that is at `offset`.
    fn is_doorbell(offset: usize) -> bool;
}

impl Rung for VtD {
    /// "Invalidation Queue Tail Register".
    fn is_doorbell(offset: usize) -> bool {
        offset == 0x88
    }
}

impl Rung for SmmuV3 {
    /// SMMU_CMDQ_PROD, and SMMU_ECMDQ_PROD of each queue.
    fn is_doorbell(offset: usize) -> bool {
        offset == 0x98 || offset >= 0x2_0000 && offset & 0xff == 8
    }
}

/// The unit's registers, which no CPU is seen to use.
pub struct Hidden<K> {
    simulator: &'static Simulator,
    unit: Software<K, Memory<true>>,
    /// Nanoseconds that the unit takes for what is in its ring when it begins.
    busy: u64,
    /// When the last round of its work begins, and ends. CPUs run one at a time: the order of clocks is that of calls.
    begin: AtomicU64,
    end: AtomicU64,
}

impl<K: Rung> Hidden<K> {
    /// Where `offset` is a doorbell, waits until the unit has done what it was told.
    fn wait(&self, offset: usize) {
        if K::is_doorbell(offset) && self.busy > 0 {
            // Whose clock is behind rings first.
            self.simulator.wait(0);
            let now = self.simulator.now();
            let end = self.simulator.hidden(|| self.rung(now));
            self.simulator.wait(end - now);
        }
    }

    /// The unit is rung at `now`; when it is done. It begins at once, or after what it does; whoever rings before it begins is in that round.
    fn rung(&self, now: u64) -> u64 {
        let end = self.end.load(Relaxed);
        if now < self.begin.load(Relaxed) {
            return end;
        }
        let begin = now.max(end);
        self.begin.store(begin, Relaxed);
        self.end.store(begin + self.busy, Relaxed);
        begin + self.busy
    }
}

// SAFETY: the unit's.
unsafe impl<K: Rung> Registers for Hidden<K> {
    fn read32(&self, offset: usize) -> u32 {
        self.simulator.hidden(|| self.unit.read32(offset))
    }

    fn write32(&self, offset: usize, value: u32) {
        self.wait(offset);
        self.simulator.hidden(|| self.unit.write32(offset, value));
    }

    fn read64(&self, offset: usize) -> u64 {
        self.simulator.hidden(|| self.unit.read64(offset))
    }

    fn write64(&self, offset: usize, value: u64) {
        self.wait(offset);
        self.simulator.hidden(|| self.unit.write64(offset, value));
    }
}

/// What the driver stands on: the unit, and how many CPUs share their waits for it.
pub struct Simulation<K>(Hidden<K>, usize);

impl<K: Rung> Host for Simulation<K> {
    type Registers = Hidden<K>;
    type Frames = Memory<true>;

    fn registers(&self) -> &Hidden<K> {
        &self.0
    }

    fn frames(&self) -> &Memory<true> {
        self.0.unit.frames()
    }

    fn now_ns(&self) -> u64 {
        self.0.simulator.now()
    }

    fn cpus(&self) -> usize {
        self.1
    }

    fn cpu(&self) -> Option<usize> {
        platform::cpu()
    }

    fn patience_ns(&self) -> u64 {
        PATIENCE_NS
    }
}

/// What a unit of software needs, that works `busy` nanoseconds on what was rung when it begins. `cpus` CPUs share their waits for it; with 0 none do.
fn host<K: Rung>(
    simulator: &'static Simulator,
    busy: u64,
    cpus: usize,
    change: impl FnOnce(Software<K, Memory<true>>) -> Software<K, Memory<true>>,
) -> Simulation<K> {
    // SAFETY: the driver's host has the same frames.
    let unit = change(unsafe { Software::new(Memory) });
    Simulation(Hidden { simulator, unit, busy, begin: AtomicU64::new(0), end: AtomicU64::new(0) }, cpus)
}

fn refused(error: UnitError) -> Failure {
    Failure::Refused(error.to_string())
}

/// A VT-d unit that is on, and its driver.
pub fn vtd(
    simulator: &'static Simulator,
    busy: u64,
    cpus: usize,
) -> Result<vtd::Unit<Simulation<VtD>>, Failure> {
    vtd::Unit::start(host(simulator, busy, cpus, |unit| unit)).and_then(ready).map_err(refused)
}

/// The same of an SMMUv3, which has a queue for each CPU, or one for all.
pub fn smmuv3(
    simulator: &'static Simulator,
    busy: u64,
    cpus: usize,
    has_own: bool,
) -> Result<smmuv3::Unit<Simulation<SmmuV3>, 12>, Failure> {
    let change = |unit: Software<SmmuV3, _>| if has_own { unit.with_own_queues(0, 8) } else { unit };
    smmuv3::Unit::start(host(simulator, busy, cpus, change)).and_then(ready).map_err(refused)
}
