//! A queue behind a pointer, for drivers that are compiled once, and for callers in other languages.

use super::{DmaMapError, DmaUnmapError, Machine, Queue};
use crate::addr::{Direction, DmaSegment, PhysSegment};
use crate::dma::DmaBuffer;
use crate::dma::{Ended, NotUnmapped, RawMapping};

/// The calls of a [`Queue`] by address, without generics: `&mut dyn AnyQueue`. Each has the contract and the errors of the queue's method.
#[allow(clippy::result_large_err, reason = "a mapping that is refused comes back in place")]
pub trait AnyQueue {
    /// [`Queue::map_raw`].
    ///
    /// # Safety
    /// As [`Queue::map_raw`], clauses 1 to 4.
    unsafe fn map_raw(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError>;

    /// [`Queue::unmap_raw`].
    fn unmap_raw(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>>;

    /// [`Queue::commit_raw`].
    fn commit_raw(&mut self) -> Result<usize, DmaUnmapError>;

    /// [`Queue::sync_raw_for_cpu`].
    fn sync_raw_for_cpu(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError>;

    /// [`Queue::sync_raw_for_device`].
    fn sync_raw_for_device(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError>;

    /// [`Queue::waiting`].
    fn waiting(&self) -> usize;
}

impl<X: Machine, B: DmaBuffer> AnyQueue for Queue<X, B> {
    unsafe fn map_raw(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        // SAFETY: clauses 1 to 4 are the caller's.
        unsafe { Self::map_raw(self, list, direction, out) }
    }

    fn unmap_raw(&mut self, mapping: RawMapping) -> Result<Ended<(), ()>, NotUnmapped<RawMapping>> {
        Self::unmap_raw(self, mapping)
    }

    fn commit_raw(&mut self) -> Result<usize, DmaUnmapError> {
        Self::commit_raw(self)
    }

    fn sync_raw_for_cpu(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        Self::sync_raw_for_cpu(self, mapping, offset, len)
    }

    fn sync_raw_for_device(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        Self::sync_raw_for_device(self, mapping, offset, len)
    }

    fn waiting(&self) -> usize {
        Self::waiting(self)
    }
}
