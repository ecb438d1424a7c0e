//! The steps underneath a ring: reserve, link, unlink, commit, release.

use portcullis::addr::{Direction, Iova, IovaRange, PageSize};
use portcullis::dma::{RingError, RingUnmap, StrictRing, StrictRingConfig};
use portcullis::domain::{MapListError, Policy};
use portcullis::invalidation::InvalidationError;
use portcullis::iova::ArenaError;
use portcullis::pgtable::MapError;
use portcullis_model::open::OpenRing;

use crate::bench::{Bench, PAGE, page};

fn part(range: IovaRange, first: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(range.start().get() + first * PAGE), pages * PAGE).unwrap()
}

#[test]
fn what_is_reserved_together_may_be_linked_one_by_one_and_unlinked_at_once() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(4, 64 * PAGE, 8)).unwrap();
    let range = ring.reserve(64 * PAGE).unwrap();
    assert!(!bench.reaches(range.start()), "reserved is not mapped");
    for number in 0..64 {
        ring.open_link(part(range, number, 1), &[page(number)], Direction::Bidirectional).unwrap();
        assert!(bench.reaches(part(range, number, 1).start()));
    }
    ring.unlink(range).unwrap();
    assert!(bench.reaches(range.start()), "what is cached stays until the commit");
    assert_eq!(ring.release(range), Err(RingError::NotCommitted { range }));
    assert_eq!(ring.commit(), Ok(0), "no whole descriptor was unmapped");
    assert_eq!(bench.submissions(), 1);
    assert!((0..64).all(|number| !bench.reaches(part(range, number, 1).start())));
    ring.release(range).unwrap();
    assert!(matches!(ring.release(range), Err(RingError::Arena(ArenaError::NotReserved { .. }))));
    ring.close().unwrap();
}

#[test]
fn a_part_may_be_linked_again_after_a_commit() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(4, 4 * PAGE, 8)).unwrap();
    let range = ring.reserve(4 * PAGE).unwrap();
    let list: Vec<_> = (0..4).map(page).collect();
    ring.open_link(range, &list, Direction::Bidirectional).unwrap();
    let middle = part(range, 1, 2);
    ring.unlink(middle).unwrap();
    ring.commit().unwrap();
    assert!(bench.reaches(range.start()) && !bench.reaches(middle.start()));
    ring.open_link(middle, &list[..2], Direction::Bidirectional).unwrap();
    assert!(bench.reaches(middle.start()));
    ring.unlink(range).unwrap();
    ring.commit().unwrap();
    ring.release(range).unwrap();
}

/// Unmapped together, of which one had been taken apart by the steps.
#[test]
fn what_was_released_by_the_step_does_not_keep_its_neighbours() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(16, PAGE, 8)).unwrap();
    let mut map = |number| ring.open(&[page(number)], Direction::Bidirectional).unwrap();
    let descriptors = [map(0), map(1), map(2), map(3)];
    let second = descriptors[1].range(PageSize::SIZE_4K).unwrap();
    ring.unlink(second).unwrap();
    ring.commit().unwrap();
    ring.release(second).unwrap();
    assert_eq!(ring.arena().unwrap().reservations(), 3);
    let starts = descriptors.each_ref().map(|descriptor| descriptor.iova());
    assert!(starts.iter().all(|start| bench.reaches(*start) == (*start != second.start())));
    for descriptor in descriptors {
        assert_eq!(ring.unmap(descriptor).unwrap(), RingUnmap::Waiting);
    }
    assert_eq!(ring.release(second), Err(RingError::NotCommitted { range: second }));
    assert_eq!(ring.commit(), Ok(4));
    assert_eq!(ring.arena().unwrap().reservations(), 0);
    assert!(starts.iter().all(|start| !bench.reaches(*start)));
    ring.close().unwrap();
}

#[test]
fn mistakes_are_named_and_change_nothing() {
    let bench = Bench::new(Policy::Strict);
    let mut ring = StrictRing::new(&bench.device, StrictRingConfig::new(4, 4 * PAGE, 8)).unwrap();
    let range = ring.reserve(2 * PAGE).unwrap();
    let list = [page(0), page(1)];
    let error = ring.open_link(part(range, 0, 1), &list, Direction::ToDevice).unwrap_err();
    assert_eq!(error, RingError::Length { range: part(range, 0, 1), list: 2 * PAGE });
    let foreign = IovaRange::new(Iova::new(PAGE), 2 * PAGE).unwrap();
    assert_eq!(
        ring.open_link(foreign, &list, Direction::ToDevice),
        Err(RingError::Foreign { range: foreign })
    );
    assert_eq!(ring.unlink(foreign), Err(RingError::Foreign { range: foreign }));
    ring.open_link(range, &list, Direction::Bidirectional).unwrap();
    let again = ring.open_link(range, &list, Direction::Bidirectional).unwrap_err();
    assert!(matches!(again, RingError::Map(MapListError::Map(MapError::AlreadyMapped { .. }))), "{again}");
    assert!(bench.reaches(range.start()));
    assert!(matches!(ring.release(part(range, 0, 1)), Err(RingError::Arena(ArenaError::Mismatch { .. }))));
    ring.unlink(part(range, 1, 1)).unwrap();
    assert_eq!(ring.unlink(range), Err(RingError::NotMapped { range, unmapped: PAGE }));
    bench.iommu.queue().fail_next(1, InvalidationError::Rejected { code: 1 });
    assert!(matches!(ring.commit(), Err(RingError::Unconfirmed { descriptors: 0, .. })));
    assert!(bench.reaches(range.start()), "not confirmed");
    ring.commit().unwrap();
    assert!(!bench.reaches(range.start()));
    ring.release(range).unwrap();
    ring.close().unwrap();
}
