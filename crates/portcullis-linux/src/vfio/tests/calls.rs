//! System calls of each use of a buffer: none, if a mapping of it stays.

use std::sync::atomic::Ordering;

use portcullis::addr::{DeviceId, Direction, PhysSegment};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{DmaDomain, DmaMask, DomainBuilder, QueueConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::std_platform::StdPlatform;

#[path = "../../../../portcullis/tests/dice/mod.rs"]
mod dice;

use dice::Dice;

use super::fake::{Fake, PAGE, Way};
use crate::heap::{Heap, HeapBuffer};
use crate::registration::{Keep, RegistrationCache, RegistrationLimits};
use crate::vfio::Machine;

const ROUNDS: usize = 100;

#[test]
fn what_stays_mapped_costs_no_call() {
    for way in [Way::Iommufd, Way::Type1] {
        let fake = Fake::new(way);
        let pool = PoolConfig { idle_ns: u64::MAX, ..PoolConfig::default() };
        let builder = DomainBuilder::new(fake.mapper()).bounce(Heap, pool);
        let domain = builder.build_as::<Machine>(StdPlatform::new()).unwrap();
        let device = domain.attach(DeviceId(8), DmaMask::BITS_64).unwrap();
        let calls = || fake.calls.load(Ordering::Relaxed);
        // Four buffers are mapped at a time; a ring ends four mappings with one call.
        for (config, wanted) in [
            (QueueConfig::direct(), 8 * ROUNDS),
            (QueueConfig::ring(8, 4 * PAGE).batch(4), 5 * ROUNDS),
            (QueueConfig::bounce(), 0),
        ] {
            let mut queue = device.queue(config).unwrap();
            let mut buffers: Vec<_> = (0..4).map(|_| HeapBuffer::new(4 * PAGE as usize).unwrap()).collect();
            let mut round = || {
                let mapped: Vec<_> = buffers
                    .drain(..)
                    .map(|buffer| queue.map(buffer, Direction::FromDevice).unwrap())
                    .collect();
                for mapping in mapped {
                    queue.unmap(mapping).unwrap().for_each(|buffer| buffers.push(buffer));
                }
                assert_eq!(buffers.len(), 4);
            };
            (0..ROUNDS).for_each(|_| round());
            let before = calls();
            (0..ROUNDS).for_each(|_| round());
            assert_eq!(calls() - before, wanted, "{config:?} {way:?}");
        }

        let limits = RegistrationLimits { entries: 4, bytes: 16 * PAGE };
        let cache = RegistrationCache::new(device.dma().clone(), limits).unwrap();
        let buffers: Vec<_> = (0..4).map(|_| HeapBuffer::new(4 * PAGE as usize).unwrap()).collect();
        let before = calls();
        for buffer in buffers.iter().cycle().take(ROUNDS) {
            let memory = PhysSegment { phys: buffer.phys(), len: 4 * PAGE };
            // SAFETY: no device reaches anything through a fake kernel.
            let held = unsafe { cache.acquire(memory, Direction::FromDevice, Keep::UntilForgotten) };
            cache.release(held.unwrap()).unwrap();
        }
        assert_eq!(calls() - before, 4, "one for each buffer: {way:?}");
        drop(cache);
        // The usage counts the kernel's calls.
        assert_eq!(domain.space().mapper().usage().calls, calls() as u64);
    }
}

/// An area is registered once, with its owner's consent; its buffers are shared one by one.
#[test]
fn buffers_of_a_registered_area_cost_no_call() {
    const BUFFERS: u64 = 1024;
    for way in [Way::Iommufd, Way::Type1] {
        let fake = Fake::new(way);
        let space = Domain::new(StdPlatform::new(), fake.mapper(), Policy::Strict).unwrap();
        let domain = DmaDomain::<Machine>::over(space, Some(Heap)).unwrap();
        let device = domain.attach(DeviceId(8), DmaMask::BITS_64).unwrap();
        let area = HeapBuffer::new((BUFFERS * PAGE) as usize).unwrap();
        let limits = RegistrationLimits { entries: 1, bytes: BUFFERS * PAGE };
        let cache = RegistrationCache::new(device.dma().clone(), limits).unwrap();
        let acquire = |at: u64, len| {
            let memory = PhysSegment { phys: area.phys().checked_add(at).unwrap(), len };
            // SAFETY: no device reaches anything through a fake kernel.
            unsafe { cache.acquire(memory, Direction::FromDevice, Keep::UntilForgotten) }.unwrap()
        };
        cache.release(acquire(0, BUFFERS * PAGE)).unwrap();
        // In reverse: the order does not matter.
        let held: Vec<_> = (0..BUFFERS).rev().map(|number| acquire(number * PAGE, PAGE)).collect();
        for (number, held) in (0..BUFFERS).rev().zip(&held) {
            assert_eq!(fake.reaches(held.iova().get()).unwrap().0, area.phys().get() + number * PAGE);
        }
        assert_eq!((fake.calls.load(Ordering::Relaxed), fake.count()), (1, 1));
        held.into_iter().for_each(|held| assert!(cache.release(held).is_ok()));
        drop(cache);
        assert_eq!((fake.calls.load(Ordering::Relaxed), fake.count()), (2, 0));
    }
}

/// Requests like those of other drivers, by their place in memory.
///
/// - vroom (`memory.rs`): blocks of 2 MiB that are mapped when they are allocated, and never unmapped; a request has any pages of one.
/// - libvfn (`vfn/iommu`): buffers of the program, each mapped at its first use and found by its address afterwards, also by a part of it.
/// - SPDK (`spdk_mem_register`, `spdk_vtophys`): adjacent regions of 2 MiB, all registered at the start; elements of pools of several sizes
///   lie anywhere in them, also across the boundaries.
#[test]
fn the_patterns_of_other_drivers_cost_no_call() {
    const HUGE: u64 = 2 << 20;
    let mut dice = Dice::new(1);
    let mut draw = |below| dice.below(below);
    // The registered blocks of each driver.
    let vroom = vec![HUGE; 3];
    let libvfn = vec![PAGE, 3 * PAGE, 16 * PAGE, 128 << 10, 1 << 20, 5 * PAGE];
    let spdk = vec![8 * HUGE];
    for (who, sizes) in [("vroom", vroom), ("libvfn", libvfn), ("SPDK", spdk)] {
        let fake = Fake::new(Way::Type1);
        let space = Domain::new(StdPlatform::new(), fake.mapper(), Policy::Strict).unwrap();
        let domain = DmaDomain::<Machine>::over(space, Some(Heap)).unwrap();
        let device = domain.attach(DeviceId(8), DmaMask::BITS_64).unwrap();
        let limits = RegistrationLimits { entries: 16, bytes: 64 << 20 };
        let cache = RegistrationCache::new(device.dma().clone(), limits).unwrap();
        let blocks: Vec<_> = sizes.iter().map(|len| HeapBuffer::new(*len as usize).unwrap()).collect();
        let acquire = |block: usize, at: u64, len: u64| {
            let phys = blocks[block].phys().checked_add(at).unwrap();
            // SAFETY: no device reaches anything through a fake kernel.
            let held = unsafe {
                cache.acquire(PhysSegment { phys, len }, Direction::Bidirectional, Keep::UntilForgotten)
            };
            let held = held.unwrap();
            assert_eq!(
                fake.reaches(held.iova().get()).map(|(address, _)| address),
                Some(phys.get()),
                "{who}"
            );
            held
        };
        for (block, len) in sizes.iter().enumerate() {
            cache.release(acquire(block, 0, *len)).unwrap();
        }
        let first = fake.calls.load(Ordering::Relaxed);
        assert_eq!((first, fake.count()), (sizes.len(), sizes.len()), "{who}: a mapping for each block");
        // A queue has up to 32 outstanding.
        let mut running = std::collections::VecDeque::new();
        for _ in 0..10_000 {
            let block = draw(sizes.len() as u64) as usize;
            let at = draw(sizes[block] / 512) * 512;
            let len = 1 + draw((sizes[block] - at).min(128 << 10));
            running.push_back(acquire(block, at, len));
            if running.len() > 32 {
                cache.release(running.pop_front().unwrap()).unwrap();
            }
        }
        running.into_iter().for_each(|held| assert!(cache.release(held).is_ok()));
        assert_eq!(fake.calls.load(Ordering::Relaxed), first, "{who}: 10,000 requests");
    }
}
