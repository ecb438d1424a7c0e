//! Rings that copy or map, whichever is cheaper.

use std::error::Error;
use std::sync::Arc;

use portcullis::SetupError;
use portcullis::addr::{Direction, DmaSegment, PhysSegment};
use portcullis::bounce::pool::Attributes;
use portcullis::dma::{AdaptiveRing, DmaDevice, Ended, RawMapping, StrictRingConfig};

use crate::doubles::{Fr, Pl};
use crate::faults::Call;
use crate::hostile::{Hostile, PAGE};
use crate::pool::{Device, FOUR, device, original_of};
use crate::run::{M, Scenario, Work, World, all};

const CONFIG: StrictRingConfig = StrictRingConfig::new(16, PAGE, 4);

type Clock = Box<dyn Fn() -> u64>;
type Queue = AdaptiveRing<M, Pl, Fr, Clock>;

/// A clock that goes on with each look.
fn clock(hostile: &Arc<Hostile>) -> Clock {
    let (hostile, now) = (Arc::clone(hostile), std::cell::Cell::new(0));
    Box::new(move || {
        let (_, late) = hostile.faults.enter(Call::Clock);
        late.come();
        now.set(now.get() + 100);
        now.get()
    })
}

/// A queue, and what its device has.
struct Driver {
    queue: Queue,
    hostile: Arc<Hostile>,
    /// Mapped.
    live: Vec<(RawMapping, PhysSegment)>,
    /// Unmapped in the ring, and not committed.
    waiting: Vec<PhysSegment>,
}

impl Driver {
    fn new(device: &DmaDevice<M, Pl>, pool: Device, hostile: &Arc<Hostile>) -> Result<Self, SetupError> {
        let queue = AdaptiveRing::new(device, pool, Direction::Bidirectional, CONFIG, clock(hostile))?;
        Ok(Self { queue, hostile: Arc::clone(hostile), live: Vec::new(), waiting: Vec::new() })
    }

    fn map(&mut self, memory: PhysSegment) -> Result<(), Box<dyn Error>> {
        let mut out = [DmaSegment::default(); 1];
        // SAFETY: nobody else uses the memory, which stays there.
        let (mapping, _) = unsafe { self.queue.map(&[memory], Attributes::default(), &mut out) }?;
        self.live.push((mapping, memory));
        Ok(self.queue.sync_for_device(&self.live[self.live.len() - 1].0, 0, 8)?)
    }

    /// Everything that waited is the driver's again.
    fn committed(&mut self) {
        self.waiting.drain(..).for_each(|memory| self.hostile.gave_back(memory));
    }

    fn unmap(&mut self) -> Result<(), Box<dyn Error>> {
        while let Some((mapping, _)) = self.live.last() {
            self.queue.sync_for_cpu(mapping, 0, 8)?;
            let Some((mapping, memory)) = self.live.pop() else { break };
            if mapping.way().is_none() {
                // Whatever becomes of the call: a commit ends it.
                self.waiting.push(memory);
            }
            match self.queue.unmap(mapping) {
                Ok(Ended::Pending) => {}
                Ok(Ended::Flushed(())) => self.committed(),
                Ok(Ended::Done(())) => self.hostile.gave_back(memory),
                Err(failed) => return Err(failed.error.into()),
            }
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), Box<dyn Error>> {
        self.queue.commit()?;
        self.committed();
        Ok(())
    }
}

/// Every way: in the ring, in CPUs, with its ends bounced, and, where the ring is full, what the pool does then.
fn ways(world: &World) -> Work {
    let mut driver = Driver::new(&world.device, device(world, FOUR), &world.hostile).unwrap();
    let memory = Arc::clone(&world.memory);
    Box::new(move || {
        driver.unmap()?;
        driver.commit()?;
        for (offset, len) in [(0, PAGE), (16, 100), (0, 2 * PAGE), (100, 3 * PAGE), (0, 16 * PAGE)] {
            driver.map(original_of(&memory, offset, len))?;
        }
        driver.unmap()?;
        driver.commit()?;
        if driver.queue.waiting() > 0 {
            return Err("something waits after a commit".into());
        }
        Ok(())
    })
}

/// A queue's whole life, with what it measures first.
fn life(world: &World) -> Work {
    let (device, pool, hostile) = (world.device.clone(), device(world, FOUR), Arc::clone(&world.hostile));
    let memory = Arc::clone(&world.memory);
    Box::new(move || {
        let mut driver = Driver::new(&device, pool.clone(), &hostile)?;
        for (offset, len) in [(0, PAGE), (0, 2 * PAGE)] {
            driver.map(original_of(&memory, offset, len))?;
        }
        // One of them is left to the queue's end.
        driver.unmap()?;
        drop(driver);
        pool.pool().trim(0)?;
        Ok(())
    })
}

#[test]
fn adaptive_rings() {
    all(&[
        Scenario::new("adaptive: ways", ways),
        Scenario::new("adaptive: ways, lazily", ways).lazily(),
        Scenario::new("adaptive: life", life).one_in(31),
    ]);
}
