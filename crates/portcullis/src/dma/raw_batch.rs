//! Batches of unmaps by number, which wait for the hardware together. No memory and no address of a
//! batch may be used again before its commit is confirmed.

use alloc::vec::Vec;

use super::DmaDevice;
use super::device::bytes_of;
use super::told::Told;
use crate::addr::{DmaSegment, Iova, IovaRange};
use crate::bounce::error::DmaUnmapError;
use crate::domain::{Domain, UnmapError};
use crate::heap::{OutOfMemory, Shared, room_for};
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::Platform;

/// The most mappings that one batch holds.
pub const MOST_IN_BATCH: usize = 256;

/// A batch that did not take a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The batch is full. The mapping was not touched: commit, and unmap it again.
    #[error("a batch of {most} mappings is full: it must be committed first")]
    Full {
        /// Mappings that it holds.
        most: usize,
    },
    /// The mapping is of another domain than the batch. It was not touched.
    #[error("a mapping of another domain than the batch's")]
    OtherDomain,
    /// The range was not mapped as a whole, or the bytes that were named are no range. What was
    /// mapped of it is unreachable after the commit, but for what is [still
    /// mapped](UnmapError::StillMapped); nothing else of the batch is affected.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
}

/// Unmaps by number, collected until [`commit`](Self::commit) waits for all of them at once.
///
/// **The unit of protection is the batch.** Each unmap clears its translations at once, but a device may go on
/// using what the IOMMU has cached until the commit has returned `Ok`: before that, none of the memory may be
/// used for anything else, and nothing of it is the driver's. After that the device reaches none of it, whatever
/// the domain's policy. Addresses are not used again before either.
///
/// A batch holds a fixed number of mappings, [`MOST_IN_BATCH`] at the most, and refuses further ones, so that
/// nothing is committed behind its user's back. It belongs to one CPU at a time, as `&mut` says. It never
/// commits by itself but in `drop`: its user bounds the time until a commit.
#[derive(Debug)]
pub struct RawBatch<M: Mapper, P: Platform> {
    domain: Shared<Domain<M, P>>,
    /// Ranges whose mappings were complete and are cleared: their addresses go back after the
    /// commit. The first `torn` of them are others: a mapper has panicked at them, so it is not
    /// known what is mapped there.
    ranges: Vec<IovaRange>,
    /// The number of ranges that a mapper has panicked at.
    torn: usize,
    /// Mappings taken, those that need no translation included.
    mappings: usize,
    most: usize,
    /// Bytes beside the buffers, in their pages.
    neighbours: u64,
    /// Bytes that were cleared of mappings that were not complete: their addresses are given up.
    parts: u64,
    gather: Gather,
    told: Told,
}

impl<M: Mapper, P: Platform> RawBatch<M, P> {
    /// Makes an empty batch for `most` mappings of the domain of `device`; `most` is brought within
    /// 1 and [`MOST_IN_BATCH`]. Allocates 16 bytes for each mapping, all the memory that the batch
    /// ever needs.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn new(device: &DmaDevice<M, P>, most: usize) -> Result<Self, OutOfMemory> {
        let most = most.clamp(1, MOST_IN_BATCH);
        let domain = device.domain().clone();
        let ranges = room_for(most)?;
        let (gather, told) = (Gather::new(), Told::default());
        Ok(Self { domain, ranges, torn: 0, mappings: 0, most, neighbours: 0, parts: 0, gather, told })
    }

    /// Returns how many mappings wait for the commit.
    pub fn len(&self) -> usize {
        self.mappings + self.told.untold()
    }

    /// Returns whether no mapping waits for the commit.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the next mapping would be refused.
    pub fn is_full(&self) -> bool {
        self.mappings == self.most
    }

    /// Waits until no device reaches anything that was unmapped into the batch, and gives the
    /// addresses back. Returns how many mappings there were; the batch is empty then and can be
    /// filled again.
    ///
    /// One submission to the hardware, of 32 range invalidations at the most, or of one for the whole domain
    /// where the ranges are many and far apart; nothing where nothing is translated. Then O(1) for each
    /// mapping, as [`IovaSpace::free`](crate::iova::IovaSpace::free). Allocates nothing. The caller holds no
    /// lock and no CPU.
    ///
    /// # Errors
    /// [`DmaUnmapError::Unconfirmed`]: the batch is as it was, and can be committed again. So it can after
    /// [`DmaUnmapError::StillMapped`], which only a batch meets whose mapper has panicked.
    pub fn commit(&mut self) -> Result<usize, DmaUnmapError> {
        for index in 0..self.torn {
            let range = self.ranges[index];
            let Unmapped { kept, .. } = self.domain.unlink(range, &mut self.gather);
            if kept > 0 {
                return Err(DmaUnmapError::StillMapped { range, kept });
            }
        }
        self.domain.confirm(&self.gather)?;
        self.gather.clear();
        self.settle();
        Ok(self.told.commit(core::mem::take(&mut self.mappings)))
    }

    /// What commits have ended, for a caller that cannot say so.
    pub(super) fn told(&mut self) -> &mut Told {
        &mut self.told
    }

    /// Checks that a mapping of `domain` can be taken.
    pub(super) fn accepts(&self, domain: &Shared<Domain<M, P>>) -> Result<(), BatchError> {
        if !Shared::ptr_eq(&self.domain, domain) {
            return Err(BatchError::OtherDomain);
        }
        if self.is_full() { Err(BatchError::Full { most: self.most }) } else { Ok(()) }
    }

    /// Takes a mapping that was [accepted](Self::accepts), of a buffer of `used` bytes in `range`, or of nothing that
    /// is translated.
    pub(super) fn unlink(&mut self, range: Option<IovaRange>, used: u64) -> Result<(), UnmapError> {
        let neighbours = range.map_or(0, |range| range.len().saturating_sub(used));
        // A part goes with the rest of its mapping, by whichever call that is.
        let range = range.map(|range| self.domain.whole_for(range)).transpose()?;
        self.mappings += 1;
        let Some(range) = range else {
            return Ok(());
        };
        let unlinking = Unlinking { batch: self, range };
        let batch = &mut *unlinking.batch;
        let Unmapped { bytes, kept, .. } = batch.domain.unlink(range, &mut batch.gather);
        core::mem::forget(unlinking);
        if bytes > 0 {
            // Else they went with the call that unmapped all of it before.
            self.neighbours = self.neighbours.saturating_add(neighbours);
        }
        if bytes == range.len() {
            self.ranges.push(range);
            return Ok(());
        }
        self.parts = self.parts.saturating_add(bytes);
        if kept > 0 {
            // No commit ends it, so none counts it.
            self.mappings -= 1;
        }
        // It is not known whose addresses these are.
        self.domain.lose_rest(range, bytes);
        if kept > 0 {
            return Err(UnmapError::StillMapped { range, unmapped: bytes, kept });
        }
        Err(UnmapError::NotMapped { range, unmapped: bytes })
    }

    /// Gives back what is confirmed.
    fn settle(&mut self) {
        self.give_up_torn();
        self.parts = 0;
        let neighbours = core::mem::take(&mut self.neighbours);
        if !self.ranges.is_empty() || neighbours > 0 {
            self.domain.take_back_all(&mut self.ranges, neighbours);
        }
    }

    /// Gives up the addresses of those that a mapper has panicked at.
    fn give_up_torn(&mut self) {
        let torn = core::mem::take(&mut self.torn);
        self.ranges.drain(..torn).for_each(|range| drop(self.domain.changing(range)));
    }

    /// Gives up waiting: the addresses stay out of use until some later flush of the domain is confirmed.
    pub(super) fn quarantine(&mut self) {
        let torn = bytes_of(self.ranges[..self.torn].iter().map(|range| range.len()));
        let open = core::mem::take(&mut self.parts).saturating_add(torn);
        self.give_up_torn();
        if open > 0 {
            self.domain.leave_open(open);
        }
        while let Some(range) = self.ranges.pop() {
            self.domain.quarantine(self.domain.changing(range));
        }
        self.settle();
    }
}

/// A range that is being unlinked. Dropped where the mapper or the platform panics: then the commit does it again.
struct Unlinking<'a, M: Mapper, P: Platform> {
    batch: &'a mut RawBatch<M, P>,
    range: IovaRange,
}

impl<M: Mapper, P: Platform> Drop for Unlinking<'_, M, P> {
    #[cold]
    fn drop(&mut self) {
        let Self { batch, range } = self;
        // The first range of the others makes room for it. The list has room for each mapping.
        batch.ranges.push(*range);
        let last = batch.ranges.len() - 1;
        batch.ranges.swap(batch.torn, last);
        batch.torn += 1;
    }
}

/// A batch that ends. Dropping it gives up the addresses of what is left in the batch, which is
/// nothing unless something below panics.
struct Leaving<'a, M: Mapper, P: Platform>(&'a mut RawBatch<M, P>);

impl<M: Mapper, P: Platform> Drop for Leaving<'_, M, P> {
    fn drop(&mut self) {
        let RawBatch { domain, ranges, .. } = &mut *self.0;
        ranges.drain(..).for_each(|range| drop(domain.changing(range)));
    }
}

/// Commits. Where the hardware does not confirm, the addresses stay out of use until a later flush
/// of the domain is confirmed, and devices may reach the memory until then. A drop has no caller to
/// tell of that: commit before. Where something below panics, the addresses are given up.
impl<M: Mapper, P: Platform> Drop for RawBatch<M, P> {
    fn drop(&mut self) {
        let leaving = Leaving(self);
        if leaving.0.commit().is_err() {
            leaving.0.quarantine();
        }
    }
}

#[cfg(feature = "parts")]
impl<M: Mapper, P: Platform> DmaDevice<M, P> {
    /// Unmaps into `batch` what [`map_single`](Self::map_single) returned for the same `len`: the
    /// mapping is over when the batch is committed. Clears the translations at once. Waits for
    /// nothing and allocates nothing, but for a part of a mapping, whose large page may have to be
    /// split: see [`PageTable::unmap`](crate::pgtable::PageTable::unmap).
    ///
    /// # Errors
    /// [`BatchError`]: [`Full`](BatchError::Full) and [`OtherDomain`](BatchError::OtherDomain) change nothing.
    pub fn unmap_single_in(
        &self,
        batch: &mut RawBatch<M, P>,
        iova: Iova,
        len: u64,
    ) -> Result<(), BatchError> {
        batch.accepts(self.domain())?;
        let range = self.range_to_unmap(iova, len)?;
        Ok(batch.unlink(range, len)?)
    }

    /// Unmaps the list that [`map_sg`](Self::map_sg) wrote, given as it was written, into `batch`. As
    /// [`unmap_single_in`](Self::unmap_single_in).
    ///
    /// # Errors
    /// As [`unmap_single_in`](Self::unmap_single_in). An empty list is no error, and takes no room.
    pub fn unmap_sg_in(&self, batch: &mut RawBatch<M, P>, mapped: &[DmaSegment]) -> Result<(), BatchError> {
        let Some((iova, len)) = self.whole_of(mapped)? else {
            return Ok(());
        };
        batch.accepts(self.domain())?;
        let range = self.range_to_unmap(iova, len)?;
        Ok(batch.unlink(range, bytes_of(mapped.iter().map(|segment| segment.len)))?)
    }
}
