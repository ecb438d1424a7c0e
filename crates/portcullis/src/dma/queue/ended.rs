//! Unmaps and commits by address.

use super::lane::{Lane, Unmapped};
use super::lanes::by_lane;
use super::{AnyLane, DmaUnmapError, Machine, Queue};
use crate::addr::Iova;
use crate::dma::mapping::Kind;
use crate::dma::told::Told;
use crate::dma::{DmaBuffer, Ended, NotUnmapped, RawMapping};

impl<X: Machine, B: DmaBuffer> Queue<X, B> {
    /// Ends a mapping, or adds it to a batch. The unmap that completes a batch commits it.
    ///
    /// It is safe: it only removes access, and copies only to the mapping's own memory, which clause 2 of [`map_raw`](Self::map_raw) covers.
    ///
    /// Cost and context as for the type behind the strategy: [`DmaDevice::unmap_single`](crate::dma::DmaDevice::unmap_single), and with the feature
    /// `parts` those of `RawBatch`, `StrictRing::unmap`, `BouncePool::unmap`. Allocates nothing. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`NotUnmapped`]. A mapping of another queue comes back unchanged.
    #[inline(always)]
    pub fn unmap_raw(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        // Calls get its words, not its address: see `RawMapping`.
        let RawMapping { iova, word, tag } = mapping;
        let mapping = RawMapping { iova, word, tag };
        match &mut self.lane {
            AnyLane::Ring(ring) if tag == self.common.number | Kind::RING => match ring.unmap(mapping) {
                Ok(Ended::Flushed(())) => self.flushed(),
                ended => ended,
            },
            AnyLane::Direct(_) if tag == self.common.number | Kind::ALONE => {
                let Some(range) = self.common.pages(&mapping) else { return Ok(Ended::Done(())) };
                let ended = self.common.device.end_beside(range, mapping.beside());
                self.common.ended(ended)
            }
            AnyLane::Batch(_) if tag == self.common.number | Kind::ALONE => {
                self.unmap_in_batch(iova, word, tag)
            }
            lane => {
                if tag == self.common.number | Kind::RING
                    && let AnyLane::Auto(lane) = lane
                    && let Some(range) = self.common.pages(&mapping)
                    && lane.unmap_fast(range, mapping.beside())
                {
                    return Ok(Ended::Pending);
                }
                self.unmap_otherwise(iova, word, tag)
            }
        }
    }

    #[inline(never)]
    fn unmap_otherwise(&mut self, iova: Iova, word: u64, tag: u64) -> Unmapped {
        let mapping = RawMapping { iova, word, tag };
        if mapping.queue() != self.common.number {
            return Err(NotUnmapped::foreign(mapping));
        }
        // SAFETY: clause 1: the number is this queue's, and a mapping is unmapped once, as it cannot be copied.
        match by_lane!(&mut self.lane, lane => unsafe { lane.unmap_for(&mut self.common, mapping) }) {
            Ok(Ended::Flushed(())) => self.flushed(),
            ended => ended,
        }
    }

    #[inline(never)]
    fn unmap_in_batch(&mut self, iova: Iova, word: u64, tag: u64) -> Unmapped {
        let mapping = RawMapping { iova, word, tag };
        let AnyLane::Batch(batch) = &mut self.lane else { return Err(NotUnmapped::foreign(mapping)) };
        // SAFETY: clause 1: `unmap_raw` has compared the number, and a mapping is unmapped once, as it cannot be copied.
        match unsafe { batch.unmap_for(&mut self.common, mapping) } {
            Ok(Ended::Flushed(())) => self.flushed(),
            ended => ended,
        }
    }

    /// After a batch's commit.
    #[inline]
    fn flushed(&mut self) -> Unmapped {
        if self.common.owed > 0
            && let Err(error) = self.pay()
        {
            // The batch is committed, but its buffers wait for the flush with those of the owed unmaps.
            return Err(NotUnmapped::of_commit(None, error));
        }
        Ok(Ended::Flushed(()))
    }

    /// Flushes the domain for owed unmaps (`Common::owed`), after a commit. If that fails, the next commit reports this one's mappings.
    #[cold]
    fn pay(&mut self) -> Result<(), DmaUnmapError> {
        // Before the flush, which may panic: then the next commit reports them.
        self.told().into_iter().for_each(Told::take_back);
        self.common.device.domain().flush()?;
        self.told().into_iter().for_each(|told| _ = told.commit(0));
        self.common.owed = 0;
        Ok(())
    }

    fn told(&mut self) -> Option<&mut Told> {
        by_lane!(&mut self.lane, lane => lane.told_for(&self.common))
    }

    /// Waits until no device reaches the mappings that [wait](Self::waiting) for a commit, for a queue that falls idle. Returns their number: that of
    /// [`waiting`](Self::waiting). Returns at once if nothing waits, unless a map or a measurement of [`auto`](super::QueueConfig::auto) left
    /// something unconfirmed. Does not flush mappings that ended lazily.
    ///
    /// Context: waits for one submission to the hardware, and for a flush of the domain if an earlier unmap was not confirmed. The caller
    /// holds no lock and no CPU.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: everything still waits, and can be committed again.
    pub fn commit_raw(&mut self) -> Result<usize, DmaUnmapError> {
        let committed = by_lane!(&mut self.lane, lane => lane.commit_for(&self.common))?;
        let owed = self.common.owed;
        if owed > 0 {
            self.pay()?;
        }
        Ok(committed + owed)
    }
}
