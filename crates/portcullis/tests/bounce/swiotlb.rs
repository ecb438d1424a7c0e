//! The swiotlb pool, over simulated memory: what is copied where, what a device finds beside it, how the pool grows and
//! shrinks, and what it says when it is full.

mod full;
mod integrity;
mod mistakes;
mod random;
mod resize;
mod support;
mod threads;
