//! Commits. The addresses of a batch are free again only after the hardware has confirmed that no device reaches them.

use super::StrictRing;
use super::unmaps::hold;
use crate::addr::IovaRange;
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::dma::told::Told;
use crate::domain::{Fate, LinkFailed, Tally};
use crate::heap::OutOfMemory;
use crate::mapper::Mapper;
use crate::platform::Platform;

/// Holds the range being unmapped while a full batch is committed first. If the commit panics, the drop adds the range to the waiting ones.
struct Last<'a, M: Mapper, P: Platform> {
    ring: &'a mut StrictRing<M, P>,
    range: IovaRange,
}

impl<M: Mapper, P: Platform> Drop for Last<'_, M, P> {
    fn drop(&mut self) {
        hold(&mut self.ring.waiting, self.range);
        self.ring.unmapped += 1;
    }
}

impl<M: Mapper, P: Platform> StrictRing<M, P> {
    /// Waits until no device reaches anything that was unmapped before, and frees the descriptors' addresses. Returns the number of descriptors.
    ///
    /// One walk for each leaf table of each run of adjacent ranges, and one submission to the hardware, or none if nothing waits.
    ///
    /// Context: allocates nothing. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`DmaUnmapError::Unconfirmed`], [`DmaUnmapError::StillMapped`]: all descriptors still wait, and can be committed again.
    pub fn commit(&mut self) -> Result<usize, DmaUnmapError> {
        self.clear_waiting()?;
        let domain = self.device.domain();
        domain.confirm(&self.unlinked)?;
        self.unlinked.clear();
        let unmaps = core::mem::take(&mut self.unmapped);
        if let Some(arena) = &mut self.arena {
            for run in self.waiting.drain(..).chain(self.unconfirmed.drain(..)) {
                // `free` takes a run of adjacent reservations, and each is in one run, once.
                let freed = arena.free(run);
                debug_assert!(freed.is_ok());
            }
            let tally = core::mem::take(&mut self.tally);
            let closed = core::mem::take(&mut self.closing);
            domain.count_tally(Tally { unmaps: tally.unmaps + unmaps as u64, closed, ..tally });
        }
        Ok(self.told.commit(unmaps))
    }

    /// Gives up the report of the waiting ranges: later commits retry them, but report them to no caller. They keep their addresses until they are
    /// confirmed. After [`OutOfMemory`] do not use the ring: it has no room for the next batch, as an unmap allocates nothing.
    pub(in crate::dma) fn disown(&mut self) -> Result<(), OutOfMemory> {
        self.tally.unmaps += core::mem::take(&mut self.unmapped) as u64;
        self.waiting.try_reserve(self.batch + 1).map_err(|_| OutOfMemory)
    }

    pub(in crate::dma) fn has_unconfirmed(&self) -> bool {
        self.unmapped > 0 || !self.unconfirmed.is_empty()
    }

    /// For a caller that commits but cannot report the result: [`Told::take_back`] leaves it to the next commit.
    pub(in crate::dma) fn told(&mut self) -> &mut Told {
        &mut self.told
    }

    /// Commits a full batch, so that `range` can wait, too. If that panics, `range` waits like the others.
    #[cold]
    pub(super) fn commit_before(&mut self, range: IovaRange) -> Result<(), DmaUnmapError> {
        let last = Last { ring: self, range };
        let result = last.ring.commit();
        core::mem::forget(last);
        // The unmap can report only that `range` waits.
        result.map(|_| self.told.take_back())
    }

    #[cold]
    pub(super) fn refused(&mut self, range: IovaRange, failed: LinkFailed) -> DmaMapError {
        match failed.addresses {
            Fate::Lost => {}
            Fate::Held => self.unconfirmed.push(range),
            Fate::Free => {
                if let Some(arena) = &mut self.arena {
                    let freed = arena.free(range);
                    debug_assert!(freed.is_ok());
                }
            }
        }
        failed.error.into()
    }

    /// Clears the waiting ranges, adjacent ones together.
    fn clear_waiting(&mut self) -> Result<(), DmaUnmapError> {
        sort(&mut self.waiting);
        self.waiting.dedup_by(|next, run| run.joined(*next).map(|joined| *run = joined).is_some());
        for index in 0..self.waiting.len() {
            let range = self.waiting[index];
            let kept = self.device.domain().unlink(range, &mut self.unlinked).kept;
            if kept > 0 {
                return Err(DmaUnmapError::StillMapped { range, kept });
            }
        }
        Ok(())
    }
}

/// Shell sort by start (CACM 2(7), 1959), with the gaps of Ciura (FCT 2001). For a few hundred ranges it takes about as many steps as the core
/// library's sort, without its several KiB of stack.
fn sort(ranges: &mut [IovaRange]) {
    const GAPS: [usize; 8] = [701, 301, 132, 57, 23, 10, 4, 1];
    // A ring hands out addresses from the top down.
    if ranges.first().map(|range| range.start()) > ranges.last().map(|range| range.start()) {
        ranges.reverse();
    }
    if ranges.is_sorted_by_key(|range| range.start()) {
        return;
    }
    for gap in GAPS {
        for end in gap..ranges.len() {
            let mut place = end;
            while place >= gap && ranges[place - gap].start() > ranges[place].start() {
                ranges.swap(place - gap, place);
                place -= gap;
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::Iova;
    use crate::dice::Dice;

    #[test]
    fn ranges_are_sorted_by_where_they_begin() {
        let mut dice = Dice(3);
        for len in [0, 1, 2, 3, 5, 11, 64, 256, 1000] {
            let range = |_| IovaRange::new(Iova::new(dice.below(500) << 12), 4096).unwrap();
            let mut ranges: alloc::vec::Vec<_> = (0..len).map(range).collect();
            let mut expected = ranges.clone();
            expected.sort_by_key(|range| range.start());
            sort(&mut ranges);
            assert_eq!(ranges, expected);
        }
    }
}
