//! Steps of a mapping's life that panic: the next confirmation covers them, and none of their addresses is handed out again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::addr::{Iova, IovaRange, Permissions, PhysSegment};
use portcullis::domain::{Policy, Refused};
use portcullis::invalidation::Gather;
use portcullis_model::Queue;
use portcullis_model::open::{OpenMapper, OpenReserved};

use crate::rig::{ANYWHERE, Clocked, DEVICE, Hooked, PAGE, Rig, page};

type Driver = Rig<Arc<Clocked>, Hooked<Queue>>;

const BOTH: Permissions = Permissions::READ_WRITE;

/// Whether as many addresses as `range` has are those of `range`, 64 times.
fn is_handed_out(rig: &Driver, range: IovaRange) -> bool {
    let reserved: Vec<_> = (0..64).map(|_| rig.domain.reserve(range.len(), ANYWHERE).unwrap()).collect();
    let is_met = reserved.iter().any(|reserved| reserved.range() == range);
    reserved.into_iter().for_each(|reserved| reserved.free());
    is_met
}

/// The platform panics when it has the CPU back in which an `unlink` cleared its entries.
#[test]
fn an_unlink_that_panics_is_covered_by_the_next_confirmation_and_its_address_not_handed_out() {
    let rig: Driver = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
    let mut gather = Gather::new();
    let reserved = rig.domain.reserve(PAGE, ANYWHERE).unwrap();
    let linked = reserved.open(&[page(1)], BOTH, &mut gather).map_err(Refused::end).unwrap();
    let range = linked.range();
    assert!(rig.reaches(range.start()));
    let armed = Arc::new(AtomicBool::new(true));
    rig.platform.after_each_turn({
        let armed = Arc::clone(&armed);
        move || assert!(!armed.swap(false, Ordering::Relaxed), "as the test wants")
    });
    assert!(catch_unwind(AssertUnwindSafe(|| linked.unlink(&mut gather).is_ok())).is_err());
    assert!(!armed.load(Ordering::Relaxed));
    assert_eq!(rig.domain.stats().lost_iova_bytes, PAGE);
    assert!(rig.reaches(range.start()), "it was not confirmed");
    assert!(!is_handed_out(&rig, range));
    rig.domain.confirm(&gather).unwrap();
    assert!(!rig.reaches(range.start()), "the gather has everything");
    assert!(!is_handed_out(&rig, range));
}

/// A link meets another mapping on its last page, and the queue panics when what it had entered is to be forgotten.
#[test]
fn a_link_that_panics_hands_no_address_out_that_hardware_may_know() {
    let rig: Driver = Rig::new(Clocked::new(2), Policy::Strict, Hooked::new);
    let len = 4097 * PAGE;
    let reserved = rig.domain.reserve(len, ANYWHERE).unwrap();
    let range = reserved.range();
    let last = IovaRange::new(Iova::new(range.start().get() + 4096 * PAGE), PAGE).unwrap();
    let stranger = [(page(9000).phys, PAGE)];
    rig.domain.mapper().open(&rig.platform, last, stranger, BOTH, &mut Gather::new()).unwrap();
    // Between two turns of the link the device uses what is entered.
    let iommu = Arc::clone(&rig.iommu);
    let first = range.start();
    rig.platform.after_each_turn(move || {
        let _ = iommu.access(DEVICE, first, 1, Permissions::WRITE);
    });
    rig.queue.set(|| panic!("as the test wants"));
    let list = [PhysSegment { len, ..page(1) }];
    let mut gather = Gather::new();
    let link = || reserved.open(&list, BOTH, &mut gather).is_ok();
    assert!(catch_unwind(AssertUnwindSafe(link)).is_err());
    rig.queue.clear();
    rig.platform.after_each_turn(|| ());
    assert!(rig.reaches(first), "or the test means nothing");
    assert_eq!(rig.domain.stats().lost_iova_bytes, range.len());
    assert!(!is_handed_out(&rig, range));
    rig.domain.confirm(&gather).unwrap();
    assert!(!rig.reaches(first), "the gather has everything");
}
