//! Whoever finds the pool full is told of the free that comes, wherever it goes.

use std::alloc::Layout;
use std::sync::Weak;

use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::addr::{Direction, PhysAddr};
use portcullis::bounce::swiotlb::{BounceError, Bounced, Constraints, Swiotlb, SwiotlbConfig};
use portcullis::domain::PhysSegment;
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, LocalSlot, Platform, PlatformEvents, Table};

::loom::thread_local! {
    /// The CPU that a thread is, or none.
    static CPU: std::cell::Cell<Option<usize>> = std::cell::Cell::new(None);
}

/// Two CPUs with full fences, as the model checker knows no others.
struct Cpus;

impl Platform for Cpus {
    fn slots(&self) -> usize {
        2
    }

    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        f(CPU.with(|cpu| cpu.get()).map(LocalSlot::new).as_ref())
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) {}

    fn wake_at(&self, _: u64) {}
}

/// One frame, in which nothing is looked at.
struct OneFrame;

// SAFETY: the frame is real memory, zeroed and aligned; the tests' pools have one area, which takes it once.
unsafe impl Frames for OneFrame {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        assert_eq!(count, 1);
        let layout = Layout::from_size_align(FRAME_SIZE as usize, FRAME_SIZE as usize).ok()?;
        // SAFETY: the layout is not of size 0.
        let frame = unsafe { std::alloc::alloc_zeroed(layout) };
        (!frame.is_null()).then(|| PhysAddr::new(frame.addr() as u64))
    }

    unsafe fn free(&self, _: PhysAddr, _: usize) {
        // A page for each execution: leaked, as nobody reads or writes it.
    }

    unsafe fn table(&self, _: PhysAddr) -> &Table {
        unreachable!("a pool has no tables")
    }
}

// SAFETY: what is copied is not looked at here.
unsafe impl CopyMemory for OneFrame {
    unsafe fn copy(&self, _: PhysAddr, _: PhysAddr, _: u64) {}

    unsafe fn zero(&self, _: PhysAddr, _: u64) {}
}

type Pool = Swiotlb<Cpus, OneFrame>;

fn map(pool: &Pool, len: u64) -> Result<Bounced, BounceError> {
    let phys = PhysAddr::new(1 << 40);
    // SAFETY: nothing is copied.
    unsafe { pool.map(PhysSegment { phys, len }, Direction::ToDevice, &Constraints::new()) }
}

fn unmap(pool: &Pool, mapped: Bounced) {
    // SAFETY: each mapping is ended once.
    unsafe { pool.unmap(mapped.phys, mapped.len) }.unwrap();
}

/// One CPU frees the slot that the other waits for: onto its list, while that is being emptied, or past it.
fn told(scarce: bool) {
    let mut builder = ::loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    builder.check(move || {
        let config = SwiotlbConfig {
            slot_bytes: 64,
            area_bytes: 4096,
            min_bytes: 4096,
            max_bytes: 4096,
            ..SwiotlbConfig::default()
        };
        let pool = Arc::new(Swiotlb::new(Cpus, OneFrame, &config).unwrap());
        CPU.with(|cpu| cpu.set(Some(0)));
        // The lists of this CPU are in use, and all that is free is two runs of half of the area.
        let halves = [2048, 2048].map(|len| map(&pool, len).unwrap());
        if scarce {
            assert!(map(&pool, 64).is_err());
        }
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || match map(&pool, 2048) {
                Ok(mapped) => {
                    unmap(&pool, mapped);
                    None
                }
                Err(BounceError::Pressure(pressure)) => Some(pressure.since),
                Err(error) => panic!("{error}"),
            })
        };
        unmap(&pool, halves[0]);
        if let Some(since) = other.join().unwrap() {
            assert!(pool.freed_since(since), "whoever waits was not told");
            CPU.with(|cpu| cpu.set(Some(1)));
            unmap(&pool, map(&pool, 2048).unwrap());
        }
        unmap(&pool, halves[1]);
        assert_eq!(pool.usage().mapped, 0);
    });
}

#[test]
fn a_free_is_told_while_lists_are_in_use() {
    told(false);
}

#[test]
fn a_free_is_told_while_lists_are_not() {
    told(true);
}
