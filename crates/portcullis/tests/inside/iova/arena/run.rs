use super::super::{ArenaError, RingArena, RingConfig};
use crate::addr::{Iova, IovaRange, PageSize};
use crate::iova::{IovaSpace, SpaceConfig};
use crate::std_platform::StdPlatform;

const PAGE: u64 = 4096;

/// The newest reservations may lie just before the oldest: freed together, the oldest of the rest is what is behind.
#[test]
fn a_run_of_the_newest_and_the_oldest_moves_the_tail() {
    let platform = StdPlatform::with_cpus(1);
    let aperture = IovaRange::new(Iova::new(1 << 21), 1 << 30).unwrap();
    let space = IovaSpace::new(&SpaceConfig::new(aperture, PageSize::SIZE_4K, 1)).unwrap();
    let config = RingConfig::new(16, PAGE, PageSize::SIZE_4K);
    let mut arena = RingArena::new(&space, &platform, &config).unwrap();
    let base = arena.reserve(PAGE).unwrap().start().get();
    let pages = |first: u64, count| IovaRange::new(Iova::new(base + first * PAGE), count * PAGE).unwrap();
    (1..16).for_each(|n| assert_eq!(arena.reserve(PAGE), Ok(pages(n, 1))));
    arena.free_run(pages(0, 4));
    (0..4).for_each(|n| assert_eq!(arena.reserve(PAGE), Ok(pages(n, 1))));
    // Two that were reserved last, and the two oldest.
    arena.free_run(pages(2, 4));
    assert_eq!(arena.reservations(), 12);
    assert!(
        matches!(arena.reserve(3 * PAGE), Err(ArenaError::Full { oldest, .. }) if oldest == pages(6, 1).start())
    );
    assert_eq!(arena.reserve(2 * PAGE), Ok(pages(4, 2)));
    assert!(arena.reserve(PAGE).is_err());
    // What is freed before is in the way of one that goes; what lies in the range only in part stays.
    arena.free_run(pages(8, 1));
    arena.free_run(pages(7, 3));
    arena.free_run(pages(3, 2));
    assert_eq!((arena.reservations(), arena.in_use()), (10, 11 * PAGE));
    assert_eq!(arena.free(pages(4, 2)), Ok(()), "the one of two pages");
    arena.free_run(pages(0, 16));
    assert_eq!((arena.reservations(), arena.in_use()), (0, 0));
    arena.release(&space, &platform).unwrap();
}
