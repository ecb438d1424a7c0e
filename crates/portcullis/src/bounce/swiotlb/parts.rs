//! The pool by itself, by number: the calls that queues make. A call that names no mapping changes
//! nothing.

use super::{Bounced, Constraints, Swiotlb};
use crate::addr::{Direction, PhysAddr, PhysSegment};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::platform::{CopyMemory, Platform};

impl<P: Platform, C: CopyMemory> Swiotlb<P, C> {
    /// Copies `original` into the pool, for a device with these constraints.
    ///
    /// Waits only in a pool that is full, for the turns of other CPUs to end; may allocate then.
    /// Otherwise O(length), at the cost that the [module](super) states.
    ///
    /// # Errors
    /// [`DmaMapError`]; nothing is mapped then.
    ///
    /// # Safety
    /// `original` is memory that the CPU reaches, none of it the pool's. Until it is unmapped it
    /// stays there, and only devices access it while this call, a sync or the unmap of this mapping
    /// is under way.
    #[inline(always)]
    pub unsafe fn map(
        &self,
        original: PhysSegment,
        direction: Direction,
        constraints: &Constraints,
    ) -> Result<Bounced, DmaMapError> {
        // SAFETY: the caller's promise.
        unsafe { self.map_piece(original, direction, constraints) }
    }

    /// Ends the mapping of `len` bytes at `phys`, which [`map`](Self::map) returned, and copies what the device wrote to
    /// the buffer, as the direction says. Never allocates. O(length).
    ///
    /// # Errors
    /// [`DmaUnmapError`]; nothing has changed then.
    ///
    /// # Safety
    /// No other call for the same mapping is under way. (A mapping that has ended is recognised,
    /// unless the address is another mapping's of the same length by now.) The device is done with
    /// it. What was promised of the original when it was [mapped](Self::map) holds until this
    /// returns.
    #[inline(always)]
    pub unsafe fn unmap(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: the caller's promise.
        unsafe { self.unmap_piece(phys, len) }
    }

    /// Copies `len` bytes at `phys`, a part of a mapping or all of it, to the buffer, if the device
    /// writes to it, so that the driver can read them. O(length).
    ///
    /// # Errors
    /// [`DmaUnmapError`]; nothing was copied then.
    ///
    /// # Safety
    /// The mapping is not unmapped meanwhile, and no other sync of the same bytes is under way.
    pub unsafe fn sync_for_cpu(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: the caller's promise.
        unsafe { self.piece_for_cpu(phys, len) }
    }

    /// Copies the driver's changes to the buffer to `len` bytes at `phys`, a part of a mapping or
    /// all of it, if the device reads them. O(length).
    ///
    /// # Errors
    /// [`DmaUnmapError`]; nothing was copied then.
    ///
    /// # Safety
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    pub unsafe fn sync_for_device(&self, phys: PhysAddr, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: the caller's promise.
        unsafe { self.piece_for_device(phys, len) }
    }

    /// Returns the address in the driver's buffer for which `phys`, inside a mapping, stands. O(1).
    ///
    /// # Errors
    /// [`DmaUnmapError`].
    pub fn original(&self, phys: PhysAddr) -> Result<PhysAddr, DmaUnmapError> {
        self.part(phys, 1).map(|(original, _)| original)
    }
}
