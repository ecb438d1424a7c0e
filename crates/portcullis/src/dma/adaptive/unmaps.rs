//! Unmaps of an adaptive ring: copies end at once, mappings in the ring with their batch.

use super::AdaptiveRing;
use super::book::Half;
use crate::bounce::pool::Rule;
use crate::dma::mapping::Kind;
use crate::dma::{Ended, NotUnmapped, RawMapping};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

impl<M: Mapper, P: Platform, C: CopyMemory, K: Fn() -> u64> AdaptiveRing<M, P, C, K> {
    /// Ends a mapping: at once if it was copied; with its batch if it was mapped.
    ///
    /// Cost and context as for [`BouncePool::unmap`](crate::bounce::pool::BouncePool::unmap), by a strict policy, or for [`StrictRing::unmap`](crate::dma::StrictRing::unmap).
    ///
    /// # Errors
    /// [`NotUnmapped`]; a mapping of another ring comes back with it, unchanged. No commit of this ring ends what the pool has mapped and the
    /// hardware has not confirmed: a flush of the domain does.
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

    /// Ends a mapping of this ring that [is not timed](RawMapping::with_timed).
    #[inline]
    pub(super) fn end(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let ended = match mapping.kind() {
            Kind::Ring => self.ring.unmap(mapping),
            Kind::Cut => self.end_cut(mapping),
            Kind::Pool(_) => {
                // SAFETY: `unmap`'s clauses 1 and 3: this had the only token of the mapping, so no other unmap and, as they borrow it, no sync runs
                // now or later. Clause 2: `map`'s clauses 1 and 3 hold until the unmap has returned.
                return match unsafe { self.pool.pool().unmap_by(Rule::Strictly, mapping.iova, mapping.word) }
                {
                    Ok(()) => Ok(Ended::Done(())),
                    // No commit of the ring ends it.
                    Err(error) => Err(NotUnmapped { mapping: None, waits: false, error }),
                };
            }
            // None that this makes.
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

    /// Ends a mapping and takes the time: its own, or that of the commit to which it may lead.
    #[cold]
    fn unmap_timed(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let (timed, in_ring) = (mapping.timed(), mapping.kind().is_in_ring());
        let start = (self.clock)();
        let result = self.end(mapping.with_timed(None));
        let mut ns = self.since(start);
        if matches!(result, Ok(Ended::Flushed(()))) {
            self.commits.note(ns);
            // Its own time is a part of the commit's: only its share of that counts for it.
            ns = 0;
        }
        if let (Some((class, way)), Ok(_)) = (timed, &result) {
            let share = if in_ring { self.commits.share() } else { 0 };
            self.sizes[usize::from(class)].cell.note(way, Half::Unmap, ns.saturating_add(share));
        }
        result
    }
}
