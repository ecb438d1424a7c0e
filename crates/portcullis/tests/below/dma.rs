//! The DMA layer below queues: domains, devices, batches, coherent memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use portcullis::addr::{Direction, DmaSegment, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{BatchError, CoherentMemory, DmaUnmapError, RawBatch};
use portcullis::domain::{Policy, Refused, UnmapError};
use portcullis::invalidation::Gather;
use portcullis::platform::Frames;

use crate::faults::Mode;
use crate::hostile::{Owned, PAGE};
use crate::queued::direct;
use crate::run::{Scenario, Work, World, all};

const BOTH: Direction = Direction::Bidirectional;

fn domain(world: &World) -> Work {
    let (domain, hostile, limit) =
        (world.domain.clone(), Arc::clone(&world.hostile), Iova::new(world.device.mask()));
    Box::new(move || {
        let buffers = [hostile.buffer(1), hostile.buffer(3)];
        let list = buffers.each_ref().map(Owned::segment);
        // Whoever does not get an answer has the buffer for good.
        let buffers = std::mem::ManuallyDrop::new(buffers);
        // SAFETY: no CPU reaches the buffers, and each is given up only where its unmap says so.
        let range = unsafe { domain.map(&list, Permissions::READ_WRITE, limit) }?;
        domain.unmap(range)?;
        drop(std::mem::ManuallyDrop::into_inner(buffers));
        Ok(())
    })
}

/// The same step by step.
fn steps(world: &World) -> Work {
    let (domain, hostile, limit) =
        (world.domain.clone(), Arc::clone(&world.hostile), Iova::new(world.device.mask()));
    Box::new(move || {
        let buffers = std::mem::ManuallyDrop::new([hostile.buffer(1), hostile.buffer(3)]);
        let list = buffers.each_ref().map(Owned::segment);
        let mut gather = Gather::new();
        let reserved = domain.reserve(domain.pages_of(&list)?, limit)?;
        // SAFETY: no CPU reaches the buffers, and each is given up only where its unlink is confirmed.
        let linked = unsafe { reserved.link(&list, Permissions::READ_WRITE, &mut gather) };
        let linked = linked.map_err(Refused::end)?;
        let unlinked = match linked.unlink(&mut gather) {
            Ok(unlinked) => unlinked,
            Err(still) => return Err(format!("{} bytes are still mapped", still.kept()).into()),
        };
        match domain.confirm(&gather) {
            Ok(()) => unlinked.free(),
            Err(error) => {
                unlinked.quarantine();
                return Err(error.into());
            }
        }
        drop(std::mem::ManuallyDrop::into_inner(buffers));
        Ok(())
    })
}

fn raw(world: &World) -> Work {
    let (device, hostile) = (world.device.clone(), Arc::clone(&world.hostile));
    // Mapped, and not unmapped yet.
    let mut live = Vec::new();
    Box::new(move || {
        while let Some((iova, len)) = live.pop() {
            // Where it panics, or is not confirmed, it is the domain's.
            device.unmap_single(iova, len)?;
        }
        let buffers = std::mem::ManuallyDrop::new([hostile.buffer(1), hostile.buffer(3)]);
        let list = buffers.each_ref().map(Owned::segment);
        let PhysSegment { phys, len } = list[0];
        // SAFETY: no CPU reaches the buffers, and each is given up only where its unmap says so.
        live.push((unsafe { device.map_single(phys, len, BOTH) }?, len));
        let mut out = [DmaSegment::default(); 2];
        // SAFETY: no CPU reaches the buffers, and each is given up only where its unmap says so.
        let count = unsafe { device.map_sg(&list, BOTH, &mut out) }?;
        live.push((out[0].iova, 4 * PAGE));
        live.swap(0, 1);
        if let Some((iova, len)) = live.pop() {
            device.unmap_single(iova, len)?;
        }
        live.pop();
        device.unmap_sg(&out[..count])?;
        drop(std::mem::ManuallyDrop::into_inner(buffers));
        Ok(())
    })
}

/// What a driver knows by number is its own again after a commit that worked.
fn raw_batch(world: &World) -> Work {
    let (device, hostile) = (world.device.clone(), Arc::clone(&world.hostile));
    let mut batch = RawBatch::new(&device, 4).unwrap();
    let mut waiting = Vec::new();
    Box::new(move || {
        if batch.is_full() {
            batch.commit()?;
            waiting.clear();
        }
        for _ in 0..2 {
            let buffer = hostile.buffer(1);
            let PhysSegment { phys, len } = buffer.segment();
            let buffer = std::mem::ManuallyDrop::new(buffer);
            // SAFETY: no CPU reaches the buffers, and each is given up only where its unmap says so.
            let iova = unsafe { device.map_single(phys, len, BOTH) }?;
            waiting.push(std::mem::ManuallyDrop::into_inner(buffer));
            device.unmap_single_in(&mut batch, iova, len)?;
        }
        batch.commit()?;
        waiting.clear();
        Ok(())
    })
}

fn coherent(world: &World) -> Work {
    let (device, frames) = (world.device.clone(), world.frames.clone());
    Box::new(move || {
        let memory = CoherentMemory::new(&device, frames.clone(), 8192)?;
        assert!(memory.word(600).is_some());
        memory.free()?;
        drop(CoherentMemory::new(&device, frames.clone(), 4096)?);
        Ok(())
    })
}

fn flush(world: &World) -> Work {
    let (device, domain, hostile) = (world.device.clone(), world.domain.clone(), Arc::clone(&world.hostile));
    Box::new(move || {
        let mut queue = direct(&device);
        let mapping = queue.map(hostile.buffer(1), BOTH)?;
        let ended = queue.unmap(mapping)?;
        domain.flush()?;
        ended.for_each(drop);
        domain.reclaim()?;
        Ok(())
    })
}

#[test]
fn dma() {
    all(&[
        Scenario::new("domain", domain),
        Scenario::new("domain, lazily", domain).lazily(),
        Scenario::new("steps", steps),
        Scenario::new("raw", raw),
        Scenario::new("raw, lazily", raw).lazily(),
        Scenario::new("raw batch", raw_batch),
        Scenario::new("coherent", coherent),
        Scenario::new("flush", flush),
        Scenario::new("flush, lazily", flush).lazily(),
        Scenario::new("shared: domain", domain).shares(),
        Scenario::new("shared: raw batch", raw_batch).shares(),
        Scenario::new("shared: flush, lazily", flush).shares().lazily(),
    ]);
}

/// A part of a large page that cannot be split is still mapped: whoever asked for it is told, or the batch says so when it is
/// committed, whatever panics.
#[test]
fn what_a_batch_leaves_mapped_is_said_wherever_it_panics() {
    const LARGE: u64 = 2 << 20;
    let run = |fault: Option<(usize, Mode)>| {
        let world = World::new(Policy::Strict, u64::MAX);
        let mut batch = RawBatch::new(&world.device, 4).unwrap();
        // SAFETY: only a simulated device reaches the memory, which is nobody's.
        let iova = unsafe { world.device.map_single(PhysAddr::new(1 << 40), LARGE, BOTH) }.unwrap();
        // No memory for the table of a page that is split.
        while world.memory.alloc(1).is_some() {}
        let part = Iova::new(iova.get() + PAGE);
        world.hostile.faults.arm(fault);
        let unmap = || world.device.unmap_single_in(&mut batch, part, PAGE);
        let result = catch_unwind(AssertUnwindSafe(unmap));
        let calls = world.hostile.faults.disarm().0;
        match result {
            Ok(result) => {
                let still_mapped = matches!(result, Err(BatchError::Unmap(UnmapError::StillMapped { .. })));
                assert!(still_mapped, "{fault:?}");
            }
            Err(_) => {
                assert!(fault.is_some());
                let result = batch.commit();
                let still_mapped = matches!(result, Err(DmaUnmapError::StillMapped { .. }));
                assert!(still_mapped, "{fault:?}: {:?}", calls.last());
            }
        }
        calls
    };
    for (at, call) in run(None).iter().enumerate() {
        for mode in call.modes().iter().filter(|mode| matches!(mode, Mode::Panic | Mode::PanicAfter)) {
            run(Some((at, *mode)));
        }
    }
}
