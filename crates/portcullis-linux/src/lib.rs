//! What programs in Linux user space need beside the core: [`registration`], mappings that are kept
//! because drivers use them again. Mappers on VFIO and on iommufd are to come.
//!
//! Everything here stands on the public interface of [`portcullis`] alone: addresses live by the
//! tokens of a [`Domain`](portcullis::domain::Domain), as they would in a cache or a queue of an
//! embedder's own.

pub mod registration;
