//! The domain's own flush queue at its limits: full, while the hardware is silent; timers of several domains.

use portcullis::addr::{Iova, IovaRange, Permissions};
use portcullis::domain::{Policy, UnmapError};
use portcullis::invalidation::{InvalidationError, QUEUE_ENTRIES};
use portcullis_model::DeviceId;
use portcullis_model::open::OpenDomain;

use crate::rig::{ANYWHERE, Clocked, LAZY_FOREVER, PAGE, Rig, page};

const BROKEN: InvalidationError = InvalidationError::TimedOut { waited_ns: 5 };

#[test]
fn where_the_queue_is_full_and_cannot_be_flushed_an_unmap_is_strict_or_says_that_it_is_not() {
    let rig = Rig::new(Clocked::new(1), LAZY_FOREVER, |queue| queue);
    let map = |n| {
        let range: IovaRange = rig.domain.open(&[page(n)], Permissions::READ_WRITE, ANYWHERE).unwrap();
        assert!(rig.reaches(range.start()));
        range
    };
    let live: Vec<_> = (0..QUEUE_ENTRIES as u64 + 2).map(map).collect();
    let (waiting, last) = live.split_at(QUEUE_ENTRIES);
    waiting.iter().for_each(|range| rig.domain.unmap(*range).unwrap());
    assert!(waiting.iter().all(|range| rig.reaches(range.start())), "they wait");
    // The flush fails, and the range's own invalidation does not.
    rig.iommu.queue().fail_next(1, BROKEN);
    rig.domain.unmap(last[0]).unwrap();
    assert!(!rig.reaches(last[0].start()) && rig.reaches(waiting[0].start()));
    assert_eq!(map(0), last[0], "its addresses are free");
    assert_eq!(rig.domain.stats().lost_iova_bytes, 0);
    // Neither is confirmed: there is no room to remember the addresses.
    rig.iommu.queue().fail_next(2, BROKEN);
    let unconfirmed = UnmapError::Unconfirmed { range: last[1], error: BROKEN };
    assert_eq!(rig.domain.unmap(last[1]), Err(unconfirmed));
    assert!(rig.reaches(last[1].start()));
    assert_eq!(rig.domain.stats().lost_iova_bytes, PAGE);
    rig.domain.flush().unwrap();
    assert!(live.iter().all(|range| rig.reaches(range.start()) == (*range == last[0])));
    assert_ne!(map(1), last[1]);
}

#[test]
fn a_domain_whose_window_is_longer_than_another_s_asks_again() {
    let lazy = |window_ns| Policy::Lazy { window_ns };
    let rig = Rig::new(Clocked::new(1), lazy(10_000_000), |queue| queue);
    let (longer, _) = rig.another(2, lazy(25_000_000));
    let reached = |iova: Iova| rig.iommu.access(DeviceId(2), iova, 1, Permissions::WRITE).is_ok();
    let (one, two) = (
        rig.domain.open(&[page(0)], Permissions::READ_WRITE, ANYWHERE).unwrap(),
        longer.open(&[page(1)], Permissions::READ_WRITE, ANYWHERE).unwrap(),
    );
    assert!(rig.reaches(one.start()) && reached(two.start()));
    // The platform has one deadline, the earliest.
    rig.domain.unmap(one).unwrap();
    longer.unmap(two).unwrap();
    rig.platform.go_to(24_999_999);
    assert!(!rig.reaches(one.start()) && reached(two.start()), "each has its own window");
    rig.platform.go_to(25_000_000);
    assert!(!reached(two.start()), "reachable for ever");
}
