//! Bounce buffers: memory that stands between a device and the buffers of drivers, and copies between the two.
//!
//! A device that is given a bounce buffer never reaches the original: protection is strict, and to the byte.

pub(crate) mod error;
#[cfg(feature = "parts")]
pub mod pool;
#[cfg(not(feature = "parts"))]
pub(crate) mod pool;
mod pressure;
pub mod swiotlb;

pub use pool::{PoolConfig, PoolUsage};
