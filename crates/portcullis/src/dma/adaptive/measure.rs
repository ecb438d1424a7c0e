//! The first measurement: both ways, each size, on memory that nobody else has.

use super::AdaptiveRing;
use crate::bounce::adaptive::Choice;
use crate::bounce::adaptive::book::Half;
use crate::bounce::adaptive::measure::{Scratch, Stopped, TIMED, WARM};
use crate::bounce::pool::Attributes;
use crate::dma::DmaSegment;
use crate::domain::PhysSegment;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    pub(super) fn measure(&mut self) {
        let pool = alloc::sync::Arc::clone(self.pool.pool());
        let Some(scratch) = Scratch::new(&pool) else { return };
        // What was measured before something failed is as good as before.
        let measured =
            (0..self.sizes.len()).try_for_each(|class| self.measure_class(&scratch.buffer(class), class));
        self.sizes.iter_mut().for_each(|size| _ = size.cell.begin());
        // What failed may have left something in the ring, whose users are to find it empty.
        let confirmed = self.ring.commit().is_ok();
        scratch.end(confirmed && measured != Err(Stopped::Mapped));
    }

    fn measure_class(&mut self, list: &[PhysSegment], class: usize) -> Result<(), Stopped> {
        let mut view = [DmaSegment::default()];
        for choice in [Choice::Copy, Choice::Map] {
            for round in 0..WARM + TIMED {
                let start = (self.clock)();
                // SAFETY: the memory is this function's, and each mapping ends before the next.
                let mapped = unsafe { self.map_by(choice, list, Attributes::default(), &mut view) };
                let map_ns = self.since(start);
                let (course, _, failed) = mapped.map_err(|_| Stopped::Ended)?;
                // One that an untrusted device may not be given says nothing of the ring.
                let way = if failed { Choice::Map } else { course.choice() };
                let in_ring = course.is_in_ring();
                let start = (self.clock)();
                let _ended = self.end(course).map_err(|_| Stopped::Mapped)?;
                let unmap_ns = self.since(start);
                let start = (self.clock)();
                let committed = self.ring.commit().map_err(|_| Stopped::Ended)?;
                if committed > 0 {
                    let ns = self.since(start);
                    self.commits.note(ns);
                }
                if round >= WARM {
                    let share = if in_ring { self.commits.share() } else { 0 };
                    let cell = &mut self.sizes[class].cell;
                    cell.note(way, Half::Map, map_ns);
                    cell.note(way, Half::Unmap, unmap_ns.saturating_add(share));
                }
            }
        }
        Ok(())
    }
}
