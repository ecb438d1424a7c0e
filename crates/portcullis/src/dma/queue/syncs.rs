//! Syncs of open mappings by address.

use super::lane::Lane;
use super::lanes::{AnyLane, by_lane};
use super::{DmaUnmapError, Queue};
use crate::bounce::pool::Toward;
use crate::dma::Machine;
use crate::dma::{DmaBuffer, RawMapping};

impl<X: Machine, B: DmaBuffer> Queue<X, B> {
    /// Makes the device's writes to `len` bytes of an open mapping, from `offset` on, visible to the CPU, and orders the CPU's later reads after
    /// them. O(len) if there is a copy or the device is non-coherent; otherwise a fence.
    ///
    /// A raw mapping does not know its length, so a part outside of it is an error only if there is a copy.
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing copied.
    pub fn sync_raw_for_cpu(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        self.sync(mapping, Toward::Original, (offset, len))
    }

    /// As [`sync_raw_for_cpu`](Self::sync_raw_for_cpu), but makes the CPU's writes visible to the device, and orders the CPU's later writes after them.
    pub fn sync_raw_for_device(
        &self,
        mapping: &RawMapping,
        offset: u64,
        len: u64,
    ) -> Result<(), DmaUnmapError> {
        self.sync(mapping, Toward::Buffer, (offset, len))
    }

    pub(super) fn sync(
        &self,
        mapping: &RawMapping,
        into: Toward,
        part: (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        if mapping.queue() != self.common.number {
            return Err(DmaUnmapError::OtherQueue);
        }
        // SAFETY: clause 1: the number is this queue's, and the mapping is borrowed, so it is open.
        by_lane!(&self.lane, lane => unsafe { lane.sync_for(&self.common, mapping, into, part) })
    }
}
