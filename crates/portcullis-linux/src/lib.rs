//! What programs in Linux user space need beside the core: [`registration`], mappings that are kept
//! because drivers use them again; and [`heap`], the process's memory as devices' memory. Mappers on VFIO and on iommufd are
//! to come.
//!
//! Everything here stands on the public interface of [`portcullis`] alone: addresses live by the
//! tokens of a [`Domain`](portcullis::domain::Domain), as they would in a cache or a queue of an
//! embedder's own.

// The model checker's words are not memory.
#[cfg(not(loom))]
pub mod heap;
pub mod registration;
