//! Bounce pools: slots, lists, single-use buffers, split and direct mappings, runs; and how they are given back.

use std::error::Error;
use std::sync::Arc;

use portcullis::addr::{Direction, Iova, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig};
use portcullis_model::Memory;

use crate::doubles::TIMED_OUT;
use crate::hostile::PAGE;
use crate::run::{Scenario, Work, World, all};

/// Four slots of a page.
pub const FOUR: PoolConfig = PoolConfig {
    threshold: PAGE,
    class_bytes: 4 * PAGE,
    limit: Iova::new(u64::MAX),
    split: true,
    wipe: false,
    idle_ns: 100_000_000,
    keep_bytes: 0,
};

pub type Device = BounceDevice<crate::run::M, crate::doubles::Pl, crate::doubles::Fr>;

pub fn device(world: &World, config: PoolConfig) -> Device {
    let pool = BouncePool::new(world.domain.clone(), world.frames.clone(), config).unwrap();
    let profile = DeviceProfile { untrusted: true, group: 1, ..DeviceProfile::default() };
    BounceDevice::new(pool, profile).unwrap()
}

/// `len` bytes of memory that nobody gives back, from `offset` on.
pub fn original(world: &World, offset: u64, len: u64) -> PhysSegment {
    original_of(&world.memory, offset, len)
}

/// The same, for whoever has the memory.
pub fn original_of(memory: &Arc<Memory>, offset: u64, len: u64) -> PhysSegment {
    let buffer = std::mem::ManuallyDrop::new(memory.buffer(offset + len).unwrap());
    PhysSegment { phys: PhysAddr::new(buffer.phys().get() + offset), len }
}

/// A device, and its mappings that have not ended.
struct Driver {
    device: Device,
    live: Vec<(Iova, u64)>,
}

impl Driver {
    fn new(device: Device) -> Self {
        Self { device, live: Vec::new() }
    }

    /// Maps each list, all at the same time, and ends the mappings again; before that, those that an error has left.
    fn turns(&mut self, lists: &[&[PhysSegment]], direction: Direction) -> Result<(), Box<dyn Error>> {
        while let Some((iova, len)) = self.live.pop() {
            // One that has panicked is over, or a trim's.
            // SAFETY: only this driver uses the mapping, or its memory.
            let _ = unsafe { self.device.pool().unmap(iova, len) };
        }
        for list in lists {
            // SAFETY: nobody else uses the memory, which stays there.
            let mapping = unsafe { self.device.map(list, direction, Attributes::default()) }?;
            self.live.push((mapping.iova(), mapping.len()));
        }
        while let Some(&(iova, len)) = self.live.last() {
            // SAFETY: as above.
            unsafe { self.device.pool().unmap(iova, len) }?;
            self.live.pop();
        }
        Ok(())
    }
}

/// All slots of a class, in all directions, then given back. None is missing afterwards.
fn slots(world: &World) -> Work {
    let mut driver = Driver::new(device(world, FOUR));
    let pieces: Vec<_> = (0..4).map(|_| original(world, 0, PAGE)).collect();
    let lists: Vec<_> = pieces.iter().map(std::slice::from_ref).collect();
    let lists: Vec<Vec<PhysSegment>> = lists.into_iter().map(<[_]>::to_vec).collect();
    Box::new(move || {
        let lists: Vec<&[PhysSegment]> = lists.iter().map(Vec::as_slice).collect();
        for direction in [Direction::FromDevice, Direction::ToDevice] {
            driver.turns(&lists, direction)?;
        }
        driver.device.pool().trim(0)?;
        let usage = driver.device.pool().usage();
        if (usage.cached_bytes, usage.unconfirmed_bytes, usage.singles) != (0, 0, 0) {
            return Err(format!("something is left after a trim: {usage:?}").into());
        }
        Ok(())
    })
}

/// A list in a slot, with syncs.
fn listed(world: &World) -> Work {
    let driver = Driver::new(device(world, FOUR));
    let list = [original(world, 16, 100), original(world, 8, 200)];
    Box::new(move || {
        // SAFETY: nobody else uses the memory, which stays there.
        let mapping = unsafe { driver.device.map(&list, Direction::Bidirectional, Attributes::default()) }?;
        let (iova, len) = (mapping.iova(), mapping.len());
        // SAFETY: only this driver uses the mapping, or its memory.
        unsafe {
            driver.device.pool().sync_for_cpu(iova, 0, len)?;
            driver.device.pool().sync_for_device(iova, 50, 100)?;
            driver.device.pool().unmap(iova, len)?;
        }
        Ok(())
    })
}

/// What no slot is for: split, in single-use buffers, and direct.
fn others(world: &World) -> Work {
    let mut driver = Driver::new(device(world, FOUR));
    let split = [original(world, 100, 3 * PAGE)];
    let gaps = [original(world, 100, 3000), original(world, 7, 3000)];
    let whole = [original(world, 0, 2 * PAGE)];
    Box::new(move || {
        driver.turns(&[&split, &gaps, &whole], Direction::Bidirectional)?;
        driver.device.pool().trim(0)?;
        let usage = driver.device.pool().usage();
        if usage.singles != 0 {
            return Err(format!("something is left after a trim: {usage:?}").into());
        }
        Ok(())
    })
}

/// Directly, as a device that is trusted: one piece, and more than that.
fn direct(world: &World) -> Work {
    let mut driver = Driver::new(device(world, FOUR));
    let trusted = BounceDevice::new(driver.device.pool().clone(), DeviceProfile::default()).unwrap();
    driver.device = trusted;
    let piece = [original(world, 100, 3 * PAGE)];
    let pieces = [original(world, 100, PAGE - 100), original(world, 0, 3 * PAGE)];
    Box::new(move || driver.turns(&[&piece, &pieces], Direction::Bidirectional))
}

/// What the hardware does not confirm waits for a trim.
fn unconfirmed(world: &World) -> Work {
    let mut driver = Driver::new(device(world, FOUR));
    let queue = world.unit.queue();
    let split = [original(world, 100, 3 * PAGE)];
    let gaps = [original(world, 100, 3000), original(world, 7, 3000)];
    Box::new(move || {
        queue.fail_next(0, TIMED_OUT);
        driver.turns(&[], Direction::Bidirectional)?;
        for list in [&split[..], &gaps] {
            queue.fail_next(0, TIMED_OUT);
            // SAFETY: nobody else uses the memory, which stays there.
            let mapping = unsafe { driver.device.map(list, Direction::FromDevice, Attributes::default()) }?;
            let (iova, len) = (mapping.iova(), mapping.len());
            driver.live.push((iova, len));
            queue.fail_next(1, TIMED_OUT);
            // SAFETY: as above.
            let _ = unsafe { driver.device.pool().unmap(iova, len) };
            driver.live.pop();
        }
        queue.fail_next(0, TIMED_OUT);
        driver.device.pool().trim(0)?;
        let usage = driver.device.pool().usage();
        if (usage.unconfirmed_bytes, usage.singles) != (0, 0) {
            return Err(format!("something is left after a trim: {usage:?}").into());
        }
        Ok(())
    })
}

/// The timer gives back what nobody wants.
fn idle(world: &World) -> Work {
    let mut driver = Driver::new(device(world, FOUR));
    let (list, platform) = ([original(world, 0, PAGE)], world.platform.clone());
    Box::new(move || {
        driver.turns(&[&list], Direction::FromDevice)?;
        platform.pass(500_000_000);
        let usage = driver.device.pool().usage();
        if usage.buffer_bytes != 0 {
            return Err(format!("nobody has come for what is idle: {usage:?}").into());
        }
        Ok(())
    })
}

/// A pool's whole life.
fn life(world: &World) -> Work {
    let (domain, frames) = (world.domain.clone(), world.frames.clone());
    let (split, one) = ([original(world, 100, 3 * PAGE)], [original(world, 0, PAGE)]);
    Box::new(move || {
        let pool = BouncePool::new(domain.clone(), frames.clone(), FOUR)?;
        let device = BounceDevice::new(pool, DeviceProfile { untrusted: true, ..DeviceProfile::default() })?;
        let mut driver = Driver::new(device);
        driver.turns(&[&one], Direction::ToDevice)?;
        for list in [&split, &one] {
            // SAFETY: nobody else uses the memory, which stays there.
            let _ = unsafe { driver.device.map(list, Direction::FromDevice, Attributes::default()) }?;
        }
        Ok(())
    })
}

#[test]
fn pool() {
    all(&[
        Scenario::new("pool: slots", slots).one_in(3),
        Scenario::new("pool: lists", listed),
        Scenario::new("pool: others", others),
        Scenario::new("pool: direct", direct),
        Scenario::new("pool: unconfirmed", unconfirmed),
        Scenario::new("pool: idle", idle),
        Scenario::new("pool: life", life),
    ]);
}
