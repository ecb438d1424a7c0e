//! Unmaps: at once, with their batch, or with a later flush of the domain.

use super::swiotlb::Copied;
use super::{DmaUnmapError, Lane, Machine, Queue};
use crate::addr::{Iova, IovaRange};
use crate::bounce::pool::Rule;
use crate::dma::mapping::Kind;
use crate::dma::told::Told;
use crate::dma::{DmaBuffer, Ended, NotUnmapped, RawMapping};
use crate::domain::UnmapError;

impl<X: Machine, B: DmaBuffer> Queue<X, B> {
    /// Ends a mapping, or has it wait for its batch. The last of a batch commits it.
    ///
    /// It is safe, as it closes, and copies only to the mapping's own memory, by clause 2 of [`map_raw`](Self::map_raw).
    ///
    /// Cost and context as for the strategy's part: [`DmaDevice::unmap_single`](crate::dma::DmaDevice::unmap_single), and with the feature `parts`
    /// `RawBatch`, `StrictRing::unmap`, `BouncePool::unmap`. Allocates nothing. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`NotUnmapped`]. A mapping of another queue comes back with it, unchanged.
    #[inline(always)]
    pub fn unmap_raw(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        // Functions that are not inlined get its words, not its address: see `RawMapping`.
        let RawMapping { iova, word, tag } = mapping;
        let mapping = RawMapping { iova, word, tag };
        match &mut self.lane {
            Lane::Ring(ring) if tag == self.number | Kind::RING => match ring.unmap(mapping) {
                Ok(Ended::Flushed(())) => self.flushed(),
                ended => ended,
            },
            Lane::Direct if tag == self.number | Kind::ALONE => {
                let Some(range) = mapping.pages(self.device.domain().granule()) else {
                    return Ok(Ended::Done(()));
                };
                let ended = self.device.end_beside(range, mapping.beside());
                self.ended_alone(ended)
            }
            Lane::Batch(_) if tag == self.number | Kind::ALONE => self.unmap_in_batch(iova, word, tag),
            lane => {
                if tag == self.number | Kind::RING
                    && let Lane::Auto(lane) = lane
                    && let Some(range) = mapping.pages(self.device.domain().granule())
                    && lane.unmap_fast(range, mapping.beside())
                {
                    return Ok(Ended::Pending);
                }
                self.unmap_otherwise(iova, word, tag)
            }
        }
    }

    #[inline(never)]
    fn unmap_otherwise(
        &mut self,
        iova: Iova,
        word: u64,
        tag: u64,
    ) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let mapping = RawMapping { iova, word, tag };
        if mapping.queue() != self.number {
            return Err(NotUnmapped::foreign(mapping));
        }
        // As where a queue maps directly: a device's own policy holds for all of its mappings.
        let rule = Rule::Policy(Some(self.device.exception()));
        match (&mut self.lane, mapping.kind()) {
            (Lane::Bounce(device), Kind::Pool(_)) => {
                // SAFETY: `unmap`'s clauses 1 and 3: this had the only token of the mapping, so no other unmap and, as they borrow it, no
                // sync runs now or later. Clause 2: `map_raw`'s clause 2 holds until this returns.
                let ended = unsafe { device.pool().unmap_by(rule, iova, word) };
                self.ended_copy(ended)
            }
            (Lane::Auto(ring), Kind::Pool(_)) if mapping.timed().is_none() => {
                // SAFETY: as for the pool above.
                let ended = unsafe { ring.end_fast(iova, word) };
                self.ended_copy(ended)
            }
            (Lane::Auto(ring), kind) => match ring.unmap(mapping) {
                Ok(Ended::Flushed(())) => self.flushed(),
                Err(failed) if !kind.is_in_ring() => self.ended_copy(Err(failed.error)),
                ended => ended,
            },
            (Lane::Swiotlb(copies), Kind::Swiotlb { is_list }) => {
                // SAFETY: as for the pool above.
                let ended = unsafe { copies.unmap(Copied { first: iova, is_list, word }) };
                let lost = |error| NotUnmapped { mapping: None, waits: false, error };
                ended.map(|()| Ended::Done(())).map_err(lost)
            }
            (Lane::NotCoherent(lane), Kind::NotCoherent) => {
                lane.unmap(word as usize).map_err(|NotUnmapped { mapping: back, waits, error }| NotUnmapped {
                    mapping: back.map(|()| mapping),
                    waits,
                    error,
                })
            }
            // A mapping that did not fit into the ring.
            (_, Kind::Alone) => {
                let Some(range) = mapping.pages(self.device.domain().granule()) else {
                    return Ok(Ended::Done(()));
                };
                let ended = self.device.domain().end_now(range, mapping.beside(), |_| ());
                self.ended_alone(ended)
            }
            // The queue's number is in the mapping, so this lane has made it.
            _ => Err(NotUnmapped::foreign(mapping)),
        }
    }

    #[inline(never)]
    fn unmap_in_batch(
        &mut self,
        iova: Iova,
        word: u64,
        tag: u64,
    ) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        let mapping = RawMapping { iova, word, tag };
        let Lane::Batch(batch) = &mut self.lane else { return Err(NotUnmapped::foreign(mapping)) };
        if batch.is_full() {
            // A batch whose commit failed. This unmap cannot report it: a later commit does.
            match batch.commit() {
                Ok(_) => batch.told().take_back(),
                Err(error) => return Err(NotUnmapped::of_commit(Some(mapping), error)),
            }
        }
        let range = mapping.pages(self.device.domain().granule());
        let used = range.map_or(0, IovaRange::len) - mapping.beside();
        if let Err(error) = batch.unlink(range, used) {
            // If another caller had removed a part by number, the commit invalidates all of the range nevertheless. Still mapped parts are reached
            // whatever the hardware confirms.
            let waits = matches!(error, UnmapError::NotMapped { .. });
            return Err(NotUnmapped { mapping: None, waits, error: error.into() });
        }
        if !batch.is_full() {
            return Ok(Ended::Pending);
        }
        match batch.commit() {
            Ok(_) => self.flushed(),
            Err(error) => Err(NotUnmapped::of_commit(None, error)),
        }
    }

    /// Goes on after the commit of a batch: confirms earlier single unmaps that were not confirmed.
    #[inline]
    fn flushed(&mut self) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        if self.owed > 0
            && let Err(error) = self.pay()
        {
            // This mapping's batch is committed, but its buffer waits with the others.
            return Err(NotUnmapped::of_commit(None, error));
        }
        Ok(Ended::Flushed(()))
    }

    /// Flushes for earlier single unmaps, after a commit. If that fails, the commit's mappings are reported by the next one.
    #[cold]
    fn pay(&mut self) -> Result<(), DmaUnmapError> {
        // First, as the flush may panic.
        self.told().into_iter().for_each(Told::take_back);
        self.device.domain().flush()?;
        self.told().into_iter().for_each(|told| _ = told.commit(0));
        self.owed = 0;
        Ok(())
    }

    /// The account of the lane's commits, if the driver is told of any.
    fn told(&mut self) -> Option<&mut Told> {
        match &mut self.lane {
            Lane::Batch(batch) => Some(batch.told()),
            Lane::Ring(ring) => Some(ring.told()),
            Lane::Auto(ring) => Some(ring.told()),
            Lane::Direct | Lane::Bounce(_) | Lane::Swiotlb(_) | Lane::NotCoherent(_) => None,
        }
    }

    #[inline]
    fn ended_copy(
        &mut self,
        ended: Result<(), DmaUnmapError>,
    ) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        match ended {
            Ok(()) => Ok(Ended::Done(())),
            Err(DmaUnmapError::Unmap(error)) => Err(self.not_ended(error)),
            Err(error) => {
                let waits = matches!(error, DmaUnmapError::Unconfirmed { .. });
                self.owed += usize::from(waits);
                Err(NotUnmapped { mapping: None, waits, error })
            }
        }
    }

    #[inline]
    fn ended_alone(
        &mut self,
        ended: Result<(), UnmapError>,
    ) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        match ended {
            Ok(()) => Ok(Ended::Done(())),
            Err(error) => Err(self.not_ended(error)),
        }
    }

    /// The error of a mapping that did not end, and whether it waits: if it is unmapped, by this call or another, the flush of the next
    /// commit ends it; if it is still mapped, no flush does.
    #[cold]
    fn not_ended(&mut self, error: UnmapError) -> NotUnmapped<RawMapping> {
        let waits = matches!(error, UnmapError::Unconfirmed { .. } | UnmapError::NotMapped { .. });
        self.owed += usize::from(waits);
        NotUnmapped { mapping: None, waits, error: error.into() }
    }

    /// Waits until no device reaches the mappings that [wait](Self::waiting) for a commit, for a queue that falls idle. Returns their
    /// number: all whose unmaps returned that they wait, and that neither an unmap nor a commit has reported since. Does not wait without
    /// any, except for what a map or a measurement of [`auto`](super::QueueConfig::auto) has left unconfirmed. Lazily ended mappings do not
    /// wait, and are not flushed by this.
    ///
    /// Context: waits for one submission to the hardware, and for a flush of the domain if an earlier unmap was not confirmed. The caller
    /// holds no lock and no CPU.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: everything goes on waiting, and can be committed again.
    pub fn commit_raw(&mut self) -> Result<usize, DmaUnmapError> {
        let committed = match &mut self.lane {
            Lane::Batch(batch) => batch.commit()?,
            Lane::Ring(ring) => ring.commit()?,
            Lane::Auto(ring) => ring.commit()?,
            Lane::NotCoherent(lane) => lane.commit()?,
            Lane::Direct | Lane::Bounce(_) | Lane::Swiotlb(_) => 0,
        };
        let owed = self.owed;
        if owed > 0 {
            self.pay()?;
        }
        Ok(committed + owed)
    }
}
