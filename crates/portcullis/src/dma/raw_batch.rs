//! Batches of unmaps by number, which wait for the hardware together. Neither memory nor addresses of a batch may be used again before its commit is
//! confirmed.

use alloc::vec::Vec;

use super::DmaDevice;
use super::device::bytes_of;
use super::told::Told;
use crate::addr::IovaRange;
#[cfg(feature = "parts")]
use crate::addr::{DmaSegment, Iova};
use crate::bounce::error::DmaUnmapError;
use crate::domain::{Domain, UnmapError};
use crate::heap::{OutOfMemory, Shared, room_for};
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::Platform;

/// The most mappings that one batch holds.
pub const MOST_IN_BATCH: usize = 256;

/// The batch did not take a mapping.
#[cfg(feature = "parts")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The batch is full, and the mapping unchanged: commit, and unmap it again.
    #[error("a batch of {most} mappings is full: it must be committed first")]
    Full {
        /// Mappings that it holds.
        most: usize,
    },
    /// The mapping is of another domain than the batch, and is unchanged.
    #[error("a mapping of another domain than the batch's")]
    OtherDomain,
    /// The range was not mapped as a whole, or the bytes are no range. Its mapped part is unreachable after the commit, except for what is
    /// [still mapped](UnmapError::StillMapped); nothing else of the batch is affected.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
}

/// Unmaps by number, collected until [`commit`](Self::commit) waits for all of them at once.
///
/// **The unit of protection is the batch.** Each unmap clears its translations at once, but a device may use cached ones until the commit
/// has returned `Ok`: until then, none of the memory is the driver's, nor may it be used for anything else. After that the device reaches
/// none of it, whatever the domain's policy. Addresses are not used again before either.
///
/// A batch holds a fixed number of mappings, [`MOST_IN_BATCH`] at the most, and refuses further ones: it never commits by itself except in `drop`, so
/// its user bounds the time until a commit. It belongs to one CPU at a time, as `&mut` says.
#[derive(Debug)]
pub struct RawBatch<M: Mapper, P: Platform> {
    domain: Shared<Domain<M, P>>,
    /// Cleared ranges, whose addresses are freed after the commit. At the first `torn` of them a mapper has panicked: it is not known what is
    /// mapped there.
    ranges: Vec<IovaRange>,
    torn: usize,
    /// Mappings taken, including ones that need no translation.
    mappings: usize,
    most: usize,
    neighbours: u64,
    /// Bytes that were cleared of incomplete mappings, whose addresses leak.
    parts: u64,
    gather: Gather,
    told: Told,
}

impl<M: Mapper, P: Platform> RawBatch<M, P> {
    /// Makes an empty batch for `most` mappings (clamped to 1 to [`MOST_IN_BATCH`]) of `device`'s domain. Allocates 16 bytes for each
    /// mapping, which is all the memory that the batch ever needs.
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

    /// The number of mappings that wait for the commit.
    pub fn len(&self) -> usize {
        self.mappings + self.told.untold()
    }

    /// Whether no mapping waits for the commit.
    #[cfg(feature = "parts")]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the next mapping would be refused.
    pub fn is_full(&self) -> bool {
        self.mappings == self.most
    }

    /// Waits until no device reaches anything that was unmapped into the batch, and frees the addresses. Returns the number of mappings; the
    /// batch is empty then and can be filled again.
    ///
    /// One submission to the hardware, of at most 32 range invalidations, or of one for the whole domain if the ranges are many and far apart;
    /// none without translation. Then O(1) for each mapping, as [`IovaSpace::free`](crate::iova::IovaSpace::free).
    ///
    /// Context: allocates nothing. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`DmaUnmapError::Unconfirmed`], and after a panic of the mapper [`DmaUnmapError::StillMapped`]: the batch is unchanged, and can be
    /// committed again.
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

    /// The account of ended mappings, for a caller that cannot report them.
    pub(super) fn told(&mut self) -> &mut Told {
        &mut self.told
    }

    /// Takes a mapping of its domain, if it is not full: of a buffer of `used` bytes in `range`, or without translation.
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
            // Otherwise they went with the call that unmapped all of it before.
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

    fn settle(&mut self) {
        self.give_up_torn();
        self.parts = 0;
        let neighbours = core::mem::take(&mut self.neighbours);
        if !self.ranges.is_empty() || neighbours > 0 {
            self.domain.take_back_all(&mut self.ranges, neighbours);
        }
    }

    /// Leaks the ranges at which a mapper has panicked.
    fn give_up_torn(&mut self) {
        let torn = core::mem::take(&mut self.torn);
        self.ranges.drain(..torn).for_each(|range| drop(self.domain.changing(range)));
    }

    /// Gives up on the commit: the addresses are held until some later flush of the domain is confirmed.
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

/// Guards a range that is being unlinked. Dropped (the mapper or the platform has panicked), it has the commit unlink it again.
struct Unlinking<'a, M: Mapper, P: Platform> {
    batch: &'a mut RawBatch<M, P>,
    range: IovaRange,
}

impl<M: Mapper, P: Platform> Drop for Unlinking<'_, M, P> {
    #[cold]
    fn drop(&mut self) {
        let Self { batch, range } = self;
        // It takes the place of the first other range. The list has room for each mapping.
        batch.ranges.push(*range);
        let last = batch.ranges.len() - 1;
        batch.ranges.swap(batch.torn, last);
        batch.torn += 1;
    }
}

/// Guards a batch that ends. Dropping it leaks the addresses of ranges that are left, of which there are none unless something below panics.
struct Leaving<'a, M: Mapper, P: Platform>(&'a mut RawBatch<M, P>);

impl<M: Mapper, P: Platform> Drop for Leaving<'_, M, P> {
    fn drop(&mut self) {
        let RawBatch { domain, ranges, .. } = &mut *self.0;
        ranges.drain(..).for_each(|range| drop(domain.changing(range)));
    }
}

/// Commits. If the hardware does not confirm, the addresses are held until a later flush of the domain is confirmed, and devices may reach the memory
/// until then. A drop cannot report that: commit before. If something below panics, the addresses leak.
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
    fn accepts(&self, batch: &RawBatch<M, P>) -> Result<(), BatchError> {
        match batch.is_full() {
            _ if !Shared::ptr_eq(&batch.domain, self.domain()) => Err(BatchError::OtherDomain),
            true => Err(BatchError::Full { most: batch.most }),
            false => Ok(()),
        }
    }

    /// Unmaps into `batch` a mapping that [`map_single`](Self::map_single) returned for the same `len`: it is over when the batch is
    /// committed. Clears the translations at once.
    ///
    /// Context: does not wait or allocate, except for a part of a mapping, which may have to split a large page: see
    /// [`PageTable::unmap`](crate::pgtable::PageTable::unmap).
    ///
    /// # Errors
    /// [`BatchError`]: [`Full`](BatchError::Full) and [`OtherDomain`](BatchError::OtherDomain) change nothing.
    pub fn unmap_single_in(
        &self,
        batch: &mut RawBatch<M, P>,
        iova: Iova,
        len: u64,
    ) -> Result<(), BatchError> {
        self.accepts(batch)?;
        let range = self.range_to_unmap(iova, len)?;
        Ok(batch.unlink(range, len)?)
    }

    /// Unmaps into `batch` a list that [`map_sg`](Self::map_sg) wrote, as it was written. As [`unmap_single_in`](Self::unmap_single_in).
    ///
    /// # Errors
    /// As [`unmap_single_in`](Self::unmap_single_in). An empty list is no error, and takes no room.
    pub fn unmap_sg_in(&self, batch: &mut RawBatch<M, P>, mapped: &[DmaSegment]) -> Result<(), BatchError> {
        let Some((iova, len)) = self.whole_of(mapped)? else {
            return Ok(());
        };
        self.accepts(batch)?;
        let range = self.range_to_unmap(iova, len)?;
        Ok(batch.unlink(range, bytes_of(mapped.iter().map(|segment| segment.len)))?)
    }
}
