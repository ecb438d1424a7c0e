//! The first measurement: it times both ways for each size, on scratch memory that it frees only if the hardware has confirmed that no device reaches
//! it.

use super::AdaptiveRing;
use super::book::{Half, class_of, most_bytes};
use crate::addr::{DmaSegment, PhysAddr, PhysSegment};
use crate::bounce::pool::{Attributes, BouncePool};
use crate::dma::mapping::Choice;
use crate::heap::OutOfMemory;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// Timed mappings of each kind, after `WARM` untimed ones.
const TIMED: u32 = 4;
const WARM: u32 = 2;

/// A step failed, and all after it stays unmeasured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopped {
    /// All is unmapped, but perhaps not confirmed.
    Ended,
    /// A mapping of the scratch memory may be left, which is leaked.
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

    /// A large buffer of a class; with `shared` ends it begins and ends inside a granule.
    fn buffer(&self, class: usize, shared: bool) -> [PhysSegment; 1] {
        let granule = self.pool.domain().granule().bytes();
        let (skip, most) = if shared {
            (granule / 2, self.pool.threshold().saturating_sub(granule).max(granule / 2))
        } else {
            (0, self.pool.threshold())
        };
        [PhysSegment { phys: PhysAddr::new(self.start.get() + skip), len: most_bytes(class).min(most) }]
    }

    /// Evicts its buffers, unless the pool had idle buffers before, which a trim would evict, too: then the timer does it. Frees the memory if it is
    /// `confirmed` that no device reaches it, or leaks it.
    fn end(self, confirmed: bool) {
        if !self.warm {
            // A later trim frees what this cannot.
            let _ = self.pool.trim(0);
        }
        if confirmed {
            // SAFETY: it came from `alloc` (1); every mapping of it has ended, confirmed (2).
            unsafe { self.pool.free(self.start, self.pool.threshold()) };
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// After [`OutOfMemory`] unconfirmed ranges leave no room for callers' mappings.
    pub(super) fn measure(&mut self) -> Result<(), OutOfMemory> {
        let pool = self.pool.pool().clone();
        let Some(scratch) = Scratch::new(&pool) else { return Ok(()) };
        // Measurements before a failed step count.
        let measured = self.measure_classes(&scratch);
        self.begin();
        // A failed step may have left ranges in the ring. The commit ends them. The ring disowns each range that the hardware does not confirm, so that
        // no caller waits for it.
        let confirmed = self.commit_ring().is_ok();
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
