//! Unmaps of an adaptive ring.

use super::AdaptiveRing;
use super::book::Half;
use crate::dma::mapping::Kind;
use crate::dma::{Ended, NotUnmapped, RawMapping};
use crate::domain::Rule;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// Ends a mapping; one in the ring with its batch.
    ///
    /// Cost and context as for [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap), by a strict policy, or for [`StrictRing::unmap`](crate::dma::StrictRing::unmap).
    ///
    /// # Errors
    /// [`NotUnmapped`]; a mapping of another ring comes back unchanged. What the pool has mapped and the hardware has not confirmed ends with a flush
    /// of the domain, not with a commit of this ring.
    #[inline]
    pub fn unmap(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        if mapping.queue() != self.number() {
            return Err(NotUnmapped::foreign(mapping));
        }
        self.commits.count();
        let commits = mapping.kind().is_in_ring() && self.ring.waiting() + 1 >= self.batch;
        if commits || mapping.timed().is_some() {
            return self.unmap_timed(mapping);
        }
        self.end(mapping)
    }

    /// Ends an untimed mapping of this ring.
    #[inline]
    pub(super) fn end(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let ended = match mapping.kind() {
            Kind::Ring => self.ring.unmap(mapping),
            Kind::Cut => self.end_cut(mapping),
            Kind::Pool(_) => {
                // SAFETY: `unmap`'s clauses 1 and 3: this has the only token of the mapping, which syncs borrow, so no other unmap or sync runs now
                // or later. Clause 2: `map`'s clauses 1 and 3 hold until the unmap has returned.
                return match unsafe { self.pool.pool().unmap_by(Rule::Strictly, mapping.iova, mapping.word) }
                {
                    Ok(()) => Ok(Ended::Done(())),
                    Err(error) => Err(NotUnmapped { mapping: None, waits: false, error }),
                };
            }
            Kind::Alone | Kind::Swiotlb { .. } | Kind::NotCoherent => Err(NotUnmapped::foreign(mapping)),
        };
        if matches!(ended, Ok(Ended::Flushed(()))) {
            self.ends.committed();
        }
        ended
    }

    fn end_cut(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let number = mapping.list();
        self.ends.wait(number);
        let mut ended = self.ring.unmap(mapping.uncut());
        if let Err(NotUnmapped { mapping: back @ Some(_), .. }) = &mut ended {
            *back = back.take().map(|mapping| mapping.cut(number));
            self.ends.stay(number);
        } else {
            // SAFETY: clauses 1 and 2 as for the pool. Clause 3: the driver unmaps after the device is done; its commit is not reported yet.
            unsafe { self.ends.end(number) };
        }
        ended
    }

    /// Ends a mapping, and times it or the commit that it completes.
    #[cold]
    fn unmap_timed(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let (timed, in_ring) = (mapping.timed(), mapping.kind().is_in_ring());
        let start = (self.clock)();
        let result = self.end(mapping.with_timed(None));
        let mut ns = self.since(start);
        if matches!(result, Ok(Ended::Flushed(()))) {
            self.commits.note(ns);
            // Its own time is a part of the commit's, of which it counts only its share.
            ns = 0;
        }
        if let (Some((class, way)), Ok(_)) = (timed, &result) {
            let share = if in_ring { self.commits.share() } else { 0 };
            self.sizes[usize::from(class)].cell.note(way, Half::Unmap, ns.saturating_add(share));
        }
        result
    }
}
