//! The driver of a real IOMMU, over a unit that carries out what is in its ring when it is rung.
//!
//! What the unit does, and each access of its registers, moves no line: no CPU does it. So what is counted
//! is what CPUs pass each other to fill the unit's ring. It takes no time, unless a profile says how much.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use portcullis_bench::runner::Failure;
use portcullis_bench::units::{Memory, ready};
use portcullis_hw::software::{Software, VtD};
use portcullis_hw::{Host, Registers, vtd};

use crate::platform;
use crate::simulator::Simulator;

/// The longest that the driver waits: simulated CPUs may all stand before one that is behind.
const PATIENCE_NS: u64 = 1_000_000_000;

/// The register of the queue's tail (VT-d specification, "Invalidation Queue Tail Register"): the doorbell.
const IQT: usize = 0x88;

/// The unit's registers, which no CPU is seen to use.
pub struct Hidden {
    simulator: &'static Simulator,
    unit: Software<VtD, Memory<true>>,
    /// Nanoseconds that the unit takes for what is in its ring when it begins.
    busy: u64,
    /// When the last round of its work begins, and ends. CPUs run one at a time: the order of clocks is that of calls.
    begin: AtomicU64,
    end: AtomicU64,
}

impl Hidden {
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
unsafe impl Registers for Hidden {
    fn read32(&self, offset: usize) -> u32 {
        self.simulator.hidden(|| self.unit.read32(offset))
    }

    fn write32(&self, offset: usize, value: u32) {
        self.simulator.hidden(|| self.unit.write32(offset, value));
    }

    fn read64(&self, offset: usize) -> u64 {
        self.simulator.hidden(|| self.unit.read64(offset))
    }

    fn write64(&self, offset: usize, value: u64) {
        if offset == IQT && self.busy > 0 {
            // Whose clock is behind rings first.
            self.simulator.wait(0);
            let now = self.simulator.now();
            let end = self.simulator.hidden(|| self.rung(now));
            self.simulator.wait(end - now);
        }
        self.simulator.hidden(|| self.unit.write64(offset, value));
    }
}

/// What the driver stands on: the unit, and how many CPUs share their waits for it.
pub struct Simulation(Hidden, usize);

impl Host for Simulation {
    type Registers = Hidden;
    type Frames = Memory<true>;

    fn registers(&self) -> &Hidden {
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

/// A VT-d unit that is on and works `busy` nanoseconds on each submission, and its driver. `cpus` CPUs share their waits for it; with 0 none do.
pub fn driver(
    simulator: &'static Simulator,
    busy: u64,
    cpus: usize,
) -> Result<vtd::Unit<Simulation>, Failure> {
    // SAFETY: the driver's host has the same frames.
    let unit = unsafe { Software::new(Memory) };
    let hidden = Hidden { simulator, unit, busy, begin: AtomicU64::new(0), end: AtomicU64::new(0) };
    let unit = vtd::Unit::start(Simulation(hidden, cpus)).and_then(ready);
    unit.map_err(|error| Failure::Refused(error.to_string()))
}
