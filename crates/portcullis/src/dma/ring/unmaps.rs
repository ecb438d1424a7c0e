//! Unmaps: each range waits, joined to the one before if they are adjacent, until its batch is committed.

use alloc::vec::Vec;

use super::StrictRing;
use crate::addr::{Iova, IovaRange};
use crate::dma::{Ended, MOST_IN_BATCH, NotUnmapped, RawMapping};
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::Platform;

impl<M: Mapper, P: Platform> StrictRing<M, P> {
    /// Ends a descriptor's mapping. The unmap that completes a batch commits it, with one wait for hardware; any other takes O(1).
    ///
    /// If a full batch waits, as its commit failed, this commits it first. The descriptor is then the first of the next batch, whose commit reports
    /// both: until then all of them are [waiting](Self::waiting).
    ///
    /// Context: waits for hardware when a batch is complete. Allocates nothing. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`NotUnmapped`]: unconfirmed descriptors still wait. The mapping comes back unchanged if it is another ring's, or if a full batch waits whose
    /// commit has now failed again.
    #[inline(always)]
    pub fn unmap(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        // As in `map_sg`.
        let RawMapping { iova, word, tag } = mapping;
        let mapping = RawMapping { iova, word, tag };
        if let Some(range) = mapping.pages(self.device.domain().granule())
            && tag == self.number
            && self.unmapped + 1 < self.batch
        {
            self.wait_for_batch(range, mapping.beside());
            return Ok(Ended::Pending);
        }
        self.unmap_last(iova, word, tag)
    }

    #[inline(never)]
    pub(in crate::dma) fn wait_for_batch(&mut self, range: IovaRange, neighbours: u64) {
        match self.waiting.last_mut().and_then(|run| Some((run.joined(range)?, run))) {
            Some((joined, run)) => *run = joined,
            None => self.waiting.push(range),
        }
        self.closing += neighbours;
        self.unmapped += 1;
    }

    /// For a descriptor that may be the last of its batch, or another ring's.
    #[inline(never)]
    fn unmap_last(
        &mut self,
        iova: Iova,
        word: u64,
        tag: u64,
    ) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let mapping = RawMapping { iova, word, tag };
        if tag != self.number {
            return Err(NotUnmapped::foreign(mapping));
        }
        match mapping.pages(self.device.domain().granule()) {
            Some(range) => {
                if self.unmapped >= self.batch
                    && let Err(error) = self.commit_before(range)
                {
                    return Err(NotUnmapped::of_commit(Some(mapping), error));
                }
                self.wait_for_batch(range, mapping.beside());
            }
            None => self.unmapped += 1,
        }
        if self.unmapped < self.batch {
            return Ok(Ended::Pending);
        }
        match self.commit() {
            Ok(_) => Ok(Ended::Flushed(())),
            Err(error) => Err(NotUnmapped::of_commit(None, error)),
        }
    }

    /// Counts a map of `range`. The domain gets the counts with the next commit, or after as many maps as a batch has.
    #[inline]
    pub(super) fn count(&mut self, range: IovaRange, neighbours: u64) {
        // If a call below panics, the next commit clears the range.
        let torn = Guard::new(|| hold(&mut self.waiting, range));
        self.tally.maps += 1;
        if neighbours > 0 {
            if self.tally.opened == 0 {
                self.tally.since_ns = self.device.domain().platform().now_ns();
            }
            self.tally.opened += neighbours;
        }
        if self.tally.maps >= self.batch as u64 {
            self.device.domain().count_tally(core::mem::take(&mut self.tally));
        }
        torn.done();
    }
}

/// Leaves a range, which may still be mapped, to the next commit, which ends it with the batch. Without memory for that, the range stays reserved for
/// ever, perhaps mapped.
#[cold]
#[inline(never)]
pub(super) fn hold(waiting: &mut Vec<IovaRange>, range: IovaRange) {
    // Leaves room for a batch of any size.
    if waiting.try_reserve(MOST_IN_BATCH + 2).is_ok() {
        waiting.push(range);
    }
}
