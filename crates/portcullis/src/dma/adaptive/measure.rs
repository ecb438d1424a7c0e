//! The first measurement: it times both ways for each size, on memory of its own. That memory goes
//! back only if it is confirmed that no device reaches it, and is leaked otherwise.

use super::AdaptiveRing;
use super::book::{Half, class_of, most_bytes};
use crate::addr::{DmaSegment, PhysAddr, PhysSegment};
use crate::bounce::pool::{Attributes, BouncePool};
use crate::dma::mapping::Choice;
use crate::heap::OutOfMemory;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// Mappings of each kind that are timed, after some that warm up.
const TIMED: u32 = 4;
const WARM: u32 = 2;

/// A step failed: what is not measured by then stays unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopped {
    /// What was mapped is unmapped, but the hardware may still have to confirm that.
    Ended,
    /// A mapping of the scratch memory may still be there, so the memory is leaked.
    Mapped,
}

/// Returns what two readings of a clock take by themselves: the least of 64 tries.
pub(super) fn cost_of(clock: &impl Fn() -> u64) -> u64 {
    (0..64).map(|_| clock().abs_diff(clock())).min().unwrap_or(0)
}

/// Memory out of a pool, as large as its threshold, on which mappings are tried.
struct Scratch<'a, M: Mapper, P: Platform, C: CopyMemory> {
    pool: &'a BouncePool<M, P, C>,
    start: PhysAddr,
    /// Buffers waited in the pool before.
    warm: bool,
}

impl<'a, M: Mapper, P: Platform, C: CopyMemory> Scratch<'a, M, P, C> {
    /// `None` where there is no memory.
    fn new(pool: &'a BouncePool<M, P, C>) -> Option<Self> {
        let warm = pool.usage().cached_bytes > 0;
        Some(Self { start: pool.alloc(pool.threshold())?, pool, warm })
    }

    /// A large buffer of a class, which begins and ends inside a granule if its ends are to be `shared`.
    fn buffer(&self, class: usize, shared: bool) -> [PhysSegment; 1] {
        let granule = self.pool.domain().granule().bytes();
        let (skip, most) = if shared {
            (granule / 2, self.pool.threshold().saturating_sub(granule).max(granule / 2))
        } else {
            (0, self.pool.threshold())
        };
        [PhysSegment { phys: PhysAddr::new(self.start.get() + skip), len: most_bytes(class).min(most) }]
    }

    /// Ends the measurement. Buffers that it needed go back; but if others' buffers waited before,
    /// which would go with them, they are left to the timer. The memory goes back if it is
    /// `confirmed` that no device reaches it, and is leaked if not.
    fn end(self, confirmed: bool) {
        if !self.warm {
            // What cannot be given back now, a later trim gives back.
            let _ = self.pool.trim(0);
        }
        if confirmed {
            // SAFETY: it came from `alloc`, every mapping of it has ended, and no device knows of one.
            unsafe { self.pool.free(self.start, self.pool.threshold()) };
        }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// # Errors
    /// [`OutOfMemory`]: what the hardware has not confirmed leaves no room for others' mappings.
    pub(super) fn measure(&mut self) -> Result<(), OutOfMemory> {
        let pool = self.pool.pool().clone();
        let Some(scratch) = Scratch::new(&pool) else { return Ok(()) };
        // What was measured before a step failed counts.
        let measured = self.measure_classes(&scratch);
        self.begin();
        // A step that failed may have left something in the ring, whose users are to find it empty.
        let confirmed = self.commit_ring().is_ok();
        // Or else to wait for nothing of theirs.
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

    /// Measures both ways for a list of a class, if such lists occur.
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
                // SAFETY: the memory is this function's, and each mapping ends before the next.
                let mapped = unsafe {
                    self.map_by(choice, (Some(class), shared), list, Attributes::default(), &mut view)
                };
                let map_ns = self.since(start);
                let (mapping, _, failed) = mapped.map_err(|_| Stopped::Ended)?;
                let kind = mapping.kind();
                // What the ring may not map, as the device is untrusted, says nothing of the ring.
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
