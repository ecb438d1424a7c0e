//! Syncs: copy a part of an open mapping between its original and its buffer. Bytes outside of the mapping are refused.

use super::BouncePool;
use super::slot::Toward;
use super::slotted::{Borrowed, take_list};
use crate::addr::{Iova, PhysSegment};
use crate::bounce::error::{DmaUnmapError, inside};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::sync::{Ordering, fence};

#[cfg(feature = "parts")]
impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Copies `len` bytes, from `offset` on, of the mapping at `iova` to its original. For a device that only reads, and for a direct mapping, it
    /// copies nothing, and costs a fence. Else O(len), and a step for each piece of a list.
    ///
    /// Context: allocates nothing, and waits only for the lock of the pool's map.
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing copied.
    ///
    /// # Safety
    /// This knows the original by its address only. If an open mapping begins at `iova`:
    ///
    /// 1. No unmap of the mapping, and no other sync of any of these bytes, runs at the same time.
    /// 2. Clauses 1 and 3 of its [map](super::BounceDevice::map) hold until this has returned: its original is memory, which only devices and atomic
    ///    accesses touch.
    ///
    /// For an address without a mapping it copies nothing, and may return an error.
    pub unsafe fn sync_for_cpu(&self, iova: Iova, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.sync_toward(iova, (offset, len), Toward::Original) }
    }

    /// Copies `len` bytes of the original, from `offset` on, to the buffer of the mapping at `iova`. For a device that only writes, and for a direct
    /// mapping, it copies nothing, and costs a fence. Else as [`sync_for_cpu`](Self::sync_for_cpu).
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing copied.
    ///
    /// # Safety
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    pub unsafe fn sync_for_device(&self, iova: Iova, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.sync_toward(iova, (offset, len), Toward::Buffer) }
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Copies `len` bytes, from `offset` on, of the mapping at `iova` between its original and its buffer, if the mapping's direction asks for it.
    /// Toward the original the copy comes after all earlier loads of the driver; toward the buffer it comes before all later stores.
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing copied.
    ///
    /// # Safety
    /// If an open mapping begins at `iova`:
    ///
    /// 1. No unmap of the mapping, and no other sync of any of these bytes, runs at the same time.
    /// 2. Clauses 1 and 3 of its [map](super::BounceDevice::map) hold until this has returned: its original is memory, which only devices and atomic
    ///    accesses touch.
    pub(crate) unsafe fn sync_toward(
        &self,
        iova: Iova,
        (offset, len): (u64, u64),
        into: Toward,
    ) -> Result<(), DmaUnmapError> {
        if into == Toward::Original {
            fence(Ordering::Acquire);
        }
        // SAFETY: clauses 1 and 2 are the caller's.
        let result = unsafe { self.sync(iova, offset, len, into) };
        if into == Toward::Buffer {
            fence(Ordering::Release);
        }
        result
    }

    /// # Safety
    /// As [`sync_toward`](Self::sync_toward).
    pub(super) unsafe fn sync(
        &self,
        iova: Iova,
        offset: u64,
        len: u64,
        into: Toward,
    ) -> Result<(), DmaUnmapError> {
        let Some(place) = self.layout.find(iova) else {
            // SAFETY: clauses 1 and 2 are the caller's.
            return unsafe { self.sync_own(iova, offset, len, into) };
        };
        let (slot, terms, at) = self.mapped_slot(place, iova)?;
        let PhysSegment { phys: origin, len: mapped } = slot.origin();
        inside(iova, mapped, (offset, len))?;
        if !terms.copies(into) {
            return Ok(());
        }
        let list = Borrowed { slot, list: take_list(slot, terms, iova)? };
        // SAFETY: `copy`'s clauses: the original by the caller's clause 2; the buffer is the slot's; no other sync or unmap uses them by clause 1.
        unsafe { self.copy_slot(at, origin, list.list.as_deref(), (offset, len), into) };
        Ok(())
    }
}
