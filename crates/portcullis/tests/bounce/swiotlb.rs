//! The swiotlb pool, over simulated memory: what is copied where, what a device finds beside it, how the pool grows and
//! shrinks, and what it says when it is full.

#[cfg(not(watched))]
mod full;
#[cfg(not(watched))]
mod integrity;
#[cfg(not(watched))]
mod mistakes;
#[cfg(not(watched))]
mod random;
#[cfg(not(watched))]
mod resize;
mod support;
mod threads;
