//! Strict rings.

use std::mem::ManuallyDrop;

use portcullis::addr::{Direction, DmaSegment};
use portcullis::dma::{Ended, RawMapping, StrictRing, StrictRingConfig};

use crate::hostile::Owned;
use crate::run::{M, Scenario, Work, World, all};

const BOTH: Direction = Direction::Bidirectional;

type Ring = StrictRing<M, crate::doubles::Pl>;

/// Buffers whose descriptors are unmapped, and those whose state nobody knows.
#[derive(Default)]
struct Waiting(Vec<Owned>);

/// Unmaps one, and gives back the buffers of all where that says so.
fn unmap(
    ring: &mut Ring,
    waiting: &mut Waiting,
    mapping: RawMapping,
    buffer: Owned,
) -> Result<(), Box<dyn std::error::Error>> {
    waiting.0.push(buffer);
    if ring.unmap(mapping)? == Ended::Flushed(()) {
        waiting.0.clear();
    }
    Ok(())
}

fn map(ring: &mut Ring, buffer: Owned) -> Result<(RawMapping, Owned), Box<dyn std::error::Error>> {
    // Whoever does not get an answer has the buffer for good.
    let buffer = ManuallyDrop::new(buffer);
    // SAFETY: no CPU reaches the buffer, and it is given up only where a commit says so.
    let mapping = unsafe { ring.map(&[buffer.segment()], BOTH) }?;
    Ok((mapping, ManuallyDrop::into_inner(buffer)))
}

/// A ring of four pages, batches of two: every reservation that is lost is missed.
fn ring(world: &World) -> Work {
    let mut ring = StrictRing::new(&world.device, StrictRingConfig::new(4, 4096, 2)).unwrap();
    let hostile = std::sync::Arc::clone(&world.hostile);
    let mut waiting = Waiting::default();
    let mut live: Vec<(RawMapping, Owned)> = Vec::new();
    Box::new(move || {
        // What went wrong left something mapped, or waiting.
        for (mapping, buffer) in live.drain(..) {
            unmap(&mut ring, &mut waiting, mapping, buffer)?;
        }
        ring.commit()?;
        waiting.0.clear();
        for pages in [1, 2, 1] {
            live.push(map(&mut ring, hostile.buffer(pages))?);
        }
        while let Some((mapping, buffer)) = live.pop() {
            unmap(&mut ring, &mut waiting, mapping, buffer)?;
        }
        ring.commit()?;
        waiting.0.clear();
        let arena = ring.arena().ok_or("a ring without addresses")?;
        if arena.in_use() != 0 {
            return Err("reservations are left after a commit".into());
        }
        Ok(())
    })
}

fn list(world: &World) -> Work {
    let mut ring = StrictRing::new(&world.device, StrictRingConfig::new(4, 4096, 1)).unwrap();
    let hostile = std::sync::Arc::clone(&world.hostile);
    Box::new(move || {
        ring.commit()?;
        let buffers = ManuallyDrop::new([hostile.buffer(1), hostile.buffer(1)]);
        let list = buffers.each_ref().map(Owned::segment);
        let mut out = [DmaSegment::default(); 2];
        // SAFETY: no CPU reaches the buffers, and they are given up only where a commit says so.
        let (mapping, _) = unsafe { ring.map_sg(&list, BOTH, &mut out) }?;
        let _ = ring.unmap(mapping)?;
        drop(ManuallyDrop::into_inner(buffers));
        Ok(())
    })
}

fn life(world: &World) -> Work {
    let (device, hostile) = (world.device.clone(), std::sync::Arc::clone(&world.hostile));
    Box::new(move || {
        for _ in 0..2 {
            let mut ring = StrictRing::new(&device, StrictRingConfig::new(4, 4096, 4))?;
            let (mapping, buffer) = map(&mut ring, hostile.buffer(1))?;
            // A drop does not say whether it was confirmed.
            let buffer = ManuallyDrop::new(buffer);
            let _ = ring.unmap(mapping)?;
            ring.commit()?;
            drop(ManuallyDrop::into_inner(buffer));
        }
        Ok(())
    })
}

#[test]
fn rings() {
    all(&[
        Scenario::new("ring", ring),
        Scenario::new("ring, lazily", ring).lazily(),
        Scenario::new("ring: lists", list),
        Scenario::new("ring: life", life),
    ]);
}
