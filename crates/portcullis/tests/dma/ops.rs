//! Mappings by number, for a kernel that has a DMA API of its own: whatever protects them, the device reaches a buffer from its
//! map to its unmap, and no mistake of a driver's opens or loses anything.

mod each;
mod mistakes;
mod support;
