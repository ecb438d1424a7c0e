//! Syncs of an open mapping, each by its lane: of the queue's own mappings alone.

use super::swiotlb::Side;
use super::{DmaUnmapError, Lane, Queue};
use crate::addr::DmaSegment;
use crate::dma::Machine;
use crate::dma::mapping::Kind;
use crate::dma::{DmaBuffer, RawMapping};

impl<X: Machine, B: DmaBuffer> Queue<X, B> {
    /// Makes the device's writes of `len` bytes, from `offset` on, of an open mapping visible to the CPU: copies them, if there is a copy,
    /// and orders the CPU's later reads after that. O(len) if there is a copy or the device is non-coherent; otherwise a fence.
    ///
    /// A raw mapping does not know its length, so a part outside of it is an error only if there is a copy.
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing copied.
    pub fn sync_raw_for_cpu(&self, mapping: &RawMapping, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        self.sync(mapping, Side::Cpu, (offset, len))
    }

    /// Makes the CPU's writes of `len` bytes, from `offset` on, of an open mapping visible to the device: copies them, if there is a copy,
    /// and orders the CPU's later writes after that. O(len) if there is a copy or the device is non-coherent; otherwise a fence.
    ///
    /// A raw mapping does not know its length, so a part outside of it is an error only if there is a copy.
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing copied.
    pub fn sync_raw_for_device(
        &self,
        mapping: &RawMapping,
        offset: u64,
        len: u64,
    ) -> Result<(), DmaUnmapError> {
        self.sync(mapping, Side::Device, (offset, len))
    }

    pub(super) fn sync(
        &self,
        mapping: &RawMapping,
        side: Side,
        part: (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        if mapping.queue() != self.number {
            return Err(DmaUnmapError::OtherQueue);
        }
        let ((offset, len), &RawMapping { iova, word, .. }) = (part, mapping);
        let pool = match (&self.lane, mapping.kind()) {
            (Lane::Bounce(device), Kind::Pool(_)) => device.pool(),
            (Lane::Auto(ring), _) => {
                return match side {
                    Side::Cpu => ring.sync_for_cpu(mapping, offset, len),
                    Side::Device => ring.sync_for_device(mapping, offset, len),
                };
            }
            (Lane::NotCoherent(lane), Kind::NotCoherent) => {
                return lane.sync(word as usize, side, part);
            }
            (Lane::Swiotlb(copies), Kind::Swiotlb { is_list }) => {
                let one = [DmaSegment { iova, len: word }];
                let pieces = if is_list { copies.list(word as usize) } else { &one[..] };
                // SAFETY: as for the pool below.
                return unsafe { copies.sync(pieces, side, part) };
            }
            _ => {
                match side {
                    Side::Cpu => self.device.sync_for_cpu(),
                    Side::Device => self.device.sync_for_device(),
                }
                return Ok(());
            }
        };
        // SAFETY: the pool's clause 1: the mapping is borrowed, so it does not end meanwhile, and a queue is not `Sync`, so no two of its syncs
        // meet. Clause 2 is `map_raw`'s clause 2, its maker's.
        unsafe {
            match side {
                Side::Cpu => pool.sync_for_cpu(iova, offset, len),
                Side::Device => pool.sync_for_device(iova, offset, len),
            }
        }
    }
}
