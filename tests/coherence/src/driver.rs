//! The driver of a real IOMMU, over a unit that carries out what is in its ring when it is rung.
//!
//! What the unit does, and each access of its registers, costs nothing and moves no line: no CPU
//! does it. So what is counted is what CPUs pass each other to fill the unit's ring.

use portcullis_bench::runner::Failure;
use portcullis_bench::units::{Memory, ready};
use portcullis_hw::software::{Software, VtD};
use portcullis_hw::{Host, Registers, vtd};

use crate::simulator::Simulator;

/// The longest that the driver waits: simulated CPUs may all stand before one that is behind.
const PATIENCE_NS: u64 = 1_000_000_000;

/// The unit's registers, which no CPU is seen to use.
pub struct Hidden {
    simulator: &'static Simulator,
    unit: Software<VtD, Memory<true>>,
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
        self.simulator.hidden(|| self.unit.write64(offset, value));
    }
}

/// What the driver stands on.
pub struct Simulation(Hidden);

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

    fn patience_ns(&self) -> u64 {
        PATIENCE_NS
    }
}

/// A VT-d unit that is on, and its driver.
pub fn driver(simulator: &'static Simulator) -> Result<vtd::Unit<Simulation>, Failure> {
    // SAFETY: the driver's host has the same frames.
    let unit = unsafe { Software::new(Memory) };
    let unit = vtd::Unit::start(Simulation(Hidden { simulator, unit })).and_then(ready);
    unit.map_err(|error| Failure::Refused(error.to_string()))
}
