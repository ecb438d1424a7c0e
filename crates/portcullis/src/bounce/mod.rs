//! Bounce buffers: memory that a device reaches in place of a driver's buffer, with copies between the two. A device never reaches the original of a
//! mapping that is copied: protection is strict, and to the byte.
//!
//! Read `pool` (buffers that stay mapped, behind an IOMMU; its module says in which order) or `swiotlb` (a pool without an IOMMU), and
//! `error`, which `dma` shares. It uses `domain`, `invalidation`, `mapper`, `percpu`, `heap`, `platform` and what is below; the swiotlb uses
//! no domain.

mod deadline;
pub(crate) mod error;
#[cfg(feature = "parts")]
pub mod pool;
#[cfg(not(feature = "parts"))]
pub(crate) mod pool;
pub mod swiotlb;

pub use pool::{PoolConfig, PoolUsage};
