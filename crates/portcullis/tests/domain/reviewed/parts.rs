//! Mappings of which another has removed a part, or all, by number: what is left, and what hardware still holds.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{BatchError, Ended, RawBatch, StrictRing, StrictRingConfig};
use portcullis::domain::{MapListError, Policy, UnmapError};
use portcullis::invalidation::{Gather, InvalidationError};
use portcullis_model::Queue;
use portcullis_model::open::{OpenDevice, OpenDomain, OpenMapper, OpenRing};

use crate::rig::{ANYWHERE, Clocked, Hooked, PAGE, Rig, page};

type Driver = Rig<Arc<Clocked>, Hooked<Queue>>;

const SECOND: u64 = 1_000_000_000;
const TIMED_OUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };
const BOTH: Direction = Direction::Bidirectional;
const LARGE: u64 = 2 << 20;
const MEMORY: PhysSegment = PhysSegment { phys: PhysAddr::new(1 << 40), len: LARGE };

/// The owner ends a large page in parts of `part` bytes, each by `end`, after another has removed it as a whole, and not
/// invalidated it yet.
fn in_parts<S>(begin: impl Fn(&Driver) -> (S, IovaRange), end: impl Fn(&Driver, &mut S, IovaRange)) {
    for part in [LARGE, LARGE / 2, PAGE] {
        let rig = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
        let (mut own, range) = begin(&rig);
        let at = |offset| Iova::new(range.start().get() + offset);
        let reached = || (0..LARGE).step_by(PAGE as usize).filter(|offset| rig.reaches(at(*offset))).count();
        assert_eq!(reached(), 512);
        let mut other = RawBatch::new(&rig.device, 4).unwrap();
        rig.device.unmap_single_in(&mut other, range.start(), LARGE).unwrap();
        for offset in (0..LARGE).step_by(part as usize) {
            end(&rig, &mut own, IovaRange::new(at(offset), part).unwrap());
        }
        assert_eq!(reached(), 0, "pages are reached after their ends in parts of {part:#x} bytes");
        other.commit().unwrap();
    }
}

fn by_number(rig: &Driver) -> IovaRange {
    let iova = rig.device.open_single(MEMORY.phys, LARGE, BOTH).unwrap();
    IovaRange::new(iova, LARGE).unwrap()
}

#[test]
fn what_is_unmapped_in_parts_is_out_of_reach_though_another_has_removed_the_large_page() {
    in_parts(
        |rig| ((), by_number(rig)),
        |rig, (), part| {
            let ended = rig.device.unmap_single(part.start(), part.len());
            assert_eq!(ended, Err(UnmapError::NotMapped { range: part, unmapped: 0 }));
        },
    );
    in_parts(
        |rig| (RawBatch::new(&rig.device, 1).unwrap(), by_number(rig)),
        |rig, batch, part| {
            let ended = rig.device.unmap_single_in(batch, part.start(), part.len());
            let error = UnmapError::NotMapped { range: part, unmapped: 0 };
            assert_eq!(ended, Err(BatchError::Unmap(error)));
            batch.commit().unwrap();
        },
    );
}

/// Has `end` end what is mapped at `iova` while the hardware is silent once: a later flush is tried, and it is counted
/// meanwhile.
fn is_tried_again(what: &str, rig: &Driver, iova: Iova, end: impl FnOnce()) {
    assert!(rig.reaches(iova));
    let before = rig.domain.exposure().stale_byte_ns;
    rig.iommu.queue().fail_next(1, TIMED_OUT);
    end();
    assert!(rig.reaches(iova), "it was not confirmed: {what}");
    rig.platform.go_to(SECOND);
    let counted = rig.domain.exposure().stale_byte_ns - before;
    assert!(!rig.reaches(iova), "reached after a second, {counted} counted: {what}");
    assert!(counted >= u128::from(PAGE * 1_000_000), "{counted} counted: {what}");
}

fn two_pages(rig: &Driver) -> Iova {
    rig.device.open_single(page(1).phys, 2 * PAGE, BOTH).unwrap()
}

/// Another has removed the second of two pages before.
#[test]
fn what_is_not_confirmed_is_tried_again_and_counted_though_a_part_of_it_was_gone() {
    for (policy, is_whole) in
        [(Policy::Strict, true), (Policy::Strict, false), (Policy::LAZY, true), (Policy::LAZY, false)]
    {
        let begin = || {
            let rig = Rig::new(Clocked::new(2), policy, Hooked::new);
            let iova = two_pages(&rig);
            if !is_whole {
                let second = Iova::new(iova.get() + PAGE);
                rig.device.unmap_single(second, PAGE).unwrap();
                // Nothing of that waits any more.
                rig.platform.go_to(SECOND / 2);
            }
            (rig, iova)
        };
        let what = |by| format!("{by}, {}, whole: {is_whole}", policy.name());
        let (rig, iova) = begin();
        is_tried_again(&what("an unmap"), &rig, iova, || {
            let ended = rig.device.unmap_single(iova, 2 * PAGE);
            assert!(ended == Ok(()) || matches!(ended, Err(UnmapError::Unconfirmed { .. })), "{ended:?}");
        });
        let (rig, iova) = begin();
        is_tried_again(&what("a batch"), &rig, iova, || {
            let mut batch = RawBatch::new(&rig.device, 1).unwrap();
            let unmapped = rig.device.unmap_single_in(&mut batch, iova, 2 * PAGE);
            assert_eq!(unmapped.is_ok(), is_whole);
        });
    }
}

#[test]
fn what_a_ring_leaves_unconfirmed_is_tried_again_and_counted() {
    let rig = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
    let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(8, PAGE, 2)).unwrap();
    let mapping = ring.open(&[page(1)], BOTH).unwrap();
    let iova = mapping.iova();
    assert!(rig.reaches(iova));
    assert_eq!(ring.unmap(mapping).unwrap(), Ended::Pending);
    is_tried_again("a ring", &rig, iova, || drop(ring));
}

/// A list that meets somebody else's mapping half-way, and is not confirmed to be gone.
#[test]
fn what_a_map_leaves_unconfirmed_beside_another_s_mapping_is_tried_again_and_counted() {
    let rig = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
    let iova = two_pages(&rig);
    rig.device.unmap_single(iova, 2 * PAGE).unwrap();
    let second = IovaRange::new(Iova::new(iova.get() + PAGE), PAGE).unwrap();
    let stranger = [(page(9).phys, PAGE)];
    let mapper = rig.domain.mapper();
    mapper.open(&rig.platform, second, stranger, Permissions::READ, &mut Gather::new()).unwrap();
    let flushes = rig.domain.stats().flushes;
    rig.iommu.queue().fail_next(1, TIMED_OUT);
    let mapped = rig.domain.open(&[page(1), page(3)], Permissions::READ_WRITE, ANYWHERE);
    assert!(matches!(mapped, Err(MapListError::Unconfirmed { .. })), "{mapped:?}");
    rig.platform.go_to(SECOND);
    assert!(rig.domain.stats().flushes > flushes);
    assert!(rig.domain.exposure().stale_byte_ns >= u128::from(PAGE * 1_000_000));
}
