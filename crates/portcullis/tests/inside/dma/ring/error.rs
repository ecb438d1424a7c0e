use super::*;
use crate::errors::{AT, range};
use crate::iova::IovaError;

#[test]
fn a_driver_is_told_what_its_ring_has_no_addresses_for() {
    let full = ArenaError::Full { len: 1, in_use: 2, capacity: 3, reservations: 4, oldest: AT };
    for (error, told) in [
        (ArenaError::Oversize { len: 2, capacity: 1 }, DmaMapError::TooLong { len: 2, most: 1 }),
        (
            ArenaError::Space(IovaError::OutOfMemory),
            DmaMapError::List(MapListError::Iova(IovaError::OutOfMemory)),
        ),
        (ArenaError::OutOfMemory, DmaMapError::OutOfMemory),
        (ArenaError::Empty, DmaMapError::List(MapListError::EmptyList)),
        (full, DmaMapError::Full),
        (ArenaError::NotReserved { range: range() }, DmaMapError::Full),
    ] {
        assert_eq!(no_addresses(error), told);
    }
}

#[test]
fn a_driver_is_told_why_it_gets_no_ring() {
    let config = StrictRingConfig::new(3, 4, 5);
    for (error, told) in [
        (ArenaError::Space(IovaError::OutOfMemory), SetupError::Space(IovaError::OutOfMemory)),
        (ArenaError::OutOfMemory, SetupError::OutOfMemory),
        (ArenaError::Empty, SetupError::NoRing { descriptors: 3, bytes: 4 }),
        (
            ArenaError::TooLarge { descriptors: 3, descriptor_bytes: 4 },
            SetupError::NoRing { descriptors: 3, bytes: 4 },
        ),
    ] {
        assert_eq!(no_ring(error, &config), told);
    }
}
