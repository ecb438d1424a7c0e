//! Queues: one driver, whatever protects its buffers.

use std::error::Error;
use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction};
use portcullis::dma::{DmaDomain, DmaMask, Ended, Mapping, Queue, QueueConfig};

use crate::doubles::{Fr, Pl};
use crate::hostile::{Hostile, Owned};
use crate::run::{M, Scenario, Work, World, all};

type Machine = (M, Pl, Fr);

const BOTH: Direction = Direction::Bidirectional;

fn queue(world: &World, config: QueueConfig) -> Queue<Machine, Owned> {
    let memory = Some(world.frames.clone());
    let domain = DmaDomain::<Machine>::over(world.domain.clone(), memory).unwrap();
    let mask = DmaMask::bits(u64::BITS - world.device.mask().leading_zeros());
    domain.attach(DeviceId(7), mask).unwrap().queue(config).unwrap()
}

/// A queue, and what its device has.
struct Driver {
    queue: Queue<Machine, Owned>,
    hostile: Arc<Hostile>,
    live: Vec<Mapping<Owned>>,
}

impl Driver {
    fn new(queue: Queue<Machine, Owned>, world: &World) -> Self {
        Self { queue, hostile: Arc::clone(&world.hostile), live: Vec::new() }
    }

    fn map(&mut self, pages: u64) -> Result<(), Box<dyn Error>> {
        let mapping = self.queue.map(self.hostile.buffer(pages), BOTH)?;
        self.hostile.given(mapping.buffer().segment());
        self.live.push(mapping);
        Ok(())
    }

    /// Unmaps all; what comes back is dropped. A buffer that does not is nobody's.
    fn unmap(&mut self) -> Result<(), Box<dyn Error>> {
        while let Some(mapping) = self.live.last() {
            self.queue.sync_for_device(mapping, 0, 8)?;
            self.queue.sync_for_cpu(mapping, 0, 8)?;
            let Some(mapping) = self.live.pop() else { break };
            match self.queue.unmap(mapping)? {
                Ended::Done(buffer) => drop(buffer),
                Ended::Pending => {}
                Ended::Flushed(buffers) => buffers.for_each(drop),
            }
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<(), Box<dyn Error>> {
        // What went wrong left something mapped, or waiting.
        self.unmap()?;
        self.queue.commit()?.for_each(drop);
        for pages in [1, 2, 1, 4, 1] {
            self.map(pages)?;
        }
        self.unmap()?;
        self.queue.commit()?.for_each(drop);
        if self.queue.waiting() > 0 {
            return Err("something waits after a commit".into());
        }
        Ok(())
    }
}

/// The queue outlives whatever goes wrong.
fn kept(world: &World, config: QueueConfig) -> Work {
    let mut driver = Driver::new(queue(world, config), world);
    Box::new(move || driver.turn())
}

/// The same, of a device that is not coherent.
fn maintained(world: &World, config: QueueConfig) -> Work {
    let nic = world.dma.as_ref().unwrap().attach(DeviceId(7), DmaMask::BITS_64).unwrap();
    let queue = nic.not_coherent().unwrap().queue(config).unwrap();
    let mut driver = Driver::new(queue, world);
    Box::new(move || driver.turn())
}

/// Each turn a queue ends, with its last batch.
fn ended(world: &World, config: QueueConfig) -> Work {
    let memory = Some(world.frames.clone());
    let domain = DmaDomain::<Machine>::over(world.domain.clone(), memory).unwrap();
    let (nic, hostile) = (domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap(), Arc::clone(&world.hostile));
    let mut driver = Driver { queue: nic.queue(config).unwrap(), hostile, live: Vec::new() };
    Box::new(move || {
        driver.unmap()?;
        driver.map(1)?;
        driver.map(1)?;
        driver.unmap()?;
        driver.queue = nic.queue(config)?;
        Ok(())
    })
}

const RING: QueueConfig = QueueConfig::ring(16, 4096).batch(3);
const AUTO: QueueConfig = QueueConfig::auto(16, 4096).batch(3);

#[test]
fn queues_of_devices_that_are_not_coherent() {
    all(&[
        Scenario::new("not coherent: direct", |world| maintained(world, QueueConfig::direct())),
        Scenario::new("not coherent: direct, lazily", |world| maintained(world, QueueConfig::direct()))
            .lazily(),
        Scenario::new("not coherent: batched", |world| maintained(world, QueueConfig::batched(3))),
        Scenario::new("not coherent: ring", |world| maintained(world, RING)),
        Scenario::new("not coherent: bounce", |world| maintained(world, QueueConfig::bounce())).one_in(3),
        Scenario::new("not coherent: auto", |world| maintained(world, AUTO)).one_in(3),
    ]);
}

#[test]
fn queues() {
    all(&[
        Scenario::new("queue: direct", |world| kept(world, QueueConfig::direct())),
        Scenario::new("queue: direct, lazily", |world| kept(world, QueueConfig::direct())).lazily(),
        Scenario::new("queue: batched", |world| kept(world, QueueConfig::batched(3))),
        Scenario::new("queue: batched, lazily", |world| kept(world, QueueConfig::batched(3))).lazily(),
        Scenario::new("queue: ring", |world| kept(world, RING)),
        Scenario::new("queue: ring, lazily", |world| kept(world, RING)).lazily(),
        Scenario::new("queue: bounce", |world| kept(world, QueueConfig::bounce())).one_in(3),
        Scenario::new("queue: auto", |world| kept(world, AUTO)).one_in(7),
        Scenario::new("queue: batched, shared", |world| kept(world, QueueConfig::batched(3))).shares(),
        Scenario::new("queue: direct, ended", |world| ended(world, QueueConfig::direct())),
        Scenario::new("queue: direct, ended, lazily", |world| ended(world, QueueConfig::direct())).lazily(),
        Scenario::new("queue: batched, ended", |world| ended(world, QueueConfig::batched(3))),
        Scenario::new("queue: ring, ended", |world| ended(world, RING)),
    ]);
}
