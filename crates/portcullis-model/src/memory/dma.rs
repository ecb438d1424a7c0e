//! A [`Buffer`] for the core's typed mappings.
#![allow(unsafe_code, reason = "the trait is unsafe to implement: it makes a promise")]

use portcullis::addr::PhysSegment;
use portcullis::dma::DmaBuffer;

use super::Buffer;

// SAFETY: 1 and 2: a buffer owns its frames from `Memory::buffer` until it is dropped, wherever it is moved. 3 and 4: all access to them,
// the device's and the CPU's, is atomic.
unsafe impl DmaBuffer for Buffer {
    fn segments(&self) -> &[PhysSegment] {
        std::slice::from_ref(self.segment())
    }
}
