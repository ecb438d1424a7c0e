//! Steps of a ring that panic are covered by its next commit, and none of their addresses is handed out before.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::addr::{Direction, Iova, IovaRange, Permissions};
use portcullis::dma::{StrictRing, StrictRingConfig};
use portcullis::domain::{PhysSegment, Policy};
use portcullis_model::open::OpenRing;

use crate::rig::{Clocked, DEVICE, Hooked, PAGE, Rig, page};

const BOTH: Direction = Direction::Bidirectional;

/// The platform panics when it has the slot back in which an `unlink` cleared its entries.
#[test]
fn an_unlink_that_panics_is_covered_by_the_next_commit_and_its_address_not_handed_out_before() {
    let rig = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
    let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(512, PAGE, 1)).unwrap();
    let range = ring.reserve(PAGE).unwrap();
    ring.open_link(range, &[page(1)], BOTH).unwrap();
    assert!(rig.reaches(range.start()));
    let armed = Arc::new(AtomicBool::new(true));
    rig.platform.after_each_turn({
        let armed = Arc::clone(&armed);
        move || assert!(!armed.swap(false, Ordering::Relaxed), "as the test wants")
    });
    assert!(catch_unwind(AssertUnwindSafe(|| ring.unlink(range))).is_err());
    assert!(!armed.load(Ordering::Relaxed));
    assert!(ring.release(range).is_err(), "it was not committed");
    ring.commit().unwrap();
    ring.release(range).unwrap();
    // The ring goes round: by and by it hands the address out again.
    let again = (0..1024).any(|_| {
        let next = ring.reserve(PAGE).unwrap();
        ring.release(next).unwrap();
        next == range
    });
    let reached = rig.reaches(range.start());
    // And another list may be mapped there, with the old one's translation in the device's hands.
    assert!(!(again && reached), "the address is handed out again, and reaches what was unlinked");
}

/// A link meets another mapping on its last page, and the queue panics when what it had entered is to be forgotten.
#[test]
fn a_link_that_panics_hands_no_address_out_that_hardware_may_know() {
    let rig = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
    let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(8192, PAGE, 1)).unwrap();
    let range = ring.reserve(4097 * PAGE).unwrap();
    let last = IovaRange::new(Iova::new(range.start().get() + 4096 * PAGE), PAGE).unwrap();
    ring.open_link(last, &[page(9000)], BOTH).unwrap();
    // Between two turns of the link the device uses what is entered.
    let iommu = Arc::clone(&rig.iommu);
    let first = range.start();
    rig.platform.after_each_turn(move || {
        let _ = iommu.access(DEVICE, first, 1, Permissions::WRITE);
    });
    rig.queue.set(|| panic!("as the test wants"));
    let list = [PhysSegment { len: 4097 * PAGE, ..page(1) }];
    assert!(catch_unwind(AssertUnwindSafe(|| ring.open_link(range, &list, BOTH))).is_err());
    rig.queue.clear();
    rig.platform.after_each_turn(|| ());
    ring.unlink(last).unwrap();
    ring.commit().unwrap();
    ring.release(range).unwrap();
    let reached = rig.reaches(first);
    let again = (0..4).any(|_| {
        let next = ring.reserve(4097 * PAGE).unwrap();
        ring.release(next).unwrap();
        next == range
    });
    assert!(!(again && reached), "the address is handed out again, and reaches what was not linked");
}
