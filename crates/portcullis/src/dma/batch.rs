//! Mappings that end together and give their buffers back together.
//!
//! ```text
//!   Mapped --unmap--\
//!   Mapped --unmap---> UnmapBatch --commit--> all buffers
//!   Mapped --unmap--/             \--commit fails--> UnmapBatch, to be committed again
//! ```

use alloc::vec::{Drain, Vec};
use core::mem::ManuallyDrop;

use super::{BatchError, DmaBuffer, DmaDevice, Handle, Mapped, RawBatch};
use crate::domain::UnmapError;
use crate::mapper::Mapper;
use crate::platform::Platform;

/// Mappings that have ended, and their buffers, which devices may still reach.
///
/// **The unit of protection is the batch.** [`unmap`](Self::unmap) takes the mapping and clears its translations;
/// its buffer cannot be had before [`commit`](Self::commit) (or
/// [`commit_and_drain`](Self::commit_and_drain)) has waited, once for all of them, until no device reaches any.
/// That is so whatever the domain's policy: a batch of a lazy domain is committed strictly.
///
/// Dropping a batch commits it and drops the buffers; where the hardware does not confirm they are leaked, and
/// their addresses stay out of use until a later flush of the domain is confirmed.
///
/// It belongs to one CPU at a time and may outlive the device's handle. It never commits by itself: how long
/// buffers wait is up to whoever fills it.
#[derive(Debug)]
#[must_use = "the buffers come back with `commit`"]
pub struct UnmapBatch<B: DmaBuffer, M: Mapper, P: Platform> {
    ranges: RawBatch<M, P>,
    /// Dropped only after a commit, so that a panic below leaks what a device may reach.
    buffers: ManuallyDrop<Vec<B>>,
}

/// A mapping that a batch did not take, as it was: still mapped.
pub struct Refused<B: DmaBuffer, M: Mapper, P: Platform> {
    /// The mapping. It borrows nothing.
    pub mapped: Mapped<B, DmaDevice<M, P>>,
    /// [`BatchError::Full`] or [`BatchError::OtherDomain`].
    pub error: BatchError,
}

/// A commit that the hardware did not confirm.
pub struct CommitFailed<B: DmaBuffer, M: Mapper, P: Platform> {
    /// The batch with all its buffers, to be committed again. (Dropping it tries once more, and leaks them if
    /// that fails.)
    pub batch: UnmapBatch<B, M, P>,
    /// What went wrong.
    pub error: BatchError,
}

impl<B: DmaBuffer, M: Mapper, P: Platform> UnmapBatch<B, M, P> {
    /// An empty batch for `most` mappings of the domain of `device`: 1 to
    /// [`MOST_IN_BATCH`](super::MOST_IN_BATCH), what is beyond is brought there. Allocates all the memory it
    /// needs.
    pub fn new(device: &DmaDevice<M, P>, most: usize) -> Self {
        let ranges = RawBatch::new(device, most);
        let buffers = Vec::with_capacity(most.clamp(1, super::MOST_IN_BATCH));
        Self { ranges, buffers: ManuallyDrop::new(buffers) }
    }

    /// Ends a mapping and keeps its buffer until the commit. Clears the translations at once; waits for nothing
    /// and allocates nothing. A buffer whose translations the mapper could not remove is leaked: it is in no commit.
    ///
    /// # Errors
    /// [`Refused`] gives the mapping back, as it was, where the batch is full or of another domain.
    pub fn unmap<D: Handle<Mapper = M, Platform = P>>(
        &mut self,
        mapped: Mapped<B, D>,
    ) -> Result<(), Refused<B, M, P>> {
        if let Err(error) = self.ranges.accepts(mapped.device().domain()) {
            return Err(Refused { mapped: mapped.owned(), error });
        }
        // The handle is dropped last: that may panic.
        let (buffer, range, used, _handle) = mapped.into_parts();
        // Before anything can go wrong: from here on only a commit gives it out.
        self.buffers.push(buffer);
        // Where somebody had removed a part by number, the commit invalidates all of the range all the same, and
        // the addresses are given up: the buffer is as safe as the others.
        if let Err(UnmapError::StillMapped { .. }) = self.ranges.unlink(range, used) {
            // Devices reach it whatever the hardware confirms.
            core::mem::forget(self.buffers.pop());
        }
        Ok(())
    }

    /// How many buffers wait for the commit.
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Whether none does.
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// Whether the next mapping would be refused.
    pub fn is_full(&self) -> bool {
        self.ranges.is_full()
    }

    /// Waits until no device reaches any of the buffers, and gives them back in the order of their unmaps.
    ///
    /// One submission to the hardware: cost and context as [`RawBatch::commit`].
    ///
    /// # Errors
    /// [`CommitFailed`] keeps all buffers: devices may still reach them.
    #[allow(
        clippy::result_large_err,
        reason = "the batch comes back in place, and only from broken hardware"
    )]
    pub fn commit(mut self) -> Result<Vec<B>, CommitFailed<B, M, P>> {
        match self.ranges.commit() {
            Ok(_) => Ok(core::mem::take(&mut *self.buffers)),
            Err(error) => Err(CommitFailed { batch: self, error }),
        }
    }

    /// The same for a batch that is to be filled again: allocates nothing.
    ///
    /// # Errors
    /// [`BatchError::Unconfirmed`]: all buffers stay in the batch, which can be committed again.
    pub fn commit_and_drain(&mut self) -> Result<Drain<'_, B>, BatchError> {
        self.ranges.commit()?;
        Ok(self.buffers.drain(..))
    }
}

impl<B: DmaBuffer, M: Mapper, P: Platform> Drop for UnmapBatch<B, M, P> {
    fn drop(&mut self) {
        match self.ranges.commit() {
            // SAFETY: `drop` runs once, and is the last use of them.
            Ok(_) => unsafe { ManuallyDrop::drop(&mut self.buffers) },
            // Memory that goes back to its allocator must be unreachable.
            Err(_) => self.ranges.quarantine(),
        }
    }
}

error_by_its_reason!([B: DmaBuffer, M: Mapper, P: Platform] Refused<B, M, P>);
error_by_its_reason!([B: DmaBuffer, M: Mapper, P: Platform] CommitFailed<B, M, P>);
