//! The handle for a kernel's own DMA API: what it has ended, in each configuration, no device reaches.

use std::error::Error;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use portcullis::addr::{Direction, DmaSegment, Iova, PhysSegment};
use portcullis::dma::{DmaAttributes, DmaDomain, DmaMask, DmaOps, OpsConfig};

use crate::doubles::{Fr, Pl};
use crate::hostile::{Hostile, Owned, PAGE};
use crate::pool::original;
use crate::run::{DEVICE, M, Scenario, WINDOW_NS, Work, World, all};

const BOTH: Direction = Direction::Bidirectional;
const BOUNCE: OpsConfig = OpsConfig::Bounce { threshold: 4 * PAGE };
const CONFIGS: [OpsConfig; 4] = [
    OpsConfig::Strict,
    OpsConfig::Lazy { window_ns: WINDOW_NS },
    BOUNCE,
    OpsConfig::Auto { threshold: 4 * PAGE },
];

/// A driver, and what its device has.
struct Driver {
    ops: DmaOps<(M, Pl, Fr)>,
    hostile: Arc<Hostile>,
    /// Memory that stays the driver's.
    originals: [PhysSegment; 3],
    live: Vec<(Iova, u64)>,
}

impl Driver {
    fn new(world: &World, config: OpsConfig) -> Self {
        let memory = Some(world.frames.clone());
        let domain = DmaDomain::<(M, Pl, Fr)>::over(world.domain.clone(), memory).unwrap();
        let ops = domain.attach(DEVICE, DmaMask::BITS_64).unwrap().ops(config).unwrap();
        let originals = [(0x30, 500), (0x80, 3 * PAGE), (0x40, 7 * PAGE)]
            .map(|(offset, len)| original(world, offset, len));
        Self { ops, hostile: Arc::clone(&world.hostile), originals, live: Vec::new() }
    }

    /// Where it panics, or is not confirmed, the mapping is over for the driver.
    fn unmap_all(&mut self) -> Result<(), Box<dyn Error>> {
        let unmaps = DmaAttributes::default();
        while let Some((iova, len)) = self.live.pop() {
            // SAFETY: one thread does everything; the CPU reaches no buffer.
            unsafe { self.ops.unmap(iova, len, unmaps) }?;
        }
        Ok(())
    }

    /// Maps three buffers and the originals. The buffers are for good those of a caller that does not get them back.
    fn map(&mut self) -> Result<ManuallyDrop<[Owned; 3]>, Box<dyn Error>> {
        let maps = DmaAttributes::default();
        // Copied where that is so, and mapped: pages of buffers, and lists of them.
        let buffers =
            ManuallyDrop::new([self.hostile.buffer(1), self.hostile.buffer(3), self.hostile.buffer(8)]);
        let list = buffers.each_ref().map(Owned::segment);
        let mut out = [DmaSegment::default(); 3];
        let PhysSegment { phys, len } = list[2];
        // SAFETY: one thread does everything; the CPU reaches no buffer, and each is given up only where its unmap says so.
        let iova = unsafe { self.ops.map(phys, len, BOTH, DmaAttributes { lasting: true, ..maps }) }?;
        self.live.push((iova, len));
        // SAFETY: as above.
        let count =
            unsafe { self.ops.map_sg(&list[..2], BOTH, DmaAttributes { mmio: true, ..maps }, &mut out) }?;
        let (first, last) = (out[0].iova, out[count - 1]);
        let whole = (first, last.iova.get() + last.len - first.get());
        self.live.push(whole);
        // What is memory can be copied.
        for PhysSegment { phys, len } in self.originals {
            // SAFETY: as above.
            let iova = unsafe { self.ops.map(phys, len, BOTH, maps) }?;
            self.live.push((iova, len));
            // SAFETY: as above.
            unsafe { self.ops.sync_for_cpu(iova, len) }?;
            // SAFETY: as above.
            unsafe { self.ops.sync_for_device(iova, len) }?;
        }
        Ok(buffers)
    }

    fn turn(&mut self) -> Result<(), Box<dyn Error>> {
        self.unmap_all()?;
        let buffers = self.map()?;
        self.unmap_all()?;
        self.ops.maintain()?;
        drop(ManuallyDrop::into_inner(buffers));
        // Neither what a failed map has counted, nor one that is over, is still open.
        let usage = self.ops.usage();
        assert_eq!((usage.open_mappings(), usage.open_bytes, usage.exposed_bytes), (0, 0, 0));
        Ok(())
    }
}

/// Turn after turn in one configuration.
fn turns<const CONFIG: usize>(world: &World) -> Work {
    let mut driver = Driver::new(world, CONFIGS[CONFIG]);
    Box::new(move || driver.turn())
}

/// What a driver leaves ends as a whole.
fn left(world: &World) -> Work {
    let mut driver = Driver::new(world, BOUNCE);
    Box::new(move || {
        let buffers = driver.map()?;
        driver.live.clear();
        // SAFETY: one thread does everything.
        unsafe { driver.ops.unmap_all() }?;
        drop(ManuallyDrop::into_inner(buffers));
        Ok(())
    })
}

#[test]
fn handles_for_a_kernel_s_own_api() {
    all(&[
        Scenario::new("ops: strict", turns::<0>).aborts(),
        Scenario::new("ops: lazy", turns::<1>).lazily().aborts(),
        Scenario::new("ops: bounce", turns::<2>).aborts(),
        Scenario::new("ops: auto", turns::<3>).aborts(),
        Scenario::new("ops: left", left).aborts(),
    ]);
}
