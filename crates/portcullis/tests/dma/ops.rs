//! Mappings by number, for a kernel that has a DMA API of its own: whatever protects them, the device reaches a buffer from its
//! map to its unmap, and no mistake of a driver's opens or loses anything.

mod auto;
mod counted;
mod each;
mod left;
mod mistakes;
mod random;
mod support;
mod threads;
mod waits;
