//! Mappings that own their buffer.
//!
//! ```text
//!   buffer --map--> Mapped --unlink--> Unlinked --reclaim--> buffer
//!                      \---------------- unmap ---------------/
//! ```
//!
//! Several mappings end with one wait in an [`UnmapBatch`](super::UnmapBatch).
//!
//! Only the last step gives the buffer back, and it does so only after the hardware has confirmed that the
//! policy's promise holds: for strict protection that the device reaches nothing of it, for lazy protection
//! that the flush is due within the window.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use super::device::bytes_of;
use super::layout::device_view;
use super::{DmaDevice, DmaSegment};
use crate::addr::{Direction, Iova, IovaRange};
use crate::domain::{MapListError, PhysSegment, UnmapError};
use crate::mapper::Mapper;
use crate::platform::Platform;

/// Memory that a device may be let into.
///
/// # Safety
/// - It is the machine's memory: where the device's domain has memory that [copies](crate::platform::CopyMemory), that reaches it by
///   the same numbers.
/// - [`segments`](Self::segments) names memory that belongs to this value alone, and always the same until
///   the value is dropped, wherever the value itself is moved; for ever, if it is leaked.
/// - What safe code can do with the value stays sound while a device reads and writes that memory at any
///   time: access is atomic or volatile, or there is none. This goes for the value that an unmap gives back
///   too, under every policy but the strict ones: there the device may go on for a while.
pub unsafe trait DmaBuffer: 'static {
    /// Where the memory is.
    fn segments(&self) -> &[PhysSegment];
}

/// What a mapping keeps of the device that it is for: a reference, a device of its own, or an [`Arc`] of one.
///
/// # Safety
/// [`device`](Self::device) always returns the same device, wherever the handle is moved.
pub unsafe trait Handle {
    /// What changes the translations of the device's domain.
    type Mapper: Mapper;
    /// What the machine offers.
    type Platform: Platform;

    /// The device.
    fn device(&self) -> &DmaDevice<Self::Mapper, Self::Platform>;
}

// SAFETY: it is the device, of which nothing changes but its policy.
unsafe impl<M: Mapper, P: Platform> Handle for DmaDevice<M, P> {
    type Mapper = M;
    type Platform = P;

    #[inline]
    fn device(&self) -> &Self {
        self
    }
}

// SAFETY: everything is passed on to `D`, which promises the same, and to which the reference always leads.
unsafe impl<D: Handle> Handle for &D {
    type Mapper = D::Mapper;
    type Platform = D::Platform;

    #[inline]
    fn device(&self) -> &DmaDevice<D::Mapper, D::Platform> {
        D::device(self)
    }
}

// SAFETY: as for a reference.
unsafe impl<D: Handle> Handle for Arc<D> {
    type Mapper = D::Mapper;
    type Platform = D::Platform;

    #[inline]
    fn device(&self) -> &DmaDevice<D::Mapper, D::Platform> {
        D::device(self)
    }
}

/// A buffer that was not mapped, and why.
pub struct MapFailed<B> {
    /// The buffer, untouched; `None` where the map failed half-way and the hardware did not confirm that it
    /// was undone: the device may reach the buffer, so it is leaked.
    pub buffer: Option<B>,
    /// Why.
    pub error: MapListError,
}

/// A buffer that a device can reach. Dropping it unmaps it first.
///
/// The unit of protection is the page: the device also reaches what shares the buffer's first and last page.
#[derive(Debug)]
pub struct Mapped<B: DmaBuffer, D: Handle> {
    inner: ManuallyDrop<Inner<B, D>>,
}

/// A buffer whose translations are being removed. The device may still reach it.
#[derive(Debug)]
pub struct Unlinked<B: DmaBuffer, D: Handle> {
    inner: ManuallyDrop<Inner<B, D>>,
}

/// A buffer that cannot be given back yet: the device may still reach it.
pub struct ReclaimFailed<B: DmaBuffer, M: Mapper, P: Platform> {
    /// The buffer, for another [`reclaim`](Unlinked::reclaim). It borrows nothing.
    pub unlinked: Unlinked<B, DmaDevice<M, P>>,
    /// What went wrong.
    pub error: UnmapError,
}

#[derive(Debug)]
struct Inner<B, D: Handle> {
    handle: D,
    buffer: B,
    first: Iova,
    /// The pages to unmap; `None` where nothing translates.
    range: Option<IovaRange>,
    /// Bytes of the buffer.
    used: u64,
    /// An unmap whose invalidation was not confirmed.
    unconfirmed: bool,
    /// An unmap that left something mapped.
    still_mapped: bool,
}

impl<B: DmaBuffer, D: Handle> Mapped<B, D> {
    /// Maps `buffer` for the device of `handle`, which the mapping keeps: a reference, as [`DmaDevice::map`] gives it; or, for
    /// a mapping that must outlive those, a device, or an [`Arc`] of one.
    ///
    /// A reference costs nothing. What counts its users (an `Arc`, and each clone of a device) costs two atomic
    /// operations per mapping, on a line that all who count the same one write: then each queue should have an `Arc` of
    /// its own, made with a clone of the device.
    ///
    /// # Errors
    /// [`MapFailed`] gives the buffer back with the reason, unless the device may reach it.
    #[inline]
    pub fn new(handle: D, buffer: B, direction: Direction) -> Result<Self, MapFailed<B>> {
        let device = handle.device();
        // Where a call below panics, the device may reach it: then it is leaked.
        let buffer = ManuallyDrop::new(buffer);
        let list = buffer.segments();
        let used = bytes_of(list.iter().map(|segment| segment.len));
        // The memory is the buffer's alone and is accessed as a device's may be (`DmaBuffer`); the buffer is given back or
        // dropped only after an unmap, or leaked.
        let mapped = match list {
            // SAFETY: see above.
            [segment] => unsafe { device.map_at_hand(*segment, direction) }.map(|range| (segment, range)),
            _ => None,
        };
        let mapped = match mapped {
            Some((segment, range)) => Ok((device.first_of(*segment, range), Some(range))),
            // SAFETY: see above.
            None => unsafe { device.map_list(list, direction) },
        };
        match mapped {
            Ok((first, range)) => {
                let buffer = ManuallyDrop::into_inner(buffer);
                let inner =
                    Inner { handle, buffer, first, range, used, unconfirmed: false, still_mapped: false };
                Ok(Self { inner: ManuallyDrop::new(inner) })
            }
            Err(error @ MapListError::Unconfirmed { .. }) => Err(MapFailed { buffer: None, error }),
            Err(error) => Err(MapFailed { buffer: Some(ManuallyDrop::into_inner(buffer)), error }),
        }
    }

    /// The address of the buffer's first byte for the device.
    pub fn iova(&self) -> Iova {
        self.inner.first
    }

    /// The buffer as the device sees it, for its descriptors. Allocates.
    pub fn segments(&self) -> Vec<DmaSegment> {
        let list = self.inner.buffer.segments();
        let mut out = alloc::vec![DmaSegment::default(); list.len()];
        let base = self.inner.range.map(IovaRange::start);
        let used = device_view(list, base, self.inner.handle.device().domain().granule(), &mut out);
        out.truncate(used.unwrap_or(0));
        out
    }

    /// The buffer, which the device may be changing meanwhile. Call
    /// [`sync_for_cpu`](Self::sync_for_cpu) after the device has said that it is done.
    pub fn buffer(&self) -> &B {
        &self.inner.buffer
    }

    /// Orders the CPU's later reads of the buffer after the device's writes that it knows of.
    pub fn sync_for_cpu(&self) {
        self.inner.handle.device().sync_for_cpu();
    }

    /// Orders the CPU's earlier writes to the buffer before whatever next tells the device of them.
    pub fn sync_for_device(&self) {
        self.inner.handle.device().sync_for_device();
    }

    /// Ends the mapping and gives the buffer back: [`unlink`](Self::unlink) and
    /// [`reclaim`](Unlinked::reclaim) in one.
    ///
    /// # Errors
    /// [`ReclaimFailed`] keeps the buffer where the hardware did not confirm.
    #[inline]
    pub fn unmap(self) -> Result<B, ReclaimFailed<B, D::Mapper, D::Platform>> {
        // In its place, as moving it takes longer than all the rest. Where a call below panics, it is leaked.
        let mut this = ManuallyDrop::new(self);
        let ended = this.inner.unlink();
        // SAFETY: `this` is never dropped and `inner` not used again: it moves out exactly once.
        let inner = unsafe { ManuallyDrop::take(&mut this.inner) };
        match ended {
            Ok(()) => Ok(inner.buffer),
            Err(_) => Unlinked { inner: ManuallyDrop::new(inner) }.reclaim(),
        }
    }

    /// Ends the mapping by the domain's policy; strict protection waits for the hardware here.
    pub fn unlink(self) -> Unlinked<B, D> {
        let mut inner = self.into_inner();
        // The mapping keeps what it says, for `reclaim`.
        let _ = inner.unlink();
        Unlinked { inner }
    }

    /// The buffer, which is still mapped, the pages to unmap, how many of their bytes are the buffer's, and the handle: to be
    /// dropped when the buffer is safe, as that may panic.
    pub(super) fn into_parts(self) -> (B, Option<IovaRange>, u64, D) {
        let Inner { handle, buffer, range, used, .. } = ManuallyDrop::into_inner(self.into_inner());
        (buffer, range, used, handle)
    }

    /// The device that the buffer is mapped for.
    pub(super) fn device(&self) -> &DmaDevice<D::Mapper, D::Platform> {
        self.inner.handle.device()
    }

    /// The same, which borrows nothing.
    #[cold]
    pub(super) fn owned(self) -> Mapped<B, DmaDevice<D::Mapper, D::Platform>> {
        Mapped { inner: ManuallyDrop::new(ManuallyDrop::into_inner(self.into_inner()).owned()) }
    }

    fn into_inner(self) -> ManuallyDrop<Inner<B, D>> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped and `inner` not used again: it moves on exactly once.
        ManuallyDrop::new(unsafe { ManuallyDrop::take(&mut this.inner) })
    }
}

impl<B: DmaBuffer, D: Handle> Unlinked<B, D> {
    /// Gives the buffer back. Where the hardware has not confirmed the unmap yet, it is asked once more.
    ///
    /// # Errors
    /// [`ReclaimFailed`] keeps the buffer: the device may still reach it.
    pub fn reclaim(self) -> Result<B, ReclaimFailed<B, D::Mapper, D::Platform>> {
        let mut this = ManuallyDrop::new(self);
        let confirmed = this.inner.confirm();
        // SAFETY: `this` is never dropped and `inner` not used again: it moves out exactly once.
        let inner = unsafe { ManuallyDrop::take(&mut this.inner) };
        match confirmed {
            Ok(()) => Ok(inner.buffer),
            Err(error) => {
                Err(ReclaimFailed { unlinked: Unlinked { inner: ManuallyDrop::new(inner.owned()) }, error })
            }
        }
    }
}

impl<B, D: Handle> Inner<B, D> {
    #[inline]
    fn unlink(&mut self) -> Result<(), UnmapError> {
        let Some(range) = self.range else {
            return Ok(());
        };
        // Set before, so that a panic leaves it set. `NotMapped` too: whoever removed the translations
        // may not have invalidated them.
        self.unconfirmed = true;
        let ended = self.handle.device().end(range, self.used);
        self.unconfirmed = ended.is_err();
        self.still_mapped = matches!(ended, Err(UnmapError::StillMapped { .. }));
        ended
    }

    fn confirm(&mut self) -> Result<(), UnmapError> {
        if let (Some(range), true) = (self.range, self.still_mapped) {
            // What was beside the buffer was counted before.
            self.used = range.len();
            let ended = self.unlink();
            if self.still_mapped {
                return ended;
            }
        }
        if let (Some(range), true) = (self.range, self.unconfirmed)
            && let Err(error) = self.handle.device().domain().flush()
        {
            return Err(UnmapError::Unconfirmed { range, error });
        }
        self.unconfirmed = false;
        Ok(())
    }

    /// The same with a device of its own in the place of its handle.
    #[cold]
    fn owned(self) -> Inner<B, DmaDevice<D::Mapper, D::Platform>> {
        // Where the clone panics the buffer is leaked, as it must be.
        let this = ManuallyDrop::new(self);
        let handle = this.handle.device().clone();
        let Self { handle: old, buffer, first, range, used, unconfirmed, still_mapped } =
            ManuallyDrop::into_inner(this);
        let inner =
            ManuallyDrop::new(Inner { handle, buffer, first, range, used, unconfirmed, still_mapped });
        // That may panic, too.
        drop(old);
        ManuallyDrop::into_inner(inner)
    }

    /// Drops the buffer, or leaks it where the device may still reach it: memory that goes back to the
    /// allocator must be unreachable.
    fn release(mut inner: ManuallyDrop<Self>) {
        if inner.confirm().is_ok() {
            drop(ManuallyDrop::into_inner(inner));
        }
    }
}

impl<B: DmaBuffer, D: Handle> Drop for Mapped<B, D> {
    fn drop(&mut self) {
        // SAFETY: `drop` runs once and is the last use of `inner`.
        let mut inner = ManuallyDrop::new(unsafe { ManuallyDrop::take(&mut self.inner) });
        let _ = inner.unlink();
        Inner::release(inner);
    }
}

impl<B: DmaBuffer, D: Handle> Drop for Unlinked<B, D> {
    fn drop(&mut self) {
        // SAFETY: `drop` runs once and is the last use of `inner`.
        Inner::release(ManuallyDrop::new(unsafe { ManuallyDrop::take(&mut self.inner) }));
    }
}

error_by_its_reason!([B] MapFailed<B>);
error_by_its_reason!([B: DmaBuffer, M: Mapper, P: Platform] ReclaimFailed<B, M, P>);
