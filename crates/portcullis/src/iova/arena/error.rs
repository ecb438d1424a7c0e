use super::RingArena;
use crate::addr::{Iova, IovaRange, PageSize};
use crate::iova::IovaError;

/// Why an arena refuses a call. Nothing is changed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The request has 0 bytes.
    #[error("a ring arena, or a reservation in one, has more than 0 bytes")]
    Empty,
    /// The arena's unit is not that of the space.
    #[error("a ring arena in units of {} bytes does not fit a space in units of {} bytes", granule.bytes(), of_space.bytes())]
    Granule {
        /// The unit asked for.
        granule: PageSize,
        /// The unit of the space.
        of_space: PageSize,
    },
    /// The descriptors take more than the 2^31 granules of an arena, or more bytes than 64 bits can count.
    #[error("no ring arena holds {descriptors} descriptors of {descriptor_bytes} bytes")]
    TooLarge {
        /// Descriptors asked for.
        descriptors: u32,
        /// Bytes of each.
        descriptor_bytes: u64,
    },
    /// The space has no range for the arena, or did not hand this one out.
    #[error("the ring arena's space refused: {0}")]
    Space(#[from] IovaError),
    /// The heap has no memory for the arena's bits.
    #[error("no memory for the bits of a ring arena")]
    OutOfMemory,
    /// The reservation would not fit even into an empty ring.
    #[error("{len} bytes do not fit into a ring of {capacity}")]
    Oversize {
        /// Bytes asked for.
        len: u64,
        /// Bytes of the ring.
        capacity: u64,
    },
    /// There is no room until the oldest reservation is freed: granules that were freed earlier wait for it.
    #[error(
        "no room for {len} bytes in the ring: {reservations} reservations hold {in_use} of \
         {capacity} bytes, the oldest at {oldest}"
    )]
    Full {
        /// Bytes asked for.
        len: u64,
        /// Bytes in live reservations.
        in_use: u64,
        /// Bytes of the ring.
        capacity: u64,
        /// Live reservations.
        reservations: u32,
        /// Where the oldest reservation begins, which must be freed first.
        oldest: Iova,
    },
    /// The range is not exactly one live reservation, or several that adjoin.
    #[error("{range} cannot be freed: it is not what is reserved there")]
    NotReserved {
        /// What was to be freed.
        range: IovaRange,
    },
    /// The arena was to be released while something of it may be mapped.
    #[error("the ring still has {reservations} reservations of {bytes} bytes, the oldest at {oldest}")]
    InUse {
        /// Live reservations.
        reservations: u32,
        /// Their bytes.
        bytes: u64,
        /// Where the oldest begins.
        oldest: Iova,
    },
}

/// An arena that was not released, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct ReleaseError {
    /// The arena, as it was.
    pub arena: RingArena,
    /// Why it was not released.
    pub error: ArenaError,
}
