//! The first measurement: it times both ways for each size, on memory of its own. That memory is freed only if it is confirmed that no device reaches
//! it, and leaked otherwise.

use super::AdaptiveRing;
use super::book::{Half, class_of, most_bytes};
use crate::addr::{DmaSegment, PhysAddr, PhysSegment};
use crate::bounce::pool::{Attributes, BouncePool};
use crate::dma::mapping::Choice;
use crate::heap::OutOfMemory;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// Timed mappings of each kind, after some that warm up.
const TIMED: u32 = 4;
const WARM: u32 = 2;

/// A step failed: everything after it stays unmeasured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopped {
    /// All is unmapped, but perhaps not confirmed.
    Ended,
    /// A mapping of the scratch memory may be left, so the memory is leaked.
    Mapped,
}

/// The cost of two readings of a clock: the least of 64 tries.
pub(super) fn cost_of(clock: &impl Fn() -> u64) -> u64 {
    (0..64).map(|_| clock().abs_diff(clock())).min().unwrap_or(0)
}

struct Scratch<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    start: PhysAddr,
    /// The pool had idle buffers before.
    warm: bool,
}

impl<'a, M: Mapper, P: Platform, C: CopyMemory> Scratch<'a, M, P, C> {
    fn new(pool: &'a BouncePool<M, P, C>) -> Option<Self> {
        let warm = pool.usage().cached_bytes > 0;
        Some(Self { start: pool.alloc(pool.threshold())?, pool, warm })
    }

    /// A large buffer of a class; if its ends are to be `shared`, it begins and ends inside a granule.
    fn buffer(&self, class: usize, shared: bool) -> [PhysSegment; 1] {
        let granule = self.pool.domain().granule().bytes();
        let (skip, most) = if shared {
            (granule / 2, self.pool.threshold().saturating_sub(granule).max(granule / 2))
        } else {
            (0, self.pool.threshold())
        };
        [PhysSegment { phys: PhysAddr::new(self.start.get() + skip), len: most_bytes(class).min(most) }]
    }

    /// Ends the measurement. Evicts its buffers; but if others' buffers were idle before, which would go with them, leaves them to the
    /// timer. Frees the memory if it is `confirmed` that no device reaches it, and leaks it if not.
    fn end(self, confirmed: bool) {
        if !self.warm {
            // A later trim frees what this cannot.
            let _ = self.pool.trim(0);
        }
        if confirmed {
            // SAFETY: it came from `alloc` (1); every mapping of it has ended, confirmed, and no device knows of one (2).
            unsafe { self.pool.free(self.start, self.pool.threshold()) };
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// # Errors
    /// [`OutOfMemory`]: unconfirmed ranges leave no room for others' mappings.
    pub(super) fn measure(&mut self) -> Result<(), OutOfMemory> {
        let pool = self.pool.pool().clone();
        let Some(scratch) = Scratch::new(&pool) else { return Ok(()) };
        // Measurements before a failed step count.
        let measured = self.measure_classes(&scratch);
        self.begin();
        // A failed step may have left something in the ring, whose users must find it empty,
        let confirmed = self.commit_ring().is_ok();
        // or must not wait for any of it.
        let room = self.ring.disown();
        scratch.end(confirmed && measured != Err(Stopped::Mapped));
        room
    }

    fn measure_classes(&mut self, scratch: &Scratch<M, P, C>) -> Result<(), Stopped> {
        for class in 0..self.classes {
            for shared in [false, true] {
                self.measure_class(&scratch.buffer(class, shared), (class, shared))?;
            }
        }
        Ok(())
    }

    fn measure_class(&mut self, list: &[PhysSegment], (class, shared): (usize, bool)) -> Result<(), Stopped> {
        let (len, whole) = self.pool.look_at(list);
        if shared == whole || class_of(len, self.classes) != Some(class) {
            return Ok(());
        }
        let class = self.size_of(class, shared);
        let mut view = [DmaSegment::default()];
        for choice in [Choice::Copy, Choice::Map] {
            for round in 0..WARM + TIMED {
                let start = (self.clock)();
                // SAFETY: the memory is this function's (1 to 3), and each mapping ends before the next (4 and 5).
                let mapped = unsafe {
                    self.map_by(choice, (Some(class), shared), list, Attributes::default(), &mut view)
                };
                let map_ns = self.since(start);
                let (mapping, _, failed) = mapped.map_err(|_| Stopped::Ended)?;
                let kind = mapping.kind();
                // A list that the ring may not map, as the device is untrusted, says nothing of the ring.
                let way = if failed { Choice::Map } else { kind.choice() };
                let start = (self.clock)();
                let _ended = self.end(mapping).map_err(|_| Stopped::Mapped)?;
                let unmap_ns = self.since(start);
                let start = (self.clock)();
                let committed = self.commit_ring().map_err(|_| Stopped::Ended)?;
                if committed > 0 {
                    let ns = self.since(start);
                    self.commits.note(ns);
                }
                if round >= WARM {
                    let share = if kind.is_in_ring() { self.commits.share() } else { 0 };
                    let cell = &mut self.sizes[class].cell;
                    cell.note(way, Half::Map, map_ns);
                    cell.note(way, Half::Unmap, unmap_ns.saturating_add(share));
                }
            }
        }
        Ok(())
    }
}
