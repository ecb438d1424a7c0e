//! Registrations: held, persistent, shared, evicted, trimmed, forgotten while held; and the drop of a cache.

use std::error::Error;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use portcullis::addr::{Direction, PhysAddr, PhysSegment};
use portcullis::dma::DmaDevice;
use portcullis::domain::Policy;
use portcullis_linux::registration::{
    AcquireError, Keep, Registration, RegistrationCache, RegistrationLimits, RegistrationUsage, Released,
};

use crate::doubles::{Pl, TIMED_OUT};
use crate::faults::{Call, Mode};
use crate::hostile::{Hostile, Owned, PAGE};
use crate::run::{M, Scenario, Work, World, all};

const BOTH: Direction = Direction::Bidirectional;
const HELD: Keep = Keep::WhileHeld;
const KEPT: Keep = Keep::UntilForgotten;

/// Small limits, so that a leaked entry shows.
const TWO: RegistrationLimits = RegistrationLimits { entries: 2, bytes: 3 * PAGE };

type Cache = RegistrationCache<M, Pl>;

/// A cache, its registrations, and buffers that devices may reach.
struct Driver {
    cache: Cache,
    hostile: Arc<Hostile>,
    held: Vec<Registration>,
    open: Vec<Owned>,
}

impl Driver {
    fn new(world: &World) -> Self {
        let cache = RegistrationCache::new(world.device.clone(), TWO).unwrap();
        Self { cache, hostile: Arc::clone(&world.hostile), held: Vec::new(), open: Vec::new() }
    }

    fn buffer(&mut self, pages: u64) -> PhysSegment {
        let buffer = self.hostile.buffer(pages);
        let segment = buffer.segment();
        self.open.push(buffer);
        segment
    }

    fn acquire(&mut self, memory: PhysSegment, keep: Keep) -> Result<(), Box<dyn Error>> {
        // SAFETY: no CPU accesses the buffers, and each is freed only after a forget or the last release.
        self.held.push(unsafe { self.cache.acquire(memory, BOTH, keep) }?);
        Ok(())
    }

    fn release(&mut self) -> Result<Released, Box<dyn Error>> {
        Ok(self.cache.release(self.held.remove(0))?)
    }

    /// Forgets the oldest buffer, and frees it.
    fn forget(&mut self) -> Result<(), Box<dyn Error>> {
        self.cache.forget(self.open[0].segment())?;
        self.open.remove(0);
        Ok(())
    }

    /// Removes what a failure has left registered or mapped.
    fn clear(&mut self) -> Result<(), Box<dyn Error>> {
        for registration in self.held.drain(..) {
            self.cache.release(registration)?;
        }
        while !self.open.is_empty() {
            self.forget()?;
        }
        self.cache.trim(0)?;
        let RegistrationUsage { entries, bytes, .. } = self.cache.usage();
        match (entries, bytes) {
            (0, 0) => Ok(()),
            left => Err(format!("{left:?} entries and bytes are left").into()),
        }
    }
}

/// Each buffer is the driver's again after its last release. There is room for two.
fn held(world: &World) -> Work {
    let mut driver = Driver::new(world);
    Box::new(move || {
        driver.clear()?;
        let (one, two) = (driver.buffer(1), driver.buffer(2));
        for memory in [one, two, one] {
            driver.acquire(memory, HELD)?;
        }
        let ends = [driver.release()?, driver.release()?, driver.release()?];
        if ends != [Released::Open, Released::Unmapped, Released::Unmapped] {
            return Err(format!("{ends:?}").into());
        }
        driver.open.clear();
        driver.clear()
    })
}

/// The third and the fourth evict others. Then there are parts of them.
fn kept(world: &World) -> Work {
    let mut driver = Driver::new(world);
    Box::new(move || {
        driver.clear()?;
        for pages in [1, 1, 1, 2] {
            let memory = driver.buffer(pages);
            driver.acquire(memory, KEPT)?;
            driver.release()?;
        }
        let last = driver.open[3].segment();
        let second = PhysSegment { phys: last.phys.checked_add(PAGE).unwrap(), len: 100 };
        for memory in [second, last] {
            driver.acquire(memory, HELD)?;
        }
        for _ in 0..2 {
            driver.release()?;
        }
        driver.cache.trim(PAGE)?;
        driver.clear()
    })
}

/// The owner takes back held buffers, also from other holders.
fn forgotten(world: &World) -> Work {
    let mut driver = Driver::new(world);
    Box::new(move || {
        driver.clear()?;
        for keep in [HELD, KEPT] {
            let memory = driver.buffer(1);
            driver.acquire(memory, keep)?;
            driver.acquire(memory, HELD)?;
            driver.forget()?;
            for _ in 0..2 {
                let end = driver.release()?;
                if end != Released::Forgotten {
                    return Err(format!("{end:?}").into());
                }
            }
        }
        driver.clear()
    })
}

/// If the forget is not confirmed, the last release says whether the buffer is the driver's.
fn released_instead(world: &World) -> Work {
    let mut driver = Driver::new(world);
    Box::new(move || {
        driver.clear()?;
        let memory = driver.buffer(1);
        driver.acquire(memory, HELD)?;
        let _ = driver.cache.forget(memory);
        driver.release()?;
        driver.open.clear();
        driver.clear()
    })
}

/// Refused calls (memory or addresses that do not exist, and an eviction that the hardware does not confirm) leave nothing, even if
/// something else fails meanwhile.
fn refused(world: &World) -> Work {
    let mut driver = Driver::new(world);
    // Page 0 is reserved, and a range of three begins where one of four could.
    let near = DmaDevice::new(world.domain.clone(), 4 * PAGE - 1).unwrap();
    driver.cache = RegistrationCache::new(near, TWO).unwrap();
    let queue = world.unit.queue();
    let nowhere = PhysSegment { phys: PhysAddr::new(1 << 60), len: PAGE };
    Box::new(move || {
        queue.fail_next(0, TIMED_OUT);
        driver.clear()?;
        let (one, three) = (driver.buffer(1), driver.buffer(3));
        for memory in [nowhere, three] {
            match driver.acquire(memory, HELD) {
                Err(error) if matches!(error.downcast_ref(), Some(AcquireError::Map(_))) => {}
                result => return Err(format!("{result:?}").into()),
            }
        }
        driver.acquire(one, KEPT)?;
        driver.release()?;
        queue.fail_next(1, TIMED_OUT);
        match driver.acquire(three, HELD) {
            Err(error) if matches!(error.downcast_ref(), Some(AcquireError::Eviction { .. })) => {}
            result => return Err(format!("{result:?}").into()),
        }
        queue.fail_next(0, TIMED_OUT);
        driver.clear()
    })
}

/// A cache's whole life, which ends with a persistent entry, and one that may be unconfirmed. Its drop reports nothing: after a flush
/// nothing is left.
fn life(world: &World) -> Work {
    let (device, hostile) = (world.device.clone(), Arc::clone(&world.hostile));
    Box::new(move || {
        let cache = RegistrationCache::new(device.clone(), TWO)?;
        // A call without a result leaks the buffers.
        let buffers = ManuallyDrop::new([hostile.buffer(1), hostile.buffer(2)]);
        for buffer in &*buffers {
            // SAFETY: no CPU accesses the buffers, and they are freed only after the flush.
            let held = unsafe { cache.acquire(buffer.segment(), BOTH, KEPT) }?;
            cache.release(held)?;
        }
        let _ = cache.forget(buffers[0].segment());
        drop(cache);
        device.domain().flush()?;
        drop(ManuallyDrop::into_inner(buffers));
        Ok(())
    })
}

#[test]
fn registrations() {
    all(&[
        Scenario::new("registrations: held", held),
        Scenario::new("registrations: held, lazily", held).lazily(),
        Scenario::new("registrations: kept", kept),
        Scenario::new("registrations: forgotten", forgotten),
        Scenario::new("registrations: released instead", released_instead),
        Scenario::new("registrations: refused", refused),
        Scenario::new("registrations: life", life),
    ]);
}

/// Bytes beside mapped ones count as long as devices can reach them: also if the platform lent no CPU, or the clock failed.
#[test]
fn what_is_open_when_the_platform_panics_is_counted() {
    let acquire = |world: &World, driver: &mut Driver, fault| {
        let memory = PhysSegment { len: 100, ..driver.buffer(1) };
        world.hostile.faults.arm(fault);
        let result = catch_unwind(AssertUnwindSafe(|| driver.acquire(memory, HELD).unwrap()));
        (result.is_ok(), world.hostile.faults.disarm().0)
    };
    let world = World::new(Policy::Strict, u64::MAX);
    let (_, calls) = acquire(&world, &mut Driver::new(&world), None);
    let mut met = [0; 2];
    for (at, call) in calls.into_iter().enumerate() {
        let is_counted = [Call::NowNs, Call::WithCpu].iter().position(|counted| *counted == call);
        let Some(is_counted) = is_counted else { continue };
        let world = World::new(Policy::Strict, u64::MAX);
        let mut driver = Driver::new(&world);
        assert!(!acquire(&world, &mut driver, Some((at, Mode::Panic))).0);
        let in_a_while = || {
            let counted = || world.domain.exposure().neighbour_byte_ns;
            let before = counted();
            world.platform.pass(1000);
            counted() - before
        };
        // No caller holds the registration; if the cache has an entry for it, that is still mapped.
        let is_open = driver.cache.usage().bytes == PAGE;
        let open = if is_open { u128::from(PAGE) * 1000 } else { 0 };
        assert_eq!(in_a_while(), open, "{at}, {call:?}");
        met[is_counted] += usize::from(is_open);
        // A CPU's first change is exact.
        world.platform.be(1);
        driver.clear().unwrap();
        assert_eq!(in_a_while(), 0, "{at}, {call:?}");
    }
    assert!(met.iter().all(|met| *met > 0), "{met:?}");
}

/// An ended entry frees its addresses, or counts them as leaked, wherever it unwinds.
#[test]
fn addresses_that_do_not_come_back_are_counted() {
    let make = || {
        let world = World::new(Policy::Strict, u64::MAX);
        let mut driver = Driver::new(&world);
        for keep in [KEPT, HELD] {
            let memory = driver.buffer(1);
            driver.acquire(memory, keep).unwrap();
        }
        driver.release().unwrap();
        driver.cache.forget(driver.open[1].segment()).unwrap();
        (world, driver)
    };
    let end = |world: &World, driver: &mut Driver, fault| {
        world.hostile.faults.arm(fault);
        let work = || driver.release().is_ok() && driver.cache.trim(0).is_ok();
        let _ = catch_unwind(AssertUnwindSafe(work));
        world.hostile.faults.disarm().0
    };
    let (world, mut driver) = make();
    for (at, call) in end(&world, &mut driver, None).into_iter().enumerate() {
        for mode in call.modes() {
            let (world, mut driver) = make();
            let _ = end(&world, &mut driver, Some((at, *mode)));
            driver.clear().unwrap();
            let usage = world.domain.stats();
            let lost = usage.lost_iova_bytes;
            assert!(
                usage.taken_iova_bytes - usage.cached_iova_bytes <= lost,
                "{at}, {call:?}, {mode:?}: {usage:?}"
            );
        }
    }
}
