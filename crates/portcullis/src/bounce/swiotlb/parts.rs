//! The pool's calls by address, for tests, benches and the model. A call that names no mapping changes nothing.

use super::{Bounced, Constraints, Swiotlb};
use crate::addr::{Direction, PhysAddr, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::bounce::pool::Toward;
use crate::platform::{CopyMemory, Platform};

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// Copies `original` into the pool, for a device with these constraints. O(length), at the cost that the [module](super) states.
    ///
    /// Context: only in a full pool, waits for other CPUs' exclusive sections, and may allocate.
    ///
    /// # Errors
    /// [`DmaMapError`]; nothing is mapped then.
    ///
    /// # Safety
    /// 1. `original` is memory that the CPU reaches, none of it the pool's, until it is unmapped.
    /// 2. Only devices access it while this call, a sync or the unmap of this mapping runs.
    #[inline(always)]
    pub unsafe fn map(
        &self,
        original: PhysSegment,
        direction: Direction,
        constraints: &Constraints,
    ) -> Result<Bounced, DmaMapError> {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.map_piece(original, direction, constraints) }
    }

    /// Ends the mapping of `len` bytes at `phys`, which [`map`](Self::map) returned, and copies the device's bytes to the buffer, if the
    /// device writes. O(length).
    ///
    /// Context: never allocates, never waits.
    ///
    /// # Errors
    /// [`DmaUnmapError`]; nothing has changed then.
    ///
    /// # Safety
    /// 1. No other call for the same mapping runs. (A mapping that has ended is recognised, unless another mapping of the same length has the address
    ///    by now.) The device is done with it.
    /// 2. Clauses 1 and 2 of its [map](Self::map) hold until this returns.
    #[inline(always)]
    pub unsafe fn unmap(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.unmap_piece(phys, len) }
    }

    /// Copies `len` bytes at `phys`, all or a part of a mapping, to the buffer for the driver, if the device writes. O(length).
    ///
    /// # Errors
    /// [`DmaUnmapError`]; nothing was copied then.
    ///
    /// # Safety
    /// 1. The mapping is not unmapped meanwhile, and no other sync of the same bytes runs.
    /// 2. Clauses 1 and 2 of its [map](Self::map) hold until this returns.
    pub unsafe fn sync_for_cpu(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.sync_piece(phys, len, Toward::Original) }
    }

    /// Copies the driver's changes of the buffer to `len` bytes at `phys`, all or a part of a mapping, if the device reads. O(length).
    ///
    /// # Errors
    /// [`DmaUnmapError`]; nothing was copied then.
    ///
    /// # Safety
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    pub unsafe fn sync_for_device(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.sync_piece(phys, len, Toward::Buffer) }
    }

    /// The address in the driver's buffer that corresponds to `phys`, inside a mapping. O(1).
    ///
    /// # Errors
    /// [`DmaUnmapError`].
    pub fn original(&self, phys: PhysAddr) -> Result<PhysAddr, DmaUnmapError> {
        self.part(phys, 1).map(|(original, _)| original)
    }
}
