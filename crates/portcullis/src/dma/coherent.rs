//! Coherent memory: long-lived pages that CPU and device share, for rings and descriptors.

use core::mem::ManuallyDrop;

use super::DmaDevice;
use crate::addr::{Direction, Iova, IovaRange, PhysAddr};
use crate::domain::{Ending, MapListError, PolicyWord, UnmapError};
use crate::mapper::Mapper;
use crate::platform::{FRAME_SIZE, Frames, Platform, TABLE_ENTRIES};
use crate::sync::AtomicU64;

/// Coherent memory that could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CoherentError {
    /// No frames in a row.
    #[error("no {frames} frames of memory in a row")]
    OutOfMemory {
        /// Frames asked for.
        frames: usize,
    },
    /// The memory could not be mapped.
    #[error(transparent)]
    Map(#[from] MapListError),
}

/// Zeroed whole pages that the CPU and one device share until this is dropped.
///
/// The CPU reads and writes them as atomic words, since the device may do so at any time.
#[derive(Debug)]
pub struct CoherentMemory<F: Frames, M: Mapper, P: Platform> {
    // Dropped in `release` only, once the device is known to be kept out.
    device: ManuallyDrop<DmaDevice<M, P>>,
    frames: ManuallyDrop<F>,
    phys: PhysAddr,
    count: usize,
    iova: Iova,
}

impl<F: Frames, M: Mapper, P: Platform> CoherentMemory<F, M, P> {
    /// `len` bytes, rounded up to whole granules, in one piece for the CPU and for the device.
    ///
    /// # Errors
    /// [`CoherentError`], with nothing kept.
    pub fn new(device: &DmaDevice<M, P>, frames: F, len: usize) -> Result<Self, CoherentError> {
        // Whole granules: what shares one with the memory could be reached, too.
        let granule = if device.is_translated() { device.domain().granule().bytes() } else { FRAME_SIZE };
        let rounded = (len as u64).checked_next_multiple_of(granule).unwrap_or(u64::MAX);
        let count = usize::try_from(rounded / FRAME_SIZE).unwrap_or(usize::MAX);
        let phys = frames.alloc(count).ok_or(CoherentError::OutOfMemory { frames: count })?;
        let len = count as u64 * FRAME_SIZE;
        // Where a call below panics, the device may reach them: then they are never freed.
        let frames = ManuallyDrop::new(frames);
        // SAFETY: the frames are this value's alone, in whole granules, accessed as atomics only, and freed after a strict
        // unmap or never.
        match unsafe { device.map_single(phys, len, Direction::Bidirectional) } {
            Ok(iova) => Ok(Self { device: ManuallyDrop::new(device.clone()), frames, phys, count, iova }),
            // The device may reach them: they are never freed.
            Err(error @ MapListError::Unconfirmed { .. }) => Err(error.into()),
            Err(error) => {
                let frames = ManuallyDrop::into_inner(frames);
                // SAFETY: the frames came from the line above, and no device reaches them.
                unsafe { frames.free(phys, count) };
                Err(error.into())
            }
        }
    }

    /// The address of the first byte for the device.
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// How many 64-bit words there are.
    pub fn words(&self) -> usize {
        self.count * TABLE_ENTRIES
    }

    /// The 64-bit word at `index`; `None` past the end.
    pub fn word(&self, index: usize) -> Option<&AtomicU64> {
        if index >= self.words() {
            return None;
        }
        let offset = (index / TABLE_ENTRIES) as u64 * FRAME_SIZE;
        let frame = self.phys.checked_add(offset)?;
        // SAFETY: `frame` is one of the frames that `new` was given; they are freed only in `drop`, which
        // no `&self` outlives.
        let words = unsafe { self.frames.table(frame) };
        words.get(index % TABLE_ENTRIES)
    }

    /// Unmaps the memory and frees it once no device reaches it.
    ///
    /// Strict under every policy: a freed page may have any owner next. Waits for one invalidation.
    ///
    /// # Errors
    /// [`UnmapError`]: the memory is not freed, ever, as a device may still reach it.
    pub fn free(self) -> Result<(), UnmapError> {
        ManuallyDrop::new(self).release()
    }

    fn release(&mut self) -> Result<(), UnmapError> {
        let len = self.count as u64 * FRAME_SIZE;
        if self.device.is_translated() {
            let domain = self.device.domain();
            let iova = self.iova;
            let range = IovaRange::of_pages(iova, len, domain.granule())
                .ok_or(UnmapError::NoSuchRange { iova, len })?;
            let neighbours = range.len().saturating_sub(len);
            domain.end(range, Ending { neighbours, exception: || PolicyWord::STRICT })?;
        }
        // SAFETY: the frames are those of `new`, `self` is not used again, and the device cannot reach them
        // any more (or, in passthrough, was never kept from any memory).
        unsafe { self.frames.free(self.phys, self.count) };
        // SAFETY: as above. After a failure neither is dropped: they keep the memory and the tables there.
        unsafe {
            ManuallyDrop::drop(&mut self.frames);
            ManuallyDrop::drop(&mut self.device);
        }
        Ok(())
    }
}

impl<F: Frames, M: Mapper, P: Platform> Drop for CoherentMemory<F, M, P> {
    fn drop(&mut self) {
        // Where it fails the memory is left alone for good; a drop has no caller to tell.
        let _ = self.release();
    }
}
