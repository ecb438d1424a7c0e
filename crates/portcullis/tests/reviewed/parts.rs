//! Mappings of which another has removed a part, or all, by number: what is left, and what hardware still holds.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, IovaRange, PhysAddr};
use portcullis::dma::{BatchError, RawBatch, RingError, StrictRing, StrictRingConfig};
use portcullis::domain::{PhysSegment, Policy, UnmapError};
use portcullis_model::Queue;
use portcullis_model::open::{OpenDevice, OpenRing};

use crate::rig::{Clocked, Hooked, PAGE, Rig};

type Driver = Rig<Arc<Clocked>, Hooked<Queue>>;

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
        let mut other = RawBatch::new(&rig.device, 4);
        rig.device.unmap_single_in(&mut other, range.start(), LARGE).unwrap();
        for offset in (0..LARGE).step_by(part as usize) {
            end(&rig, &mut own, IovaRange::new(at(offset), part).unwrap());
        }
        assert_eq!(reached(), 0, "pages are reached after their ends in parts of {part:#x} bytes");
        other.commit().unwrap();
    }
}

/// `StrictRing::unlink`: "the commit covers all of the range all the same".
#[test]
fn what_a_ring_unlinks_in_parts_is_out_of_reach_though_another_has_removed_the_large_page() {
    let begin = |rig: &Driver| {
        let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(4, LARGE, 1)).unwrap();
        let range = ring.reserve(LARGE).unwrap();
        ring.open_link(range, &[MEMORY], BOTH).unwrap();
        (ring, range)
    };
    in_parts(begin, |_, ring, part| {
        assert_eq!(ring.unlink(part), Err(RingError::NotMapped { range: part, unmapped: 0 }));
        ring.commit().unwrap();
    });
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
        |rig| (RawBatch::new(&rig.device, 1), by_number(rig)),
        |rig, batch, part| {
            let ended = rig.device.unmap_single_in(batch, part.start(), part.len());
            let error = UnmapError::NotMapped { range: part, unmapped: 0 };
            assert_eq!(ended, Err(BatchError::Unmap(error)));
            batch.commit().unwrap();
        },
    );
}
