//! A DMA buffer in simulated memory: a device may write its bytes while the program reads them.

use std::fmt;
use std::sync::Arc;

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::platform::{FRAME_SIZE, Frames};

use super::{BadAddress, Memory};

/// Contiguous bytes that start at a frame. Drop frees the frames; a device with a translation that was left open can still reach them,
/// which the checks look for.
pub struct Buffer {
    memory: Arc<Memory>,
    segment: PhysSegment,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("phys", &self.phys()).field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Buffer {
    pub(super) fn new(memory: &Arc<Memory>, len: u64) -> Option<Self> {
        let phys = memory.alloc(usize::try_from(len.div_ceil(FRAME_SIZE)).ok()?)?;
        Some(Self { memory: Arc::clone(memory), segment: PhysSegment { phys, len } })
    }

    pub(super) fn segment(&self) -> &PhysSegment {
        &self.segment
    }

    /// The physical address of the first byte.
    pub fn phys(&self) -> PhysAddr {
        self.segment.phys
    }

    /// Its length in bytes, never 0.
    pub fn len(&self) -> u64 {
        self.segment.len
    }

    /// Always false. (For readers who expect it beside [`len`](Self::len).)
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Reads bytes from `offset` on.
    ///
    /// # Errors
    /// [`BadAddress`] if they are not all inside the buffer; nothing was read then.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), BadAddress> {
        self.memory.read(self.at(offset, bytes.len())?, bytes)
    }

    /// Writes bytes from `offset` on.
    ///
    /// # Errors
    /// [`BadAddress`] if they are not all inside the buffer; nothing was written then.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), BadAddress> {
        self.memory.write(self.at(offset, bytes.len())?, bytes)
    }

    /// Sets every byte to `byte`; the rest of the last frame stays as it is.
    pub fn fill(&self, byte: u8) {
        let page = [byte; FRAME_SIZE as usize];
        let mut offset = 0;
        while offset < self.segment.len {
            let count = FRAME_SIZE.min(self.segment.len - offset);
            // Inside the buffer by the bounds of this loop, and the buffer is inside the memory.
            let written = self.write(offset, &page[..count as usize]);
            debug_assert!(written.is_ok());
            offset += count;
        }
    }

    fn at(&self, offset: u64, len: usize) -> Result<PhysAddr, BadAddress> {
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= self.segment.len);
        let address = self.segment.phys.checked_add(offset).filter(|_| inside);
        address.ok_or(BadAddress { address: self.segment.phys.get().saturating_add(offset), len: len as u64 })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.memory.release(self.segment.phys, self.segment.len.div_ceil(FRAME_SIZE) as usize);
    }
}
