//! Batches of unmaps by address, which end with one wait for hardware.

use alloc::vec::Vec;

use super::DmaDevice;
use super::device::bytes_of;
use super::told::Told;
#[cfg(feature = "parts")]
use crate::addr::Iova;
use crate::addr::IovaRange;
use crate::bounce::error::DmaUnmapError;
use crate::domain::{Domain, UnmapError};
use crate::heap::{OutOfMemory, Shared, room_for};
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::Platform;

/// The most mappings that one batch holds.
pub const MOST_IN_BATCH: usize = 256;

/// Why a batch did not take a mapping.
#[cfg(feature = "parts")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The batch is full, and the mapping unchanged: commit, then unmap it again.
    #[error("a batch of {most} mappings is full: it must be committed first")]
    Full {
        /// Mappings that it holds.
        most: usize,
    },
    /// The mapping, which is unchanged, is of another domain than the batch.
    #[error("a mapping of another domain than the batch's")]
    OtherDomain,
    /// The range was not mapped as a whole, or the bytes are no range. Its mapped part is unreachable after the commit, except for what is [still
    /// mapped](UnmapError::StillMapped). The rest of the batch is not affected.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
}

/// Unmaps by address, collected until [`commit`](Self::commit) waits for all of them together.
///
/// **The unit of protection is the batch.** Each unmap clears its translations, but a device may use cached ones until the commit has returned `Ok`:
/// before that, nothing may use the memory, and no map gets the addresses. After it the device reaches none of it, under every policy of the domain
/// but passthrough.
///
/// A full batch refuses further mappings. It never commits by itself except in `drop`, so its user bounds the time until a commit.
#[derive(Debug)]
pub struct RawBatch<M: Mapper, P: Platform> {
    domain: Shared<Domain<M, P>>,
    /// Cleared ranges, freed after the commit. The mapper panicked in the first `torn` of them, so what is mapped there is unknown.
    ranges: Vec<IovaRange>,
    torn: usize,
    /// The mappings in the batch, including those without a translation.
    mappings: usize,
    most: usize,
    neighbours: u64,
    /// Cleared bytes of incomplete mappings, whose addresses leak.
    parts: u64,
    gather: Gather,
    told: Told,
}

impl<M: Mapper, P: Platform> RawBatch<M, P> {
    /// Makes an empty batch for `most` mappings (clamped to 1 to [`MOST_IN_BATCH`]) of `device`'s domain. Allocates 16 bytes for each mapping.
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

    /// Whether [`len`](Self::len) is 0.
    #[cfg(feature = "parts")]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the next mapping would be refused.
    pub fn is_full(&self) -> bool {
        self.mappings == self.most
    }

    /// Waits until no device reaches anything of the batch, frees the addresses, and returns the number of mappings. The batch is then empty.
    ///
    /// One submission to the hardware, of at most 32 range invalidations or one of the whole domain; none without translation. Then O(1) for each
    /// mapping, as [`IovaSpace::free`](crate::iova::IovaSpace::free).
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
        self.free();
        Ok(self.told.commit(core::mem::take(&mut self.mappings)))
    }

    /// For a caller that commits but cannot report the result: [`Told::take_back`] leaves it to the next commit.
    pub(super) fn told(&mut self) -> &mut Told {
        &mut self.told
    }

    /// Adds a mapping of the batch's domain: `used` bytes in `range`, or `None` without translation. The batch is not full.
    pub(super) fn unlink(&mut self, range: Option<IovaRange>, used: u64) -> Result<(), UnmapError> {
        let neighbours = range.map_or(0, |range| range.len().saturating_sub(used));
        // If the mapper removes mappings only as a whole, this is an error for each part but the last, whose call removes the whole mapping.
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
            // Otherwise an earlier call unmapped all of it, and has subtracted them.
            self.neighbours = self.neighbours.saturating_add(neighbours);
        }
        if bytes == range.len() {
            self.ranges.push(range);
            return Ok(());
        }
        self.parts = self.parts.saturating_add(bytes);
        if kept > 0 {
            // No commit ends it.
            self.mappings -= 1;
        }
        // The addresses leak, as it is unknown to which mapping they belong.
        self.domain.end_rest(range, bytes, false);
        if kept > 0 {
            return Err(UnmapError::StillMapped { range, unmapped: bytes, kept });
        }
        Err(UnmapError::NotMapped { range, unmapped: bytes })
    }

    /// Gives back the addresses that are still in the batch, whose end is confirmed, and subtracts its neighbour bytes.
    fn free(&mut self) {
        self.lose_torn();
        self.parts = 0;
        let neighbours = core::mem::take(&mut self.neighbours);
        if !self.ranges.is_empty() || neighbours > 0 {
            self.domain.free_all(&mut self.ranges, neighbours);
        }
    }

    /// Leaks the addresses of torn ranges. Returns their bytes.
    fn lose_torn(&mut self) -> u64 {
        let torn = core::mem::take(&mut self.torn);
        if torn == 0 {
            return 0;
        }
        let bytes = bytes_of(self.ranges.drain(..torn).map(|range| range.len()));
        self.domain.lose(bytes);
        bytes
    }

    /// Gives up on the commit: the domain holds the addresses until a later flush is confirmed.
    pub(super) fn quarantine(&mut self) {
        let open = core::mem::take(&mut self.parts).saturating_add(self.lose_torn());
        if open > 0 {
            self.domain.hold(open, None);
        }
        while let Some(range) = self.ranges.pop() {
            self.domain.changing(range).hold();
        }
        self.free();
    }
}

/// Holds a range that is being unlinked. Dropped by a panic of the mapper or the platform, it leaves the range to the commit, which unlinks it again.
struct Unlinking<'a, M: Mapper, P: Platform> {
    batch: &'a mut RawBatch<M, P>,
    range: IovaRange,
}

impl<M: Mapper, P: Platform> Drop for Unlinking<'_, M, P> {
    #[cold]
    fn drop(&mut self) {
        let Self { batch, range } = self;
        // Swaps it after the other torn ranges. Allocates nothing: there is room for each mapping.
        batch.ranges.push(*range);
        let last = batch.ranges.len() - 1;
        batch.ranges.swap(batch.torn, last);
        batch.torn += 1;
    }
}

/// Leaks the addresses of ranges that are left when a batch is dropped: none, unless something below panics.
struct Leaving<'a, M: Mapper, P: Platform>(&'a mut RawBatch<M, P>);

impl<M: Mapper, P: Platform> Drop for Leaving<'_, M, P> {
    fn drop(&mut self) {
        let RawBatch { domain, ranges, .. } = &mut *self.0;
        ranges.drain(..).for_each(|range| domain.lose(range.len()));
    }
}

/// Commits. If the hardware does not confirm, the domain holds the addresses until a later flush is confirmed, and devices may reach the memory until
/// then. A drop cannot report that: commit before.
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

    /// Unmaps into `batch` a mapping that [`map_single`](Self::map_single) returned for the same `len`. Clears the translations; the commit ends it.
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
}
