//! Bounce buffers: memory that a device reaches in place of a driver's buffer, with copies between
//! the two. A device that is given a bounce buffer never reaches the original, so protection is
//! strict, and to the byte.

pub(crate) mod error;
#[cfg(feature = "parts")]
pub mod pool;
#[cfg(not(feature = "parts"))]
pub(crate) mod pool;
mod pressure;
pub mod swiotlb;

pub use pool::{PoolConfig, PoolUsage};
