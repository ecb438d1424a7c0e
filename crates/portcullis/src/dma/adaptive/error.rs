//! The errors of an adaptive ring. Each is one of the ring's or of the pool's, unchanged.

use super::AdaptiveMapping;
use super::mapping::Course;
use crate::addr::PageSize;
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::dma::RingError;
use crate::domain::MapListError;

/// A list that was not mapped. No part of it is; after [`MapListError::Unconfirmed`] devices may
/// still reach what was entered of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdaptiveMapError {
    /// The ring has refused it, for another reason than a lack of tables; for a lack of room while
    /// others wait for a commit.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// By the pool.
    #[error(transparent)]
    Pool(#[from] DmaMapError),
}

impl From<MapListError> for AdaptiveMapError {
    fn from(error: MapListError) -> Self {
        Self::Pool(error.into())
    }
}

/// Why a mapping has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdaptiveUnmapError {
    /// The ring has not ended it.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// By the pool.
    #[error(transparent)]
    Pool(#[from] DmaUnmapError),
}

/// A mapping that was not unmapped, or a batch that was not committed with it.
pub struct AdaptiveUnmapFailed {
    /// The mapping, untouched, where it can be unmapped again; `None` where it waits with the others for a commit, or
    /// the pool keeps it.
    pub mapping: Option<AdaptiveMapping>,
    /// Why.
    pub error: AdaptiveUnmapError,
}

impl AdaptiveUnmapFailed {
    /// Refuses a mapping of another ring.
    #[cold]
    pub(super) fn foreign(mapping: AdaptiveMapping, granule: PageSize) -> Self {
        let not_mapped = DmaUnmapError::NotMapped { iova: mapping.iova() };
        let range = match &mapping.course {
            Course::Ring(mapping) | Course::Cut { mapping, .. } => mapping.range(granule),
            Course::Pool { .. } => None,
        };
        let error = range.map_or(not_mapped.into(), |range| RingError::Foreign { range }.into());
        Self { mapping: Some(mapping), error }
    }
}

error_by_its_reason!([] AdaptiveUnmapFailed);
