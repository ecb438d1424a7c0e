//! What changes while I/O runs: policies, devices that cache translations, CPUs that go; and timers that come.

use std::error::Error;
use std::sync::Arc;

use portcullis::addr::Direction;
use portcullis::dma::{DmaDevice, QueueConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis_model::{DeviceId, Iommu};

use crate::doubles::Pl;
use crate::hostile::Hostile;
use crate::queued::{Nic, nic};
use crate::run::{LAZY, M, Scenario, WINDOW_NS, Work, World, all};

/// It comes and goes.
const GUEST: DeviceId = DeviceId(9);

/// Whoever maps and unmaps meanwhile.
struct Driver {
    hostile: Arc<Hostile>,
    domain: Shared<Domain<M, Pl>>,
    nic: Nic<M, Pl>,
    device: DmaDevice<M, Pl>,
}

impl Driver {
    fn new(world: &World) -> Self {
        let (hostile, domain) = (Arc::clone(&world.hostile), world.domain.clone());
        let nic = nic(&domain, world.device.mask());
        let device = nic.dma().clone();
        Self { hostile, domain, nic, device }
    }

    /// A buffer goes to the device, and comes back.
    fn turn(&self) -> Result<(), Box<dyn Error>> {
        let mut queue = self.nic.queue(QueueConfig::direct())?;
        let mapping = queue.map(self.hostile.buffer(1), Direction::Bidirectional)?;
        queue.unmap(mapping)?.for_each(drop);
        Ok(())
    }

    /// What is unmapped by now is unreachable, or will be when its window is over, by the policy of now.
    fn follow(&self) {
        self.hostile.set_lazy(matches!(self.device.policy(), Policy::Lazy { .. }));
    }

    /// The policy was made the stricter one, by a call that returned `Ok`.
    fn is_strict(&self) -> Result<(), Box<dyn Error>> {
        assert_eq!(self.device.policy(), Policy::Strict);
        self.hostile.windows_end();
        self.follow();
        self.turn()
    }

    fn is_lazy(&self) -> Result<(), Box<dyn Error>> {
        self.follow();
        (0..2).try_for_each(|_| self.turn())
    }
}

/// A domain's own policy, and a device's.
fn policy(world: &World) -> Work {
    let driver = Driver::new(world);
    Box::new(move || {
        driver.follow();
        driver.device.set_policy(None)?;
        driver.domain.set_policy(LAZY)?;
        driver.is_lazy()?;
        driver.domain.set_policy(Policy::Strict)?;
        driver.is_strict()?;
        driver.device.set_policy(Some(LAZY))?;
        driver.is_lazy()?;
        driver.device.set_policy(Some(Policy::Strict))?;
        driver.is_strict()
    })
}

/// A device may fetch translations once it was added, and none any more before it is removed.
fn device_tlbs(world: &World) -> Work {
    let driver = Driver::new(world);
    let (unit, context): (Arc<Iommu>, _) = (Arc::clone(&world.unit), world.context);
    world.hostile.is_behind(&unit, GUEST);
    let (mut queue, mut live) = (driver.nic.queue(QueueConfig::direct()).unwrap(), Vec::new());
    Box::new(move || {
        let tlbs = &driver.domain.mapper().inner;
        let forget = || {
            unit.detach(GUEST);
            // SAFETY: it reaches nothing.
            unsafe { tlbs.forget_device_tlb(GUEST) };
        };
        // Wherever the last time has ended.
        forget();
        while let Some(mapping) = live.pop() {
            queue.unmap(mapping)?.for_each(drop);
        }
        queue.commit()?.for_each(drop);
        for is_removed in [true, false] {
            live.push(queue.map(driver.hostile.buffer(1), Direction::Bidirectional)?);
            tlbs.add_device_tlb(GUEST)?;
            unit.attach_with_tlb(GUEST, context, 64);
            driver.hostile.look();
            while let Some(mapping) = live.pop() {
                queue.unmap(mapping)?.for_each(drop);
            }
            driver.turn()?;
            if is_removed {
                // It asks the IOMMU each time.
                unit.attach(GUEST, context);
                // SAFETY: it fetches nothing any more.
                unsafe { tlbs.remove_device_tlb(GUEST) }?;
            } else {
                forget();
            }
            driver.turn()?;
        }
        Ok(())
    })
}

/// A CPU unmaps, and is gone.
fn cpu_released(world: &World) -> Work {
    let (driver, platform) = (Driver::new(world), world.platform.clone());
    Box::new(move || {
        // Whoever is found by an error is CPU 0.
        platform.be(1);
        let result = (0..3).try_for_each(|_| driver.turn());
        platform.be(0);
        result?;
        platform.release(1);
        driver.turn()
    })
}

/// A window ends, and nothing comes after it.
fn timer(world: &World) -> Work {
    let (driver, platform) = (Driver::new(world), world.platform.clone());
    Box::new(move || {
        driver.turn()?;
        platform.pass(2 * WINDOW_NS);
        Ok(())
    })
}

#[test]
fn changes() {
    all(&[
        Scenario::new("changes: policy", policy),
        Scenario::new("changes: device TLBs", device_tlbs),
        Scenario::new("changes: device TLBs, lazily", device_tlbs).lazily(),
        Scenario::new("changes: a CPU that goes", cpu_released),
        Scenario::new("changes: a CPU that goes, lazily", cpu_released).lazily(),
        Scenario::new("changes: timer", timer).lazily().waits(),
    ]);
}
