//! The swiotlb pool: slots from lists and areas, odd runs, growing, shrinking, and its end.

use std::error::Error;
use std::sync::Arc;

use portcullis::addr::{Direction, PhysAddr, PhysSegment};
use portcullis::bounce::swiotlb::{Constraints, Swiotlb, SwiotlbConfig};
use portcullis::dma::DmaMapError;
use portcullis::heap::Shared;
use portcullis_model::Memory;

use crate::doubles::{Fr, Pl};
use crate::hostile::{Hostile, PAGE};
use crate::pool::original;
use crate::run::{Scenario, Work, World, all};

const BOTH: Direction = Direction::Bidirectional;

/// Up to three areas of 128 slots.
const THREE: SwiotlbConfig = SwiotlbConfig {
    slot_bytes: 64,
    area_bytes: 2 * PAGE,
    min_bytes: 2 * PAGE,
    max_bytes: 6 * PAGE,
    reach: PhysAddr::new(u64::MAX),
    idle_ns: 100_000_000,
};

/// A pool, and its mappings that have not ended.
struct Driver {
    pool: Shared<Swiotlb<Pl, Fr>>,
    hostile: Arc<Hostile>,
    live: Vec<(PhysAddr, u64)>,
}

impl Driver {
    fn new(world: &World) -> Result<Self, Box<dyn Error>> {
        let pool = Swiotlb::new(world.platform.clone(), world.frames.clone(), &THREE)?;
        Ok(Self { pool, hostile: Arc::clone(&world.hostile), live: Vec::new() })
    }

    fn map(&mut self, original: PhysSegment, constraints: &Constraints) -> Result<(), DmaMapError> {
        // SAFETY: nobody else uses the memory, which stays there.
        let bounced = unsafe { self.pool.map(original, BOTH, constraints) }?;
        self.live.push((bounced.phys, bounced.len));
        self.hostile.uses(bounced.phys);
        Ok(())
    }

    /// Ends all mappings, those that a panic has left first.
    fn end(&mut self) -> Result<(), Box<dyn Error>> {
        self.hostile.is_done();
        while let Some((phys, len)) = self.live.last().copied() {
            // SAFETY: the device is done with it.
            unsafe { self.pool.unmap(phys, len) }?;
            self.live.pop();
        }
        Ok(())
    }

    /// The same after something went wrong, when the last one may be over.
    fn end_rest(&mut self) -> Result<(), Box<dyn Error>> {
        if let Some((phys, len)) = self.live.pop() {
            self.hostile.is_done();
            // SAFETY: the device is done with it.
            let _ = unsafe { self.pool.unmap(phys, len) };
        }
        self.end()
    }

    /// A pool of which nothing is mapped gives back all that it can.
    fn trim(&self) -> Result<(), Box<dyn Error>> {
        self.pool.trim();
        let usage = self.pool.usage();
        match (usage.mapped, usage.kept) == (0, 0) && usage.capacity == usage.least {
            true => Ok(()),
            false => Err(format!("something is left after a trim: {usage:?}").into()),
        }
    }
}

/// All of the pool, on two CPUs, and one more, who waits.
fn full(world: &World) -> Work {
    let mut driver = Driver::new(world).unwrap();
    let (platform, piece) = (world.platform.clone(), original(world, 0, PAGE));
    Box::new(move || {
        driver.end_rest()?;
        let none = Constraints::new();
        for cpu in [0, 1] {
            platform.be(cpu);
            driver.map(PhysSegment { len: 100, ..piece }, &none)?;
            driver.map(PhysSegment { len: 64, ..piece }, &none)?;
            driver.end()?;
        }
        for _ in 0..6 {
            driver.map(piece, &none)?;
        }
        match driver.map(piece, &none) {
            Err(DmaMapError::Pressure { .. }) => {}
            result => return Err(format!("the pool is not full: {result:?}").into()),
        }
        driver.end()?;
        platform.be(0);
        platform.release(1);
        driver.trim()
    })
}

/// Odd runs, and what a device asks of addresses, with syncs.
fn odd(world: &World) -> Work {
    let mut driver = Driver::new(world).unwrap();
    let (long, offset) = (original(world, 0, PAGE + 100), original(world, 100, 700));
    let offsets = Constraints::new().with_min_align_mask(PAGE - 1).unwrap();
    let low = Constraints::new().with_reach(PhysAddr::new(Memory::DEFAULT_BASE + (16 << 20)));
    Box::new(move || {
        driver.end_rest()?;
        driver.map(offset, &offsets)?;
        for constraints in [&low, &Constraints::new()] {
            driver.map(long, constraints)?;
            let (phys, len) = driver.live[driver.live.len() - 1];
            // SAFETY: nobody else uses the memory.
            unsafe {
                driver.pool.sync_for_cpu(phys, len)?;
                driver.pool.sync_for_device(phys.checked_add(50).unwrap(), 100)?;
            }
        }
        driver.end()?;
        driver.trim()
    })
}

/// The timer has the pool grow, and gives back what is idle.
fn idle(world: &World) -> Work {
    let mut driver = Driver::new(world).unwrap();
    let (platform, piece) = (world.platform.clone(), original(world, 0, PAGE));
    Box::new(move || {
        driver.end_rest()?;
        for _ in 0..2 {
            driver.map(piece, &Constraints::new())?;
        }
        platform.pass(1);
        if driver.pool.usage().capacity <= 2 * PAGE {
            return Err("the pool has not grown before it was full".into());
        }
        driver.end()?;
        platform.pass(500_000_000);
        let usage = driver.pool.usage();
        if usage.capacity != usage.least {
            return Err(format!("nobody has come for what is idle: {usage:?}").into());
        }
        Ok(())
    })
}

/// A pool's whole life. Where something goes wrong it ends with mappings, and devices use them.
fn life(world: &World) -> Work {
    let (platform, frames, hostile) =
        (world.platform.clone(), world.frames.clone(), Arc::clone(&world.hostile));
    let piece = original(world, 0, PAGE);
    Box::new(move || {
        hostile.is_done();
        let pool = Swiotlb::new(platform.clone(), frames.clone(), &THREE)?;
        let mut driver = Driver { pool, hostile: Arc::clone(&hostile), live: Vec::new() };
        for _ in 0..3 {
            driver.map(piece, &Constraints::new())?;
        }
        driver.end()
    })
}

#[test]
fn swiotlb() {
    all(&[
        Scenario::new("swiotlb: full", full),
        Scenario::new("swiotlb: odd", odd),
        Scenario::new("swiotlb: idle", idle),
        Scenario::new("swiotlb: life", life),
    ]);
}
