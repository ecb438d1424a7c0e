//! An arena's errors, as drivers get them.

use super::StrictRingConfig;
use crate::bounce::error::DmaMapError;
use crate::domain::MapListError;
use crate::iova::ArenaError;
use crate::setup::SetupError;

#[cold]
pub(super) fn no_ring(error: ArenaError, config: &StrictRingConfig) -> SetupError {
    match error {
        ArenaError::Space(error) => error.into(),
        ArenaError::OutOfMemory => SetupError::OutOfMemory,
        // A new arena returns only the first three of these.
        ArenaError::Empty
        | ArenaError::Granule { .. }
        | ArenaError::TooLarge { .. }
        | ArenaError::Oversize { .. }
        | ArenaError::Full { .. }
        | ArenaError::NotReserved { .. }
        | ArenaError::InUse { .. } => {
            SetupError::NoRing { descriptors: config.descriptors, bytes: config.descriptor_bytes }
        }
    }
}

#[cold]
pub(super) fn no_addresses(error: ArenaError) -> DmaMapError {
    match error {
        ArenaError::Oversize { len, capacity } => DmaMapError::TooLong { len, most: capacity },
        ArenaError::Space(error) => DmaMapError::List(error.into()),
        ArenaError::OutOfMemory => DmaMapError::OutOfMemory,
        ArenaError::Empty => DmaMapError::List(MapListError::EmptyList),
        // `reserve` returns only `Full`. The rest cannot occur; `Full` is a safe answer, as nothing is mapped.
        ArenaError::Full { .. }
        | ArenaError::Granule { .. }
        | ArenaError::TooLarge { .. }
        | ArenaError::NotReserved { .. }
        | ArenaError::InUse { .. } => DmaMapError::Full,
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../../tests/inside/dma/ring/error.rs"]
mod tests;
