//! Addresses that nobody has mapped and nobody gets again: they are counted, wherever something below fails and panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use portcullis::addr::{Direction, Iova, IovaRange, Permissions, PhysSegment};
use portcullis::dma::{Ended, RawBatch, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, MapListError, Policy, UnmapError};
use portcullis::invalidation::InvalidationError;
use portcullis::platform::Platform;
use portcullis_model::Queue;
use portcullis_model::open::{OpenDevice, OpenDomain, OpenRing, Simulated};

use crate::played::Played;
use crate::rig::{ANYWHERE, Call, Clocked, Hooked, Mapper, Moody, PAGE, Rig, page};

type Driver = Rig<Arc<Clocked>, Hooked<Queue>>;

const BOTH: Direction = Direction::Bidirectional;
const TIMED_OUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };

/// All that is gone is counted as lost. What is asked for in these tests are powers of two, so nothing is rounded.
fn is_counted<M: portcullis::mapper::Mapper + Simulated, P: Platform>(domain: &Domain<M, P>) {
    domain.flush().unwrap();
    // There is no such address: but all is looked through for it, and CPUs keep nothing that a flush has covered.
    let none = domain.open(&[page(1 << 20)], Permissions::READ, Iova::new(PAGE - 1));
    assert!(matches!(none, Err(MapListError::Iova(_))), "{none:?}");
    let usage = domain.stats();
    let (gone, lost) = (usage.taken_iova_bytes - usage.cached_iova_bytes, domain.stats().lost_iova_bytes);
    assert!(gone <= lost, "{gone:#x} bytes of addresses are gone, and {lost:#x} are counted");
}

/// A batch of 200 pages, none of which is the next one's neighbour in memory.
fn batch(rig: &Driver) -> RawBatch<Mapper, Played> {
    let mut batch = RawBatch::new(&rig.device, 256).unwrap();
    for number in 0..200 {
        let iova = rig.device.open_single(page(2 * number).phys, PAGE, BOTH).unwrap();
        rig.device.unmap_single_in(&mut batch, iova, PAGE).unwrap();
    }
    batch
}

#[test]
fn a_raw_batch_dropped_while_the_queue_panics_counts_what_it_loses() {
    let rig = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
    is_counted(&rig.domain);
    let batch = batch(&rig);
    rig.queue.set(|| panic!("as the test wants"));
    assert!(catch_unwind(AssertUnwindSafe(|| drop(batch))).is_err());
    rig.queue.clear();
    is_counted(&rig.domain);
}

/// Two things go wrong: the hardware does not answer, and then the clock panics.
#[test]
fn what_is_to_wait_for_a_flush_is_counted_where_the_clock_panics() {
    for is_batch in [false, true] {
        let rig = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
        let iova = rig.device.open_single(page(1).phys, PAGE, BOTH).unwrap();
        let batch = is_batch.then(|| batch(&rig));
        let end = || match batch {
            Some(batch) => drop(batch),
            None => {
                let _ = rig.device.unmap_single(iova, PAGE);
            }
        };
        rig.platform.break_clock(true);
        rig.iommu.queue().fail_next(1, TIMED_OUT);
        assert!(catch_unwind(AssertUnwindSafe(end)).is_err());
        rig.platform.break_clock(false);
        if is_batch {
            rig.device.unmap_single(iova, PAGE).unwrap();
        }
        is_counted(&rig.domain);
    }
}

/// The hardware does not confirm what a ring asks for at its end: dropped, or committed in vain and dropped then.
#[test]
fn a_ring_that_ends_unconfirmed_gives_no_address_back() {
    for (is_tried, failures) in [(false, 1), (true, 2)] {
        for is_committed in [false, true] {
            let rig = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
            let mut ring = StrictRing::new(
                &rig.device,
                StrictRingConfig::new(512, PAGE, if is_committed { 1 } else { 2 }),
            )
            .unwrap();
            let mapping = ring.open(&[page(1)], BOTH).unwrap();
            let start = mapping.iova();
            assert!(rig.reaches(start));
            if is_committed {
                // In vain: it is cleared, and waits.
                rig.iommu.queue().fail_next(1, TIMED_OUT);
                ring.unmap(mapping).unwrap_err();
            } else {
                assert_eq!(ring.unmap(mapping).unwrap(), Ended::Pending);
            }
            let before = rig.domain.stats().lost_iova_bytes;
            rig.iommu.queue().fail_next(failures, TIMED_OUT);
            if is_tried {
                ring.commit().unwrap_err();
            }
            drop(ring);
            assert!(rig.reaches(start), "the hardware has forgotten nothing");
            let lost = rig.domain.stats().lost_iova_bytes - before;
            assert!(lost >= 512 * PAGE, "{lost:#x} bytes of addresses are lost, and the ring had more");
            let open = rig.domain.exposure().stale_byte_ns;
            rig.platform.take(1_000);
            assert!(rig.domain.exposure().stale_byte_ns > open, "what is reached is counted");
            rig.iommu.queue().fail_next(0, TIMED_OUT);
            rig.domain.flush().unwrap();
            assert!(!rig.reaches(start));
        }
    }
}

/// A part has ended before. When the rest does, by itself or in a batch, the platform panics behind the removal. All of the mapping is lost
/// then, once, whoever ends it again.
#[test]
fn what_a_panic_loses_of_a_mapping_is_all_of_it() {
    for is_batch in [false, true] {
        let rig = Rig::new(Moody::new(2), Policy::Strict, Hooked::new);
        let open = |from| {
            let list = [PhysSegment { len: 4 * PAGE, ..page(from) }];
            rig.domain.open(&list, Permissions::READ, ANYWHERE).unwrap()
        };
        let range = open(1);
        let part = IovaRange::new(range.start(), PAGE).unwrap();
        rig.domain.unmap(part).unwrap();
        // Nobody counts what has gone of another's as this one's.
        let other = open(9);
        let others = IovaRange::new(other.start(), 2 * PAGE).unwrap();
        rig.domain.unmap(others).unwrap();
        let mut batch = RawBatch::new(&rig.device, 1).unwrap();
        let platform = Arc::clone(&rig.platform);
        let end = || {
            if is_batch {
                // The first two are of the removal.
                platform.panic_behind(2, Call::WithCpu);
                let _ = rig.device.unmap_single_in(&mut batch, range.start(), range.len());
            } else {
                rig.queue.set(move || platform.panic_in(Call::WithCpu));
                let _ = rig.domain.unmap(range);
            }
        };
        assert!(catch_unwind(AssertUnwindSafe(end)).is_err());
        rig.queue.clear();
        let lost = || rig.domain.stats().lost_iova_bytes;
        assert_eq!(lost(), 4 * PAGE, "in a batch: {is_batch}");
        drop(batch);
        assert_eq!(rig.domain.unmap(range), Err(UnmapError::NotMapped { range, unmapped: 0 }));
        for again in [range, part, others] {
            rig.domain.unmap(again).unwrap_err();
            assert_eq!(lost(), 4 * PAGE, "{again}, in a batch: {is_batch}");
        }
        // What was left of that one ends with it, and its addresses come back.
        let rest = UnmapError::NotMapped { range: other, unmapped: 2 * PAGE };
        assert_eq!(rig.domain.unmap(other), Err(rest));
        assert_eq!(rig.gone(), (4 * PAGE, 4 * PAGE));
    }
}
