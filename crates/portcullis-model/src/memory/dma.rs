//! A [`Buffer`] as the core's typed mappings take it.
#![allow(unsafe_code, reason = "the trait is unsafe to implement: it makes a promise")]

use portcullis::addr::PhysSegment;
use portcullis::dma::DmaBuffer;

use super::Buffer;

// SAFETY: a buffer's frames are its own from `Memory::buffer` until it is dropped, and moving it does not
// move them. All access to them, the device's and the CPU's, goes through atomics.
unsafe impl DmaBuffer for Buffer {
    fn segments(&self) -> &[PhysSegment] {
        std::slice::from_ref(self.segment())
    }
}
